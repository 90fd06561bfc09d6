"""User-defined parts: what is refused at registration, by name, and in combination."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from equipoise import methods, train
from equipoise.data import load
from equipoise.errors import InputError
from equipoise.exchange import REQUESTED_REPORTS
from equipoise.method import (
    Aggregation,
    LocalRule,
    Phase,
    Sampler,
    State,
    Updates,
    combine_checked,
    mix,
    mix_tree,
)
from equipoise.methods import build, describe, make_part, register
from equipoise.methods.fedavg import FedAvg


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Remove what a test registers."""
    methods.names()
    monkeypatch.setattr(methods, "_PARTS", dict(methods._PARTS))
    monkeypatch.setattr(methods, "_METHODS", set(methods._METHODS))


@dataclass(frozen=True)
class Varied(LocalRule):
    """One hyper-parameter of every type."""

    rate: float = 0.5
    count: int = 1
    maybe: float | None = None
    on: bool = False
    word: str = "a"
    pair: tuple[float, int] = (1.0, 2)
    many: tuple[float, ...] = ()
    words: tuple[str, ...] | None = None
    either: int | str = 1
    bare: tuple = ()
    tables: tuple[dict[str, float], ...] = ()
    anything: dict[str, float] | None = None

    def phases(self):
        """Train as usual."""
        return (Phase(),)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"name": "fedprox", "mu": "big"}, "method.mu: fedprox.mu must be a number, got 'big'"),
        ({"name": "qffl", "q": "1"}, "method.q: qffl.q must be a number, got '1'"),
        (
            {"name": "qffl", "lipschitz": "1"},
            "method.lipschitz: qffl.lipschitz must be a number or None, got '1'",
        ),
        ({"name": "gifair", "lam": "1"}, "method.lam: gifair.lam must be a number, got '1'"),
        ({"name": "gifair", "exact": 1}, "method.exact: gifair.exact must be true or false, got 1"),
        ({"name": "fedcrc", "tau": "x"}, "method.tau: fedcrc.tau must be a number, got 'x'"),
        ({"name": "fedprox", "mu": None}, "method.mu: fedprox.mu must be a number, got None"),
        ({"name": "fedprox", "mu": True}, "method.mu: fedprox.mu must be a number, got True"),
        # If a part has its own check, its message is used instead of that for the type.
        (
            {"name": "fedrep", "head_epochs": 1.5},
            "^method.head_epochs: fedrep.head_epochs must be a whole number of at least 1, got 1.5",
        ),
        (
            {"name": "fedavgm", "variant": 3},
            "^method.variant: unknown fedavgm.variant 3. Valid: dampened, hsu, nesterov",
        ),
        (
            {"name": "fedavg", "local": {"name": "fedprox", "mu": [1]}},
            r"method.local.mu: fedprox.mu must be a number, got \[1\]",
        ),
        (
            {"name": "fedavg", "aggregation": {"name": "fedadam", "lr": "fast"}},
            "fedadam.lr must be a finite number of at least 0, got 'fast'",
        ),
    ],
)
def test_hyper_parameters_of_another_type_are_named(method, message):
    with pytest.raises(InputError, match=message):
        train(load("digits"), method=method, rounds=1)


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("count", 2.0, "a whole number"),
        ("count", True, "a whole number"),
        ("on", "no", "true or false"),
        ("pair", (1.0, 2, 3), "a tuple of 2: a number, a whole number"),
        ("pair", (1.0, 2.5), "a tuple of 2: a number, a whole number"),
        ("pair", 1.0, "a tuple of 2: a number, a whole number"),
        ("many", (1, "x"), "a tuple, each of it a number"),
        ("many", "12", "a tuple, each of it a number"),
        ("words", "abc", "a tuple, each of it text or None"),
        ("either", 0.5, "a whole number or text"),
        ("bare", 1, "a tuple"),
        ("tables", 1, "a tuple, each of it a dict"),
    ],
)
def test_types_are_those_of_the_annotations(option, value, wanted):
    register("varied")(Varied)
    with pytest.raises(InputError) as caught:
        build("varied", **{option: value})
    assert str(caught.value) == f"method.{option}: varied.{option} must be {wanted}, got {value!r}"


@pytest.mark.parametrize(
    "options",
    [
        {"rate": 2},
        {"rate": np.float32(0.5)},
        {"count": np.int64(3)},
        {"maybe": 3},
        {"maybe": None},
        {"pair": [1, 2]},
        {"many": [1, 2.5]},
        {"many": ()},
        {"words": ("a", "b")},
        {"either": "x"},
        {"anything": 3},
        {"bare": (1, "x")},
        {"tables": [3]},
    ],
    ids=str,
)
def test_values_that_fit_are_taken_as_they_are(options):
    register("varied")(Varied)
    ((option, value),) = options.items()
    local = build("varied", **options).local
    assert getattr(local, option) == (tuple(value) if isinstance(value, list) else value)
    assert hash(local) == hash(build("varied", **options).local)


def test_what_was_described_and_written_down_still_fits():
    register("varied")(Varied)
    plain = json.loads(json.dumps(describe(build("varied", pair=(0.5, 1), words=("a",)))))
    assert build(**plain).local.rate == 0.5


def test_annotations_out_of_reach_are_left_alone():
    class Hidden:
        """Defined inside this function only."""

    @register("shy")
    @dataclass(frozen=True)
    class Shy(LocalRule):
        of: Hidden | None = None
        mu: float = 1.0

    assert build("shy", mu=2.0).local == Shy(mu=2.0)


def test_a_part_that_is_no_dataclass_is_refused_with_the_order_of_decorators():
    message = (
        r"is not yet a dataclass when it is registered; valid: @register\('late'\), "
        r"below it @dataclass\(frozen=True\), below that class Late"
    )
    with pytest.raises(InputError, match=message):

        @dataclass(frozen=True)
        @register("late")
        class Late(LocalRule):
            mu: float = 1.0

    assert "late" not in methods.names()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Aggregation, "Idle, registered as 'idle', is an Aggregation without a method 'combine'"),
        (Sampler, "Idle, registered as 'idle', is a Sampler without a method 'select'"),
        (object, "is not a part; it must be one of Sampler, LocalRule, Aggregation, View"),
    ],
)
def test_a_part_that_could_not_do_its_work_is_refused(kind, message):
    with pytest.raises(InputError, match=message):

        @register("idle")
        @dataclass(frozen=True)
        class Idle(kind):
            pass

    assert "idle" not in methods.names()


@pytest.mark.parametrize("kind", [Sampler, FedAvg])
def test_a_part_that_begins_says_that_it_needs_everyone(kind):
    def begin(self, state, everyone):
        return state

    def part(**more):
        return dataclass(frozen=True)(
            type("Early", (kind,), {"begin": begin, "select": begin, **more})
        )

    with pytest.raises(
        InputError,
        match="Early, registered as 'early', has a method 'begin'.*needs_everyone = True",
    ):
        register("early", method=False)(part())
    assert "early" not in methods._PARTS
    register("early", method=False)(part(needs_everyone=True))
    assert "early" in methods._PARTS


def test_what_is_sent_once_is_among_what_is_sent():
    @dataclass(frozen=True)
    class Sends(FedAvg):
        sends = ("means",)
        sends_once = ("means", "index")

    with pytest.raises(
        InputError, match="method 'fedavg': Sends sends index once, but does not name it in sends"
    ):
        build("fedavg", aggregation=Sends())


def test_hyper_parameters_need_defaults():
    @dataclass(frozen=True)
    class Strict(LocalRule):
        rate: float

    with pytest.raises(
        InputError, match="Strict, registered as 'strict', has no default for rate; add one"
    ):
        register("strict")(Strict)


def test_a_function_is_no_part():
    with pytest.raises(
        InputError, match="average, registered as 'idle', is not a part; it must be one of Sampler"
    ):

        @register("idle")
        def average():
            pass


def test_what_a_part_needs_may_come_from_another():
    @register("renamed")
    @dataclass(frozen=True)
    class Renamed(FedAvg):
        """A part without its own code."""

    assert isinstance(build("renamed").aggregation, Renamed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "foo"}, "unknown method.sampling 'foo'. Valid: size, uniform"),
        (
            {"sampling": "sise"},
            "unknown method.sampling 'sise'; did you mean 'size'? Valid: size, uniform",
        ),
        (
            {"sampling": {"name": ["size"]}},
            "unknown method.sampling ['size']; did you mean 'size'? Valid: size, uniform",
        ),
        ({"sampling": "plain"}, "method.sampling: 'plain' is not a sampler; valid: size, uniform"),
    ],
)
def test_a_name_that_no_part_has_is_refused_with_those_of_its_slot(options, message):
    with pytest.raises(InputError) as caught:
        build("fedavg", **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("slot", ["local", "aggregation"])
def test_only_parts_of_the_slot_are_suggested(slot):
    with pytest.raises(InputError, match=f"unknown method.{slot} 'xyz'") as caught:
        build("fedavg", **{slot: "xyz"})
    assert str(caught.value).endswith(f"Valid: {', '.join(methods.fitting(slot))}")
    assert "uniform" not in str(caught.value)
    assert make_part("fedprox").mu == 0.1


@dataclass(frozen=True)
class Careless(Aggregation):
    """Returns a given value."""

    name = "careless"
    result: object = None

    def combine(self, state, updates, cohort):
        """Forget what the cohort sent."""
        return self.result


BEFORE = State(
    3, {"features.w": torch.zeros(2, 3), "head.b": torch.zeros(3)}, {"speed": {"w": torch.zeros(1)}}
)


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        (None, "must return a State, got NoneType"),
        ({"features.w": torch.zeros(2, 3)}, "must return a State, got dict"),
        (replace(BEFORE, model={"features.w": torch.zeros(2, 3)}), "left head.b out of the model"),
        (BEFORE.with_global({"head.c": torch.zeros(3)}), "added head.c to the model"),
        (
            BEFORE.with_global({"head.b": torch.zeros(1, 3)}),
            r"changed the shape of head.b from \(3,\) to \(1, 3\)",
        ),
        (BEFORE.with_global({"head.b": 0.5}), "made head.b a float instead of a tensor"),
    ],
)
def test_what_is_no_next_state_is_refused(result, fault):
    with pytest.raises(InputError, match=f"^aggregation 'careless': combine {fault}"):
        combine_checked(Careless(result), BEFORE, None, None)


def test_a_next_state_may_have_other_numbers_in_another_order_and_other_things_kept():
    after = State(3, {"head.b": torch.ones(3), "features.w": torch.ones(2, 3)}, {"pace": {}})
    assert combine_checked(Careless(after), BEFORE, None, None) is after


@pytest.mark.parametrize("tree", ["model", "speed"])
def test_a_state_that_is_changed_in_place_is_refused(tree):
    state = State(3, {"w": torch.zeros(3)}, {"speed": {"w": torch.zeros(3)}})

    class InPlace(Aggregation):
        name = "hasty"

        def combine(self, before, updates, cohort):
            (before.model if tree == "model" else before.server["speed"])["w"].add_(1)
            return before.with_global({"w": torch.ones(3)})

    with pytest.raises(
        InputError,
        match=f"^aggregation 'hasty': combine changed 'w' of '{tree}' of the state in place; ",
    ):
        combine_checked(InPlace(), state, None, None)


def stacked(**clients):
    return {name.replace("_", "."): torch.ones(2, *shape) for name, shape in clients.items()}


@pytest.mark.parametrize(
    ("sent", "forgotten"),
    [
        (Updates(stacked(features_w=(2, 3), head_b=(3,)), {}, {}, {}), True),
        # A buffer, such as a running mean of BatchNorm, counts as well.
        (Updates(stacked(features_w=(2, 3)), stacked(head_b=(3,)), {}, {}), True),
        # Clients keep the head, so nobody sends it.
        (Updates(stacked(features_w=(2, 3)), {}, {}, {}), False),
    ],
)
def test_a_tensor_that_clients_sent_and_combine_forgot_is_named(sent, forgotten):
    after = BEFORE.with_global({"features.w": torch.ones(2, 3)})
    if forgotten:
        with pytest.raises(
            InputError,
            match=r"^aggregation 'careless': combine did not set head.b of the model, which "
            r"clients sent; .* state.model\['head.b'\].clone\(\)",
        ):
            combine_checked(Careless(after), BEFORE, sent, None)
    else:
        assert combine_checked(Careless(after), BEFORE, sent, None) is after
    kept = after.with_global({"head.b": BEFORE.model["head.b"].clone()})
    for valid in (kept, BEFORE):
        assert combine_checked(Careless(valid), BEFORE, sent, None) is valid


@dataclass(frozen=True)
class Patient(FedAvg):
    """Sets the global model in every nth round only."""

    wait: int = 1

    def combine(self, state, updates, cohort):
        """Leave the model as it is in the other rounds."""
        return state if (state.round + 1) % self.wait else super().combine(state, updates, cohort)


def test_a_global_model_that_is_never_set_is_mentioned_once(caplog, tmp_path):
    digits, never, late = load("digits"), Patient(wait=9), Patient(wait=3)
    how = {"method": build("fedavg", aggregation=never), "out": tmp_path / "run"}
    train(digits, **how, rounds=2)
    (said,) = caplog.messages
    assert said.startswith(
        "the global model is still the initial one: combine of aggregation 'fedavg' has set none "
        "of its tensors in 2 rounds; valid: state.with_global("
    )
    caplog.clear()
    # Nothing is known of the rounds before a run is resumed.
    train(digits, **how, rounds=3, resume=True)
    train(digits, method=build("fedavg", aggregation=late), rounds=3)
    # Clients that keep the whole model send nothing.
    train(digits, method="local", rounds=1)
    train(digits, method="central", rounds=1)
    assert caplog.messages == []


def test_a_run_stops_if_combine_forgets_the_statistics_of_batchnorm():
    @dataclass(frozen=True)
    class OnlyParams(FedAvg):
        def combine(self, state, updates, cohort):
            return state.with_global(mix_tree(updates.params, cohort.prior))

    digits = load("digits")
    with pytest.raises(InputError, match="combine did not set .*running_mean of the model"):
        train(digits, method=build("fedavg", aggregation=OnlyParams()), model="bncnn", rounds=1)


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (
            ("loss_befor",),
            "unknown report 'loss_befor' in needs of Curious; did you mean 'loss_before'? Valid: "
            "gradient_weight, loss_after, loss_before, lr, score_after, score_before, "
            "val_loss_after, val_loss_before, val_score_after, val_score_before",
        ),
        ("loss_before", "needs of Curious is 'loss_before'; valid: a tuple of names"),
    ],
)
def test_needs_that_no_client_can_report_are_refused(needs, message):
    curious = dataclass(frozen=True)(type("Curious", (FedAvg,), {"needs": needs}))
    for attempt in (
        lambda: register("curious")(curious),
        lambda: build("fedavg", aggregation=curious()),
    ):
        with pytest.raises(InputError) as caught:
            attempt()
        assert str(caught.value) == message
    assert "curious" not in methods.names()


def test_every_report_that_is_valid_in_needs_is_sent():
    found = {}

    @dataclass(frozen=True)
    class Curious(FedAvg):
        needs = REQUESTED_REPORTS

        def combine(self, state, updates, cohort):
            found.update({name: updates.reports[name] for name in self.needs})
            return state.with_global(mix(updates, cohort.prior))

    train(load("digits"), method=build("fedavg", aggregation=Curious()), rounds=1)
    assert len(found) == 10
    assert all(report.isfinite().all() for report in found.values())


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (Phase(), "a Phase"),
        (None, "None"),
        ([Phase(), "features"], "a list with 'features'"),
        ((Phase,), "a tuple with <class"),
    ],
    ids=["phase", "none", "text", "class"],
)
@pytest.mark.parametrize("name", ["phases", "adapt"])
def test_what_is_no_tuple_of_phases_is_refused(name, returned, what):
    rule = dataclass(frozen=True)(type("Single", (LocalRule,), {name: lambda self: returned}))
    with pytest.raises(
        InputError,
        match=f"{name} of Single returns {what}.*; valid: a tuple of phases, such as",
    ):
        build("fedavg", local=rule())
