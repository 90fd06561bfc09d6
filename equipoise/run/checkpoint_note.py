"""The note of a checkpoint: how far a run has come, and what differs if it is made longer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from equipoise.run.evaluation import Standing
from equipoise.run.files import Journal
from equipoise.run.records import Row

# In the note of a checkpoint: what differs after the last round if the run is made longer.
IF_LONGER = "if_longer"


def progress_note(
    moved: Mapping[str, int], standing: Standing, journals: Mapping[str, Journal]
) -> dict[str, Any]:
    """Return the values with which a run goes on.

    Parameters
    ----------
    moved : mapping of int
        The bytes of the run so far.
    standing : Standing
        The best round so far.
    journals : mapping of Journal
        The journals by name. Their lengths and hashes are recorded.
    """
    return {
        "bytes": dict(moved),
        "best_round": standing.best_round,
        "best_loss": standing.best_loss if standing.best_round else None,
        "stale": standing.stale,
        "marks": {name: journal.mark() for name, journal in journals.items()},
        "sha256": {name: journal.digest for name, journal in journals.items()},
    }


def longer_note(
    moved: Mapping[str, int],
    standing: Standing,
    journals: Mapping[str, Journal],
    row: Row | None,
) -> dict[str, Any]:
    """Return the values with which a run goes on if its last round is no longer the last one.

    Parameters
    ----------
    moved, standing, journals
        As in :func:`progress_note`, before the evaluation that only the last round has. The
        journals are rewound to here.
    row : dict, optional
        Replaces the row of the round.
    """
    return {
        **progress_note(moved, standing, journals),
        # As text, because notes sort their keys.
        "row": json.dumps(row) if row else None,
    }


def as_longer(note: Mapping[str, Any]) -> dict[str, Any]:
    """Return the note of a checkpoint if its round is no longer the last one.

    Examples
    --------
    >>> before = {"stale": 0, "marks": {"rounds": 7}, "sha256": {}}
    >>> note = {"stale": 1, "marks": {"rounds": 9, "timings": 5}, "sha256": {}, IF_LONGER: before}
    >>> longer = as_longer(note)
    >>> longer["stale"], longer["marks"]
    (0, {'rounds': 7, 'timings': 5})
    """
    if IF_LONGER not in note:
        return dict(note)
    before = note[IF_LONGER]
    return {
        **note,
        **before,
        **{key: {**note[key], **before[key]} for key in ("marks", "sha256")},
    }


def standing_in(note: Mapping[str, Any]) -> Standing:
    """Return the best round that a note names.

    Examples
    --------
    >>> standing_in({"best_round": None, "best_loss": None, "stale": 0})
    Standing(best_round=None, best_loss=inf, stale=0)
    """
    best = note["best_loss"] if note["best_loss"] is not None else float("inf")
    return Standing(note["best_round"], best, note["stale"])


def rewind(journals: Mapping[str, Journal], note: Mapping[str, Any], *, finished: bool) -> None:
    """Rewind journals to where a note marks them.

    Parameters
    ----------
    journals : mapping of Journal
        The journals by name, among them ``rounds``.
    note : mapping
        The note of a checkpoint, empty without one.
    finished : bool
        Whether the run is finished. Then no file is changed.

    Raises
    ------
    RunError
        If a journal was changed since.
    """
    marks, digests = (note.get(key, {}) for key in ("marks", "sha256"))
    # All journals are checked before any of them is changed.
    for name, journal in journals.items():
        journal.check(marks.get(name, 0), digests.get(name))
    if finished:
        return
    for name, journal in journals.items():
        journal.truncate(marks.get(name, 0))
    if note.get("row"):
        journals["rounds"].append([json.loads(note["row"])])
