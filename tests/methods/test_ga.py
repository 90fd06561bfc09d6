"""Generalization adjustment: weights by hand, edge cases, and rounds against a plain loop."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.data import load
from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.methods.ga import generalization_adjustment
from equipoise.models import build as build_model
from tests.methods.domains import (
    TRAINING,
    adjusted_by_hand,
    assert_on_the_simplex,
    first_weights,
    local_step,
    loss,
    regression,
    shares,
)
from tests.rounds import linear, play, random_regression

THIRDS = torch.full((3,), 1 / 3, dtype=torch.float64)


def gaps(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_centred_form_by_hand():
    found = generalization_adjustment(THIRDS, gaps(0.4, 0.1, 0.25), 0.2)
    assert found.tolist() == pytest.approx([0.533333, 0.133333, 0.333333], abs=1e-6)


def test_the_form_of_public_code_by_hand():
    """All weights increase, by 0.2 times 1, 1/4 and 5/8; only scaling distinguishes clients."""
    found = generalization_adjustment(THIRDS, gaps(0.4, 0.1, 0.25), 0.2, centred=False)
    raised = np.array([1 / 3 + 0.2, 1 / 3 + 0.05, 1 / 3 + 0.125])
    assert found.tolist() == pytest.approx(raised / raised.sum())


def test_weights_are_clipped_at_0_only_and_then_scaled():
    """The weights before clipping are −0.4, 1.1 and 0.3."""
    found = generalization_adjustment(gaps(0.1, 0.6, 0.3), gaps(-1.0, 1.0, 0.0), 0.5)
    assert found.tolist() == pytest.approx([0.0, 1.1 / 1.4, 0.3 / 1.4])


@pytest.mark.parametrize(
    ("equal", "centred"),
    [
        (gaps(0.3, 0.3, 0.3), True),
        (gaps(0.1 + 0.2, 0.3, 0.3), True),
        (gaps(0.0, 0.0, 0.0), False),
        (gaps(*[torch.nan] * 3), True),
    ],
)
def test_equal_gaps_or_none_leave_the_weights(equal, centred):
    found = generalization_adjustment(gaps(0.2, 0.5, 0.3), equal, 0.2, centred)
    assert found.tolist() == pytest.approx([0.2, 0.5, 0.3])


def test_clients_without_a_gap_keep_their_weight():
    found = generalization_adjustment(gaps(0.2, 0.5, 0.3), gaps(0.4, torch.nan, 0.2), 0.1)
    assert found.tolist() == pytest.approx([0.3, 0.5, 0.2])


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.one_of(st.floats(-10, 10), st.just(float("nan")))),
        min_size=1,
        max_size=9,
    ),
    st.floats(0.01, 5),
    st.booleans(),
)
def test_weights_stay_on_the_simplex(pairs, step, centred):
    a = torch.tensor([a for a, _ in pairs], dtype=torch.float64) + 1e-3
    found = generalization_adjustment(a / a.sum(), gaps(*(g for _, g in pairs)), step, centred)
    assert float(found.min()) >= 0
    assert float(found.sum()) == pytest.approx(1)


# ---- rounds --------------------------------------------------------------------------------------

COHORTS = [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3], [1, 2], [2], [0, 1, 2]]


@pytest.mark.parametrize("third", [9, 1])
@pytest.mark.parametrize("decay", [True, False])
def test_rounds_by_hand(decay, third):
    """Client 2 misses round 2, so it has no gap in round 3 and keeps its weight there.

    With a single sample it has no validation data, and never a gap. Gaps are of all validation
    samples, whatever limits other reports.
    """
    world, method = regression(third), build("ga", step=0.3, decay=decay)
    played = play(method, world, linear(), COHORTS, report_samples=1, **TRAINING)
    w, a, own, took_part = first_weights(), np.full(4, 0.25), np.full(4, np.nan), np.zeros(4, int)
    for number, cohort in enumerate(COHORTS, start=1):
        step = 0.3 * (1 - (number - 1) / len(COHORTS)) if decay else 0.3
        here = np.array(cohort)
        share = shares(a, here)
        before = np.array([loss(world, k, w, "val") for k in cohort])
        gap = np.where(took_part[here] == number - 1, before - own[here], np.nan)
        share = adjusted_by_hand(share, gap, step)
        trained = {k: local_step(world, k, w) for k in cohort}
        a[here] = share * a[here].sum()
        w = sum(s * trained[k] for s, k in zip(share, cohort, strict=True))
        own[here] = [loss(world, k, trained[k], "val") for k in cohort]
        took_part[here] = number
        state = played.states[number]
        np.testing.assert_allclose(state.model["head.weight"].numpy()[0], w, atol=1e-12)
        np.testing.assert_allclose(state.server["clients"]["weight"].numpy(), a, atol=1e-12)
        np.testing.assert_allclose(state.notes["weights"].numpy(), share, atol=1e-12)
        assert_on_the_simplex(state.notes["weights"], state.server["clients"]["weight"])


def test_without_validation_data_all_clients_count_alike():
    found = play(build("ga"), random_regression([5, 9, 7]), linear(), [[0, 1, 2]] * 3, **TRAINING)
    alike = play(
        build("fedavg", weights="uniform"),
        random_regression([5, 9, 7]),
        linear(),
        [[0, 1, 2]] * 3,
        **TRAINING,
    )
    torch.testing.assert_close(
        found.model["head.weight"], alike.model["head.weight"], rtol=1e-12, atol=1e-12
    )


def test_gaps_of_a_score_that_should_be_high_are_turned_round():
    method = build("ga", metric="score").aggregation
    accuracy = SimpleNamespace(higher_is_better=True)
    assert method.gap(gaps(0.5), gaps(0.8), accuracy).tolist() == pytest.approx([0.3])
    assert method.gap(
        gaps(0.5), gaps(0.8), SimpleNamespace(higher_is_better=False)
    ).tolist() == pytest.approx([-0.3])
    assert method.needs == ("val_score_before", "val_score_after")


def test_the_score_is_reported_as_it_is_measured():
    digits = load("digits")
    played = play(
        build("ga", metric="score"),
        digits,
        build_model("mlp", shape=digits.shape, classes=10),
        [[0, 1, 9]],
    )
    model = {name: tensor.double() for name, tensor in played.states[0].model.items()}
    (cohort,) = played.cohorts
    wanted = played.engine.cohort(build("ga"), cohort.ids, 0).evaluate(model, "val")["accuracy"]
    assert played.updates[0].reports["val_score_before"].tolist() == pytest.approx(wanted.tolist())


def test_it_costs_no_message():
    """Bytes down are those of FedAvg; bytes up include two more numbers per client."""
    ours, plain = (
        play(build(n), regression(), linear(), COHORTS[:2], **TRAINING).cohorts
        for n in ("ga", "fedavg")
    )
    for one, other in zip(ours, plain, strict=True):
        assert one.bytes_down == other.bytes_down
        assert one.bytes_up == other.bytes_up + len(one.ids) * 2 * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 0}, "ga.step must be a finite number above 0, got 0"),
        ({"metric": "losss"}, "unknown value 'losss' in ga.metric; did you mean 'loss'"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(InputError, match=message):
        build("ga", **options)
