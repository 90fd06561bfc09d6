"""Rows of ``metrics.jsonl``, and their summaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise import fairness, tasks
from equipoise.engine.evaluation import Measured
from equipoise.federation import Federation
from equipoise.task import Task

Row = dict[str, Any]
MODELS = ("global", "personal", "local")


def client_rows(
    federation: Federation,
    clients: NDArray[np.int64],
    measured: Measured,
    *,
    round_: int,
    model: str,
    split: str,
    gaps: Mapping[int, float] | None = None,
) -> list[Row]:
    """Make the rows of ``metrics.jsonl``: one a client with samples in the split.

    Parameters
    ----------
    federation : Federation
        Whose clients.
    clients : int array
        Which of them were evaluated.
    measured : dict of arrays
        Loss and metrics, one value a client.
    round_ : int
        Rounds finished.
    model : {"global", "personal", "local"}
        Which model was evaluated.
    split : str
        On which of the clients' splits.
    gaps : mapping, optional
        Generalization gaps of the clients that have just trained.

    Returns
    -------
    list of dict
        In the order of ``clients``.
    """
    sizes = federation.split(split).sizes
    rows = []
    for position, client in enumerate(clients.tolist()):
        if sizes[client] == 0:
            continue
        row: Row = {
            "round": round_,
            "model": model,
            "split": split,
            "client": client,
            "group": federation.group_names[federation.groups[client]],
            "unseen": bool(federation.unseen[client]),
            "n": int(sizes[client]),
            **{name: float(values[position]) for name, values in measured.items()},
        }
        if gaps and client in gaps:
            row["gap"] = gaps[client]
        rows.append(row)
    return rows


def task_of(summary: Mapping[str, Any]) -> Task:
    """Return the task of a run from its summary; summaries of older versions name its score only.

    Examples
    --------
    >>> task_of({"score": "accuracy"}).name, task_of({"score": "dice", "task": "segmentation"}).higher_is_better
    ('classification', True)
    """
    older = "regression" if summary["score"] == "loss" else "classification"
    return tasks.build(summary.get("task", older))


def summarize_rows(rows: Iterable[Row], task: Task, *, split: str = "test") -> dict[str, Any]:
    """Summarise one round's rows, separately for each model and for seen and unseen clients.

    Parameters
    ----------
    rows : iterable of dict
        Rows of one round.
    task : Task
        Says which metric is the score.
    split : str
        Which split's rows to summarise.

    Returns
    -------
    dict
        ``{"global": {"seen": {...}, "unseen": {...}}, "personal": ..., "local": ...}``, holding only what was evaluated. Each inner
        dictionary has every metric of :data:`equipoise.fairness.METRICS` for the score, ``groups`` (the mean score of
        every group), ``loss`` (the mean loss over clients), and the names of the worst client and group.
    """
    rows = list(rows)
    gaps = {row["client"]: row["gap"] for row in rows if "gap" in row}
    result: dict[str, Any] = {}
    for model in MODELS:
        for who, unseen in (("seen", False), ("unseen", True)):
            chosen = [r for r in rows if (r["model"], r["split"], r["unseen"]) == (model, split, unseen)]
            if chosen:
                own_gaps = gaps if model == "global" and not unseen else {}
                result.setdefault(model, {})[who] = _summary(chosen, task, own_gaps)
    return result


def _summary(rows: list[Row], task: Task, gaps: Mapping[int, float]) -> dict[str, Any]:
    names = tuple(dict.fromkeys(row["group"] for row in rows))
    groups = np.array([names.index(row["group"]) for row in rows])
    values = np.array([row[task.score] for row in rows])
    counts = np.array([row["n"] for row in rows])
    gap = np.array([gaps.get(row["client"], np.nan) for row in rows])
    summary = fairness.summarize(
        values,
        groups,
        weights=counts,
        gap=gap if np.isfinite(gap).any() else None,
        higher_is_better=task.higher_is_better,
    )
    measured: dict[str, Any] = summary.as_dict()
    measured |= {
        "worst_client_id": rows[summary.worst_client_id]["client"],
        "worst_group_name": names[summary.worst_group_id],
        "best_group_name": names[summary.best_group_id],
        "loss": float(np.mean([row["loss"] for row in rows])),
        "groups": fairness.per_group(values, groups, names),
    }
    for position in ("worst_group_id", "best_group_id"):
        measured.pop(position, None)
    return measured
