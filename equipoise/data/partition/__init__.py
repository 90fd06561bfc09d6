"""Partitions: the ways to divide a source's samples among clients.

Every partition is a frozen dataclass that stores its parameters and has a method ``assign(source,
seed)``. If the source has groups, clients are created inside each group, so that every client
belongs to exactly one group.

``min_samples`` is the minimum number of samples per client. The default is 3, because a client
needs one sample each for training, validation and testing. If it cannot be met, an error is raised
before anything is drawn.
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
