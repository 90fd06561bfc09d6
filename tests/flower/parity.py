"""One experiment in this process and by messages: everything that must be equal."""

from __future__ import annotations

import math

import numpy as np
import pytest

from equipoise import methods
from equipoise.config import load_experiment
from equipoise.data import load
from equipoise.run.files import load_tensors
from tests.flower.loop import own_nodes, run_on_loop

TOLERANCE = 1e-9
METRICS = ("loss", "accuracy", "dice", "gap")


def with_clients():
    """The registered methods whose clients train on their own data."""
    digits = load("digits")
    return [name for name in methods.names() if methods.build(name).view.of(digits) is digits]


def differ(one, other):
    """The relative difference of two trees."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).norm() / one[n].norm().clamp_min(1e-30)) for n in one)


def assert_same_rows(ours, theirs, tolerance=TOLERANCE, metrics=()):
    assert len(ours) == len(theirs) > 0
    close = (*METRICS, *metrics)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            same = (
                math.isclose(value, other[key], rel_tol=tolerance, abs_tol=tolerance)
                if key in close
                else None
            )
            assert value == other[key] if same is None else same, (key, one, other)


def assert_same_notes(ours, theirs):
    """Notes may be quotients of small differences (slopes), so they show rounding earlier."""
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        one, other = (
            [math.nan if v is None else v for v in np.ravel(given)]
            for given in (values, theirs[name])
        )
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9, nan_ok=True), name


def compare(path, folder, tolerance=TOLERANCE):
    """Run an experiment both ways and compare everything; return both runs and the grid."""
    alone = load_experiment(path).run()
    run, grid = run_on_loop(path, own_nodes(folder))
    here, there = alone.trainer.selected(), run.trainer.selected()
    assert here.round == there.round
    assert differ(here.shared, there.shared) <= tolerance
    own = [metric.name for metric in run.trainer.evaluator.metrics]
    assert_same_rows(list(alone.trainer.metrics), list(run.trainer.metrics), tolerance, own)
    for one, other in zip(alone.trainer.rounds, run.trainer.rounds, strict=True):
        assert (one["round"], one["cohort"]) == (other["round"], other["cohort"])
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=tolerance)
        assert ("method_terms" in one) == ("method_terms" in other)
        terms = other.get("method_terms", 0.0)
        assert one.get("method_terms", 0.0) == pytest.approx(terms, rel=tolerance, abs=tolerance)
        assert (one["bytes_up"], one["bytes_down"]) == (other["bytes_up"], other["bytes_down"])
        assert (one["messages"], one["evaluations"]) == (other["messages"], other["evaluations"])
        assert one.get("clients") == other.get("clients")
        assert_same_notes(one.get("notes", {}), other.get("notes", {}))
    for client in range(4):
        ends_up_with, note = load_tensors(
            folder
            / "memory"
            / str(client)
            / "runs"
            / run.trainer.engine.run()
            / f"client-{client}/model.safetensors"
        )
        module = alone.model(client if here.own and client in here.clients else None)
        expected = {
            name: tensor for name, tensor in module.state_dict().items() if name in ends_up_with
        }
        assert differ(expected, ends_up_with) <= tolerance
        assert note["round"] == here.round
    return alone, run, grid
