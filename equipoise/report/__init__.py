"""Reports: one HTML file about a run, several runs or a study, made only from run directories.

Examples
--------
>>> import tempfile
>>> from pathlib import Path
>>> from equipoise import train
>>> from equipoise.data import load
>>> out = Path(tempfile.mkdtemp())
>>> _ = train(load("digits"), rounds=2, out=out / "run")
>>> write_report([out / "run"]).name
'report.html'
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from equipoise.errors import InputError
from equipoise.report.comparison import comparisons
from equipoise.report.entries import Entry, find_entries
from equipoise.report.files import save_figures
from equipoise.report.headline import at_round
from equipoise.report.html import Section
from equipoise.report.page import page
from equipoise.report.reading import RunRecord
from equipoise.report.sections import sections_compared, sections_of_run
from equipoise.run.files import write_atomically
from equipoise.run.left_out import missing_in
from equipoise.text import plural

__all__ = ["REPORT", "write_report"]

REPORT = "report.html"


def write_report(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    figures: str | Path | None = None,
    trust: bool = False,
) -> Path:
    """Write a report on runs.

    Parameters
    ----------
    paths : sequence of paths
        Run directories and directories of studies. Unfinished runs and those of earlier releases
        are valid, too.
    out : path, optional
        Where to write the report. By default ``report.html`` in the directory if there is only one,
        and otherwise in the current directory.
    figures : path, optional
        A directory for all figures as PNG, PDF and SVG. This needs Matplotlib
        (``pip install 'equipoise[report]'``).
    trust : bool
        Whether to execute the code that runs import, if their tasks are defined there; see
        :func:`equipoise.load`.

    Returns
    -------
    Path
        Where the report was written.

    Raises
    ------
    InputError
        If a path has no run, or if a file cannot be written.
    RunError
        If the files of a run are damaged.

    Examples
    --------
    >>> import tempfile
    >>> write_report([tempfile.mkdtemp()])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: ... holds no run and no study: ...
    """
    entries, left_out = find_entries(paths, trust=trust)
    where = Path(out) if out is not None else _usual(paths)
    sections = _distinct([*_sections(entries), *_left_out(left_out)])
    command = shlex.join(["equipoise", "report", *map(str, paths)])
    text = page(*_heading(entries), sections, made=command)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(where, text.encode())
    except OSError as error:
        raise InputError(f"cannot write the report to {where}: {error.strerror}") from error
    if figures is not None:
        save_figures([chart for section in sections for chart in section.charts], figures)
    return where


def _usual(paths: Sequence[str | Path]) -> Path:
    return Path(paths[0]) / REPORT if len(paths) == 1 else Path(REPORT)


def _sections(entries: Sequence[Entry]) -> list[Section]:
    if len(entries) == 1:
        return sections_of_run(entries[0].record)
    return sections_compared(comparisons(entries))


def _left_out(runs: Mapping[Path, str]) -> list[Section]:
    if not runs:
        return []
    items = "".join(f"<li>{escape(reason)}</li>" for reason in runs.values())
    return [Section("runs-left-out", "Runs left out", f"<ul>{items}</ul>")]


def _heading(entries: Sequence[Entry]) -> tuple[str, str]:
    """Return the title, and a line about the runs."""
    records = [entry.record for entry in entries]
    data = ", ".join(dict.fromkeys(str(record.summary["data"]) for record in records))
    if len(entries) == 1:
        (record,) = records
        about = (
            f"Seed {record.seed}. {_evaluated(record)} in "
            f"{plural(len(record.group_names), 'group')}"
            f"{f', {len(record.unseen)} of them unseen' if record.unseen else ''}. "
            f"{at_round(record)}"
        )
        return f"{record.method} on {data}", about
    labels = dict.fromkeys(entry.label for entry in entries)
    settings = dict.fromkeys(entry.setting for entry in entries if entry.setting)
    seeds = {record.seed for record in records}
    counted = [plural(len(labels), "method"), plural(len(seeds), "seed")]
    if len(settings) > 1:
        counted.insert(1, plural(len(settings), "setting"))
    scores = dict.fromkeys(record.compared_by for record in records)
    apart = f" Runs with different scores are compared separately: {', '.join(scores)}."
    return (
        f"{plural(len(labels), 'method')} on {data}",
        f"{plural(len(records), 'run')}: {', '.join(counted)}.{apart if len(scores) > 1 else ''}",
    )


def _evaluated(record: RunRecord) -> str:
    """Return how many clients have a result, and of how many if these are not all."""
    missing = missing_in(record.summary)
    counts = {
        part.who: found["clients"] for part, found in record.parts.items() if part.model != "local"
    }
    counts |= {who: entry["of"] - entry["clients"] for who, entry in missing.items()}
    evaluated = sum(counts.values())
    if not missing:
        return plural(evaluated, "evaluated client")
    every = evaluated + sum(entry["clients"] for entry in missing.values())
    return f"{evaluated:,} of {plural(every, 'client')} evaluated,"


def _distinct(sections: Sequence[Section]) -> list[Section]:
    """Append numbers to sections and charts whose names occur more than once."""
    used: Counter[str] = Counter()

    def free(name: str) -> str:
        used[name] += 1
        return name if used[name] == 1 else f"{name}-{used[name]}"

    made = []
    for section in sections:
        name = free(section.name)
        made.append(
            replace(
                section, name=name, charts=[replace(c, name=free(c.name)) for c in section.charts]
            )
        )
    return made
