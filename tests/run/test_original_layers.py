"""Trained models have the layers of the module that was given, and work without Equipoise."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from equipoise import Evaluation, load, train
from equipoise.errors import InputError
from equipoise.models.layers import convert
from tests.engine.federations import images, text
from tests.engine.own_models import Encoder, Reader
from tests.run.small import Stop, measure, rows_of, stop_after

SPLITS = (0.6, 0.2, 0.2)


class Pooling(nn.Module):
    """Layers that the engine converts one by one and in a sequence, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.fixed = nn.Linear(16, 16, bias=False).requires_grad_(False)
        nn.init.eye_(self.fixed.weight)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.LayerNorm(16)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.drop(self.norm(self.fixed(self.body(x)))))


class Tied(nn.Module):
    """Embeddings with padding, whose weights are also those of the output."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5, padding_idx=0)
        self.out = nn.Linear(5, 7)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding(x).mean(1))


MODELS = {
    "convolutions": (Pooling, images),
    "tied": (Tied, text),
    "lstm": (lambda: Reader(nn.LSTM, batch_first=True), text),
    "gru": (lambda: Reader(nn.GRU), text),
    "transformer": (Encoder, text),
}


def made(name):
    """Return a model and data in float32."""
    torch.manual_seed(0)
    make, data = MODELS[name]
    federation = data()
    x = federation.x.float() if federation.x.is_floating_point() else federation.x
    return make, federation, x


def classes_of(module):
    return [type(layer) for layer in module.modules()]


@pytest.mark.parametrize("name", MODELS)
def test_a_trained_module_has_its_own_layers_and_the_same_outputs(name, tmp_path):
    make, federation, x = made(name)
    module = make()
    run = train(federation, model=module, rounds=2, out=tmp_path / "run")
    for trained in (run.model(), load(tmp_path / "run", module=module)):
        assert classes_of(trained) == classes_of(module)
        assert repr(trained) == repr(module)
        assert not torch.equal(trained(x), copy.deepcopy(module).eval()(x))
        # The engine's own layers compute the same, in the same order.
        assert torch.equal(trained(x), convert(copy.deepcopy(trained)).eval()(x))
        fresh = make()
        assert not fresh.load_state_dict(trained.state_dict(), strict=True).missing_keys
        if name == "convolutions":
            # Frozen tensors are not trained, so they are those of the module.
            assert torch.equal(trained.fixed.weight, module.fixed.weight)
        assert torch.equal(fresh.eval()(x), trained(x))
        assert not trained.training
    if name == "tied":
        assert trained.out.weight is trained.embedding.weight


def test_a_count_of_batches_is_that_of_the_given_module(tmp_path):
    module = Pooling()
    module.body[1].num_batches_tracked += 5
    run = train(images(), model=module, rounds=1, out=tmp_path / "run")
    for trained, count in ((run.model(), 5), (load(tmp_path / "run", module=Pooling()), 0)):
        assert trained.body[1].num_batches_tracked == count
        assert not torch.equal(trained.body[1].running_mean, module.body[1].running_mean)


@pytest.mark.parametrize(
    ("method", "head"), [("ditto", None), ("fedper", "fc"), ("fedbn", None), ("local", None)]
)
def test_personal_and_local_models_have_their_own_layers(method, head, tmp_path):
    federation, module = images(splits=SPLITS), Pooling()
    how = {"model": module, "head": head, "method": method, "rounds": 2, "out": tmp_path / "run"}
    how["evaluation"] = Evaluation(keep_local=True)
    with pytest.raises(Stop):
        train(federation, on_round=stop_after(1), **how)
    run = train(federation, resume=True, **how)
    x = federation.x.float()
    outputs = []
    for client in (4, 9):
        pairs = (
            (run.model(client), load(tmp_path / "run", client, module=module)),
            (run.local_model(client), load(tmp_path / "run", client, local=True, module=module)),
        )
        for given, loaded in pairs:
            assert classes_of(given) == classes_of(loaded) == classes_of(module)
            assert torch.equal(given(x), loaded(x))
            Pooling().load_state_dict(given.state_dict(), strict=True)
        outputs.append(run.model(client)(x))
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_every_client_has_a_model_with_any_method(method, tmp_path):
    federation = images(splits=SPLITS)
    run = train(federation, model=Pooling(), method=method, rounds=1, cohort=3, out=tmp_path / "r")
    own = set(run.trainer.selected().clients)
    assert (method == "ditto") == bool(own)
    shared = run.model().state_dict()
    for client in range(federation.clients):
        for given in (run.model(client), load(tmp_path / "r", client, module=Pooling())):
            same = [torch.equal(tensor, shared[n]) for n, tensor in given.state_dict().items()]
            assert all(same) == (client not in own)
    for client in (10, -1):
        with pytest.raises(InputError, match=f"client {client} does not exist; valid: 0 to 9"):
            run.model(client)


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(36, 4)

    def forward(self, x):
        return self.fc(self.drop(self.norm(self.conv(x)).relu()).flatten(1))
"""

WITHOUT_EQUIPOISE = """
import sys
sys.modules["equipoise"] = None
import torch
model, x, y = torch.load("saved.pt", weights_only=False)
assert torch.equal(model(x), y)
"""


def test_a_saved_model_is_loaded_where_equipoise_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "net_of_a_user.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    import net_of_a_user

    federation = images()
    trained = train(federation, model=net_of_a_user.Net(), head="fc", rounds=1).model()
    x = federation.x[:5].float()
    torch.save((trained, x, trained(x)), tmp_path / "saved.pt")
    subprocess.run([sys.executable, "-c", WITHOUT_EQUIPOISE], cwd=tmp_path, check=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_trained_model_is_scripted_and_exported():
    federation = images()
    trained = train(federation, model=Pooling(), rounds=1).model()
    x = federation.x[:5].float()
    assert torch.equal(torch.jit.script(trained)(x), trained(x))
    exported = torch.export.export(trained, (x,)).module()
    torch.testing.assert_close(exported(x), trained(x))


def test_a_head_cannot_be_both_named_and_replaced():
    with pytest.raises(InputError, match="moon.projection=3 replaces the head"):
        train(images(), model=Pooling(), head="fc", method={"name": "moon", "projection": 3})


def test_what_a_method_puts_before_a_divided_module_is_part_of_the_trained_model(tmp_path):
    federation, module = images(splits=SPLITS), Pooling()
    how = {"model": module, "head": "fc", "method": "harmofl", "rounds": 1}
    run = train(federation, out=tmp_path / "run", **how)
    trained, loaded = run.model(), load(tmp_path / "run", module=module)
    x = federation.x[:5].float()
    assert torch.equal(trained(x), loaded(x))
    assert not torch.equal(trained(x), trained.module(x))
    Pooling().load_state_dict(trained.module.state_dict(), strict=True)
    rows = [r for r in rows_of(tmp_path / "run") if r["client"] == 4 and r["split"] == "test"]
    loss, accuracy = measure(trained.double(), federation, "test", 4)
    assert (rows[-1]["loss"], rows[-1]["accuracy"]) == pytest.approx((loss, accuracy), rel=1e-4)
