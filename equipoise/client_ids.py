"""The ids of clients and groups as users give them: numbered, as names, and unseen ones."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equipoise.arrays import Ints
from equipoise.errors import InputError

# The names of missing values, also after conversion to text.
_MISSING = ("None", "nan", "NaN", "<NA>", "NaT")


def warn_of_missing_names(what: str, names: Iterable[Any], federation: str) -> None:
    """Warn of clients or groups that are probably missing values.

    The warning names the line that called the caller of this function.
    """
    missing = [name for name in names if str(name) in _MISSING]
    if missing:
        warnings.warn(
            f"{what} of {federation!r} has {len(missing)} named {missing[0]!r}, which is usually a "
            f"missing value; drop these samples, or use another name for their {what}",
            stacklevel=3,
        )


def number(values: Sequence[Hashable] | NDArray[Any] | Tensor) -> tuple[list[Any], Ints]:
    """Return the distinct values in order of first appearance, and the position of each entry.

    Examples
    --------
    >>> ids, holders = number(["bob", "ann", "bob"])
    >>> ids, holders.tolist()
    (['bob', 'ann'], [0, 1, 0])
    """
    if isinstance(values, np.ndarray | Tensor):
        found, first, entries = np.unique(
            np.asarray(values), return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        return found[order].tolist(), np.argsort(order)[entries.reshape(-1)]
    numbers: dict[Hashable, int] = {}
    places = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), np.array(places, np.int64)


def names_of(ids: Sequence[Hashable]) -> tuple[str, ...]:
    """Return clients' ids as text. Ids with the same text, such as 1 and "1", are refused.

    Examples
    --------
    >>> names_of([7, "ann"])
    ('7', 'ann')
    """
    holders: dict[str, Hashable] = {}
    for client in ids:
        if (other := holders.setdefault(str(client), client)) is not client:
            raise InputError(
                f"clients {other!r} and {client!r} would both be called {str(client)!r}; "
                "use ids that differ as text"
            )
    return tuple(holders)


def held_out(unseen: Iterable[Hashable]) -> set[Hashable]:
    """Return the ids of the unseen clients. A string is one client.

    Examples
    --------
    >>> held_out("ann"), held_out(np.array([3, 3]))
    ({'ann'}, {3})
    """
    if isinstance(unseen, str):
        return {unseen}
    if not isinstance(unseen, Iterable):
        raise InputError(f"unseen={unseen!r} must be a list of clients, such as [{unseen!r}]")
    return set(number(unseen if isinstance(unseen, np.ndarray | Tensor) else list(unseen))[0])
