"""Adult (census income), from the UCI files: does a person earn more than 50,000 dollars a year?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.attributes import Attribute
from equipoise.checks import count, flag
from equipoise.data.files import data_files, read
from equipoise.data.partition import Natural
from equipoise.data.source import Source
from equipoise.errors import InputError, unknown

TRAIN, TEST = "adult.data", "adult.test"
FOLDERS = ("adult", ".")
COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
)
# Centre and scale are constants, so that a client with its own data computes the same inputs as all
# others.
NUMBERS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "age": lambda values: (values - 40) / 13,
    "education-num": lambda values: (values - 10) / 2.5,
    "hours-per-week": lambda values: (values - 40) / 12,
    "capital-gain": lambda values: np.log1p(values) / 3,
    "capital-loss": lambda values: np.log1p(values) / 3,
}
# One input for each of these values. Other values, including missing ones, are encoded as zeros.
CATEGORIES = {
    "workclass": (
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay "
        "Never-worked"
    ),
    "marital-status": (
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
        "Married-AF-spouse"
    ),
    "occupation": (
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
        "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
        "Priv-house-serv Protective-serv Armed-Forces"
    ),
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    "sex": "Female Male",
    "native-country": "United-States",
}
CLASSES = ("<=50K", ">50K")
MISSING, UNKNOWN = "?", "unknown"


def adult(
    *,
    root: str | None = None,
    clients: tuple[str, ...] = ("workclass", "occupation"),
    attributes: tuple[str, ...] = ("sex", "race"),
    use_attributes: bool = True,
    min_samples: int = 20,
) -> Source:
    """Read Adult.

    Parameters
    ----------
    root : str, optional
        The data directory, with ``adult.data`` and, if there are published test samples,
        ``adult.test`` in ``adult`` or directly in it.
    clients : tuple of str
        People with the same values in these columns form a client; by default those with the same
        type of employer and occupation. The values of the first column are the groups of clients.
    attributes : tuple of str
        The columns that are attributes of samples. Missing values are called "unknown".
    use_attributes : bool
        Whether attributes are also inputs of the model.
    min_samples : int
        Clients with fewer samples for training and validation are left out.

    Returns
    -------
    Source
        One row per person, in float32; class 1 earns more than 50,000 dollars. Samples in
        ``adult.test`` are for testing.

    Examples
    --------
    >>> adult(attributes=("gender",))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: unknown column 'gender' in attributes of data 'adult'. Valid: ...
    """
    categorical = [column for column in COLUMNS if column not in NUMBERS and column != "fnlwgt"]
    for option, listed in (("clients", clients), ("attributes", attributes)):
        for column in listed:
            if column not in categorical:
                raise unknown("column", column, categorical, where=f"{option} of data 'adult'")
    if not clients:
        raise InputError("clients of data 'adult' must name at least one column, such as workclass")
    count(min_samples, "min_samples of data 'adult'")
    flag(use_attributes, "use_attributes of data 'adult'")
    paths = data_files("adult", (TRAIN, TEST), (TRAIN,), folders=FOLDERS, root=root)
    tables = [_table(path) for path in paths]
    rows = np.concatenate(tables)
    test = np.repeat(
        [number > 0 for number in range(len(tables))], [len(table) for table in tables]
    )
    ids = np.array([", ".join(row[[COLUMNS.index(column) for column in clients]]) for row in rows])
    names, of_rows = np.unique(ids, return_inverse=True)
    trained = np.bincount(of_rows[~test], minlength=len(names))
    kept = (trained >= min_samples)[of_rows.reshape(-1)]
    if not kept.any():
        raise InputError(
            f"no client of data 'adult' has min_samples={min_samples} samples to train on; the "
            f"largest has {trained.max()}"
        )
    rows, ids, test = rows[kept], ids[kept], test[kept]
    group_names, groups = np.unique(rows[:, COLUMNS.index(clients[0])], return_inverse=True)
    return Source(
        x=torch.from_numpy(_inputs(rows, () if use_attributes else attributes)),
        y=torch.from_numpy((rows[:, -1] == CLASSES[1]).astype(np.int64)),
        classes=2,
        class_names=CLASSES,
        name="adult",
        ids=ids,
        groups=groups.reshape(-1),
        group_names=tuple(group_names.tolist()),
        test=test if len(tables) > 1 else None,
        attributes={
            column: Attribute.of(rows[:, COLUMNS.index(column)], column) for column in attributes
        },
    )


def recipe(
    *,
    seed: int,
    root: str | None = None,
    clients: tuple[str, ...] = ("workclass", "occupation"),
    attributes: tuple[str, ...] = ("sex", "race"),
    use_attributes: bool = True,
    min_samples: int = 20,
) -> tuple[Source, Natural]:
    """Return Adult and its partition by employer and occupation.

    Parameters
    ----------
    seed : int
        Not used: every person is read.
    root, clients, attributes, use_attributes, min_samples
        See `adult`.

    Returns
    -------
    tuple of Source and Natural
        The source and its partition.

    Examples
    --------
    >>> recipe(seed=0, root="nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: no files of data 'adult' in ...
    """
    options = {
        "attributes": attributes,
        "use_attributes": use_attributes,
        "min_samples": min_samples,
    }
    return adult(root=root, clients=clients, **options), Natural(1)  # type: ignore[arg-type]


def _table(path: Path) -> NDArray[np.str_]:
    """Read the rows of a file: one column more than ``COLUMNS``, the class."""
    try:
        text = read(path).decode("ascii")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a file of Adult: {error}") from error
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        # The test file begins with a comment, and both files end with empty lines.
        if not line.strip() or line.startswith("|"):
            continue
        row = [value.strip().replace(MISSING, UNKNOWN) for value in line.split(",")]
        # Classes in the test file end with a full stop.
        row[-1] = row[-1].rstrip(".")
        if len(row) != len(COLUMNS) + 1 or row[-1] not in CLASSES:
            raise InputError(
                f"line {number} of {path} must have {len(COLUMNS)} values and one of the classes "
                f"{' and '.join(CLASSES)}, got {line!r}"
            )
        rows.append(row)
    if not rows:
        raise InputError(f"{path} has no rows")
    return np.array(rows)


def _inputs(rows: NDArray[np.str_], left_out: Sequence[str]) -> NDArray[np.float32]:
    """Return the inputs of the model: scaled numbers, then the categories as indicators."""
    made = []
    for column, scaled in NUMBERS.items():
        values = rows[:, COLUMNS.index(column)]
        try:
            made.append(scaled(values.astype(np.float64))[:, None])
        except ValueError as error:
            raise InputError(f"{column} of data 'adult' must be numbers: {error}") from error
    for column, categories in CATEGORIES.items():
        if column not in left_out:
            made.append(rows[:, COLUMNS.index(column), None] == np.array(categories.split()))
    return np.concatenate(made, axis=1).astype(np.float32)
