"""Client-steps per second over cohort size, model size, precision and chunk size.

    python -m benchmarks.scaling --device cuda --models pflcnn --cohorts 10 50 200 1000
    python -m benchmarks.scaling --device cuda --models pflcnn --cohorts 200 --chunks 10 25 50 100
    python -m benchmarks.scaling --out runs/scaling --show

Every cell is a line of ``scaling.jsonl`` in ``--out``, so that a grid can be measured in pieces.
From all lines there, ``scaling.md`` (tables) and ``scaling.png`` (log-log) are made at the end;
``--show`` does only that. A cell trains FedAvg for a few rounds with the engine's own round loop,
without evaluation. Cells that would not fit into memory are left out and named. The machine's rates
are measured once for each precision; a cell's share is that of the limit that follows from them
(``benchmarks.machine``).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import Rates, cost_of_step, in_words, measured_apart, percent, rounded
from benchmarks.million import Pause
from equipoise.engine.settings import Machine, Training
from equipoise.errors import InputError, unknown
from equipoise.federation import Federation, Split
from equipoise.methods import build as build_method
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Progress, Trainer

_VECTOR, _IMAGE = (64,), (3, 32, 32)
# By rising number of parameters; the comments count them.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "mlp-1k": ("mlp", {"hidden": [12]}, _VECTOR),  # 910
    "mlp-5k": ("mlp", {"hidden": [64]}, _VECTOR),  # 4,810, job small
    "vit-80k": ("vit", {"patch": 4}, _IMAGE),  # 75,082
    "mlp-300k": ("mlp", {"hidden": [512, 512]}, _VECTOR),  # 301,066
    "pflcnn": ("pflcnn", {}, _IMAGE),  # 1,626,442, job pfl
    "resnet18": ("resnet18", {"norm": "batch"}, _IMAGE),  # 11,173,962, job big
    "vit-10m": (
        "vit",
        {"patch": 4, "width": 256, "depth": 12, "mlp_ratio": 4.0},
        _IMAGE,
    ),  # 9,509,642
    "vit-100m": (
        "vit",
        {"patch": 4, "width": 768, "depth": 14, "heads": 12, "mlp_ratio": 4.0},
        _IMAGE,
    ),  # 99,327,754
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "tf32": {"tf32": True},
    "bfloat16": {"precision": "bfloat16"},
}
COHORTS = (10, 30, 100, 300, 1000, 3000, 10_000)
BATCH, POOL, WARM_UP = 10, 2000, 4
# A round holds the cohort's parameters about this many times over: as sent, as trained, and in sums
# in float64.
_COPIES = 5


def federation(clients: int, samples: int, shape: tuple[int, ...]) -> Federation:
    """Make clients that hold samples of a small pool which they share."""
    rng = np.random.default_rng(0)
    nobody = Split(np.empty(0, np.int64), np.zeros(clients + 1, np.int64))
    return Federation(
        x=torch.from_numpy(rng.standard_normal((POOL, *shape), dtype=np.float32)),
        y=torch.from_numpy(rng.integers(0, 10, POOL)),
        train=Split(rng.integers(0, POOL, clients * samples), np.arange(clients + 1) * samples),
        val=nobody,
        test=nobody,
        groups=np.zeros(clients, np.int64),
        group_names=("all",),
        unseen=np.zeros(clients, bool),
        classes=10,
    )


def measure(
    name: str,
    cohort: int,
    precision: str,
    chunk: int | str,
    *,
    device: str,
    steps: int,
    seconds: float,
    rates: Rates,
) -> dict[str, Any]:
    """Measure one cell.

    Parameters
    ----------
    name : str
        One of ``MODELS``.
    cohort : int
        How many clients train in a round; no others are registered.
    precision : str
        One of ``PRECISIONS``.
    chunk : int or "auto"
        As in the machine settings.
    device : str
        ``"cpu"`` or ``"cuda"``.
    steps : int
        Local steps of each client in a round, of ten samples.
    seconds : float
        About how long rounds are timed, after warm-up. At least two are.
    rates : Rates
        What the machine can do in this precision.

    Returns
    -------
    dict
        ``client_steps_per_second`` is that of the median round, ``share_of_limit`` its share of the
        machine's ``limit``, which has an entry of the same name.
    """
    model, options, shape = MODELS[name]
    module = build_model(model, shape=shape, classes=10, **options)
    data = federation(cohort, steps * BATCH, shape)
    limit = cost_of_step(module, data.x[:BATCH], precision=precision).limit(rates)
    trainer = Trainer(
        data,
        build_method("fedavg"),
        module,
        Training(rounds=10**9, cohort=cohort, batch_size=BATCH, optimizer=Sgd(lr=1e-3)),
        Machine(device=device, chunk=chunk, **PRECISIONS[precision]),
        Evaluation(every=0),
        seed=0,
    )
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    ticks: list[float] = []

    def tick(progress: Progress) -> None:
        ticks.append(time.perf_counter())
        timed = len(ticks) - WARM_UP
        if timed >= 2 and (ticks[-1] - ticks[WARM_UP - 1] >= seconds or timed == 200):
            raise Pause

    # Rounds are carried out plainly, then step by step, then as a whole when they are recorded.
    with suppress(Pause):
        trainer.run(tick)
    timed = [after - before for before, after in pairwise(ticks[WARM_UP - 1 :])]
    median = statistics.median(timed)
    rate = cohort * steps / median
    return {
        "model": name,
        "parameters": sum(p.numel() for p in module.parameters()),
        "cohort": cohort,
        "precision": precision,
        "chunk": chunk,
        "used_chunk": trainer.engine.chunk,
        "steps": steps,
        "client_steps_per_second": rate,
        "limit": limit,
        "share_of_limit": rate / limit["client_steps_per_second"],
        "rates": dataclasses.asdict(rates),
        "seconds_per_round": median,
        "slowest": max(timed),
        "fastest": min(timed),
        "rounds": len(timed),
        "gpu_mib": torch.cuda.max_memory_reserved() >> 20 if on_gpu else None,
        "slowed_by": trainer.engine.slowed_by,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
    }


def fits(name: str, cohort: int, device: str) -> bool:
    """Return whether a cohort's parameters fit into memory."""
    if not device.startswith("cuda"):
        return True
    model, options, shape = MODELS[name]
    with torch.device("meta"):
        module = build_model(model, shape=shape, classes=10, **options)
    size = sum(p.numel() for p in module.parameters()) * 4 * cohort * _COPIES
    return size < 0.6 * torch.cuda.get_device_properties(0).total_memory


# ---- tables and the picture ----------------------------------------------------------------------


def latest(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the latest measurement of each cell, by model, precision, cohort and chunk.

    Examples
    --------
    >>> cell = {"model": "mlp-1k", "precision": "tf32", "cohort": 10, "chunk": "auto"}
    >>> cell["device"] = "cpu"
    >>> latest([{**cell, "rounds": 1}, {**cell, "rounds": 2}])[0]["rounds"]
    2
    """
    names = ("model", "precision", "cohort", "chunk", "device")
    cells = {tuple(line[name] for name in names): line for line in lines}
    order = {name: position for position, name in enumerate(MODELS)}

    def place(line: dict[str, Any]) -> tuple[Any, ...]:
        chunk = -1 if line["chunk"] == "auto" else line["chunk"]
        return order[line["model"]], line["precision"], line["cohort"], chunk

    return sorted(cells.values(), key=place)


def markdown(lines: Sequence[dict[str, Any]]) -> str:
    """Write tables: chunk sizes by rule over cohorts, and given chunk sizes."""
    text = [
        "# Client-steps per second",
        "",
        "Beside each: the share of the machine's limit.",
        "",
    ]
    by_rule = [line for line in lines if line["chunk"] == "auto"]
    given = [line for line in lines if line["chunk"] != "auto"]
    if by_rule:
        cohorts = sorted({line["cohort"] for line in by_rule})
        text += [
            "Chunk size by rule (in brackets); columns are cohort sizes.",
            "",
            "| model | precision | limit | " + " | ".join(f"{each:,}" for each in cohorts) + " |",
            "|---|---|---:|" + "---:|" * len(cohorts),
        ]
        for (model, precision), own in _grouped(by_rule, "model", "precision"):
            cells = {
                line["cohort"]: _cell(line, f" ({min(line['used_chunk'], line['cohort'])})")
                for line in own
            }
            row = " | ".join(cells.get(cohort, "") for cohort in cohorts)
            text.append(f"| {model} | {precision} | {_limit(own)} | {row} |")
    if given:
        chunks = sorted({line["chunk"] for line in given})
        text += [
            "",
            "Given chunk sizes, in columns.",
            "",
            "| model | precision | limit | cohort | " + " | ".join(map(str, chunks)) + " |",
            "|---|---|---:|---:|" + "---:|" * len(chunks),
        ]
        for (model, precision, cohort), own in _grouped(given, "model", "precision", "cohort"):
            cells = {line["chunk"]: _cell(line) for line in own}
            row = " | ".join(cells.get(chunk, "") for chunk in chunks)
            text.append(f"| {model} | {precision} | {_limit(own)} | {cohort:,} | {row} |")
    machines = {f"- {line['device']}, PyTorch {line['torch']}" for line in lines}
    rates = {in_words(Rates(**line["rates"])) for line in _limited(lines)}
    measured = [f"- Measured rates of the machine: {words}" for words in sorted(rates)]
    return "\n".join([*text, "", *sorted(machines), *measured, ""])


def _cell(line: dict[str, Any], chunk: str = "") -> str:
    share = f", {percent(line['share_of_limit'])}" if _limited([line]) else ""
    return rounded(line["client_steps_per_second"]) + chunk + share


def _limit(lines: Sequence[dict[str, Any]]) -> str:
    found = [line["limit"]["client_steps_per_second"] for line in _limited(lines)]
    return rounded(found[-1]) if found else ""


def _limited(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines with a limit; journals of earlier versions have none."""
    return [line for line in lines if "limit" in line]


def _grouped(
    lines: Iterable[dict[str, Any]], *names: str
) -> list[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in names), []).append(line)
    return list(groups.items())


def picture(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw rates over cohorts for chunk sizes by rule, and over given chunk sizes, by precision."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [
        (what, [line for line in lines if (line["chunk"] == "auto") == by_rule])
        for what, by_rule in (("cohort", True), ("chunk", False))
    ]
    rows = [(what, own) for what, own in rows if own]
    precisions = [name for name in PRECISIONS if any(line["precision"] == name for line in lines)]
    figure = Figure(figsize=(4.2 * len(precisions), 3.6 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), len(precisions), squeeze=False, sharey=True)
    colours = {name: f"C{position}" for position, name in enumerate(MODELS)}
    for (what, own), across in zip(rows, panels, strict=True):
        for precision, panel in zip(precisions, across, strict=True):
            here = [line for line in own if line["precision"] == precision]
            names = ("model",) if what == "cohort" else ("model", "cohort")
            for group, cells in _grouped(here, *names):
                label = group[0] if what == "cohort" else f"{group[0]}, cohort {group[1]:,}"
                panel.loglog(
                    [line[what] for line in cells],
                    [line["client_steps_per_second"] for line in cells],
                    marker="o",
                    markersize=3,
                    color=colours[group[0]],
                    label=label,
                )
            panel.set(title=precision, xlabel=f"{what} size")
            panel.grid(visible=True, which="both", alpha=0.2)
            if here:
                panel.legend(fontsize=6)
        across[0].set_ylabel("client-steps/s")
    figure.savefig(path, dpi=150)


# ---- the command line ----------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--cohorts", nargs="+", type=int, default=list(COHORTS))
    parser.add_argument(
        "--precisions", nargs="+", default=list(PRECISIONS), help=", ".join(PRECISIONS)
    )
    parser.add_argument(
        "--chunks", nargs="+", default=["auto"], help="chunk sizes, or auto for the rule"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=5, help="local steps a round (default 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="timed seconds a cell")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all cells")
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"))
    parser.add_argument("--show", action="store_true", help="measure nothing; show what is there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure cells, and show all that have been measured; 2 for bad input."""
    given = _parser().parse_args(argv)
    try:
        chunks = _checked(given)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    journal = given.out / "scaling.jsonl"
    if not given.show:
        _measure_all(given, chunks, journal)
    lines = latest(json.loads(line) for line in journal.read_text().splitlines())
    text = markdown(lines)
    (given.out / "scaling.md").write_text(text)
    print(text)
    try:
        picture(lines, given.out / "scaling.png")
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
    return 0


def _checked(given: argparse.Namespace) -> list[int | str]:
    """Check the choices, and return the chunk sizes."""
    for kind, names, valid in (
        ("model", given.models, MODELS),
        ("precision", given.precisions, PRECISIONS),
    ):
        for name in names:
            if name not in valid:
                raise unknown(kind, name, valid, where=f"--{kind}s")
    chunks: list[int | str] = []
    for chunk in given.chunks:
        if chunk != "auto" and not (chunk.isdecimal() and int(chunk) > 0):
            raise InputError(f"--chunks has {chunk!r}; valid: numbers of at least 1, or auto")
        chunks.append(chunk if chunk == "auto" else int(chunk))
    if min(given.cohorts) < 1 or given.steps < 1:
        raise InputError("--cohorts and --steps must be at least 1")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is 'cuda', but PyTorch finds no GPU here; valid: cpu")
    if given.show and not (given.out / "scaling.jsonl").exists():
        raise InputError(f"--show: there is no scaling.jsonl in {given.out}")
    return chunks


def _measure_all(given: argparse.Namespace, chunks: Sequence[int | str], journal: Path) -> None:
    threads = torch.get_num_threads()
    rates = {
        precision: measured_apart(given.device, precision=precision, threads=threads)
        for precision in given.precisions
    }
    begin = time.perf_counter()
    cells = [
        (model, precision, cohort, chunk)
        for model in given.models
        for precision in given.precisions
        for cohort in given.cohorts
        for chunk in chunks
        if chunk == "auto" or chunk <= cohort
    ]
    for model, precision, cohort, chunk in cells:
        what = f"{model} {precision}, cohort {cohort}, chunk {chunk}"
        if time.perf_counter() - begin > given.budget:
            print(f"{what}: left out, --budget is spent", file=sys.stderr, flush=True)
            continue
        if not fits(model, cohort, given.device):
            print(f"{what}: left out, does not fit into memory", file=sys.stderr, flush=True)
            continue
        how = {"device": given.device, "steps": given.steps, "seconds": given.seconds}
        try:
            line = measure(model, cohort, precision, chunk, rates=rates[precision], **how)
        except torch.OutOfMemoryError as error:
            print(f"{what}: {str(error)[:120]}", file=sys.stderr, flush=True)
            continue
        finally:
            gc.collect()
            if given.device == "cuda":
                torch.cuda.empty_cache()
        with journal.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{what}: {_cell(line)} of the limit", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
