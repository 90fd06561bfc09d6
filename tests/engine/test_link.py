"""Messages between processes arrive as they were sent."""

from __future__ import annotations

import pytest
import torch

from equipoise.engine.link import ProcessLost
from tests.engine.ranks import all_at_once, links

LARGE = torch.arange(40_000, dtype=torch.float64)
MESSAGES = {
    "nothing": None,
    "plain values": ("train", 3, {"split": "val", "ids": [1, 2]}),
    "small tensors": {"w": torch.tensor([1.5, -2.0]), "mask": torch.tensor([True, False])},
    "a number": torch.tensor(7),
    "one row of an expanded number": torch.tensor(0.5).expand(1),
    "no rows": torch.empty(0, 3, dtype=torch.bfloat16),
    "half precision": torch.tensor([0.1, 0.2], dtype=torch.bfloat16),
    "large and small": [LARGE, {"model": {"w": LARGE.float().reshape(200, 200)}}, torch.ones(3)],
    "not contiguous": LARGE.reshape(200, 200).T,
}


def same(found, wanted):
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found == wanted


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_a_message_arrives_as_it_was_sent(message, tmp_path):
    first, second, third = links(3, tmp_path)
    found = []
    all_at_once(
        [
            lambda: (first.broadcast(message), first.send(message, 2)),
            lambda: found.append(second.broadcast()),
            lambda: found.extend([third.broadcast(), third.receive(0)]),
        ]
    )
    assert len(found) == 3
    assert all(same(each, message) for each in found)


def test_received_tensors_are_aligned_like_new_ones(tmp_path):
    # Kernels round differently for other alignments.
    first, second = links(2, tmp_path)
    found = []
    message = [torch.ones(count) for count in (1, 3, 5, 20_000)]
    all_at_once([lambda: first.send(message, 1), lambda: found.extend(second.receive(0))])
    assert [tensor.data_ptr() % 64 for tensor in found] == [0, 0, 0, 0]


def test_the_end_of_a_process_is_noticed(tmp_path):
    first, second = links(2, tmp_path)
    del second
    with pytest.raises(ProcessLost, match="process 1 of the run has ended"):
        first.receive(1)
