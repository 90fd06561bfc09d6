"""FedBN: BatchNorm stays with the client, against plain PyTorch; new clients; styles of digits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.data import load
from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.optimizers import Sgd
from equipoise.run.api import train
from equipoise.run.evaluation import Evaluation
from tests.engine.by_hand import Turn, rounds_by_hand, tensors
from tests.engine.comparison import distance
from tests.engine.five_clients import CHUNKS, COHORTS, EVERYONE, SIZES
from tests.engine.small_models import NOISE, mlp, normalised
from tests.methods.decoupled import adapt_by_hand, personal_models, played

NORMS = {"features.1", "head.1"}
WHERE = [("features", 1), ("head", 1)]


def of_norms(tree):
    return {name: tensor for name, tensor in tree.items() if name.rpartition(".")[0] in NORMS}


@CHUNKS
def test_rounds_equal_plain_pytorch(chunk):
    method = build("fedbn", weights="size")

    def turns(shared, own, received):
        for (part, index), norm in zip(WHERE, own, strict=True):
            getattr(shared, part)[index] = norm
        return [Turn([shared], lambda x, y: F.cross_entropy(shared(x), y), epochs=2)]

    def norms(shared):
        return nn.ModuleList(copy.deepcopy(getattr(shared, part)[index]) for part, index in WHERE)

    wanted, owned = rounds_by_hand(
        normalised(),
        turns,
        COHORTS,
        make_own=norms,
        combine=lambda received, averaged: averaged | of_norms(received),
    )
    found = played(method, normalised(), chunk=chunk, epochs=2)
    assert distance(found.model, wanted, NOISE) <= 1e-9
    for client, whole in personal_models(found, method, EVERYONE).items():
        for (part, index), norm in zip(WHERE, owned[client], strict=True):
            own = {n: t for n, t in whole.items() if n.startswith(f"{part}.{index}.")}
            assert (
                distance(own, {f"{part}.{index}.{n}": t for n, t in tensors(norm).items()}) <= 1e-9
            )


def test_batchnorm_neither_travels_nor_changes_at_the_server():
    found = played("fedbn", normalised())
    initial = tensors(normalised())
    assert {name.rpartition(".")[0] for name in of_norms(initial)} == NORMS
    assert all(torch.equal(found.model[name], tensor) for name, tensor in of_norms(initial).items())
    for updates in found.updates:
        assert not of_norms({**updates.params, **updates.buffers})
        assert set(updates.params) == set(initial) - set(of_norms(initial))
    models = personal_models(found, build("fedbn"), EVERYONE)
    assert not torch.equal(
        models[2]["features.1.running_mean"], models[3]["features.1.running_mean"]
    )
    assert not torch.equal(models[2]["features.1.weight"], models[3]["features.1.weight"])


def test_clients_count_alike_unless_size_is_asked_for():
    assert build("fedbn").weights == "uniform"
    assert build("fedbn", weights="size").weights == "size"
    found = played("fedbn", normalised(), [[0, 2]])
    rows = found.updates[0].params["head.3.weight"]
    assert SIZES[0] != SIZES[2]
    torch.testing.assert_close(
        found.model["head.3.weight"], (rows[0] + rows[1]) / 2, rtol=0, atol=1e-14
    )


def test_a_new_client_fits_batchnorm_alone():
    found = played("fedbn", normalised(), [[0, 1]])
    own = normalised()
    own.load_state_dict(found.model, strict=False)
    norms = [getattr(own, part)[index] for part, index in WHERE]
    adapt_by_hand(own, [Turn(norms, lambda x, y: F.cross_entropy(own(x), y))], 3, rounds=1)
    whole = personal_models(found, build("fedbn"), [3])[3]
    assert distance(whole, tensors(own), NOISE) <= 1e-9
    assert all(
        torch.equal(whole[n], t) for n, t in found.model.items() if n not in of_norms(found.model)
    )


def test_a_model_without_batchnorm_is_refused():
    with pytest.raises(
        InputError, match="no BatchNorm layer with running statistics; valid: .*bncnn or resnet18"
    ):
        played("fedbn", mlp())


def test_own_batchnorm_beats_a_shared_one_where_styles_differ():
    how = {
        "rounds": 20,
        "batch_size": 32,
        "optimizer": Sgd(lr=0.02),
        "evaluation": Evaluation(every=20),
    }
    digits = load("digits", imbalance=None)
    model = {"name": "bncnn", "channels": [8, 16, 16], "hidden": [32]}
    one = train(
        digits, method={"name": "fedavg", "weights": "uniform"}, model=model, **how
    ).summary["results"]
    own = train(digits, method="fedbn", model=model, **how).summary["results"]
    assert own["personal"]["seen"]["mean"] > one["global"]["seen"]["mean"]
    assert own["personal"]["seen"]["worst_client"] > one["global"]["seen"]["worst_client"]
