"""Which samples clients are tested on: their own, or those of their group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from equipoise.data.draws import generator
from equipoise.data.partition import Assignment, Partition
from equipoise.data.partition.base import Ints, groups_of, members_by_group
from equipoise.data.source import Source
from equipoise.errors import InputError
from equipoise.splits import Split, ThreeSplits, split_samples


def tests_of_groups(source: Source, splits: Sequence[float], seed: int) -> list[Ints]:
    """Return the test samples of each group: the published ones, or a random share.

    Parameters
    ----------
    source : Source
        The samples. Without groups, all are in one group.
    splits : sequence of three floats
        The third is the share of a group's samples to draw, if the source has no published test
        samples.
    seed : int
        Seed of the random draws.

    Returns
    -------
    list of int arrays
        One array per group.

    Examples
    --------
    >>> published = np.array([True, False, False, True])
    >>> source = Source(x=torch.zeros(4, 1), y=torch.zeros(4).long(), test=published)
    >>> tests_of_groups(source, (0.7, 0.1, 0.2), seed=0)
    [array([0, 3])]
    """
    if source.test is not None:
        tests = [samples[source.test[samples]] for samples in members_by_group(source)]
    else:
        draws = generator(seed, "tests of groups")
        tests = [
            np.sort(draws.permutation(own)[: round(splits[2] * len(own))])
            for own in members_by_group(source)
        ]
    for name, samples in zip(groups_of(source)[1], tests, strict=True):
        if not samples.size:
            share = (
                ""
                if source.test is not None
                else f"; splits={tuple(splits)} draws a share of {splits[2]:g}"
            )
            raise InputError(
                f"test='group': group {name!r} of source {source.name!r} has no test samples{share}"
            )
    return tests


def assign_others(
    partition: Partition, source: Source, tests: Sequence[Ints], seed: int
) -> Assignment:
    """Divide all samples except the test samples of groups among clients.

    Parameters
    ----------
    partition : Partition
        How to divide them. Its clients must belong to the groups of the source.
    source : Source
        The samples.
    tests : sequence of int arrays
        The test samples of each group.
    seed : int
        Seed of the partition.

    Returns
    -------
    Assignment
        The samples of each client, as positions in the source.

    Examples
    --------
    >>> from equipoise.data.partition import Iid
    >>> source = Source(x=torch.zeros(6, 1), y=torch.zeros(6).long())
    >>> held = assign_others(Iid(1), source, [np.array([0, 5])], seed=0).clients
    >>> sorted(held[0].tolist())
    [1, 2, 3, 4]
    """
    others = np.setdiff1d(np.arange(len(source.x)), np.concatenate(tests))
    if not others.size:
        raise InputError(f"test='group' leaves no sample of source {source.name!r} to train on")
    assignment = assign_some(partition, replace(source, test=None), others, seed)
    if assignment.group_names != groups_of(source)[1]:
        raise InputError(
            f"test='group' needs clients in the groups of source {source.name!r}, but the "
            f"partition {type(partition).__name__} makes other groups: "
            f"{', '.join(assignment.group_names)}"
        )
    return assignment


def assign_some(partition: Partition, source: Source, some: Ints, seed: int) -> Assignment:
    """Divide some samples of a source among clients.

    Parameters
    ----------
    partition : Partition
        How to divide them.
    source : Source
        All samples.
    some : int array
        The samples to divide.
    seed : int
        Seed of the partition.

    Returns
    -------
    Assignment
        The samples of each client, as positions in the source.

    Examples
    --------
    >>> from equipoise.data.partition import Iid
    >>> source = Source(x=torch.zeros(6, 1), y=torch.zeros(6).long())
    >>> sorted(assign_some(Iid(1), source, np.array([1, 4, 5]), seed=0).clients[0].tolist())
    [1, 4, 5]
    """
    divided = replace(
        source,
        # Partitions do not read x.
        x=torch.empty(len(some), 0),
        y=source.y[torch.from_numpy(some)],
        groups=None if source.groups is None else source.groups[some],
        ids=None if source.ids is None else source.ids[some],
        units=None if source.units is None else source.units[some],
        test=None if source.test is None else source.test[some],
        official_test=None,
        attributes={},
    )
    assignment = partition.assign(divided, seed)
    return replace(assignment, clients=[some[samples] for samples in assignment.clients])


def divide(
    source: Source,
    assignment: Assignment,
    keys: Sequence[str],
    splits: tuple[float, float, float],
    seed: int,
    tests: Sequence[Ints] | None = None,
) -> ThreeSplits:
    """Divide the samples of clients into train, val and test.

    Parameters
    ----------
    source : Source
        The samples.
    assignment : Assignment
        The samples of each client.
    keys : sequence of str
        One permanent identifier per client, such as its name.
    splits : tuple of three floats
        Shares of train, val and test.
    seed : int
        Seed of the random division.
    tests : sequence of int arrays, optional
        The test samples of each group, which all its clients share. By default a client is tested
        on its own samples: those published for testing, or a share of all of them.

    Returns
    -------
    ThreeSplits
        Train, val and test. Shared test samples are not copied: clients have the same positions.

    Examples
    --------
    >>> source = Source(x=torch.zeros(6, 1), y=torch.zeros(6).long())
    >>> two = Assignment([np.array([0, 1]), np.array([2, 3])], groups=[0, 0], group_names=("all",))
    >>> tests = [np.array([4, 5])]
    >>> train, val, test = divide(source, two, ["ann", "bob"], (1.0, 0.0, 0.0), 0, tests)
    >>> train.sizes.tolist(), test.of(0).tolist(), test.of(1).tolist()
    ([2, 2], [4, 5], [4, 5])
    """
    held = assignment.clients
    if tests is not None:
        own = [tests[group] for group in assignment.groups]
    elif source.test is not None:
        own = [samples[source.test[samples]] for samples in held]
        held = [samples[~source.test[samples]] for samples in held]
    else:
        return split_samples(Split.from_lists(held), keys, splits, seed, source.units)
    learned = splits[0] + splits[1]
    shares = (splits[0] / learned, splits[1] / learned, 0.0) if learned > 0 else splits
    return split_samples(Split.from_lists(held), keys, shares, seed, source.units)._replace(
        test=Split.from_lists(own)
    )
