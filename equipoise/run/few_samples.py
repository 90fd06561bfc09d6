"""Words about values that are uncertain: those of few samples, and those that several share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from equipoise.text import plural

K = TypeVar("K", bound=Hashable)

# Clients and groups with fewer samples than this have few.
FEW = 10


def about_worst(
    worst: K, values: Mapping[K, float | None], sizes: Mapping[K, int], *, what: str, data: str
) -> str:
    """Return what to add to the worst client or group.

    Parameters
    ----------
    worst : hashable
        The worst client or group.
    values, sizes : mapping
        The values and numbers of samples of all clients or groups.
    what : str
        ``"client"`` or ``"group"``.
    data : str
        ``"test"`` or ``"validation"``.

    Returns
    -------
    str
        How many samples it has, if it has fewer than :data:`FEW`, and how many others have the same
        value. Empty if there is nothing to add.

    Examples
    --------
    >>> values, sizes = {"a": 0.0, "b": 0.0, "c": 0.5}, {"a": 1, "b": 30, "c": 20}
    >>> about_worst("a", values, sizes, what="client", data="test")
    '1 test sample; 1 other client has the same value'
    >>> about_worst("c", values, sizes, what="client", data="test")
    ''
    """
    said = []
    if worst in sizes and sizes[worst] < FEW:
        said.append(plural(sizes[worst], f"{data} sample"))
    if worst in values and values[worst] is not None:
        others = sum(value == values[worst] for value in values.values()) - 1
        if others:
            said.append(
                f"{plural(others, f'other {what}')} {'has' if others == 1 else 'have'} "
                "the same value"
            )
    return "; ".join(said)


def about_few(sizes: Iterable[int], data: str) -> str:
    """Return how many clients have few samples; empty if none has.

    Examples
    --------
    >>> about_few([1, 9, 10], "test")
    '2 of 3 clients have fewer than 10 test samples, so their values are uncertain.'
    >>> about_few([10, 11], "test")
    ''
    """
    counts = list(sizes)
    few = sum(count < FEW for count in counts)
    if not few:
        return ""
    has, their = ("has", "its value is") if few == 1 else ("have", "their values are")
    clients = plural(len(counts), "client")
    return f"{few:,} of {clients} {has} fewer than {FEW} {data} samples, so {their} uncertain."
