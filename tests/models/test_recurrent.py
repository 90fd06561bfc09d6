"""The next-character model: equal to PyTorch's LSTM, alone, stacked, and in the engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from equipoise import train
from equipoise.data.cache import MappedArray
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.methods import build as build_method
from equipoise.models import build, defaults
from equipoise.models.recurrent import Embedding, Lstm, charlstm
from equipoise.optimizers import Sgd
from tests.rounds import play


def numbers(*shape, high, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, high, shape))


class Theirs(nn.Module):
    """The same model with PyTorch's layers."""

    def __init__(self, vocabulary, classes, embedding, hidden, layers):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


def pair(*, length, vocabulary=11, classes=11, embedding=3, hidden=6, layers=2):
    """Our model and PyTorch's with the same parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        theirs = Theirs(vocabulary, classes, embedding, hidden, layers).double()
    ours = charlstm(
        (length,), classes, embedding=embedding, hidden=hidden, layers=layers, vocabulary=vocabulary
    ).double()
    ours.features[0].load_state_dict(theirs.embedding.state_dict())
    ours.features[1].load_state_dict(theirs.lstm.state_dict())
    ours.head.load_state_dict(theirs.head.state_dict())
    return ours, theirs


@pytest.mark.parametrize(
    "sizes", [{"hidden": 256, "embedding": 8, "vocabulary": 80, "classes": 80}, {"classes": 5}]
)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("stacked", [False, True])
def test_outputs_and_gradients_are_those_of_pytorchs_lstm(stacked, layers, sizes):
    """A single client uses PyTorch's own loop, stacked ones matrix products."""
    ours, theirs = pair(length=80, layers=layers, **sizes)
    x = numbers(4, 80, high=sizes.get("vocabulary", 11))
    y = numbers(4, high=sizes["classes"])
    parameters = dict(ours.named_parameters())
    if stacked:
        alone = {name: p.unsqueeze(0) for name, p in parameters.items()}
        found = vmap(lambda given: functional_call(ours, given, (x,)))(alone).squeeze(0)
    else:
        found = ours(x)
    wanted = theirs(x)
    assert float((found - wanted).detach().abs().max()) < 1e-12
    ours_by_order, theirs_by_order = (
        torch.autograd.grad(nn.functional.cross_entropy(output, y), list(of))
        for output, of in ((found, parameters.values()), (wanted, theirs.parameters()))
    )
    for mine, other in zip(ours_by_order, theirs_by_order, strict=True):
        assert float((mine - other).abs().max()) < 1e-12
        assert float(other.abs().max()) > 1e-9


def test_a_single_client_in_float32_has_the_outputs_of_stacked_ones():
    layer, x = Lstm(8, 64, layers=2), torch.randn(5, 20, 8)
    alone = {name: p.detach().unsqueeze(0) for name, p in layer.named_parameters()}
    stacked = vmap(lambda given: functional_call(layer, given, (x,)))(alone)[0]
    assert float((layer(x) - stacked).detach().abs().max()) < 1e-6


@pytest.mark.parametrize("stacked", [False, True])
def test_one_step_by_hand(stacked):
    layer = Lstm(1, 1).double()
    with torch.no_grad():
        for name, values in {
            "weight_ih_l0": [[1.0], [2.0], [3.0], [4.0]],
            "weight_hh_l0": [[0.5], [0.25], [-0.5], [1.0]],
            "bias_ih_l0": [0.1, 0.2, 0.3, 0.4],
            "bias_hh_l0": [0.0, 0.0, 0.1, 0.0],
        }.items():
            getattr(layer, name).copy_(torch.tensor(values, dtype=torch.float64))

    def sigmoid(value):
        return 1 / (1 + math.exp(-value))

    output = cell = 0.0
    for value in (0.3, -0.2):
        enter = sigmoid(value + 0.5 * output + 0.1)
        keep = sigmoid(2 * value + 0.25 * output + 0.2)
        new = math.tanh(3 * value - 0.5 * output + 0.4)
        leave = sigmoid(4 * value + output + 0.4)
        cell = keep * cell + enter * new
        output = leave * math.tanh(cell)
    x = torch.tensor([[[0.3], [-0.2]]], dtype=torch.float64)
    found = vmap(layer)(x.unsqueeze(0)) if stacked else layer(x)
    assert found.item() == pytest.approx(output, rel=1e-12)


def test_embedding_is_a_look_up():
    layer = Embedding(7, 3)
    x = numbers(2, 5, high=7)
    assert torch.equal(layer(x), layer.weight[x])


def test_counts():
    # The embedding, four gates in each layer with two biases, the dense layer.
    wanted = 80 * 8 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + 256 * 80 + 80
    assert sum(p.numel() for p in charlstm((80,), 80).parameters()) == wanted == 819_920


def test_layers_begin_as_pytorchs_do():
    layer = Lstm(8, 64, layers=2)
    with torch.random.fork_rng():
        theirs = nn.LSTM(8, 64, num_layers=2)
    assert {n: p.shape for n, p in layer.named_parameters()} == {
        n: p.shape for n, p in theirs.named_parameters()
    }
    # Uniform from -1/8 to 1/8.
    drawn = torch.cat([p.detach().flatten() for p in layer.parameters()])
    assert float(drawn.abs().max()) <= 1 / 8
    assert float(drawn.std()) == pytest.approx(1 / 8 / math.sqrt(3), rel=0.02)


def test_seeds_decide_the_parameters():
    one, again, other = (
        build("charlstm", shape=(5,), classes=4, seed=seed, hidden=3) for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not any(
        torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def test_parts():
    model = charlstm((9,), 7, hidden=5, vocabulary=20)
    z = model.features(numbers(3, 9, high=20))
    assert z.shape == (3, 5)
    assert model.head.weight.shape == (7, 5)
    assert {name.split(".")[0] for name in model.state_dict()} == {"features", "head"}


def test_stacked_clients_match_one_client_at_a_time():
    model = charlstm((12,), 9, embedding=3, hidden=5).double()
    draw = torch.Generator().manual_seed(2)
    stacked = {
        name: p.detach() + 0.1 * torch.randn(3, *p.shape, generator=draw, dtype=torch.float64)
        for name, p in model.named_parameters()
    }
    x, y = numbers(3, 4, 12, high=9), numbers(3, 4, high=9)

    def loss(parameters, x, y):
        return nn.functional.cross_entropy(functional_call(model, parameters, (x,)), y)

    losses, gradients = vmap(loss)(stacked, x, y), vmap(grad(loss))(stacked, x, y)
    for k in range(3):
        mine = {name: p[k].clone().requires_grad_() for name, p in stacked.items()}
        alone = loss(mine, x[k], y[k])
        alone.backward()
        assert losses[k].item() == pytest.approx(alone.item(), abs=1e-12)
        for name, p in mine.items():
            torch.testing.assert_close(gradients[name][k], p.grad, rtol=1e-9, atol=1e-12)


def test_the_engine_trains_text_stacked_and_one_by_one_as_a_plain_loop_does():
    """One full-batch round: the new model is the mean, by size, of plain PyTorch's models."""
    sizes = [6, 3, 8, 5]
    x, y = numbers(22, 10, high=9), numbers(22, high=9, seed=1)
    clients = np.repeat(np.arange(4), sizes)
    federation = Federation.from_arrays(x, y, clients=clients, splits=(1.0, 0.0, 0.0), classes=9)
    assert federation.x.dtype == torch.int64
    model = build(
        "charlstm", shape=federation.shape, classes=federation.outputs, embedding=3, hidden=5
    ).double()
    wanted = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for client, size in enumerate(sizes):
        mine = torch.from_numpy(clients == client)
        parameters = dict(model.named_parameters())
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        for (name, p), step in zip(
            parameters.items(), torch.autograd.grad(loss, parameters.values()), strict=True
        ):
            wanted[name] += size / 22 * (p.detach() - 0.5 * step)
    for chunk in (1, 3, 4):
        settings = {"chunk": chunk, "batch_size": 8, "optimizer": Sgd(lr=0.5)}
        found = play(build_method("fedavg"), federation, model, [range(4)], **settings).model
        for name, p in wanted.items():
            torch.testing.assert_close(found[name], p, rtol=1e-9, atol=1e-12)


FLOATS = (
    "model 'charlstm' needs samples of whole numbers, the positions of characters in its "
    "vocabulary, but x holds float32"
)
OUTSIDE = "vocabulary of model 'charlstm' is 3 (by default the number of classes), but x holds "


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (0.5, FLOATS),
        (1.0, FLOATS),
        (29, OUTSIDE + "numbers from 0 to 29; valid: numbers from 0 to 2, or model.vocabulary: 30"),
        (3, OUTSIDE + "numbers from 0 to 3; valid: numbers from 0 to 2, or model.vocabulary: 4"),
        (-1, OUTSIDE + "numbers from -1 to 2; valid: numbers from 0 to 2"),
    ],
)
@pytest.mark.parametrize("on_disk", [False, True])
def test_samples_that_are_not_in_the_vocabulary_are_refused(wrong, message, on_disk, tmp_path):
    """They were looked up as zeros. A single one is found, wherever it is."""
    x, y = numbers(40, 6, high=3), torch.arange(40) % 3
    if isinstance(wrong, float):
        x = x.float()
    x[31, 4] = wrong
    if on_disk:
        blocks = (x[first : first + 8] for first in range(0, 40, 8))
        x = MappedArray.write(tmp_path / "x.npy", (40, 6), x.dtype, blocks)
    federation = Federation.from_arrays(x, y, clients=[0, 1] * 20)
    with pytest.raises(InputError) as caught:
        train(federation, model={"name": "charlstm", "hidden": 3}, rounds=1, out=tmp_path / "run")
    assert str(caught.value) == message
    assert not (tmp_path / "run").exists()


def test_samples_are_checked_where_a_method_extends_the_features():
    x, y = numbers(40, 6, high=4), torch.arange(40) % 3
    federation = Federation.from_arrays(x, y, clients=[0, 1] * 20)
    method, model = {"name": "moon", "projection": 4}, {"name": "charlstm", "hidden": 3}
    with pytest.raises(InputError, match="vocabulary of model 'charlstm' is 3"):
        train(federation, method=method, model=model, rounds=1)
    run = train(federation, method=method, model=model | {"vocabulary": 4}, rounds=1)
    assert run.summary["rounds"] == 1


def test_samples_are_checked_block_by_block(monkeypatch):
    x = torch.tensor([[1, 9], [0, 2], [12, 3], [0, 1]])
    pieces = enumerate(x.split(1))
    monkeypatch.setattr("equipoise.models.recurrent.blocks", lambda given: pieces)
    with pytest.raises(InputError, match=r"numbers from 0 to 12; .* model.vocabulary: 13$"):
        charlstm((2,), 5).check_samples(x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.bool])
def test_samples_of_every_type_of_whole_numbers_are_taken(dtype):
    x, y = numbers(12, 4, high=2).to(dtype), torch.arange(12) % 2
    federation = Federation.from_arrays(x, y, clients=[0, 1] * 6)
    model = {"name": "charlstm", "hidden": 3}
    assert train(federation, model=model, rounds=1).summary["rounds"] == 1
    more = Federation.from_arrays(x.long() + 7, y, clients=[0, 1] * 6)
    assert train(more, model=model | {"vocabulary": 9}, rounds=1).summary["rounds"] == 1


def test_learns_which_character_follows():
    """A cyclic text of five characters can be predicted without error."""
    model = build("charlstm", shape=(6,), classes=5, hidden=16, seed=0)
    x = (torch.arange(5)[:, None] + torch.arange(6)) % 5
    y = (x[:, -1] + 1) % 5
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert torch.equal(model(x).argmax(1), y)


def test_options():
    assert defaults("charlstm") == {"embedding": 8, "hidden": 256, "layers": 2, "vocabulary": None}


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (
            (1, 28, 28),
            {},
            "model 'charlstm' needs samples that are sequences of characters, got shape (1, 28, "
            "28)",
        ),
        (
            (80,),
            {"hidden": 0},
            "hidden of model 'charlstm' must be a whole number of at least 1, got 0",
        ),
        (
            (80,),
            {"layers": 1.5},
            "layers of model 'charlstm' must be a whole number of at least 1, got 1.5",
        ),
        (
            (80,),
            {"embedding": -1},
            "embedding of model 'charlstm' must be a whole number of at least 1, got -1",
        ),
        (
            (80,),
            {"vocabulary": 0},
            "vocabulary of model 'charlstm' must be a whole number of at least 1, got 0",
        ),
    ],
)
def test_refusals_name_the_value(shape, options, message):
    with pytest.raises(InputError) as caught:
        build("charlstm", shape=shape, classes=80, **options)
    assert str(caught.value) == message
