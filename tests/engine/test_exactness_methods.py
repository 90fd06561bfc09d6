"""Every method and model: stacked clients and one client at a time give the same numbers."""

from __future__ import annotations

import pytest
import torch

from equipoise.engine import tape
from equipoise.models.convolution_layers import Convolution
from equipoise.models.passes import current_pass
from equipoise.optimizers import Sgd
from tests.engine.comparison import distance
from tests.engine.every_method import PAIRS, models_after, skipped, trained_by
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.plain_loop import federated_averaging
from tests.engine.small_models import single_numbers
from tests.rounds import engine_run


@pytest.mark.parametrize(("method", "what"), PAIRS)
def test_stacked_equals_one_by_one(method, what, monkeypatch):
    """Stacked clients use tapes from the third step of a shape on, which single ones do not."""
    monkeypatch.setattr(tape, "RUNS_BEFORE", 0)
    wanted = trained_by(method, what, chunk=1)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in wanted.values())
    # Frozen modules take the samples of all stacked clients as one batch, so the number of clients
    # affects rounding.
    for chunk in (10, 3) if what == "prompts" else (10,):
        earlier, found = models_after((2, 3), method, what, chunk=chunk, replay=True)
        assert distance(found, wanted, skipped(wanted, what)) <= 1e-9
        # A round earlier the models are far away: the compared numbers are not the initial ones.
        assert distance(earlier, wanted, skipped(wanted, what)) > 1e-5


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("fedmix", "images"),
        ("fedmix", "images, own statistics"),
        *((name, "images") for name in ("fedavg", "fediir", "fedsam", "harmofl", "moon")),
        ("perfedavg, hessian", "segmentation"),
    ],
)
def test_convolutions_by_patches_give_the_same_numbers(method, what, monkeypatch):
    """As on a GPU without Triton, or in float64, where tests without a GPU do not come."""
    wanted = trained_by(method, what, chunk=10)
    called = []

    def in_groups(layer, x):
        stacked = current_pass().stacked
        called.append(stacked)
        return not stacked or layer.groups > 1

    monkeypatch.setattr(Convolution, "_in_groups", in_groups)
    found = trained_by(method, what, chunk=10)
    assert any(called)
    assert distance(found, wanted, skipped(wanted, what)) <= 1e-9


@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_single_numbers_equal_the_plain_loop(chunk):
    how = {"batch_size": 8, "epochs": 2, "clip": 0.5}
    wanted = federated_averaging(
        single_numbers(),
        images(),
        THREE_COHORTS,
        seed=5,
        make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
        **how,
    )
    optimizer = Sgd(lr=0.1, momentum=0.5)
    found = engine_run(
        single_numbers(), images(), THREE_COHORTS, chunk=chunk, optimizer=optimizer, **how
    )
    assert found["head.temperature"].shape == ()
    assert abs(found["head.temperature"].item() - 1.5) > 1e-3
    assert distance(found, wanted) <= 1e-9
