"""The runs of a report, and their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equipoise.documents import read_json
from equipoise.errors import InputError, RunError
from equipoise.report.reading import RunRecord, is_run, read_run
from equipoise.study.metrics import BETTER, kind_of
from equipoise.study.runs import flat

# Keys in which runs of the same experiment may differ: seeds and machines.
_NOT_COMPARED = (
    "seed",
    "data.seed",
    "machine.",
    "resolved.",
    "checkpoint_every",
    "flower.",
    "imports",
    "tracking",
)


@dataclass(frozen=True)
class Entry:
    """A run in a report.

    Attributes
    ----------
    setting : str
        The setting of its study; empty for runs that are not from a study.
    label : str
        The label of its method. Runs with the same setting and label differ in their seeds.
    record : RunRecord
        The run.
    metrics : tuple of str
        The metrics of its study, if the study has written its results.
    """

    setting: str
    label: str
    record: RunRecord
    metrics: tuple[str, ...] = ()


def find_entries(
    paths: Sequence[str | Path], *, trust: bool = False
) -> tuple[list[Entry], dict[Path, str]]:
    """Find and read the runs in directories.

    Parameters
    ----------
    paths : sequence of paths
        Run directories, and directories of studies, whose runs are in
        ``<setting>/<method>/seed<k>``.
    trust : bool
        Whether to execute the code that runs import, if their tasks are defined there.

    Returns
    -------
    list of Entry
        All runs that can be reported.
    dict
        The runs of studies that are left out, because they are damaged or have no evaluated round
        yet, with the reason.

    Raises
    ------
    InputError
        If a path is not such a directory, or if it has no run.

    Examples
    --------
    >>> find_entries(["no/such/run"])
    Traceback (most recent call last):
    equipoise.errors.InputError: no/such/run does not exist; valid: a run directory or the directory
    of a study
    """
    if not paths:
        raise InputError(
            "there is nothing to report; valid: a run directory or the directory of a study"
        )
    single: list[RunRecord] = []
    entries: list[Entry] = []
    left_out: dict[Path, str] = {}
    for path in dict.fromkeys(Path(path) for path in paths):
        if not path.exists():
            raise InputError(
                f"{path} does not exist; valid: a run directory or the directory of a study"
            )
        if not path.is_dir():
            raise InputError(
                f"{path} is a file; valid: a run directory or the directory of a study"
            )
        if is_run(path):
            single.append(read_run(path, trust=trust))
        else:
            found, failed = _study(path, trust=trust)
            entries += found
            left_out |= failed
    # Runs with different scores are not compared, so they need not be told apart.
    alike: dict[str, list[RunRecord]] = {}
    for record in single:
        alike.setdefault(record.compared_by, []).append(record)
    return entries + [entry for own in alike.values() for entry in _labelled(own)], left_out


def _study(directory: Path, *, trust: bool) -> tuple[list[Entry], dict[Path, str]]:
    found = sorted(
        (path.parent for path in directory.glob("*/*/seed*/config.yaml")), key=_by_number
    )
    if not found:
        raise InputError(
            f"{directory} holds no run and no study: there is neither a config.yaml in it nor in "
            "any <setting>/<method>/seed<k> below it"
        )
    order, metrics = _results(directory)
    entries: list[Entry] = []
    left_out: dict[Path, str] = {}
    for run in found:
        try:
            record = read_run(run, trust=trust)
        except (InputError, RunError) as error:
            # A study can be reported even if some of its runs have just started or are damaged.
            left_out[run] = str(error)
            continue
        entries.append(Entry(run.parent.parent.name, run.parent.name, record, metrics))
    if not entries:
        raise InputError(f"{directory} has nothing to report yet: {next(iter(left_out.values()))}")
    last = len(order)
    return sorted(
        entries, key=lambda entry: order.get((entry.setting, entry.label), last)
    ), left_out


def _by_number(run: Path) -> tuple[Path, int, str]:
    """Order seed2 before seed10."""
    digits = run.name.removeprefix("seed")
    return run.parent, int(digits) if digits.isdecimal() else 0, run.name


def _results(directory: Path) -> tuple[dict[tuple[str, str], int], tuple[str, ...]]:
    """Return the order of settings and methods in a study, and its metrics.

    Both are empty if the study has not written its results.
    """
    try:
        results = read_json(directory / "results.json")
        pairs = dict.fromkeys((row["setting"], row["method"]) for row in results["results"])
        # A newer release may have further metrics.
        named = map(str, results.get("metrics", ()))
        metrics = tuple(name for name in named if kind_of(name) in BETTER)
    except (RunError, KeyError, TypeError):
        return {}, ()
    return {pair: position for position, pair in enumerate(pairs)}, metrics


def _labelled(records: list[RunRecord]) -> list[Entry]:
    """Label runs by their methods, and by further settings if these differ."""
    compared = [_compared(record) for record in records]
    keys = dict.fromkeys(key for settings in compared for key in settings if key != "method.name")
    differing = [key for key in keys if len({repr(settings.get(key)) for settings in compared}) > 1]
    entries = []
    for record, settings in zip(records, compared, strict=True):
        mine = [other for other in compared if other["method.name"] == settings["method.name"]]
        # Hyper-parameters distinguish runs of one method, other settings all runs.
        told = [
            f"{key.removeprefix('method.')}={settings[key]}"
            for key in differing
            if key in settings
            and (not key.startswith("method.") or len({repr(other.get(key)) for other in mine}) > 1)
        ]
        entries.append(Entry("", ", ".join([str(settings["method.name"]), *told]), record))
    return _numbered(entries)


def _numbered(entries: list[Entry]) -> list[Entry]:
    """Append numbers to the labels of runs of the same experiment with the same seed."""
    seen: dict[tuple[str, int], int] = {}
    numbered = []
    for entry in entries:
        key = (entry.label, entry.record.seed)
        seen[key] = seen.get(key, 0) + 1
        numbered.append(
            replace(entry, label=f"{entry.label} ({seen[key]})") if seen[key] > 1 else entry
        )
    return numbered


def _compared(record: RunRecord) -> dict[str, Any]:
    return {key: value for key, value in flat(record.config) if not key.startswith(_NOT_COMPARED)}
