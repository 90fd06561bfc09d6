"""Facts: what clients compute from their samples, when losses can read it, and what is sent."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from equipoise.engine.contract import Personal
from equipoise.errors import InputError
from equipoise.method import Fact, LocalRule, Phase
from equipoise.methods import build
from equipoise.optimizers import Sgd
from tests.engine.federations import images
from tests.engine.five_clients import CHUNKS, COHORTS, EVERYONE, SIZES
from tests.engine.small_models import mlp
from tests.own_rules import Calibrated, Counted
from tests.rounds import minimised, play

HOW = {"batch_size": 4, "optimizer": Sgd(lr=0.2)}
STILL = {"batch_size": 4, "optimizer": Sgd(lr=0.0)}


def data():
    return images(sizes=SIZES)


def held(client):
    samples = torch.from_numpy(data().train.of(client))
    return data().x[samples], data().y[samples]


def module_with(model):
    module = mlp()
    module.load_state_dict(model)
    return module


@torch.no_grad()
def sureness(module, client):
    """The mean of the largest probability over a client's samples."""
    return module(held(client)[0]).softmax(1).amax(1).mean().item()


@torch.no_grad()
def loss(module, client):
    x, y = held(client)
    return F.cross_entropy(module(x), y).item()


@CHUNKS
@pytest.mark.parametrize("size_of_a_pass", [2, 4096])
def test_facts_of_the_received_and_the_trained_model_are_uploaded(
    size_of_a_pass, chunk, monkeypatch
):
    """Computed in passes of a few samples, facts equal those of the whole split."""
    monkeypatch.setattr("equipoise.engine.chunking._PASS", size_of_a_pass)
    method = build("fedavg", local=Counted(), aggregation=Counted())
    played = play(method, data(), mlp(), COHORTS, chunk=chunk, **HOW)
    for state, updates, cohort in zip(played.states, played.updates, COHORTS, strict=False):
        assert set(updates.uploads) == {"before", "after"}
        before, after = (updates.uploads[name]["sure"] for name in ("before", "after"))
        assert before.tolist() == pytest.approx(
            [sureness(module_with(state.model), c) for c in cohort], abs=1e-12
        )
        trained = [
            {name: rows[place] for name, rows in updates.params.items()}
            for place in range(len(cohort))
        ]
        wanted = [
            sureness(module_with(own), client) for own, client in zip(trained, cohort, strict=True)
        ]
        assert after.tolist() == pytest.approx(wanted, abs=1e-12)
        assert (before != after).all()


def test_uploaded_facts_are_counted():
    plain, sending = (
        play(method, data(), mlp(), COHORTS, **HOW)
        for method in (build("fedavg"), build("fedavg", local=Counted(), aggregation=Counted()))
    )
    for one, other in zip(plain.cohorts, sending.cohorts, strict=True):
        assert other.bytes_up - one.bytes_up == len(one.ids) * 2 * 8
        assert other.bytes_down == one.bytes_down


@dataclass(frozen=True)
class Remembering(LocalRule):
    """Add the facts to the loss; with a learning rate of zero, the training loss shows them."""

    model: str = "trained"

    def facts(self):
        """Compute the mean pixel, weighted by the first bias of the head, and keep it."""
        return {"pixel": Fact(sums=self.sums, then=self.mean, model=self.model)}

    def sums(self, client):
        """Sum, and count."""
        weighted = client.x.flatten(1).mean(1) * (1 + client.params["head.bias"][0])
        return {"x": client.sum(weighted), "n": client.sum(torch.ones_like(weighted))}

    def mean(self, sums):
        """Divide."""
        return {"mean": sums["x"] / sums["n"]}

    def phases(self):
        """Train with the fact added."""
        return (
            Phase(loss=lambda client: client.task_loss() + 10 * client.memory["pixel"]["mean"]),
        )


def pixel(client):
    return held(client)[0].mean().item() * (1 + mlp().head.bias[0].item())


@CHUNKS
def test_a_trained_fact_is_zero_at_first_and_known_in_the_next_round(chunk):
    cohorts = [[1, 3], [0, 1, 2, 3], [0, 4]]
    played = play(
        build("fedavg", local=Remembering()), data(), mlp(), cohorts, chunk=chunk, **STILL
    )
    seen = set()
    for cohort, updates in zip(cohorts, played.updates, strict=True):
        wanted = [
            loss(mlp(), client) + (10 * pixel(client) if client in seen else 0) for client in cohort
        ]
        assert minimised(updates.reports).tolist() == pytest.approx(wanted, abs=1e-12)
        seen |= set(cohort)


@CHUNKS
@pytest.mark.parametrize("model", ["first", "received"])
def test_other_facts_are_known_at_once(model, chunk):
    cohorts = [[1, 3], [0, 1, 2, 3], [0, 4]]
    played = play(
        build("fedavg", local=Remembering(model)), data(), mlp(), cohorts, chunk=chunk, **STILL
    )
    for cohort, updates in zip(cohorts, played.updates, strict=True):
        wanted = [loss(mlp(), client) + 10 * pixel(client) for client in cohort]
        assert minimised(updates.reports).tolist() == pytest.approx(wanted, abs=1e-12)


@CHUNKS
def test_a_first_fact_is_that_of_the_initial_model_whenever_a_client_comes(chunk):
    played = play(
        build("fedavg", local=Remembering("first")), data(), mlp(), COHORTS[1:], chunk=chunk, **HOW
    )
    kept = played.engine.memory.export()
    assert sorted(kept["clients"].tolist()) == EVERYONE
    assert kept["pixel/mean"].tolist() == pytest.approx(
        [pixel(c) for c in kept["clients"].tolist()], abs=1e-12
    )
    assert not torch.equal(played.model["head.bias"], mlp().head.bias)


def test_a_first_fact_is_computed_once_for_each_client():
    asked = []

    @dataclass(frozen=True)
    class Watched(Calibrated):
        def counts(self, client):
            asked.append(len(client.y))
            return super().counts(client)

    play(
        build("fedavg", local=Watched()), data(), mlp(), [[0, 1], [0, 1, 2], [1, 2]], chunk=1, **HOW
    )
    assert sorted(asked) == sorted(SIZES[:3])


def test_rules_with_facts_are_keys():
    assert hash(Counted()) == hash(Counted())
    assert {Remembering("first"): 1}[Remembering("first")] == 1
    assert Remembering("first") != Remembering("received")


# ---- adapting ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapting(Calibrated):
    """Adapt with the loss that reads label counts."""

    def adapt(self):
        """Take one step on all samples."""
        return (Phase(loss=self.loss, steps=1),)


@dataclass(frozen=True)
class AdaptingWithMemory(Adapting):
    """The same for a rule that remembers something else."""

    def first_memory(self, model):
        return {"bias": {"way": model["head.bias"]}}


@CHUNKS
@pytest.mark.parametrize("rule", [Adapting, AdaptingWithMemory])
def test_clients_that_never_took_part_adapt_with_their_facts(rule, chunk):
    method = build("fedavg", local=rule())
    played = play(
        method, data(), mlp(), [[0, 1]], chunk=chunk, batch_size=20, optimizer=Sgd(lr=0.5)
    )
    before = {name: tensor.clone() for name, tensor in played.engine.memory.export().items()}
    still, own = played.engine.personal_models(
        played.model, Personal(method, (), 1), np.array(EVERYONE)
    )
    assert not still
    for client in EVERYONE:
        module = copy.deepcopy(module_with(played.model))
        x, y = held(client)
        counts = torch.bincount(y, minlength=4).clamp(min=1).double()
        F.cross_entropy(module(x) - 0.5 * counts**-0.25, y).backward()
        for name, parameter in module.named_parameters():
            wanted = (parameter - 0.5 * parameter.grad).detach()
            torch.testing.assert_close(own[name][client], wanted, rtol=1e-9, atol=1e-12)
    after = played.engine.memory.export()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), (
        "nothing of it is remembered"
    )


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["first", "received", "trained"])
def test_facts_come_back_from_a_checkpoint(model):
    method = build("fedavg", local=Remembering(model))
    played, again = (play(method, data(), mlp(), COHORTS[:2], **HOW) for _ in range(2))
    exported = {name: tensor.clone() for name, tensor in played.engine.export().items()}
    assert "pixel/mean" in exported
    again.engine.memory.forget_pending()
    again.engine.restore({name: tensor.clone() for name, tensor in exported.items()})
    assert all(
        torch.equal(tensor, exported[name]) for name, tensor in again.engine.export().items()
    )
    one, other = (
        engine.cohort(method, np.array(EVERYONE), 2).train(
            {"model": played.model}, {}, method.local
        )
        for engine in (played.engine, again.engine)
    )
    assert all(torch.equal(rows, other.params[name]) for name, rows in one.params.items())
    assert torch.equal(one.reports["train_loss"], other.reports["train_loss"])


# ---- mistakes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistaken(LocalRule):
    """A rule with an arbitrary fact."""

    sums: object = None
    then: object = None

    def facts(self):
        """Return the fact."""
        return {"odd": Fact(sums=self.sums, then=self.then)}


@pytest.mark.parametrize(
    ("sums", "then", "message"),
    [
        (
            lambda client: client.sum(client.x),
            None,
            "the fact 'odd' must be a dictionary of tensors, got Tensor",
        ),
        (
            lambda client: {"x": client.sum(client.x)},
            lambda sums: sums["x"],
            "the fact 'odd' must be a dictionary of tensors, got Tensor",
        ),
        (
            lambda client: {"of": {"x": client.sum(client.x)}},
            None,
            "the fact 'odd' must be a dictionary of tensors, but 'of' is a dict",
        ),
        (lambda client: {"n": 3}, None, "the fact 'odd' must return tensors, got 3"),
    ],
    ids=["a tensor", "then a tensor", "nested", "a number"],
)
@pytest.mark.parametrize("chunk", [1, 10])
def test_a_fact_is_a_dictionary_of_tensors(sums, then, message, chunk):
    with pytest.raises(InputError, match=f"^{message}$"):
        play(
            build("fedavg", local=Mistaken(sums, then)),
            data(),
            mlp(),
            COHORTS[:1],
            chunk=chunk,
            **HOW,
        )


def test_an_unknown_model_is_refused():
    with pytest.raises(InputError, match="unknown model 'last' in Fact.*first, received, trained"):
        Fact(sums=lambda client: {}, model="last")
