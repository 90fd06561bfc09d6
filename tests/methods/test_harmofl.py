"""HarmoFL: mean amplitudes by hand, rounds against plain PyTorch, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import equipoise
from equipoise import Evaluation, Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.models import build as build_model
from equipoise.models.base import Model
from equipoise.run.trainer import Trainer
from tests.engine.comparison import distance
from tests.engine.federations import images, text
from tests.engine.five_clients import CHUNKS, COHORTS, EVERYONE, SIZES
from tests.engine.small_models import NOISE, mlp, normalised, transformer
from tests.methods.decoupled import played
from tests.methods.sharpness import by_hand
from tests.tiny_encoder import write_encoder

SHAPE = (2, 5, 5)


def mean_amplitude(federation, weights):
    """The weighted mean over clients of the mean amplitudes of their images, with NumPy."""
    means = [
        np.abs(np.fft.fft2(federation.x[federation.train.of(client)].numpy())).mean(0)
        for client in EVERYONE
    ]
    return sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)


def harmonised(federation, weights):
    """The same federation, in which all images have the mean amplitudes."""
    spectrum = np.fft.fft2(federation.x.numpy())
    changed = np.fft.ifft2(
        mean_amplitude(federation, weights) * np.exp(1j * np.angle(spectrum))
    ).real
    return dataclasses.replace(federation, x=torch.from_numpy(changed))


def harmofl(make, **options):
    method = build("harmofl", **options)
    return method, method.extend(make(), SHAPE, seed=0)


@CHUNKS
@pytest.mark.parametrize("make", [mlp, normalised], ids=["mlp", "bn"])
def test_rounds_equal_plain_pytorch_on_harmonised_images(make, chunk):
    found = played(*harmofl(make, alpha=0.3), chunk=chunk)
    uniform = [1] * len(SIZES)
    wanted = by_hand(
        make(), harmonised(images(sizes=SIZES), uniform), COHORTS, rho=0.3, weights=uniform
    )
    model = {name: tensor for name, tensor in found.model.items() if not name.startswith("inputs")}
    assert distance(model, wanted, NOISE) <= 1e-9


@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("low", [None, 0, 1])
def test_the_amplitude_is_computed_once_and_stays(low, weights):
    found = played(*harmofl(mlp, low=low, weights=weights))
    amplitude = found.states[0].model["inputs.amplitude"]
    wanted = mean_amplitude(images(sizes=SIZES), SIZES if weights == "size" else [1] * len(SIZES))
    rows = [0, 1, 2, 3, 4] if low is None else [0, 1, -1] if low else [0]
    torch.testing.assert_close(
        amplitude, torch.from_numpy(wanted)[:, rows][:, :, : 3 if low is None else low + 1]
    )
    for state in found.states[1:]:
        assert state.model["inputs.amplitude"] is amplitude
    assert all("inputs.amplitude" not in updates.buffers for updates in found.updates)


def test_clients_that_join_do_not_change_the_amplitude():
    method, module = harmofl(mlp)
    found = played(method, module, COHORTS[:1])
    everyone = found.engine.cohort(method, np.array([0, 1]), 0)
    assert method.aggregation.admit(found.states[-1], everyone) is found.states[-1]


def test_the_stem_is_part_of_every_pass():
    method = build("harmofl")
    federation = images(shape=(1, 8, 8))
    module = method.extend(transformer(), federation.shape, seed=0)
    settings = (
        Training(rounds=1, batch_size=8),
        Machine(device="cpu", precision="float64"),
        Evaluation(every=0),
    )
    trainer = Trainer(federation, method, module, *settings, seed=0)
    trainer.run()
    assert not trainer.engine.network.encoded
    assert set(trainer.state.model) == {
        "inputs.amplitude",
        "features.prompts",
        "head.weight",
        "head.bias",
    }
    # Only the layer prevents samples from being encoded.
    engines = [StackedEngine(federation, whole, *settings[:2]) for whole in (module, transformer())]
    assert [engine.network.encoded for engine in engines] == [False, True]


@pytest.mark.parametrize("method", ["harmofl", "fedmix"])
def test_bytes_and_numbers_from_0_to_1_give_the_same(method, tmp_path):
    """With a pretrained model, which takes bytes and floats."""
    numbers = images(sizes=SIZES, shape=(3, 16, 16))
    numbers = dataclasses.replace(numbers, x=(numbers.x.sigmoid() * 255).round() / 255)
    model = {"name": "vitprompts", "source": write_encoder(tmp_path / "encoder")}
    machine = Machine(device="cpu", precision="float64")
    found, wanted = (
        equipoise.train(
            federation, method=method, model=model, machine=machine, rounds=2
        ).trainer.state.model
        for federation in (
            dataclasses.replace(numbers, x=(numbers.x * 255).round().to(torch.uint8)),
            numbers,
        )
    )
    assert distance(found, wanted) <= 1e-6


def test_a_loaded_model_holds_the_amplitude(tmp_path):
    federation = images(sizes=SIZES)
    model = build_model("mlp", shape=SHAPE, classes=4)
    run = equipoise.train(federation, method="harmofl", model=model, rounds=1, out=tmp_path / "run")
    loaded = equipoise.load(tmp_path / "run", module=model)
    assert torch.equal(loaded.inputs.amplitude, run.trainer.state.model["inputs.amplitude"].float())
    assert loaded.inputs.amplitude.min() > 0
    x = federation.x[:3].float()
    torch.testing.assert_close(loaded(x), run.model()(x))


class OwnForward(Model):
    def forward(self, x):
        return self.head(self.features(x)) * 2


def test_what_has_no_images_or_no_place_for_the_layer_is_refused():
    with pytest.raises(
        InputError,
        match=r"method 'harmofl' works on images .* has shape \(9,\); valid: a source of",
    ):
        equipoise.train(text(), method="harmofl", rounds=1)
    with pytest.raises(InputError, match="not possible for OwnForward"):
        build("harmofl").extend(OwnForward(nn.Flatten(), nn.Linear(50, 4)), SHAPE, 0)
    with pytest.raises(InputError, match="HarmoFL needs amplitude, which FedAvg does not provide"):
        build("fedavg", local="harmofl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -0.1}, r"harmofl\.alpha must be a finite number of at least 0"),
        ({"low": -1}, r"harmofl\.low must be a whole number of at least 0"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        build("harmofl", **options)
