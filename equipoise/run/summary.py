"""The summary of a run, as in ``summary.json``; see ``docs/metrics.md``."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.metrics import Metric
from equipoise.run.left_out import updates_left_out, without_result
from equipoise.run.records import Row, average_rows, average_summaries, last_rounds, summarize_rows
from equipoise.run.round_rows import counted

if TYPE_CHECKING:
    from equipoise.run.trainer import Trainer


def summary_of(trainer: Trainer) -> dict[str, Any]:
    """Summarise the reported round of a run, or its last rounds if they are averaged."""
    number = trainer.evaluator.selected_round(trainer.state.round)
    task, metrics = trainer.engine.network.task, trainer.evaluator.metrics
    federation = trainer.federation
    left_out = updates_left_out(
        lambda: trainer.rounds, len(federation.seen), federation.client_name
    )
    of_server = {row["split"]: row for row in trainer.server if row["round"] == number}
    rows = [row for row in trainer.metrics if row["round"] == number]
    absent = _absent(trainer, rows, {number})
    results = _summarized(trainer, rows, absent)
    tail = {}
    if trainer.evaluation.last is not None:
        rounds = last_rounds(trainer.metrics, trainer.evaluation.last)
        # Means over rounds have no counts of clients, so it does not matter who was absent.
        each = [_summarized(trainer, own, {}) for own in rounds.values()]
        tail = {
            "rounds": list(rounds),
            "selected": results,
            "each": {key: average_summaries([summary[key] for summary in each]) for key in results},
        }
        rows = average_rows(row for own in rounds.values() for row in own)
        absent = _absent(trainer, rows, rounds)
        results = _summarized(trainer, rows, absent)
    missing = _without_result(trainer, rows, absent)
    return {
        "method": trainer.method.name,
        "data": federation.name,
        "seed": trainer.seed,
        "rounds": trainer.state.round,
        "round": number,
        "select": trainer.evaluation.select,
        **({"select_by": trainer.evaluation.select_by} if trainer.evaluation.select_by else {}),
        **({"stopped": trainer.stopped} if trainer.stopped else {}),
        **({"slowed_by": slowed_by} if (slowed_by := trainer.slowed_by) else {}),
        "task": task.name,
        "score": task.score,
        **({"metrics": {metric.name: _declared(metric) for metric in metrics}} if metrics else {}),
        **results,
        **({"tail": tail} if tail else {}),
        **(
            {"server": {split: _values(row) for split, row in of_server.items()}}
            if of_server
            else {}
        ),
        **({"updates_left_out": left_out} if left_out else {}),
        **({"without_result": missing} if missing else {}),
        **counted(trainer.bytes),
    }


def _absent(trainer: Trainer, rows: list[Row], rounds: Collection[int]) -> dict[int, str]:
    """Return why clients without rows did not answer in some rounds, the last time."""
    there = {row["client"] for row in rows if row["model"] != "local"}
    if len(there) == trainer.federation.clients:
        return {}
    if not trainer.state.round:
        # A run without rounds has no row in rounds.jsonl.
        return dict(trainer.engine.absent)
    reasons = {
        int(client): why
        for row in trainer.rounds
        if row["round"] in rounds
        for client, why in row.get("not_evaluated", {}).items()
    }
    return {client: why for client, why in reasons.items() if client not in there}


def _without_result(trainer: Trainer, rows: list[Row], absent: Mapping[int, str]) -> dict[str, Any]:
    """Return the clients without a result, given the rows behind the results."""
    federation, groups = trainer.federation, trainer.federation.groups
    having = {
        split: set(np.flatnonzero(federation.split(split).sizes).tolist())
        for split in ("test", "val")
    }
    unseen = np.flatnonzero(federation.unseen)
    return without_result(
        rows,
        {"seen": federation.seen.tolist(), "unseen": unseen.tolist()},
        having,
        absent,
        group_of=lambda client: federation.group_names[groups[client]],
        name_of=federation.client_name,
    )


def _summarized(trainer: Trainer, rows: list[Row], absent: Mapping[int, str]) -> dict[str, Any]:
    """Summarise rows on test and on validation data."""
    summarized = partial(
        summarize_rows,
        rows,
        trainer.engine.network.task,
        metrics=trainer.evaluator.metrics,
        federation=trainer.federation,
        absent=absent,
    )
    found = {"results": summarized(split="test"), "validation": summarized(split="val")}
    for part in (
        part for by_model in found.values() for who in by_model.values() for part in who.values()
    ):
        by_attribute = [
            of
            for found in part.get("attributes", {}).values()
            for of in found["over_clients"].values()
        ]
        for measured in (part, *part.get("metrics", {}).values(), *by_attribute):
            if "worst_client_id" in measured:
                # Readers without the data do not know the numbers of clients.
                worst, name_of = measured["worst_client_id"], trainer.federation.client_name
                measured["worst_client_name"] = None if worst is None else name_of(worst)
    return found


def _values(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("round", "split")}


def _declared(metric: Metric) -> dict[str, Any]:
    """Return the declaration of a metric, with null for infinite bounds, as JSON requires."""
    bounds = [bound if math.isfinite(bound) else None for bound in metric.range]
    return {"higher_is_better": metric.higher_is_better, "range": bounds}
