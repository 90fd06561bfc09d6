"""Unusual models: they give the results of a plain PyTorch loop, or are refused."""

from __future__ import annotations

import random
from types import MethodType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

from equipoise import Machine, train
from equipoise.engine.evaluation import evaluate_shared
from equipoise.errors import InputError
from equipoise.models.base import Model
from equipoise.optimizers import optimizer_named
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images, text
from tests.engine.plain_loop import federated_averaging
from tests.rounds import engine_run

# Some operations have no batching rule; PyTorch then runs them client by client.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


class Does(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function, **buffers):
        super().__init__()
        self.function = function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.function(self, x)


def flat(*layers, inputs=50, width=12):
    """A model of images that begins and ends with a dense layer."""
    return Model(
        nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), *layers, nn.Tanh()),
        nn.Linear(width, 4),
    )


def convolving(*layers, channels=3):
    return Model(
        nn.Sequential(nn.Conv2d(2, channels, 3, padding=1), *layers, nn.Flatten()),
        nn.Linear(25 * channels, 4),
    )


def characters(*layers):
    """A model of text: nine characters, one of seven to come."""
    return Model(
        nn.Sequential(nn.Embedding(7, 5), *layers, Does(lambda layer, x: x.mean(1))),
        nn.Linear(5, 7),
    )


class FirstOutput(nn.Module):
    """A recurrent layer of which only the outputs are used."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


# ---- what is right -------------------------------------------------------------------------------


def tied():
    model = flat(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
    model.features[4].weight = model.features[2].weight
    return model


def tied_across_parts():
    model = characters()
    model.head.weight = model.features[0].weight
    return model


def same_layer_twice():
    layer = nn.Conv2d(3, 3, 3, padding=1)
    return convolving(layer, nn.Tanh(), layer)


def same_layer_under_two_parents():
    layer = nn.Conv2d(3, 3, 3, padding=1)
    return convolving(nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer))


def permuted():
    order = torch.from_numpy(np.random.default_rng(0).permutation(12))
    return flat(Does(lambda layer, x: x[:, layer.order], order=order))


def partly_fixed():
    model = convolving(nn.BatchNorm2d(3))
    for tensor in (model.features[0].weight, model.features[1].bias, model.head.bias):
        tensor.requires_grad_(False)
    return model


def padded():
    model = characters()
    model.features[0] = nn.Embedding(7, 5, padding_idx=2)
    return model


class OwnEmbedding(nn.Embedding):
    """Only an embedding, but of another class."""


def padded_otherwise():
    model = characters()
    model.features[0] = OwnEmbedding(7, 5, padding_idx=2)
    return model


class Adding(nn.Module):
    """Layers with attributes, a layer and a forward that their classes do not have."""

    def __init__(self):
        super().__init__()
        self.lstm, self.dense, self.own = (
            nn.LSTM(5, 5, batch_first=True),
            nn.Linear(5, 5),
            nn.Linear(5, 5),
        )
        self.lstm.scale, self.dense.more = 0.5, nn.Linear(5, 5)
        self.own.forward = MethodType(squashed, self.own)

    def forward(self, x):
        self.lstm.flatten_parameters()
        x = self.lstm(x)[0] * self.lstm.scale
        return self.own(self.dense(x) + self.dense.more(x))


def squashed(layer, x):
    return F.linear(x, layer.weight, layer.bias).tanh()


def hooked():
    model = convolving(nn.BatchNorm2d(3), nn.MaxPool2d(1))
    model.features[0].register_forward_hook(lambda layer, inputs, output: 3 * output)
    model.features[1].register_forward_hook(lambda layer, inputs, output: output.relu())
    model.features[2].register_forward_pre_hook(lambda layer, inputs: (inputs[0] + 0.1,))
    return model


class Renamed(nn.BatchNorm2d):
    """Only BatchNorm."""


RIGHT = {
    "tied weights": (tied, images),
    "a head tied to an embedding": (tied_across_parts, text),
    "a layer in two places": (same_layer_twice, images),
    "a layer under two parents": (same_layer_under_two_parents, images),
    "a buffer of whole numbers": (permuted, images),
    "parameters that do not train": (partly_fixed, images),
    "an embedding with padding": (padded, text),
    "an embedding of one's own": (padded_otherwise, text),
    "what was added to layers": (lambda: characters(Adding()), text),
    "hooks": (hooked, images),
    "a class derived from BatchNorm": (lambda: convolving(Renamed(3)), images),
    "weight norm": (lambda: flat(parametrizations.weight_norm(nn.Linear(12, 12))), images),
    "group norm": (lambda: convolving(nn.GroupNorm(1, 3)), images),
}


@pytest.mark.parametrize("chunk", [1, 10])
@pytest.mark.parametrize("name", RIGHT)
def test_three_rounds_equal_the_plain_loop(name, chunk):
    make, data = RIGHT[name]
    torch.manual_seed(3)
    model, federation = make().double(), data()
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    how = {"batch_size": 8, "epochs": 2}
    wanted = federated_averaging(
        model,
        federation,
        THREE_COHORTS,
        seed=5,
        make_optimizer=lambda params: torch.optim.SGD(
            [p for p in params if p.requires_grad], **options
        ),
        **how,
    )
    optimizer = optimizer_named("sgd", **options)
    found = engine_run(model, federation, THREE_COHORTS, chunk=chunk, optimizer=optimizer, **how)
    # The gradient of a bias before BatchNorm is only rounding noise.
    skip = (
        {"features.0.bias"}
        if any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
        else set()
    )
    assert distance(found, {name: wanted[name] for name in found}, skip) <= 1e-9


@pytest.mark.parametrize("chunk", [1, 10])
def test_recurrent_layers_of_pytorch_equal_the_plain_loop(chunk):
    torch.manual_seed(3)
    model, federation = characters(FirstOutput(nn.GRU(5, 5, batch_first=True))).double(), text()
    wanted = federated_averaging(
        model,
        federation,
        THREE_COHORTS[:1],
        seed=5,
        make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=8,
        epochs=1,
    )
    how = {"chunk": chunk, "batch_size": 8, "optimizer": optimizer_named("sgd", lr=0.1)}
    assert distance(engine_run(model, federation, THREE_COHORTS[:1], **how), wanted) <= 1e-9


@pytest.mark.parametrize("name", RIGHT)
def test_the_model_that_comes_back_is_the_one_that_was_evaluated(name):
    make, data = RIGHT[name]
    torch.manual_seed(3)
    federation = data()
    run = train(federation, model=make(), rounds=2, machine=Machine(precision="float64"))
    engine, model = run.trainer.engine, run.model()
    found = evaluate_shared(
        engine.network, engine.data, run.trainer.global_model, federation.train, federation.seen
    )
    x = federation.x if federation.x.dtype == torch.int64 else federation.x.double()
    losses = F.cross_entropy(model(x), federation.y, reduction="none").detach().numpy()
    wanted = [losses[federation.train.of(client)].mean() for client in federation.seen]
    np.testing.assert_allclose(found["loss"], wanted, rtol=1e-12)


def test_what_is_fixed_stays_as_it_was():
    model = partly_fixed().double()
    found = engine_run(model, images(), THREE_COHORTS, chunk=10, batch_size=8)
    for name, tensor in model.named_parameters():
        if name == "features.0.bias":  # BatchNorm subtracts it again
            continue
        assert (name in found) == tensor.requires_grad, name
        assert name not in found or not torch.allclose(found[name], tensor), name


def test_a_part_of_which_nothing_trains_is_refused():
    model = flat()
    model.head.requires_grad_(False)
    with pytest.raises(
        InputError, match="the part 'head', but the model has no trainable tensors there"
    ):
        train(images(), model=model, method="fedrep", rounds=1)


# ---- what is random ------------------------------------------------------------------------------


def stochastic_depth(layer, x):
    """Drops whole samples, as in the models of Hugging Face."""
    if not layer.training:
        return x
    return x / 0.7 * (0.7 + torch.rand((len(x), 1), dtype=x.dtype, device=x.device)).floor()


def slid(layer, x):
    """Drops in place, and returns nothing that is used."""
    y = 1 * x
    F.dropout(y, 0.5, layer.training, inplace=True)
    return y


CARRIED = {
    "dropout": lambda layer, x: F.dropout(x, 0.5, layer.training),
    "dropout in place": slid,
    "dropout of torch": lambda layer, x: torch.dropout(x, 0.5, layer.training),
    "alpha dropout": lambda layer, x: F.alpha_dropout(x, 0.5, layer.training),
    "stochastic depth": stochastic_depth,
    "bernoulli": lambda layer, x: (
        x * torch.bernoulli(torch.full_like(x, 0.5)) if layer.training else x
    ),
    "bernoulli in place": lambda layer, x: (
        x * x.new_empty(x.shape).bernoulli_(0.5) if layer.training else x
    ),
    "noise": lambda layer, x: x + 0.3 * torch.randn_like(x) if layer.training else x,
    "uniform noise": lambda layer, x: (
        x + torch.empty_like(x).uniform_(-0.3, 0.3) if layer.training else x
    ),
    "normal noise": lambda layer, x: (
        x + torch.empty_like(x).normal_(0, 0.3) if layer.training else x
    ),
}


@pytest.mark.parametrize("name", CARRIED)
def test_random_functions_are_carried_out_with_the_engines_numbers(name):
    torch.manual_seed(3)
    model = flat(Does(CARRIED[name])).double().eval()
    before = torch.get_rng_state()
    wanted, *others = (
        engine_run(model, images(), THREE_COHORTS, chunk=chunk, batch_size=8, epochs=2)
        for chunk in (1, 3, 10)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(distance(found, wanted) <= 1e-9 for found in others)
    plain = engine_run(
        flat(Does(lambda layer, x: x)).double(),
        images(),
        THREE_COHORTS,
        chunk=10,
        batch_size=8,
        epochs=2,
    )
    assert distance(plain, wanted) > 1e-3


# ---- what is refused -----------------------------------------------------------------------------


class Listed(Model):
    """A parameter that is also stored outside of all modules."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(50, 12)), nn.Linear(12, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.held = [self.scale]

    def forward(self, x):
        return super().forward(x) * self.held[0]


class Packed(nn.Module):
    """A recurrent layer with packed sequences."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(5, 5, batch_first=True)

    def forward(self, x):
        packed = pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
        return self.layer(packed)[1].transpose(0, 1)


class WithRelu(nn.BatchNorm2d):
    """A subclass of BatchNorm with another behaviour."""

    def forward(self, x):
        return super().forward(x).relu()


def drift(layer, x):
    layer.mean.mul_(0.9).add_(0.1 * x.mean())
    return x - layer.mean


def scaled_by_numpy(layer, x):
    return x * np.random.random_sample() if layer.training else x  # noqa: NPY002


def counted(layer, x):
    layer.calls = layer.calls + layer.training
    return x


def spectral():
    model = flat(nn.Linear(12, 12))
    parametrizations.spectral_norm(model.features[2])
    return model


def bounded():
    model = characters()
    model.features[0] = nn.Embedding(7, 5, max_norm=0.1)
    return model


def imaginary():
    model = flat()
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    return model


RANDOM, IN_PLACE = "draws its own random numbers", "in place in its forward pass"
BESIDE, ANOTHER = (
    "depends on the other samples of its batch",
    "the converted model gives other outputs than the original",
)
REFUSED = {
    "dropout in evaluation": (
        lambda: flat(Does(lambda layer, x: F.dropout(x, 0.5))),
        images,
        rf"{RANDOM} by torch.nn.functional.dropout, .* write F.dropout\(x, p, self.training\)",
    ),
    "attention that drops in evaluation": (
        lambda: characters(
            Does(lambda layer, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
        ),
        text,
        rf"{RANDOM} by torch.*attention, .* write dropout_p=p if self.training else 0.0",
    ),
    "noise": (
        lambda: flat(Does(lambda layer, x: x + torch.randn_like(x))),
        images,
        rf"{RANDOM} by torch.randn_like, .* call torch.randn_like only if self.training",
    ),
    "random slopes": (
        lambda: flat(nn.RReLU()),
        images,
        rf"{RANDOM} by torch.nn.functional.rrelu, .* use nn.Dropout",
    ),
    "dropout of steps before samples": (
        lambda: characters(
            Does(lambda layer, x: F.dropout(x.transpose(0, 1), 0.5, layer.training).transpose(0, 1))
        ),
        text,
        r"dropout of a sample depends on the number of samples in its batch; .*batch_first=True",
    ),
    "packed sequences": (
        lambda: characters(Packed()),
        text,
        "called with a packed sequence, .* pass the padded sequences",
    ),
    "a running mean of one's own": (
        lambda: flat(Does(drift, mean=torch.zeros(()))),
        images,
        IN_PLACE,
    ),
    "instance norm that remembers": (
        lambda: convolving(nn.InstanceNorm2d(3, track_running_stats=True)),
        images,
        IN_PLACE,
    ),
    "BatchNorm that does more": (lambda: convolving(WithRelu(3)), images, IN_PLACE),
    "spectral norm": (spectral, images, IN_PLACE),
    "bounded embeddings": (bounded, text, IN_PLACE),
    "random numbers of Python": (
        lambda: flat(Does(lambda layer, x: x * random.random() if layer.training else x)),
        images,
        f"{RANDOM}, .* use nn.Dropout",
    ),
    "random numbers of NumPy": (
        lambda: flat(Does(scaled_by_numpy)),
        images,
        f"{RANDOM}, .* use nn.Dropout",
    ),
    "a counter": (
        lambda: flat(Does(counted, calls=torch.tensor(0))),
        images,
        "changes features.2.calls in its forward pass, but all clients share this tensor",
    ),
    "samples that are changed": (
        lambda: Model(Does(lambda layer, x: x.div_(2).flatten(1)), nn.Linear(50, 4)),
        images,
        "changes its samples in place",
    ),
    "samples that look at each other": (
        lambda: flat(Does(lambda layer, x: x - x.mean(0))),
        images,
        BESIDE,
    ),
    "attention across the batch": (
        lambda: characters(nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0)),
        text,
        BESIDE,
    ),
    "parameters in a list": (Listed, images, ANOTHER),
    "complex numbers": (
        imaginary,
        images,
        "phase of the model holds complex numbers; valid: real ones",
    ),
    "shapes to come": (
        lambda: Model(nn.Flatten(), nn.LazyLinear(4)),
        images,
        "head.weight of the model has no shape yet; call the model with a sample once",
    ),
    "several outputs": (
        lambda: Model(nn.Flatten(), Does(lambda layer, x: {"logits": x})),
        images,
        "the model returns a dict; valid: one tensor",
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_out_exactly_is_refused(name, tmp_path):
    make, data, says = REFUSED[name]
    with pytest.raises(InputError, match=says):
        train(data(), model=make(), rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Squashed(Model):
    """A model with its own forward."""

    def forward(self, x):
        return self.head(3 * torch.sigmoid(self.features(x)))


def test_a_rule_that_looks_at_features_and_head_needs_a_model_made_of_them():
    def model():
        return Squashed(nn.Sequential(nn.Flatten(), nn.Linear(50, 12)), nn.Linear(12, 4))

    train(images(), model=model(), method="fedrep", rounds=1)
    with pytest.raises(
        InputError, match="features and head separately, but Squashed has its own forward or hooks"
    ):
        train(images(), model=model(), method="fedcrc", rounds=1)
    hooked = flat()
    hooked.register_forward_hook(lambda layer, inputs, output: 2 * output)
    with pytest.raises(
        InputError, match="features and head separately, but Model has its own forward or hooks"
    ):
        train(images(), model=hooked, method="fedcrc", rounds=1)
