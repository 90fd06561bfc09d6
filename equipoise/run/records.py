"""Rows of ``metrics.jsonl`` of several rounds, and summaries of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from equipoise import fairness, parity, tasks
from equipoise.federation import Federation
from equipoise.metrics import Metric
from equipoise.task import Task

Row = dict[str, Any]
K = TypeVar("K")
MODELS = ("global", "personal", "local")
_FURTHER = ("mean", "mean_groups", "sigma_clients", "worst10", "worst_group")
# What summaries of evaluation.metrics do not have, because it describes losses and not the metric.
_OF_LOSSES = ("loss", "gap_variance", "gap_pair_sum")
NO_SAMPLES = "no samples"


def name_in(names: Sequence[str] | None, client: int) -> str:
    """Return the name of a client, given those of all clients by number, if they have names.

    Examples
    --------
    >>> name_in(["north", "south"], 1), name_in(None, 1)
    ('south', 'client 1')
    """
    return names[client] if names and client < len(names) else f"client {client}"


def last_rounds(rows: Iterable[Row], count: int) -> dict[int, list[Row]]:
    """Return the rows of the last evaluated rounds, by round.

    Parameters
    ----------
    rows : iterable of dict
        Rows of ``metrics.jsonl``, in their order.
    count : int
        The number of rounds. If there are fewer, all of them.

    Returns
    -------
    dict
        In the order of rounds. Only these rows are kept in memory.

    Examples
    --------
    >>> last_rounds([{"round": 5}, {"round": 10}, {"round": 10}, {"round": 15}], 2)
    {10: [{'round': 10}, {'round': 10}], 15: [{'round': 15}]}
    """
    found: dict[int, list[Row]] = {}
    for number, of_round in groupby(rows, key=lambda row: int(row["round"])):
        found[number] = list(of_round)
        if len(found) > count:
            del found[next(iter(found))]
    return found


def averaged_over(rounds: Sequence[int]) -> str:
    """Describe over which rounds results are averaged.

    Examples
    --------
    >>> averaged_over([130, 140, 150]), averaged_over([4])
    ('mean over the last 3 evaluated rounds (130 to 150)', 'mean over the last evaluated round (4)')
    """
    if len(rounds) < 2:
        return f"mean over the last evaluated round ({', '.join(map(str, rounds))})"
    return f"mean over the last {len(rounds)} evaluated rounds ({rounds[0]} to {rounds[-1]})"


def average_rows(rows: Iterable[Row]) -> list[Row]:
    """Average the rows of several rounds for each client.

    Parameters
    ----------
    rows : iterable of dict
        Rows of one or more rounds, in their order.

    Returns
    -------
    list of dict
        One row for each client, model and split that has a row. Losses, scores, metrics and
        generalization gaps are means over the rounds in which the client has a value. Everything
        else is from the last of these rounds. ``left_out`` names metrics without any value.

    Examples
    --------
    >>> same = {"model": "global", "split": "test", "client": 3, "group": "a", "unseen": False}
    >>> rows = [{"round": 1, **same, "loss": 1.0}, {"round": 2, **same, "loss": 0.5}]
    >>> average_rows(rows)[0]["loss"], average_rows(rows)[0]["round"]
    (0.75, 2)
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row["model"], row["split"], row["unseen"], row["client"]), []).append(row)
    averaged = []
    for own in found.values():
        row = {name: value for name, value in own[-1].items() if name in _NOT_AVERAGED}
        columns = dict.fromkeys(
            name for each in own for name in each if name not in (*_NOT_AVERAGED, "left_out")
        )
        row |= {
            name: float(np.mean([each[name] for each in own if name in each])) for name in columns
        }
        faults = {
            name: fault
            for each in own
            for name, fault in each.get("left_out", {}).items()
            if name not in row
        }
        averaged.append(row | ({"left_out": faults} if faults else {}))
    return averaged


_NOT_AVERAGED = ("round", "model", "split", "client", "group", "unseen", "n", "attributes")


def task_of(summary: Mapping[str, Any]) -> Task:
    """Return the task of a run from its summary. Summaries of older versions have only its score.

    Examples
    --------
    >>> task_of({"score": "accuracy"}).name, task_of({"score": "dice", "task": "segmentation"}).name
    ('classification', 'segmentation')
    """
    older = "regression" if summary["score"] == "loss" else "classification"
    return tasks.build(summary.get("task", older))


def summarize_rows(
    rows: Iterable[Row],
    task: Task,
    *,
    split: str = "test",
    metrics: Sequence[Metric] = (),
    federation: Federation | None = None,
    absent: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Summarise the rows of one round for each model, and for seen and unseen clients.

    Parameters
    ----------
    rows : iterable of dict
        Rows of one round.
    task : Task
        The task, which defines the score.
    split : str
        The split to summarise.
    metrics : sequence of Metric
        The metrics to summarise in addition to the score.
    federation : Federation, optional
        The federation. Clients without samples in the split have no row. With the federation they
        are counted in ``left_out``, and their groups are in ``groups``.
    absent : mapping, optional
        Why clients did not answer when models were evaluated. Those without a row are counted like
        clients without samples.

    Returns
    -------
    dict
        ``{"global": {"seen": {...}, "unseen": {...}}, "personal": ..., "local": ...}``, with only
        what was evaluated. Each inner dictionary has every metric of
        :data:`equipoise.fairness.METRICS` for the score, ``groups`` (the mean score of every group,
        ``None`` if none of its clients has samples), ``loss`` (the mean loss over clients), and the
        names of the worst client and group. ``metrics`` has the same for each of ``metrics``, and
        in ``left_out_clients`` the reason for each client without a value, by its number. If no
        client has a value, everything else is ``None``. For data with attributes, ``attributes`` is
        the result of :func:`equipoise.parity.pooled`.
    """
    rows = list(rows)
    gaps = {row["client"]: row["gap"] for row in rows if "gap" in row}
    result: dict[str, Any] = {}
    of: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        if row["split"] == split:
            of.setdefault((row["model"], row["unseen"]), []).append(row)
    for model in MODELS:
        for who, unseen in (("seen", False), ("unseen", True)):
            if chosen := of.get((model, unseen)):
                own_gaps = gaps if model == "global" and not unseen else {}
                without = _without_row(rows, federation, absent or {}, model, split, unseen)
                higher, names = task.higher_is_better, _group_names(chosen, without)
                part = _summary(chosen, task.score, names, higher_is_better=higher, gaps=own_gaps)
                part["left_out"] += len(without)
                if metrics:
                    part["metrics"] = {
                        metric.name: _metric_summary(chosen, metric, without) for metric in metrics
                    }
                if by_attribute := parity.pooled(chosen, score=task.score, higher_is_better=higher):
                    part["attributes"] = by_attribute
                result.setdefault(model, {})[who] = part
    return result


def several_groups(part: Mapping[str, Any]) -> bool:
    """Return whether several groups have a mean. Otherwise metrics of groups say nothing.

    Parameters
    ----------
    part : mapping
        The summary of one model on the data of some clients, as in :func:`summarize_rows`.

    Returns
    -------
    bool
        Groups without samples do not count.

    Examples
    --------
    >>> several_groups({"groups": {"north": 0.5, "south": None}})
    False
    """
    return sum(mean is not None for mean in part.get("groups", {}).values()) > 1


def telling(metrics: Iterable[str], parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the metrics to show, without those of groups if no part has several groups.

    Parameters
    ----------
    metrics : iterable of str
        Names of :data:`equipoise.fairness.METRICS`.
    parts : iterable of mappings
        The summaries that are shown together; see :func:`several_groups`.

    Returns
    -------
    list of str
        The names, in their order.

    Examples
    --------
    >>> telling(["mean", "group_gap"], [{"groups": {"all": 0.5}}])
    ['mean']
    """
    several = any(map(several_groups, parts))
    return [name for name in metrics if several or name not in fairness.GROUP_METRICS]


def further_metrics(
    summary: Mapping[str, Any], parts: Mapping[K, Mapping[str, Any]]
) -> tuple[list[str], list[tuple[str, str, K, Mapping[str, Any]]]]:
    """Return what to show of ``evaluation.metrics``.

    Parameters
    ----------
    summary : mapping
        The content of ``summary.json``.
    parts : mapping
        The parts of its results that are shown together, by their labels.

    Returns
    -------
    list of str
        The columns: names of :data:`equipoise.fairness.METRICS`.
    list of tuple
        For each metric and part: the name of the metric, whether ``high`` or ``low`` values are
        better, the label of the part, and the metric's own summary.

    Examples
    --------
    >>> part = {"metrics": {"ece": {"mean": 0.1, "left_out": 0}}}
    >>> summary = {"metrics": {"ece": {"higher_is_better": False}}}
    >>> further_metrics(summary, {"global, seen": part})[1]
    [('ece', 'low', 'global, seen', {'mean': 0.1, 'left_out': 0})]
    """
    return telling(_FURTHER, parts.values()), [
        (name, "high" if declared["higher_is_better"] else "low", label, part["metrics"][name])
        for name, declared in summary.get("metrics", {}).items()
        for label, part in parts.items()
    ]


def average_summaries(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the summaries of several rounds: the mean over rounds of every metric.

    Parameters
    ----------
    summaries : sequence of mappings
        Results of :func:`summarize_rows` for one split.

    Returns
    -------
    dict
        A summary with means over the rounds that have a value, without names, ids and counts.

    Examples
    --------
    >>> def summary(mean):
    ...     return {"global": {"seen": {"mean": mean, "groups": {"a": mean}, "clients": 3}}}
    >>> average_summaries([summary(0.5), summary(0.75)])
    {'global': {'seen': {'mean': 0.625, 'groups': {'a': 0.625}}}}
    """
    averaged: dict[str, Any] = {}
    for model in MODELS:
        for who in ("seen", "unseen"):
            parts = [summary[model][who] for summary in summaries if who in summary.get(model, {})]
            if parts:
                part = _average_parts(parts)
                own = dict.fromkeys(name for each in parts for name in each.get("metrics", {}))
                if own:
                    of_metric = {
                        name: [each["metrics"][name] for each in parts if "metrics" in each]
                        for name in own
                    }
                    part["metrics"] = {
                        name: _average_parts(each) for name, each in of_metric.items()
                    }
                averaged.setdefault(model, {})[who] = part
    return averaged


def _average_parts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    names = [name for name in (*fairness.METRICS, "loss") if any(name in part for part in parts)]
    averaged: dict[str, Any] = {name: mean(part.get(name) for part in parts) for name in names}
    groups = dict.fromkeys(name for part in parts for name in part.get("groups", {}))
    return averaged | {
        "groups": {
            name: mean(part.get("groups", {}).get(name) for part in parts) for name in groups
        }
    }


def _without_row(
    rows: list[Row],
    federation: Federation | None,
    absent: Mapping[int, str],
    model: str,
    split: str,
    unseen: bool,
) -> dict[int, tuple[str, str]]:
    """Return the groups of clients that have no samples or did not answer, and which it was.

    For local models, only clients that took part are considered.
    """
    if federation is None:
        return {}
    members = np.flatnonzero(federation.unseen) if unseen else federation.seen
    empty = members[federation.split(split).sizes[members] == 0].tolist()
    found = dict.fromkeys(empty, NO_SAMPLES)
    if model == "local" or absent:
        there = {row["client"] for row in rows if row["model"] == model}
        if model == "local":
            found = {client: why for client, why in found.items() if client in there}
        else:
            of_these = (client for client in absent if federation.unseen[client] == unseen)
            found |= {client: absent[client] for client in of_these if client not in there}
    names, groups = federation.group_names, federation.groups
    return {client: (names[groups[client]], why) for client, why in sorted(found.items())}


def _metric_summary(
    rows: list[Row], metric: Metric, without: Mapping[int, tuple[str, str]]
) -> dict[str, Any]:
    """Summarise a metric over the clients that have a value, with the reasons of the others."""
    name = metric.name
    left_out = {
        str(row["client"]): row.get("left_out", {}).get(name, "undefined")
        for row in rows
        if name not in row
    }
    left_out |= {str(client): why for client, (_, why) in without.items()}
    having = [row for row in rows if name in row]
    names = _group_names(rows, without)
    part = _summary(having, name, names, higher_is_better=metric.higher_is_better)
    for other in _OF_LOSSES:
        del part[other]
    return {**part, "left_out": len(left_out), "left_out_clients": left_out}


def _group_names(rows: list[Row], without: Mapping[int, tuple[str, str]]) -> tuple[str, ...]:
    """Return the groups of rows, and those of clients without a row."""
    return tuple(
        dict.fromkeys([*(row["group"] for row in rows), *(group for group, _ in without.values())])
    )


def _summary(
    rows: list[Row],
    column: str,
    names: Sequence[str],
    *,
    higher_is_better: bool,
    gaps: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """Summarise a column of rows, which all have a value; ``names`` are the groups."""
    if not rows:
        named = ("worst_client_id", "worst_group_name", "best_group_name", "loss")
        nothing = dict.fromkeys([*fairness.METRICS, *named])
        return {**nothing, "clients": 0, "groups": dict.fromkeys(names)}
    # A dictionary, because every client may be its own group.
    position_of = {name: position for position, name in enumerate(names)}
    groups = np.array([position_of[row["group"]] for row in rows])
    values = np.array([row[column] for row in rows])
    counts = np.array([row["n"] for row in rows])
    summary = fairness.summarize(values, groups, weights=counts, higher_is_better=higher_is_better)
    measured: dict[str, Any] = summary.as_dict()
    if gaps:
        # Clients with a gap may have no samples in this split, so they may have no row here.
        known = np.array(list(gaps.values()))
        measured |= {"gap_variance": float(known.var()), "gap_pair_sum": fairness.pair_sum(known)}
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
