"""Phases: which parts are trained, in which order, on which batches, and what the client keeps.

Local rules are defined here and compared with ordinary PyTorch training
(``tests/engine/by_hand.py``).
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.errors import InputError
from equipoise.method import (
    LocalRule,
    Penalty,
    Phase,
    personal_loss,
    personal_model,
    plain_gradient,
    task_loss,
)
from equipoise.methods import build
from equipoise.methods.fedavg import FedAvg
from equipoise.methods.fedsam import SharpnessGradient
from equipoise.models.base import Model
from equipoise.optimizers import Sgd, optimizer_named
from equipoise.random import fold
from tests.engine.by_hand import (
    Turn,
    average,
    hand_batches,
    held_by,
    rounds_by_hand,
    tensors,
    train_by_hand,
)
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.five_clients import BATCH, CHUNKS, COHORTS, EVERYONE, SEED, SIZES
from tests.engine.local_rules import Weighted
from tests.engine.optimizers import OPTIMIZERS, TORCH
from tests.engine.small_models import NOISE, mlp, normalised
from tests.rounds import kept_by, play, scalar, targets


def rounds_by_engine(rule, module, cohorts, *, chunk, **how):
    method = build("fedavg", local=rule)
    how = {"batch_size": BATCH, "optimizer": Sgd(lr=0.1, momentum=0.9), **how}
    return play(method, images(sizes=SIZES), module, cohorts, chunk=chunk, seed=SEED, **how)


# ---- which parts move ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Moves(LocalRule):
    """One phase that trains one part."""

    part: str = "features"

    def phases(self):
        return (Phase(move=self.part),)


@CHUNKS
@pytest.mark.parametrize("part", ["features", "head"])
def test_only_the_named_part_moves_and_the_rest_stays_bit_for_bit(part, chunk):
    played = rounds_by_engine(Moves(part), normalised(), COHORTS, chunk=chunk, epochs=2)
    initial = played.engine.network.initial()
    for name, tensor in played.model.items():
        assert torch.equal(tensor, initial[name]) != name.startswith(part), name
    assert {
        name.split(".")[0]
        for tree in (played.updates[0].params, played.updates[0].buffers)
        for name in tree
    } == {part}

    def turns(shared, own, received):
        return [Turn([getattr(shared, part)], lambda x, y: F.cross_entropy(shared(x), y), epochs=2)]

    wanted, _ = rounds_by_hand(normalised(), turns, COHORTS)
    assert distance(played.model, wanted, NOISE) <= 1e-9


@dataclass(frozen=True)
class HeadThenFeatures(LocalRule):
    """FedRep's two phases, one after the other or alternating."""

    interleaved: bool = False

    def phases(self):
        return (Phase(move="head", epochs=2, optimizer=Sgd(lr=0.05)), Phase(move="features"))


@CHUNKS
@pytest.mark.parametrize("interleaved", [False, True], ids=["sequential", "interleaved"])
def test_phases_follow_each_other_or_take_turns(interleaved, chunk):
    def turns(shared, own, received):
        def loss(x, y):
            return F.cross_entropy(shared(x), y)

        return [
            Turn([shared.head], loss, epochs=2, lr=0.05, momentum=0.0),
            Turn([shared.features], loss),
        ]

    wanted, _ = rounds_by_hand(normalised(), turns, COHORTS, interleaved=interleaved)
    found = rounds_by_engine(
        HeadThenFeatures(interleaved=interleaved), normalised(), COHORTS, chunk=chunk
    )
    assert distance(found.model, wanted, NOISE) <= 1e-9
    other, _ = rounds_by_hand(normalised(), turns, COHORTS, interleaved=not interleaved)
    assert distance(found.model, other, NOISE) > 1e-4


def test_steps_and_losses_are_counted_over_all_phases():
    played = rounds_by_engine(HeadThenFeatures(), normalised(), [EVERYONE], chunk=3)
    batches = [-(-size // BATCH) for size in SIZES]
    assert played.updates[0].reports["steps"].tolist() == [3 * b for b in batches]


def test_a_phase_of_fixed_length_ignores_the_settings():
    @dataclass(frozen=True)
    class TwoSteps(LocalRule):
        def phases(self):
            return (Phase(steps=2), Phase(move="head", epochs=3))

    for settings in ({"epochs": 2}, {"steps": 7}):
        played = rounds_by_engine(TwoSteps(), mlp(), [EVERYONE], chunk=3, **settings)
        assert played.updates[0].reports["steps"].tolist() == [
            2 + 3 * -(-size // BATCH) for size in SIZES
        ]


@pytest.mark.parametrize("how", [{"epochs": 0}, {"steps": 0}, {"epochs": -1}])
def test_a_phase_that_never_begins_is_refused(how):
    with pytest.raises(
        InputError, match=rf"a Phase lasts at least 1 of its {next(iter(how))}, got"
    ):
        Phase(**how)


@CHUNKS
def test_dropout_is_for_the_part_that_moves(chunk):
    """Dropout in the features is off for a head that is trained on them, and on when they train."""
    how = {"chunk": chunk, "epochs": 2}
    for part, alike in (("head", True), ("features", False)):
        dropped, whole = (
            rounds_by_engine(Moves(part), module, COHORTS, **how) for module in (mlp(0.5), mlp())
        )
        assert (distance(dropped.model, whole.model) <= 1e-12) == alike


def test_dropout_of_inputs_is_always_on():
    """Features without parameters are never trained, but a model's first layer may be dropout."""
    torch.manual_seed(4)
    head = nn.Sequential(nn.Flatten(), nn.Linear(50, 4))
    drops, keeps = (
        Model(nn.Sequential(nn.Dropout(p)), copy.deepcopy(head)).double() for p in (0.5, 0.0)
    )
    dropped, whole = (
        rounds_by_engine(Moves("head"), module, [EVERYONE], chunk=3) for module in (drops, keeps)
    )
    assert distance(dropped.model, whole.model) > 1e-2


@dataclass(frozen=True)
class InParts(LocalRule):
    """Features and head applied one after the other."""

    def phases(self):
        return (Phase(loss=lambda c: c.network.task.loss(c.head(c.features()), c.y)),)


@CHUNKS
def test_head_of_features_is_the_output_statistics_included(chunk):
    parts, whole = (
        rounds_by_engine(rule, normalised(), COHORTS, chunk=chunk)
        for rule in (InParts(), LocalRule())
    )
    assert distance(parts.model, whole.model) <= 1e-12


# ---- personal parts ------------------------------------------------------------------------------


def kl_to_personal(client):
    """Cross-entropy plus the divergence from the personal head's predictions."""
    teacher = F.softmax(client.personal().output(), dim=1).detach()
    student = client.output()
    return client.network.task.loss(student, client.y) + (
        teacher * (teacher.log() - F.log_softmax(student, 1))
    ).sum(1)


@dataclass(frozen=True)
class ThreeSteps(LocalRule):
    """FedCRC's order: features, personal head, then shared head with the personal as teacher."""

    keeps = "personal.head"

    def phases(self):
        return (
            Phase(move="features"),
            Phase(move="personal.head", loss=lambda client: client.personal().task_loss()),
            Phase(move="head", loss=kl_to_personal),
        )


@CHUNKS
def test_a_personal_head_is_trained_kept_and_never_sent(chunk):
    def turns(shared, own, received):
        def personal(x, y):
            return F.cross_entropy(own(shared.features(x)), y)

        def near(x, y):
            z = shared.features(x)
            student, teacher = shared.head(z), F.softmax(own(z), 1).detach()
            return F.cross_entropy(student, y) + F.kl_div(
                F.log_softmax(student, 1), teacher, reduction="batchmean"
            )

        return [
            Turn([shared.features], lambda x, y: F.cross_entropy(shared(x), y)),
            Turn([own], personal),
            Turn([shared.head], near),
        ]

    module = normalised()
    played = rounds_by_engine(ThreeSteps(), normalised(), COHORTS, chunk=chunk)
    wanted, owned = rounds_by_hand(
        module, turns, COHORTS, make_own=lambda shared: copy.deepcopy(shared.head)
    )
    assert distance(played.model, wanted, NOISE) <= 1e-9
    first = {f"personal.head.{name}": tensor for name, tensor in tensors(module.head).items()}
    for client in EVERYONE:
        own = kept_by(played, client, first)
        wanted_own = {
            f"personal.head.{name}": tensor for name, tensor in tensors(owned[client]).items()
        }
        assert distance(own, wanted_own, {"personal.head.0.bias"}) <= 1e-9
        laid_over = personal_model(played.model, own)
        assert torch.equal(laid_over["head.3.weight"], own["personal.head.3.weight"])
        assert torch.equal(laid_over["features.0.weight"], played.model["features.0.weight"])
    for updates in played.updates:
        assert not any(
            name.startswith("personal")
            for name in {**updates.params, **updates.buffers, **updates.uploads}
        )
    assert set(played.model) == set(wanted)


@dataclass(frozen=True)
class Together(LocalRule):
    """Features and a personal head follow one loss, like FedPer with an additional shared head."""

    keeps = "personal.head"

    def phases(self):
        return (
            Phase(
                move=("features", "personal.head"),
                loss=lambda client: client.personal().task_loss(),
            ),
        )


@CHUNKS
def test_shared_features_learn_through_a_personal_head_statistics_included(chunk):
    def turns(shared, own, received):
        return [
            Turn([shared.features, own], lambda x, y: F.cross_entropy(own(shared.features(x)), y))
        ]

    played = rounds_by_engine(Together(), normalised(), COHORTS, chunk=chunk)
    wanted, owned = rounds_by_hand(
        normalised(), turns, COHORTS, make_own=lambda shared: copy.deepcopy(shared.head)
    )
    assert distance(played.model, wanted, NOISE) <= 1e-9
    first = {f"personal.head.{name}": tensor for name, tensor in tensors(normalised().head).items()}
    for client in EVERYONE:
        own = {f"personal.head.{name}": tensor for name, tensor in tensors(owned[client]).items()}
        assert distance(kept_by(played, client, first), own, {"personal.head.0.bias"}) <= 1e-9


def test_a_client_that_joins_late_begins_with_the_head_it_receives():
    """Its personal head starts as the shared head after the first round, not as the initial one."""

    @dataclass(frozen=True)
    class Still(LocalRule):
        keeps = "personal.head"

        def phases(self):
            unmoved = Phase(move="personal.head", loss=lambda c: 0.0 * c.personal().task_loss())
            return (Phase(move="head"), unmoved)

    played = rounds_by_engine(Still(), mlp(), [[0, 1], [2]], chunk=2)
    first = {f"personal.head.{name}": tensor for name, tensor in tensors(mlp().head).items()}
    late, early = kept_by(played, 2, first), kept_by(played, 0, first)
    assert torch.equal(late["personal.head.weight"], played.states[1].model["head.weight"])
    assert torch.equal(early["personal.head.weight"], mlp().head.weight.detach())
    assert not torch.equal(late["personal.head.weight"], early["personal.head.weight"])


@dataclass(frozen=True)
class KeepsHead(LocalRule):
    """FedPer: everything is trained together, the head stays."""

    keeps = "head"


@CHUNKS
def test_a_kept_head_is_trained_with_the_rest_and_stays(chunk):
    federation, module = images(sizes=SIZES), normalised()
    played = rounds_by_engine(KeepsHead(), normalised(), COHORTS, chunk=chunk)
    heads = {}
    for round_, cohort in enumerate(COHORTS):
        sent = []
        for client in cohort:
            shared = copy.deepcopy(module)
            if client in heads:
                shared.head = heads[client]
            turn = Turn([shared], lambda x, y, m=shared: F.cross_entropy(m(x), y))
            key = fold(fold(SEED, round_), client)
            train_by_hand([shared], [turn], *held_by(federation, client), key, interleaved=False)
            heads[client] = shared.head
            sent.append(tensors(shared.features))
        module.features.load_state_dict(
            average(sent, [SIZES[client] for client in cohort]), strict=False
        )
    found = {
        n.removeprefix("features."): t for n, t in played.model.items() if n.startswith("features.")
    }
    assert distance(found, tensors(module.features), {"0.bias"}) <= 1e-9
    first = {f"head.{name}": tensor for name, tensor in tensors(module.head).items()}
    for client in EVERYONE:
        wanted = {f"head.{name}": tensor for name, tensor in tensors(heads[client]).items()}
        assert distance(kept_by(played, client, first), wanted, NOISE) <= 1e-9
    assert all(
        torch.equal(played.model[n], t)
        for n, t in played.engine.network.initial().items()
        if n.startswith("head")
    )
    assert all(
        name.startswith("features.") for updates in played.updates for name in updates.params
    )


@dataclass(frozen=True)
class DittoLike(LocalRule):
    """A whole personal model close to the received one, trained along with the shared one."""

    batch: str = "same"
    keeps = "personal"
    interleaved = True

    def phases(self):
        def near(client):
            return client.personal().task_loss() + 0.3 / 2 * client.distance_to_received()

        return (Phase(), Phase(move="personal", loss=near, batch=self.batch))


@CHUNKS
@pytest.mark.parametrize("batch", ["same", "next"])
def test_a_phase_sees_the_batch_of_the_one_before_or_its_own(batch, chunk):
    def turns(shared, own, received):
        def near(x, y):
            pairs = zip(own.parameters(), received.parameters(), strict=True)
            return F.cross_entropy(own(x), y) + 0.15 * sum(
                (a - b.detach()).square().sum() for a, b in pairs
            )

        plain = Turn([shared], lambda x, y: F.cross_entropy(shared(x), y))
        return [plain, Turn([own], near, same=batch == "same")]

    played = rounds_by_engine(DittoLike(batch), mlp(), COHORTS, chunk=chunk)
    wanted, owned = rounds_by_hand(mlp(), turns, COHORTS, interleaved=True, make_own=copy.deepcopy)
    assert distance(played.model, wanted) <= 1e-9
    first = {f"personal.{name}": tensor for name, tensor in tensors(mlp()).items()}
    for client in EVERYONE:
        found = kept_by(played, client, first)
        assert (
            distance(found, {f"personal.{n}": t for n, t in tensors(owned[client]).items()}) <= 1e-9
        )


def test_a_batch_of_its_own_is_another_batch():
    same, other = (
        rounds_by_engine(DittoLike(batch), mlp(), [[2]], chunk=1) for batch in ("same", "next")
    )
    first = {f"personal.{name}": tensor for name, tensor in tensors(mlp()).items()}
    assert distance(same.model, other.model) == 0
    assert distance(kept_by(same, 2, first), kept_by(other, 2, first)) > 1e-3


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Moves("hed"), "unknown part 'hed'.*did you mean 'head'"),
        (Moves("personal.head"), "unknown part 'personal.head'"),
    ],
)
def test_parts_that_are_not_there_are_refused(rule, message):
    with pytest.raises(InputError, match=message):
        rounds_by_engine(rule, mlp(), [[0]], chunk=1)


# ---- how the gradient is taken -------------------------------------------------------------------


@dataclass(frozen=True)
class Sam:
    """Sharpness-aware minimisation: the gradient at the highest nearby loss, alone or stacked."""

    rho: float = 0.05
    batches = 1

    def __call__(self, values, params):
        losses, gradients = plain_gradient(values[0], params)
        squares = [
            g.square().flatten(losses.dim()).sum(-1) if g.dim() > losses.dim() else g**2
            for g in gradients
        ]
        scale = self.rho / torch.stack(squares).sum(0).sqrt()
        shifted = [
            p + scale.view(scale.shape + (1,) * (p.dim() - scale.dim())) * g
            for p, g in zip(params, gradients, strict=True)
        ]
        return losses, plain_gradient(values[0], shifted)[1]


@dataclass(frozen=True)
class SharpnessAware(LocalRule):
    def phases(self):
        return (Phase(gradient=Sam()),)


@CHUNKS
def test_batchnorm_statistics_follow_the_first_of_two_forward_passes(chunk):
    federation, module = images(sizes=SIZES), normalised()
    sent = []
    for client in EVERYONE:
        own = copy.deepcopy(module).train()
        norms = [layer for layer in own.modules() if isinstance(layer, nn.BatchNorm2d)]
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
        x, y = held_by(federation, client)
        for batch in hand_batches(len(x), fold(fold(SEED, 0), client), 0, 1):
            first = torch.autograd.grad(
                F.cross_entropy(own(x[batch]), y[batch]), list(own.parameters())
            )
            scale = 0.05 / torch.sqrt(sum(g.square().sum() for g in first))
            before = [p.detach().clone() for p in own.parameters()]
            with torch.no_grad():
                for p, g in zip(own.parameters(), first, strict=True):
                    p.add_(scale * g)
            for norm in norms:
                norm.momentum = 0.0
            optimizer.zero_grad()
            F.cross_entropy(own(x[batch]), y[batch]).backward()
            for norm in norms:
                norm.momentum = 0.1
            with torch.no_grad():
                for p, old in zip(own.parameters(), before, strict=True):
                    p.copy_(old)
            optimizer.step()
        sent.append(tensors(own))
    played = rounds_by_engine(SharpnessAware(), normalised(), [EVERYONE], chunk=chunk)
    assert distance(played.model, average(sent, SIZES), NOISE) <= 1e-8


@pytest.mark.parametrize("chunk", [1, 5])
def test_a_loss_that_looks_twice_keeps_the_statistics_of_its_first_look(chunk):
    @dataclass(frozen=True)
    class LooksTwice(LocalRule):
        def phases(self):
            return (
                Phase(
                    loss=lambda client: (
                        client.task_loss() + replace(client, x=client.x + 100).task_loss()
                    )
                ),
            )

    played = rounds_by_engine(
        LooksTwice(), normalised(), [EVERYONE], chunk=chunk, steps=1, batch_size=50
    )
    federation = images(sizes=SIZES)
    with torch.no_grad():
        means = [
            normalised().features[0](held_by(federation, client)[0]).mean((0, 2, 3))
            for client in EVERYONE
        ]
    found = played.updates[0].buffers["features.1.running_mean"]
    torch.testing.assert_close(found, 0.1 * torch.stack(means), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 5])
def test_a_loss_is_told_the_parameters_that_move_and_no_statistics(chunk):
    told = []

    @dataclass(frozen=True)
    class Tells(LocalRule):
        keeps = "personal.head"

        def phases(self):
            return (
                Phase(move="features", loss=self.loss),
                Phase(move="personal.head", loss=self.loss),
            )

        def loss(self, client):
            told.append(sorted(client.moved()))
            return client.personal().task_loss()

    rounds_by_engine(Tells(), normalised(), [[0]], chunk=chunk)
    names = [name for name, _ in normalised().named_parameters()]
    assert told == [
        sorted(name for name in names if name.startswith(part)) for part in ("features", "head")
    ]


@pytest.mark.parametrize("chunk", [1, 5])
def test_one_name_for_two_moving_parameters_is_refused(chunk):
    @dataclass(frozen=True)
    class MovesBoth(LocalRule):
        near: bool
        penalty: Penalty | None = None
        keeps = "personal.head"

        def phases(self):
            move = "head", "personal.head"
            return (Phase(move=move, loss=self.loss, penalty=self.penalty),)

        def loss(self, client):
            both = client.task_loss() + client.personal().task_loss()
            return both + client.distance_to_received() if self.near else both

    rounds_by_engine(MovesBoth(near=False), mlp(), [[0, 1]], chunk=chunk)
    for rule in (MovesBoth(near=True), MovesBoth(near=False, penalty=Penalty(0.1))):
        with pytest.raises(
            InputError, match="a phase trains both head.weight and personal.head.weight"
        ):
            rounds_by_engine(rule, mlp(), [[0, 1]], chunk=chunk)


# ---- several batches a step ----------------------------------------------------------------------


@dataclass(frozen=True)
class SeveralBatches(LocalRule):
    weights: tuple = (1.0, 0.5)

    def phases(self):
        return (Phase(gradient=Weighted(self.weights)),)


@CHUNKS
@pytest.mark.parametrize("weights", [(1.0, 0.5), (0.5, 1.0, 2.0)], ids=["two", "three"])
def test_a_step_takes_the_next_batches_and_statistics_follow_the_first(weights, chunk):
    federation, epochs = images(sizes=SIZES), 3
    wanted, losses = [], []
    for client in EVERYONE:
        own = normalised().train()
        norms = [layer for layer in own.modules() if isinstance(layer, nn.BatchNorm2d)]
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
        x, y = held_by(federation, client)
        stream = hand_batches(len(x), fold(fold(SEED, 0), client), 0)
        total, samples = 0.0, 0
        for _ in range(-(-epochs * -(-len(x) // BATCH) // len(weights))):
            batches = list(itertools.islice(stream, len(weights)))
            value = 0
            for index, (weight, batch) in enumerate(zip(weights, batches, strict=True)):
                for norm in norms:
                    norm.momentum = 0.0 if index else 0.1
                value = value + weight * F.cross_entropy(own(x[batch]), y[batch])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            seen = sum(len(batch) for batch in batches)
            total, samples = total + value.item() * seen, samples + seen
        wanted.append(tensors(own))
        losses.append(total / samples)
    played = rounds_by_engine(
        SeveralBatches(weights), normalised(), [EVERYONE], chunk=chunk, epochs=epochs
    )
    assert distance(played.model, average(wanted, SIZES), NOISE) <= 1e-9
    reports = played.updates[0].reports
    assert reports["train_loss"].tolist() == pytest.approx(losses, abs=1e-10)
    assert reports["steps"].tolist() == [
        -(-3 * -(-size // BATCH) // len(weights)) for size in SIZES
    ]


@CHUNKS
def test_batches_of_a_step_have_dropout_masks_of_their_own(chunk):
    """One full batch, twice: with the same mask, two weights of 1/2 would equal one of 1."""
    how = {"chunk": chunk, "batch_size": 64, "steps": 1}
    for module, alike in ((mlp(), True), (mlp(0.5), False)):
        twice = rounds_by_engine(SeveralBatches((0.5, 0.5)), module, [EVERYONE], **how)
        once = rounds_by_engine(SeveralBatches((1.0,)), module, [EVERYONE], **how)
        assert (distance(twice.model, once.model) <= 1e-12) == alike


def test_phases_on_the_same_batches_look_at_the_same_number_of_them():
    @dataclass(frozen=True)
    class Uneven(LocalRule):
        interleaved = True

        def phases(self):
            return (Phase(), Phase(gradient=Weighted(), batch="same"))

    with pytest.raises(InputError, match="looks at 2 batches a step, and the phase before at 1"):
        rounds_by_engine(Uneven(), mlp(), [[0]], chunk=1)


# ---- several losses ------------------------------------------------------------------------------


def doubled(client):
    return 2 * client.task_loss()


def by_hand_with_turns(client, factors, *, batches, epochs):
    """Losses that alternate batch by batch; the batches of a step are summed."""
    own = normalised().train()
    norms = [layer for layer in own.modules() if isinstance(layer, nn.BatchNorm2d)]
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    x, y = held_by(images(sizes=SIZES), client)
    stream = enumerate(hand_batches(len(x), fold(fold(SEED, 0), client), 0))
    for _ in range(-(-epochs * -(-len(x) // BATCH) // batches)):
        value = 0
        for index, (number, batch) in enumerate(itertools.islice(stream, batches)):
            for norm in norms:
                norm.momentum = 0.0 if index else 0.1
            value = value + factors[number % len(factors)] * F.cross_entropy(
                own(x[batch]), y[batch]
            )
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return tensors(own)


@CHUNKS
@pytest.mark.parametrize("batches", [1, 2])
def test_losses_take_turns_batch_by_batch(batches, chunk):
    """Two losses with steps of one batch take twice as long; with two batches each has its loss."""

    @dataclass(frozen=True)
    class TwoLosses(LocalRule):
        def phases(self):
            gradient = Weighted((1.0,) * batches)
            return (Phase(loss=(task_loss, doubled), gradient=gradient),)

    found = rounds_by_engine(TwoLosses(), normalised(), [EVERYONE], chunk=chunk, epochs=2)
    epochs = 4 if batches == 1 else 2
    wanted = [
        by_hand_with_turns(client, (1, 2), batches=batches, epochs=epochs) for client in EVERYONE
    ]
    assert distance(found.model, average(wanted, SIZES), NOISE) <= 1e-9
    steps = [-(-epochs * -(-size // BATCH) // batches) for size in SIZES]
    assert found.updates[0].reports["steps"].tolist() == steps


def test_which_loss_a_step_uses():
    three = Phase(loss=(task_loss, doubled, personal_loss))
    assert (three.turns, [three.losses_in(step) for step in (0, 1, 5)]) == (
        3,
        [(task_loss,), (doubled,), (personal_loss,)],
    )
    four = Phase(loss=(task_loss, doubled, doubled, personal_loss), gradient=Weighted())
    assert (four.turns, four.losses_in(3)) == (2, (doubled, personal_loss))
    one = Phase(gradient=Weighted((1.0, 1.0, 1.0)))
    assert (one.turns, one.losses_in(7)) == (1, (task_loss,) * 3)


@pytest.mark.parametrize("losses", [(), (task_loss,) * 3], ids=["none", "three"])
def test_losses_that_do_not_fit_the_batches_of_a_step_are_refused(losses):
    with pytest.raises(InputError, match=f"{len(losses)} losses for the 2 batches of its gradient"):
        Phase(loss=losses, gradient=Weighted())


@dataclass(frozen=True)
class Halves(LocalRule):
    weights: tuple = (1.0, 0.5)

    def phases(self):
        return (Phase(gradient=Weighted(self.weights), batch="split"),)


@CHUNKS
def test_a_step_on_parts_of_one_batch(chunk):
    federation, wanted, losses = images(sizes=SIZES), [], []
    for client in EVERYONE:
        own = mlp().train()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
        x, y = held_by(federation, client)
        total, samples = 0.0, 0
        for batch in hand_batches(len(x), fold(fold(SEED, 0), client), 0, 2):
            half = len(batch) // 2
            first, second = batch[: max(1, half)], batch[half:]
            value = F.cross_entropy(own(x[first]), y[first]) + 0.5 * F.cross_entropy(
                own(x[second]), y[second]
            )
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            seen = len(first) + len(second)
            total, samples = total + value.item() * seen, samples + seen
        wanted.append(tensors(own))
        losses.append(total / samples)
    found = rounds_by_engine(Halves(), mlp(), [EVERYONE], chunk=chunk, epochs=2)
    assert distance(found.model, average(wanted, SIZES)) <= 1e-9
    assert found.updates[0].reports["train_loss"].tolist() == pytest.approx(losses, abs=1e-10)
    assert found.updates[0].reports["steps"].tolist() == [2 * -(-size // BATCH) for size in SIZES]


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_phase_may_use_the_parts_of_the_phase_before(chunk):
    """The second phase trains the head on the same halves; weights 0, 1 select the second."""

    @dataclass(frozen=True)
    class Shares(LocalRule):
        interleaved = True

        def phases(self):
            return (
                Phase(move="features", gradient=Weighted((1.0, 0.0)), batch="split"),
                Phase(move="head", gradient=Weighted((0.0, 1.0)), batch="same"),
            )

    found = rounds_by_engine(Shares(), mlp(), [[2]], chunk=chunk)
    own = mlp()
    optimizers = [
        torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
        for part in (own.features, own.head)
    ]
    x, y = held_by(images(sizes=SIZES), 2)
    for batch in hand_batches(len(x), fold(fold(SEED, 0), 2), 0, 1):
        for optimizer, half in zip(
            optimizers, (batch[: len(batch) // 2], batch[len(batch) // 2 :]), strict=True
        ):
            own.zero_grad()
            F.cross_entropy(own(x[half]), y[half]).backward()
            optimizer.step()
    assert distance(found.model, tensors(own)) <= 1e-9


# ---- steps of different length -------------------------------------------------------------------


@dataclass(frozen=True)
class Paced(FedAvg):
    """Sends each client a factor on its steps: (k + 1) / 4 for client k."""

    def send(self, state, cohort):
        return {"model": state.model}, {"step_factor": torch.from_numpy((cohort.ids + 1) / 4)}


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_step_factor_scales_plain_steps_by_hand(chunk):
    method = build("fedavg", aggregation=Paced())
    played = play(
        method,
        targets(3.0, -1.0, 5.0),
        scalar(1.0),
        [[0, 1, 2]],
        chunk=chunk,
        steps=2,
        optimizer=Sgd(lr=0.1),
    )
    wanted = []
    for factor, target in zip((0.25, 0.5, 0.75), (3.0, -1.0, 5.0), strict=True):
        w = 1.0
        for _ in range(2):
            w -= 0.1 * factor * 2 * (w - target)
        wanted.append(w)
    assert played.updates[0].params["head.weight"].flatten().tolist() == pytest.approx(
        wanted, abs=1e-14
    )


@CHUNKS
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "rmsprop"])
def test_a_step_factor_is_a_learning_rate_of_its_own(optimizer, chunk):
    options = OPTIMIZERS.get(optimizer, {"lr": 0.01})
    made = optimizer_named(optimizer, **options)
    federation = images(sizes=SIZES)
    method = build("fedavg", aggregation=Paced())
    played = play(
        method,
        federation,
        mlp(),
        [EVERYONE],
        chunk=chunk,
        seed=SEED,
        batch_size=BATCH,
        epochs=2,
        optimizer=made,
    )
    for client in EVERYONE:
        own = mlp()
        slower = {**options, "lr": options["lr"] * (client + 1) / 4}
        torch_optimizer = TORCH[optimizer](own.parameters(), **slower)
        x, y = held_by(federation, client)
        for batch in hand_batches(len(x), fold(fold(SEED, 0), client), 0, 2):
            torch_optimizer.zero_grad()
            F.cross_entropy(own(x[batch]), y[batch]).backward()
            torch_optimizer.step()
        found = {name: stack[client] for name, stack in played.updates[0].params.items()}
        assert distance(found, tensors(own)) <= 1e-9


@pytest.mark.parametrize("how", [{"epochs": 2}, {"steps": 3}])
def test_a_phase_on_the_same_batches_lasts_as_long_as_the_one_before(how):
    with pytest.raises(InputError, match="takes no epochs or steps"):
        Phase(batch="same", **how)
    with pytest.raises(InputError, match="unknown batch 'sane'.*did you mean 'same'"):
        Phase(batch="sane")


# ---- what a loss returns -------------------------------------------------------------------------


@dataclass(frozen=True)
class Reduced(LocalRule):
    """A loss whose shape is not one value per sample."""

    shape: str = "scalar"

    def phases(self):
        return (Phase(loss=self.wrong_loss),)

    def wrong_loss(self, client):
        values = client.task_loss()
        return values.mean() if self.shape == "scalar" else values.unsqueeze(1)


@pytest.mark.parametrize("chunk", [1, 10])
@pytest.mark.parametrize(("shape", "found"), [("scalar", r"\(\)"), ("column", rf"\({BATCH}, 1\)")])
def test_a_loss_that_is_not_one_value_a_sample_is_refused_by_name(shape, found, chunk):
    message = (
        rf"the loss Reduced\.wrong_loss returned values of shape {found} for {BATCH} samples; "
        "valid: one value per"
    )
    with pytest.raises(InputError, match=message):
        rounds_by_engine(Reduced(shape), mlp(), COHORTS, chunk=chunk)


# ---- the task's loss and the terms of a method ---------------------------------------------------


def reports_of(method, cohorts=([0, 1, 2],), chunk=10, **how):
    how = {"batch_size": 64, "optimizer": Sgd(lr=0.1), **how}
    return [
        updates.reports
        for updates in play(build(**method), images(), mlp(), cohorts, chunk=chunk, **how).updates
    ]


def loss_of(model, data, client):
    module = mlp().double()
    module.load_state_dict(model)
    held = torch.from_numpy(data.train.of(client))
    with torch.no_grad():
        return F.cross_entropy(module(data.x[held]), data.y[held]).item()


@pytest.mark.parametrize("chunk", [1, 10])
def test_scaffold_reports_the_tasks_loss_and_its_correction_beside_it(chunk):
    """One full-batch step per round: the task's loss is that of the received model."""
    played = play(
        build("scaffold"),
        images(),
        mlp(),
        [[0, 1, 2]] * 3,
        chunk=chunk,
        batch_size=64,
        optimizer=Sgd(lr=0.1),
    )
    for number, updates in enumerate(played.updates):
        wanted = [loss_of(played.states[number].model, images(), client) for client in range(3)]
        assert updates.reports["train_loss"].tolist() == pytest.approx(wanted, abs=1e-12)
    assert not played.updates[0].reports["method_terms"].any()
    assert played.updates[2].reports["method_terms"].abs().min() > 0


@pytest.mark.parametrize("chunk", [1, 10])
def test_terms_by_hand(chunk):
    """FedProx with two full-batch steps: the mean over steps of μ/2 ‖w − w₀‖²."""
    mu = 3.0
    method = {"name": "fedprox", "mu": mu}
    reports = reports_of(method, chunk=chunk, steps=2)[0]
    one = play(
        build(**method), images(), mlp(), [[0, 1, 2]], batch_size=64, optimizer=Sgd(lr=0.1), steps=1
    )
    for client in range(3):
        moved = sum(
            (one.updates[0].params[n][client] - one.states[0].model[n]).square().sum()
            for n in one.updates[0].params
        )
        assert reports["method_terms"][client].item() == pytest.approx(
            mu / 2 * float(moved) / 2, rel=1e-9
        )


def test_methods_without_terms_report_none():
    assert set(reports_of({"name": "fedavg"})[0]) == {"train_loss", "steps"}
    assert set(reports_of({"name": "perfedavg"}, batch_size=2)[0]) == {"train_loss", "steps"}


def test_a_gradient_rule_reports_the_task_loss_of_the_look_it_reports():
    """With μ = 0 the terms vanish, and FedSAM reports losses at w."""

    @dataclass(frozen=True)
    class Both(LocalRule):
        def phases(self):
            return (
                Phase(
                    loss=lambda client: client.task_loss() + 5.0, gradient=SharpnessGradient(0.5)
                ),
            )

    how = {"batch_size": 64, "optimizer": Sgd(lr=0.1)}
    played = play(build("fedavg", local=Both()), images(), mlp(), [[0, 1]], **how)
    wanted = [loss_of(played.states[0].model, images(), client) for client in range(2)]
    assert played.updates[0].reports["train_loss"].tolist() == pytest.approx(wanted, abs=1e-12)
    assert played.updates[0].reports["method_terms"].tolist() == pytest.approx(
        [5.0, 5.0], abs=1e-12
    )


def test_a_loss_that_never_looks_at_the_output_is_reported_as_it_is():
    @dataclass(frozen=True)
    class Apart(LocalRule):
        def phases(self):
            return (Phase(loss=lambda client: client.features().square().sum(1)),)

    played = play(
        build("fedavg", local=Apart()),
        images(),
        mlp(),
        [[0, 1]],
        batch_size=64,
        optimizer=Sgd(lr=0.01),
    )
    assert not played.updates[0].reports["method_terms"].any()
    assert (played.updates[0].reports["train_loss"] > 0).all()
