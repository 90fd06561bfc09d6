"""User-defined rules against loops in plain PyTorch, for any number of stacked clients."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from equipoise.methods import build
from equipoise.optimizers import Sgd
from equipoise.random import Purpose, fold
from equipoise.tree import size_in_bytes
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.five_clients import CHUNKS, COHORTS, SEED, SIZES
from tests.engine.plain_loop import shuffled
from tests.engine.small_models import mlp
from tests.own_rules import Aligned, Calibrated, Mixed, Projected
from tests.rounds import play

HOW = {"batch_size": 4, "epochs": 2, "optimizer": Sgd(lr=0.1, momentum=0.5)}
TOLERANCE = 1e-9


def held(data, client):
    samples = torch.from_numpy(data.train.of(client))
    return data.x[samples], data.y[samples]


class Loop:
    """FedAvg with a user-defined loss, one client and one batch after the other."""

    def __init__(self, data, module):
        self.data, self.module, self.round = data, copy.deepcopy(module), 0

    def before_round(self, cohort):
        """Run the server's part before clients train."""

    def loss(self, module, x, y, client):
        raise NotImplementedError

    def play(self, cohorts):
        for cohort in cohorts:
            self.before_round(cohort)
            total = sum(SIZES[client] for client in cohort)
            average = {}
            for client in cohort:
                for name, tensor in self.trained(client).state_dict().items():
                    average[name] = average.get(name, 0) + tensor * (SIZES[client] / total)
            self.module.load_state_dict(average)
            self.round += 1
        return average

    def trained(self, client):
        x, y = held(self.data, client)
        module = copy.deepcopy(self.module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        for epoch in range(2):
            order = shuffled(len(x), fold(SEED, self.round, client, Purpose.SHUFFLE, 0, epoch))
            for start in range(0, len(x), 4):
                batch = order[start : start + 4]
                optimizer.zero_grad()
                self.loss(module, x[batch], y[batch], client).backward()
                optimizer.step()
        return module


class CalibratedLoop(Loop):
    def loss(self, module, x, y, client):
        counts = np.maximum(np.bincount(held(self.data, client)[1], minlength=4), 1)
        return F.cross_entropy(module(x) - torch.from_numpy(0.5 * counts**-0.25), y)


class AlignedLoop(Loop):
    mean = None

    def gradients(self, module, x, y, **how):
        return torch.autograd.grad(
            F.cross_entropy(module(x), y), list(module.head.parameters()), **how
        )

    def before_round(self, cohort):
        x, y = (
            torch.cat(parts)
            for parts in zip(*(held(self.data, client) for client in cohort), strict=True)
        )
        fresh = self.gradients(self.module, x, y)
        old = fresh if self.mean is None else self.mean
        self.mean = [0.8 * a + 0.2 * b for a, b in zip(old, fresh, strict=True)]

    def loss(self, module, x, y, client):
        own = self.gradients(module, x, y, create_graph=True)
        distances = [(a - b).square().sum() for a, b in zip(own, self.mean, strict=True)]
        return F.cross_entropy(module(x), y) + 0.5 * sum(distances)


class MixedLoop(Loop):
    def loss(self, module, x, y, client):
        others, labels = held(self.data, self.round % len(SIZES))
        of_class = F.one_hot(labels, 4).double().mean(0).expand(len(x), 4)
        scores = module(0.8 * x + 0.2 * others.mean(0))
        return 0.8 * F.cross_entropy(scores, y) + 0.2 * F.cross_entropy(scores, of_class)


class ProjectedLoop(Loop):
    def loss(self, module, x, y, client):
        return (
            F.cross_entropy(module(x), y)
            + 0.1 * module.projection(module.features(x)).square().sum(1).mean()
        )


RULES = {
    "calibrated": (build("fedavg", local=Calibrated()), CalibratedLoop),
    "aligned": (build("fedavg", local=Aligned(), aggregation=Aligned()), AlignedLoop),
    "mixed": (build("fedavg", local=Mixed(), aggregation=Mixed()), MixedLoop),
    "projected": (build("fedavg", local=Projected()), ProjectedLoop),
}


def extended(name):
    """The small model with the parts that the method adds."""
    return RULES[name][0].extend(mlp(), (2, 5, 5), SEED).double()


@pytest.fixture(scope="module")
def by_hand():
    """The global model after three rounds of a loop; computed once."""
    made = {}

    def model(name):
        if name not in made:
            made[name] = RULES[name][1](images(sizes=SIZES), extended(name)).play(COHORTS)
        return made[name]

    return model


@CHUNKS
@pytest.mark.parametrize("name", RULES)
def test_three_rounds_equal_a_loop(name, chunk, by_hand):
    played = play(
        RULES[name][0], images(sizes=SIZES), extended(name), COHORTS, chunk=chunk, seed=SEED, **HOW
    )
    assert distance(played.model, by_hand(name)) <= TOLERANCE


@pytest.mark.parametrize("name", RULES)
def test_they_are_no_plain_averaging(name, by_hand):
    plain = play(build("fedavg"), images(sizes=SIZES), extended(name), COHORTS, seed=SEED, **HOW)
    assert distance(plain.model, by_hand(name)) > 1e-4


def test_label_counts_stay_with_the_client():
    data = images(sizes=SIZES)
    played, plain = (
        play(method, data, mlp(), COHORTS, **HOW)
        for method in (RULES["calibrated"][0], build("fedavg"))
    )
    for one, other in zip(played.cohorts, plain.cohorts, strict=True):
        # Clients also report the terms that the method adds to the loss.
        assert (one.bytes_up, one.bytes_down) == (
            other.bytes_up + 8 * len(one.ids),
            other.bytes_down,
        )
    assert all(not updates.uploads for updates in played.updates)
    kept = played.engine.memory.export()
    for client, counts in zip(kept["clients"].tolist(), kept["labels/counts"], strict=True):
        assert counts.tolist() == np.bincount(held(data, client)[1], minlength=4).tolist()


def test_the_question_about_gradients_and_the_answer_are_counted():
    played = play(RULES["aligned"][0], images(sizes=SIZES), mlp(), COHORTS, **HOW)
    model = size_in_bytes(played.model)
    head = 8 * (12 * 4 + 4)
    for cohort in played.cohorts:
        clients = len(cohort.ids)
        assert cohort.bytes_down == clients * (model + model + head), (
            "to ask, to train, and the mean gradient"
        )
        assert cohort.bytes_up == clients * (head + model + 3 * 8), (
            "with loss, terms of the method and steps"
        )


def test_means_travel_to_each_client_once():
    played = play(RULES["mixed"][0], images(sizes=SIZES), mlp(), COHORTS[1:] + COHORTS[:1], **HOW)
    model, means = size_in_bytes(played.model), 8 * len(SIZES) * (50 + 4)
    # Clients 0, 2, 3 come first, then 1 and 4 with 2 again, then everyone.
    assert [cohort.bytes_down for cohort in played.cohorts] == [
        3 * (model + means),
        3 * model + 2 * means,
        5 * model,
    ]
