"""Partitions: the ways to divide a source's samples among clients.

Every partition is a frozen dataclass that only stores what it is told and answers ``assign(source,
seed)``. Where the source has groups, clients are made inside each group, so that a client always
belongs to exactly one.

``min_samples`` is the least a client may hold. It is 3 unless told otherwise, because a client
needs one sample each to train, to validate and to test on. What cannot be met is refused before
anything is drawn.
"""

from __future__ import annotations

from equipoise.data.partition.base import Assignment, Partition
from equipoise.data.partition.by_group import ByGroup
from equipoise.data.partition.gifair import Skewed, ThreeGroups
from equipoise.data.partition.iid import Iid
from equipoise.data.partition.label_skew import ClassesPerClient, Dirichlet
from equipoise.data.partition.natural import Natural

__all__ = [
    "Assignment",
    "ByGroup",
    "ClassesPerClient",
    "Dirichlet",
    "Iid",
    "Natural",
    "Partition",
    "Skewed",
    "ThreeGroups",
]
