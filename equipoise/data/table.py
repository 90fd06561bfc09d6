"""Tables in CSV files: one row per sample, with columns for inputs, target, client and others."""

from __future__ import annotations

import csv
import io
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise import checks, tasks
from equipoise.attributes import MOST_VALUES, Attribute
from equipoise.data.arrays import usual_partition
from equipoise.data.files import read, working_directory
from equipoise.data.partition import Dirichlet, Iid, Natural
from equipoise.data.source import Source
from equipoise.errors import InputError, near_files, unknown
from equipoise.tasks.classification import Classification
from equipoise.tasks.regression import Regression
from equipoise.text import represented

# Cells that are missing values, in upper or lower case.
MISSING = ("", "?", "na", "n/a", "nan", "null")
UNKNOWN = "unknown"
# Samples are stored in single precision.
LARGEST = float(np.finfo(np.float32).max)
# A text column with this many different numbers is probably one of numbers with a few exceptions.
_MANY_NUMBERS = 10


def table(
    *,
    file: str,
    y: str,
    clients: str | None = None,
    groups: str | None = None,
    attributes: Sequence[str] = (),
    x: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
    task: str = "classification",
    standardize: bool = True,
    delimiter: str = ",",
) -> Source:
    r"""Read a table from a CSV file with one row per sample.

    The first row names the columns. The file is in UTF-8 and may be compressed with gzip. Spaces
    around cells and empty lines are ignored. Columns without a name are left out, such as the row
    numbers that pandas writes.

    A column is numeric if all its values are numbers, written with a decimal point. Numeric inputs
    are standardized. Other inputs are text. They become zeros and ones, with one input for each
    value in sorted order.

    Empty cells, ``NA``, ``N/A``, ``NaN``, ``null`` and ``?`` are missing values, in upper or lower
    case. A missing number is replaced by the mean of its column. A missing text has zeros only. A
    missing attribute has the value "unknown". The target, the client and the group of a sample must
    not be missing.

    Attributes are not inputs unless ``x`` names them: a model should use the sex of a patient only
    if somebody has decided so.

    Parameters
    ----------
    file : str
        A CSV file with a header row. A relative path starts in the working directory.
    y : str
        Column with the target. In a classification its values are the names of the classes. They
        are in numerical order if all of them are numbers, else in alphabetical order.
    clients : str, optional
        Column with the client of each sample.
    groups : str, optional
        Column with the group of each sample. All samples of a client have one group.
    attributes : sequence of str
        Columns with attributes of samples, such as ``["sex"]``. Results are reported by their
        values. They are inputs only if ``x`` names them, too.
    x : sequence of str, optional
        Columns that are inputs of the model; by default all columns that no other option names.
    ignore : sequence of str
        Columns that are left out, such as ids and dates.
    task : str
        What ``y`` means: ``classification``, ``regression``, or a task derived from one of them.
    standardize : bool
        Whether numeric inputs have mean 0 and standard deviation 1 over all rows of the file, those
        for testing included. Constant columns are 0. The target of a regression stays as it is.
    delimiter : str
        The character between cells. ``tab`` stands for a tabulator.

    Returns
    -------
    Source
        The samples, in float32.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "patients.csv"
    >>> _ = file.write_text("age,ward,ill\n30,b,yes\n50,a,no\n40,a,no\n")
    >>> patients = table(file=str(file), y="ill")
    >>> patients.class_names, patients.y.tolist()
    (('no', 'yes'), [1, 0, 0])
    >>> patients.x  # age, ward a, ward b
    tensor([[-1.2247,  0.0000,  1.0000],
            [ 1.2247,  1.0000,  0.0000],
            [ 0.0000,  1.0000,  0.0000]])
    """
    made = tasks.build(task)
    if not isinstance(made, Classification | Regression):
        raise InputError(
            "data.task must be classification, regression or a task derived from one of them, got "
            f"{task!r}"
        )
    checks.flag(standardize, "data.standardize")
    columns = {column.name: column for column in _read(file, _separator(delimiter))}
    listed = {"attributes": attributes, "ignore": ignore} | ({} if x is None else {"x": x})
    roles = {
        option: [column]
        for option, column in (("y", y), ("clients", clients), ("groups", groups))
        if column is not None
    } | {
        option: list(checks.several(names, f"data.{option}", checks.name))
        for option, names in listed.items()
    }
    _check_roles(roles, columns, file)
    taken = {name for names in roles.values() for name in names}
    inputs = roles.get("x", [name for name in columns if name not in taken])
    if not inputs:
        raise InputError(
            f"no column of {file} (data.file) is left as an input; name columns in data.x, or "
            "fewer columns in data.ignore and data.attributes"
        )
    target = columns[y].as_("y").complete()
    labels, class_names = target.classes() if made.labels else (target.targets(), None)
    group_names, group_of = (
        columns[groups].as_("groups").complete().numbered() if groups is not None else ((), None)
    )
    return Source(
        x=torch.from_numpy(
            np.concatenate([columns[name].inputs(standardize) for name in inputs], axis=1)
        ),
        y=torch.from_numpy(labels),
        task=task,
        classes=None if class_names is None else len(class_names),
        class_names=class_names,
        name=Path(file).stem,
        groups=group_of,
        group_names=group_names,
        ids=None if clients is None else columns[clients].as_("clients").complete().names(),
        attributes={
            name: Attribute.of(columns[name].as_("attributes").names(), name)
            for name in roles["attributes"]
        },
    )


def recipe(
    *,
    seed: int,
    file: str,
    y: str,
    clients: str | None = None,
    groups: str | None = None,
    attributes: Sequence[str] = (),
    x: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
    task: str = "classification",
    standardize: bool = True,
    delimiter: str = ",",
) -> tuple[Source, Natural | Dirichlet | Iid]:
    """Return the samples and their partition.

    Parameters
    ----------
    seed : int
        Not used: every row is read.
    file, y, clients, groups, attributes, x, ignore, task, standardize, delimiter
        See `table`.

    Returns
    -------
    tuple of Source and Partition
        Without ``clients``, see :func:`equipoise.data.arrays.usual_partition`.

    Examples
    --------
    >>> recipe(seed=0, file="nowhere.csv", y="ill")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: cannot read nowhere.csv: No such file or directory (data.file);
    valid: a CSV file with a header row; relative paths start in the working directory, ...
    """
    source = table(
        file=file,
        y=y,
        clients=clients,
        groups=groups,
        attributes=attributes,
        x=x,
        ignore=ignore,
        task=task,
        standardize=standardize,
        delimiter=delimiter,
    )
    return source, usual_partition(source)


@dataclass(frozen=True)
class _Column:
    """A column: its cells, in which missing values are empty, and where they come from."""

    name: str
    cells: Sequence[str]
    lines: Sequence[int]
    file: str
    option: str = "file"

    def as_(self, option: str) -> _Column:
        """Return the column with the option that names it, for errors."""
        return replace(self, option=option)

    @property
    def where(self) -> str:
        return f"column {self.name!r} of {self.file} (data.{self.option})"

    @cached_property
    def values(self) -> dict[str, float | None]:
        """Return the different values in order of appearance, and the numbers that they are."""
        return {cell: _number(cell) for cell in dict.fromkeys(self.cells) if cell}

    @property
    def numeric(self) -> bool:
        return None not in self.values.values()

    def complete(self) -> _Column:
        """Return the column itself. Refuse it if a value is missing."""
        missing = [line for line, cell in zip(self.lines, self.cells, strict=True) if not cell]
        if missing:
            others = len(missing) - 1
            further = f" and {others} further line{'s' * (others > 1)}" if others else ""
            raise InputError(
                f"{self.where} has no value in line {missing[0]}{further}; fill it in, or remove "
                "the line"
            )
        return self

    def numbers(self) -> NDArray[np.float64]:
        """Return the numbers, NaN where they are missing."""
        for cell, number in self.values.items():
            # NaN is not at most anything.
            if number is not None and not abs(number) <= LARGEST:
                raise InputError(
                    f"{self.where} has {cell!r} in line {self.line_of(cell)}; valid: finite "
                    f"numbers of at most {LARGEST:.1e}"
                )
        return np.array([self.values.get(cell, np.nan) for cell in self.cells], np.float64)

    def names(self) -> NDArray[np.str_]:
        """Return the values as names, "unknown" where they are missing."""
        for value in self.values:
            checks.name(value, f"each value of {self.where}")
        return np.array([cell or UNKNOWN for cell in self.cells])

    def numbered(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Return the different names in alphabetical order, and the position of each cell."""
        found, positions = np.unique(self.names(), return_inverse=True)
        return tuple(found.tolist()), positions.reshape(-1)

    def classes(self) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """Return labels and the names of the classes."""
        names, labels = self.numbered()
        if self.numeric:
            # 1 and 1.0 are one class. Its name is as in the first row that has it.
            found, first, positions = np.unique(
                self.numbers(), return_index=True, return_inverse=True
            )
            names, labels = tuple(self.cells[row] for row in first), positions.reshape(-1)
            if len(found) > MOST_VALUES:
                raise InputError(
                    f"{self.where} has {len(found)} different numbers, and each would be a class; "
                    f"valid: at most {MOST_VALUES}, or data.task: regression to predict numbers"
                )
        if len(names) < 2:
            raise InputError(
                f"{self.where} has one value only, {names[0]!r}; valid: two classes or more"
            )
        return labels, names

    def targets(self) -> NDArray[np.float32]:
        """Return the targets of a regression."""
        for value, number in self.values.items():
            if number is None:
                raise InputError(
                    f"{self.where} has {represented(value)} in line {self.line_of(value)}; valid "
                    "for a regression: numbers"
                )
        return self.numbers().astype(np.float32)

    def inputs(self, standardize: bool) -> NDArray[np.float32]:
        """Return the inputs: an array with one column for numbers, one for each text."""
        if not self.values:
            raise InputError(
                f"{self.where} has no values; valid: at least one, or leave the column out with "
                "data.ignore"
            )
        if self.numeric:
            return _scaled(self.numbers(), standardize)[:, None].astype(np.float32)
        self.check_texts()
        values = sorted(self.values)
        position = {value: number for number, value in enumerate(values)}
        # Missing values have the last row, of zeros.
        rows = np.eye(len(values) + 1, len(values), dtype=np.float32)
        return rows[[position.get(cell, len(values)) for cell in self.cells]]

    def check_texts(self) -> None:
        """Refuse too many different texts, and warn of numbers that are read as text."""
        many = len(self.values) > MOST_VALUES
        numbers = sum(number is not None for number in self.values.values())
        text = next(value for value, number in self.values.items() if number is None)
        why = f"{represented(text)} in line {self.line_of(text)} is not a number"
        if many:
            raise InputError(
                f"{self.where} has {len(self.values)} different texts; valid: at most "
                f"{MOST_VALUES} ({why}). Leave the column out with data.ignore"
            )
        if numbers >= _MANY_NUMBERS:
            warnings.warn(
                f"{self.where} is read as text, because {why}; if its values are numbers, correct "
                "this cell or empty it",
                stacklevel=2,
            )

    def line_of(self, value: str) -> int:
        return self.lines[self.cells.index(value)]


def _scaled(numbers: NDArray[np.float64], standardize: bool) -> NDArray[np.float64]:
    """Replace missing numbers by the mean, and standardize if requested."""
    present = numbers[~np.isnan(numbers)]
    mean, deviation = present.mean(), present.std()
    filled = np.where(np.isnan(numbers), mean, numbers)
    if not standardize:
        return filled
    # The deviation of equal numbers may not be 0 exactly.
    constant = present.min() == present.max() or not deviation
    return np.zeros_like(filled) if constant else (filled - mean) / deviation


def _number(cell: str) -> float | None:
    try:
        # Python reads 12_3 as 123.
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def _separator(delimiter: object) -> str:
    if delimiter == "tab":
        return "\t"
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise InputError(
            f"data.delimiter must be one character, such as ';', or tab, got {delimiter!r}"
        )
    return delimiter


def _check_roles(roles: dict[str, list[str]], columns: dict[str, _Column], file: str) -> None:
    """Refuse unknown columns, and columns with roles that exclude each other."""
    for option, names in roles.items():
        for name in names:
            if name not in columns:
                raise unknown("column", name, columns, where=f"{file} (data.{option})")
            if names.count(name) > 1:
                raise InputError(f"data.{option} names column {name!r} twice; valid: once")
    # An attribute may be an input, and both may be the client or the group.
    several = ("clients", "groups", "attributes", "x")
    excluded = {"y": [*several, "ignore"], "ignore": several, "clients": ["groups"]}
    for option, others in excluded.items():
        for other in others:
            for name in roles.get(option, ()):
                if name in roles.get(other, ()):
                    raise InputError(
                        f"column {name!r} is named in data.{option} and in data.{other}; valid: in "
                        "one of them"
                    )


def _read(file: str, delimiter: str) -> Iterator[_Column]:
    """Read the columns that have a name."""
    where = f"{file} (data.file)"
    try:
        content = read(Path(file))
    except ValueError as error:
        hint = f"{near_files(file)}{working_directory(file)}" if not Path(file).exists() else ""
        raise InputError(
            f"{error} (data.file); valid: a CSV file with a header row{hint}"
        ) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError(
            f"{where} is not text in UTF-8 (line {line}); spreadsheet programs can save a table as "
            "'CSV UTF-8'"
        ) from error
    rows = _rows(text, delimiter, where)
    _, header = next(rows, (0, []))
    if not header:
        raise InputError(f"{where} is empty; valid: a CSV file with a header row")
    names = [" ".join(name.split()) for name in header]
    if len(names) < 2:
        raise InputError(
            f"{where} has one column, {represented(names[0])}; valid: two or more. Cells are "
            f"divided at {delimiter!r}; data.delimiter sets another character"
        )
    for name, number in Counter(names).items():
        if name and number > 1:
            raise InputError(
                f"{where} has {number} columns called {name!r}; valid: different names"
            )
    lines, cells = [], []
    for line, row in rows:
        if len(row) != len(names):
            raise InputError(
                f"line {line} of {where} has {len(row)} cells; valid: {len(names)}, as in the "
                "header. Cells that contain the delimiter need quotes"
            )
        lines.append(line)
        cells.append(["" if cell.lower() in MISSING else cell for cell in row])
    if not cells:
        raise InputError(f"{where} has no rows below its header; valid: one for each sample")
    for name, column in zip(names, zip(*cells, strict=True), strict=True):
        if name:
            yield _Column(name, column, lines, file)


def _rows(text: str, delimiter: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """Read the rows, each with the number of its first line."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for row in reader:
            if row:
                yield line, [cell.strip() for cell in row]
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"line {line} of {where} cannot be read ({error}); valid: cells that are closed by a "
            "quote if they begin with one"
        ) from error
