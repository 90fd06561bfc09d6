"""Tables in CSV files: one row per sample, with columns for inputs, target, client and others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from equipoise import checks, tasks
from equipoise.attributes import MOST_VALUES, Attribute
from equipoise.data.arrays import usual_partition
from equipoise.data.cells import Cells, cells_in
from equipoise.data.columns import Columns, Number, Overview, Target, Text, read_columns
from equipoise.data.partition import Dirichlet, Iid, Natural
from equipoise.data.source import Source
from equipoise.errors import InputError, unknown
from equipoise.tasks.classification import Classification
from equipoise.tasks.regression import Regression

# What the columns are that an option names.
_ROLES = {
    "y": "target",
    "clients": "client",
    "groups": "group",
    "attributes": "attribute",
    "x": "input",
    "columns": "input",
}


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
    columns: str | None = None,
    delimiter: str = ",",
) -> Source:
    r"""Read a table from a CSV file with one row per sample.

    The first row names the columns. The file is in UTF-8 and may be compressed with gzip. Spaces
    around cells and empty lines are ignored. Columns without a name are left out, such as the row
    numbers that pandas writes.

    A column is numeric if all its values are numbers, written with a decimal point. Numeric inputs
    are standardized. Other inputs are text. They become zeros and ones, with one input for each
    value in sorted order. Decimal commas are refused.

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
    columns : str, optional
        The directory of a run with data ``table``, or a file of
        :meth:`equipoise.data.columns.Columns.write`. Inputs and classes are then made as there: of
        the same columns, with the same means, deviations, values and class names. ``x`` and
        ``standardize`` are not valid together with it.
    delimiter : str
        The character between cells. ``tab`` stands for a tabulator.

    Returns
    -------
    Source
        The samples, in float32, and ``columns``, which makes inputs of other rows.

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
    given = None if columns is None else _given(columns, x, made.labels, standardize)
    cells = {column.name: column for column in cells_in(file, delimiter, "data.file", several=True)}
    listed = {"attributes": attributes, "ignore": ignore} | ({} if x is None else {"x": x})
    roles = {
        option: [column]
        for option, column in (("y", y), ("clients", clients), ("groups", groups))
        if column is not None
    } | {
        option: list(checks.several(names, f"data.{option}", checks.name))
        for option, names in listed.items()
    }
    if given is not None:
        roles["columns"] = [column.name for column in given.columns]
    _check_roles(roles, cells, file)
    if given is None and x is None:
        taken = {name for names in roles.values() for name in names}
        roles["x"] = [name for name in cells if name not in taken]
    if not roles.get("x", roles.get("columns")):
        raise InputError(
            f"no column of {file} (data.file) is left as an input; name columns in data.x, or "
            "fewer columns in data.ignore and data.attributes"
        )
    target = cells[y].as_("y").complete()
    if made.labels:
        labels, class_names = target.classes() if given is None else given.target.classify(target)
    else:
        target.refuse_texts("a regression")
        labels, class_names = target.numbers().astype(np.float32), None
    learned = given or Columns(
        tuple(_learned(cells[name], standardize) for name in roles["x"]),
        Target(y, task, class_names),
    )
    group_names, group_of = (
        cells[groups].as_("groups").complete().numbered() if groups is not None else ((), None)
    )
    return Source(
        x=learned.inputs_of(cells),
        y=torch.from_numpy(labels),
        task=task,
        classes=None if class_names is None else len(class_names),
        class_names=class_names,
        name=Path(file).stem,
        groups=group_of,
        group_names=group_names,
        ids=None if clients is None else cells[clients].as_("clients").complete().names(),
        attributes={
            name: Attribute.of(cells[name].as_("attributes").names(), name)
            for name in roles["attributes"]
        },
        columns=replace(
            learned, overview=tuple(_overview(column, roles) for column in cells.values())
        ),
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
    columns: str | None = None,
    delimiter: str = ",",
) -> tuple[Source, Natural | Dirichlet | Iid]:
    """Return the samples and their partition.

    Parameters
    ----------
    seed : int
        Not used: every row is read.
    file, y, clients, groups, attributes, x, ignore, task, standardize, columns, delimiter
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
        columns=columns,
        delimiter=delimiter,
    )
    return source, usual_partition(source)


def _given(columns: str, x: Sequence[str] | None, labels: bool, standardize: bool) -> Columns:
    """Read how a run has made its inputs. Refuse options that would change this."""
    try:
        given = read_columns(columns)
    except InputError as error:
        raise InputError(f"data.columns: {error}") from error
    for option, asked in (("x", x is not None), ("standardize", not standardize)):
        if asked:
            raise InputError(
                f"data.{option} cannot be used with data.columns ({columns}), which says what the "
                "inputs are; valid: one of the two"
            )
    if (given.class_names is not None) != labels:
        raise InputError(
            f"the columns of {columns} (data.columns) are for the task {given.target.task!r}; set "
            "data.task to the same task"
        )
    return given


def _learned(cells: Cells, standardize: bool) -> Number | Text:
    """Learn how a column becomes inputs."""
    if not cells.values:
        raise InputError(
            f"{cells.where} has no values; valid: at least one, or leave the column out with "
            "data.ignore"
        )
    if not cells.numeric:
        cells.check_texts()
        return Text(cells.name, tuple(sorted(cells.values)))
    numbers = cells.numbers()
    present = numbers[~np.isnan(numbers)]
    mean, deviation = float(present.mean()), float(present.std())
    if not standardize:
        return Number(cells.name, mean)
    # The deviation of equal numbers may not be 0 exactly.
    return Number(cells.name, mean, 0.0 if present.min() == present.max() else deviation)


def _overview(cells: Cells, roles: Mapping[str, Sequence[str]]) -> Overview:
    """Summarize a column for people who check the table."""
    own = [role for option, role in _ROLES.items() if cells.name in roles.get(option, ())]
    numbers = [number for number in cells.values.values() if number is not None]
    finite = [number for number in numbers if math.isfinite(number)]
    text = len(numbers) < len(cells.values)
    return Overview(
        cells.name,
        ", ".join(own) or "ignored",
        ("text" if text else "number") if cells.values else "empty",
        cells.missing,
        len(cells.values),
        None if text or not finite else (min(finite), max(finite)),
        tuple(sorted(cells.values)) if text and len(cells.values) <= MOST_VALUES else (),
    )


def _check_roles(roles: dict[str, list[str]], columns: Mapping[str, Cells], file: str) -> None:
    """Refuse unknown columns, and columns with roles that exclude each other."""
    for option, names in roles.items():
        for name in names:
            if name not in columns:
                raise unknown("column", name, columns, where=f"{file} (data.{option})")
            if names.count(name) > 1:
                raise InputError(f"data.{option} names column {name!r} twice; valid: once")
    # An attribute may be an input, and both may be the client or the group.
    several = ("clients", "groups", "attributes", "x", "columns")
    excluded = {"y": [*several, "ignore"], "ignore": several, "clients": ["groups"]}
    for option, others in excluded.items():
        for other in others:
            for name in roles.get(option, ()):
                if name in roles.get(other, ()):
                    raise InputError(
                        f"column {name!r} is named in data.{option} and in data.{other}; valid: in "
                        "one of them"
                    )
