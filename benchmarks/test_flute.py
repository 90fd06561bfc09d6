"""FLUTE's jobs in tiny form: sizes, data and the report."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks.flute import WORKLOADS, carry_out, federation_of, main, sizes
from benchmarks.machine import Rates
from benchmarks.text import NextCharacters
from equipoise import Machine
from equipoise.errors import InputError
from equipoise.models import build


def tiny(name: str, **changes: object) -> object:
    small = {"clients": 12, "train": 60, "test": 15, "rounds": 6, "test_every": 2, "cohort": 3}
    if name == "shakespeare":
        small |= {"shape": (5,), "options": {"everywhere": True, "hidden": 4, "embedding": 2}}
    else:
        small |= {"shape": (1, 8, 8)}
    return dataclasses.replace(WORKLOADS[name], **(small | changes))


@pytest.mark.parametrize("name", WORKLOADS)
def test_clients_are_as_many_and_as_unequal_as_said(name: str) -> None:
    job = WORKLOADS[name]
    own = sizes(job.train, job.clients, job.spread)
    assert own.sum() == job.train
    assert own.min() >= 1
    assert own.std() / own.mean() == pytest.approx(job.spread, rel=0.1)


def test_the_models_are_flutes() -> None:
    counts = {
        name: sum(
            p.numel()
            for p in build(
                job.model, shape=job.shape, classes=job.classes, **job.options
            ).parameters()
        )
        for name, job in WORKLOADS.items()
    }
    # 320 + 18,496 + 1,179,776 + 128 x 62 + 62, as their README's CNN; and their LSTM's layers.
    lstm = 90 * 8 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + 256 * 90 + 90
    assert counts == {"femnist": 1_206_590, "shakespeare": lstm}


def test_texts_predict_the_next_character() -> None:
    federation = federation_of(tiny("shakespeare"))
    assert torch.equal(federation.x[:, 1:], federation.y[:, :-1])
    assert federation.train.sizes.sum() == 60
    assert set(federation.test.indices) == set(range(60, 75))


def test_the_loss_of_texts_leaves_padding_out() -> None:
    output, y = torch.randn(2, 3, 5), torch.tensor([[4, 2, 0], [1, 0, 0]])
    scores = output.double().log_softmax(2).numpy()
    wanted = [-(scores[0, 0, 4] + scores[0, 1, 2]) / 2, -scores[1, 0, 1]]
    np.testing.assert_allclose(NextCharacters().loss(output, y), wanted, rtol=1e-5)
    best = torch.nn.functional.one_hot(torch.tensor([[4, 1, 0], [1, 0, 0]]), 5).float()
    assert NextCharacters().metrics(best, y)["accuracy"].tolist() == [0.5, 1.0]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_tiny_job(name: str) -> None:
    rates = Rates(1e9, 1e9, "here", "float32")
    whole = carry_out(tiny(name), Machine(device="cpu"), rates=rates)
    assert not whole["extrapolated"]
    assert whole["limit_seconds"] > 0
    part = carry_out(tiny(name, rounds=100), Machine(device="cpu"), rounds=6)
    assert part["extrapolated"]
    assert part["seconds"] > 10 * part["median_round"]


def test_bad_input_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["femnits"]) == 2
    assert "did you mean 'femnist'" in capsys.readouterr().err
    with pytest.raises(InputError, match="--rounds is 1; valid: 2 to 6"):
        carry_out(tiny("femnist"), Machine(device="cpu"), rounds=1)
    with pytest.raises(InputError, match="3 samples are too few for 4 clients"):
        sizes(3, 4, 0.5)
