"""Fairness-aware aggregation: weights by hand, edge cases, rounds against a loop, and digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.data import load
from equipoise.errors import InputError
from equipoise.method import mix
from equipoise.methods import build, options_of
from equipoise.methods.fftgp import equal_gap_weights, slopes
from equipoise.methods.ga import generalization_adjustment
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.small_models import normalised
from tests.methods.domains import (
    TRAINING,
    adjusted_by_hand,
    assert_on_the_simplex,
    equal_gaps_by_hand,
    first_weights,
    local_step,
    loss,
    regression,
    shares,
)
from tests.rounds import linear, play

COHORTS = [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2], [1, 2], [2], [0, 2, 3]]


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


THIRDS, GAPS = torch.full((3,), 1 / 3, dtype=torch.float64), numbers(0.4, 0.1, 0.25)


def test_equations_8_to_11_by_hand():
    nudged, nudged_gaps = numbers(0.36, 0.31, 0.33), numbers(0.35, 0.13, 0.255)
    slope = slopes(THIRDS, GAPS, nudged, nudged_gaps)
    assert slope.tolist() == pytest.approx([0.533333, 0.777778, 0.666667], abs=1e-6)
    found = equal_gap_weights(THIRDS, GAPS, slope, nudged)
    assert found.tolist() == pytest.approx([0.423221, 0.231086, 0.345693], abs=1e-6)


@given(
    st.lists(
        st.tuples(st.floats(0.1, 1), st.floats(0.05, 2), st.floats(-0.3, 0.3)),
        min_size=2,
        max_size=8,
    )
)
def test_gaps_are_equal_where_each_is_linear_in_its_own_weight(clients):
    """G_k(a_k) = c_k − s_k a_k: without clipping, all gaps are equal with the new weights."""
    a = numbers(*(a for a, _, _ in clients))
    a = a / a.sum()
    steep, level = numbers(*(s for _, s, _ in clients)), numbers(*(c for _, _, c in clients))
    # Slopes are exact whatever the nudge.
    nudged = a + 1e-3 * (torch.arange(len(a)) % 2 - 0.5)
    slope = slopes(a, level - steep * a, nudged, level - steep * nudged)
    torch.testing.assert_close(slope, 1 / steep, rtol=1e-6, atol=0)
    found = equal_gap_weights(a, level - steep * a, 1 / steep, nudged)
    assert float(found.sum()) == pytest.approx(1)
    if bool(((found > 0) & (found < 1)).all()):
        gaps = level - steep * found
        assert float(gaps.max() - gaps.min()) <= 1e-9


def test_a_slope_that_is_negative_or_not_defined_is_0():
    nudged, nan = numbers(0.5, 0.3, 0.2, 0.0), float("nan")
    found = slopes(
        numbers(0.4, 0.3, 0.1, 0.2),
        numbers(0.2, 0.3, nan, 0.5),
        nudged,
        numbers(0.3, 0.3, nan, 0.6),
    )
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.0, 2.0])
    assert slopes(numbers(0.5), numbers(0.2), numbers(0.9), numbers(0.1), limit=1.5).tolist() == [
        1.5
    ]


def test_without_slopes_the_nudged_weights_stand():
    nudged = numbers(0.36, 0.31, 0.33)
    assert equal_gap_weights(THIRDS, GAPS, torch.zeros(3, dtype=torch.float64), nudged) is nudged


def test_weights_outside_the_simplex_are_clipped_and_scaled():
    """K (G − G*) is 2, −2 and 0 by hand, so the weights before clipping are 2.2, −1.5 and 0.3."""
    found = equal_gap_weights(
        numbers(0.2, 0.5, 0.3), numbers(1.0, -1.0, 0.0), numbers(2.0, 2.0, 0.0), THIRDS
    )
    assert found.tolist() == pytest.approx([1 / 1.3, 0.0, 0.3 / 1.3])


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.floats(-5, 5), st.floats(-5, 5), st.floats(0, 1)),
        min_size=1,
        max_size=8,
    )
)
def test_always_on_the_simplex(clients):
    a, gap, nudged_gap, nudged = (numbers(*column) for column in zip(*clients, strict=True))
    a, nudged = (a + 1e-3) / (a + 1e-3).sum(), (nudged + 1e-3) / (nudged + 1e-3).sum()
    found = equal_gap_weights(a, gap, slopes(a, gap, nudged, nudged_gap), nudged)
    assert float(found.min()) >= 0
    assert float(found.sum()) == pytest.approx(1)


@pytest.mark.parametrize("third", [9, 1])
@pytest.mark.parametrize("every", [1, 2])
def test_rounds_by_hand(every, third):
    """Gaps are measured in rounds n, 2n, ...; in others GA uses those of the previous round.

    They are of all validation samples, whatever limits other reports. With a single sample the
    third client has no validation data and no gap, so its K is 0.
    """
    world, method = regression(third), build("faa", step=0.1, decay=False, every=every)
    played = play(method, world, linear(), COHORTS, report_samples=1, **TRAINING)
    w, a, own, took_part = first_weights(), np.full(4, 0.25), np.full(4, np.nan), np.zeros(4, int)
    for number, cohort in enumerate(COHORTS, start=1):
        here = np.array(cohort)
        trained = {k: local_step(world, k, w) for k in cohort}
        mine = np.array([loss(world, k, trained[k], "val") for k in cohort])
        share = shares(a, here)

        def gaps(weights, cohort=cohort, trained=trained, mine=mine):
            mixed = sum(s * trained[k] for s, k in zip(weights, cohort, strict=True))
            return np.array([loss(world, k, mixed, "val") for k in cohort]) - mine

        if number % every == 0:
            gap = gaps(share)
            nudged = adjusted_by_hand(share, gap, 0.1)
            share = equal_gaps_by_hand(share, gap, nudged, gap - gaps(nudged))
        else:
            before = np.array([loss(world, k, w, "val") for k in cohort])
            gap = np.where(took_part[here] == number - 1, before - own[here], np.nan)
            share = adjusted_by_hand(share, gap, 0.1)
        a[here] = share * a[here].sum()
        own[here], took_part[here] = mine, number
        w = sum(s * trained[k] for s, k in zip(share, cohort, strict=True))
        state = played.states[number]
        np.testing.assert_allclose(state.model["head.weight"].numpy()[0], w, atol=1e-10)
        np.testing.assert_allclose(state.notes["weights"].numpy(), share, atol=1e-10)
        np.testing.assert_allclose(state.server["clients"]["weight"].numpy(), a, atol=1e-10)
        assert_on_the_simplex(state.notes["weights"], state.server["clients"]["weight"])


def test_a_round_sends_three_models_down():
    faa, fftgp, plain = (
        [
            cohort.bytes_down
            for cohort in play(build(n), regression(), linear(), COHORTS[:2], **TRAINING).cohorts
        ]
        for n in ("faa", "fftgp", "fedavg")
    )
    assert faa == fftgp == [3 * bytes_down for bytes_down in plain]


@pytest.mark.parametrize("restore", [False, True])
def test_fftgp_is_both_parts_with_the_options_of_both(restore):
    of_clients = {"align": 0.5, "alignment": "deepcoral", "restore": restore}
    of_server = {"step": 0.1, "decay": False, "centred": False, "every": 2, "slope_limit": 5.0}
    federation = images(sizes=[9, 6, 14], splits=(0.6, 0.4, 0.0))
    how = {"batch_size": 4, "epochs": 2, "optimizer": Sgd(lr=0.1)}
    one, two = (
        play(method, federation, normalised(), [[0, 1, 2]] * 3, **how)
        for method in (
            build("fftgp", **of_clients, **of_server),
            build("bgp", **of_clients, aggregation={"name": "faa", **of_server}),
        )
    )
    assert distance(one.model, two.model) == 0
    assert [state.notes["weights"].tolist() for state in one.states[1:]] == [
        state.notes["weights"].tolist() for state in two.states[1:]
    ]


def test_fftgp_by_default_is_bgp_and_faa():
    bgp, faa, fftgp = (options_of(name) for name in ("bgp", "faa", "fftgp"))
    assert fftgp == {**faa, **bgp}
    method = build("fftgp")
    assert method.local is method.aggregation


def test_gaps_differ_less_than_under_fedavg_and_ga_on_digits():
    """The variance of gaps is at most a fifth of that of FedAvg, for the median of three seeds."""
    variances = [median_variances(seed) for seed in range(3)]
    assert all(faa < ga < fedavg for fedavg, ga, faa in variances)
    assert np.median([faa / fedavg for fedavg, _, faa in variances]) <= 0.2


def median_variances(seed):
    """Medians over 40 rounds of FedAvg's local models, one style left out: FedAvg, GA and FAA."""
    digits = load(
        "digits",
        imbalance=1,
        partition={"name": "group", "imbalance": 1, "clients_per_group": [1] * 5},
        splits=(0.6, 0.4, 0.0),
        leave_out="textured",
        seed=seed,
    )
    module, rounds = build_model("mlp", shape=digits.shape, classes=10, seed=seed), 40
    how = {
        "precision": "float32",
        "batch_size": 16,
        "optimizer": Sgd(lr=0.1),
        "reports": ("val_loss_after",),
    }
    played = play(build("fedavg"), digits, module, [digits.seen] * rounds, seed=seed, **how)
    variances = {"fedavg": [], "ga": [], "faa": []}
    equal = torch.full((4,), 0.25, dtype=torch.float64)
    weights = {"ga": equal, "faa": equal}
    for number, (updates, cohort) in enumerate(zip(played.updates, played.cohorts, strict=True)):
        model, step = played.states[number].model, 0.2 * (1 - number / rounds)

        def gaps(a, updates=updates, cohort=cohort, model=model):
            return (
                cohort.evaluate({**model, **mix(updates, a)}, "val")["loss"]
                - updates.reports["val_loss_after"]
            )

        gap = gaps(weights["faa"])
        nudged = generalization_adjustment(weights["faa"], gap, step)
        slope = slopes(weights["faa"], gap, nudged, gaps(nudged))
        weights["faa"] = equal_gap_weights(weights["faa"], gap, slope, nudged)
        for name, a in {"fedavg": cohort.prior, **weights}.items():
            variances[name].append(float(gaps(a).var(unbiased=False)))
        weights["ga"] = generalization_adjustment(weights["ga"], gaps(weights["ga"]), step)
    return [np.median(variances[name]) for name in ("fedavg", "ga", "faa")]


def test_fftgp_narrows_the_gaps_of_bgp_on_digits():
    """Tables 11 and 12 combine both parts: clients' models are as good, and gaps differ less."""
    digits = load(
        "digits",
        imbalance=1,
        partition={"name": "group", "imbalance": 1, "clients_per_group": [1] * 5},
        splits=(0.6, 0.4, 0.0),
        leave_out="textured",
    )
    module, found = build_model("mlp", shape=digits.shape, classes=10, seed=0), {}
    for name in ("bgp", "fftgp"):
        how = {"precision": "float32", "batch_size": 16, "optimizer": Sgd(lr=0.1)}
        reports = ("val_loss_after", "val_score_after")
        played = play(build(name), digits, module, [digits.seen] * 12, reports=reports, **how)
        variances = [
            float(
                (
                    cohort.evaluate(state.model, "val")["loss"] - updates.reports["val_loss_after"]
                ).var()
            )
            for cohort, state, updates in zip(
                played.cohorts, played.states[1:], played.updates, strict=True
            )
        ]
        scores = [float(updates.reports["val_score_after"].mean()) for updates in played.updates]
        found[name] = np.median(variances), np.mean(scores)
    assert found["fftgp"][0] < 0.5 * found["bgp"][0]
    assert found["fftgp"][1] > found["bgp"][1] - 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "faa.every must be a whole number of at least 1, got 0"),
        ({"slope_limit": -1}, "faa.slope_limit must be a finite number above 0, got -1"),
        ({"step": -0.1}, "faa.step must be a finite number above 0"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(InputError, match=message):
        build("faa", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "fftgp.every must be a whole number of at least 1, got 0"),
        ({"align": -1.0}, "fftgp.align must be a finite number of at least 0"),
        ({"mu": 1.0}, "unknown hyper-parameter of fftgp 'mu'"),
    ],
)
def test_refusals_of_both_parts(options, message):
    with pytest.raises(InputError, match=message):
        build("fftgp", **options)
