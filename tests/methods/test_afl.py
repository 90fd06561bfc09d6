"""AFL: both players' steps in plain Python, the mean iterate, partial cohorts, the solution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.engine.settings import Machine
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.methods import build
from equipoise.optimizers import Sgd
from equipoise.run.api import train
from equipoise.run.evaluation import Evaluation
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.small_models import WITHOUT_GRADIENT, batchnorm, mlp
from tests.rounds import play, scalar, targets, weight

TARGETS = (3.0, -1.0, 0.5)
HOW = {"steps": 1, "optimizer": Sgd(lr=0.1)}


def project(values):
    """The projection onto the simplex by bisection."""
    low, high = min(values) - 1, max(values)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(max(v - middle, 0) for v in values) > 1 else (low, middle)
    return [max(v - low, 0) for v in values]


def rounds_by_hand(cohorts, *, start, weights, ascent):
    """Both players' steps for F_k(w) = (w - t_k)²; return all w and the last λ."""
    w, path = start, []
    for cohort in cohorts:
        losses = {k: (w - TARGETS[k]) ** 2 for k in cohort}
        total = sum(weights[k] for k in cohort)
        if total > 0:
            w = sum(weights[k] / total * (w - 0.2 * (w - TARGETS[k])) for k in cohort)
        raised = list(weights)
        for k in cohort:
            raised[k] += ascent * len(TARGETS) / len(cohort) * losses[k]
        weights = project(raised)
        path.append(w)
    return path, weights


@pytest.mark.parametrize("prior", ["size", "uniform"])
@pytest.mark.parametrize(
    "cohorts", [[[0, 1, 2]] * 4, [[0, 2], [1], [1, 2], [0, 1]]], ids=["full", "partial"]
)
def test_rounds_by_hand(cohorts, prior):
    method = build("afl", ascent=0.03, weights=prior)
    played = play(method, targets(*TARGETS, samples=[1, 3, 4]), scalar(1.0), cohorts, **HOW)
    first = [1 / 8, 3 / 8, 4 / 8] if prior == "size" else [1 / 3] * 3
    path, weights = rounds_by_hand(cohorts, start=1.0, weights=first, ascent=0.03)
    assert [weight(state.model) for state in played.states[1:]] == pytest.approx(path, abs=1e-13)
    assert played.states[-1].server["clients"]["weight"].tolist() == pytest.approx(
        weights, abs=1e-13
    )
    handed_out = method.aggregation.evaluated(played.states[-1])
    assert weight(handed_out) == pytest.approx(np.mean(path), abs=1e-13)
    last = build("afl", average=False).aggregation.evaluated(played.states[-1])
    assert weight(last) == pytest.approx(path[-1], abs=1e-13)


def test_unseen_clients_have_no_weight_and_ids_are_found():
    federation = Federation.from_arrays(
        torch.ones(4, 1).double(),
        torch.tensor([3.0, 9.0, -1.0, 0.5]).double(),
        clients=np.arange(4),
        splits=(1, 0, 0),
        task="regression",
        unseen=[1],
    )
    played = play(build("afl", ascent=0.03), federation, scalar(1.0), [[2, 3], [0, 3]], **HOW)
    path, weights = rounds_by_hand([[1, 2], [0, 2]], start=1.0, weights=[1 / 3] * 3, ascent=0.03)
    assert weight(played.model) == pytest.approx(path[-1], abs=1e-13)
    assert played.states[-1].server["clients"]["ids"].tolist() == [0, 2, 3]
    assert played.states[-1].server["clients"]["weight"].tolist() == pytest.approx(
        weights, abs=1e-13
    )


def test_a_cohort_without_weight_leaves_the_model_but_is_heard():
    # After round 1 all weight is on client 0, far away; client 1 alone then changes nothing.
    federation = targets(10.0, 0.0)
    played = play(build("afl", ascent=1.0), federation, scalar(0.0), [[0, 1], [1], [1]], **HOW)
    assert played.states[1].server["clients"]["weight"].tolist() == [1.0, 0.0]
    assert weight(played.states[2].model) == weight(played.states[1].model) == pytest.approx(1.0)
    # It reports a loss of 1, multiplied by K/|S| = 2: Π(1, 2) = (0, 1).
    assert played.states[2].server["clients"]["weight"].tolist() == pytest.approx([0.0, 1.0])
    assert weight(played.states[3].model) == pytest.approx(0.8)


def test_without_ascent_it_is_fedavg():
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1)}
    still = play(build("afl", ascent=0.0), images(), batchnorm(), THREE_COHORTS, **how)
    plain = play(build("fedavg"), images(), batchnorm(), THREE_COHORTS, **how)
    assert distance(still.model, plain.model, WITHOUT_GRADIENT) <= 1e-9


@pytest.mark.parametrize("make", [mlp, batchnorm])
def test_stacked_equals_one_by_one(make):
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.05)}
    one, all_ = (
        play(build("afl"), images(), make(), THREE_COHORTS, chunk=chunk, **how) for chunk in (1, 10)
    )
    assert distance(all_.model, one.model, WITHOUT_GRADIENT) <= 1e-9
    assert (
        distance(all_.states[-1].server["mean"], one.states[-1].server["mean"], WITHOUT_GRADIENT)
        <= 1e-9
    )


def test_the_weights_stay_on_the_simplex():
    played = play(build("afl", ascent=0.7), images(), mlp(), THREE_COHORTS * 3, batch_size=8)
    for state in played.states:
        weights = state.server["clients"]["weight"]
        assert weights.min() >= 0
        assert weights.sum().item() == pytest.approx(1, abs=1e-12)


def test_play_ends_at_the_saddle_point():
    """min_w max_k (w - t_k)² has the two extreme targets equally far: w = 1, λ = ½ each."""
    how = {"steps": 1, "optimizer": Sgd(lr=0.02)}
    played = play(
        build("afl", ascent=0.01), targets(*TARGETS), scalar(0.0), [[0, 1, 2]] * 1500, **how
    )
    assert weight(build("afl").aggregation.evaluated(played.states[-1])) == pytest.approx(
        1.0, abs=0.05
    )
    weights = torch.stack([state.server["clients"]["weight"] for state in played.states]).mean(0)
    assert weights.tolist() == pytest.approx([0.5, 0.5, 0.0], abs=0.05)


def test_the_run_evaluates_hands_out_and_resumes_the_mean(tmp_path):
    federation = images()
    machine, never = Machine(device="cpu", precision="float64"), Evaluation(every=0)
    how = {
        "method": "afl",
        "rounds": 4,
        "batch_size": 8,
        "cohort": 4,
        "seed": 3,
        "machine": machine,
        "evaluation": never,
    }
    whole = train(federation, model=mlp(), **how)
    trainer = whole.trainer
    assert distance(dict(whole.model().state_dict()), trainer.state.server["mean"]) == 0
    assert distance(dict(whole.model().state_dict()), trainer.state.model) > 1e-3
    out = tmp_path / "run"

    def stop(progress):
        if progress.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(federation, model=mlp(), out=out, on_round=stop, **how)
    again = train(federation, model=mlp(), out=out, resume=True, **how)
    assert torch.equal(
        again.trainer.state.server["clients"]["weight"], trainer.state.server["clients"]["weight"]
    )
    assert distance(dict(again.model().state_dict()), dict(whole.model().state_dict())) == 0


@pytest.mark.parametrize("ascent", [-0.1, float("nan"), float("inf")])
def test_a_bad_step_is_refused(ascent):
    with pytest.raises(InputError, match=r"afl\.ascent must be at least 0 and finite, got"):
        build("afl", ascent=ascent)
