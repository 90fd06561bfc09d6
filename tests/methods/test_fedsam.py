"""FedSAM: steps by hand, rounds against plain PyTorch, its limits, and refused values."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.optimizers import Sgd
from equipoise.random import fold
from tests.engine.by_hand import average, hand_batches, held_by, tensors
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.five_clients import CHUNKS, COHORTS, SEED, SIZES
from tests.engine.small_models import NOISE, mlp, normalised
from tests.methods.decoupled import played
from tests.rounds import play, scalar, targets


def by_hand(module, cohorts, *, rho, eta=None):
    """Sharpness-aware steps in plain PyTorch: the parameters are moved, and put back before the step."""
    federation = images(sizes=SIZES)
    for round_, cohort in enumerate(cohorts):
        sent = []
        for client in cohort:
            own = copy.deepcopy(module).train()
            params = list(own.parameters())
            norms = [layer for layer in own.modules() if isinstance(layer, nn.BatchNorm2d)]
            optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
            x, y = held_by(federation, client)
            for batch in hand_batches(len(x), fold(fold(SEED, round_), client), 0, 1):
                w = [p.detach().clone() for p in params]
                t = [torch.ones_like(p) if eta is None else p.abs() + eta for p in w]
                g = torch.autograd.grad(F.cross_entropy(own(x[batch]), y[batch]), params)
                length = torch.cat([(a * b).flatten() for a, b in zip(t, g, strict=True)]).norm()
                optimizer.zero_grad()
                with torch.no_grad():
                    for p, a, b in zip(params, t, g, strict=True):
                        p += rho * a**2 * b / length
                for norm in norms:
                    norm.momentum = 0.0
                F.cross_entropy(own(x[batch]), y[batch]).backward()
                for norm in norms:
                    norm.momentum = 0.1
                with torch.no_grad():
                    for p, before in zip(params, w, strict=True):
                        p.copy_(before)
                optimizer.step()
            sent.append(tensors(own))
        module.load_state_dict(average(sent, [SIZES[client] for client in cohort]), strict=False)
    return tensors(module)


@CHUNKS
@pytest.mark.parametrize("make", [mlp, normalised], ids=["mlp", "bn"])
@pytest.mark.parametrize("eta", [None, 0.3], ids=["sam", "asam"])
def test_rounds_equal_plain_pytorch(eta, make, chunk):
    options = {} if eta is None else {"adaptive": True, "eta": eta}
    found = played(build("fedsam", rho=0.4, **options), make(), chunk=chunk)
    assert distance(found.model, by_hand(make(), COHORTS, rho=0.4, eta=eta), NOISE) <= 1e-9


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_step_by_hand(chunk):
    """The loss is (w − t)², so the step goes to w − 2 η (w + ρ sign(w − t) − t), for each client by itself."""
    how = {"steps": 1, "chunk": chunk, "optimizer": Sgd(lr=0.1)}
    found = play(build("fedsam", rho=0.2), targets(3.0, -1.0), scalar(0.5), [[0, 1]], **how).updates[0]
    wanted = [0.5 - 0.2 * (0.5 - 0.2 - 3.0), 0.5 - 0.2 * (0.5 + 0.2 + 1.0)]
    assert found.params["head.weight"].flatten().tolist() == pytest.approx(wanted, abs=1e-14)
    assert found.reports["train_loss"].tolist() == pytest.approx([2.5**2, 1.5**2], abs=1e-14)


def test_a_client_at_its_minimum_stays_there():
    found = play(build("fedsam"), targets(0.5, 2.0), scalar(0.5), [[0, 1]], steps=2, optimizer=Sgd(lr=0.1))
    first, second = found.updates[0].params["head.weight"].flatten().tolist()
    assert first == 0.5
    assert second > 0.5


def test_rho_zero_is_fedavg():
    assert distance(played(build("fedsam", rho=0.0), mlp()).model, played("fedavg", mlp()).model) <= 1e-12


@pytest.mark.parametrize("option", ["rho", "eta"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_bad_values_are_refused(option, value):
    with pytest.raises(InputError, match=rf"fedsam\.{option} must be a finite number of at least 0"):
        build("fedsam", **{option: value})
