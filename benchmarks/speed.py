"""Compare the speed of Equipoise with other simulators: ``python -m benchmarks.speed --help``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import jobs
from benchmarks.environments import PEERS, ROOT, Choices, Peer, interpreter, variables
from benchmarks.machine import (
    Rates,
    cost_of_step,
    in_words,
    measured_apart,
    percent,
    rounded,
    scaled,
)
from benchmarks.protocol import Job
from equipoise.errors import InputError, RunError, unknown
from equipoise.models import build

REFEREE = "bare"
OURS = "equipoise"
# Full float32 lands far below, TF32 far above.
FLOAT32_ERROR = 1e-5

Results = dict[str, list[dict[str, Any]]]
"""The results of one job: by peer, one for each repeat."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return 0 if it is valid, 1 if a peer failed, 2 for bad input."""
    arguments = _parser().parse_args(argv)
    try:
        names = _chosen("job", arguments.jobs, jobs.NAMES, "--jobs")
        peers = [PEERS[name] for name in _chosen("peer", arguments.peers, PEERS, "--peers")]
        choices = Choices(
            _pairs(arguments.env, "--env"), _pairs(arguments.pythonpath, "--pythonpath")
        )
        _check(arguments)
        peers, notes = _able(peers, arguments.device)
        notes += _busy()
        for note in notes:
            print(note, file=sys.stderr, flush=True)
        report = _compare(names, peers, choices, arguments)
    except (InputError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    report["notes"] = notes
    text = markdown(report)
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "speed.json").write_text(json.dumps(report, indent=2) + "\n")
    (arguments.out / "speed.md").write_text(text + "\n")
    return 1 if any(job["problems"] for job in report["jobs"].values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description="Train the same jobs with Equipoise and its peers; compare client-steps per "
        "second and results.",
        epilog="example: python -m benchmarks.speed --jobs small pfl --peers bare pfl equipoise "
        "--repeats 3",
    )
    parser.add_argument(
        "--jobs", nargs="+", default=list(jobs.NAMES), metavar="JOB", help=", ".join(jobs.NAMES)
    )
    parser.add_argument(
        "--peers", nargs="+", default=list(PEERS), metavar="PEER", help=", ".join(PEERS)
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--rounds", type=int, help="timed rounds, in place of each job's own number"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="times each peer is run, peers taking turns (default 3)",
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="torch threads for every peer (default 2)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="processes of Equipoise, which share its threads (default 1)",
    )
    parser.add_argument(
        "--tf32", action="store_true", help="let every peer's timed pass use TF32 on a GPU"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few rounds and one repeat: does everything run?"
    )
    parser.add_argument(
        "--timeout", type=float, default=1800, help="seconds one peer may take (default 1800)"
    )
    parser.add_argument(
        "--env", nargs="+", default=[], metavar="PEER=DIR", help="virtual environment of a peer"
    )
    parser.add_argument(
        "--pythonpath",
        nargs="+",
        default=[],
        metavar="PEER=DIR",
        help="run a peer with this Python, importing from DIR",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/speed"), help="directory for speed.json and speed.md"
    )
    return parser


def _chosen(kind: str, names: Iterable[str], valid: Iterable[str], where: str) -> list[str]:
    valid = list(valid)
    for name in names:
        if name not in valid:
            raise unknown(kind, name, valid, where=where)
    return list(dict.fromkeys(names))


def _pairs(texts: Iterable[str], where: str) -> dict[str, Path]:
    pairs = {}
    for text in texts:
        peer, separator, directory = text.partition("=")
        if peer not in PEERS:
            raise unknown("peer", peer, PEERS, where=where)
        if not separator or not Path(directory).is_dir():
            raise InputError(
                f"{where} {text!r} names no directory; write PEER=DIR with a directory that exists"
            )
        pairs[peer] = Path(directory).absolute()
    return pairs


def _check(arguments: argparse.Namespace) -> None:
    for option in ("rounds", "repeats", "threads", "processes"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise InputError(f"--{option} is {value}; it must be at least 1")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is 'cuda', but PyTorch finds no GPU here; valid: cpu")


def _able(peers: list[Peer], device: str) -> tuple[list[Peer], list[str]]:
    """Leave out the peers that cannot run here, and say why."""
    able, notes = [], []
    for peer in peers:
        if device not in peer.devices:
            notes.append(f"{peer.name} left out: it runs on {', '.join(peer.devices)} only")
        elif not peer.path.exists():
            notes.append(f"{peer.name} left out: there is no {peer.path.relative_to(ROOT)}")
        else:
            able.append(peer)
    return able, notes


def _busy() -> list[str]:
    """Warn of other work on the machine, by which threads lose far more than a share of a core."""
    load = os.getloadavg()[0]
    return (
        [f"machine busy: load average {load:.1f} before the first run; timings are unreliable"]
        if load > 0.5
        else []
    )


def _compare(
    names: list[str], peers: list[Peer], choices: Choices, arguments: argparse.Namespace
) -> dict[str, Any]:
    pythons = {peer.name: interpreter(peer, choices) for peer in peers}
    precision = "tf32" if arguments.tf32 else "float32"
    rates = measured_apart(arguments.device, precision=precision, threads=arguments.threads)
    report: dict[str, Any] = {
        "device": arguments.device,
        "machine": dataclasses.asdict(rates),
        "tf32": arguments.tf32,
        "threads": arguments.threads,
        "jobs": {},
    }
    for name in names:
        job = jobs.make(
            name,
            device=arguments.device,
            threads=arguments.threads,
            rounds=arguments.rounds,
            quick=arguments.quick,
            tf32=arguments.tf32,
            processes=arguments.processes,
        )
        with tempfile.TemporaryDirectory(prefix=f"speed-{name}-") as temporary:
            directory = Path(temporary)
            jobs.materialize(job, directory)
            results, failures = _measure(job, directory, peers, pythons, choices, arguments)
            limit = limit_of(job, rates)
            distances = _distances(directory, results)
            report["jobs"][name] = summarize(job, results, distances, failures, limit)
    return report


def limit_of(job: Job, rates: Rates) -> dict[str, Any]:
    """Return what a client-step of a job needs, and how many a second a machine can make at most.

    Parameters
    ----------
    job : Job
        What is trained.
    rates : Rates
        What the machine can do.

    Returns
    -------
    dict
        See ``Cost.limit``.

    Examples
    --------
    >>> job = jobs.make("small", device="cpu", threads=2)
    >>> limit_of(job, Rates(2e9, 1e9, "here", "float32"))["bound"]
    'operations'
    """
    model = build(job.model, shape=job.shape, classes=job.classes, **job.options)
    batch = jobs.draw(dataclasses.replace(job, clients=1))[0][0, : job.batch]
    return cost_of_step(model, batch).limit(rates)


def _measure(
    job: Job,
    directory: Path,
    peers: list[Peer],
    pythons: dict[str, Path],
    choices: Choices,
    arguments: argparse.Namespace,
) -> tuple[Results, dict[str, str]]:
    """Run the peers in turn, so that slow times of the machine affect all of them alike."""
    results: Results = {peer.name: [] for peer in peers}
    failures: dict[str, str] = {}
    repeats = 1 if arguments.quick else arguments.repeats
    for repeat in range(repeats):
        for peer in peers:
            if peer.name in failures:
                continue
            what = f"{job.name} {repeat + 1}/{repeats} {peer.name}"
            out = directory / f"{peer.name}-{repeat}.json"
            command = [
                pythons[peer.name],
                peer.path,
                "--job",
                directory,
                "--device",
                arguments.device,
                "--out",
                out,
            ]
            try:
                # One exactness pass is enough: it has no spread.
                _run(
                    [*map(str, command), *(["--no-exact"] if repeat else [])],
                    peer,
                    choices,
                    arguments,
                )
            except RunError as error:
                failures[peer.name] = str(error)
                print(f"{what}: {error}", file=sys.stderr, flush=True)
                continue
            results[peer.name].append(json.loads(out.read_text()))
            rate = rounded(results[peer.name][-1]["client_steps_per_second"]["median"])
            print(f"{what}: {rate} client-steps/s", file=sys.stderr, flush=True)
    return results, failures


def _run(command: list[str], peer: Peer, choices: Choices, arguments: argparse.Namespace) -> None:
    """Run one peer to its end, in a process group of its own, which can be ended as a whole."""
    process = subprocess.Popen(
        command,
        env=variables(peer, choices, arguments.threads),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=arguments.timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise RunError(
                f"peer {peer.name!r} took more than --timeout {arguments.timeout:g} s"
            ) from None
        raise
    if process.returncode != 0:
        tail = "\n".join(output.splitlines()[-15:])
        raise RunError(f"peer {peer.name!r} failed with exit code {process.returncode}:\n{tail}")


def _distances(directory: Path, results: Results) -> dict[str, dict[str, float]]:
    """Measure how far each peer's final parameters are from the bare loop's: see ``distance``."""
    finals = {
        peer: torch.load(directory / f"{peer}-0.pt", weights_only=True)
        for peer, runs in results.items()
        if runs
    }
    if REFEREE not in finals:
        return {}
    initial = torch.load(directory / "initial.pt", weights_only=True)
    return {peer: distance(final, finals[REFEREE], initial) for peer, final in finals.items()}


def distance(
    final: dict[str, torch.Tensor],
    reference: dict[str, torch.Tensor],
    initial: dict[str, torch.Tensor],
) -> dict[str, float]:
    """Measure how far parameters are from a reference, all of them as one vector.

    Parameters
    ----------
    final, reference, initial : dict of str to Tensor
        Parameters by name: the peer's, the bare loop's, and those that both began with.

    Returns
    -------
    dict of str to float
        ``relative``: the distance over the reference's length. ``of_move``: over the length of the
        way the reference has come from the initial weights, so that a peer which trains nothing at
        all has 1.

    Examples
    --------
    >>> start, here, there = ({"w": torch.tensor([value])} for value in (3.0, 4.0, 4.5))
    >>> distance(there, here, start)
    {'relative': 0.125, 'of_move': 0.5}
    """
    if final.keys() != reference.keys():
        raise RunError(f"parameters differ in name: {sorted(final.keys() ^ reference.keys())[:3]}")

    def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensors[name].double().flatten() for name in reference])

    apart = (flat(final) - flat(reference)).norm()
    return {
        "relative": float(apart / flat(reference).norm()),
        "of_move": float(apart / (flat(reference) - flat(initial)).norm()),
    }


def summarize(
    job: Job,
    results: Results,
    distances: dict[str, dict[str, float]],
    failures: dict[str, str],
    limit: dict[str, Any],
) -> dict[str, Any]:
    """Reduce the repeats of a job to medians and spreads, and name what makes them incomparable."""
    rows: dict[str, Any] = {}
    problems = list(failures.values())
    for peer, runs in results.items():
        if not runs:
            continue
        rates = [run["client_steps_per_second"]["median"] for run in runs]
        rows[peer] = {
            "client_steps_per_second": statistics.median(rates),
            "lowest": min(rates),
            "highest": max(rates),
            "client_steps_per_second_total": statistics.median(
                run["client_steps_per_second"]["total"] for run in runs
            ),
            "seconds_per_round": statistics.median(run["seconds_per_round"] for run in runs),
            "share_of_limit": statistics.median(rates) / limit["client_steps_per_second"],
            "peak": {key: max(run["peak"][key] for run in runs) for key in runs[0]["peak"]},
            "distance": distances.get(peer),
            "threads": runs[0]["threads"],
            "device": runs[0]["device"],
            "versions": runs[0]["versions"],
            "runs": runs,
        }
        if peer in distances and not distances[peer]["of_move"] <= job.tolerance:
            problems.append(
                f"{peer} did not do the same work: its parameters are "
                f"{distances[peer]['of_move']:.1e} of the way from the bare loop's, more than "
                f"{job.tolerance:.0e}"
            )
        worst = max(error for run in runs for error in run["float32_error"].values())
        if not (job.tf32 or worst <= FLOAT32_ERROR):
            problems.append(
                f"{peer} did not compute in full float32: error {worst:.1e}; TF32 must be off"
            )
    ratios = {}
    if OURS in rows:
        ours = rows[OURS]["client_steps_per_second"]
        ratios = {
            peer: ours / row["client_steps_per_second"]
            for peer, row in rows.items()
            if peer != OURS
        }
    return {
        "about": jobs.ABOUT[job.name],
        "rounds": job.timed.rounds,
        "steps_per_round": job.steps_per_round,
        "limit": limit,
        "peers": rows,
        "ratios": ratios,
        "problems": problems,
    }


def markdown(report: dict[str, Any]) -> str:
    """Write the report as Markdown that also reads well on a terminal."""
    lines = [f"# Speed on {report['device']}{', TF32 allowed' if report['tf32'] else ''}"]
    lines += ["", f"Measured rates of the machine: {in_words(Rates(**report['machine']))}."]
    for name, job in report["jobs"].items():
        lines += ["", f"## {name}: {job['about']}", ""]
        header = [
            "peer",
            "client-steps/s",
            "spread",
            "of limit",
            "s/round",
            "memory MiB",
            "GPU MiB",
            "distance",
            "of the way",
            "equipoise is",
        ]
        rows = [_row(peer, row, job["ratios"]) for peer, row in job["peers"].items()]
        limit, steps = job["limit"], job["steps_per_round"]
        highest = limit["client_steps_per_second"]
        last = ["limit", rounded(highest), "-", "100 %", f"{steps / highest:.3g}"]
        rows.append([*last, *["-"] * (len(header) - len(last))])
        lines += _table([header, *rows])
        lines += [
            "",
            f"{job['rounds']} timed rounds of {steps} client-steps. A client-step takes "
            f"{scaled(limit['operations'])}FLOP and {scaled(limit['bytes'])}B at least; the limit "
            f"is that of {limit['bound']}.",
        ]
        for peer, row in job["peers"].items():
            versions = ", ".join(
                f"{package} {version}" for package, version in row["versions"].items()
            )
            lines.append(
                f"- {peer}: runs {len(row['runs'])}, on {row['device']}, {row['threads']}; "
                f"{versions}"
            )
        lines += [f"- **problem**: {problem}" for problem in job["problems"]]
    return "\n".join(
        [*lines, *(["", *(f"- {note}" for note in report["notes"])] if report["notes"] else [])]
    )


def _row(peer: str, row: dict[str, Any], ratios: dict[str, float]) -> list[str]:
    peak = row["peak"]
    return [
        peer,
        rounded(row["client_steps_per_second"]),
        f"{rounded(row['lowest'])} … {rounded(row['highest'])}",
        percent(row["share_of_limit"]),
        f"{row['seconds_per_round']:.3g}",
        f"{peak['resident_mib']:,.0f}",
        f"{peak['cuda_reserved_mib']:,.0f}" if "cuda_reserved_mib" in peak else "-",
        f"{row['distance']['relative']:.1e}" if row["distance"] else "-",
        f"{row['distance']['of_move']:.1e}" if row["distance"] else "-",
        f"{ratios[peer]:.2f} times as fast" if peer in ratios else "-",
    ]


def _table(cells: list[list[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return [lines[0], rule, *lines[1:]]


if __name__ == "__main__":
    sys.exit(main())
