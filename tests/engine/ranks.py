"""The processes of a run as threads of one process: the real messages, without the time that
processes take to start.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from contextlib import contextmanager
from unittest import mock

import torch.distributed

from equipoise.engine import share
from equipoise.engine.link import PATIENCE, Link
from equipoise.run.processes import Team


def links(processes, folder):
    """Connect processes, and return the link of each."""
    found = {}

    def connect(rank):
        store = torch.distributed.FileStore(f"{folder}/store", processes)
        group = torch.distributed.ProcessGroupGloo(store, rank, processes, PATIENCE)
        found[rank] = Link(group)

    all_at_once([lambda rank=rank: connect(rank) for rank in range(processes)])
    return [found[rank] for rank in range(processes)]


def all_at_once(tasks):
    """Carry out every task in a thread of its own, and raise the first error."""
    errors = []

    def carried_out(task):
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=carried_out, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


_one_at_a_time = threading.Lock()


def _attempted_alone(*given, really=share.attempt):
    """Layers know the pass they are called in, of which a process has one at a time."""
    with _one_at_a_time:
        return really(*given)


@contextmanager
def threads_for(work, processes, folder, shares=None):
    """Stand in for :func:`equipoise.run.processes.started`; ``shares`` collects those of others."""
    mine, *others = links(processes, folder)
    made = [dataclasses.replace(work, model=copy.deepcopy(work.model)).share() for _ in others]
    if shares is not None:
        shares += made
    waiting = [
        threading.Thread(target=share.serve, args=(link, lambda own=own: own), daemon=True)
        for link, own in zip(others, made, strict=True)
    ]
    team = Team(work.method, lambda: mine)
    with mock.patch.object(share, "attempt", _attempted_alone):
        for thread in waiting:
            thread.start()
        try:
            yield team
            team.gather()
        finally:
            mine.broadcast((share.STOP, 0, (None, None)))
            for thread in waiting:
                thread.join()
