"""FedSAM: steps by hand, rounds against plain PyTorch, its limits, and refused values."""

from __future__ import annotations

import pytest

from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.optimizers import Sgd
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.five_clients import CHUNKS, COHORTS, SIZES
from tests.engine.small_models import NOISE, mlp, normalised
from tests.methods.decoupled import played
from tests.methods.sharpness import by_hand
from tests.rounds import play, scalar, targets


@CHUNKS
@pytest.mark.parametrize("make", [mlp, normalised], ids=["mlp", "bn"])
@pytest.mark.parametrize("eta", [None, 0.3], ids=["sam", "asam"])
def test_rounds_equal_plain_pytorch(eta, make, chunk):
    options = {} if eta is None else {"adaptive": True, "eta": eta}
    found = played(build("fedsam", rho=0.4, **options), make(), chunk=chunk)
    assert (
        distance(
            found.model, by_hand(make(), images(sizes=SIZES), COHORTS, rho=0.4, eta=eta), NOISE
        )
        <= 1e-9
    )


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_step_by_hand(chunk):
    """The loss is (w − t)², so a client's step goes to w − 2 η (w + ρ sign(w − t) − t)."""
    how = {"steps": 1, "chunk": chunk, "optimizer": Sgd(lr=0.1)}
    found = play(
        build("fedsam", rho=0.2), targets(3.0, -1.0), scalar(0.5), [[0, 1]], **how
    ).updates[0]
    wanted = [0.5 - 0.2 * (0.5 - 0.2 - 3.0), 0.5 - 0.2 * (0.5 + 0.2 + 1.0)]
    assert found.params["head.weight"].flatten().tolist() == pytest.approx(wanted, abs=1e-14)
    assert found.reports["train_loss"].tolist() == pytest.approx([2.5**2, 1.5**2], abs=1e-14)


def test_a_client_at_its_minimum_stays_there():
    found = play(
        build("fedsam"), targets(0.5, 2.0), scalar(0.5), [[0, 1]], steps=2, optimizer=Sgd(lr=0.1)
    )
    first, second = found.updates[0].params["head.weight"].flatten().tolist()
    assert first == 0.5
    assert second > 0.5


def test_rho_zero_is_fedavg():
    assert (
        distance(played(build("fedsam", rho=0.0), mlp()).model, played("fedavg", mlp()).model)
        <= 1e-12
    )


@pytest.mark.parametrize("option", ["rho", "eta"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_bad_values_are_refused(option, value):
    with pytest.raises(
        InputError, match=rf"fedsam\.{option} must be a finite number of at least 0"
    ):
        build("fedsam", **{option: value})
