"""Ordinary modules: stacked clients equal single clients, with any kind of dropout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise import Machine, load, train
from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.models.base import Model
from equipoise.models.headed import Headed, with_head
from equipoise.models.passes import Forward
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images, text
from tests.engine.own_models import (
    Attending,
    Convolving,
    Encoder,
    Reader,
    image_classifier,
    text_classifier,
)
from tests.rounds import play

FLOAT64 = Machine(device="cpu", precision="float64")

MODELS = {
    "cnn": (Convolving, images),
    "gru": (lambda: Reader(nn.GRU, batch_first=True), text),
    "lstm, steps first": (lambda: Reader(nn.LSTM), text),
    "projected lstm in both directions": (
        lambda: Reader(nn.LSTM, proj_size=3, bidirectional=True, batch_first=True),
        text,
    ),
    "rnn": (lambda: Reader(nn.RNN, nonlinearity="relu", bias=False, batch_first=True), text),
    "transformer": (Encoder, text),
    "causal transformer": (lambda: Encoder(causal=True), text),
    "attention with padding": (Attending, text),
    "attention with more keys": (lambda: Attending(add_bias_kv=True, add_zero_attn=True), text),
    "vit": (image_classifier, images),
    "vit without fused attention": (lambda: image_classifier("eager"), images),
    "bert": (text_classifier, text),
    "vit with a head": (lambda: with_head(image_classifier(), "classifier"), images),
    "bert with a head": (lambda: with_head(text_classifier(), "classifier"), text),
}


def made(name):
    torch.manual_seed(0)
    make, data = MODELS[name]
    return make().double(), data()


def without_gradient(model):
    """The biases of keys; they add a constant to all scores, so their true gradient is zero."""
    return {name for name in model if "key" in name and name.endswith("bias")}


@pytest.mark.parametrize("name", MODELS)
def test_stacked_clients_equal_clients_one_by_one(name):
    module, federation = made(name)
    cohorts = THREE_COHORTS[:2]
    wanted, found = (
        play(build("fedavg"), federation, module, cohorts, chunk=chunk, batch_size=8)
        for chunk in (1, 10)
    )
    assert not found.engine.network.unstackable
    assert distance(found.model, wanted.model, without_gradient(wanted.model)) <= 1e-9
    # Dropout has an effect: without it the model differs.
    for layer in module.modules():
        for rate in ("p", "dropout", "dropout_prob", "attention_dropout"):
            if isinstance(getattr(layer, rate, None), float):
                setattr(layer, rate, 0.0)
    if name != "cnn":  # its rates are in its code
        plain = play(build("fedavg"), federation, module, cohorts, chunk=1, batch_size=8).model
        assert distance(plain, wanted.model, without_gradient(plain)) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_is_that_of_the_module_itself(name):
    """Nothing is dropped in evaluation, and the returned model is the evaluated one."""
    module, federation = made(name)
    run = train(federation, model=module, rounds=1, machine=FLOAT64)
    x = federation.x if federation.x.dtype == torch.int64 else federation.x.double()
    output = run.model()(x)
    found = run.trainer.engine.network.apply(
        run.trainer.global_model, x, Forward(train=False)
    ).output
    torch.testing.assert_close(getattr(output, "logits", output), found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox", "scaffold", "ditto", "qffl", "fftgp", "local"]
)
def test_methods_that_name_no_part_train_any_module(method):
    module, federation = made("cnn")
    if method == "fftgp":
        with pytest.raises(
            InputError,
            match="features and head separately, but Convolving has its own forward or hooks",
        ):
            train(federation, model=module, method=method, rounds=1)
        return
    run = train(federation, model=module, method=method, rounds=1, machine=FLOAT64)
    assert isinstance(run.model(0 if method in ("ditto", "local") else None), Convolving)


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedbabu", "moon"])
def test_methods_that_name_parts_need_to_know_the_head(method):
    module, federation = made("cnn")
    with pytest.raises(InputError, match='head="classifier"|features and head separately'):
        train(federation, model=module, method=method, rounds=1)
    run = train(federation, model=module, method=method, head="fc2", rounds=2, machine=FLOAT64)
    assert run.config["model"] == {"name": "custom:Convolving", "head": "fc2"}
    personal = method in ("fedper", "fedrep")
    model = run.model(3 if personal else None)
    assert isinstance(model, Convolving)
    assert isinstance(model.fc2, nn.Linear)
    if personal:
        own = run.trainer.selected().own
        assert sorted(own) == ["head.bias", "head.weight"]
        torch.testing.assert_close(model.fc2.weight.detach(), own["head.weight"][3])


@pytest.mark.parametrize("method", ["bgp", "client2vec", "fedcrc", "fediir", "grace", "harmofl"])
def test_methods_that_compute_with_z_train_a_divided_module(method):
    module, federation = made("cnn")
    with pytest.raises(InputError, match='head="classifier"'):
        train(federation, model=module, method=method, rounds=1)
    one, other = (
        train(
            federation,
            model=module,
            method=method,
            head="fc2",
            rounds=1,
            machine=Machine(device="cpu", precision="float64", chunk=chunk),
        ).trainer.selected()
        for chunk in (1, 10)
    )
    assert distance(one.shared, other.shared) <= 1e-9


def test_a_divided_module_trains_like_one_written_in_two_parts():
    """FedRep with named parts, against the same network written as features and head."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(50, 6), nn.Tanh(), nn.Linear(6, 4)]
    whole, parts = nn.Sequential(*layers), Model(nn.Sequential(*layers[:3]), layers[3])
    one, other = (
        play(build("fedrep"), images(), module.double(), THREE_COHORTS, batch_size=8).model
        for module in (with_head(whole, "3"), parts)
    )
    renamed = {name.replace("features.body.", "features."): tensor for name, tensor in one.items()}
    assert distance(renamed, other) == 0


class LogProbabilities(Convolving):
    """A network that processes the output of its last layer."""

    def forward(self, x):
        return F.log_softmax(super().forward(x), 1)


def test_what_follows_the_head_is_kept_and_only_rules_that_look_at_z_are_refused():
    torch.manual_seed(0)
    module, federation = LogProbabilities(), images()
    run = train(federation, model=module, head="fc2", method="fedrep", rounds=1, machine=FLOAT64)
    assert not run.trainer.engine.network.composed
    sums = run.model(0)(federation.x.double()).exp().sum(1)
    torch.testing.assert_close(sums, torch.ones_like(sums))
    with pytest.raises(
        InputError, match="features and head separately, but LogProbabilities has its own"
    ):
        train(federation, model=module, head="fc2", method="moon", rounds=1)


def test_a_run_with_a_head_is_loaded_and_resumed(tmp_path):
    module, federation = made("vit")
    how = {
        "model": module,
        "head": "classifier",
        "method": "fedper",
        "machine": FLOAT64,
        "rounds": 2,
    }
    run = train(federation, out=tmp_path / "run", **how)
    again = train(federation, out=tmp_path / "run", resume=True, **how)
    assert again.summary == run.summary
    loaded, there = load(tmp_path / "run", client=2, module=module), run.model(2)
    assert type(loaded) is type(module)
    x = federation.x.double()
    torch.testing.assert_close(loaded(x).logits, there(x).logits)
    with pytest.raises(
        InputError, match="model.head is 'classifier' there and 'vit.layernorm' here"
    ):
        train(federation, out=tmp_path / "run", resume=True, **{**how, "head": "vit.layernorm"})


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ("clasifier", "unknown head 'clasifier' in the model Convolving"),
        ("", "head must be the name of a layer"),
        ("conv2", "did you mean 'conv'"),
    ],
)
def test_a_head_that_is_not_there_is_refused(head, says):
    with pytest.raises(InputError, match=says):
        train(images(), model=Convolving(), head=head, rounds=1)


def test_a_head_that_is_never_called_or_of_a_named_model_is_refused():
    module = Convolving()
    module.unused = nn.Linear(2, 2)
    with pytest.raises(InputError, match="Convolving does not call its layer 'unused'"):
        train(images(), model=module, head="unused", rounds=1)
    with pytest.raises(
        InputError, match="head='fc2' is valid only with a module, but the model is 'mlp'"
    ):
        train(images(), model="mlp", head="fc2", rounds=1)


class WithMask(nn.Module):
    """A BERT that ignores tokens of padding, with a mask of two or four dimensions."""

    def __init__(self, axes):
        super().__init__()
        self.bert, self.axes = text_classifier(), axes

    def forward(self, ids):
        mask = ids.ne(0)
        return self.bert(ids, attention_mask=mask[:, None, None] if self.axes == 4 else mask).logits


def test_a_mask_of_four_dimensions_lets_clients_with_padded_texts_be_stacked():
    runs = []
    for axes, stacks in ((2, False), (4, True)):
        torch.manual_seed(0)
        how = {"head": "bert.classifier", "method": "fedper", "rounds": 1, "machine": FLOAT64}
        run = train(text(), model=WithMask(axes).double(), **how)
        assert (run.trainer.engine.chunk > 1) == stacks
        runs.append(run.trainer.selected().shared)
    assert distance(runs[1], runs[0], without_gradient(runs[0])) <= 1e-9


class Several(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.layer, self.made = nn.Linear(50, 4), output

    def forward(self, x):
        return self.made(self.layer(x.flatten(1)))


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (lambda y: (y, None), r"returns a tuple; .* such as output\[0\]"),
        (lambda y: {"out": y, "aux": y}, r"returns a dict; .* such as output\['out'\]"),
        (lambda y: None, "returns a NoneType; valid: one tensor"),
    ],
)
def test_outputs_without_a_tensor_are_refused_with_the_change_that_helps(output, says):
    with pytest.raises(InputError, match=says):
        train(images(), model=Several(output), rounds=1)


class Branching(nn.Module):
    """A module with control flow that depends on values."""

    def __init__(self, condition):
        super().__init__()
        self.layer, self.condition = nn.Linear(50, 4), condition

    def forward(self, x):
        y = self.layer(x.flatten(1))
        return y.tanh() if self.condition(y) else y


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        (lambda y: y.abs().max() < 1e9, "it has an if or a loop that depends on values"),
        (lambda y: y.abs().max().item() < 1e9, r"it calls .item\(\), float\(\) or similar"),
    ],
)
def test_a_module_that_cannot_be_stacked_is_trained_one_client_at_a_time(condition, says):
    torch.manual_seed(0)
    module, federation = Branching(condition), images()
    run = train(federation, model=module, rounds=1, machine=FLOAT64)
    assert run.config["resolved"]["chunk"] == 1
    torch.manual_seed(0)
    always = Branching(lambda y: True)
    stacked = train(
        federation,
        model=always,
        rounds=1,
        machine=Machine(device="cpu", precision="float64", chunk=10),
    )
    assert distance(run.trainer.global_model, stacked.trainer.global_model) <= 1e-9
    with pytest.raises(
        InputError, match=f"machine.chunk is 4, but the model cannot be called .* {says}"
    ):
        train(federation, model=module, rounds=1, machine=Machine(device="cpu", chunk=4))


def test_dropout_is_off_where_a_module_does_not_move():
    """The head is trained on features in evaluation mode, so functional dropout in them is off."""
    module, federation = made("cnn")
    network = play(
        build("fedavg"), federation, with_head(module, "fc2"), THREE_COHORTS[:1]
    ).engine.network
    x, params = federation.x[:3].double(), network.initial()
    forward = Forward(train=True, key=torch.tensor(3))
    resting = network.apply(params, x, Forward(train=False)).output
    assert not torch.equal(network.apply(params, x, forward).output, resting)
    network.rest_unless(lambda name: name.startswith("head."))
    assert torch.equal(network.apply(params, x, forward).output, resting)
    network.rest_unless(lambda name: name.startswith("features."))
    assert not torch.equal(network.apply(params, x, forward).output, resting)


def test_parts_draw_the_same_numbers_alone_and_in_a_pass_of_the_whole():
    module, federation = made("cnn")
    network = play(
        build("fedavg"), federation, with_head(module, "fc1"), THREE_COHORTS[:1]
    ).engine.network
    assert isinstance(network.module, Headed)
    assert not network.composed  # the network goes on after fc1
    module, federation = made("bert with a head")
    network = play(build("fedavg"), federation, module, THREE_COHORTS[:1]).engine.network
    assert network.composed
    x, params, forward = (
        federation.x[:4],
        network.initial(),
        Forward(train=True, key=torch.tensor(3)),
    )
    whole = network.apply(params, x, forward)
    z = network.apply(params, x, forward, "features").z
    assert torch.equal(z, whole.z)
    assert torch.equal(network.apply(params, z, forward, "head").output, whole.output)


def test_a_rule_of_the_server_and_clients_sees_groups_of_any_module():
    """AFL and GIFAIR need reports of losses, which any module gives."""
    module, federation = made("gru")
    for method in ("afl", "gifair"):
        run = train(federation, model=module, method=method, rounds=1, machine=FLOAT64)
        assert np.isfinite(run.trainer.global_model["classifier.bias"].numpy()).all()
