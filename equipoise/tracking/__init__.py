"""Trackers: callbacks that write the values of a run for TensorBoard, MLflow or other programs.

Write ``tracking: tensorboard`` in an experiment, or ``callbacks=[TensorBoard()]`` in Python. A
tracker is a dataclass of its options, derived from :class:`equipoise.Callback`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

from equipoise.errors import InputError
from equipoise.imports import Registry, enter, look_up
from equipoise.run.callbacks import Callback, Snapshot

__all__ = ["TRACKERS", "build", "register", "round_values", "scores", "tracker_of"]

C = TypeVar("C", bound=type[Callback])

TRACKERS: Registry = {
    "tensorboard": "equipoise.tracking.tensorboard:TensorBoard",
    "mlflow": "equipoise.tracking.mlflow:MLflow",
}
"""The class of each tracker."""

# The entries of a round's row that are numbers.
_OF_A_ROUND = (
    "train_loss",
    "cohort",
    "bytes_up",
    "bytes_down",
    "bytes_overhead",
    "messages",
    "evaluations",
)


def register(tracker: C) -> C:
    """Register a tracker under the name of its class. Use it as a decorator.

    Parameters
    ----------
    tracker : type
        A dataclass derived from :class:`equipoise.Callback`. Its fields are the options in
        ``tracking``.

    Returns
    -------
    type
        The same class.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @register
    ... @dataclass
    ... class Printed(Callback):
    ...     digits: int = 3
    ...
    ...     def round(self, run):
    ...         print(run.round, round(run.record["train_loss"], self.digits))
    >>> build("Printed", digits=2)
    Printed(digits=2)
    """
    return enter(TRACKERS, tracker, "tracker")


def tracker_of(name: str) -> type[Callback]:
    """Return the class of a tracker.

    Examples
    --------
    >>> tracker_of("tensorboard").__name__
    'TensorBoard'
    """
    found: Any = look_up(TRACKERS, name, "tracker")
    return found


def build(name: str, **options: Any) -> Callback:
    """Return a tracker by its name and options.

    Parameters
    ----------
    name : str
        One of :data:`TRACKERS`.
    **options
        The fields of its class.

    Returns
    -------
    Callback
        For ``callbacks``.

    Raises
    ------
    InputError
        If the package that it needs is not installed.

    Examples
    --------
    >>> build("tensorbord")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: unknown tracker 'tensorbord'; did you mean 'tensorboard'? ...
    """
    tracker = tracker_of(name)
    for package in getattr(tracker, "packages", ()):
        if find_spec(package) is None:
            raise InputError(f"tracking: {name} needs {package}: pip install 'equipoise[{name}]'")
    return tracker(**options)


def round_values(run: Snapshot) -> dict[str, float]:
    """Return the numbers of a round, such as its training loss and bytes, by name.

    Parameters
    ----------
    run : Snapshot
        The run after a round.

    Returns
    -------
    dict of float
        Names begin with ``round/``.
    """
    return {f"round/{name}": float(run.record[name]) for name in _OF_A_ROUND if name in run.record}


def scores(run: Snapshot) -> dict[str, float]:
    """Return the results of an evaluated round by name.

    Parameters
    ----------
    run : Snapshot
        The run after an evaluation.

    Returns
    -------
    dict of float
        Names are ``split/model/who/metric``, such as ``test/global/seen/worst_group``. Groups,
        further metrics and attributes have names such as ``test/global/seen/groups/north``,
        ``test/global/seen/metrics/auroc/mean`` and
        ``test/global/seen/attributes/sex/demographic_parity_difference``.
    """
    found: dict[str, float] = {}
    for split in ("test", "val"):
        for name, value in _numbers(run.results(split)):
            tidy = re.sub(r"[^\w.\- /]", "_", f"{split}/{name}")
            while tidy in found:
                # The original names differ only in characters that were replaced.
                tidy += "_"
            found[tidy] = value
    return found


def _numbers(nested: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested mappings by path, without ids of clients."""
    for name, value in nested.items():
        path = f"{before}{name}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}/")
        elif (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and not name.endswith("_id")
        ):
            yield path, float(value)
