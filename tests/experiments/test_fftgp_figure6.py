"""FFT-GP's figure 6: variances of gaps for three aggregations, against a plain loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise import methods
from equipoise.errors import InputError
from equipoise.method import mix
from equipoise.methods.fftgp import equal_gap_weights, slopes
from equipoise.methods.ga import generalization_adjustment
from tests.experiments.scripts import load_script
from tests.figures.linear_runs import linear_run, world
from tests.methods.domains import TRAINING
from tests.rounds import linear, play

SCRIPT = Path(__file__).parents[2] / "experiments" / "fftgp" / "figure6.py"
ROUNDS = 4


@pytest.fixture
def figure(monkeypatch):
    """The script, whose method is registered only here."""
    monkeypatch.setattr(methods, "_PARTS", dict(methods._discover()))
    monkeypatch.setattr(methods, "_METHODS", set(methods._METHODS))
    return load_script(SCRIPT)


def variances_by_hand(follow):
    """Local models of single rounds, aggregated in three ways."""
    data, equal = world(), torch.full((3,), 1 / 3, dtype=torch.float64)
    weights, found = {"ga": equal, "faa": equal}, []
    played = play(
        methods.build(follow),
        data,
        linear(),
        [data.seen] * ROUNDS,
        seed=0,
        reports=("val_loss_after",),
        **TRAINING,
    )
    for number, (updates, cohort) in enumerate(zip(played.updates, played.cohorts, strict=True)):
        model, step = played.states[number].model, 0.2 * (1 - number / ROUNDS)

        def gaps(a, updates=updates, cohort=cohort, model=model):
            return (
                cohort.evaluate({**model, **mix(updates, a)}, "val")["loss"]
                - updates.reports["val_loss_after"]
            )

        gap = gaps(weights["faa"])
        nudged = generalization_adjustment(weights["faa"], gap, step)
        slope = slopes(weights["faa"], gap, nudged, gaps(nudged))
        weights["faa"] = equal_gap_weights(weights["faa"], gap, slope, nudged)
        compared = {"fedavg": cohort.prior, **weights}
        found.append([np.var(gaps(compared[name]).numpy()) for name in ("fedavg", "ga", "faa")])
        weights["ga"] = generalization_adjustment(weights["ga"], gaps(weights["ga"]), step)
    return np.array(found).T


@pytest.mark.parametrize("follow", ["faa", "fedavg"])
def test_variances_by_hand(figure, follow, tmp_path):
    linear_run(
        tmp_path / "run", world(), {"name": "fairnesscurves", "follow": follow}, rounds=ROUNDS
    )
    found = figure.read(tmp_path / "run")
    wanted = variances_by_hand(follow)
    assert list(found) == ["fedavg", "ga", "faa"]
    np.testing.assert_allclose(list(found.values()), wanted, rtol=1e-7)
    assert len({tuple(values) for values in found.values()}) == 3
    figure.draw({"linear": found}, tmp_path / "figure6.png")
    assert (tmp_path / "figure6.png").stat().st_size > 5000


def test_faas_own_run_is_not_changed_by_measuring(figure, tmp_path):
    ours, plain = (
        linear_run(None, world(), name, rounds=ROUNDS) for name in ("fairnesscurves", "faa")
    )
    assert torch.equal(
        ours.trainer.state.model["head.weight"], plain.trainer.state.model["head.weight"]
    )


def test_an_unknown_aggregation_is_refused(figure):
    with pytest.raises(InputError, match="unknown value 'median' in fairnesscurves.follow"):
        methods.build("fairnesscurves", follow="median")
