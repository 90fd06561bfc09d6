"""BGP: both algorithms against plain PyTorch, limits and ablations, alignment, and digits."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.data import load
from equipoise.errors import InputError
from equipoise.masked import coral
from equipoise.methods import build
from equipoise.methods.fedavg import FedAvg
from equipoise.models import build as build_model
from equipoise.models.base import Model
from equipoise.optimizers import Adam, Schedule, Sgd
from equipoise.random import fold
from tests import quick
from tests.engine.by_hand import average, hand_batches, held_by, tensors
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.five_clients import BATCH, CHUNKS, COHORTS, EVERYONE, SEED, SIZES
from tests.engine.small_models import NOISE, mlp, normalised
from tests.methods.decoupled import LR, played
from tests.rounds import linear, play, random_regression

FORMS = pytest.mark.parametrize("alignment", ["domainbed", "deepcoral"])
MODELS = pytest.mark.parametrize("make", [mlp, normalised], ids=["mlp", "bn"])


def coral_by_hand(one, other, form):
    """CORAL of two batches ``[samples, d]`` with PyTorch's covariance, undefined for one sample."""
    several, d = len(one) > 1, one.shape[1]
    difference = (
        torch.cov(one.T) - torch.cov(other.T) if several else torch.zeros(d, d, dtype=one.dtype)
    )
    if form == "deepcoral":
        return difference.norm() ** 2 / (4 * d**2) if several else 0.0
    return ((one.mean(0) - other.mean(0)) ** 2).sum() / d + (difference**2).sum() / d**2


def vectors(z):
    return z.mean((2, 3)) if z.dim() == 4 else z


def meta_loss(own, received, x, y, weight, form):
    """Eq. 13."""
    z = own.features(x)
    with torch.no_grad():
        target = vectors(received.features(x))
    return F.cross_entropy(own.head(z), y) + weight * coral_by_hand(vectors(z), target, form)


def trained_by_hand(model, x, y, key, *, epochs, weight, form, training=True):
    """Algorithm 2 in plain PyTorch, with one optimizer for both kinds of steps."""
    own, received = copy.deepcopy(model).train(), copy.deepcopy(model).train(training)
    optimizer = torch.optim.SGD(own.parameters(), lr=LR, momentum=0.9)
    stream = hand_batches(len(x), key, 0)
    for _ in range(epochs * -(-len(x) // BATCH)):
        train, test = itertools.islice(stream, 2)
        optimizer.zero_grad()
        F.cross_entropy(own(x[train]), y[train]).backward()
        optimizer.step()
        optimizer.zero_grad()
        meta_loss(own, received, x[test], y[test], weight, form).backward()
        optimizer.step()
    return own


def restored_by_hand(model, x, y, key, *, epochs, weight, form):
    """The authors' GRACE client in plain PyTorch; statistics follow the first half."""
    own, received = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    norms = [layer for layer in own.modules() if isinstance(layer, nn.BatchNorm2d)]
    optimizer = torch.optim.SGD(own.parameters(), lr=LR, momentum=0.9)
    for batch in hand_batches(len(x), key, 0, epochs):
        half = len(batch) // 2
        first, second = batch[: max(1, half)], batch[half:]
        before = [p.detach().clone() for p in own.parameters()]
        gradients = torch.autograd.grad(
            F.cross_entropy(own(x[first]), y[first]), list(own.parameters())
        )
        with torch.no_grad():
            for p, g in zip(own.parameters(), gradients, strict=True):
                p -= LR * g
        for norm in norms:
            norm.momentum = 0.0
        optimizer.zero_grad()
        meta_loss(own, received, x[second], y[second], weight, form).backward()
        for norm in norms:
            norm.momentum = 0.1
        with torch.no_grad():
            for p, value in zip(own.parameters(), before, strict=True):
                p.copy_(value)
        optimizer.step()
    return own


def rounds_by_hand(module, train, cohorts=COHORTS, **how):
    federation = images(sizes=SIZES)
    for round_, cohort in enumerate(cohorts):
        sent = []
        for client in cohort:
            own = train(
                module, *held_by(federation, client), fold(fold(SEED, round_), client), **how
            )
            sent.append(tensors(own))
        module.load_state_dict(average(sent, [SIZES[client] for client in cohort]), strict=False)
    return tensors(module)


# ---- the algorithm -------------------------------------------------------------------------------


@CHUNKS
@MODELS
@FORMS
def test_algorithm_2_equals_plain_pytorch(alignment, make, chunk):
    found = played(build("bgp", align=2.0, alignment=alignment), make(), chunk=chunk, epochs=2)
    wanted = rounds_by_hand(make(), trained_by_hand, epochs=2, weight=2.0, form=alignment)
    assert distance(found.model, wanted, NOISE) <= 1e-9


@CHUNKS
def test_the_received_model_may_use_its_own_statistics(chunk):
    found = played(build("bgp", align=2.0, received="evaluation"), normalised(), chunk=chunk)
    how = {"epochs": 1, "weight": 2.0, "form": "domainbed"}
    wanted = rounds_by_hand(normalised(), trained_by_hand, training=False, **how)
    assert distance(found.model, wanted, NOISE) <= 1e-9
    other = rounds_by_hand(normalised(), trained_by_hand, **how)
    assert distance(found.model, other, NOISE) > 1e-6


@pytest.mark.parametrize("received", ["evaluation", "training"])
def test_alignment_of_equal_models_is_zero_with_equal_statistics(received):
    """Without learning, the local model stays the received one."""
    how = {"optimizer": Sgd(lr=0.0), "epochs": 1}
    found = played(build("bgp", received=received), normalised(), [EVERYONE], **how)
    terms = found.updates[0].reports["method_terms"]
    assert (terms.abs() < 1e-12).all() if received == "training" else (terms > 1e-6).all()


@CHUNKS
@MODELS
def test_restoring_equals_plain_pytorch(make, chunk):
    found = played(build("bgp", align=2.0, restore=True), make(), chunk=chunk, epochs=2)
    wanted = rounds_by_hand(make(), restored_by_hand, epochs=2, weight=2.0, form="domainbed")
    assert distance(found.model, wanted, NOISE) <= 1e-9


def test_an_epoch_is_as_many_pairs_as_there_are_batches():
    batches = [-(-size // BATCH) for size in SIZES]
    for options, steps in (({}, 2), ({"restore": True}, 1), ({"meta": False}, 1)):
        reports = played(build("bgp", **options), mlp(), [EVERYONE], epochs=3).updates[0].reports
        assert reports["steps"].tolist() == [3 * steps * b for b in batches], options
    reports = played(build("bgp"), mlp(), [EVERYONE], steps=3).updates[0].reports
    assert reports["steps"].tolist() == [6] * len(SIZES)


@CHUNKS
@pytest.mark.parametrize(
    "optimizer",
    [Sgd(lr=0.1), Sgd(lr=0.1, momentum=0.9), Adam(lr=0.01)],
    ids=["sgd", "momentum", "adam"],
)
def test_without_alignment_it_is_plain_training_on_twice_the_batches(optimizer, chunk):
    how = {"chunk": chunk, "optimizer": optimizer}
    found = played(build("bgp", align=0.0), normalised(), epochs=2, **how)
    plain = played("fedavg", normalised(), epochs=4, **how)
    for name, tensor in plain.model.items():
        assert torch.equal(found.model[name], tensor), name


# ---- ablations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 4])
def test_only_meta_learning_with_halves_is_per_fedavg(chunk):
    """Halves of a batch of 8 are two batches of 4, if all sizes are multiples of 8."""
    federation = images(sizes=[16, 8, 24])

    def trained(method, batch_size):
        how = {"batch_size": batch_size, "optimizer": Sgd(lr=0.2, momentum=0.5), "chunk": chunk}
        return play(method, federation, normalised(), [[0, 1, 2]] * 2, **how).model

    halves = trained(build("bgp", align=0.0, restore=True), 8)
    assert (
        distance(halves, trained(build("perfedavg", alpha=0.2, weights="size"), 4), NOISE) <= 1e-12
    )


@pytest.mark.parametrize("chunk", [1, 3])
def test_only_alignment_adds_it_to_every_step(chunk):
    def train(model, x, y, key, epochs):
        own, received = copy.deepcopy(model).train(), copy.deepcopy(model).train()
        optimizer = torch.optim.SGD(own.parameters(), lr=LR, momentum=0.9)
        for batch in hand_batches(len(x), key, 0, epochs):
            optimizer.zero_grad()
            meta_loss(own, received, x[batch], y[batch], 2.0, "domainbed").backward()
            optimizer.step()
        return own

    found = played(build("bgp", align=2.0, meta=False), normalised(), chunk=chunk, epochs=2)
    assert distance(found.model, rounds_by_hand(normalised(), train, epochs=2), NOISE) <= 1e-9


@dataclass(frozen=True)
class Paced(FedAvg):
    """Halves the learning rate of client 1."""

    def send(self, state, cohort):
        return {"model": state.model}, {"step_factor": torch.from_numpy(1 / (cohort.ids + 1))}


@pytest.mark.parametrize("chunk", [1, 2])
def test_the_step_that_is_taken_back_is_as_long_as_the_learning_rate(chunk):
    """With f the mean squared error: w − η ∇f₂(w − η ∇f₁(w)), with η of the round and client."""
    federation = random_regression([6, 8])
    method = build("bgp", align=0.0, restore=True, aggregation=Paced())
    schedule = Schedule(kind="exponential", decay=0.5)
    how = {
        "steps": 1,
        "batch_size": 8,
        "shuffle": False,
        "optimizer": Sgd(lr=0.1),
        "schedule": schedule,
    }
    found = play(method, federation, linear(), [[0, 1]] * 2, chunk=chunk, **how)
    for round_, client in itertools.product((0, 1), (0, 1)):
        x, y = held_by(federation, client)
        w, half, eta = (
            found.states[round_].model["head.weight"][0],
            len(x) // 2,
            0.1 * 0.5**round_ / (client + 1),
        )

        def gradient(w, x, y):
            return 2 * x.T @ (x @ w - y) / len(x)

        stepped = w - eta * gradient(w, x[:half], y[:half])
        wanted = w - eta * gradient(stepped, x[half:], y[half:])
        torch.testing.assert_close(
            found.updates[round_].params["head.weight"][client, 0], wanted, rtol=0, atol=1e-12
        )


# ---- what is aligned -----------------------------------------------------------------------------


class Prompted(Model):
    """A model like one with text prompts: it aligns one row per class, made from its parameters."""

    aligned_rows = "classes"

    def __init__(self):
        torch.manual_seed(7)
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(50, 6), nn.Tanh()), nn.Linear(6, 4))
        self.double()

    def aligned(self, z):
        return self.head.weight.tanh()


@CHUNKS
def test_a_model_may_say_that_rows_are_classes(chunk):
    """All four rows are used in every batch, however few samples it has."""

    def train(model, x, y, key):
        own, received = copy.deepcopy(model), copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=LR, momentum=0.9)
        for step, batch in enumerate(hand_batches(len(x), key, 0, 2)):
            loss = F.cross_entropy(own(x[batch]), y[batch])
            if step % 2:
                rows = [module.head.weight.tanh() for module in (own, received)]
                loss = loss + 3.0 * coral_by_hand(rows[0], rows[1].detach(), "domainbed")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return own

    found = played(build("bgp", align=3.0), Prompted(), chunk=chunk)
    assert distance(found.model, rounds_by_hand(Prompted(), train)) <= 1e-9


def test_rows_of_no_known_kind_are_refused():
    module = Prompted()
    module.aligned_rows = "tokens"
    with pytest.raises(InputError, match="unknown aligned_rows 'tokens'"):
        played("bgp", module, [[0]])


@pytest.mark.parametrize(
    "rows", [lambda z: z.unsqueeze(2), lambda z: z[:1]], ids=["maps", "one row"]
)
def test_rows_that_are_not_one_vector_a_sample_are_refused(rows):
    class Odd(Model):
        def aligned(self, z):
            return rows(z)

    small = mlp()
    with pytest.raises(
        InputError, match=r"aligned of Odd returned a tensor of shape .* for 3 samples"
    ):
        played("bgp", Odd(small.features, small.head), [[0]])


def test_a_received_model_as_it_is_costs_nothing():
    """Without dropout and BatchNorm the first aligned step of a round has a distance of zero."""
    how = {"steps": 1, "optimizer": Sgd(lr=0.1)}
    aligned = played(build("bgp", align=5.0, meta=False), mlp(), [EVERYONE], **how)
    plain = played("fedavg", mlp(), [EVERYONE], **how)
    assert distance(aligned.model, plain.model) <= 1e-12


# ---- digits --------------------------------------------------------------------------------------


def digits(seed):
    """Four clients, each with a different style."""
    partition = {"name": "group", "imbalance": 1, "clients_per_group": [1] * 5}
    return load(
        "digits",
        imbalance=1,
        partition=partition,
        splits=(0.6, 0.4, 0.0),
        leave_out="textured",
        seed=seed,
    )


def on_digits(method, seed, epochs, rounds=8):
    """Local models' validation accuracy and distance from the received model, last rounds."""
    federation = digits(seed)
    module = build_model("mlp", shape=federation.shape, classes=10, seed=seed)
    how = {"batch_size": 16, "epochs": epochs, "optimizer": Sgd(lr=0.1), "precision": "float32"}
    cohorts = [federation.seen] * rounds
    found = play(
        method, federation, module, cohorts, seed=seed, reports=("val_score_after",), **how
    )
    scores, distances = [], []
    for number in range(rounds // 2, rounds):
        scores.append(float(found.updates[number].reports["val_score_after"].mean()))
        for row, client in enumerate(found.cohorts[number].ids):
            x, _ = found.engine.data.fetch(torch.from_numpy(federation.train.of(int(client))))
            local = {name: rows[row] for name, rows in found.updates[number].params.items()}
            z = [
                found.engine.network.resting_features(params, x)
                for params in (local, found.states[number].model)
            ]
            distances.append(float(coral(*z)))
    return np.mean(scores), np.mean(distances)


@pytest.mark.parametrize("seed", quick.only([0], [0, 1]))
def test_local_models_stay_nearer_to_the_received_one_and_fit_their_clients_better_than_fedavg(
    seed,
):
    """On digits, BGP fits clients better than FedAvg because it makes twice as many steps.

    Table 13 reports the better fit. FedAvg with as many steps fits clients equally well, and its
    features move further away.
    """
    (fedavg, _), (as_many_steps, far), (ours, near), (_, nearest) = (
        on_digits(build(**method), seed, epochs)
        for method, epochs in (
            ({"name": "fedavg"}, 1),
            ({"name": "fedavg"}, 2),
            ({"name": "bgp"}, 1),
            ({"name": "bgp", "align": 10.0}, 1),
        )
    )
    assert ours > fedavg + 0.1
    assert abs(ours - as_many_steps) < 0.03
    assert near < 0.9 * far
    assert nearest < 0.5 * far


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"align": -1.0}, r"bgp\.align must be a finite number of at least 0, got -1\.0"),
        ({"alignment": "mmd"}, r"unknown value 'mmd' in bgp\.alignment"),
        ({"restore": True, "meta": False}, r"bgp\.restore needs pairs of steps"),
        ({"restore": "yes"}, r"bgp\.restore must be"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        build("bgp", **options)
