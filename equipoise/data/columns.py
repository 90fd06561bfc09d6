"""How the columns of a table become inputs and classes, as runs store it.

Data ``table`` learns it from its file, and applies it to the rows of this file. A run stores it in
``columns.json``, so that its model can be used on other rows: `read_columns`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.attributes import MOST_VALUES
from equipoise.data.cells import Cells, cells_in, cells_of, number_in
from equipoise.data.files import working_directory
from equipoise.documents import read_json
from equipoise.errors import InputError, RunError, few
from equipoise.run.checksums import verify
from equipoise.run.files import write_atomically
from equipoise.text import represented

COLUMNS = "columns.json"
# Means and deviations that other machines compute of the same numbers differ by rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Number:
    """A numeric column, which is one input.

    Parameters
    ----------
    name : str
        The name of the column.
    mean : float
        The mean, which replaces missing values.
    deviation : float, optional
        The standard deviation, 0 if all numbers are the same. Without it inputs are not
        standardized.

    Examples
    --------
    >>> age = Cells("age", ["30", "", "50"], [2, 3, 4], "patients.csv")
    >>> Number("age", 40.0, 10.0).inputs(age).tolist()
    [[-1.0], [0.0], [1.0]]
    """

    name: str
    mean: float
    deviation: float | None = None

    @property
    def inputs_named(self) -> tuple[str, ...]:
        """The name of the input."""
        return (self.name,)

    def inputs(self, cells: Cells) -> NDArray[np.float32]:
        """Return the input of each row, ``[N, 1]``."""
        cells.refuse_texts("an input that was numeric in training")
        numbers = cells.numbers()
        filled = np.where(np.isnan(numbers), self.mean, numbers)
        if self.deviation is not None:
            filled = (
                (filled - self.mean) / self.deviation if self.deviation else np.zeros_like(filled)
            )
        return filled[:, None].astype(np.float32)

    def difference(self, other: Number | Text) -> str | None:
        """Return what differs in another column of this name, or ``None``."""
        if not isinstance(other, Number):
            return f"column {self.name!r} has numbers there and texts here"
        if (self.deviation is None) != (other.deviation is None):
            there, here = (
                "as it is" if one.deviation is None else "standardized" for one in (self, other)
            )
            return f"column {self.name!r} is {there} there and {here} here"
        size = max(abs(self.mean), self.deviation or 0)
        for what in ("mean", "deviation"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine is not None and not math.isclose(
                mine, theirs, rel_tol=0, abs_tol=_ROUNDING * size
            ):
                return f"column {self.name!r} has {what} {mine:.9g} there and {theirs:.9g} here"
        return None


@dataclass(frozen=True)
class Text:
    """A column of texts, which has one input for each value.

    Parameters
    ----------
    name : str
        The name of the column.
    values : tuple of str
        The values.

    Examples
    --------
    >>> ward = Cells("ward", ["b", "", "a"], [2, 3, 4], "patients.csv")
    >>> Text("ward", ("a", "b")).inputs(ward).tolist()
    [[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    """

    name: str
    values: tuple[str, ...]

    @property
    def inputs_named(self) -> tuple[str, ...]:
        """The names of the inputs, such as ``ward=surgery``."""
        return tuple(f"{self.name}={value}" for value in self.values)

    def inputs(self, cells: Cells) -> NDArray[np.float32]:
        """Return zeros and ones for each row, ``[N, values]``."""
        position = {value: number for number, value in enumerate(self.values)}
        for value in cells.values:
            if value not in position:
                raise InputError(
                    f"{cells.where} has {represented(value)} in {cells.at(value)}, which was not "
                    f"in training; valid: {few(self.values)}, or no value, which makes all inputs "
                    "of the column 0"
                )
        # Missing values have the last row, of zeros.
        rows = np.eye(len(self.values) + 1, len(self.values), dtype=np.float32)
        return rows[[position.get(cell, len(self.values)) for cell in cells.cells]]

    def difference(self, other: Number | Text) -> str | None:
        """Return what differs in another column of this name, or ``None``."""
        if not isinstance(other, Text):
            return f"column {self.name!r} has texts there and numbers here"
        return _other_name(f"column {self.name!r}: value", self.values, other.values)


@dataclass(frozen=True)
class Target:
    """The column of the target.

    Parameters
    ----------
    name : str
        The name of the column.
    task : str
        What is learned.
    classes : tuple of str, optional
        The names of the classes in the order of the labels, in a classification.

    Examples
    --------
    >>> ill = Cells("ill", ["yes", "no"], [2, 3], "patients.csv")
    >>> Target("ill", "classification", ("no", "yes")).classify(ill)
    (array([1, 0]), ('no', 'yes'))
    """

    name: str
    task: str
    classes: tuple[str, ...] | None = None

    def classify(self, cells: Cells) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """Return the label of each row, and the names of the classes."""
        names = self.classes or ()
        numbers = [number_in(name) for name in names]
        # As when they were learned, 1 and 1.0 are one class if all classes are numbers.
        numeric = None not in numbers
        keys: Sequence[object] = numbers if numeric else names
        known = {key: label for label, key in enumerate(keys)}
        labels = {}
        for value, number in cells.values.items():
            key = number if numeric else value
            if key not in known:
                raise InputError(
                    f"{cells.where} has {represented(value)} in {cells.at(value)}, which was no "
                    f"class in training; valid: {few(names)}"
                )
            labels[value] = known[key]
        return np.array([labels[cell] for cell in cells.cells], np.int64), names


@dataclass(frozen=True)
class Overview:
    """What a file has in one of its columns, for people who check it.

    Parameters
    ----------
    name : str
        The name of the column.
    role : str
        ``input``, ``target``, ``client``, ``group``, ``attribute`` or ``ignored``, or two of them.
    kind : str
        ``number``, ``text``, or ``empty`` without any value.
    missing : int
        How many values are missing.
    different : int
        How many different values there are.
    range : tuple of two floats, optional
        The smallest and the largest number.
    values : tuple of str
        The different texts in alphabetical order, if they are not too many.

    Examples
    --------
    >>> Overview("age", "input", "number", 3, 40, (18.0, 99.0)).range
    (18.0, 99.0)
    """

    name: str
    role: str
    kind: str
    missing: int
    different: int
    range: tuple[float, float] | None = None
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Columns:
    """How the columns of a table become inputs and classes.

    Data ``table`` has them in ``Federation.columns``, and runs store them. They contain no rows.

    Parameters
    ----------
    columns : tuple of Number or Text
        The columns that are inputs, in their order.
    target : Target
        The column of the target.
    overview : tuple of Overview
        What the file of data ``table`` has in all of its columns. It is not stored.

    Examples
    --------
    >>> columns = Columns(
    ...     (Number("age", 40.0, 10.0), Text("ward", ("medicine", "surgery"))),
    ...     Target("ill", "classification", ("no", "yes")),
    ... )
    >>> columns.names, columns.class_names
    (('age', 'ward=medicine', 'ward=surgery'), ('no', 'yes'))
    >>> columns.inputs([{"ward": "surgery", "age": 55}, {"ward": None, "age": 40}])
    tensor([[1.5000, 0.0000, 1.0000],
            [0.0000, 0.0000, 0.0000]])
    """

    columns: tuple[Number | Text, ...]
    target: Target
    overview: tuple[Overview, ...] = field(default=(), compare=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each input of the model, such as ``age`` or ``ward=surgery``."""
        return tuple(name for column in self.columns for name in column.inputs_named)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes in the order of the model's outputs, in a classification."""
        return self.target.classes

    def inputs(
        self, rows: str | Path | Iterable[Mapping[str, Any]], *, delimiter: str = ","
    ) -> Tensor:
        """Make the inputs of the model from other rows, as in training.

        Means, deviations and values are those of the training file. Values that are missing in the
        rows are treated as in training. Further columns, such as the target, are not read, and
        columns may be in any order.

        Parameters
        ----------
        rows : path or iterable of mapping
            A CSV file like that of data ``table``, or a mapping from columns to values for each
            row, in which ``None`` and NaN are missing values.
        delimiter : str
            The character between cells of the file. ``tab`` stands for a tabulator.

        Returns
        -------
        Tensor of shape [N, inputs]
            One row for each row, in float32.

        Raises
        ------
        InputError
            If a column is missing, a text is in a numeric column, or a text was not in training.

        Examples
        --------
        >>> columns = Columns((Number("age", 40.0),), Target("cost", "regression"))
        >>> columns.inputs([{"age": 55}]).tolist()
        [[55.0]]
        """
        wanted = [column.name for column in self.columns]
        if not isinstance(rows, str | Path):
            return self.inputs_of({cells.name: cells for cells in cells_of(rows, wanted)})
        several = len(wanted) > 1
        found = {cells.name: cells for cells in cells_in(str(rows), delimiter, several=several)}
        if lacking := [name for name in wanted if name not in found]:
            raise InputError(
                f"{rows} has no column {lacking[0]!r}, which is an input of the model; its columns "
                f"are {few([*found])}"
            )
        return self.inputs_of(found)

    def inputs_of(self, cells: Mapping[str, Cells]) -> Tensor:
        """Make the inputs of the model from columns that were read, by name."""
        parts = [column.inputs(cells[column.name]) for column in self.columns]
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def difference(self, other: Columns, *, inputs: bool = True, target: bool = True) -> str | None:
        """Return the first difference from other columns, or ``None``.

        Parameters
        ----------
        other : Columns
            The columns that the text calls "here". It calls these "there".
        inputs, target : bool
            What is compared: the inputs, and the classes.

        Returns
        -------
        str or None
            The difference.

        Examples
        --------
        >>> age, blood = Number("age", 40.0), Number("blood", 5.0)
        >>> cost = Target("cost", "regression")
        >>> Columns((age, blood), cost).difference(Columns((blood, age), cost))
        "column 1 is 'age' there and 'blood' here"
        """
        if inputs:
            mine, theirs = ([one.name for one in each.columns] for each in (self, other))
            if found := _other_name("column", mine, theirs):
                return found
            for one, its in zip(self.columns, other.columns, strict=True):
                if found := one.difference(its):
                    return found
        if target:
            return _other_name("class", self.class_names or (), other.class_names or (), first=0)
        return None

    def content(self) -> bytes:
        """Return the content of the file that `read_columns` reads.

        Examples
        --------
        >>> columns = Columns((Number("age", 40.0),), Target("cost", "regression"))
        >>> json.loads(columns.content())["inputs"]
        [{'kind': 'number', 'name': 'age', 'mean': 40.0, 'deviation': None}]
        """
        plain = {
            "inputs": [
                {"kind": "number" if isinstance(column, Number) else "text", **asdict(column)}
                for column in self.columns
            ],
            "target": asdict(self.target),
        }
        return json.dumps(plain, ensure_ascii=False, indent=1).encode() + b"\n"

    def write(self, path: str | Path) -> None:
        """Write a file that `read_columns` reads.

        Parameters
        ----------
        path : path
            The file.

        Examples
        --------
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "columns.json"
        >>> columns = Columns((Number("age", 40.0),), Target("cost", "regression"))
        >>> columns.write(file)
        >>> read_columns(file) == columns
        True
        """
        write_atomically(Path(path), self.content())


def read_columns(path: str | Path) -> Columns:
    r"""Read how a run has made its inputs.

    Parameters
    ----------
    path : path
        A run directory, or a file that `Columns.write` has written.

    Returns
    -------
    Columns
        Their method ``inputs`` makes the inputs of the model from other rows.

    Raises
    ------
    InputError
        If there is no such file: the data of the run were not a table, or it ran on Flower.
    RunError
        If the file is damaged.

    Examples
    --------
    >>> import tempfile
    >>> import equipoise
    >>> from equipoise.data import load
    >>> folder = Path(tempfile.mkdtemp())
    >>> rows = ["age,ward,ill", *["30,b,yes", "50,a,no", "40,a,no"] * 20]
    >>> _ = (folder / "patients.csv").write_text("\n".join(rows))
    >>> patients = load("table", file=f"{folder}/patients.csv", y="ill")
    >>> _ = equipoise.train(patients, model="logistic", rounds=1, out=folder / "run")
    >>> columns = read_columns(folder / "run")
    >>> columns.inputs([{"age": 40, "ward": "b"}])
    tensor([[0., 0., 1.]])
    >>> columns.class_names
    ('no', 'yes')
    """
    file = Path(path)
    in_run = file.is_dir()
    if in_run:
        file = file / COLUMNS
    if not file.exists():
        raise InputError(
            f"{file} does not exist; valid: the directory of a run in one process whose data are a "
            f"table, or its file {COLUMNS}{working_directory(path)}"
        )
    if in_run:
        verify(file.parent, COLUMNS)
    try:
        return _columns_from(read_json(file))
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file} does not describe the columns of a table ({error})") from error


def _columns_from(plain: Any) -> Columns:
    """Make columns from the content of a file. Refuse what cannot be such a file."""
    target = Target(**plain["target"])
    classes = None if target.classes is None else _texts(target.classes)
    columns = tuple(_column_from(**given) for given in plain["inputs"])
    if not columns:
        raise ValueError("there are no inputs")
    for names in ([target.name], [target.task], [column.name for column in columns]):
        _texts(names)
    return Columns(columns, Target(target.name, target.task, classes))


def _column_from(kind: str, **learned: Any) -> Number | Text:
    if kind == "text":
        values = _texts(learned["values"])
        if not 0 < len(values) <= MOST_VALUES:
            raise ValueError(f"a text column has {len(values)} values")
        return Text(learned["name"], values)
    if kind != "number":
        raise ValueError(f"kind {kind!r} is unknown")
    mean, deviation = learned["mean"], learned["deviation"]
    for value in (mean, 0.0 if deviation is None else deviation):
        if not isinstance(value, float) or not math.isfinite(value):
            raise ValueError(f"{value!r} is not a number with a decimal point")
    return Number(learned["name"], mean, deviation)


def _texts(values: Any) -> tuple[str, ...]:
    """Return different texts."""
    if not isinstance(values, list | tuple) or not all(isinstance(each, str) for each in values):
        raise ValueError(f"{values!r} are no texts")
    if len(set(values)) < len(values):
        raise ValueError("some texts are there twice")
    return tuple(values)


def _other_name(what: str, there: Sequence[str], here: Sequence[str], first: int = 1) -> str | None:
    """Return the first place at which names differ, or ``None``."""
    for number, names in enumerate(zip_longest(there, here), start=first):
        if names[0] != names[1]:
            one, other = ("missing" if name is None else repr(name) for name in names)
            return f"{what} {number} is {one} there and {other} here"
    return None
