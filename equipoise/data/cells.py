"""The cells of a CSV file, column by column: missing values, numbers and texts."""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise import checks
from equipoise.attributes import MOST_VALUES
from equipoise.data.files import read, working_directory
from equipoise.errors import InputError, near_files
from equipoise.text import represented

# Cells that are missing values, in upper or lower case.
MISSING = ("", "?", "na", "n/a", "nan", "null")
UNKNOWN = "unknown"
# Samples are stored in single precision.
LARGEST = float(np.finfo(np.float32).max)
# A text column with this many different numbers is probably one of numbers with a few exceptions.
_MANY_NUMBERS = 10
_DECIMAL_COMMA = re.compile(r"[-+]?\d*(\.\d{3})*,\d+")


@dataclass(frozen=True)
class Cells:
    """A column: its cells, in which missing values are empty, and where they come from.

    Parameters
    ----------
    name : str
        The name of the column.
    cells : sequence of str
        The cells.
    lines : sequence of int
        The line of each cell.
    file : str
        The file, or what else has the column.
    key : str, optional
        The key of the configuration that names the file or the column, for errors.
    unit : str
        What ``lines`` are numbers of.

    Examples
    --------
    >>> age = Cells("age", ["30", "", "50"], [2, 3, 4], "patients.csv")
    >>> age.numeric, age.numbers().tolist()
    (True, [30.0, nan, 50.0])
    """

    name: str
    cells: Sequence[str]
    lines: Sequence[int]
    file: str
    key: str | None = None
    unit: str = "line"

    def as_(self, option: str) -> Cells:
        """Return the column with the option of the data that names it, for errors."""
        return replace(self, key=f"data.{option}")

    @property
    def where(self) -> str:
        """The column as errors name it."""
        return f"column {self.name!r} of {place(self.file, self.key)}"

    @cached_property
    def values(self) -> dict[str, float | None]:
        """The different values in order of appearance, and the numbers that they are."""
        return {cell: number_in(cell) for cell in dict.fromkeys(self.cells) if cell}

    @property
    def numeric(self) -> bool:
        """Whether all values are numbers."""
        return None not in self.values.values()

    @property
    def missing(self) -> int:
        """The number of missing values."""
        return sum(not cell for cell in self.cells)

    def complete(self) -> Cells:
        """Return the column itself. Refuse it if a value is missing."""
        if self.missing:
            others = self.missing - 1
            further = f" and {others} further {self.unit}{'s' * (others > 1)}" if others else ""
            raise InputError(
                f"{self.where} has no value in {self.at('')}{further}; fill it in, or remove the "
                f"{self.unit}"
            )
        return self

    def numbers(self) -> NDArray[np.float64]:
        """Return the numbers, NaN where they are missing."""
        for cell, number in self.values.items():
            # NaN is not at most anything.
            if number is not None and not abs(number) <= LARGEST:
                raise InputError(
                    f"{self.where} has {cell!r} in {self.at(cell)}; valid: finite numbers of at "
                    f"most {LARGEST:.1e}"
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
        self.refuse_decimal_commas()
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

    def refuse_texts(self, what: str) -> None:
        """Refuse a column with a text. ``what`` needs numbers."""
        self.refuse_decimal_commas()
        for value, number in self.values.items():
            if number is None:
                raise InputError(
                    f"{self.where} has {represented(value)} in {self.at(value)}; valid for {what}: "
                    "numbers"
                )

    def refuse_decimal_commas(self) -> None:
        """Refuse a column of numbers with decimal commas, which would be read as texts."""
        texts = [value for value, number in self.values.items() if number is None]
        commas = [value for value in texts if _DECIMAL_COMMA.fullmatch(value)]
        # A few such values among other texts may be names.
        if commas and (len(commas) == len(texts) or len(commas) >= _MANY_NUMBERS):
            pointed = commas[0].replace(".", "").replace(",", ".")
            raise InputError(
                f"{self.where} has decimal commas: {commas[0]!r} in {self.at(commas[0])}; valid: "
                f"decimal points ({pointed}), or texts that do not look like numbers"
            )

    def check_texts(self) -> None:
        """Refuse too many different texts, and warn of numbers that are read as text."""
        self.refuse_decimal_commas()
        numbers = sum(number is not None for number in self.values.values())
        text = next(value for value, number in self.values.items() if number is None)
        why = f"{represented(text)} in {self.at(text)} is not a number"
        if len(self.values) > MOST_VALUES:
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

    def at(self, value: str) -> str:
        """Return where a value comes first, for errors."""
        return f"{self.unit} {self.lines[self.cells.index(value)]}"


def number_in(cell: str) -> float | None:
    """Return the number in a cell, or ``None`` if it is a text.

    Examples
    --------
    >>> number_in("1e3"), number_in("1_000"), number_in("1,5")
    (1000.0, None, None)
    """
    try:
        # Python reads 12_3 as 123.
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def place(file: str, key: str | None) -> str:
    """Return a file with the key that names it, for errors.

    Examples
    --------
    >>> place("patients.csv", "data.file"), place("patients.csv", None)
    ('patients.csv (data.file)', 'patients.csv')
    """
    return file if key is None else f"{file} ({key})"


def separator(delimiter: object) -> str:
    r"""Return the character between cells.

    Examples
    --------
    >>> separator(";"), separator("tab")
    (';', '\t')
    """
    if delimiter == "tab":
        return "\t"
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise InputError(
            f"data.delimiter must be one character, such as ';', or tab, got {delimiter!r}"
        )
    return delimiter


def cells_in(
    file: str, delimiter: str, key: str | None = None, *, several: bool = False
) -> Iterator[Cells]:
    r"""Read the columns of a CSV file that have a name.

    Parameters
    ----------
    file : str
        A CSV file with a header row, in UTF-8, perhaps compressed with gzip.
    delimiter : str
        The character between cells, or ``tab``.
    key : str, optional
        The key of the configuration that names the file, for errors.
    several : bool
        Whether a file with a single column is refused.

    Yields
    ------
    Cells
        A column.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "patients.csv"
    >>> _ = file.write_text("age,ward\n30,b\nNA,a\n")
    >>> [(column.name, column.cells) for column in cells_in(str(file), ",")]
    [('age', ('30', '')), ('ward', ('b', 'a'))]
    """
    between, where = separator(delimiter), place(file, key)
    try:
        content = read(Path(file))
    except ValueError as error:
        hint = f"{near_files(file)}{working_directory(file)}" if not Path(file).exists() else ""
        named = "" if key is None else f" ({key})"
        raise InputError(f"{error}{named}; valid: a CSV file with a header row{hint}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError(
            f"{where} is not text in UTF-8 (line {line}); spreadsheet programs can save a table as "
            "'CSV UTF-8'"
        ) from error
    rows = _rows(text, between, where)
    _, header = next(rows, (0, []))
    if not header:
        raise InputError(f"{where} is empty; valid: a CSV file with a header row")
    names = [" ".join(name.split()) for name in header]
    if several and len(names) < 2:
        option = "delimiter" if key is None else "data.delimiter"
        raise InputError(
            f"{where} has one column, {represented(names[0])}; valid: two or more. Cells are "
            f"divided at {between!r}; {option} sets another character"
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
        cells.append([_present(cell) for cell in row])
    if not cells:
        raise InputError(f"{where} has no rows below its header; valid: one for each sample")
    for name, column in zip(names, zip(*cells, strict=True), strict=True):
        if name:
            yield Cells(name, column, lines, file, key)


def cells_of(rows: Iterable[Mapping[str, Any]], names: Iterable[str]) -> Iterator[Cells]:
    """Return some columns of rows that are mappings from columns to values.

    Parameters
    ----------
    rows : iterable of mapping
        The rows.
    names : iterable of str
        The columns. Every row must have them.

    Yields
    ------
    Cells
        A column.

    Examples
    --------
    >>> [column] = cells_of([{"age": 30}, {"age": None}], ["age"])
    >>> column.cells, column.where
    (['30', ''], "column 'age' of the rows")
    """
    given = list(rows)
    for number, row in enumerate(given):
        if not isinstance(row, Mapping):
            raise InputError(
                f"row {number} is {represented(row)}; valid: a mapping from columns to values, "
                "such as {'age': 50}, or the path of a CSV file instead of rows"
            )
    if not given:
        raise InputError("there are no rows; valid: one or more")
    for name in names:
        for number, row in enumerate(given):
            if name not in row:
                raise InputError(
                    f"row {number} has no column {name!r}, which is an input of the model; valid: "
                    "a value, or None where it is missing"
                )
        values = [row[name] for row in given]
        cells = ["" if value is None else _present(str(value).strip()) for value in values]
        yield Cells(name, cells, range(len(given)), "the rows", unit="row")


def _present(cell: str) -> str:
    """Return a cell, empty if its value is missing."""
    return "" if cell.lower() in MISSING else cell


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
