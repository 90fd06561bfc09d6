"""Steps recorded as CUDA graphs."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from equipoise.engine.replay import Replay
from tests.engine.gpu import needs_gpu

pytestmark = needs_gpu


@dataclass(frozen=True)
class Given:
    x: torch.Tensor


class Cycle:
    """Garbage that only the collector frees."""

    def __init__(self, held):
        self.held, self.itself = held, self


def test_a_graph_freed_by_the_collector_does_not_break_another_recording():
    """CUDA refuses to destroy a graph during a capture; the warning of a failure is an error."""
    total = torch.zeros(3, device="cuda")

    def program(given):
        # Enough new objects to start the collector if it were on.
        for _ in range(2000):
            Cycle([])
        total.add_(given.x)

    inputs = Given(torch.ones(3, device="cuda"))
    forgotten = Replay()
    for _ in range(2):
        forgotten.carry_out("step", program, inputs)
    total.zero_()
    thresholds = gc.get_threshold()
    garbage = Cycle(forgotten)
    replay = Replay()
    replay.carry_out("step", program, inputs)
    del garbage, forgotten
    gc.set_threshold(1, 1, 1)
    try:
        replay.carry_out("step", program, inputs)
    finally:
        gc.set_threshold(*thresholds)
    replay.carry_out("step", program, Given(torch.full((3,), 5.0, device="cuda")))
    assert len(replay._graphs) == 1
    assert total.tolist() == [7.0, 7.0, 7.0]
