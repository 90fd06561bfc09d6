"""Questions: sums over samples, computed in passes, on any split, for one client or many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad

from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.masked import label_sums
from equipoise.method import LocalRule, Phase
from equipoise.methods import build
from equipoise.models.base import Model
from tests.engine.small_models import batchnorm, mlp

SIZES = [10, 31, 2, 17, 1]
EVERYONE = np.arange(len(SIZES))
CHUNKS = pytest.mark.parametrize("chunk", [1, 3, 10])


def clients():
    """Five clients; some have no validation samples, and none has test samples."""
    draws = torch.Generator().manual_seed(0)
    total = sum(SIZES)
    x = torch.randn(total, 2, 5, 5, generator=draws, dtype=torch.float64)
    y = torch.randint(0, 4, (total,), generator=draws)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    return Federation.from_arrays(x, y, clients=owners, splits=(0.6, 0.4, 0.0), classes=4)


@dataclass(frozen=True)
class Curious(LocalRule):
    """A rule with questions of many kinds."""

    def of_all_kinds(self, client, power, shift):
        """Nest sums of the batch, its labels, the outputs and a gradient of the head."""
        ones = torch.ones_like(client.output()[:, 0])

        def total(bias):
            return client.sum(client.at({"head.bias": bias}).task_loss())

        return {
            "x": client.sum(client.x**power + shift["by"]),
            "seen": (label_sums(ones, client.y, 4, client.mask), client.sum(client.y)),
            "bias": [grad(total)(client.params["head.bias"])],
        }

    def scaled(self, client):
        """Sum the samples, scaled by a number that is sent to this client only."""
        return (
            client.sum(client.x.flatten(1) * client.each["scale"]) + 0 * client.each["matrix"].sum()
        )

    def count(self, client):
        """Count samples."""
        return client.sum(torch.ones_like(client.y))

    def weighted(self, client):
        """Sum the samples, each times its position in the split."""
        return client.sum(client.x.flatten(1) * client.positions.unsqueeze(1))

    def of_features(self, client):
        """Use z."""
        return client.sum(client.features())

    def of_output(self, client):
        """Use the output."""
        return client.sum(client.output())

    def mean(self, client):
        """Average the batch, which is not a sum, and NaN without samples."""
        return client.mean(client.x)

    def list_of_numbers(self, client):
        """Return something other than tensors."""
        return [client.sum(client.y), 3.0]


@dataclass(frozen=True)
class KeepsHead(Curious):
    keeps = "head"

    def own_head(self, client):
        """Apply the kept head to vectors of ones."""
        return client.sum(client.head(torch.ones_like(client.x.flatten(1)[:, :12])))


def cohort_of(rule=None, module=None, chunk=10, ids=EVERYONE, data=None):
    machine = Machine(device="cpu", precision="float64", chunk=chunk)
    engine = StackedEngine(data or clients(), module or mlp(), Training(), machine, seed=3)
    return engine.cohort(build("fedavg", local=rule or Curious()), ids, 0)


def ask_all_kinds(**how):
    cohort = cohort_of(**how)
    return cohort.ask(
        "of_all_kinds", 2, {"by": torch.tensor(0.5).double()}, model=cohort.engine.network.initial()
    )


@CHUNKS
@pytest.mark.parametrize("size_of_a_pass", [1, 7, 4096])
def test_sums_do_not_depend_on_the_size_of_a_pass(size_of_a_pass, chunk, monkeypatch):
    monkeypatch.setattr("equipoise.engine.chunking._PASS", size_of_a_pass)
    answer = ask_all_kinds(chunk=chunk)
    data = clients()
    for client in EVERYONE:
        held = torch.from_numpy(data.train.of(client))
        x, y = data.x[held], data.y[held]
        module = mlp()
        F.cross_entropy(module(x), y, reduction="sum").backward()
        torch.testing.assert_close(answer["x"][client], (x**2 + 0.5).sum(0), rtol=1e-12, atol=1e-12)
        assert answer["seen"][0][client].tolist() == np.bincount(y, minlength=4).tolist()
        assert answer["seen"][1][client] == y.sum()
        torch.testing.assert_close(
            answer["bias"][0][client], module.head.bias.grad, rtol=1e-12, atol=1e-12
        )
    assert answer["seen"][1].dtype == torch.int64


@CHUNKS
@pytest.mark.parametrize("size_of_a_pass", [1, 7, 4096])
def test_a_question_knows_where_samples_are_in_the_split(size_of_a_pass, chunk, monkeypatch):
    monkeypatch.setattr("equipoise.engine.chunking._PASS", size_of_a_pass)
    data = clients()
    answer = cohort_of(chunk=chunk).ask("weighted")
    for client in EVERYONE:
        x = data.x[torch.from_numpy(data.train.of(client))].flatten(1)
        wanted = sum(position * sample for position, sample in enumerate(x))
        torch.testing.assert_close(answer[client], wanted + 0 * x[0], rtol=1e-12, atol=1e-12)


def test_large_models_look_at_fewer_samples_at_a_time(monkeypatch):
    """The limit on activations is one per pass: the sums are the same."""
    whole = ask_all_kinds()
    monkeypatch.setattr("equipoise.engine.chunking._PASS_ACTIVATIONS", {"cpu": 1})
    streamed = ask_all_kinds()
    torch.testing.assert_close(streamed, whole, rtol=1e-12, atol=1e-12)


@CHUNKS
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_any_split_may_be_looked_at(split, chunk):
    data = clients()
    cohort = cohort_of(chunk=chunk, ids=np.array([0, 1, 2, 4]))
    counts = cohort.ask("count", split=split)
    assert counts.tolist() == data.split(split).sizes[[0, 1, 2, 4]].tolist()
    sums = cohort.ask(
        "scaled", split=split, each={"scale": torch.ones(4).double(), "matrix": torch.ones(4, 2, 2)}
    )
    for row, client in enumerate((0, 1, 2, 4)):
        held = torch.from_numpy(data.split(split).of(client))
        torch.testing.assert_close(
            sums[row], data.x[held].flatten(1).sum(0), rtol=1e-12, atol=1e-12
        )


@CHUNKS
def test_clients_without_samples_answer_zeros(chunk):
    data = clients()
    cohort = cohort_of(chunk=chunk)
    empty = data.val.sizes == 0
    assert empty.any()
    assert not empty.all()
    means = cohort.ask("mean", split="val")
    assert torch.isfinite(means).all()
    assert not means[torch.from_numpy(empty)].any()
    assert means[torch.from_numpy(~empty)].flatten(1).any(1).all()
    assert not cohort.ask("mean", split="test").any()
    assert cohort.ask("mean", split="test").shape == (5, 2, 5, 5)


def test_an_unknown_split_is_refused():
    with pytest.raises(InputError, match="unknown split 'valid'.*train"):
        cohort_of().ask("count", split="valid")


@CHUNKS
def test_each_client_gets_its_own_row(chunk):
    scale, matrix = torch.tensor([1.0, -2.0, 0.5]).double(), torch.ones(3, 2, 2).double()
    cohort = cohort_of(chunk=chunk, ids=np.array([1, 2, 3]))
    answer = cohort.ask("scaled", each={"scale": scale, "matrix": matrix})
    data = clients()
    for row, client in enumerate((1, 2, 3)):
        held = torch.from_numpy(data.train.of(client))
        torch.testing.assert_close(
            answer[row], scale[row] * data.x[held].flatten(1).sum(0), rtol=1e-12, atol=1e-12
        )
    assert cohort.bytes_down == 3 * 8 + 3 * 4 * 8
    assert cohort.bytes_up == 3 * 50 * 8


@pytest.mark.parametrize("rows", [2, 4])
def test_another_number_of_rows_is_refused(rows):
    cohort = cohort_of(ids=np.array([1, 2, 3]))
    with pytest.raises(
        InputError,
        match=rf"each\['scale'\] has {rows} rows for 3 clients; valid: one row per client",
    ):
        cohort.ask("scaled", each={"scale": torch.ones(rows), "matrix": torch.ones(3, 2, 2)})


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Curious(), KeepsHead()], ids=["keeps nothing", "keeps its head"])
@pytest.mark.parametrize("question", ["of_output", "of_features"])
def test_a_question_that_looks_at_a_model_needs_one(question, rule):
    with pytest.raises(
        InputError,
        match=r"uses 'features\..*' of the model, but no model was given; valid: .*model=",
    ):
        cohort_of(rule).ask(question)


@CHUNKS
def test_kept_parts_can_be_applied_without_a_model(chunk):
    answer = cohort_of(KeepsHead(), chunk=chunk).ask("own_head")
    wanted = mlp().head(torch.ones(12).double()).detach()
    sizes = torch.from_numpy(clients().train.sizes)
    torch.testing.assert_close(answer, sizes.unsqueeze(1) * wanted, rtol=1e-12, atol=1e-12)


@CHUNKS
def test_answers_are_tensors(chunk):
    with pytest.raises(
        InputError, match="^the question 'list_of_numbers' must return tensors, got 3.0$"
    ):
        cohort_of(chunk=chunk).ask("list_of_numbers")


class LastState(nn.Module):
    """A recurrent layer in code that depends on values, which cannot be stacked."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 6, batch_first=True)

    def forward(self, x):
        return self.lstm(x.flatten(1, 2) if x.abs().max() < 100 else x)[0][:, -1]


def test_a_model_that_cannot_be_stacked_can_be_asked_about():
    torch.manual_seed(0)
    module = Model(LastState(), nn.Linear(6, 4)).double()
    cohort = cohort_of(module=module, chunk="auto")
    answer = cohort.ask("of_features", model=cohort.engine.network.initial())
    assert cohort.engine.chunk == 1
    data = clients()
    for client in EVERYONE:
        z = module.features(data.x[torch.from_numpy(data.train.of(client))])
        torch.testing.assert_close(answer[client], z.sum(0).detach(), rtol=1e-12, atol=1e-12)


@CHUNKS
def test_outputs_that_depend_on_the_batch_see_all_samples_of_a_client(chunk, monkeypatch):
    monkeypatch.setattr("equipoise.engine.chunking._PASS", 1)
    module = batchnorm(running=False)
    cohort = cohort_of(module=module, chunk=chunk, ids=EVERYONE[:4])
    answer = cohort.ask("of_output", model=cohort.engine.network.initial())
    data = clients()
    for client in EVERYONE[:4]:
        output = module(data.x[torch.from_numpy(data.train.of(client))])
        torch.testing.assert_close(answer[client], output.sum(0).detach(), rtol=1e-9, atol=1e-9)


def test_a_question_sees_a_model_as_in_evaluation_and_changes_nothing():
    module = batchnorm()
    cohort = cohort_of(module=module)
    before = cohort.engine.network.initial()
    answer = cohort.ask("of_output", model=before)
    data = clients()
    for client in EVERYONE:
        output = module.eval()(data.x[torch.from_numpy(data.train.of(client))])
        torch.testing.assert_close(answer[client], output.sum(0).detach(), rtol=1e-9, atol=1e-9)
    assert all(
        torch.equal(tensor, before[name])
        for name, tensor in cohort.engine.network.initial().items()
    )


def test_a_rule_may_ask_before_and_after_training():
    """Questions do not count as training."""
    cohort = cohort_of()
    model = cohort.engine.network.initial()
    cohort.ask("count")
    updates = cohort.train({"model": model}, {}, cohort.method.local)
    assert cohort.ask("count").tolist() == cohort.sizes.tolist()
    assert len(updates.params["head.bias"]) == len(EVERYONE)


def test_a_phase_may_not_be_asked_as_a_question():
    @dataclass(frozen=True)
    class Plain(LocalRule):
        def phases(self):
            return (Phase(),)

    with pytest.raises(InputError, match="unknown question 'count' in the local rule Plain"):
        cohort_of(Plain()).ask("count")
