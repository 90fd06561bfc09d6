"""Models that users bring, with few rounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks import own_models
from benchmarks.machine import Rates, percent, rounded


@pytest.mark.parametrize("name", ["dense 64", "LSTM 1 x 32"])
def test_both_sides_are_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_models, "WARM_UP", 0)
    rates = Rates(1e9, 1e9, "here", "float32")
    row = own_models.measure(name, seconds=0.0, machine={"chunk": 2}, rates=rates)
    assert (row["model"], row["chunk"], row["pairs"]) == (name, 2, 3)
    assert min(row["loop"], row["equipoise"], row["ratio"]) > 0
    cells = f"{rounded(row['equipoise'])} | {percent(row['equipoise'] / row['limit'])}"
    assert f"| {name} | {rounded(row['limit'])} |" in own_models.markdown([row])
    assert cells in own_models.markdown([row])


def test_the_loop_trains_and_averages() -> None:
    """One step a client: the mean of the clients' models is a step along the mean gradient."""
    case = own_models.MODELS["linear"]
    x, y, _ = own_models.samples(case)
    model = case.make().double()
    x = x.double()
    weight = model[1].weight
    rows = len(y) // own_models.CLIENTS
    loss = F.cross_entropy(model(x), y)
    (gradient,) = torch.autograd.grad(loss, weight)
    wanted = weight.detach() - own_models.RATE * gradient
    own_models.plain_round(model, x, y, rows)
    torch.testing.assert_close(weight.detach(), wanted, rtol=1e-12, atol=1e-12)
