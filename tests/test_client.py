"""What a loss may do with its client: further passes, z, parts of the method, the round."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad

from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError
from equipoise.method import LocalRule, Phase
from equipoise.methods import build
from equipoise.models.base import Model
from equipoise.optimizers import Sgd
from equipoise.tree import select
from tests.engine.federations import images
from tests.own_rules import Projected
from tests.rounds import minimised, play

SIZES = [9, 6, 4]
CHUNKS = pytest.mark.parametrize("chunk", [1, 3])
STILL = {"batch_size": 20, "optimizer": Sgd(lr=0.0)}


@dataclass(frozen=True)
class WithLoss(LocalRule):
    """Train with a loss given as a function."""

    of: object = None
    move: object = "all"
    steps: int = 1

    def phases(self):
        """One phase."""
        return (Phase(loss=self.of, move=self.move, steps=self.steps),)


def normalised(dropout=0.0):
    torch.manual_seed(5)
    features = nn.Sequential(
        nn.Flatten(), nn.Linear(50, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout)
    )
    return Model(features, nn.Linear(6, 4)).double()


def test_the_stem_is_applied_once_and_layers_have_names():
    passed = []

    class Counting(nn.Module):
        def forward(self, x):
            passed.append(len(x))
            return x.flatten(1)

    torch.manual_seed(6)
    features = nn.Sequential(nn.Linear(50, 6), nn.Tanh())
    module = Model(features, nn.Linear(6, 4), stem=Counting()).double()

    def loss(client):
        first = client.part("features.0", client.encoded())
        other = client.at({"head.bias": client.params["head.bias"] + 1}).task_loss()
        return client.task_loss() + other + first.mean(1)

    method = build("fedavg", local=WithLoss(loss))
    data = images(sizes=SIZES)
    engine = StackedEngine(
        data,
        module,
        Training(rounds=1, **STILL),
        Machine(device="cpu", precision="float64", chunk=1, encode=False),
    )
    passed.clear()
    cohort = engine.cohort(method, np.arange(3), 0)
    updates = cohort.train({"model": engine.network.initial()}, {}, method.local)
    assert passed == SIZES
    for client, found in enumerate(minimised(updates.reports).tolist()):
        x, y = held(client)
        scores, layer = module(x), features[0](x.flatten(1))
        wanted = F.cross_entropy(scores, y) + F.cross_entropy(scores + 1, y) + layer.mean()
        assert found == pytest.approx(wanted.item(), abs=1e-12)


def rule_played(loss, *, chunk, module=None, how=STILL, move="all", steps=1):
    method = build("fedavg", local=WithLoss(loss, move, steps))
    return play(
        method, images(sizes=SIZES), module or normalised(), [range(len(SIZES))], chunk=chunk, **how
    )


def held(client):
    data = images(sizes=SIZES)
    samples = torch.from_numpy(data.train.of(client))
    return data.x[samples], data.y[samples]


def losses(module):
    """Every client's loss by the original module, in training or evaluation mode."""
    return [F.cross_entropy(module(x), y).item() for x, y in map(held, range(len(SIZES)))]


def reported(played):
    return minimised(played.updates[0].reports).tolist()


def assert_statistics_unchanged(played):
    for name, buffer in normalised().named_buffers():
        if buffer.is_floating_point():
            for rows in played.updates[0].buffers[name]:
                assert torch.equal(rows, buffer)


# ---- a second look -------------------------------------------------------------------------------


@CHUNKS
def test_a_second_look_behaves_as_in_evaluation_and_records_nothing(chunk):
    played = rule_played(
        lambda client: client.at().task_loss(), chunk=chunk, module=normalised(dropout=0.5)
    )
    assert reported(played) == pytest.approx(losses(normalised().eval()), abs=1e-12)
    assert_statistics_unchanged(played)


@CHUNKS
def test_a_second_look_may_behave_as_in_training_and_records_nothing(chunk):
    played = rule_played(lambda client: client.at(train=True).task_loss(), chunk=chunk)
    assert reported(played) == pytest.approx(losses(normalised().train()), abs=1e-12)
    assert_statistics_unchanged(played)


@CHUNKS
def test_dropout_of_a_second_look_is_that_of_the_batch(chunk):
    """In training it drops the same units as the first pass: the key is that of the batch."""
    first, second = (
        rule_played(loss, chunk=chunk, module=normalised(dropout=0.5))
        for loss in (
            lambda client: client.task_loss(),
            lambda client: client.at(train=True).task_loss(),
        )
    )
    assert reported(first) == pytest.approx(reported(second), abs=1e-12)
    assert reported(first) != pytest.approx(losses(normalised().train()), abs=1e-3)


@CHUNKS
def test_a_replaced_client_records_nothing(chunk):
    def loss(client):
        return dataclasses.replace(
            client, params={n: 2 * t for n, t in client.params.items()}
        ).task_loss()

    module = normalised().train()
    with torch.no_grad():
        for tensor in (
            *module.parameters(),
            module.features[2].running_mean,
            module.features[2].running_var,
        ):
            tensor *= 2
    played = rule_played(loss, chunk=chunk)
    assert reported(played) == pytest.approx(losses(module), abs=1e-12)
    assert_statistics_unchanged(played)


@CHUNKS
def test_a_first_look_still_records(chunk):
    """Other passes before and after it have no effect."""

    def loss(client):
        other = {name: tensor + 1 for name, tensor in client.params.items()}
        before = (
            client.at(other).task_loss() + dataclasses.replace(client, params=other).task_loss()
        )
        return (
            client.task_loss() + 0 * before + 0 * client.at(x=client.x + 1, train=True).task_loss()
        )

    plain, curious = (
        rule_played(each, chunk=chunk) for each in (lambda client: client.task_loss(), loss)
    )
    for name, rows in plain.updates[0].buffers.items():
        torch.testing.assert_close(rows, curious.updates[0].buffers[name], rtol=1e-12, atol=1e-12)
        assert not torch.equal(rows[0], normalised().state_dict()[name])
    assert reported(plain) == pytest.approx(reported(curious), abs=1e-12)


@CHUNKS
@pytest.mark.parametrize("train", [False, True])
def test_a_second_look_inside_a_gradient(train, chunk):
    """The squared norm of the head's gradient, and its own gradient, which training uses."""

    def loss(client):
        head = {name: client.params[name] for name in ("head.weight", "head.bias")}

        def mean(tensors):
            return client.mean(client.at(tensors, train=train).task_loss())

        gradients = grad(mean)(head)
        return sum(g.square().sum() for g in gradients.values()).expand(len(client.y))

    played = rule_played(loss, chunk=chunk, how={"batch_size": 20, "optimizer": Sgd(lr=0.1)})
    assert_statistics_unchanged(played)
    for client in range(len(SIZES)):
        module = normalised().train(train)
        x, y = held(client)
        gradients = torch.autograd.grad(
            F.cross_entropy(module(x), y), list(module.head.parameters()), create_graph=True
        )
        value = sum(g.square().sum() for g in gradients)
        value.backward()
        assert reported(played)[client] == pytest.approx(value.item(), abs=1e-12)
        for name, parameter in module.named_parameters():
            wanted = (parameter - 0.1 * parameter.grad).detach()
            found = played.updates[0].params[name][client]
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@CHUNKS
def test_a_second_look_where_features_do_not_move(chunk):
    """Their z is precomputed: another batch or other features must not use it."""

    def loss(client):
        other = {
            name: 2 * client.params[name] for name in select(client.network.initial(), "features")
        }
        return (
            client.at(x=2 * client.x).task_loss()
            + client.at(other).task_loss()
            + client.at().task_loss()
        )

    module = Model(
        nn.Sequential(nn.Flatten(), nn.Linear(50, 6), nn.Tanh()), nn.Linear(6, 4)
    ).double()
    played = rule_played(loss, chunk=chunk, module=module, move="head", steps=5)
    for client, found in enumerate(reported(played)):
        x, y = held(client)
        flat, features = x.flatten(1), module.features[1]
        looks = [
            module.head(torch.tanh(features(2 * flat))),
            module.head(torch.tanh(2 * features(flat))),
            module.head(torch.tanh(features(flat))),
        ]
        assert found == pytest.approx(
            sum(F.cross_entropy(look, y).item() for look in looks), abs=1e-12
        )


# ---- z once --------------------------------------------------------------------------------------


CALLS: list[str] = []


class Counting(nn.Linear):
    """Records its width at every call."""

    def forward(self, x):
        CALLS.append(f"{self.in_features}")
        return super().forward(x)


def asks_often(client):
    z = client.features() + client.features() + client.features()
    return client.task_loss() + client.task_loss() + 0 * z.sum(1) + 0 * client.output().sum(1)


def asks_for_output_first(client):
    return client.task_loss() + 0 * (client.features() + client.features()).sum(1)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("loss", [asks_often, asks_for_output_first])
def test_features_and_head_are_computed_once_a_step(loss, chunk):
    module = Model(nn.Sequential(nn.Flatten(), Counting(50, 6), nn.Tanh()), Counting(6, 4)).double()
    machine = Machine(device="cpu", precision="float64", chunk=chunk)
    engine = StackedEngine(images(sizes=SIZES), module, Training(batch_size=20), machine)
    method = build("fedavg", local=WithLoss(loss))
    cohort = engine.cohort(method, np.arange(3), 0)
    CALLS.clear()
    cohort.train({"model": engine.network.initial()}, {}, method.local)
    passes = 3 if chunk == 1 else 1
    assert sorted(CALLS) == ["50"] * passes + ["6"] * passes


# ---- what is aligned -----------------------------------------------------------------------------


def mapped():
    """Features that return a map of each image, with BatchNorm in both parts."""
    torch.manual_seed(6)
    features = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3))
    return Model(
        features, nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.BatchNorm1d(4))
    ).double()


class OwnModule(nn.Module):
    """Not a subclass of Model, but with the same forward."""

    inputs = stem = None
    forward = Model.forward

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.features, self.head = nn.Conv2d(2, 3, 2), nn.Sequential(nn.Flatten(), nn.Linear(48, 4))


@CHUNKS
@pytest.mark.parametrize("module", [mapped(), OwnModule().double()], ids=["model", "own module"])
def test_maps_are_aligned_by_their_means_over_positions(module, chunk):
    def loss(client):
        rows, mask = client.aligned()
        assert mask is client.mask
        return rows.sum(1)

    played = rule_played(loss, chunk=chunk, module=module)
    wanted = [
        module.train().features(held(client)[0]).mean((2, 3)).sum(1).mean().item()
        for client in range(3)
    ]
    assert reported(played) == pytest.approx(wanted, abs=1e-12)


@CHUNKS
def test_aligning_leaves_statistics_as_a_step_without_it_does(chunk):
    """Before or after the output, of the client's own model and of the received one."""

    def before(client):
        distance = (client.at(client.received).aligned()[0] - client.aligned()[0]).square().sum()
        return client.task_loss() + 0 * distance

    def after(client):
        loss = client.task_loss()
        return (
            loss
            + 0 * (client.aligned()[0] - client.at(client.received).aligned()[0]).square().sum()
        )

    plain, *others = (
        rule_played(loss, chunk=chunk, module=mapped())
        for loss in (lambda c: c.task_loss(), before, after)
    )
    for other in others:
        for name, rows in plain.updates[0].buffers.items():
            torch.testing.assert_close(other.updates[0].buffers[name], rows, rtol=1e-12, atol=1e-12)
            assert not torch.equal(rows[0], mapped().state_dict()[name])


@pytest.mark.parametrize("chunk", [1, 3])
def test_bgp_passes_through_the_received_features_once_in_its_second_step_only(chunk):
    """The first step needs one pass through the model; the second also one of received features."""
    module = Model(nn.Sequential(nn.Flatten(), Counting(50, 6), nn.Tanh()), Counting(6, 4)).double()
    machine = Machine(device="cpu", precision="float64", chunk=chunk)
    engine = StackedEngine(images(sizes=SIZES), module, Training(batch_size=20), machine)
    method = build("bgp")
    cohort = engine.cohort(method, np.arange(3), 0)
    CALLS.clear()
    cohort.train({"model": engine.network.initial()}, {}, method.local)
    passes = 3 if chunk == 1 else 1
    assert (CALLS.count("50"), CALLS.count("6")) == (3 * passes, 2 * passes)


def test_a_model_with_a_forward_of_its_own_cannot_be_aligned():
    class Own(Model):
        def forward(self, x):
            return super().forward(x)

    torch.manual_seed(6)
    module = Own(nn.Flatten(), nn.Linear(50, 4)).double()
    with pytest.raises(InputError, match="Own has its own forward or hooks"):
        play(build("bgp"), images(sizes=SIZES), module, [[0]])


# ---- parts ---------------------------------------------------------------------------------------


def test_a_part_that_the_model_lacks_is_named():
    with pytest.raises(
        InputError, match="unknown part 'projection' in the model. Valid: features, head"
    ):
        rule_played(Projected().loss, chunk=1)


@CHUNKS
def test_a_part_moves_only_where_a_phase_says_so(chunk):
    rule = WithLoss(Projected().loss, move="projection")
    module = Projected().extend(normalised(), (2, 5, 5)).double()
    played = play(
        build("fedavg", local=rule),
        images(sizes=SIZES),
        module,
        [range(3)],
        chunk=chunk,
        optimizer=Sgd(lr=0.1),
    )
    before = module.state_dict()
    assert set(played.updates[0].params) == {"projection.weight", "projection.bias"}
    for name, tensor in played.model.items():
        assert torch.equal(tensor, before[name]) != name.startswith("projection.")


# ---- the round -----------------------------------------------------------------------------------


@CHUNKS
def test_the_round_counts_those_finished(chunk):
    method = build("fedavg", local=WithLoss(lambda client: client.task_loss() + 100 * client.round))
    cohorts = [[0, 1, 2], [1], [0, 2]]
    played = play(method, images(sizes=SIZES), normalised().eval(), cohorts, chunk=chunk, **STILL)
    for round_, updates in enumerate(played.updates):
        assert ((minimised(updates.reports) / 100).floor() == round_).all()


@CHUNKS
def test_statistics_of_the_batch_leave_padding_out(chunk):
    """Clients of nine, six and four samples share a batch as wide as the largest."""

    def loss(client):
        flat = client.x.flatten(1)
        total = (
            client.sum(flat).sum() + client.mean(flat).sum() + client.covariance(flat[:, :3]).sum()
        )
        return total + 0 * client.task_loss()

    played = rule_played(loss, chunk=chunk)
    for client, found in enumerate(reported(played)):
        flat = held(client)[0].flatten(1).numpy()
        wanted = flat.sum() + flat.mean(0).sum() + np.cov(flat[:, :3], rowvar=False).sum()
        assert found == pytest.approx(wanted, abs=1e-9)
