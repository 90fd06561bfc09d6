"""Rows of ``metrics.jsonl``: loss and metrics of clients, as columns until they are written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from equipoise import parity
from equipoise.attributes import read_column
from equipoise.engine.evaluation import Measured
from equipoise.federation import Federation
from equipoise.metrics import Metric
from equipoise.run.records import Row
from equipoise.task import Task

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Holders:
    """Clients that were evaluated on a split, and the part of their rows that rarely changes.

    Attributes
    ----------
    clients, sizes, groups, unseen : array
        All clients that were evaluated, their samples in the split, their groups, and whether they
        are unseen.
    group_names : tuple of str
        The names of groups.
    """

    clients: Ints
    sizes: Ints
    groups: Ints
    unseen: NDArray[np.bool_]
    group_names: Sequence[str]

    @cached_property
    def where(self) -> Ints:
        """The positions in ``clients`` of those with samples. Only they have rows."""
        return np.flatnonzero(self.sizes)

    def row(self, position: int) -> Row:
        """Describe a client at a position of ``where``."""
        place = self.where[position]
        return {
            "client": int(self.clients[place]),
            "group": self.group_names[self.groups[place]],
            "unseen": bool(self.unseen[place]),
            "n": int(self.sizes[place]),
        }

    @cached_property
    def texts(self) -> list[str]:
        """The descriptions of clients with samples as JSON, without braces."""
        return [json.dumps(self.row(position))[1:-1] for position in range(len(self.where))]

    @classmethod
    def of(
        cls, federation: Federation, clients: Ints, split: str, before: Holders | None = None
    ) -> Holders:
        """Describe clients, or return ``before`` if it describes the same."""
        sizes, groups = federation.split(split).sizes[clients], federation.groups[clients]
        unseen, names = federation.unseen[clients], tuple(federation.group_names)
        if before is not None and before.group_names == names:
            pairs = (
                (before.clients, clients),
                (before.sizes, sizes),
                (before.groups, groups),
                (before.unseen, unseen),
            )
            if all(np.array_equal(old, new) for old, new in pairs):
                return before
        return cls(clients.copy(), sizes, groups, unseen, names)


@dataclass(frozen=True, eq=False)
class ClientRows:
    """Rows of one round, model and split: one for each client with samples, in their order.

    There may be thousands in every round. So they are kept as columns, and the text of a row is
    made without the row itself.

    Attributes
    ----------
    round : int
        The number of finished rounds.
    model : {"global", "personal", "local"}
        The model that was evaluated.
    split : str
        The split.
    holders : Holders
        The clients.
    columns : dict of float64 arrays
        Loss and metrics, one value per row.
    special : dict
        The rows, by position, that have more or fewer entries than the others.

    Examples
    --------
    >>> clients = np.array([0, 3])
    >>> holders = Holders(clients, np.array([2, 5]), clients * 0, clients > 9, ("a",))
    >>> rows = ClientRows(1, "global", "test", holders, {"loss": np.array([0.5, 1.0])}, {})
    >>> [(row["client"], row["loss"]) for row in rows]
    [(0, 0.5), (3, 1.0)]
    """

    round: int
    model: str
    split: str
    holders: Holders
    columns: dict[str, Floats]
    special: dict[int, Row]

    def __len__(self) -> int:
        return len(self.holders.where)

    def __iter__(self) -> Iterator[Row]:
        return map(self.row, range(len(self)))

    def row(self, position: int) -> Row:
        """Return the row at a position."""
        if position in self.special:
            return self.special[position]
        values = {name: float(column[position]) for name, column in self.columns.items()}
        return {**self._head, **self.holders.row(position), **values}

    @property
    def _head(self) -> Row:
        return {"round": self.round, "model": self.model, "split": self.split}

    def lines(self) -> list[str]:
        """Return each row as JSON, as ``json.dumps`` writes it."""
        if not len(self):
            return []
        # Numbers differ in every row, and all other text is made only once. The text of a list of
        # numbers has the texts of the numbers.
        columns = [json.dumps(c.tolist())[1:-1].split(", ") for c in self.columns.values()]
        head = json.dumps(self._head)[:-1].replace("%", "%%")
        names = (json.dumps(name).replace("%", "%%") for name in self.columns)
        line = f"{head}, %s{''.join(f', {name}: %s' for name in names)}}}"
        lines = [line % texts for texts in zip(self.holders.texts, *columns, strict=True)]
        for position, row in self.special.items():
            lines[position] = json.dumps(row)
        return lines

    def diverged(self) -> int | None:
        """Return the first client whose loss is not finite, if there is one."""
        bad = np.flatnonzero(~np.isfinite(self.columns["loss"]))
        return int(self.holders.clients[self.holders.where[bad[0]]]) if len(bad) else None

    def of_seen(self, name: str) -> Floats:
        """Return the values of seen clients in a column, without rows that lack it."""
        having = ~self.holders.unseen[self.holders.where]
        for position, row in self.special.items():
            having[position] &= name in row
        return self.columns[name][having] if name in self.columns else np.empty(0)

    @property
    def sizes_of_seen(self) -> Ints:
        """The numbers of samples of seen clients."""
        where = self.holders.where
        return self.holders.sizes[where][~self.holders.unseen[where]]


def client_rows(
    holders: Holders,
    measured: Measured,
    *,
    round_: int,
    model: str,
    split: str,
    task: Task,
    gaps: Mapping[int, float] | None = None,
    metrics: Sequence[Metric] = (),
) -> ClientRows:
    """Return the rows of ``metrics.jsonl``, one per client with samples in the split.

    Parameters
    ----------
    holders : Holders
        The clients that were evaluated.
    measured : dict of arrays
        Loss and metrics, one value for each of these clients.
    round_ : int
        The number of finished rounds.
    model : {"global", "personal", "local"}
        The model that was evaluated.
    split : str
        The split.
    task : Task
        The task, which defines the score for rows with counts by attributes.
    gaps : mapping, optional
        Generalization gaps of the clients that have just trained.
    metrics : sequence of Metric
        The metrics among the values. A value that is undefined or out of range is not in the row,
        and ``left_out`` has the reason by the metric's name.

    Returns
    -------
    ClientRows
        In the order of the clients.
    """
    known = gaps or {}
    counts = {name: values for name, values in measured.items() if read_column(name)}
    columns = {
        name: np.asarray(values, np.float64)[holders.where]
        for name, values in measured.items()
        if name not in counts
    }
    rows = ClientRows(round_, model, split, holders, columns, {})
    with_gap = np.isin(holders.clients[holders.where], list(known))
    for position in range(len(rows)) if metrics or counts else np.flatnonzero(with_gap).tolist():
        row = rows.row(position)
        own = {name: float(of[holders.where[position]]) for name, of in counts.items()}
        if _complete(row, known, metrics, own, task):
            rows.special[position] = row
    return rows


def _complete(
    row: Row,
    gaps: Mapping[int, float],
    metrics: Sequence[Metric],
    counts: Mapping[str, float],
    task: Task,
) -> bool:
    """Add a gap, why metrics are left out, and comparisons by attributes, where there are some.

    Return whether there were any.
    """
    faults = {metric.name: metric.fault(row.get(metric.name, np.nan)) for metric in metrics}
    left_out = {name: fault for name, fault in faults.items() if fault}
    for name in left_out:
        row.pop(name, None)
    if row["client"] in gaps:
        row["gap"] = gaps[row["client"]]
    if left_out:
        row["left_out"] = left_out
    if by_attribute := parity.of_client(
        counts, row["n"], score=task.score, higher_is_better=task.higher_is_better
    ):
        row["attributes"] = by_attribute
    return row["client"] in gaps or bool(left_out or by_attribute)
