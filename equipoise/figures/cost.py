"""The cost of a round: messages, bytes, evaluations and seconds (FFT-GP, section 3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from equipoise.errors import InputError
from equipoise.run.files import Journal


@dataclass(frozen=True)
class Cost:
    """The cost of a round for each client of its cohort, as a mean over rounds.

    Attributes
    ----------
    rounds : int
        The number of rounds of the run.
    messages : float
        Messages to the client. Each has one answer.
    bytes_down, bytes_up : float
        Bytes of tensors and reports, to and from the client.
    evaluations : float
        How often the client evaluates a model on one of its splits for the method.
    seconds : float
        Seconds of training and aggregation for the whole cohort, which depend on the machine.
    """

    rounds: int
    messages: float
    bytes_down: float
    bytes_up: float
    evaluations: float
    seconds: float


def cost(run: str | Path) -> Cost:
    """Read the cost of a run from its journals.

    Evaluation by the round loop is not included.

    Parameters
    ----------
    run : path
        The run directory.

    Returns
    -------
    Cost
        Means over rounds.

    Examples
    --------
    >>> import tempfile
    >>> from equipoise import train
    >>> from equipoise.data import load
    >>> out = tempfile.mkdtemp() + "/run"
    >>> _ = train(load("digits"), method="faa", rounds=2, out=out)
    >>> cost(out).messages, cost(out).evaluations
    (3.0, 3.0)
    """
    rounds = list(Journal(Path(run) / "rounds.jsonl"))
    timings = list(Journal(Path(run) / "timings.jsonl"))
    if not rounds:
        raise InputError(f"{run} has no finished rounds")
    if "messages" not in rounds[0]:
        raise InputError(f"the run in {run} was made by a release that did not count messages")

    def mean(name: str) -> float:
        return fmean(row[name] / row["cohort"] for row in rounds)

    return Cost(
        rounds=len(rounds),
        messages=mean("messages"),
        bytes_down=mean("bytes_down"),
        bytes_up=mean("bytes_up"),
        evaluations=mean("evaluations"),
        seconds=fmean(row["train"] + row["combine"] for row in timings),
    )


def cost_table(costs: Mapping[str, Cost]) -> str:
    """Return costs as a Markdown table, with bytes relative to the first row.

    Parameters
    ----------
    costs : mapping
        Results of :func:`cost`, by the name of the method.

    Returns
    -------
    str
        The table.

    Examples
    --------
    >>> fedavg = Cost(10, 1.0, 4e6, 4e6, 0.0, 2.0)
    >>> print(cost_table({"fedavg": fedavg, "faa": Cost(10, 3.0, 12e6, 4e6, 3.0, 2.5)}))
    | method | messages | MB down | MB up | × first, down | × first, up | evaluations | seconds |
    |---|---|---|---|---|---|---|---|
    | fedavg | 1.0 | 4.000 | 4.000 | 1.00 | 1.00 | 0.0 | 2.000 |
    | faa | 3.0 | 12.000 | 4.000 | 3.00 | 1.00 | 3.0 | 2.500 |
    """
    first = next(iter(costs.values()), None)
    lines = [
        "| method | messages | MB down | MB up | × first, down | × first, up | evaluations | "
        "seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, own in costs.items():
        cells = [
            f"{own.messages:.1f}",
            f"{own.bytes_down / 1e6:.3f}",
            f"{own.bytes_up / 1e6:.3f}",
            _ratio(own.bytes_down, first.bytes_down if first else 0.0),
            _ratio(own.bytes_up, first.bytes_up if first else 0.0),
            f"{own.evaluations:.1f}",
            f"{own.seconds:.3f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.2f}" if reference else "–"
