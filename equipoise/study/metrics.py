"""Metrics of studies by name, looked up in a run's summary.

A name is ``[val.][which.][model.][who.]name`` for the task's score, and
``[val.][which.][model.][who.]metric.name`` for one of ``evaluation.metrics``. Without ``.name`` it
is the mean. ``which`` is used only with ``evaluation.last``: ``selected`` is the selected round,
and ``each`` the mean over rounds of the metric in each round. The names of figures of an attribute
are ``[val.][which.][model.][who.]attributes.ATTRIBUTE.figure``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from equipoise import metrics as of_clients
from equipoise.errors import InputError, unknown
from equipoise.fairness import METRICS, Better
from equipoise.parity import FIGURES
from equipoise.run.records import MODELS, task_of
from equipoise.text import capital

WHO = ("seen", "unseen")
TOTALS = ("bytes_up", "bytes_down")
# Metrics of the global model on the samples of the server.
SERVER = ("server.score", "server.loss")
BETTER: dict[str, Better] = {
    **{name: metric.better for name, metric in METRICS.items()},
    "loss": "low",
    "groups.NAME": "as v_k",
    "attributes.NAME.worst": "as v_k",
    **{
        f"attributes.NAME.{figure}": "high" if figure.endswith("ratio") else "low"
        for figure in FIGURES
    },
    "bytes_up": "low",
    "bytes_down": "low",
    "server.score": "as v_k",
    "server.loss": "low",
}
VALIDATION = "val."
WHICH = ("selected", "each")
# Names in words, and prefixes that are not words themselves.
_WORDS = {
    "loss": "mean loss over clients",
    "bytes_up": "bytes sent by clients",
    "bytes_down": "bytes received by clients",
    "server.score": "score on the server's data",
    "server.loss": "loss on the server's data",
    **{name: metric.label for name, metric in METRICS.items()},
}
_PREFIXES = {"val": "validation", "selected": "selected round", "each": "mean over rounds"}


def value_of(summary: Mapping[str, Any], metric: str) -> float | None:
    """Look up a metric in a run's summary.

    Parameters
    ----------
    summary : mapping
        The content of ``summary.json``.
    metric : str
        As in :func:`equipoise.study.study_from`.

    Returns
    -------
    float or None
        None if the run has no such value, such as a metric of personal models if there are none.

    Examples
    --------
    >>> value_of({"results": {"global": {"seen": {"mean": 0.5}}}}, "mean")
    0.5
    >>> seen = {"metrics": {"auroc": {"worst_group": 0.7}}}
    >>> value_of({"results": {"global": {"seen": seen}}}, "auroc.worst_group")
    0.7
    """
    if metric in TOTALS:
        return float(summary[metric])
    if apart(metric)[2] in SERVER:
        measured = summary.get("server", {}).get("val" if of_validation(metric) else "test", {})
        value = measured.get(summary["score"] if metric.endswith("score") else "loss")
        return None if value is None else float(value)
    model = model_of(summary, metric)
    if model is None:
        return None
    (_, name), part, group = own_of(metric), _part(summary, metric, model), group_of(metric)
    # Runs of earlier releases do not have all metrics. A metric may be undefined for all clients.
    found = part.get("groups", {}).get(group) if group else part.get(name)
    if attribute := attribute_of(metric):
        found = part.get("attributes", {}).get(attribute, {}).get(name.rpartition(".")[2])
    return None if found is None else float(found)


def model_of(summary: Mapping[str, Any], metric: str) -> str | None:
    """Return the model of a metric: the one in its name, or else the personal one if there is one.

    Parameters
    ----------
    summary : mapping
        The content of ``summary.json``.
    metric : str
        As in :func:`equipoise.study.study_from`.

    Returns
    -------
    str or None
        ``global``, ``personal`` or ``local``; None if no such model was evaluated, or for metrics
        without a model, such as ``bytes_up``.

    Examples
    --------
    >>> results = {"global": {"seen": {"mean": 0.5}, "unseen": {"mean": 0.4}}}
    >>> results["personal"] = {"seen": {"mean": 0.6}}
    >>> [model_of({"results": results}, metric) for metric in ("mean", "global.mean")]
    ['personal', 'global']
    >>> model_of({"results": results}, "unseen.mean")
    'global'
    """
    if metric in TOTALS:
        return None
    model, who, name = apart(metric)
    if name in SERVER:
        return "global" if summary.get("server") else None
    candidates = (model,) if model else ("personal", "global")
    return next(
        (name for name in candidates if _results(summary, metric).get(name, {}).get(who)), None
    )


def scored(summary: Mapping[str, Any], metric: str) -> tuple[str, bool]:
    """Return the column of a metric in ``metrics.jsonl``, and whether high values are better.

    Examples
    --------
    >>> scored({"score": "accuracy"}, "worst10"), scored({"score": "accuracy"}, "loss")
    (('accuracy', True), ('loss', False))
    """
    own, name = own_of(metric)
    if own:
        declared = summary.get("metrics", {}).get(own, {})
        return own, bool(declared.get("higher_is_better", True))
    return (
        ("loss", False)
        if name == "loss"
        else (str(summary["score"]), task_of(summary).higher_is_better)
    )


def of_validation(metric: str) -> bool:
    """Return whether a metric is on validation data for any split of the study.

    Examples
    --------
    >>> of_validation("val.global.mean"), of_validation("global.mean")
    (True, False)
    """
    return metric.startswith(VALIDATION)


def _part(summary: Mapping[str, Any], metric: str, model: str) -> Mapping[str, Any]:
    """Return the summary of the values of a metric, for a model that was evaluated."""
    part: Mapping[str, Any] = _results(summary, metric)[model][apart(metric)[1]]
    own, _ = own_of(metric)
    return part.get("metrics", {}).get(own, {}) if own else part


def left_out(summary: Mapping[str, Any], metric: str) -> dict[str, str]:
    """Return the numbers of clients without a value of a metric, and why they have none.

    There are none for the task's score, and for means over rounds of metrics in each round.

    Examples
    --------
    >>> auroc = {"mean": 0.7, "left_out_clients": {"3": "undefined"}}
    >>> results = {"global": {"seen": {"metrics": {"auroc": auroc}}}}
    >>> left_out({"results": results}, "auroc"), left_out({"results": results}, "mean")
    ({'3': 'undefined'}, {})
    """
    model = model_of(summary, metric) if metric not in TOTALS and own_of(metric)[0] else None
    return dict(_part(summary, metric, model).get("left_out_clients", {})) if model else {}


def _results(summary: Mapping[str, Any], metric: str) -> Mapping[str, Any]:
    # For results of a single round, all three are the same.
    of_rounds = summary.get("tail", {}).get(which_of(metric), summary)
    results: Mapping[str, Any] = of_rounds["validation" if of_validation(metric) else "results"]
    return results


def which_of(metric: str) -> str:
    """Return the prefix ``selected`` or ``each`` of a metric, or an empty string.

    Examples
    --------
    >>> which_of("val.each.sigma_clients"), which_of("sigma_clients")
    ('each', '')
    """
    first = metric.removeprefix(VALIDATION).partition(".")[0]
    return first if first in WHICH else ""


def apart(metric: str) -> tuple[str | None, str, str]:
    """Split ``[val.][which.][model.][who.]name`` into model, who and name.

    Examples
    --------
    >>> apart("val.personal.unseen.groups.north")
    ('personal', 'unseen', 'groups.north')
    """
    parts = metric.removeprefix(VALIDATION).split(".")
    if parts[0] in WHICH:
        del parts[0]
    model = parts.pop(0) if parts and parts[0] in MODELS else None
    who = parts.pop(0) if parts and parts[0] in WHO else "seen"
    return model, who, ".".join(parts)


def own_of(metric: str) -> tuple[str, str]:
    """Return the metric of ``evaluation.metrics`` in a name, and the rest of the name.

    The metric is empty for the task's score. Without a rest it is the mean.

    Examples
    --------
    >>> own_of("global.auroc.worst_group"), own_of("auroc"), own_of("worst_group")
    (('auroc', 'worst_group'), ('auroc', 'mean'), ('', 'worst_group'))
    """
    name = apart(metric)[2]
    first, _, rest = name.partition(".")
    if first in ("groups", "attributes") or first in BETTER or name in SERVER:
        return "", name
    return first, rest or "mean"


def group_of(metric: str) -> str:
    """Return the group of a metric, if it has one.

    Examples
    --------
    >>> group_of("global.groups.north"), group_of("auroc.groups.north"), group_of("mean")
    ('north', 'north', '')
    """
    before, _, group = own_of(metric)[1].partition(".")
    return group if before == "groups" else ""


def attribute_of(metric: str) -> str:
    """Return the attribute of a metric, if it has one.

    Examples
    --------
    >>> attribute_of("global.attributes.sex.equalized_odds_ratio"), attribute_of("mean")
    ('sex', '')
    """
    before, _, rest = own_of(metric)[1].partition(".")
    return rest.rpartition(".")[0] if before == "attributes" else ""


def kind_of(metric: str) -> str:
    """Return the name of a metric in ``BETTER``, if it has one."""
    if attribute_of(metric):
        return f"attributes.NAME.{own_of(metric)[1].rpartition('.')[2]}"
    return "groups.NAME" if group_of(metric) else own_of(metric)[1]


def check_metric(metric: str, where: str, evaluated: Iterable[str] = ()) -> None:
    """Refuse unknown metrics.

    Parameters
    ----------
    metric : str
        Its name.
    where : str
        Where the name came from.
    evaluated : iterable of str
        The names in ``evaluation.metrics`` of the experiments.

    Examples
    --------
    >>> check_metric("ece.mean", "--metrics")
    Traceback (most recent call last):
    equipoise.errors.InputError: 'ece.mean' in --metrics: 'ece' is not evaluated; add it to
    evaluation.metrics
    """
    kind, (own, _), evaluated = kind_of(metric), own_of(metric), list(evaluated)
    if own and own not in evaluated and own in of_clients.names():
        raise InputError(
            f"{metric!r} in {where}: {own!r} is not evaluated; add it to evaluation.metrics"
        )
    known = (
        own in evaluated and (kind in METRICS or kind == "groups.NAME") if own else kind in BETTER
    )
    if not known or (
        kind in (*TOTALS, *SERVER)
        and kind != metric.removeprefix(VALIDATION if kind in SERVER else "")
    ):
        valid = [*BETTER, *(f"{name}.{inner}" for name in evaluated for inner in METRICS)]
        raise unknown("metric", metric, valid, where=where)


def should_be_high(metric: str, *, higher_is_better: bool) -> bool:
    """Return whether high values of a metric are better, given the same for values of clients.

    Examples
    --------
    >>> [should_be_high(metric, higher_is_better=False) for metric in ("worst_group", "jain")]
    [False, True]
    """
    better = BETTER[kind_of(metric)]
    return higher_is_better if better == "as v_k" else better == "high"


def words_of(metric: str) -> str:
    """Return a metric in words, for the head of a column.

    Parameters
    ----------
    metric : str
        As in :func:`equipoise.study.study_from`.

    Returns
    -------
    str
        The prefixes, the name in ``evaluation.metrics`` or the attribute, then what is computed.
        Names of metrics, attributes and groups are as they were given.

    Examples
    --------
    >>> words_of("sigma_groups"), words_of("global.unseen.mean")
    ('σ over groups', 'Global, unseen: mean over clients')
    >>> words_of("f1_macro.worst_group"), words_of("val.groups.north")
    ('f1_macro: worst group', 'Validation: group north')
    >>> words_of("attributes.sex.demographic_parity_ratio")
    'sex: demographic parity ratio'
    """
    own, name = own_of(metric)
    prefixes = metric.removesuffix(apart(metric)[2]).split(".")[:-1]
    before = [_PREFIXES.get(prefix, prefix) for prefix in prefixes]
    if attribute := attribute_of(metric):
        figure = name.rpartition(".")[2]
        what = "score of the worst value" if figure == "worst" else figure.replace("_", " ")
    else:
        group = group_of(metric)
        what = f"group {group}" if group else _WORDS[name]
    given = own or attribute
    words = ": ".join(filter(None, [", ".join(filter(None, [*before, given])), what]))
    return words if given and not before else capital(words)
