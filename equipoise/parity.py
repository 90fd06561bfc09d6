"""Rates by value of an attribute, demographic parity and equalised odds.

The definitions are those of fairlearn. They are computed from counts, so counts of several clients
can be added, and no sample leaves its client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from equipoise.attributes import BY_TARGET, COUNTS, MOST_ATTRIBUTES, MOST_VALUES, SCORED, counts_in

__all__ = ["FIGURES", "RATES", "compare", "pooled", "wrong_counts"]

Counts = Mapping[str, Mapping[str, float]]

RATES = ("selection_rate", "tpr", "fpr")
"""The rates of each value: selection rate, true positive rate and false positive rate."""

FIGURES = {
    "score_difference": "the largest difference of the score between two values",
    "demographic_parity_difference": (
        "the largest difference of the selection rate between two values"
    ),
    "demographic_parity_ratio": "the smallest selection rate divided by the largest",
    "equal_opportunity_difference": "the largest difference of the TPR between two values",
    "equalized_odds_difference": "the larger one of the differences of TPR and FPR",
    "equalized_odds_ratio": "the smaller one of the ratios of TPR and FPR",
}
"""Figures computed from the rates of all values. Ideally differences are 0 and ratios are 1."""


def compare(
    counts: Counts, *, score: str = "accuracy", higher_is_better: bool = True
) -> dict[str, Any]:
    """Compute the rates of each value of an attribute, and compare the values.

    Parameters
    ----------
    counts : mapping
        The counts of each value; see :data:`equipoise.attributes.COUNTS`.
    score : str
        What the task's score is called.
    higher_is_better : bool
        Whether a larger score is a better one.

    Returns
    -------
    dict
        ``values`` has the counts, the mean score and each of :data:`RATES` for each value.
        ``worst_value`` and ``worst`` are the value with the worst score, the first by name if there
        are several, and this score. Each of :data:`FIGURES` follows. Rates without samples and
        figures of fewer than two values are None.

    Examples
    --------
    >>> women = {"n": 10, "scored": 10, "score_sum": 8, "selected": 2}
    >>> women |= {"positives": 4, "negatives": 6, "true_positives": 2, "false_positives": 0}
    >>> men = {"n": 20, "scored": 20, "score_sum": 18, "selected": 10}
    >>> men |= {"positives": 10, "negatives": 10, "true_positives": 9, "false_positives": 1}
    >>> found = compare({"f": women, "m": men})
    >>> found["worst_value"], found["demographic_parity_ratio"], found["equalized_odds_difference"]
    ('f', 0.4, 0.4)
    """
    values: dict[str, dict[str, Any]] = {
        name: {
            **{count: _whole(of[count]) for count in COUNTS if count in of},
            score: _rate(of, "score_sum", "scored"),
            "selection_rate": _rate(of, "selected", "n"),
            "tpr": _rate(of, "true_positives", "positives"),
            "fpr": _rate(of, "false_positives", "negatives"),
        }
        for name, of in counts.items()
    }
    by_rate = {
        rate: [of[rate] for of in values.values() if of[rate] is not None]
        for rate in (score, *RATES)
    }
    differences: dict[str, Any] = {
        rate: max(found) - min(found) if len(found) > 1 else None for rate, found in by_rate.items()
    }
    # Rates that are all 0 have no ratio.
    ratios: dict[str, Any] = {
        rate: min(found) / max(found) if len(found) > 1 and max(found) > 0 else None
        for rate, found in by_rate.items()
    }
    scored = {name: of[score] for name, of in values.items() if of[score] is not None}
    sign = 1 if higher_is_better else -1
    # The order of values depends on which clients were evaluated together.
    worst = min(scored, key=lambda name: (sign * scored[name], name), default=None)
    odds = None not in (differences["tpr"], differences["fpr"])
    return {
        "values": values,
        "worst_value": worst,
        "worst": None if worst is None else scored[worst],
        "score_difference": differences[score],
        "demographic_parity_difference": differences["selection_rate"],
        "demographic_parity_ratio": ratios["selection_rate"],
        "equal_opportunity_difference": differences["tpr"],
        "equalized_odds_difference": max(differences["tpr"], differences["fpr"]) if odds else None,
        "equalized_odds_ratio": min(
            (ratios[r] for r in ("tpr", "fpr") if ratios[r] is not None), default=None
        )
        if odds
        else None,
    }


def _rate(counts: Mapping[str, float], count: str, of: str) -> float | None:
    total = counts.get(of, 0)
    return counts[count] / total if count in counts and total else None


def _whole(value: float) -> float:
    """Return an int if the value is a whole number; sums of scores need not be."""
    return int(value) if float(value).is_integer() else value


def of_client(
    numbers: Mapping[str, float], n: int, *, score: str, higher_is_better: bool
) -> dict[str, Any]:
    """Compare the values of each attribute for one client.

    Parameters
    ----------
    numbers : mapping
        What the client has reported, including its counts.
    n : int
        How many samples it has in the split.
    score, higher_is_better
        As for :func:`compare`.

    Returns
    -------
    dict
        What :func:`compare` returns, by attribute, and in ``withheld`` how many samples have a
        value whose counts are withheld.
    """
    return {
        attribute: {
            **compare(counts, score=score, higher_is_better=higher_is_better),
            "withheld": int(n - sum(of["n"] for of in counts.values())),
        }
        for attribute, counts in counts_in(numbers).items()
    }


def pooled(
    rows: Iterable[Mapping[str, Any]], *, score: str, higher_is_better: bool
) -> dict[str, Any]:
    """Compare the values of each attribute over all clients.

    Parameters
    ----------
    rows : iterable of dict
        Rows of ``metrics.jsonl``: of one model, split and round.
    score, higher_is_better
        As for :func:`compare`.

    Returns
    -------
    dict
        By attribute, what :func:`compare` returns for the sums of the counts of all clients.
        ``withheld`` is the number of samples whose counts are withheld, ``withheld_clients`` how
        many clients have such samples, ``without_targets`` the number of samples that are missing
        from score, TPR and FPR only. ``over_clients`` has, for each of :data:`FIGURES`, the number
        of clients that have a value, their mean, and the worst value with its client.

    Examples
    --------
    >>> def row(client, women, men):
    ...     sums = {"f": women, "m": men}
    ...     values = {v: {"n": 5, "scored": 5, "score_sum": sums[v]} for v in sums}
    ...     sex = {"values": values, "score_difference": 0.2}
    ...     return {"client": client, "n": 10, "attributes": {"sex": sex}}
    >>> sex = pooled([row(0, 3, 4), row(1, 5, 4)], score="accuracy", higher_is_better=True)["sex"]
    >>> sex["values"]["f"]["accuracy"], sex["score_difference"]
    (0.8, 0.0)
    >>> sex["over_clients"]["score_difference"]["clients"]
    2
    """
    rows = list(rows)
    found: dict[str, Any] = {}
    for attribute in dict.fromkeys(name for row in rows for name in row.get("attributes", {})):
        sums: dict[str, dict[str, float]] = {}
        # A client whose row lacks this attribute has withheld all of its values.
        parts = {row["client"]: row.get("attributes", {}).get(attribute, {}) for row in rows}
        missing = {}
        for row in rows:
            values = parts[row["client"]].get("values", {})
            for value, of in values.items():
                total = sums.setdefault(value, {})
                for count in (count for count in COUNTS if count in of):
                    total[count] = total.get(count, 0) + of[count]
            missing[row["client"]] = row["n"] - sum(of["n"] for of in values.values())
        compared = compare(
            dict(sorted(sums.items())), score=score, higher_is_better=higher_is_better
        )
        found[attribute] = {
            **compared,
            "withheld": sum(missing.values()),
            "withheld_clients": sum(1 for count in missing.values() if count),
            "without_targets": sum(of["n"] - of.get("scored", 0) for of in sums.values()),
            "over_clients": {name: _over_clients(parts, name) for name in FIGURES},
        }
    return found


def _over_clients(parts: Mapping[int, Mapping[str, Any]], figure: str) -> dict[str, Any]:
    having = {
        client: part[figure] for client, part in parts.items() if part.get(figure) is not None
    }
    if not having:
        return {"clients": 0}
    sign = 1 if figure.endswith("ratio") else -1
    worst = min(having, key=lambda client: sign * having[client])
    return {
        "clients": len(having),
        "mean": math.fsum(having.values()) / len(having),
        "worst": having[worst],
        "worst_client_id": worst,
    }


def wrong_counts(numbers: Mapping[str, float], n: int) -> str | None:
    """Return what is wrong with the counts that a client has sent.

    Parameters
    ----------
    numbers : mapping
        All numbers of one of its splits.
    n : int
        How many samples the split has.

    Returns
    -------
    str or None
        The reason why they cannot be used, if there is one.

    Examples
    --------
    >>> from equipoise.attributes import column_of
    >>> wrong_counts({column_of("sex", "f", "n"): 12.0}, n=10)
    'answered with 12 samples by sex, but has 10'
    """
    found = counts_in(numbers)
    if len(found) > MOST_ATTRIBUTES or any(len(values) > MOST_VALUES for values in found.values()):
        return (
            f"answered with counts of more than {MOST_ATTRIBUTES} attributes, or {MOST_VALUES} "
            "values of one"
        )
    for attribute, values in found.items():
        for value, of in values.items():
            where = f"for {attribute}: {value}"
            if "n" not in of or any(
                0 < len(set(part) & set(of)) < len(part) for part in (SCORED, BY_TARGET)
            ):
                return f"answered with incomplete counts {where}"
            wholes = {count: number for count, number in of.items() if count != "score_sum"}
            if bad := next(
                (c for c, number in wholes.items() if number < 0 or not float(number).is_integer()),
                None,
            ):
                return f"answered with {of[bad]:g} as {bad} {where}"
            if not math.isfinite(of.get("score_sum", 0.0)):
                return f"answered with {of['score_sum']:g} as score_sum {where}"
            if _contradictory(of):
                return f"answered with counts that contradict each other {where}"
        if (total := sum(of["n"] for of in values.values())) > n:
            return f"answered with {total:g} samples by {attribute}, but has {n}"
    return None


def _contradictory(of: Mapping[str, float]) -> bool:
    """Return whether the counts of one value contradict each other."""
    if max(of.get("scored", 0), of.get("selected", 0)) > of["n"]:
        return True
    return "positives" in of and (
        of["positives"] + of["negatives"] != of["n"]
        or of["true_positives"] > of["positives"]
        or of["false_positives"] > of["negatives"]
        or of["true_positives"] + of["false_positives"] != of.get("selected")
    )
