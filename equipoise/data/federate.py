"""Making a federation from a source and a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from equipoise.checks import one_of
from equipoise.data.draws import generator
from equipoise.data.partition import Assignment, Partition
from equipoise.data.source import Source
from equipoise.data.testing import assign_others, assign_some, divide, tests_of_groups
from equipoise.errors import InputError, few, near, unknown
from equipoise.federation import Federation
from equipoise.splits import Split, ThreeSplits


def federate(
    source: Source,
    partition: Partition,
    *,
    splits: tuple[float, float, float] = (0.7, 0.1, 0.2),
    unseen: int | float | Sequence[int | str] = 0,
    leave_out: str | Sequence[str] | None = None,
    test: str | None = None,
    server_val: float = 0.0,
    seed: int = 0,
) -> Federation:
    """Divide a source among clients, and each client's samples into train, val and test.

    Parameters
    ----------
    source : Source
        The samples.
    partition : Partition
        How to divide them, such as ``Dirichlet(100, beta=0.3)``.
    splits : tuple of three floats
        Shares of train, val and test in every client, summing to 1.
    unseen : int, float or sequence of int or str
        Clients to hold out of training: how many or (below 1) which share of them, drawn at random,
        or a list of clients, each by its position or its name.
    leave_out : str or sequence of str, optional
        One or several groups whose clients are all unseen, in addition to ``unseen``. All their
        samples are test samples, whatever ``splits`` is; other unseen clients keep their three
        splits.
    test : {"client", "group", "server"}, optional
        Whose test samples a client is evaluated on: its own, or those of its group, which all
        clients of the group share. The test samples of a group are drawn before the others are
        divided among clients. If the source declares which samples are for testing, these are used
        and the third share of ``splits`` is ignored. The default is that of the source: ``client``
        unless it was published with test sets for whole groups. With ``server``, the samples that
        were published for testing stay with the server, which evaluates the global model on them.
        The clients are tested on a share of the others, given by ``splits``.
    server_val : float
        Share of the samples, except those for testing, that the server holds for validation. They
        are drawn before the others are divided among clients.
    seed : int
        Seed of the partition, the splits and the draw of unseen clients.

    Returns
    -------
    Federation
        Ready for training.

    Examples
    --------
    >>> import torch
    >>> from equipoise.data.partition import Iid
    >>> source = Source(x=torch.zeros(40, 1), y=torch.arange(40) % 4)
    >>> federation = federate(source, Iid(4), unseen=0.25)
    >>> federation.clients, len(federation.seen), federation.train.sizes.tolist()
    (4, 3, [7, 7, 7, 7])
    >>> groups = {"groups": np.arange(40) // 20, "group_names": ("a", "b")}
    >>> domains = Source(x=torch.zeros(40, 1), y=torch.arange(40) % 4, **groups)
    >>> federation = federate(domains, Iid(2), splits=(0.8, 0.2, 0.0), leave_out="b")
    >>> [federation.split(name).sizes.tolist() for name in ("train", "val", "test")]
    [[16, 0], [4, 0], [0, 20]]
    """
    whose = one_of(source.test_of if test is None else test, ("client", "group", "server"), "test")
    server = _held_by_server(source, whose, server_val, seed)
    tests = tests_of_groups(source, splits, seed) if whose == "group" else None
    if server and tests is not None:
        raise InputError(
            "server_val cannot be used with test='group'; valid: test='client' or 'server'"
        )
    if whose == "server":
        source = replace(source, test=None)
    if server:
        others = np.setdiff1d(np.arange(len(source.x)), np.concatenate(list(server.values())))
        assignment = assign_some(partition, source, others, seed)
    else:
        assignment = (
            partition.assign(source, seed)
            if tests is None
            else assign_others(partition, source, tests, seed)
        )
    left_out = _left_out(assignment, leave_out)
    keys = assignment.names or [str(client) for client in range(len(assignment.clients))]
    held = Split.from_lists(assignment.clients)
    divided = divide(source, assignment, keys, splits, seed, tests)
    return Federation(
        source.x,
        source.y,
        *(_only_for_tests(divided, held, left_out) if left_out.any() else divided),
        groups=np.array(assignment.groups, np.int64),
        group_names=assignment.group_names,
        unseen=left_out | _unseen(unseen, left_out, assignment.names, seed),
        task=source.task,
        classes=source.classes,
        name=source.name,
        client_names=assignment.names,
        class_names=source.class_names,
        attributes=source.attributes,
        columns=source.columns,
        server=server,
    )


def _held_by_server(
    source: Source, whose: str, share: float, seed: int
) -> dict[str, NDArray[np.int64]]:
    """Return the samples that the server holds for validation and for testing."""
    held = {}
    official = (
        source.official_test
        if whose == "server" and source.official_test is not None
        else source.test
    )
    for_testing = np.zeros(len(source.x), bool) if official is None else official
    if share:
        if not 0 < share < 1:
            raise InputError(f"server_val must be a share from 0 to below 1, got {share!r}")
        candidates = np.flatnonzero(~for_testing)
        count = max(1, round(share * len(candidates)))
        held["val"] = np.sort(generator(seed, "server").permutation(candidates)[:count])
    if whose == "server":
        if not for_testing.any():
            raise InputError(
                f"test='server' needs published test samples, which source {source.name!r} lacks"
            )
        held["test"] = np.flatnonzero(for_testing)
    return held


def _left_out(assignment: Assignment, groups: str | Sequence[str] | None) -> NDArray[np.bool_]:
    named = [groups] if isinstance(groups, str) else list(groups or ())
    for group in named:
        if group not in assignment.group_names:
            raise unknown("group", group, assignment.group_names, where="leave_out")
    return np.isin(assignment.groups, [assignment.group_names.index(group) for group in named])


def _only_for_tests(divided: ThreeSplits, held: Split, left_out: NDArray[np.bool_]) -> ThreeSplits:
    """Move all samples of the clients that are left out to the test split."""
    nothing = Split.from_lists([[]] * held.clients)
    # This includes the test samples that clients of a group share.
    everything = Split.from_lists(
        [
            np.concatenate([held.of(k), np.setdiff1d(divided.test.of(k), held.of(k))])
            for k in range(held.clients)
        ]
    )

    def replaced(split: Split, instead: Split) -> Split:
        return Split.from_lists(
            [(instead if left_out[k] else split).of(k) for k in range(held.clients)]
        )

    return ThreeSplits(
        replaced(divided.train, nothing),
        replaced(divided.val, nothing),
        replaced(divided.test, everything),
    )


def _unseen(
    wanted: int | float | Sequence[int | str],
    left_out: NDArray[np.bool_],
    names: Sequence[str] | None,
    seed: int,
) -> NDArray[np.bool_]:
    """Choose unseen clients among those that are not already left out."""
    chosen = np.zeros(len(left_out), bool)
    candidates = np.flatnonzero(~left_out)
    if not isinstance(wanted, int | float | np.number):
        for client in [wanted] if isinstance(wanted, str) else wanted:
            if isinstance(client, str):
                if client not in (names or ()):
                    known = (
                        f"the clients are {few(names)}" if names else "the clients have no names"
                    )
                    raise InputError(
                        f"unseen client {client!r} does not exist{near(client, names or ())}; "
                        f"{known}"
                    )
                chosen[[name == client for name in names or ()]] = True
            elif client not in range(len(left_out)):
                raise InputError(
                    f"unseen client {client!r} does not exist; valid: 0 to {len(left_out) - 1}"
                )
            else:
                chosen[client] = True
        return chosen
    count = (
        round(wanted * len(left_out)) if isinstance(wanted, float) and 0 <= wanted < 1 else wanted
    )
    if count not in range(len(left_out)) or not 0 <= count < max(1, len(candidates)):
        raise InputError(
            f"unseen={wanted} must leave a client to train: a count from 0 to "
            f"{max(0, len(candidates) - 1)}, a share from 0 up to 1, or a list of clients"
        )
    chosen[generator(seed, "unseen").permutation(candidates)[: int(count)]] = True
    return chosen
