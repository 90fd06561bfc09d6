"""Which steps of a chunk are recorded together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from equipoise.engine.phase_run import PhaseRun, Span
from equipoise.engine.replay import STEPS_A_GRAPH


def spans_of(runs: Sequence[PhaseRun], turns: Iterable[tuple[int, int]]) -> Iterator[Span]:
    """Join consecutive steps of the same phase and shape, up to as many as a recording holds."""
    last: Span | None = None
    for step, turn in turns:
        shape = runs[turn].shape_of(step)
        if last is not None:
            follows = (last.turn, last.shape, last.first + last.count) == (turn, shape, step)
            if follows and last.count < STEPS_A_GRAPH:
                last = replace(last, count=last.count + 1)
                continue
            yield last
        last = Span(turn, step, 1, shape)
    if last is not None:
        yield last


def blocks_of(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Divide spans into blocks, each of which one recording can hold.

    A block ends where the clients of a phase become fewer, so that blocks come again also where
    clients differ.
    """
    block: list[Span] = []
    active: dict[int, int] = {}
    for span in spans:
        full = sum(each.count for each in block) + span.count > STEPS_A_GRAPH
        if block and (full or active.get(span.turn, span.shape.active) != span.shape.active):
            yield block
            block, active = [], {}
        block.append(span)
        active[span.turn] = span.shape.active
    if block:
        yield block
