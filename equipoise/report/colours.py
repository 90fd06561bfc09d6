"""The colours of groups in charts, and points and lines in these colours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from equipoise.report.charts import Series
from equipoise.report.reading import RunRecord
from equipoise.report.svg import HUES


@dataclass(frozen=True)
class Palette:
    """The colours of groups. If there are too few colours, the best groups share one."""

    hues: Mapping[str, int]
    labels: Mapping[int, str]

    def split(self, clients: Iterable[int], groups: Mapping[int, str]) -> dict[int, list[int]]:
        """Return the clients of each colour."""
        found: dict[int, list[int]] = {hue: [] for hue in self.labels}
        for client in clients:
            found[self.hues[groups[client]]].append(client)
        return {hue: members for hue, members in found.items() if members}


def palette(record: RunRecord) -> Palette:
    """Choose colours for the groups of a run."""
    names = record.group_names
    if len(names) <= HUES:
        return Palette({name: hue for hue, name in enumerate(names)}, dict(enumerate(names)))
    lead = record.leading("seen") or record.leading("unseen")
    means = record.parts[lead]["groups"] if lead else {}
    sign = 1 if record.task.higher_is_better else -1
    known = {name: sign * mean for name, mean in means.items() if mean is not None}
    worst = sorted(names, key=lambda name: known.get(name, np.inf))[: HUES - 1]
    hues = {name: worst.index(name) if name in worst else HUES - 1 for name in names}
    return Palette(
        hues, {**dict(enumerate(worst)), HUES - 1: f"the other {len(names) - len(worst)} groups"}
    )


def marks(
    record: RunRecord,
    clients: Iterable[int],
    x: Mapping[int, float],
    y: Mapping[int, float],
    colours: Palette,
) -> list[Series]:
    """Return a mark for each client, in a series for each colour."""
    return [
        Series(
            colours.labels[hue],
            [x[client] for client in members],
            [y[client] for client in members],
            hue=hue,
            line=False,
            names=[f"{record.client_name(client)}, {record.groups[client]}" for client in members],
        )
        for hue, members in colours.split(clients, record.groups).items()
    ]


def ranked(
    record: RunRecord, order: Sequence[int], values: Mapping[int, float], colours: Palette
) -> list[Series]:
    """Return marks for the values of clients in the given order."""
    rank = {client: position for position, client in enumerate(order, start=1)}
    return marks(record, order, rank, values, colours)


def group_lines(means: Mapping[int, Mapping[str, float]], colours: Palette) -> list[Series]:
    """Return the means of groups over rounds; groups of one colour are averaged."""
    series = []
    for hue, label in colours.labels.items():
        points = {}
        for round_, of_round in means.items():
            mine = [mean for group, mean in of_round.items() if colours.hues[group] == hue]
            if mine:
                points[round_] = fmean(mine)
        if points:
            series.append(Series(label, list(points), list(points.values()), hue=hue))
    return series
