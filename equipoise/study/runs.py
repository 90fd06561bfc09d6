"""The runs of a study: which of them are done, and how the others are carried out."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from equipoise.engine.task import Task
from equipoise.errors import InputError, RunError
from equipoise.run.api import CONFIG, SUMMARY, read_config
from equipoise.run.files import Journal
from equipoise.run.records import summarize_rows

if TYPE_CHECKING:
    from equipoise.study.plan import Job

Watch = Callable[["Job", str], None]


def finished(job: Job, directory: Path) -> dict[str, Any] | None:
    """Give the summary if this very experiment is done."""
    if not (directory / SUMMARY).exists() or not (directory / CONFIG).exists():
        return None
    config = read_config(directory)
    del config["resolved"]
    if config != job.experiment.plain():
        return None
    summary: dict[str, Any] = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    return summary


def on_split(summary: dict[str, Any], directory: Path, split: str) -> dict[str, Any]:
    """Give the summary with the results of another split than the test split, worked out from the run's rows."""
    if split == "test":
        return summary
    rows = (row for row in Journal(directory / "metrics.jsonl") if row["round"] == summary["round"])
    task = Task("regression" if summary["score"] == "loss" else "classification")
    return {**summary, "results": summarize_rows(rows, task, split=split)}


def carry_out(missing: Sequence[Job], out: Path, jobs: int, tell: Watch) -> Iterator[tuple[Job, dict[str, Any] | str]]:
    """Run jobs, so many at a time, and give the summary of each, or why there is none, as they end."""
    if jobs == 1 or len(missing) < 2:
        for job in missing:
            tell(job, "begun")
            yield job, _run(job, out / job.path, torch.get_num_threads())
        return
    threads = max(1, torch.get_num_threads() // jobs)
    # Not forked: PyTorch's threads do not survive that.
    pool = ProcessPoolExecutor(
        min(jobs, len(missing)), multiprocessing.get_context("spawn"), initializer=_end_with_parent
    )
    try:
        futures: dict[Future[dict[str, Any] | str], Job] = {
            pool.submit(_run, job, out / job.path, threads): job for job in missing
        }
        for future in as_completed(futures):
            error = future.exception()
            yield futures[future], f"its process ended: {error}" if error else future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _run(job: Job, directory: Path, threads: int) -> dict[str, Any] | str:
    """Run one job, from the start or from where it was broken off; give its summary, or why there is none."""
    try:
        broken_off = (directory / CONFIG).exists()
        # A run keeps its number of threads: another one would round differently.
        recorded = read_config(directory)["resolved"].get("threads", threads) if broken_off else threads
        with _threads(recorded):
            return job.experiment.run(directory, resume=broken_off).summary
    except (InputError, RunError) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _end_with_parent() -> None:
    """Keep a process whose study was killed from going on writing beside the next one."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
