"""Features that are not trained are computed once per sample, with the same results."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.data.augment import Flip
from equipoise.engine import frozen
from equipoise.engine.contract import Personal
from equipoise.engine.frozen import FrozenFeatures
from equipoise.engine.settings import FineTune
from equipoise.method import LocalRule, Phase, personal_loss
from equipoise.methods import build, names
from equipoise.models.base import Model
from equipoise.optimizers import Sgd
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.local_rules import Heads, Weighted, by_first_pixel
from tests.engine.small_models import mlp
from tests.rounds import linear, minimised, play, random_regression

# One sample is a batch without variance, and its client is the last one to finish.
SIZES = [9, 1, 20, 3, 17]
# The last client never takes part.
COHORTS = [[1, 3], [0, 1, 2, 3]]
CHUNKS = pytest.mark.parametrize("chunk", [1, 3, 10])
SGD = Sgd(lr=0.05, momentum=0.5)


def normalised(features_norm=None):
    """BatchNorm and dropout in both parts."""
    torch.manual_seed(4)
    norm = features_norm or nn.BatchNorm2d(4)
    features = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), norm, nn.ReLU(), nn.Dropout(0.3), nn.Flatten()
    )
    head = nn.Sequential(
        nn.Linear(36, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 4)
    )
    return Model(features, head).double()


@pytest.fixture
def fills(monkeypatch):
    """Record for how many samples z is computed, at each computation."""
    noted = []
    plain = FrozenFeatures.fill

    def fill(self, chunk, batches):
        noted.append(len(batches.held))
        plain(self, chunk, batches)

    monkeypatch.setattr(FrozenFeatures, "fill", fill)
    return noted


@pytest.fixture
def uncached(monkeypatch):
    """Call a function with precomputed features turned off."""

    def called(function, *args, **how):
        with monkeypatch.context() as patch:
            patch.setattr(frozen, "_LARGEST", 0)
            return function(*args, **how)

    return called


def after_rounds(rule, module=None, cohorts=COHORTS, *, chunk=10, fine_tune=(), **how):
    """Run rounds; return the global model, personal models and losses of the last cohort."""
    method = rule if hasattr(rule, "aggregation") else build("fedavg", local=rule)
    how = {"batch_size": 6, "epochs": 2, "optimizer": SGD, **how}
    played = play(method, images(sizes=SIZES), module or normalised(), cohorts, chunk=chunk, **how)
    still, own = played.engine.personal_models(
        played.model, Personal(method, fine_tune, len(cohorts)), np.arange(len(SIZES))
    )
    losses = minimised(played.updates[-1].reports)
    return {
        **played.model,
        **{f"own {name}": t for name, t in {**still, **own}.items()},
        "losses": losses,
    }


# ---- the same numbers ----------------------------------------------------------------------------


def lets_features_rest(method):
    moves = [phase.move for phase in (*method.local.phases(), *method.local.adapt())]
    return any(isinstance(move, str) and move.removeprefix("personal.") == "head" for move in moves)


METHODS = {
    name: method for name, method in ((n, build(n)) for n in names()) if lets_features_rest(method)
}
VARIANTS = {
    "fedbabu-head": build("fedbabu", tunes="head"),
    "fedcrc-personal-first": build("fedcrc", tau=0.5, personal_first=True),
    "fedcrc-unequal": build("fedcrc", tau=0.5, personal_epochs=1, head_epochs=2),
}


def test_some_methods_let_features_rest():
    assert {"fedcrc", "fedper", "fedrep"} <= set(METHODS)


@CHUNKS
@pytest.mark.parametrize("name", [*METHODS, *VARIANTS])
def test_every_method_whose_features_rest_gives_the_same_numbers(name, chunk, fills, uncached):
    method = {**METHODS, **VARIANTS}[name]
    found = after_rounds(method, chunk=chunk)
    assert fills
    fills.clear()
    wanted = uncached(after_rounds, method, chunk=chunk)
    assert not fills
    assert distance(found, wanted) <= 1e-12


@CHUNKS
def test_fine_tuning_a_head_gives_the_same_numbers(chunk, fills, uncached):
    how = {"chunk": chunk, "fine_tune": (FineTune(epochs=3, move="head").phase(SGD),)}
    found = after_rounds(build("fedavg"), **how)
    assert sum(fills) == sum(SIZES)
    assert distance(found, uncached(after_rounds, build("fedavg"), **how)) <= 1e-12


def of_mixed_samples(client):
    return client.task_loss() + replace(client, x=client.x.flip(-1)).task_loss()


def near_received_features(client):
    shifted = {name: value + 1 for name, value in client.received.items()}
    far = replace(client, params={**client.params, **shifted}).features()
    return client.task_loss() + (client.features() - far).square().mean(1)


def of_both_views(client):
    return client.network.task.loss(client.head(client.features()), client.y) + client.task_loss()


@CHUNKS
@pytest.mark.parametrize(
    "loss", [by_first_pixel, of_mixed_samples, near_received_features, of_both_views]
)
def test_a_loss_may_look_at_the_samples_and_at_other_features(loss, chunk, fills, uncached):
    rule = Heads(Phase(move="head", loss=loss))
    found = after_rounds(rule, chunk=chunk)
    assert fills
    assert distance(found, uncached(after_rounds, rule, chunk=chunk)) <= 1e-12
    assert distance(found, after_rounds(Heads(Phase(move="head")), chunk=chunk)) > 1e-3


@CHUNKS
def test_several_batches_a_step(chunk, fills, uncached):
    rule = Heads(Phase(move="head", gradient=Weighted((1.0, 0.5))))
    found = after_rounds(rule, chunk=chunk)
    assert fills
    assert distance(found, uncached(after_rounds, rule, chunk=chunk)) <= 1e-12


@pytest.mark.parametrize(("chunk", "tolerance"), [(1, 1e-7), (10, 2**-7)])
def test_lowered_arithmetic_rounds_where_it_did(chunk, tolerance, fills, uncached):
    """The head starts where bfloat16 and float32 differ: it must get z in the type of the features.

    For clients with the same features, z is computed in one batch, and autocast lowers it there but
    not for stacked clients. Both are equal up to a rounding of bfloat16.
    """
    torch.manual_seed(1)
    module = Model(
        nn.Sequential(nn.Flatten(), nn.Linear(50, 12)),
        nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Linear(12, 4)),
    )
    rule, how = (
        Heads(Phase(move="head")),
        {"chunk": chunk, "precision": "bfloat16", "cohorts": [[0, 2, 4]]},
    )
    found = after_rounds(rule, module, **how)
    assert fills
    assert distance(found, uncached(after_rounds, rule, module, **how)) <= tolerance


# ---- once ----------------------------------------------------------------------------------------


# Three samples to test the model: together, in training, alone, and with the original module; then
# two for two clients, stacked and separately.
TRIED = [3, 3, 1, 1, 1, 3, 2, 2, 2]


def counted(module):
    """Make a model record the number of samples of every pass through its features."""
    noted = []

    class Counts(nn.Module):
        def forward(self, x):
            noted.append(len(x))
            return x

    module.features.insert(0, Counts())
    # Copies of a model, such as the engine's, share the list.
    return module, noted


def test_features_run_once_for_every_sample_of_a_lone_client():
    module, noted = counted(mlp())
    how = {"batch_size": 6, "optimizer": SGD, "chunk": 1}
    play(build("fedrep", head_epochs=5), images(sizes=SIZES), module, [[0, 2]], **how)
    # One sample for the shape of z, then each client's samples once for the head and once for the
    # features.
    assert sorted(noted[len(TRIED) :], reverse=True) == [20, 9, *[6] * (3 + 1), 3, 2, 1]


def test_stacked_clients_share_a_pass():
    module, noted = counted(mlp())
    play(
        build("fedrep", head_epochs=5),
        images(sizes=SIZES),
        module,
        [[0, 1, 2]],
        batch_size=20,
        optimizer=SGD,
    )
    assert noted == [*TRIED, 1, 20, 20]


def test_clients_with_the_same_features_are_not_told_apart():
    """Heads of new clients: all have the same features, so all samples form one batch."""
    module, noted = counted(mlp())
    found = play(
        build("fedper"), images(sizes=SIZES), module, [[0]], batch_size=20, epochs=2, optimizer=SGD
    )
    noted.clear()
    found.engine.personal_models(found.model, Personal(build("fedper"), (), 1), np.arange(5))
    assert noted == [1, sum(SIZES[1:])]


def test_phases_in_a_row_share_what_was_computed(fills):
    after_rounds(build("fedcrc"), cohorts=[[0, 2]], epochs=1)
    # Two epochs in total, one for each head; personal models of new clients need a single one.
    assert fills == [29]


def test_features_that_moved_are_computed_again(fills):
    rule = build("fedcrc", personal_first=True).local
    after_rounds(rule, cohorts=[[0, 2]], epochs=2)
    assert fills[:2] == [29, 29]


def test_memory_stays_in_place_until_more_is_needed():
    engine = play(
        build("fedrep"), images(sizes=SIZES), mlp(), [[2], [0], [4], [2, 4]], epochs=2
    ).engine
    assert engine.workshop._frozen.moves == 2


# ---- when not ------------------------------------------------------------------------------------


class Residual(Model):
    """A head that uses more than the features."""

    def forward(self, x):
        return super().forward(x) + x.flatten(1)[:, :4]


@dataclass(frozen=True)
class Alternating(LocalRule):
    interleaved = True

    def phases(self):
        return (Phase(move="head"), Phase(move="features"))


@dataclass(frozen=True)
class PersonalFeatures(LocalRule):
    keeps = "personal"

    def phases(self):
        return (Phase(move="personal.head", loss=personal_loss),)


def residual():
    plain = normalised()
    return Residual(plain.features, plain.head).double()


HEAD = Heads(Phase(move="head"))


@pytest.mark.parametrize(
    ("rule", "module", "how"),
    [
        (HEAD, normalised, {"augment": (Flip(),)}),
        (HEAD, normalised, {"epochs": 1}),
        (HEAD, normalised, {"epochs": 5, "steps": 1}),
        (HEAD, residual, {}),
        (HEAD, lambda: normalised(nn.BatchNorm2d(4, track_running_stats=False)), {}),
        (
            HEAD,
            lambda: Model(nn.Sequential(nn.Flatten(), nn.Dropout(0.5)), nn.Linear(50, 4)).double(),
            {},
        ),
        (Heads(Phase(move="batchnorm")), normalised, {}),
        (Heads(Phase(move=("head", "features.0"))), normalised, {}),
        (Heads(Phase(move="all")), normalised, {}),
        (Alternating(), normalised, {}),
        (PersonalFeatures(), normalised, {}),
    ],
    ids=[
        "augmented",
        "one-epoch",
        "few-steps",
        "other-forward",
        "batch-statistics",
        "no-parameters",
        "batchnorm",
        "some-features",
        "all",
        "interleaved",
        "personal-features",
    ],
)
def test_features_are_computed_in_every_step(rule, module, how, fills):
    how = {"batch_size": 6, "epochs": 3, "optimizer": SGD, **how}
    play(build("fedavg", local=rule), images(sizes=SIZES), module(), [[0, 2, 4]], **how)
    assert not fills


@pytest.mark.parametrize(("largest", "kept"), [(64 * 36 * 8, True), (64 * 36 * 8 - 1, False)])
def test_z_takes_no_more_memory_than_allowed(largest, kept, fills, monkeypatch):
    """Memory for 37 samples is allocated for 64, of 36 numbers each."""
    monkeypatch.setattr(frozen, "_LARGEST", largest)
    how = {"batch_size": 6, "epochs": 2, "optimizer": SGD}
    play(build("fedavg", local=HEAD), images(sizes=SIZES), normalised(), [[2, 4]], **how)
    assert bool(fills) == kept


def test_linear_models_are_left_alone(fills):
    play(build("fedavg"), random_regression([5, 3]), linear(), [[0, 1]], epochs=3)
    assert not fills
