"""The runs of a study: which are complete, and how to run the others."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from equipoise.documents import read_json
from equipoise.errors import InputError, RunError
from equipoise.models import with_class_names
from equipoise.run.checksums import verify
from equipoise.run.directory import CONFIG, SUMMARY, read_config
from equipoise.run.files import Journal
from equipoise.run.plain import first_difference
from equipoise.run.processes import end_with_parent, started_by_torchrun, use_gpu
from equipoise.run.records import Row, average_rows, summarize_rows, task_of
from equipoise.study.metrics import WHICH

if TYPE_CHECKING:
    from equipoise.run.trainer import Progress
    from equipoise.study.plan import Job

_AGAIN = "without this file, the same command writes it again"
Watch = Callable[["Job", str], None]
Rounds = Callable[["Job"], "Callable[[Progress], None] | None"]


def check_directories(jobs: Iterable[Job], out: Path) -> None:
    """Refuse to run if one of the run directories holds another experiment."""
    for job in jobs:
        directory = out / job.path
        if not (directory / CONFIG).exists():
            continue
        if difference := _difference(directory, job):
            raise InputError(
                f"{directory} holds another experiment: {difference}; choose another directory "
                "with --out"
            )


def _difference(directory: Path, job: Job) -> str | None:
    """Return how the experiment of a run directory differs from that of a job, if it does."""
    found, wanted = read_config(directory), job.experiment.plain()
    del found["resolved"]
    # If the experiment has no names of classes, those of the data are used.
    wanted["model"] = with_class_names(wanted["model"], found["model"].get("class_names"))
    # Runs in one process have no Flower settings in their configuration.
    wanted.pop("flower", None)
    # Results do not depend on trackers and checkpoints, and on processes by rounding only.
    found.pop("tracking", None)
    for given in (found, wanted):
        given.pop("checkpoint_every", None)
        given["machine"].pop("processes", None)
    return first_difference(found, wanted)


def carry_over(job: Job, tuning: Path, out: Path) -> bool:
    """Copy a finished run of the same experiment from the directory of tuning, if it is missing.

    Parameters
    ----------
    job : Job
        The run.
    tuning, out : Path
        The directories of the runs of tuning and of the study.

    Returns
    -------
    bool
        Whether it was copied.
    """
    source, target = tuning / job.path_in_tuning, out / job.path
    if (
        target.exists()
        or not (source / SUMMARY).exists()
        or not (source / CONFIG).exists()
        or _difference(source, job)
    ):
        return False
    # Renamed when complete. A study that is killed in between copies the run again.
    beside = target.with_name(f".{target.name}.copy")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(source, beside)
    os.replace(beside, target)
    return True


def flat(mapping: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Return the values of nested mappings by dotted keys.

    Examples
    --------
    >>> dict(flat({"data": {"imbalance": 2, "partition": {"name": "iid"}}, "seed": 1}))
    {'data.imbalance': 2, 'data.partition.name': 'iid', 'seed': 1}
    """
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def finished(directory: Path, split: str, *, validation: bool = False) -> dict[str, Any] | None:
    """Return the summary of a split if the run is finished.

    ``validation``: whether results on validation data are needed.
    """
    path = directory / SUMMARY
    if not path.exists() or not (directory / CONFIG).exists():
        return None
    try:
        verify(directory, SUMMARY)
        summary: dict[str, Any] = read_json(path)
    except RunError as error:
        raise RunError(f"{error}; {_AGAIN}") from error
    if not isinstance(summary, dict):
        raise RunError(f"{path} is not a summary; {_AGAIN}")
    if missing := {"round", "score", "results"} - set(summary):
        raise RunError(f"{path} has no {', '.join(sorted(missing))}; {_AGAIN}")
    if "validation" not in summary and (validation or split == "val"):
        summary["validation"] = _validated(summary, directory)
    return _on_split(summary, split)


def _on_split(summary: dict[str, Any], split: str) -> dict[str, Any]:
    if split == "test":
        return summary
    tail = summary.get("tail", {})
    moved = {
        name: {**own, "results": own["validation"]} if name in WHICH else own
        for name, own in tail.items()
    }
    validated = {**summary, "results": summary["validation"], "tested": summary["results"]}
    if missing := summary.get("without_result"):
        validated["without_result"] = {**missing, "results": missing.get("validation", {})}
    if moved:
        validated["tail"] = moved
    if held := summary.get("server"):
        # In a study on validation data, the server's metrics are also those on validation data.
        validated["server"] = {kind: held["val"] for kind in ("val", "test") if "val" in held}
    return validated


def _validated(summary: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Add results on validation data to the summary of a run of an earlier release."""
    journal = Journal(directory / "metrics.jsonl")
    try:
        rows = [row for row in journal if row["round"] == summary["round"]]
        return summarize_rows(rows, task_of(summary), split="val")
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"cannot read {journal.path}: {type(error).__name__}: {error}") from error


def counted_rows(directory: Path, summary: Mapping[str, Any]) -> list[Row]:
    """Return the rows of ``metrics.jsonl`` behind a summary; none if they cannot be read.

    Examples
    --------
    >>> counted_rows(Path("no/such/run"), {"round": 3})
    []
    """
    tail = summary.get("tail", {}).get("rounds", [])
    rounds = set(tail) or {summary.get("round")}
    try:
        rows = [
            row for row in Journal(directory / "metrics.jsonl").complete() if row["round"] in rounds
        ]
        return average_rows(rows) if tail else rows
    except (OSError, ValueError, KeyError, TypeError):
        return []


def at_a_time(missing: int, cores: int, *, peak: int = 0, memory: int = 0, gpus: int = 1) -> int:
    """Return how many runs fill a machine.

    Parameters
    ----------
    missing : int
        The number of runs.
    cores : int
        The number of cores. There is one run per core, because small models gain little from more
        threads.
    peak, memory : int
        On a GPU, the bytes that a run has used at most, and those that there are. A tenth of the
        memory stays free, because runs differ. Beyond ``MOST_ON_GPU`` runs they only wait for each
        other.
    gpus : int
        How many GPUs share the runs.

    Returns
    -------
    int
        At least 1.

    Examples
    --------
    >>> at_a_time(30, 16), at_a_time(30, 16, peak=10 * 2**30, memory=80 * 2**30), at_a_time(3, 16)
    (16, 6, 3)
    >>> at_a_time(30, 16, peak=10 * 2**30, memory=80 * 2**30, gpus=2)
    12
    """
    fitting = [missing, cores]
    if memory:
        fitting += [gpus * min(MOST_ON_GPU, int(0.9 * memory) // (peak + GPU_CONTEXT))]
    return max(1, min(fitting))


MOST_ON_GPU = 8
# The bytes that a process uses on a GPU without any tensor.
GPU_CONTEXT = 2**29


def carry_out(
    missing: Sequence[Job],
    out: Path,
    jobs: int | None,
    split: str,
    tell: Watch,
    rounds: Rounds | None = None,
) -> Iterator[tuple[Job, dict[str, Any] | str]]:
    """Run jobs, and yield the summary of each on a split, or the reason of its failure.

    ``jobs`` is how many run at a time; with None as many as fill the cores or the GPUs. The
    processes in which they run use the GPUs of the machine in turn.
    """
    if started_by_torchrun():
        raise InputError(
            "a study starts its processes by itself; start it without torchrun, and say with "
            "--jobs how many runs there are at a time"
        )
    if jobs is None:
        cores, devices = (
            torch.get_num_threads(),
            [job.experiment.machine.torch_device for job in missing],
        )
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        cores //= max((job.experiment.machine.processes for job in missing), default=1)
        device = next((device for device in devices if device.type == "cuda"), None)
        use = {}
        if device is not None:
            # The first run is alone, to measure its memory.
            torch.cuda.reset_peak_memory_stats(device)
            first, missing = missing[0], missing[1:]
            tell(first, "begun")
            yield first, _run(first, out / first.path, split, torch.get_num_threads(), rounds)
            use = {
                "peak": torch.cuda.max_memory_reserved(device),
                "memory": torch.cuda.mem_get_info(device)[1],
                # Unless the settings name one.
                "gpus": torch.cuda.device_count() if device.index is None else 1,
            }
            torch.cuda.empty_cache()
        jobs = at_a_time(len(missing), cores, **use)
    if jobs == 1 or len(missing) < 2:
        for job in missing:
            tell(job, "begun")
            yield job, _run(job, out / job.path, split, torch.get_num_threads(), rounds)
        return
    threads = max(1, torch.get_num_threads() // jobs)
    # Not forked: PyTorch's threads do not survive that.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(jobs, len(missing)),
        context,
        initializer=_begin_process,
        initargs=(context.Value("i", 0), _on_gpu(missing)),
    )
    try:
        futures: dict[Future[dict[str, Any] | str], Job] = {
            pool.submit(_run, job, out / job.path, split, threads, rounds): job for job in missing
        }
        for future in as_completed(futures):
            error = future.exception()
            yield futures[future], f"its process ended: {error}" if error else future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _run(
    job: Job, directory: Path, split: str, threads: int, rounds: Rounds | None = None
) -> dict[str, Any] | str:
    """Run or resume one job, and return its summary or the reason of its failure."""
    on_round = rounds(job) if rounds else None
    try:
        broken_off = (directory / CONFIG).exists()
        with _threads(_recorded_threads(directory, threads) if broken_off else threads):
            run = job.experiment.run(directory, resume=broken_off, on_round=on_round)
        return _on_split(run.summary, split)
    except (InputError, RunError) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _recorded_threads(directory: Path, otherwise: int) -> int:
    """Return the threads of all processes of a run; others would round differently."""
    resolved = read_config(directory)["resolved"]
    recorded: int = resolved.get("threads", otherwise) * resolved.get("processes", 1)
    return recorded


def _on_gpu(jobs: Sequence[Job]) -> bool:
    return any(job.experiment.machine.torch_device.type == "cuda" for job in jobs)


def _begin_process(begun: Any, on_gpu: bool) -> None:
    """Let the processes of a study use the GPUs of the machine in turn, and end with the study."""
    end_with_parent()
    with begun.get_lock():
        number, begun.value = begun.value, begun.value + 1
    if on_gpu:
        use_gpu(number)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
