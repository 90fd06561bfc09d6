"""What measurements need, with few rounds; those that need weights or a GPU are left out."""

from __future__ import annotations

import pytest

from benchmarks import large_models
from benchmarks.large_models import beside_the_limit
from benchmarks.machine import Rates


def test_both_batch_sizes_are_held_against_the_same_limit() -> None:
    """50 clients make five steps of 8 images of 3 x 16 x 16, with an MLP of two layers."""
    measured = large_models.padding("cpu", "", rounds=1)
    needs = measured.pop("needs")
    counted = needs.counted()
    assert (counted["steps"], counted["images"]) == (250, 2000)
    assert (counted["device"], counted["precision"]) == ("cpu", "float32")
    first, second = (p for p in needs.module.parameters() if p.dim() == 2)
    operations = 2 * 8 * (2 * first.numel() + 3 * second.numel())
    assert counted["operations"] == operations
    report = beside_the_limit(measured, counted, Rates(1e9, 1e18, "here", "float32"))
    seconds = 250 * operations / 1e9
    assert report["limit"]["seconds"] == pytest.approx(seconds)
    assert report["share_of_limit"] == {
        name: pytest.approx(seconds / measured[name])
        for name in ("batch_8_seconds", "batch_32_seconds")
    }


def test_a_question_needs_a_forward_pass() -> None:
    counted = large_models.question("1", "", pixels=32)["needs"].counted()
    assert counted["images"] == 2
    # The first convolution alone: 64 filters of 3 x 3 x 3 at 32 x 32 places.
    assert counted["operations"] > 2 * 2 * 64 * 27 * 32 * 32
