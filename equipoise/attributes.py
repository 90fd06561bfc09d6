"""Attributes of samples, such as the sex of a person, and counts of samples by their values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equipoise.errors import InputError, unknown
from equipoise.task import Task

__all__ = [
    "Attribute",
    "Counting",
    "attributes_from",
    "column_of",
    "counting_of",
    "counts_in",
    "read_column",
]

Ints = NDArray[np.int64]
Given = Mapping[str, "Attribute | Sequence[Any] | NDArray[Any]"]

MOST_ATTRIBUTES, MOST_VALUES = 20, 100
"""The largest number of attributes, and of values of an attribute."""

SCORED = ("scored", "score_sum")
"""The number of samples with a score, and the sum of their scores."""
BY_TARGET = ("positives", "negatives", "true_positives", "false_positives")
"""The numbers of samples with a positive and with a negative target."""
COUNTS = ("n", "selected", *SCORED, *BY_TARGET)
"""What a client counts for each value of an attribute."""


@dataclass(frozen=True, eq=False)
class Attribute:
    """A property of samples.

    Parameters
    ----------
    codes : int array of shape [N]
        The value of every sample, as a position in ``names``.
    names : tuple of str
        The values, in alphabetical order.

    Examples
    --------
    >>> sex = Attribute.of(["Male", "Female", "Male"], "sex")
    >>> sex.names, sex.codes.tolist()
    (('Female', 'Male'), [1, 0, 1])
    """

    codes: Ints
    names: tuple[str, ...]

    @classmethod
    def of(cls, values: Sequence[Any] | NDArray[Any] | Tensor, name: str) -> Attribute:
        """Make an attribute from the value of each sample. Values are converted to text.

        Parameters
        ----------
        values : sequence
            One value per sample. None and NaN are refused.
        name : str
            What errors call the attribute.

        Returns
        -------
        Attribute
            With the distinct values as names.

        Examples
        --------
        >>> Attribute.of([1, None], "age")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        equipoise.errors.InputError: attribute 'age' of sample 1 is missing; use a value such as ...
        """
        # Arrays, tensors and columns of data frames.
        listed = values.tolist() if hasattr(values, "tolist") else values
        if isinstance(listed, str) or not isinstance(listed, Sequence):
            raise InputError(
                f"attribute {name!r} must be a list with one value per sample, got {values!r}"
            )
        for sample, value in enumerate(listed):
            if value is None or (isinstance(value, float) and math.isnan(value)):
                raise InputError(
                    f"attribute {name!r} of sample {sample} is missing; use a value such as "
                    "'unknown' for such samples"
                )
            if not isinstance(value, str | int | float | np.generic):
                raise InputError(
                    f"attribute {name!r} of sample {sample} must be text or a number, got {value!r}"
                )
        names, codes = np.unique(
            np.array([str(value) for value in listed], dtype=str), return_inverse=True
        )
        if len(names) > MOST_VALUES:
            raise InputError(
                f"attribute {name!r} has {len(names)} values; valid: at most {MOST_VALUES}. Divide "
                "numbers into intervals, such as '18 to 29'"
            )
        return cls(codes.reshape(-1).astype(np.int64), tuple(names.tolist()))

    def padded(self, samples: int) -> Attribute:
        """Return the attribute for more samples. The additional ones are never counted.

        Examples
        --------
        >>> Attribute.of(["b", "a"], "letter").padded(3).codes.tolist()
        [1, 0, 0]
        """
        return Attribute(np.pad(self.codes, (0, samples - len(self.codes))), self.names)


def attributes_from(given: Given | None, samples: int, where: str) -> dict[str, Attribute]:
    """Return attributes, checked against the number of samples.

    Parameters
    ----------
    given : mapping of str to Attribute or sequence, optional
        The value of every sample, by the name of the attribute.
    samples : int
        How many samples there are.
    where : str
        Where they came from, for errors.

    Returns
    -------
    dict of Attribute
        By name, in the given order.

    Examples
    --------
    >>> attributes_from({"sex": ["f", "m"]}, 3, "'clinic'")
    Traceback (most recent call last):
    equipoise.errors.InputError: attribute 'sex' of 'clinic' has 2 values, but there are 3 samples
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(
            f"attributes of {where} must be a mapping from names to one value per sample, such as "
            f"{{'sex': ['Female', 'Male', ...]}}, got {type(given).__name__}"
        )
    if len(given) > MOST_ATTRIBUTES:
        raise InputError(f"{where} has {len(given)} attributes; valid: at most {MOST_ATTRIBUTES}")
    made = {}
    for name, values in given.items():
        if not isinstance(name, str) or not name:
            raise InputError(f"an attribute of {where} must have a name, got {name!r}")
        attribute = values if isinstance(values, Attribute) else Attribute.of(values, name)
        if ((attribute.codes < 0) | (attribute.codes >= len(attribute.names))).any():
            raise InputError(
                f"attribute {name!r} of {where} has codes that are not positions in its "
                f"{len(attribute.names)} names"
            )
        if len(attribute.codes) != samples:
            raise InputError(
                f"attribute {name!r} of {where} has {len(attribute.codes)} values, but there are "
                f"{samples} samples"
            )
        made[name] = attribute
    return made


def column_of(attribute: str, value: str, count: str) -> str:
    """Return the name under which a count is reported.

    Examples
    --------
    >>> column_of("sex", "Female", "n")
    '["sex", "Female", "n"]'
    """
    return json.dumps([attribute, value, count], ensure_ascii=False)


def read_column(name: str) -> tuple[str, str, str] | None:
    """Parse a name made by :func:`column_of`; None for the names of loss and metrics.

    Examples
    --------
    >>> read_column('["sex", "Female", "n"]'), read_column("loss")
    (('sex', 'Female', 'n'), None)
    """
    if not name.startswith("["):
        return None
    try:
        parts = json.loads(name)
    except (ValueError, RecursionError):
        return None
    if (
        len(parts) != 3
        or not all(isinstance(part, str) for part in parts)
        or parts[2] not in COUNTS
        # Every count has one name.
        or column_of(*parts) != name
    ):
        return None
    return parts[0], parts[1], parts[2]


@dataclass(frozen=True)
class Counting:
    """Count the samples of one client by the values of attributes.

    Counts of small cells are withheld: they do not leave the client. The samples of one value are a
    cell. Those among them with a positive target and those with a negative one are cells, too. A
    cell is small if it has at least one sample and fewer than ``min_cell``. If the cell of a value
    is small, nothing is reported for the value. If one of its cells by target is small, only the
    number of its samples and of positive predictions are reported, but not the score, TPR and FPR,
    which depend on targets. In both cases further values are withheld, the smallest first, until
    the withheld counts cannot be computed from the client's totals: at least two values, whose
    cells together are not small.

    Parameters
    ----------
    attributes : mapping of str to Attribute
        The attributes of all samples.
    task : Task
        Defines the score of a sample.
    positive : int or None
        The class that counts as a positive prediction. Without it, counts that depend on it are not
        made.
    min_cell : int
        The smallest number of samples that is reported. With 1, nothing is withheld.

    Examples
    --------
    >>> import torch
    >>> from equipoise import tasks
    >>> sex = {"sex": Attribute.of(["f", "m", "m", "f"], "sex")}
    >>> counting = Counting(sex, tasks.build("classification"), positive=1, min_cell=1)
    >>> output = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    >>> counted = counting(output, torch.tensor([1, 0, 0]), np.array([0, 1, 2]))
    >>> counted[column_of("sex", "m", "n")], counted[column_of("sex", "m", "selected")]
    (2.0, 1.0)
    """

    attributes: Mapping[str, Attribute]
    task: Task
    positive: int | None
    min_cell: int

    def __call__(self, output: Tensor, y: Tensor, samples: Ints) -> dict[str, float]:
        """Count the samples of a client by their values.

        Parameters
        ----------
        output, y : Tensor
            The outputs and targets of all samples of one of its splits.
        samples : int array
            Their positions in the federation, in the same order.

        Returns
        -------
        dict of float
            The counts that are not withheld, by the names of :func:`column_of`. Values without
            samples have no counts.
        """
        score = self.task.metrics(output, y)[self.task.score].detach().double().cpu().numpy()
        ones = np.ones(len(samples))
        of_samples = {"n": ones, "scored": ones, "score_sum": score}
        if self.positive is not None:
            target = y.cpu().numpy() == self.positive
            selected = output.argmax(1).cpu().numpy() == self.positive
            of_samples |= {
                "selected": selected,
                "positives": target,
                "negatives": ~target,
                "true_positives": target & selected,
                "false_positives": ~target & selected,
            }
        counted: dict[str, float] = {}
        for name, attribute in self.attributes.items():
            codes, length = attribute.codes[samples], len(attribute.names)
            sums: dict[str, Any] = {
                count: np.bincount(codes, weights=values.astype(float), minlength=length)
                for count, values in of_samples.items()
            }
            given = by_target = ~_withheld(sums["n"][:, None], self.min_cell)
            if self.positive is not None:
                cells = np.stack([sums["positives"], sums["negatives"]], 1)
                by_target = ~_withheld(cells, self.min_cell, ~given)
            for code in np.flatnonzero(given & (sums["n"] > 0)).tolist():
                for count, totals in sums.items():
                    if count in ("n", "selected") or by_target[code]:
                        counted[column_of(name, attribute.names[code], count)] = float(totals[code])
        return counted


def _withheld(
    cells: NDArray[np.float64], min_cell: int, already: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_]:
    """Return which values are withheld, given their cells, an array of shape [values, cells]."""

    def small(counts: NDArray[np.float64]) -> NDArray[np.bool_]:
        return (counts > 0) & (counts < min_cell)

    withheld: NDArray[np.bool_] = np.any(small(cells), axis=1)
    if already is not None:
        withheld |= already
    held = cells.sum(1) > 0
    # The smallest values first, so that most samples are reported.
    for value in np.argsort(cells.min(1), kind="stable").tolist():
        hidden = withheld & held
        safe = hidden.sum() >= 2 and not small(cells[hidden].sum(0)).any()
        if not hidden.any() or safe:
            break
        withheld[value] |= held[value]
    return withheld


def counting_of(
    attributes: Mapping[str, Attribute],
    task: Task,
    classes: int | None,
    class_names: Sequence[str] | None,
    *,
    positive: int | str | None,
    min_cell: int,
) -> Counting | None:
    """Return a :class:`Counting` for a federation, or None without attributes.

    Parameters
    ----------
    attributes : mapping of str to Attribute
        The attributes of a federation.
    task : Task
        Its task.
    classes : int or None
        How many classes it has.
    class_names : sequence of str, optional
        Their names.
    positive : int, str or None
        ``evaluation.positive``: a class by number or name. None is class 1 if there are two
        classes, and none otherwise.
    min_cell : int
        ``evaluation.min_cell``.

    Returns
    -------
    Counting or None
        For :attr:`equipoise.engine.contract.Engine.counting`.

    Examples
    --------
    >>> from equipoise import tasks
    >>> sex = {"sex": Attribute.of(["f", "m"], "sex")}
    >>> counting_of(sex, tasks.build("classification"), 2, None, positive=None, min_cell=5).positive
    1
    """
    if positive is not None and not task.labels:
        raise InputError(
            f"evaluation.positive={positive!r} is not valid for a {task.name}; leave it out"
        )
    chosen = _positive(positive, classes or 0, class_names) if task.labels else None
    return Counting(attributes, task, chosen, min_cell) if attributes else None


def _positive(given: int | str | None, classes: int, names: Sequence[str] | None) -> int | None:
    if given is None:
        return 1 if classes == 2 else None
    if isinstance(given, str):
        if given not in (names or ()):
            raise unknown(
                "class", given, names or map(str, range(classes)), where="evaluation.positive"
            )
        return list(names or ()).index(given)
    if not 0 <= given < classes:
        raise InputError(
            f"evaluation.positive must be a class from 0 to {classes - 1}, got {given}"
        )
    return given


def counts_in(numbers: Mapping[str, float]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the counts among the numbers of one client, by attribute, value and count.

    NaN means that the client does not report the count.

    Examples
    --------
    >>> counts_in({"loss": 0.5, column_of("sex", "m", "n"): 3.0})
    {'sex': {'m': {'n': 3.0}}}
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, number in numbers.items():
        if (parts := read_column(name)) and not math.isnan(number):
            attribute, value, count = parts
            found.setdefault(attribute, {}).setdefault(value, {})[count] = number
    return found
