"""MOON: its loss by hand, rounds against a plain loop, limits, and its effect on features."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.models.base import Model
from equipoise.optimizers import Sgd
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.small_models import WITHOUT_GRADIENT, batchnorm, mlp
from tests.methods.plain_rounds import (
    COHORTS,
    FULL_BATCHES,
    assert_equal,
    average,
    by_size,
    cross_entropy,
    federation,
    on_digits,
    samples_of,
    skewed_digits,
    smooth_model,
    steps,
)
from tests.rounds import linear, play, random_regression


def contrast(x, module, received, previous, tau):
    """The paper's eq. 3, term by term."""
    total = 0.0
    for sample in x.split(1):
        z, far = module.features(sample)[0], previous.features(sample)[0].detach()
        near = received.features(sample)[0].detach()
        positive, negative = (
            torch.exp(torch.dot(z, other) / (z.norm() * other.norm()) / tau)
            for other in (near, far)
        )
        total = total - torch.log(positive / (positive + negative))
    return total / len(x)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (5.0, 2.0)])
def test_rounds_equal_a_plain_loop(mu, tau, chunk):
    data, module, previous = federation(), smooth_model(), {}
    for cohort in COHORTS:
        trained = []
        for k in cohort:
            known = previous.get(k)

            def loss(copy, k=k, received=module, last=known):
                value = cross_entropy(copy, data, k)
                if last is None:
                    return value
                return value + mu * contrast(samples_of(data, k)[0], copy, received, last, tau)

            trained.append(steps(module, loss))
        previous = {**previous, **dict(zip(cohort, trained, strict=True))}
        module = average(trained, by_size(cohort))
    found = play(
        build("moon", mu=mu, tau=tau), data, smooth_model(), COHORTS, chunk=chunk, **FULL_BATCHES
    )
    assert_equal(found.model, module)
    plain = play(build("fedavg"), data, smooth_model(), COHORTS, chunk=chunk, **FULL_BATCHES)
    assert distance(found.model, plain.model) > 1e-4


def with_head(module, seed=3):
    """The small model with the projection head of the paper: two layers, and a new classifier."""
    torch.manual_seed(seed)
    wide = [nn.Flatten(1), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)]
    return Model(nn.Sequential(module.features, *wide), nn.Linear(3, 4)).double()


def test_with_a_projection_head_the_contrast_is_after_it():
    """The extended model with MOON equals a model that already has the projection head."""
    method = build("moon", projection=3, mu=5.0)
    extended = method.extend(smooth_model(), (2, 5, 5), 0).double()
    plain = with_head(smooth_model())
    assert {n: p.shape for n, p in extended.named_parameters()} == {
        n: p.shape for n, p in plain.named_parameters()
    }
    extended.load_state_dict(plain.state_dict())
    found = play(method, federation(), extended, COHORTS, **FULL_BATCHES)
    wanted = play(build("moon", mu=5.0), federation(), plain, COHORTS, **FULL_BATCHES)
    assert distance(found.model, wanted.model) == 0
    x = samples_of(federation(), 0)[0]
    z = extended.features(x)
    assert z.shape[1] == 3
    torch.testing.assert_close(extended(x), extended.head(z))


def test_a_projection_head_is_drawn_from_the_seed():
    method = build("moon", projection=3)
    one, same, other = (
        method.extend(smooth_model(), (2, 5, 5), seed).head.weight for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    with pytest.raises(
        InputError, match="moon.projection must be a whole number of at least 1, got 0"
    ):
        build("moon", projection=0)


@pytest.mark.parametrize("make", [mlp, batchnorm], ids=["mlp", "bn"])
def test_a_projection_head_stacks(make):
    data = images()
    how = {"batch_size": 4, "optimizer": Sgd(lr=0.05)}

    def of(chunk):
        method = build("moon", projection=5)
        return play(
            method, data, method.extend(make(), data.shape, 0), THREE_COHORTS, chunk=chunk, **how
        ).model

    assert distance(of(10), of(1), WITHOUT_GRADIENT) <= 1e-9


def test_the_contrastive_loss_by_hand():
    """z = (1, 0); received (0, 1): s = 0; previous (1, 1): s = 1/√2.

    With τ = 0.5 the loss is log(1 + e^{√2}).
    """
    method = build("moon")
    z, near, far = (torch.tensor([v]) for v in ([1.0, 0.0], [0.0, 1.0], [1.0, 1.0]))
    ours = method.local
    value = F.softplus((ours.similarity(z, far) - ours.similarity(z, near)) / 0.5)
    assert value.item() == pytest.approx(math.log(1 + math.exp(math.sqrt(2))), rel=1e-6)


def test_the_first_round_of_a_client_is_fedavg():
    """No client has a previous model in round 1, and client 3 has none in round 2."""
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1)}
    cohorts = [[0, 1, 2], [2, 3]]
    ours, plain = (
        play(build(name), images(), mlp(), cohorts, **how) for name in ("moon", "fedavg")
    )
    assert distance(ours.states[1].model, plain.states[1].model) <= 1e-12
    second = [{n: stack for n, stack in p.updates[1].params.items()} for p in (ours, plain)]
    old, new = ({n: t[k] for n, t in second[0].items()} for k in (0, 1))
    old_plain, new_plain = ({n: t[k] for n, t in second[1].items()} for k in (0, 1))
    assert distance(new, new_plain) <= 1e-12
    assert distance(old, old_plain) > 1e-6


@pytest.mark.parametrize("make", [mlp, batchnorm, lambda: mlp(0.3)], ids=["mlp", "bn", "dropout"])
def test_without_the_term_it_is_fedavg(make):
    how = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1, momentum=0.9)}
    ours, plain = (
        play(method, images(), make(), THREE_COHORTS, **how)
        for method in (build("moon", mu=0.0), build("fedavg"))
    )
    assert distance(ours.model, plain.model, WITHOUT_GRADIENT) <= 1e-9


def test_the_previous_model_is_the_clients_own_of_its_last_round():
    """A client that misses a round keeps its features; statistics of other models do not change."""
    federation_, how = images(), {"batch_size": 64, "optimizer": Sgd(lr=0.1)}
    played = play(build("moon"), federation_, batchnorm(), [[3, 4], [4], [4, 5]], **how)
    first = {
        "previous": {n: t for n, t in played.states[0].model.items() if n.startswith("features")}
    }
    kept, _ = played.engine.memory.read(np.array([3, 4]), first)
    for name, stack in kept["previous"].items():
        source = (
            played.updates[0].buffers
            if name in played.updates[0].buffers
            else played.updates[0].params
        )
        last = (
            played.updates[2].buffers
            if name in played.updates[2].buffers
            else played.updates[2].params
        )
        torch.testing.assert_close(stack[0], source[name][0], rtol=0, atol=0)
        torch.testing.assert_close(stack[1], last[name][0], rtol=0, atol=0)


def test_features_that_are_all_zero_have_a_gradient():
    """Features that are all zero have no direction; their similarity is 0 and nothing is NaN."""
    torch.manual_seed(0)
    dead = Model(nn.Sequential(nn.Flatten(), nn.Linear(50, 3), nn.ReLU()), nn.Linear(3, 4)).double()
    nn.init.constant_(dead.features[1].bias, -100.0)
    played = play(build("moon"), images(), dead, [range(10)] * 2, batch_size=8)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in played.model.values())


def test_the_previous_model_never_leaves_the_client():
    ours, plain = (
        play(build(name), images(), mlp(), [range(10)] * 2, batch_size=8).cohorts
        for name in ("moon", "fedavg")
    )
    # Clients also report the terms that the method adds to the loss.
    assert [(c.bytes_down, c.bytes_up - 8 * len(c.ids)) for c in ours] == [
        (c.bytes_down, c.bytes_up) for c in plain
    ]


def test_it_combines_with_any_aggregation():
    how = {"batch_size": 8, "optimizer": Sgd(lr=0.1)}
    method = build("moon", mu=0.0, aggregation={"name": "qffl", "q": 2.0})
    ours = play(method, images(), mlp(), THREE_COHORTS, **how)
    assert (
        distance(
            ours.model, play(build("qffl", q=2.0), images(), mlp(), THREE_COHORTS, **how).model
        )
        <= 1e-12
    )


def test_local_features_stay_nearer_to_the_received_ones_on_digits():
    """The cosine of local features with the received ones, minus that with the previous local ones.

    The loss maximises this. On digits the global model does not become better by it.
    """
    digits = skewed_digits(0)
    margins = {}
    for name, options in (("fedavg", {}), ("moon", {"mu": 5.0})):
        played, _ = on_digits(name, 0, **options)
        received, before, after = (
            played.states[-2].model,
            played.updates[-2].params,
            played.updates[-1].params,
        )
        found = []
        for k in digits.seen:
            x = samples_of(digits, k)[0].flatten(1)
            z, near, far = (
                torch.relu(x @ tree["features.1.weight"].T + tree["features.1.bias"])
                for tree in (
                    {n: t[k] for n, t in after.items()},
                    received,
                    {n: t[k] for n, t in before.items()},
                )
            )
            found.append((F.cosine_similarity(z, near) - F.cosine_similarity(z, far)).mean().item())
        margins[name] = np.mean(found)
    assert margins["moon"] > margins["fedavg"] + 0.02, margins


def test_a_model_without_features_to_train_is_refused():
    with pytest.raises(
        InputError, match="uses the part 'features', but the model has no trainable tensors there"
    ):
        play(build("moon"), random_regression([4, 4]), linear(), [[0, 1]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mu": -1.0}, r"moon\.mu must be a finite number of at least 0, got -1"),
        ({"tau": 0.0}, r"moon\.tau must be a finite number above 0, got 0"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(InputError, match=message):
        build("moon", **options)
