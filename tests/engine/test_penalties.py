"""Penalties on parameters: by hand, and against the same terms in the losses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from equipoise.errors import InputError
from equipoise.method import LocalRule, Penalty, Phase, personal_loss, task_loss
from equipoise.methods import build
from equipoise.methods.fedavg import FedAvg
from equipoise.methods.fedsam import SharpnessGradient
from equipoise.methods.perfedavg import MetaGradient
from equipoise.optimizers import Sgd, optimizer_named
from tests.engine.by_hand import Turn, rounds_by_hand
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.five_clients import BATCH, CHUNKS, COHORTS, EVERYONE, SEED, SIZES
from tests.engine.local_rules import Declared, Heads, Weighted, Written
from tests.engine.small_models import NOISE, mlp, normalised
from tests.rounds import play, scalar, targets


def rounds_of(rule, module, *, cohorts=COHORTS, **how):
    method = build("fedavg", local=rule)
    how = {"batch_size": BATCH, "optimizer": Sgd(lr=0.1, momentum=0.9), "seed": SEED, **how}
    return play(method, images(sizes=SIZES), module, cohorts, **how)


def assert_same_training(rules, make=mlp, **how):
    """Compare models and reports of two rules, whose penalties are declared and written out."""
    found, wanted = (rounds_of(rule, make(), **how) for rule in rules)
    assert distance(found.model, wanted.model, NOISE if make is normalised else ()) <= 1e-9
    for ours, theirs in zip(found.updates, wanted.updates, strict=True):
        assert ours.reports.keys() == theirs.reports.keys()
        for name, values in theirs.reports.items():
            torch.testing.assert_close(ours.reports[name], values, rtol=1e-9, atol=1e-11)
        assert ours.reports["method_terms"].abs().max() > 1e-3


# ---- by hand -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sloped(FedAvg):
    """Sends each client its v: (k + 1) / 10 for client k."""

    def send(self, state, cohort):
        return {"model": state.model}, {"slope": torch.from_numpy((cohort.ids + 1) / 10)}


@dataclass(frozen=True)
class Pulled(LocalRule):
    strength: float

    def phases(self):
        return (Phase(penalty=Penalty(self.strength, self.slope)),)

    def slope(self, client):
        return {"head.weight": client.each["slope"].reshape(1, 1)}


def steps_by_hand(target, slope, *, strength, clip, lr, momentum, nesterov, decay, steps):
    """Steps on (w − t)² + s/2 (w − 0.5)² + v w from w = 0.5, and the mean of the last two terms."""
    w, velocity, terms = 0.5, 0.0, []
    for _ in range(steps):
        terms.append(strength / 2 * (w - 0.5) ** 2 + slope * w)
        gradient = 2 * (w - target) + strength * (w - 0.5) + slope
        gradient *= min(1.0, clip / (abs(gradient) + 1e-6))
        gradient += decay * w
        velocity = momentum * velocity + gradient
        w -= lr * (gradient + momentum * velocity if nesterov else velocity)
    return w, sum(terms) / steps


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("strength", [0.0, 1.5])
@pytest.mark.parametrize("clip", [None, 0.8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.3},
        {"momentum": 0.9},
        {"momentum": 0.7, "nesterov": True, "weight_decay": 0.1},
    ],
    ids=["plain", "decay", "momentum", "nesterov"],
)
def test_clipping_momentum_and_decay_come_after_the_penalty(options, clip, strength, chunk):
    goals = (3.0, -1.0, 0.2)
    played = play(
        build("fedavg", local=Pulled(strength), aggregation=Sloped()),
        targets(*goals),
        scalar(0.5),
        [[0, 1, 2]],
        chunk=chunk,
        steps=4,
        clip=clip,
        optimizer=Sgd(lr=0.1, **options),
    )
    wanted = [
        steps_by_hand(
            goal,
            (k + 1) / 10,
            strength=strength,
            clip=float("inf") if clip is None else clip,
            lr=0.1,
            momentum=options.get("momentum", 0.0),
            nesterov=options.get("nesterov", False),
            decay=options.get("weight_decay", 0.0),
            steps=4,
        )
        for k, goal in enumerate(goals)
    ]
    (updates,) = played.updates
    found = updates.params["head.weight"].flatten().tolist()
    assert found == pytest.approx([w for w, _ in wanted], abs=1e-13)
    terms = [term for _, term in wanted]
    assert updates.reports["method_terms"].tolist() == pytest.approx(terms, abs=1e-13)


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_linear_part_is_made_when_its_phase_begins(chunk):
    """Phases on (w - t)² from w = 0.5: a plain step, and one with v = 3 w, both with a rate of 0.1.

    The first one gives w' = 0.4 + 0.2 t. The second one gives w' - 0.1 (2 (w' - t) + 3 w'), which
    is 0.2 + 0.3 t.
    """

    @dataclass(frozen=True)
    class Later(LocalRule):
        def phases(self):
            return (Phase(), Phase(penalty=Penalty(linear=self.pull)))

        def pull(self, client):
            return {name: 3 * tensor for name, tensor in client.moved().items()}

    method, federation = build("fedavg", local=Later()), targets(3.0, -1.0, 0.2)
    how = {"chunk": chunk, "steps": 1, "optimizer": Sgd(lr=0.1)}
    (updates,) = play(method, federation, scalar(0.5), [[0, 1, 2]], **how).updates
    found = updates.params["head.weight"].flatten().tolist()
    assert found == pytest.approx([1.1, -0.1, 0.26], abs=1e-13)


@CHUNKS
def test_a_personal_part_is_kept_close_to_the_received_one(chunk):
    @dataclass(frozen=True)
    class Near(LocalRule):
        keeps = "personal.head"

        def phases(self):
            phase = Phase(move="personal.head", loss=personal_loss, penalty=Penalty(0.8))
            return (Phase(), phase)

    def turns(shared, own, received):
        def near(x, y):
            pairs = zip(own.parameters(), received.head.parameters(), strict=True)
            far = sum((mine - sent.detach()).square().sum() for mine, sent in pairs)
            return F.cross_entropy(own(shared.features(x)), y) + 0.4 * far

        plain = Turn([shared], lambda x, y: F.cross_entropy(shared(x), y))
        return [plain, Turn([own], near)]

    played = rounds_of(Near(), mlp(), chunk=chunk)
    wanted, owned = rounds_by_hand(mlp(), turns, COHORTS, make_own=lambda shared: mlp().head)
    assert distance(played.model, wanted) <= 1e-9
    start = {f"personal.head.{n}": tensor for n, tensor in mlp().head.state_dict().items()}
    kept = played.engine.memory.read(EVERYONE, {"kept": start})[0]["kept"]
    for client, module in owned.items():
        own = {f"personal.head.{n}": tensor for n, tensor in module.state_dict().items()}
        assert distance({n: rows[client] for n, rows in kept.items()}, own) <= 1e-9


def test_terms_that_are_reported_are_those_of_the_equation():
    """Two steps on all samples: the mean of s/2 ‖w − wᵗ‖² + ⟨w, v⟩ before the first and second."""
    how = {"cohorts": [EVERYONE], "batch_size": 64, "optimizer": Sgd(lr=0.1)}
    one, two = (rounds_of(Declared(), mlp(), steps=steps, **how) for steps in (1, 2))
    received = one.states[0].model
    for client in EVERYONE:
        after = {name: rows[client] for name, rows in one.updates[0].params.items()}
        terms = [
            sum(
                0.7 / 2 * (w[n] - received[n]).square().sum() - 0.1 * (w[n] * received[n]).sum()
                for n in received
            )
            for w in (received, after)
        ]
        found = two.updates[0].reports["method_terms"][client].item()
        assert found == pytest.approx(float(sum(terms)) / 2, rel=1e-9)


# ---- against terms in the losses -----------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize(
    "optimizer",
    [
        Sgd(lr=0.1),
        Sgd(lr=0.1, momentum=0.7, nesterov=True, weight_decay=0.05),
        optimizer_named("adamw", lr=0.01),
        optimizer_named("rmsprop", lr=0.01, momentum=0.5),
    ],
    ids=["sgd", "nesterov", "adamw", "rmsprop"],
)
def test_any_optimizer_steps_as_with_terms_in_the_loss(optimizer, clip, chunk):
    rules = Declared(), Written()
    assert_same_training(rules, optimizer=optimizer, clip=clip, chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(("strength", "sloped"), [(0.7, False), (0.0, True), (0.7, True)], ids=str)
def test_buffers_take_no_part(strength, sloped, chunk):
    rules = Declared(strength, sloped), Written(strength, sloped)
    assert_same_training(rules, make=normalised, chunk=chunk)


def doubled(client):
    return 2 * client.task_loss()


@CHUNKS
@pytest.mark.parametrize(
    "phase",
    [
        Phase(gradient=MetaGradient(0.05)),
        Phase(gradient=MetaGradient(), loss=(task_loss, doubled), batch="split"),
        Phase(gradient=MetaGradient(0.05, delta=0.1)),
        Phase(gradient=SharpnessGradient(0.05)),
        Phase(gradient=SharpnessGradient(0.05, eta=0.2)),
        Phase(loss=(task_loss, doubled)),
        Phase(loss=doubled, move="head"),
    ],
    ids=["meta", "split", "hessian", "sam", "asam", "losses", "head"],
)
def test_any_gradient_rule_has_the_penalty_in_its_losses(phase, chunk):
    rules = Declared(phase=phase), Written(phase=phase)
    assert_same_training(rules, chunk=chunk, epochs=2)


@CHUNKS
@pytest.mark.parametrize("align", [0.0, 0.5])
def test_bgp_has_the_penalty_in_both_of_its_steps(align, chunk):
    for restore in (False, True):
        (phase,) = build("bgp", align=align, restore=restore).local.phases()
        rules = Declared(phase=phase), Written(phase=phase)
        assert_same_training(rules, chunk=chunk)


def test_a_sum_over_batches_has_the_penalty_of_each():
    """With weights 1 and 1/2 a step feels the penalty one and a half times."""
    phase = Phase(gradient=Weighted())
    found = rounds_of(Declared(phase=phase), mlp())
    wanted = rounds_of(Written(phase=phase), mlp())
    assert distance(found.model, wanted.model) <= 1e-9
    once = rounds_of(Declared(phase=replace(phase, gradient=Weighted((1.0, 0.0)))), mlp())
    assert distance(found.model, once.model) > 1e-3


@pytest.mark.parametrize("method", ["fedprox", "ditto", "feddyn", "scaffold"])
def test_clients_train_stacked_as_one_by_one(method):
    how = {"batch_size": BATCH, "epochs": 2, "optimizer": Sgd(lr=0.05, momentum=0.5), "clip": 0.5}
    one, stacked = (
        play(build(method), images(sizes=SIZES), mlp(), COHORTS, chunk=chunk, **how)
        for chunk in (1, 10)
    )
    assert distance(stacked.model, one.model) <= 1e-12
    for ours, theirs in zip(stacked.updates, one.updates, strict=True):
        torch.testing.assert_close(
            ours.reports["method_terms"], theirs.reports["method_terms"], rtol=1e-9, atol=1e-12
        )


# ---- what is declared ----------------------------------------------------------------------------


def test_a_penalty_of_nothing_changes_nothing():
    plain = rounds_of(LocalRule(), mlp())
    empty = rounds_of(Heads(Phase(penalty=Penalty())), mlp())
    assert distance(empty.model, plain.model) == 0
    assert not empty.updates[-1].reports["method_terms"].any()


@pytest.mark.parametrize("strength", [-0.1, float("nan"), float("inf"), "much"])
def test_a_strength_that_pushes_apart_is_refused(strength):
    with pytest.raises(InputError, match="the strength of a Penalty must be a finite number of at"):
        Penalty(strength)


@pytest.mark.parametrize("given", [0.1, Penalty, lambda client: {}])
def test_a_penalty_of_another_type_is_refused(given):
    with pytest.raises(InputError, match="must be a Penalty, such as Penalty\\(0.1\\), got"):
        Phase(penalty=given)


@CHUNKS
def test_a_linear_part_may_look_at_other_parameters(chunk):
    """Without a batch, the client has copies with other parameters, and outputs for own samples."""
    samples = torch.ones(2, 2, 5, 5).double()
    with torch.no_grad():
        sent = mlp().double()(samples).sum()

    def elsewhere(client):
        shift = client.at(client.received, samples).output().sum()
        return {name: shift + tensor for name, tensor in client.personal().moved().items()}

    def by_hand(client):
        return {name: sent + tensor for name, tensor in client.received.items()}

    found, wanted = (
        rounds_of(
            Heads(Phase(penalty=Penalty(linear=linear))), mlp(), cohorts=COHORTS[:1], chunk=chunk
        ).model
        for linear in (elsewhere, by_hand)
    )
    assert distance(found, wanted) <= 1e-12
    plain = rounds_of(LocalRule(), mlp(), cohorts=COHORTS[:1], chunk=chunk).model
    assert distance(plain, wanted) > 1e-3


def test_a_linear_part_that_is_a_tree_is_refused():
    with pytest.raises(InputError, match="linear of a Penalty must be a function of a client"):
        Penalty(linear={"head.weight": torch.zeros(2)})


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda client: None, "linear of a Penalty returned NoneType; valid: a tree with a tensor"),
        (lambda client: list(client.received.values()), "linear of a Penalty returned list; valid"),
        (lambda client: {}, r"returned nothing for features.1.weight; valid: .* shape \[12, 50\]"),
        (
            lambda client: {n: tensor[0] for n, tensor in client.received.items()},
            r"returned .*\[50\] for features.1.weight; valid: a tree .* of shape \[12, 50\]",
        ),
        (lambda client: {"w": client.x}, "linear of a Penalty uses samples, but it is called once"),
        (lambda client: {"w": client.features()}, "linear of a Penalty uses samples"),
        (lambda client: {"w": client.y}, "linear of a Penalty uses samples"),
    ],
    ids=["none", "list", "empty", "shape", "x", "features", "y"],
)
def test_a_linear_part_that_is_none_is_refused(returned, message, chunk):
    rule = Heads(Phase(penalty=Penalty(linear=returned)))
    with pytest.raises(InputError, match=message):
        rounds_of(rule, mlp(), chunk=chunk)


def test_a_linear_part_with_a_branch_on_values_is_refused_for_many_clients():
    def careful(client):
        return client.received if client.memory["way"]["head.bias"].sum().item() > 0 else {}

    @dataclass(frozen=True)
    class Careful(Declared):
        def phases(self):
            return (Phase(penalty=Penalty(linear=careful)),)

    with pytest.raises(InputError, match="linear of a Penalty cannot be called for many clients"):
        rounds_of(Careful(), mlp(), chunk=3)
