"""Which tensors are frozen, and that frozen tensors are not trained, sent or saved."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from equipoise import Machine, tasks, train
from equipoise.engine.model_trial import try_out
from equipoise.engine.network import Network
from equipoise.engine.slots import frozen_digest, is_frozen_digest, slots_of
from equipoise.errors import InputError
from equipoise.methods import build as build_method
from equipoise.models.base import Model
from equipoise.models.frozen import Frozen
from equipoise.models.passes import Forward
from equipoise.tree import digest as digest_of
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.small_models import transformer
from tests.rounds import kept_by, play

MOVING = {"features.prompts", "head.weight", "head.bias"}


class Shift(nn.Module):
    """Adds a buffer that is saved with the model, one that is not, and one of integers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("saved", torch.full((1,), 0.5))
        self.register_buffer("derived", torch.full((1,), 0.25), persistent=False)
        self.register_buffer("places", torch.arange(6))

    def forward(self, x):
        return x[:, self.places] + self.saved + self.derived


def fixed(layer):
    return layer.requires_grad_(False)


def mixed():
    """Every kind of tensor, frozen and not."""
    torch.manual_seed(0)
    frozen_norm = nn.BatchNorm2d(4)
    nn.init.normal_(frozen_norm.running_mean)
    features = nn.Sequential(
        fixed(nn.Conv2d(2, 4, 3)),  # 0: parameters with requires_grad off
        fixed(frozen_norm),  # 1: a layer whose parameters are all frozen: so are its statistics
        nn.Conv2d(4, 3, 2),  # 2
        nn.BatchNorm2d(3, affine=False),  # 3: nothing around its statistics is frozen
        Frozen(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))),  # 4
        nn.Sequential(nn.Flatten(), nn.Linear(12, 6), Shift()),  # 5
    )
    return Model(features, nn.Linear(6, 4)).double()


MIXED = {
    "features.2.weight",
    "features.2.bias",
    "features.3.running_mean",
    "features.3.running_var",
    "features.5.1.weight",
    "features.5.1.bias",
    "features.5.2.saved",
    "head.weight",
    "head.bias",
}
# The bias before BatchNorm has a gradient of zero, and a buffer that is only read does not change.
UNCHANGED = {"features.2.bias", "features.5.2.saved"}


def tensors_of(module):
    return dict((*module.named_parameters(), *module.named_buffers()))


def copies_of(module):
    return {name: tensor.detach().clone() for name, tensor in tensors_of(module).items()}


def test_what_is_frozen_is_not_in_the_tree():
    network = Network(mixed(), tasks.build("classification"), dtype=torch.float64)
    assert set(network.initial()) == MIXED
    assert network.buffers == {
        "features.3.running_mean",
        "features.3.running_var",
        "features.5.2.saved",
    }
    assert network.frozen_digest is not None


@pytest.mark.parametrize("chunk", [1, 4])
def test_what_is_frozen_is_neither_stacked_nor_sent_nor_changed(chunk):
    module = mixed()
    before = copies_of(module)
    played = play(
        build_method("fedavg"), images(), module, THREE_COHORTS, chunk=chunk, batch_size=8
    )
    size = 8 * sum(before[name].numel() for name in MIXED)
    for cohort, updates in zip(played.cohorts, played.updates, strict=True):
        assert set(updates.params) | set(updates.buffers) == MIXED
        assert all(
            len(stack) == len(cohort.ids)
            for stack in (*updates.params.values(), *updates.buffers.values())
        )
        assert cohort.bytes_down == len(cohort.ids) * size
        assert cohort.bytes_up == len(cohort.ids) * (size + 2 * 8)
    assert set(played.model) == MIXED
    for name in MIXED:
        assert torch.allclose(played.model[name], before[name]) == (name in UNCHANGED), name
    # The given module keeps all its tensors, and the network's copy all that are frozen.
    given, own = tensors_of(module), tensors_of(played.engine.network.module)
    for name, tensor in before.items():
        assert torch.equal(given[name], tensor), name
        if name not in MIXED and name in own:
            assert torch.equal(own[name], tensor), name
    assert set(before) - MIXED - set(own) <= {
        f"features.{norm}.num_batches_tracked" for norm in (1, 3)
    }


def test_stacked_clients_share_frozen_tensors_exactly():
    wanted, *others = (
        play(
            build_method("fedavg"), images(), mixed(), THREE_COHORTS, chunk=chunk, batch_size=8
        ).model
        for chunk in (1, 3, 10)
    )
    for found in others:
        assert distance(found, wanted, {"features.2.bias"}) <= 1e-9


def test_a_frozen_norm_normalises_by_the_statistics_it_came_with():
    """Also while the model is tested, and while everything around it is trained."""
    module = mixed()
    x = images().x[:5]
    with torch.no_grad():
        wanted = module.features[:2].eval()(x)
    module.train()
    network = play(
        build_method("fedavg"), images(), module, THREE_COHORTS[:1], batch_size=8
    ).engine.network
    seen = []
    network.module.features[2].register_forward_hook(
        lambda layer, inputs, output: seen.append(inputs[0].detach())
    )
    network.apply(network.initial(), x, Forward(train=True))
    torch.testing.assert_close(seen[0], wanted, rtol=1e-12, atol=1e-12)


def test_dropout_in_features_that_are_frozen_drops_nothing():
    def model(*dropout):
        torch.manual_seed(0)
        return Model(
            nn.Sequential(nn.Flatten(), fixed(nn.Linear(50, 6)), *dropout), nn.Linear(6, 4)
        ).double()

    found, wanted, dropped = (
        play(build_method("fedavg"), images(), module, THREE_COHORTS, batch_size=8).model
        for module in (
            model(nn.Dropout(0.5)),
            model(),
            Model(nn.Sequential(nn.Flatten(), nn.Dropout(0.5)), nn.Linear(50, 4)).double(),
        )
    )
    assert distance(found, wanted) == 0
    # If nothing is frozen, dropout is applied to the inputs of the trained part.
    still = play(
        build_method("fedavg"),
        images(),
        Model(nn.Flatten(), nn.Linear(50, 4)).double(),
        THREE_COHORTS,
        batch_size=8,
    ).model
    assert distance(dropped, still) > 1e-3


class Centred(nn.Module):
    """A stem without parameters, whose buffers are saved with the model."""

    def __init__(self, mean):
        super().__init__()
        self.register_buffer("mean", torch.tensor([mean]))
        self.norm = nn.BatchNorm2d(2, affine=False)

    def forward(self, x):
        return self.norm(x - self.mean)


def test_a_stem_is_frozen_as_a_whole():
    """Its layers have no parameters that could be frozen."""
    model = Model(nn.Sequential(nn.Flatten(), nn.Linear(50, 6)), nn.Linear(6, 4), stem=Centred(0.5))
    assert {slot.name for slot in slots_of(model) if slot.frozen} == {
        "stem.mean",
        "stem.norm.running_mean",
        "stem.norm.running_var",
    }
    assert set(Network(model, tasks.build("classification")).initial()) == {
        f"{layer}.{leaf}" for layer in ("features.1", "head") for leaf in ("weight", "bias")
    }


@pytest.mark.parametrize(("method", "kept"), [("local", ""), ("ditto", "personal.")])
def test_what_is_frozen_is_not_remembered(method, kept):
    played = play(
        build_method(method), images(shape=(1, 8, 8)), transformer(), [range(10)] * 2, batch_size=8
    )
    names = {kept + name for name in MOVING}
    tensors = played.engine.export()
    assert {name.removeprefix("kept/") for name in tensors if name != "clients"} == names
    first = {kept + name: tensor for name, tensor in played.engine.network.initial().items()}
    own = kept_by(played, 4, first)
    assert set(own) == names
    assert all(not torch.allclose(own[name], first[name]) for name in own)


def test_the_digest_follows_every_frozen_tensor_and_no_other():
    digest = frozen_digest(mixed())
    for name in tensors_of(mixed()):
        changed = mixed()
        with torch.no_grad():
            tensors_of(changed)[name].add_(1)
        # Nothing reads how many batches BatchNorm has seen.
        frozen = name not in MIXED and not name.endswith("num_batches_tracked")
        assert (frozen_digest(changed) != digest) == frozen, name


class Shuffled(nn.Module):
    """Choose inputs by numbers and by a mask, which are buffers."""

    def __init__(self, order=(1, 0), mask=(True, True)):
        super().__init__()
        self.register_buffer("order", torch.tensor(order))
        self.register_buffer("mask", torch.tensor(mask))

    def forward(self, x):
        return x[..., self.order] * self.mask


@pytest.mark.parametrize("other", [Shuffled(order=(0, 1)), Shuffled(mask=(True, False))])
def test_the_digest_follows_buffers_of_integers_and_booleans(other):
    torch.manual_seed(0)
    layer = nn.Linear(2, 2)
    digest = frozen_digest(nn.Sequential(Shuffled(), layer))
    assert digest is not None
    assert frozen_digest(nn.Sequential(Shuffled(), layer)) == digest
    assert frozen_digest(nn.Sequential(other, layer)) != digest
    assert frozen_digest(nn.Sequential(layer, nn.BatchNorm1d(2))) is None


def test_hashes_of_runs_before_are_accepted():
    """They did not contain integers and booleans."""
    kept = fixed(nn.Linear(2, 2))
    module, other = (nn.Sequential(Shuffled(order), kept) for order in ((1, 0), (0, 1)))
    before = digest_of({"1.weight": kept.weight, "1.bias": kept.bias})
    assert is_frozen_digest(frozen_digest(module), module)
    assert is_frozen_digest(before, module)
    assert not is_frozen_digest(frozen_digest(other), module)
    assert not is_frozen_digest(digest_of({"1.weight": kept.weight}), module)
    assert is_frozen_digest(None, nn.Linear(2, 2))
    assert not is_frozen_digest("0" * 32, nn.Linear(2, 2))


@pytest.mark.parametrize("chunk", [1, "auto"])
def test_a_model_that_is_frozen_as_a_whole_is_refused(chunk):
    model = Model(nn.Flatten(), fixed(nn.Linear(50, 4)))
    with pytest.raises(
        InputError, match="no parameter that can be trained, .* got 1 rounds of 'fedavg'"
    ):
        train(images(), model=model, rounds=1, machine=Machine(chunk=chunk))


# ---- machine.frozen ------------------------------------------------------------------------------

PICTURES = {"shape": (1, 8, 8)}


def trained(machine, **options):
    run = train(
        images(**PICTURES),
        model={"name": "vitprompts", "patch": 4, "width": 16, "depth": 2, "heads": 2},
        machine=machine,
        rounds=3,
        batch_size=8,
        optimizer={"name": "sgd", "lr": 0.1},
        **options,
    )
    losses = [row["train_loss"] for row in run.trainer.rounds]
    return run, losses


@pytest.mark.parametrize("chunk", [1, 10])
@pytest.mark.parametrize("encode", [True, False])
def test_frozen_modules_in_bfloat16(chunk, encode):
    exact, wanted = trained(Machine(device="cpu", chunk=chunk))
    run, losses = trained(Machine(device="cpu", chunk=chunk, frozen="bfloat16", encode=encode))
    module = run.trainer.engine.network.module
    for part in (module.stem, module.features.encoder):
        assert {tensor.dtype for tensor in part.parameters()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in run.trainer.state.model.values()} == {torch.float32}
    np.testing.assert_allclose(losses, wanted, rtol=0.02)
    assert losses != wanted
    assert losses[-1] < losses[0]
    # A model that is returned to the user has the frozen weights in full precision.
    model = run.model()
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    assert torch.equal(model.stem.module.project.weight, exact.model().stem.module.project.weight)


def test_lowering_needs_frozen_modules():
    machine = Machine(device="cpu", frozen="bfloat16")
    with pytest.raises(
        InputError,
        match="lowers the precision of frozen modules, but the model has none; valid: .*vitp",
    ):
        train(images(**PICTURES), model="mlp", machine=machine, rounds=1)


@pytest.mark.parametrize("value", ["float16", "bf16", True])
def test_other_types_of_frozen_modules_are_refused(value):
    with pytest.raises(InputError, match="machine.frozen"):
        Machine(frozen=value)


class Leaning(nn.Module):
    """Adds a fraction of the batch's mean to every sample."""

    def __init__(self, share):
        super().__init__()
        self.share = share
        self.encoder = Frozen(nn.Linear(6, 5))

    def forward(self, x):
        z = self.encoder(x)
        return z + self.share * z.mean(0)


@pytest.mark.parametrize(("lowered", "share", "refused"), [
    (None, 0.0, False), (None, 0.04, True),
    (torch.bfloat16, 0.04, False), (torch.bfloat16, 1.0, True),
])  # fmt: skip
def test_frozen_modules_in_bfloat16_may_round_more(lowered, share, refused):
    """On a GPU, products of one row and of several may round differently, in each frozen layer."""
    torch.manual_seed(0)
    model = Model(Leaning(share), nn.Linear(5, 3))
    network = Network(
        model, tasks.build("classification"), torch.device("cpu"), torch.float32, None, lowered
    )
    x, y = torch.randn(7, 6), torch.zeros(7, dtype=torch.int64)
    with (
        pytest.raises(InputError, match="depends on the other samples")
        if refused
        else nullcontext()
    ):
        try_out(network, x, y, 3)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_activations_are_counted_for_any_number_of_samples(samples):
    network = Network(Model(nn.Identity(), nn.Linear(6, 3)), tasks.build("classification"))
    try_out(network, torch.randn(samples, 6), torch.zeros(samples, dtype=torch.int64), 3)
    # The outputs of both parts.
    assert (network.activations, network.fixed_activations) == (6 + 3, 0)
