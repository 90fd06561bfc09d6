"""The tasks by name.

This directory has one file for each task. New files are found automatically. A task defines what is
learned: the loss and the metrics of each sample, and which targets are valid. :func:`register` adds
custom tasks.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from equipoise.errors import InputError, unknown
from equipoise.task import Task

__all__ = ["build", "names", "register"]

T = TypeVar("T", bound=type[Task])

_TASKS: dict[str, type[Task]] = {}


def register(name: str) -> Callable[[T], T]:
    """Register a task under a name. Use it as a class decorator.

    Parameters
    ----------
    name : str
        The name in ``Federation(..., task=name)`` and in configuration files.

    Returns
    -------
    callable
        A class decorator.

    Raises
    ------
    InputError
        If the class is not a :class:`~equipoise.task.Task`, has no loss, or the name is taken.

    Examples
    --------
    >>> from equipoise.tasks.regression import Regression
    >>> @register("median")
    ... class Median(Regression):
    ...     def loss(self, output, y):
    ...         return (output.reshape(y.shape) - y).abs()
    >>> build("median").score
    'loss'
    """

    def known(task: T) -> T:
        if not (isinstance(task, type) and issubclass(task, Task)):
            raise InputError(
                f"{task!r}, registered as {name!r}, is not a task; valid: a class derived from Task"
            )
        if task.loss is Task.loss:
            raise InputError(
                f"{task.__qualname__}, registered as {name!r}, is a task without a method 'loss'"
            )
        if task.score != "loss" and task.metrics is Task.metrics:
            raise InputError(
                f"{task.__qualname__}, registered as {name!r}, has the score {task.score!r} but no "
                "method 'metrics' that returns it"
            )
        if not task.__module__.startswith(f"{__name__}."):
            # User code must not use the name of a task that has not been imported yet.
            _discover()
            _check_names(task, name)
        before = _TASKS.get(name, task)
        if (before.__module__, before.__qualname__) != (task.__module__, task.__qualname__):
            raise InputError(
                f"the name {name!r} of a task is taken by {before.__qualname__}; choose another"
            )
        task.name = name
        _TASKS[name] = task
        return task

    return known


def _check_names(task: type[Task], name: str) -> None:
    """Refuse metrics that have the name of a column, and empty ranges."""
    from equipoise.metrics import COLUMNS  # it imports this module

    for metric in {task.score, *task.ranges} - {"loss"}:
        if metric in COLUMNS:
            raise InputError(
                f"{task.__qualname__}, registered as {name!r}, has a metric called {metric!r}, "
                "which is another column of metrics.jsonl; choose another name"
            )
    for metric, bounds in task.ranges.items():
        if not isinstance(bounds, tuple) or len(bounds) != 2 or not bounds[0] < bounds[1]:
            raise InputError(
                f"{task.__qualname__}, registered as {name!r}, has the range {bounds!r} for "
                f"{metric!r}; valid: the smallest and the largest value"
            )


def _discover() -> dict[str, type[Task]]:
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return _TASKS


def names() -> list[str]:
    """List the names of all tasks.

    Examples
    --------
    >>> {"classification", "regression", "segmentation"} <= set(names())
    True
    """
    return sorted(_discover())


def build(name: str) -> Task:
    """Return a task by name.

    Parameters
    ----------
    name : str
        One of :func:`names`.

    Returns
    -------
    Task
        The task.

    Examples
    --------
    >>> build("segmentation").score
    'dice'
    """
    known = _TASKS if name in _TASKS else _discover()
    if name not in known:
        raise unknown("task", name, known)
    return known[name]()
