"""Metrics of one client: functions of all outputs and targets of one of its splits, by name.

This directory has one file for each task. New files are found automatically. :func:`register` adds
custom metrics. Spreads of a metric over clients are defined in :mod:`equipoise.fairness`.
"""

from __future__ import annotations

import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise import fairness, tasks
from equipoise.errors import InputError, unknown
from equipoise.task import Task

__all__ = [
    "Metric",
    "build",
    "check_metrics",
    "computed",
    "measure",
    "names",
    "register",
    "several_from",
]

Function = Callable[[Tensor, Tensor], Any]
F = TypeVar("F", bound=Function)

COLUMNS = (
    "round",
    "model",
    "split",
    "client",
    "group",
    "unseen",
    "n",
    "loss",
    "gap",
    "left_out",
    "attributes",
)
"""The columns that every row of ``metrics.jsonl`` may have."""

# Reserved words of the names of a study's metrics, such as ``val.global.unseen.auroc.mean``.
_WORDS = (
    "train",
    "val",
    "test",
    "global",
    "personal",
    "local",
    "seen",
    "groups",
    "metrics",
    "bytes_up",
    "bytes_down",
)
RESERVED = frozenset((*COLUMNS, *_WORDS, *fairness.METRICS))
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)

_METRICS: dict[str, Metric] = {}


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of one client.

    Parameters
    ----------
    function : callable
        Takes the model's outputs for all samples of one client's split and their targets, samples
        first. Both are on the CPU; outputs are float64. It returns one number, or ``None`` or NaN
        if the metric is undefined for these samples.
    higher_is_better : bool
        Whether a larger value is better.
    name : str, optional
        By default that of the function.
    range : tuple of float
        The smallest and the largest valid value. Other values are left out, with a reason.
    tasks : sequence of str, optional
        The tasks it is for; by default all.

    Examples
    --------
    >>> def bias(output, y):
    ...     return (output.squeeze(1) - y).mean().abs()
    >>> metric = Metric(function=bias, higher_is_better=False, range=(0, math.inf))
    >>> metric.name, metric.fault(-1.0)
    ('bias', '-1 is not in the range from 0 to inf')
    """

    function: Function
    higher_is_better: bool
    name: str = ""
    range: tuple[float, float] = (-math.inf, math.inf)
    tasks: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Refuse reserved names and empty ranges."""
        if not callable(self.function):
            raise InputError(
                f"a metric must be a function of outputs and targets, got {self.function!r}"
            )
        name = self.name or getattr(self.function, "__name__", "")
        object.__setattr__(self, "name", name)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError(
                f"a metric cannot be called {name!r}; valid: letters, digits and underscores, such "
                "as 'mae'"
            )
        if name in RESERVED:
            raise InputError(
                f"a metric cannot be called {name!r}, which has another meaning in journals and "
                "tables; choose another name"
            )
        if not isinstance(self.higher_is_better, bool):
            raise InputError(
                f"higher_is_better of metric {name!r} must be true or false, got "
                f"{self.higher_is_better!r}"
            )
        object.__setattr__(self, "range", _range(self.range, name))
        if self.tasks is not None:
            listed = (self.tasks,) if isinstance(self.tasks, str) else tuple(self.tasks)
            object.__setattr__(self, "tasks", listed)

    def fits(self, task: Task) -> bool:
        """Return whether the metric is for a task, or for one that the task is derived from.

        Examples
        --------
        >>> classification = tasks.build("classification")
        >>> build("auroc").fits(classification), build("mae").fits(classification)
        (True, False)
        """
        return self.tasks is None or any(
            isinstance(task, type(tasks.build(name))) for name in self.tasks
        )

    def measured_by(self, task: Task) -> bool:
        """Return whether the metric is the task's score.

        Examples
        --------
        >>> build("accuracy").measured_by(tasks.build("classification"))
        True
        """
        return self.name == task.score and _METRICS.get(self.name) is self and not self._own

    @property
    def _own(self) -> bool:
        return not str(_place(self.function)[0]).startswith(f"{__name__}.")

    def __call__(self, output: Tensor, y: Tensor) -> float:
        """Return the value of one client; NaN if it is undefined.

        Parameters
        ----------
        output, y : Tensor
            The outputs and targets of all its samples.

        Returns
        -------
        float
            The value, even if it is not in ``range``.

        Examples
        --------
        >>> build("mae")(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 2.0]))
        1.5
        """
        output = output.detach().cpu()
        output = output.double() if output.is_floating_point() else output
        try:
            value = self.function(output, y.detach().cpu())
        except Exception as error:
            if not bool(torch.isfinite(output).all()):
                # The model has diverged. The loss shows this.
                return math.nan
            raise InputError(
                f"metric {self.name!r} failed: {type(error).__name__}: {error}"
            ) from error
        if value is None:
            return math.nan
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"metric {self.name!r} returned {value!r}; valid: one number, or None if it is "
                "undefined"
            ) from error

    def fault(self, value: float) -> str | None:
        """Return the reason why a value must be left out, if there is one.

        Examples
        --------
        >>> build("auroc").fault(0.5), build("auroc").fault(math.nan), build("auroc").fault(1.5)
        (None, 'undefined', '1.5 is not in the range from 0 to 1')
        """
        if math.isnan(value):
            return "undefined"
        low, high = self.range
        # Sums may be out of range because of rounding.
        slack = 1e-9 * max(1.0, *(abs(bound) for bound in self.range if math.isfinite(bound)), 0.0)
        if math.isfinite(value) and low - slack <= value <= high + slack:
            return None
        return f"{value:g} is not in the range from {low:g} to {high:g}"


def _range(given: Any, name: str) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in given)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not low < high:
        raise InputError(
            f"range of metric {name!r} must be the smallest and the largest value, got {given!r}"
        )
    return low, high


def register(
    name: str | None = None,
    *,
    higher_is_better: bool,
    range: tuple[float, float] = (-math.inf, math.inf),
    tasks: Sequence[str] | None = None,
) -> Callable[[F], F]:
    """Register a function as a metric. Use it as a decorator.

    Parameters
    ----------
    name : str, optional
        The name in ``evaluation.metrics``; by default that of the function.
    higher_is_better, range, tasks
        As for :class:`Metric`.

    Returns
    -------
    callable
        A decorator that returns the function unchanged.

    Raises
    ------
    InputError
        If the name is taken or reserved.

    Examples
    --------
    >>> @register(higher_is_better=False, range=(0, 1), tasks=["classification"])
    ... def error_rate(output, y):
    ...     return (output.argmax(1) != y).double().mean()
    >>> build("error_rate")(torch.tensor([[2.0, 1.0], [2.0, 1.0]]), torch.tensor([0, 1]))
    0.5
    """

    def known(function: F) -> F:
        metric = Metric(
            function=function,
            name=name or "",
            higher_is_better=higher_is_better,
            range=range,
            tasks=tasks,
        )
        if metric._own:
            # The name must not be that of a metric that has not been imported yet.
            _discover()
        before = _METRICS.get(metric.name, metric).function
        if _place(before) != _place(function):
            raise InputError(
                f"the name {metric.name!r} of a metric is taken by "
                f"{':'.join(map(str, _place(before)))}; choose another"
            )
        _METRICS[metric.name] = metric
        return function

    return known


def _place(function: Function) -> tuple[Any, Any]:
    return getattr(function, "__module__", None), getattr(function, "__qualname__", function)


def _discover() -> dict[str, Metric]:
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return _METRICS


def names() -> list[str]:
    """List the names of all metrics.

    Examples
    --------
    >>> {"accuracy", "auroc", "ece", "f1_macro", "mae"} <= set(names())
    True
    """
    return sorted(_discover())


def build(name: str, *, where: str | None = None) -> Metric:
    """Return a metric by name.

    Parameters
    ----------
    name : str
        One of :func:`names`.
    where : str, optional
        Where the name came from, for the error.

    Returns
    -------
    Metric
        The metric.

    Examples
    --------
    >>> build("ece").higher_is_better
    False
    """
    known = _METRICS if name in _METRICS else _discover()
    if name not in known:
        raise unknown("metric", name, known, where=where)
    return known[name]


def several_from(given: Any, where: str) -> tuple[Metric, ...]:
    """Return a tuple of metrics, given by name or as objects. Duplicates are refused.

    Parameters
    ----------
    given : sequence of str or Metric
        The metrics.
    where : str
        How errors name them.

    Returns
    -------
    tuple of Metric
        In the given order.

    Examples
    --------
    >>> [metric.name for metric in several_from(["auroc", build("ece")], "metrics")]
    ['auroc', 'ece']
    """
    if isinstance(given, str | Metric) or not isinstance(given, Iterable):
        raise InputError(
            f"{where} must be a list of metrics, got {given!r}; valid names: {', '.join(names())}"
        )
    made = tuple(_one(item, where) for item in given)
    listed = [metric.name for metric in made]
    if twice := next((name for name in listed if listed.count(name) > 1), None):
        raise InputError(f"{where} has {twice!r} twice")
    return made


def _one(given: Any, where: str) -> Metric:
    if isinstance(given, Metric):
        return given
    if isinstance(given, str):
        return build(given, where=where)
    registered = next((metric for metric in _METRICS.values() if metric.function is given), None)
    if registered is not None:
        return registered
    if callable(given):
        called = getattr(given, "__name__", repr(given))
        raise InputError(
            f"{where} has the function {called} without higher_is_better; write "
            f"Metric(function={called}, higher_is_better=...) or register it"
        )
    raise InputError(
        f"{where} must be names of metrics, or metrics, got {given!r}; valid names: "
        f"{', '.join(names())}"
    )


def check_metrics(metrics: Iterable[Metric], task: Task, measured: Iterable[str] = ()) -> None:
    """Refuse metrics that are for other tasks, or that have the name of one of the task's metrics.

    Parameters
    ----------
    metrics : iterable of Metric
        The metrics.
    task : Task
        The task of the federation.
    measured : iterable of str
        Known metrics of the task besides its score.

    Examples
    --------
    >>> check_metrics([build("mae")], tasks.build("classification"))
    Traceback (most recent call last):
    equipoise.errors.InputError: evaluation.metrics: 'mae' is for regression, but the task is
    classification
    """
    for metric in metrics:
        if not metric.fits(task):
            raise InputError(
                f"evaluation.metrics: {metric.name!r} is for {' and '.join(metric.tasks or ())}, "
                f"but the task is {task.name}"
            )
        if metric.name in (task.score, *measured) and not metric.measured_by(task):
            raise InputError(
                f"evaluation.metrics: {metric.name!r} is already a metric of the task {task.name}; "
                "give the metric another name"
            )


def computed(metrics: Iterable[Metric], task: Task) -> tuple[Metric, ...]:
    """Return the metrics that must be computed from outputs, without a task's own score.

    Examples
    --------
    >>> metrics = [build("accuracy"), build("auroc")]
    >>> [metric.name for metric in computed(metrics, tasks.build("classification"))]
    ['auroc']
    """
    return tuple(metric for metric in metrics if not metric.measured_by(task))


def measure(metrics: Iterable[Metric], output: Tensor, y: Tensor, client: int) -> dict[str, float]:
    """Return the values of some metrics for one client, by name.

    Parameters
    ----------
    metrics : iterable of Metric
        The metrics.
    output, y : Tensor
        The outputs and targets of all its samples.
    client : int
        Its number, for errors.

    Returns
    -------
    dict of float
        NaN if a metric is undefined.

    Examples
    --------
    >>> measure([build("auroc")], torch.tensor([[0.0, 1.0]]), torch.tensor([1]), client=0)
    {'auroc': nan}
    """
    try:
        return {metric.name: metric(output, y) for metric in metrics}
    except InputError as error:
        raise InputError(f"client {client}: {error}") from error
