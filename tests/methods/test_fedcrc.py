"""FedCRC: three steps against plain PyTorch, divergence and moving average by hand, and limits."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise import tasks
from equipoise.client import Client
from equipoise.engine.network import Network
from equipoise.errors import InputError
from equipoise.method import State, Updates
from equipoise.methods import build
from equipoise.methods.fedcrc import FedCRC, SlowHead
from equipoise.models.base import Model
from equipoise.models.passes import Forward
from equipoise.tree import size_in_bytes
from tests.engine.by_hand import Turn, rounds_by_hand, tensors
from tests.engine.comparison import distance
from tests.engine.five_clients import CHUNKS, COHORTS, EVERYONE
from tests.engine.small_models import NOISE, mlp, normalised
from tests.methods.decoupled import adapt_by_hand, personal_models, played
from tests.methods.skewed import scores
from tests.rounds import kept_by, linear, play, random_regression


def own_heads(found, module):
    """Every client's personal head, with the names of a plain head."""
    first = {f"personal.head.{name}": tensor for name, tensor in tensors(module.head).items()}
    heads = {client: kept_by(found, client, first) for client in EVERYONE}
    return {
        c: {n.removeprefix("personal.head."): t for n, t in head.items()}
        for c, head in heads.items()
    }


# ---- three steps ---------------------------------------------------------------------------------


@CHUNKS
@pytest.mark.parametrize(
    "epochs", [{}, {"features_epochs": 1, "personal_epochs": 3, "head_epochs": 2}]
)
@pytest.mark.parametrize("personal_first", [False, True])
def test_rounds_equal_plain_pytorch(personal_first, epochs, chunk):
    lengths = list(epochs.values()) or [2, 2, 2]

    def turns(shared, own, received):
        def personal(x, y):
            return F.cross_entropy(own(shared.features(x)), y)

        def taught(x, y):
            z = shared.features(x)
            student, teacher = F.log_softmax(shared.head(z), 1), F.softmax(own(z), 1).detach()
            return F.nll_loss(student, y) + 0.7 * F.kl_div(student, teacher, reduction="batchmean")

        losses = (lambda x, y: F.cross_entropy(shared(x), y), personal, taught)
        moves = ([shared.features], [own], [shared.head])
        three = [Turn(m, loss, epochs=e) for m, loss, e in zip(moves, losses, lengths, strict=True)]
        return [three[1], three[0], three[2]] if personal_first else three

    def slowly(received, averaged):
        follow = {
            n: 0.8 * received[n] + 0.2 * averaged[n] for n in averaged if n.startswith("head")
        }
        return {**averaged, **follow}

    wanted, owned = rounds_by_hand(
        normalised(),
        turns,
        COHORTS,
        make_own=lambda shared: copy.deepcopy(shared.head),
        combine=slowly,
    )
    method = build("fedcrc", tau=0.8, kl=0.7, personal_first=personal_first, **epochs)
    found = played(method, normalised(), chunk=chunk, epochs=2)
    assert distance(found.model, wanted, NOISE) <= 1e-9
    for client, head in own_heads(found, normalised()).items():
        assert distance(head, tensors(owned[client]), {"0.bias"}) <= 1e-9


@pytest.mark.parametrize("chunk", [1, 5])
def test_each_step_moves_its_part_and_nothing_else(chunk):
    """A round of one of the three steps changes nothing else, bit for bit."""
    initial, how = normalised(), {"chunk": chunk, "cohorts": [EVERYONE]}

    def moved(*steps):
        class Some(FedCRC):
            def phases(self):
                return tuple(super(Some, self).phases()[step] for step in steps)

        found = played(
            build("fedcrc", local=Some(), aggregation="fedavg"), copy.deepcopy(initial), **how
        )
        changed = {
            n.split(".")[0]
            for n, t in found.model.items()
            if not torch.equal(t, initial.state_dict()[n])
        }
        heads = own_heads(found, initial).values()
        personal = {
            not torch.equal(t, initial.head.state_dict()[n])
            for head in heads
            for n, t in head.items()
        }
        return changed, personal

    assert moved(0) == ({"features"}, {False})
    assert moved(1) == (set(), {True})
    assert moved(2) == ({"head"}, {False})


def test_statistics_and_dropout_of_the_features_change_in_the_first_step_only():
    """Later steps use the features as in evaluation, whatever the number of epochs."""
    module = normalised()
    module.features.append(nn.Dropout(0.5))
    short, long = (
        played(build("fedcrc", personal_epochs=e, head_epochs=e, tau=1), copy.deepcopy(module))
        for e in (1, 4)
    )
    assert all(torch.equal(short.model[name], long.model[name]) for name in short.model)
    assert not torch.equal(
        own_heads(short, module)[2]["3.weight"], own_heads(long, module)[2]["3.weight"]
    )


def test_the_personal_head_never_travels():
    found, plain = (played(name, mlp()) for name in ("fedcrc", "fedavg"))
    for updates in found.updates:
        assert not updates.uploads
        assert set(updates.params) == set(plain.updates[0].params)
    assert [c.bytes_down for c in found.cohorts] == [c.bytes_down for c in plain.cohorts]
    assert size_in_bytes(found.updates[0].params) == size_in_bytes(plain.updates[0].params)


def test_a_new_client_makes_a_personal_head_from_the_global_one():
    method = build("fedcrc", tau=0.5, personal_epochs=2)
    found = played(method, normalised(), [[0, 1]] * 2)
    own = normalised()
    own.load_state_dict(found.model, strict=False)
    adapt_by_hand(
        own, [Turn([own.head], lambda x, y: F.cross_entropy(own(x), y), epochs=2)], 3, rounds=2
    )
    assert distance(personal_models(found, method, [3])[3], tensors(own), NOISE) <= 1e-9


# ---- the divergence ------------------------------------------------------------------------------


def two_heads(shared, own):
    """A client whose features are the input, with two classes and fixed shared and own heads."""
    features, head = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
    network = Network(
        Model(features, head).double(), tasks.build("classification"), dtype=torch.float64
    )
    column = {"head.weight": shared, "personal.head.weight": own}
    params = {
        name: torch.tensor(value, dtype=torch.float64).view(2, 1).log()
        for name, value in column.items()
    }
    return Client(
        network=network,
        params={"features.weight": torch.ones(1, 1).double(), **params},
        x=torch.ones(2, 1).double(),
        y=torch.tensor([0, 1]),
        forward=Forward(train=True),
        sent={},
        each={},
        memory={},
        seen=torch.tensor(True),
        round=torch.tensor(0),
    )


@pytest.mark.parametrize("kl", [0.0, 1.0, 2.5])
def test_the_loss_of_the_head_by_hand(kl):
    client = two_heads(shared=(0.75, 0.25), own=(0.5, 0.5))
    divergence = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    wanted = [-math.log(0.75) + kl * divergence, -math.log(0.25) + kl * divergence]
    assert FedCRC(kl=kl).taught_loss(client).tolist() == pytest.approx(wanted, abs=1e-14)
    assert divergence == pytest.approx(0.5 * math.log(4 / 3))


def test_equal_heads_have_nothing_to_teach():
    client = two_heads(shared=(0.3, 0.7), own=(0.3, 0.7))
    wanted = [-math.log(0.3), -math.log(0.7)]
    assert FedCRC(kl=5.0).taught_loss(client).tolist() == pytest.approx(wanted, abs=1e-14)


# ---- the server ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.0, 0.25, 0.99, 1.0])
def test_the_moving_average_by_hand(tau):
    rows = {"features.w": [[1.0], [5.0]], "head.w": [[2.0], [6.0]], "header.w": [[1.0], [5.0]]}
    params = {name: torch.tensor(values).double() for name, values in rows.items()}
    buffers = {"head.running_mean": torch.tensor([[0.0], [4.0]]).double()}
    model = {
        name: torch.full((1,), 10.0).double()
        for name in (*rows, "head.running_mean", "head.unsent")
    }
    cohort = SimpleNamespace(prior=torch.tensor([0.75, 0.25]))
    new = SlowHead(tau).combine(State(3, model), Updates(params, buffers, {}, {}), cohort).model
    wanted = {
        "features.w": 2.0,
        "head.w": tau * 10 + (1 - tau) * 3,
        "header.w": 2.0,
        "head.running_mean": tau * 10 + (1 - tau) * 1,
        "head.unsent": 10.0,
    }
    assert {name: tensor.item() for name, tensor in new.items()} == pytest.approx(wanted, abs=1e-14)
    same = FedCRC(tau=tau).combine(State(3, model), Updates(params, buffers, {}, {}), cohort).model
    assert all(torch.equal(same[name], new[name]) for name in new)


def test_a_head_that_never_moves_gives_fedbabus_global_model():
    still, slow = build("fedcrc", tau=1), build("fedcrc")
    crc, moving, babu = (
        played(method, normalised(), chunk=1).model for method in (still, slow, build("fedbabu"))
    )
    assert all(torch.equal(crc[name], babu[name]) for name in babu)
    assert distance(moving, babu, NOISE) > 1e-6
    stacked = [played(method, normalised(), chunk=10).model for method in (still, build("fedbabu"))]
    assert distance(*stacked, NOISE) <= 1e-9


# ---- combinations --------------------------------------------------------------------------------


def test_both_halves_combine_with_others():
    fast = played(build("fedcrc", aggregation="fedavg"), mlp())
    assert distance(fast.model, played(build("fedcrc", tau=0), mlp()).model) <= 1e-12
    slow = played(build("fedprox", aggregation={"name": "slowhead", "tau": 0.5}), mlp())
    plain = played(build("fedprox"), mlp(), COHORTS[:1])
    first = {
        n: 0.5 * (t + plain.model[n]) if n.startswith("head") else plain.model[n]
        for n, t in tensors(mlp()).items()
    }
    assert distance(slow.states[1].model, first) <= 1e-12
    kept = played(build("fedper", aggregation="slowhead"), mlp())
    assert distance(kept.model, played(build("fedper"), mlp()).model) <= 1e-12, (
        "kept heads are not there to follow"
    )
    played(build("fedcrc", aggregation={"name": "qffl", "q": 1.0}), mlp())
    with pytest.raises(
        InputError,
        match="FedCRC keeps personal parts in its own local rule, which FedProx replaces",
    ):
        build("fedcrc", local="fedprox")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 1.5}, r"fedcrc\.tau must be in \[0, 1\], got 1\.5"),
        ({"tau": float("nan")}, r"fedcrc\.tau must be"),
        ({"kl": -1.0}, r"fedcrc\.kl must be at least 0 and finite, got -1\.0"),
        ({"head_epochs": 0}, r"fedcrc\.head_epochs must be a whole number of at least 1, got 0"),
        ({"personal_epochs": 1.5}, r"fedcrc\.personal_epochs must be a whole number"),
        (
            {"aggregation": {"name": "slowhead", "tau": -0.1}},
            r"slowhead\.tau must be in \[0, 1\], got -0\.1",
        ),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        build("fedcrc", **options)


def test_a_task_without_classes_is_refused():
    federation, module = random_regression([8, 8]), linear()
    module.features = nn.Linear(3, 3).double()
    with pytest.raises(
        InputError, match="fedcrc compares class probabilities, but the task.*is regression"
    ):
        play(build("fedcrc"), federation, module, [[0, 1]])


# ---- digits --------------------------------------------------------------------------------------


def test_personal_models_beat_the_global_one_where_labels_are_skewed():
    found = scores("fedcrc")
    assert found["personal seen"] > found["global seen"] + 0.1
    assert found["personal unseen"] > found["global unseen"] + 0.1
    early = scores({"name": "fedcrc", "personal_first": True})
    assert early["personal seen"] > found["personal seen"] + 0.1, (
        "heads made for the features as they are sent out"
    )
