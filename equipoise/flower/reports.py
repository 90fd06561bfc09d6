"""The numbers that clients report: which they may be, their ranges, and metrics by split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from equipoise.engine.evaluation import Measured
from equipoise.flower.checks import Misfit
from equipoise.flower.settings import LARGEST_REPORT
from equipoise.metrics import Metric
from equipoise.task import Task
from equipoise.tree import LARGEST

EVALUATED = ("val", "test")
"""The splits on which clients evaluate models."""

_SMALLEST_RATE = 1e-12


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number that clients report.

    Parameters
    ----------
    called : str
        Its name in reasons.
    low, high : float
        The smallest and the largest valid number.
    needed : bool
        Whether an answer without it, or with NaN, cannot be used.
    judged : bool
        Whether an answer with a value outside of the range cannot be used. Otherwise the value is
        passed on, and is left out where rows of metrics are made; see
        :func:`equipoise.run.client_rows.client_rows`.

    Examples
    --------
    >>> Number(called="test accuracy", low=0.0, high=1.0).read(0.5)
    0.5
    >>> Number(called="test accuracy", low=0.0, high=1.0).read(7.5)
    Traceback (most recent call last):
    equipoise.flower.checks.Misfit: answered with 7.5 as test accuracy, which is not in the range
    from 0 to 1
    """

    called: str
    low: float = -LARGEST_REPORT
    high: float = LARGEST_REPORT
    needed: bool = True
    judged: bool = True

    def read(self, value: object) -> float:
        """Return a reported value as a number, NaN if there is none."""
        if value is None and not self.needed:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, int | float):
            if not self.judged:
                return math.nan
            what = (
                "nothing"
                if value is None
                else "a list"
                if isinstance(value, list)
                else f"a {type(value).__name__}"
            )
            raise Misfit(f"answered with {what} as {self.called}")
        number = float(value)
        if not self.judged or (math.isnan(number) and not self.needed):
            return number
        if not math.isfinite(number):
            raise Misfit(f"answered with {number} as {self.called}")
        # Means may be outside of the range because of rounding.
        slack = 1e-9
        if not self.low - slack * abs(self.low) <= number <= self.high + slack * abs(self.high):
            raise Misfit(
                f"answered with {number:g} as {self.called}, which is not in the range from "
                f"{self.low:g} to {self.high:g}"
            )
        return number


@dataclass(frozen=True)
class Declared:
    """The numbers that clients of a run may report: a fixed set with ranges.

    Parameters
    ----------
    task : Task
        The task, with its metrics besides the loss and their ranges.
    largest_loss : float
        The largest loss, and the negative of the smallest one.
    metrics : sequence of Metric
        Further metrics of the run.

    Examples
    --------
    >>> from equipoise import tasks
    >>> declared = Declared(tasks.build("classification"))
    >>> numbers = declared.of_model("global", {"val": 0, "test": 9})
    >>> [number.called for number in numbers["global.test"].values()]
    ['test loss of the global model', 'test accuracy of the global model']
    """

    task: Task
    largest_loss: float = LARGEST_REPORT
    metrics: tuple[Metric, ...] = ()

    def measured(self, called: str, *, needed: bool, metrics: bool = False) -> dict[str, Number]:
        """Return the numbers of a model on a split; ``called`` is a template for their names."""
        names = ("loss", self.task.score, *self.task.ranges)
        found = {name: self._of_task(name, called.format(name), needed=needed) for name in names}
        for metric in self.metrics if metrics else ():
            optional = Number(called=called.format(metric.name), needed=False, judged=False)
            found.setdefault(metric.name, optional)
        return found

    def _of_task(self, name: str, called: str, *, needed: bool) -> Number:
        """Return a metric of the task, in its range."""
        low, high = self.task.ranges.get(name, (-math.inf, math.inf))
        largest = self.largest_loss if name == "loss" else LARGEST_REPORT
        return Number(called=called, low=max(low, -largest), high=min(high, largest), needed=needed)

    def of_model(self, kind: str, sizes: Mapping[str, int]) -> dict[str, dict[str, Number]]:
        """Return the numbers of one kind of model on each split, by the names of their records."""
        return {
            f"{kind}.{split}": self.measured(
                f"{split} {{}} of the {kind} model", needed=bool(sizes[split]), metrics=True
            )
            for split in EVALUATED
        }

    def of_training(self, reports: Iterable[str], sizes: Mapping[str, int]) -> dict[str, Number]:
        """Return what clients report after training: loss, steps, and the requested reports."""
        found = {
            # The minimized loss may differ from that of the task.
            "train_loss": Number(
                called="train_loss",
                low=-self.largest_loss,
                high=self.largest_loss,
                needed=bool(sizes["train"]),
            ),
            "steps": Number(called="steps", low=0.0, high=LARGEST, needed=bool(sizes["train"])),
        }
        for name in sorted(reports):
            # The loss on a split without samples is NaN and is not used.
            needed = bool(sizes["val" if name.startswith("val_") else "train"])
            if "loss" in name:
                found[name] = self._of_task("loss", name, needed=needed)
            elif "score" in name:
                found[name] = self._of_task(self.task.score, name, needed=needed)
            elif name == "lr":
                found[name] = Number(called=name, low=_SMALLEST_RATE, high=LARGEST, needed=needed)
            else:
                found[name] = Number(called=name, needed=needed)
        return found


Numbers = Mapping[str, Mapping[str, float]]


def measured_by(
    answers: Mapping[int, Numbers], clients: Iterable[int], kind: str
) -> dict[str, Measured]:
    """Return the metrics of one kind of model by split; NaN for clients that did not answer.

    Parameters
    ----------
    answers : mapping
        The numbers that clients reported, by client and record; see :class:`Answer`.
    clients : iterable of int
        The clients, in the order of the values.
    kind : {"global", "personal", "local"}
        The kind of model.

    Returns
    -------
    dict of dict of float64 arrays
        By split and metric.

    Examples
    --------
    >>> said = {3: {"global.val": {"loss": 0.5}, "global.test": {"loss": 0.25, "accuracy": 0.75}}}
    >>> measured_by(said, [2, 3], "global")["test"]["accuracy"]
    array([ nan, 0.75])
    """
    clients = list(clients)
    measured: dict[str, Measured] = {
        split: {"loss": np.full(len(clients), np.nan)} for split in EVALUATED
    }
    for position, client in enumerate(clients):
        if client not in answers:
            continue
        for split, columns in measured.items():
            for name, value in answers[client][f"{kind}.{split}"].items():
                columns.setdefault(name, np.full(len(clients), np.nan))[position] = value
    return measured
