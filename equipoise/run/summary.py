"""The summary of a run, as in ``summary.json``; see ``docs/metrics.md``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from equipoise.metrics import Metric
from equipoise.run.left_out import updates_left_out
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
    results = _summarized(trainer, [row for row in trainer.metrics if row["round"] == number])
    tail = {}
    if trainer.evaluation.last is not None:
        rounds = last_rounds(trainer.metrics, trainer.evaluation.last)
        each = [_summarized(trainer, rows) for rows in rounds.values()]
        tail = {
            "rounds": list(rounds),
            "selected": results,
            "each": {key: average_summaries([summary[key] for summary in each]) for key in results},
        }
        results = _summarized(
            trainer, average_rows(row for rows in rounds.values() for row in rows)
        )
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
        **counted(trainer.bytes),
    }


def _summarized(trainer: Trainer, rows: list[Row]) -> dict[str, Any]:
    """Summarise rows on test and on validation data."""
    task, metrics = trainer.engine.network.task, trainer.evaluator.metrics
    found = {
        key: summarize_rows(rows, task, split=split, metrics=metrics, federation=trainer.federation)
        for key, split in (("results", "test"), ("validation", "val"))
    }
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
                measured["worst_client_name"] = trainer.federation.client_name(
                    measured["worst_client_id"]
                )
    return found


def _values(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("round", "split")}


def _declared(metric: Metric) -> dict[str, Any]:
    """Return the declaration of a metric, with null for infinite bounds, as JSON requires."""
    bounds = [bound if math.isfinite(bound) else None for bound in metric.range]
    return {"higher_is_better": metric.higher_is_better, "range": bounds}
