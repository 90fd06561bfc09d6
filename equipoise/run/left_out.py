"""Clients whose updates were left out of rounds, from the rows of ``rounds.jsonl``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from equipoise.run.records import Row
from equipoise.text import plural

# How many clients a summary lists.
MOST_LISTED = 20


def updates_left_out(
    rows: Callable[[], Iterable[Row]], seen: int, name_of: Callable[[int], str]
) -> dict[str, Any]:
    """Return the clients whose updates were left out of rounds.

    Parameters
    ----------
    rows : callable
        Returns the rows of ``rounds.jsonl``. They are read twice if a client was left out, so that
        none of them stay in memory.
    seen : int
        The number of clients that may train. A row of a round in which all of them took part does
        not list them.
    name_of : callable
        Returns the name of a client.

    Returns
    -------
    dict
        Empty if no update was left out. Otherwise ``clients`` is the number of these clients, and
        ``worst`` has an entry for each of those left out most often, :data:`MOST_LISTED` at most:
        ``client`` and ``name``, ``rounds_left_out``, ``rounds_asked`` (the rounds left out and
        those whose updates were used), and the ``reason`` of the last time.

    Examples
    --------
    >>> rows = [
    ...     {"cohort": 2},
    ...     {"cohort": 1, "clients": [0], "left_out": {"1": "not connected"}},
    ...     {"cohort": 1, "clients": [0], "left_out": {"1": "dropped by the guard 'norm'"}},
    ... ]
    >>> found = updates_left_out(lambda: rows, 2, "client {}".format)
    >>> found["clients"], found["worst"][0]["rounds_left_out"], found["worst"][0]["rounds_asked"]
    (1, 2, 3)
    >>> found["worst"][0]["name"], found["worst"][0]["reason"]
    ('client 1', "dropped by the guard 'norm'")
    """
    times: Counter[int] = Counter()
    reasons: dict[int, str] = {}
    for row in rows():
        for client, reason in row.get("left_out", {}).items():
            times[int(client)] += 1
            reasons[int(client)] = reason
    if not times:
        return {}
    used = _times_used(rows(), times, seen)

    def badness(client: int) -> tuple[int, int, int]:
        """Order clients: those left out most often first, then those used least often."""
        return -times[client], used[client], client

    return {
        "clients": len(times),
        "worst": [
            {
                "client": client,
                "name": name_of(client),
                "rounds_left_out": times[client],
                "rounds_asked": times[client] + used[client],
                "reason": reasons[client],
            }
            for client in sorted(times, key=badness)[:MOST_LISTED]
        ],
    }


def _times_used(rows: Iterable[Row], clients: Iterable[int], seen: int) -> Counter[int]:
    """Count the rounds in which updates of some clients were used."""
    used: Counter[int] = Counter(dict.fromkeys(clients, 0))
    for row in rows:
        if "clients" in row:
            used.update(used.keys() & set(row["clients"]))
        # On Flower clients may join later. Then it is not known who took part before.
        elif row["cohort"] == seen:
            used.update(list(used))
    return used


def rounds_left_out(entry: Mapping[str, Any]) -> str:
    """Return in how many rounds an update was left out.

    Parameters
    ----------
    entry : mapping
        An entry of ``worst``; see :func:`updates_left_out`.

    Returns
    -------
    str
        Such as ``"2 of 3"``.

    Examples
    --------
    >>> rounds_left_out({"rounds_left_out": 2, "rounds_asked": 3})
    '2 of 3'
    """
    return f"{entry['rounds_left_out']:,} of {entry['rounds_asked']:,}"


def listed(found: Mapping[str, Any]) -> str:
    """Return whose updates are listed, for the title of a table.

    Examples
    --------
    >>> listed({"clients": 1, "worst": [{}]}), listed({"clients": 57, "worst": [{}] * 20})
    ('1 client', 'the worst 20 of 57 clients')
    """
    count, shown = found["clients"], len(found["worst"])
    if shown < count:
        return f"the worst {shown} of {count:,} clients"
    return plural(count, "client")
