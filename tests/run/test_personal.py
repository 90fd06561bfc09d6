"""Personal models in evaluation: adaptation without a memory, fine-tuning, and kept parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from equipoise import train
from equipoise.data import load
from equipoise.engine.settings import FineTune, Machine, Training
from equipoise.errors import InputError
from equipoise.method import LocalRule, Phase
from equipoise.methods import build
from equipoise.models import build as model
from equipoise.optimizers import Sgd
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer

LR, SIZE = 0.1, 16


@dataclass(frozen=True)
class OwnHead(LocalRule):
    """Keeps the head, like FedPer; a new client trains it."""

    keeps = "head"

    def adapt(self) -> Sequence[Phase]:
        return (Phase(move="head", steps=2),)


@dataclass(frozen=True)
class SecondHead(LocalRule):
    """Has a personal head in addition to the global one."""

    keeps = "personal.head"

    def phases(self) -> Sequence[Phase]:
        return Phase(move="features"), Phase(
            move="personal.head", loss=lambda client: client.personal().task_loss()
        )

    def adapt(self) -> Sequence[Phase]:
        return self.phases()[1:]


@dataclass(frozen=True)
class Adapts(LocalRule):
    """Keeps nothing, and makes two steps with all parts before it is used."""

    def adapt(self) -> Sequence[Phase]:
        return (Phase(steps=2),)


def digits(unseen=4):
    federation = load("digits")
    held_out = np.zeros(federation.clients, dtype=bool)
    held_out[-unseen:] = True
    return replace(federation, unseen=held_out)


def trained(rule, rounds=2, cohort=3, method="fedavg", **evaluation):
    federation = digits()
    trainer = Trainer(
        federation,
        build(method, local=rule) if rule else build(method),
        model("mlp", shape=federation.shape, classes=10, hidden=[8]),
        Training(rounds=rounds, cohort=cohort, batch_size=SIZE, optimizer=Sgd(lr=LR)),
        Machine(device="cpu", precision="float64"),
        Evaluation(**{"every": rounds, **evaluation}),
        seed=0,
    )
    trainer.run()
    return trainer


def full(trainer, client):
    """One client's personal model."""
    still, own = trainer.personal_models(np.array([client]))
    return {**still, **{name: stack[0] for name, stack in own.items()}}


def test_who_keeps_nothing_adapts_from_the_global_model_by_plain_gradient_steps():
    trainer = trained(Adapts())
    federation = trainer.federation
    # The same two steps by hand, on the drawn batches: the client's whole split, so that the order
    # does not matter.
    size = int(federation.train.sizes[20])
    whole = Trainer(
        federation,
        trainer.method,
        trainer.engine.network.blank(),
        replace(trainer.training, batch_size=size),
        trainer.engine.machine,
        trainer.evaluation,
        seed=0,
    )
    whole.state = trainer.state
    found = full(whole, 20)
    indices = torch.from_numpy(
        federation.train.indices[federation.train.offsets[20] : federation.train.offsets[21]]
    )
    x, y = federation.x[indices].double(), federation.y[indices]
    module = trainer.engine.network.blank().double().train()
    module.load_state_dict(trainer.state.model)
    for _ in range(2):
        module.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= LR * parameter.grad
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


def test_adaptation_leaves_no_trace():
    once, often = trained(Adapts(), every=1), trained(Adapts(), every=2)
    assert all(torch.equal(once.state.model[n], often.state.model[n]) for n in once.state.model)
    assert once.engine.memory.clients == []
    memory = trained(SecondHead())
    took_part = memory.engine.memory.clients
    before = {n: t.clone() for n, t in memory.engine.memory.export().items()}
    memory.personal_models(np.arange(memory.federation.clients))
    assert memory.engine.memory.clients == took_part
    assert all(torch.equal(before[n], t) for n, t in memory.engine.memory.export().items())


def test_strangers_adapt_and_the_others_use_their_memory():
    trainer = trained(SecondHead(), rounds=1)
    took_part = trainer.engine.memory.clients
    assert len(took_part) == 3
    remembered = trainer.engine.memory.export()
    for row, client in enumerate(trainer.engine.memory.export()["clients"].tolist()):
        own = full(trainer, client)
        assert torch.equal(own["head.weight"], remembered["kept/personal.head.weight"][row])
    stranger = full(trainer, 21)
    assert not torch.equal(stranger["head.weight"], trainer.state.model["head.weight"])
    assert torch.equal(stranger["features.1.weight"], trainer.state.model["features.1.weight"])
    # The result does not depend on the other clients.
    _, own = trainer.personal_models(np.arange(trainer.federation.clients))
    torch.testing.assert_close(own["head.weight"][21], stranger["head.weight"], rtol=0, atol=1e-12)


def test_unseen_clients_have_personal_rows_only_if_they_can_adapt():
    def rows(trainer):
        return {(row["model"], row["unseen"]) for row in trainer.metrics}

    assert ("personal", True) in rows(trained(SecondHead()))
    assert ("personal", True) in rows(trained(None, method="local"))
    assert rows(trained(None)) == {("global", False), ("global", True)}
    assert ("personal", True) in rows(trained(None, fine_tune=FineTune()))


def test_a_client_without_training_data_has_no_personal_model():
    data = load("digits", splits=(0.8, 0.2, 0.0), leave_out="plain")
    for method in ("perfedavg", "fedbabu"):
        run = train(data, method=method, rounds=1)
        assert set(run.summary["results"]) == {"global"}
        assert set(run.summary["results"]["global"]) == {"unseen"}
        assert {model: set(who) for model, who in run.summary["validation"].items()} == {
            "global": {"seen"},
            "personal": {"seen"},
        }


def test_fine_tuning_follows_any_method_and_starts_from_the_personal_model():
    tuned = trained(SecondHead(), fine_tune=FineTune(steps=1, move="head", lr=1e-300))
    plain = trained(SecondHead())
    for client in (*plain.engine.memory.clients, 21):
        expected, found = full(plain, client), full(tuned, client)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)
    moved = trained(None, fine_tune=FineTune(epochs=3, move="head"))
    own = full(moved, 0)
    assert torch.equal(own["features.1.weight"], moved.state.model["features.1.weight"])
    assert not torch.equal(own["head.weight"], moved.state.model["head.weight"])


def test_unlike_clients_do_better_with_models_of_their_own():
    results = trained(None, rounds=10, cohort=1.0, fine_tune=FineTune(epochs=10)).summary()[
        "results"
    ]
    assert results["personal"]["seen"]["mean"] > results["global"]["seen"]["mean"] + 0.03


def test_a_client_without_training_samples_keeps_the_global_model():
    federation = digits()
    train = federation.train
    empty = replace(
        federation,
        train=type(train)(
            train.indices[: train.offsets[-2]], np.append(train.offsets[:-1], train.offsets[-2])
        ),
    )
    trainer = Trainer(
        empty,
        build("fedavg", local=Adapts()),
        model("mlp", shape=federation.shape, classes=10, hidden=[8]),
        Training(rounds=1, cohort=3, batch_size=SIZE),
        Machine(device="cpu"),
        Evaluation(fine_tune=FineTune()),
        seed=0,
    )
    trainer.run()
    own = full(trainer, federation.clients - 1)
    assert all(torch.equal(own[name], tensor) for name, tensor in trainer.state.model.items())


def test_parts_that_clients_keep_leave_no_global_model_unless_they_are_averaged():
    without = trained(OwnHead())
    assert set(without.summary()["results"]) == {"personal"}
    trainer = trained(OwnHead(), average_kept=True)
    memory = trainer.engine.memory.export()
    sizes = trainer.federation.train.sizes[memory["clients"].numpy()]
    weights = torch.from_numpy(sizes / sizes.sum())
    expected = sum(w * head for w, head in zip(weights, memory["kept/head.bias"], strict=True))
    torch.testing.assert_close(trainer.global_model["head.bias"], expected, rtol=0, atol=1e-12)
    assert torch.equal(
        trainer.global_model["features.1.bias"], trainer.state.model["features.1.bias"]
    )
    assert set(trainer.summary()["results"]["global"]) == {"seen", "unseen"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"epochs": 0}, "epochs"),
        ({"steps": True}, "steps"),
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
    ],
)
def test_bad_fine_tuning_is_refused(settings, named):
    with pytest.raises(InputError, match=f"evaluation.fine_tune.{named}"):
        FineTune(**settings)


@pytest.mark.parametrize(
    ("rule", "evaluation"),
    [(build("fedbabu", tunes="neck").local, {}), (None, {"fine_tune": FineTune(move="neck")})],
    ids=["adapt", "fine_tune"],
)
def test_a_part_that_is_not_there_is_refused_before_training(rule, evaluation):
    with pytest.raises(InputError, match="unknown part 'neck'"):
        trained(rule, rounds=1, **evaluation)


def test_pooled_data_cannot_be_fine_tuned():
    with pytest.raises(InputError, match="pools their data"):
        trained(None, method="central", fine_tune=FineTune())


@pytest.mark.parametrize("local", ["ditto", "fedbabu"])
def test_pooled_data_have_no_personal_models(local):
    with pytest.raises(InputError, match=f"rule '{local}' .* the view 'central' pools their data"):
        trained(local, method="central")


def test_the_plain_rule_has_nothing_of_its_own():
    assert not build("fedavg").personal
    assert build("fedavg", local=Adapts()).personal
