"""Clients whose updates were left out of rounds, and clients without a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from equipoise.run.records import Row
from equipoise.text import plural

# How many clients a summary lists, and how many a sentence names.
MOST_LISTED = 20
MOST_NAMED = 5
# The parts of a summary, the splits that they are about, and their data in words.
_SPLITS = {"results": ("test", "test"), "validation": ("val", "validation")}
_WITHOUT_MODEL = "no model for this client"


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


def without_result(
    rows: Iterable[Row],
    members: Mapping[str, Collection[int]],
    having: Mapping[str, Container[int]],
    absent: Mapping[int, str],
    *,
    group_of: Callable[[int], str],
    name_of: Callable[[int], str],
) -> dict[str, Any]:
    """Return the clients without a result.

    Parameters
    ----------
    rows : iterable of dict
        The rows of ``metrics.jsonl`` behind the results.
    members : mapping
        All ``seen`` and all ``unseen`` clients.
    having : mapping
        The clients with samples, by split.
    absent : mapping
        Why clients did not answer when models were evaluated.
    group_of, name_of : callable
        Return the group and the name of a client. The group is empty if it is not known.

    Returns
    -------
    dict
        For ``results`` (test data) and ``validation``, ``seen`` and ``unseen`` clients, with an
        entry only if a client has no row of a global or personal model. A split in which no client
        has samples has no entry. An entry has ``clients``, the number of clients without a result,
        ``of``, the number of all, ``groups``, the same two numbers for each group with such a
        client, ``reasons``, the number of clients for each reason, and ``listed``: the ``client``
        (its number), ``name``, ``group`` and ``reason`` of each, :data:`MOST_LISTED` at most. Those
        with rare reasons come first.

    Examples
    --------
    >>> row = {"model": "global", "split": "test", "client": 0, "unseen": False}
    >>> found = without_result(
    ...     [row],
    ...     {"seen": [0, 1]},
    ...     {"test": [0], "val": []},
    ...     {},
    ...     group_of=lambda client: "wards",
    ...     name_of=["north", "south"].__getitem__,
    ... )["results"]["seen"]
    >>> found["clients"], found["of"], found["listed"][0]["name"], found["reasons"]
    (1, 2, 'south', {'no test samples': 1})
    """
    there: dict[tuple[str, bool], set[int]] = {}
    for row in rows:
        if row["model"] != "local":
            there.setdefault((row["split"], row["unseen"]), set()).add(row["client"])
    found: dict[str, dict[str, Any]] = {}
    for who, of_these in members.items() if there else ():
        used = [
            key for key, (split, _) in _SPLITS.items() if any(c in having[split] for c in of_these)
        ]
        for key in used or ["results"]:
            split, data = _SPLITS[key]
            evaluated = there.get((split, who == "unseen"), ())
            reasons = {
                client: absent.get(client)
                or (_WITHOUT_MODEL if client in having[split] else f"no {data} samples")
                for client in of_these
                if client not in evaluated
            }
            if reasons:
                of_groups = Counter(map(group_of, of_these))
                found.setdefault(key, {})[who] = _entry(reasons, of_groups, group_of, name_of)
    return found


def _entry(
    reasons: Mapping[int, str],
    of_groups: Counter[str],
    group_of: Callable[[int], str],
    name_of: Callable[[int], str],
) -> dict[str, Any]:
    """Describe clients without a result, given why, and the numbers of all clients by group."""
    counts, without = Counter(reasons.values()), Counter(map(group_of, reasons))
    order = sorted(reasons, key=lambda client: (counts[reasons[client]], reasons[client], client))
    return {
        "clients": len(reasons),
        "of": of_groups.total(),
        "groups": {
            group: {"clients": without[group], "of": of}
            for group, of in of_groups.items()
            if group and without[group]
        },
        "reasons": dict(sorted(counts.items(), key=lambda item: item[::-1])),
        "listed": [
            {
                "client": client,
                "name": name_of(client),
                "group": group_of(client),
                "reason": reasons[client],
            }
            for client in order[:MOST_LISTED]
        ],
    }


def missing_in(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return who has no result in what a summary reports.

    Parameters
    ----------
    summary : mapping
        The content of ``summary.json``.

    Returns
    -------
    dict
        By ``seen`` and ``unseen``, the entries of :func:`without_result`: on test data, or on
        validation data if there are only results on these.

    Examples
    --------
    >>> entry = {"clients": 1, "of": 3}
    >>> found = {"results": {"seen": entry}, "validation": {"seen": {}, "unseen": entry}}
    >>> missing_in({"results": {"global": {"seen": {}}}, "without_result": found})
    {'seen': {'clients': 1, 'of': 3}, 'unseen': {'clients': 1, 'of': 3}}
    """
    found, without = {}, summary.get("without_result", {})
    for who in ("seen", "unseen"):
        has = [key for key in _SPLITS if any(who in of for of in summary.get(key, {}).values())]
        keys = has[:1] or _SPLITS
        entries = (without[key][who] for key in keys if who in without.get(key, {}))
        if entry := next(entries, None):
            found[who] = entry
    return found


def missing_words(who: str, entry: Mapping[str, Any]) -> str:
    """Say which clients have no result, and why.

    Parameters
    ----------
    who : {"seen", "unseen"}
        Which clients the entry is about.
    entry : mapping
        An entry of :func:`without_result`.

    Returns
    -------
    str
        A sentence without a full stop.

    Examples
    --------
    >>> listed = [{"name": name, "reason": "no test samples"} for name in ("S4", "S7")]
    >>> entry = {"clients": 2, "of": 12, "reasons": {"no test samples": 2}, "listed": listed}
    >>> missing_words("seen", entry)
    '2 of 12 seen clients have no result: S4, S7 (no test samples)'
    """
    by_reason: dict[str, list[str]] = {}
    for one in entry["listed"]:
        by_reason.setdefault(one["reason"], []).append(one["name"])
    shown = list(by_reason.items())[:MOST_NAMED]
    pieces = [
        f"{_some(names, entry['reasons'][reason], 'client')} ({reason})" for reason, names in shown
    ]
    if more := entry["clients"] - sum(entry["reasons"][reason] for reason, _ in shown):
        pieces.append(f"{plural(more, 'other client')} for other reasons")
    has = "has" if entry["clients"] == 1 else "have"
    whose = plural(entry["of"], f"{who} client")
    return f"{entry['clients']:,} of {whose} {has} no result: {'; '.join(pieces)}"


def _some(names: Sequence[str], count: int, what: str) -> str:
    """List the first names, and count the others."""
    shown = ", ".join(names[:MOST_NAMED])
    more = count - min(len(names), MOST_NAMED)
    return f"{shown} and {plural(more, f'other {what}')}" if more else shown


def missing_in_runs(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Say which clients have no result in some runs, and why.

    Parameters
    ----------
    runs : sequence of mappings
        What :func:`missing_in` returns for each run.

    Returns
    -------
    list of str
        A sentence on seen and one on unseen clients, if there are such clients. Those that lack a
        result most often are named.

    Examples
    --------
    >>> entry = {"clients": 1, "listed": [{"name": "S4", "reason": "no test samples"}]}
    >>> missing_in_runs([{"seen": entry}, {}])
    ['seen clients without a result: S4 (no test samples; 1 of 2 runs)']
    """
    said = []
    for who in dict.fromkeys(who for of_run in runs for who in of_run):
        entries = [of_run[who] for of_run in runs if who in of_run]
        named = Counter((one["name"], one["reason"]) for own in entries for one in own["listed"])
        listed = in_runs(named, len(runs), whole=all(e["clients"] <= MOST_LISTED for e in entries))
        said.append(f"{who} clients without a result: {listed}")
    return said


def in_runs(named: Counter[tuple[str, str]], runs: int, *, whole: bool = True) -> str:
    """List clients that lack something in some of several runs.

    Parameters
    ----------
    named : Counter
        In how many runs, by the name of the client and the reason.
    runs : int
        The number of all runs.
    whole : bool
        Whether these are all such clients.

    Returns
    -------
    str
        Those with most runs, :data:`MOST_NAMED` at most.

    Examples
    --------
    >>> in_runs(Counter({("S4", "undefined"): 3, ("N1", "undefined"): 1}), 6)
    'S4 (undefined; 3 of 6 runs), N1 (undefined; 1 of 6 runs)'
    """
    most = named.most_common(MOST_NAMED)
    shown = [f"{name} ({why}; {count:,} of {plural(runs, 'run')})" for (name, why), count in most]
    return ", ".join(shown) + ("" if whole and len(named) == len(most) else " and others")


def groups_with_fewer(entries: Iterable[Mapping[str, Any] | None]) -> str:
    """Say over how many clients means of groups are, if these are not all clients of the group.

    Parameters
    ----------
    entries : iterable of mappings
        The entry of :func:`without_result` of each run; None for a run in which all clients have a
        result.

    Returns
    -------
    str
        In parentheses after a space, to be added to the title of a table; empty if the means are
        over all clients.

    Examples
    --------
    >>> groups_with_fewer([{"groups": {"South": {"clients": 1, "of": 4}}}])
    ' (South: 3 of 4 clients)'
    >>> groups_with_fewer([{"groups": {"South": {"clients": 1, "of": 4}}}, None])
    ' (South: 3 of 4 clients in 1 of 2 runs)'
    """
    runs = list(entries)
    times: dict[str, Counter[str]] = {}
    for entry in filter(None, runs):
        for group, own in entry["groups"].items():
            left = f"{own['of'] - own['clients']:,} of {own['of']:,}"
            times.setdefault(group, Counter())[left] += 1
    said = []
    for group, counts in times.items():
        some = f" in {counts.total()} of {len(runs)} runs" if counts.total() < len(runs) else ""
        said.append(f"{group}: {' or '.join(counts)} clients{some}")
    shown = "; ".join(said[:MOST_NAMED])
    if (more := len(said) - MOST_NAMED) > 0:
        shown += f" and fewer than all clients of {plural(more, 'other group')}"
    return f" ({shown})" if shown else ""
