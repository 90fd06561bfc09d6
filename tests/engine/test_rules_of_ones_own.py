"""User-defined local rules: what they find in a client, and the errors that they get."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from equipoise import Machine, Training, train
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError
from equipoise.method import LocalRule, Phase, class_counts
from equipoise.methods import build
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images, several_labels
from tests.engine.small_models import mlp
from tests.rounds import play, random_regression


def averaged(rule):
    """FedAvg with a local rule."""
    return replace(build("fedavg"), local=rule)


@dataclass(frozen=True)
class Balanced(LocalRule):
    """Shift scores by the logarithm of the client's class counts."""

    def facts(self):
        """Count the classes."""
        return {"labels": class_counts(lambda sums: {"log": (sums["count"] + 1).log()})}

    def phases(self):
        """One phase."""
        return (Phase(loss=self.loss),)

    def loss(self, client):
        """Use the task's loss for other outputs."""
        assert client.classes == 4
        return client.task_loss(output=client.output() + client.memory["labels"]["log"])


@dataclass(frozen=True)
class BalancedByHand(Balanced):
    """The same with counts that are computed elsewhere."""

    federation: Any = None

    def facts(self):
        """Nothing."""
        return {}

    def loss(self, client):
        """Look up the counts by the client's number, which the server sends."""
        counts = torch.stack(
            [
                torch.bincount(self.federation.y[self.federation.train.of(number)], minlength=4)
                for number in range(self.federation.clients)
            ]
        )
        shift = (counts[client.each["number"]].double() + 1).log()
        return F.cross_entropy(client.output() + shift, client.y, reduction="none")


def one_round(rule, chunk):
    engine = StackedEngine(
        images(), mlp(), Training(), Machine(device="cpu", precision="float64", chunk=chunk), 5
    )
    ids = np.arange(10)
    cohort = engine.cohort(averaged(rule), ids, 0)
    updates = cohort.train(
        {"model": engine.network.initial()}, {"number": torch.from_numpy(ids)}, rule
    )
    return updates.params


def test_class_counts_the_number_of_classes_and_the_loss_of_other_outputs():
    wanted = one_round(BalancedByHand(federation=images()), 1)
    for chunk in (1, 10):
        assert distance(one_round(Balanced(), chunk), wanted) <= 1e-9


@dataclass(frozen=True)
class Counting(LocalRule):
    """Keeps the class counts and sends them."""

    uploads = ("labels",)

    def facts(self):
        """Count the classes."""
        return {"labels": class_counts()}

    def phases(self):
        """One phase."""
        return (Phase(),)


def test_class_counts_of_several_labels_count_each_of_them():
    federation = several_labels()
    module = build_model("logistic", shape=(5,), classes=3)
    engine = StackedEngine(
        federation, module, Training(), Machine(device="cpu", precision="float64", chunk=4)
    )
    cohort = engine.cohort(averaged(Counting()), np.arange(4), 0)
    uploads = cohort.train({"model": engine.network.initial()}, {}, Counting()).uploads
    wanted = torch.stack([federation.y[federation.train.of(client)].sum(0) for client in range(4)])
    torch.testing.assert_close(uploads["labels"]["count"], wanted.double())


def test_a_task_without_classes_has_no_class_counts():
    with pytest.raises(
        InputError,
        match="the method needs the number of classes, which a regression does not have",
    ):
        train(random_regression([3, 4]), method=averaged(Counting()), model="logistic", rounds=1)


# ---- errors --------------------------------------------------------------------------------------


def rule_with(first=None, finish=None, loss=None):
    @dataclass(frozen=True)
    class Mine(LocalRule):
        def first_memory(self, model):
            return {} if first is None else first

        def finish(self, client):
            return ({}, {}) if finish is None else finish(client)

        def phases(self):
            return (Phase(loss=loss) if loss else Phase(),)

    return Mine()


COUNTER = {"counter": {"rounds": torch.tensor(0)}}
WRONG = {
    "a loss of one number": (
        {"loss": lambda c: c.task_loss().mean()},
        r"returned values of shape \(\) for 10 samples",
    ),
    "a loss of None": (
        {"loss": lambda c: None},
        r"returned None for 10 samples; valid: one value per sample, of shape \(10",
    ),
    "a loss that is a number": ({"loss": lambda c: 1.0}, "returned 1.0 for 10 samples"),
    "a branch": (
        {"loss": lambda c: c.task_loss() if c.seen else 2 * c.task_loss()},
        "it has an if or a loop that depends on values, .* client.seen as a factor",
    ),
    "an item": (
        {"loss": lambda c: c.task_loss() * c.seen.item()},
        r"it calls .item\(\), float\(\) or similar",
    ),
    "a whole number in memory": (
        {"first": {"counter": {"rounds": 0}}},
        r"first_memory of Mine returned 0 for counter.rounds; valid: a tensor, such as "
        r"torch.tensor\(0.0\)",
    ),
    "a memory without trees": (
        {"first": {"counter": torch.zeros(2)}},
        "returned torch.float32 of shape .* for counter; valid: a dictionary of tensors",
    ),
    "a memory that is a list": (
        {"first": [1]},
        r"first_memory of Mine returned \[1\]; valid: a dictionary",
    ),
    "a whole number in what is kept": (
        {"first": COUNTER, "finish": lambda c: ({"counter": {"rounds": 1}}, {})},
        "finish of Mine returned 1 for counter.rounds; valid: a tensor",
    ),
    "another type in the next round": (
        {
            "first": COUNTER,
            "finish": lambda c: ({"counter": {"rounds": c.memory["counter"]["rounds"] + 0.5}}, {}),
        },
        "for counter.rounds, which was torch.int64 .* before; valid: the same type and shape",
    ),
    "nothing kept": (
        {"finish": lambda c: None},
        "finish of Mine returned None; valid: the client's memory and its uploads",
    ),
    "a branch at the end": (
        {"finish": lambda c: ({}, {"steps": {"made": c.steps}} if c.steps > 2 else {})},
        "finish of Mine cannot be called for many clients at once: it has an if",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_rule_returns_is_checked_in_the_librarys_words(name):
    parts, says = WRONG[name]
    with pytest.raises(InputError, match=says):
        play(averaged(rule_with(**parts)), images(), mlp(), [np.array([4, 9])], chunk=4)


def test_whole_numbers_in_tensors_are_kept():
    def count(client):
        return {"counter": {"rounds": client.memory["counter"]["rounds"] + 1}}, {}

    rule = rule_with(COUNTER, count)
    played = play(averaged(rule), images(), mlp(), THREE_COHORTS, chunk=4)
    memory, _ = played.engine.memory.read(np.arange(10), COUNTER)
    assert memory["counter"]["rounds"].tolist() == [2, 2, 2, 2, 3, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (torch.optim.SGD, "got the class SGD"),
        (Sgd, "got the class Sgd"),
        (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), "got a SGD"),
        (0.1, "got a float"),
    ],
)
def test_an_optimizer_that_is_no_settings_is_refused(optimizer, says):
    with pytest.raises(
        InputError, match=rf"optimizer must be settings such as Sgd\(lr=0.1\) .*{says}"
    ):
        train(images(), rounds=1, optimizer=optimizer)
    with pytest.raises(InputError, match=f"the optimizer of a Phase must be settings .*{says}"):
        Phase(optimizer=optimizer)


def test_a_phase_without_a_loss_is_refused():
    with pytest.raises(
        InputError, match="the loss of a Phase must be a function of a client, got None"
    ):
        Phase(loss=None)
