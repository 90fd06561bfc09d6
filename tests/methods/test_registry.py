"""The registry: every method by name, with options that are checked, written and read back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from equipoise.data import load
from equipoise.errors import InputError
from equipoise.method import Method, Sees
from equipoise.methods import (
    SLOTS,
    build,
    describe,
    make_part,
    names,
    options_of,
    part_class,
    register,
    slots_of,
)
from equipoise.methods.fedavg import FedAvg, UniformSampler
from equipoise.methods.fedprox import FedProx
from equipoise.methods.scaffold import Scaffold
from equipoise.run.api import train


def test_the_methods_of_this_folder_are_found():
    wanted = {"fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "scaffold", "local", "central"}
    assert wanted <= set(names())
    assert names() == sorted(names())
    assert not {"uniform", "size", "plain", "everyone"} & set(names()), "parts alone are no methods"


@pytest.mark.parametrize("name", names())
def test_a_method_knows_its_name_its_options_and_what_the_server_sees(name):
    part = part_class(name)
    assert part.name == name
    assert slots_of(part)
    assert part.__doc__
    assert isinstance(build(name).sees, Sees)
    assert build(name, **options_of(name)) == build(name), "giving the defaults changes nothing"


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(
    "around", [{}, {"weights": "uniform", "sampling": "size"}], ids=["usual", "changed"]
)
def test_describe_and_build_are_inverse(name, around):
    method = build(name, **around)
    plain = json.loads(json.dumps(describe(method)))
    assert build(**plain) == method


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedprox", {"mu": 0.7}),
        ("fedavgm", {"momentum": 0.5, "variant": "nesterov"}),
        ("fedprox", {"mu": 0.7, "aggregation": {"name": "fedadam", "lr": 0.5}}),
        ("fedavg", {"local": {"name": "fedprox", "mu": 2.0}}),
        ("scaffold", {"lr": 0.5}),
    ],
)
def test_changed_options_survive_the_round_trip(name, options):
    method = build(name, **options)
    assert method != build(name)
    assert build(**describe(method)) == method


@pytest.mark.parametrize("name", names())
def test_every_method_runs_on_digits_with_its_defaults(name):
    run = train(load("digits"), method=name, rounds=2)
    results = run.summary["results"]
    assert results
    for of_model in results.values():
        assert 0.05 <= of_model["seen"]["mean"] <= 1
        assert np.isfinite(of_model["seen"]["sigma_clients"])
    model = run.model(None if run.trainer.has_global else 0)
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
    assert run.summary["rounds"] == 2


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: build("fedporx"), "unknown method 'fedporx'; did you mean 'fedprox'"),
        (lambda: build("plain"), "unknown method 'plain'"),
        (lambda: build("fedprox", muu=0.1), "hyper-parameter of fedprox 'muu'.*did you mean 'mu'"),
        (lambda: build("fedavg", samplign="size"), "'samplign'.*did you mean 'sampling'"),
        (lambda: build("fedavg", sampling="siz"), "'siz'.*did you mean 'size'"),
        (
            lambda: build("fedavg", sampling="fedprox"),
            "'fedprox' is not a sampler; valid: .*size, uniform",
        ),
        (lambda: build("fedavg", local="fedadam"), "'fedadam' is not a local; valid: .*fedprox"),
        (lambda: build("fedavg", local={"mu": 1.0}), "method.local is {'mu': 1.0} without a name"),
        (
            lambda: build("fedavg", aggregation=3),
            "method.aggregation must be a name, a mapping or a part, got 3",
        ),
        (lambda: part_class("fedavgn"), "did you mean 'fedavg"),
    ],
)
def test_mistakes_are_named(ask, message):
    with pytest.raises(InputError, match=message):
        ask()


def test_parts_are_made_from_names_mappings_or_themselves():
    mine = FedProx(mu=3.0)
    assert make_part(mine, "local") is mine
    assert make_part("fedprox", "local") == FedProx()
    assert make_part({"name": "fedprox", "mu": 3.0}, "local") == mine
    assert build("fedavg", local=mine).local is mine


def test_parts_that_do_not_fit_together_are_refused():
    with pytest.raises(
        InputError,
        match="'scaffold': Scaffold needs control, which FedAvg does not provide; "
        "valid: aggregation 'scaffold'",
    ):
        build("scaffold", aggregation="fedavg")
    with pytest.raises(
        InputError,
        match="'scaffold': Scaffold needs control_change, which FedProx does not provide; "
        "valid: local 'scaffold'",
    ):
        build("scaffold", local="fedprox")
    usual = build("fedavg")
    with pytest.raises(InputError, match="'mine': Scaffold needs control, which FedAvg"):
        Method(
            name="mine",
            sampler=UniformSampler(),
            local=Scaffold(),
            aggregation=FedAvg(),
            view=usual.view,
        )


def test_the_server_sees_what_the_most_curious_part_sees():
    assert build("local").sees is Sees.NOTHING
    assert build("fedprox").sees is Sees.SUMS
    assert build("fedprox").sees.words == "sums only"
    assert len({level.words for level in Sees}) == len(Sees)


def test_slots():
    assert slots_of(part_class("scaffold")) == ["local", "aggregation"]
    assert slots_of(part_class("central")) == ["view"]
    assert list(SLOTS) == ["sampler", "local", "aggregation", "view", "guard"]
    assert build("local").personal
    assert not build("fedavg").personal


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"name": "fedprox", "local": "ditto"}, "local 'ditto'; name .*: {name: ditto}$"),
        ({"name": "fedprox", "mu": 5, "local": {"name": "ditto", "lam": 2}}, ": {name: ditto}$"),
        ({"name": "fedrep", "local": "plain"}, "local 'plain'; .*: {name: fedavg, local: plain}$"),
        ({"name": "qffl", "aggregation": "fedavg"}, "aggregation 'fedavg'; .*: {name: fedavg}$"),
        ({"name": "qffl", "aggregation": "fedavg", "local": "fedprox"}, "fedavg, local: fedprox}$"),
        ({"name": "central", "view": "everyone"}, ": {name: fedavg, view: everyone}$"),
        (
            {"name": "scaffold", "local": "fedprox", "aggregation": "qffl"},
            "local 'fedprox', aggregation 'qffl'; .*: {name: fedprox, aggregation: qffl}$",
        ),
    ],
)
def test_a_method_of_which_nothing_remains_is_refused(given, named):
    beginning = f"^nothing of method '{given['name']}' remains, because it is replaced by "
    with pytest.raises(InputError, match=f"{beginning}.*{named}"):
        build(**given)


def test_the_part_that_a_method_is_named_after_may_be_given():
    other = {"name": "fedprox", "mu": 2}
    assert build("fedprox", local=other) == build("fedprox", mu=2)
    with pytest.raises(InputError, match="^method 'fedprox': mu must be given in its local, which"):
        build("fedprox", mu=1, local=other)
    # The parts of FedAvg are those that all methods have by default.
    assert build("fedavg", aggregation="qffl", local="fedprox").name == "fedavg"


def test_a_wrapper_refuses_a_host_of_which_nothing_remains():
    with pytest.raises(InputError, match=r"nothing of method 'fedprox' remains.*: {name: ditto}$"):
        build("client2vec", host="fedprox", local="ditto")


def test_a_name_that_is_taken_is_refused():
    class Impostor(FedProx):
        """Another part."""

    with pytest.raises(
        InputError, match="the name 'fedprox' of .*Impostor is taken by FedProx; choose another"
    ):
        register("fedprox")(Impostor)
    assert part_class("fedprox") is FedProx


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("fedavgm", {"momentum": 1.2}, "fedavgm.momentum must be at least 0 and below 1, got 1.2"),
        ("fedavgm", {"lr": -1.0}, "fedavgm.lr must be a finite number of at least 0, got -1.0"),
        (
            "fedadam",
            {"lr": float("nan")},
            "fedadam.lr must be a finite number of at least 0, got nan",
        ),
        ("scaffold", {"lr": -0.5}, "scaffold.lr must be a finite number of at least 0, got -0.5"),
    ],
)
def test_rates_of_the_server_out_of_range_are_refused(method, options, message):
    with pytest.raises(InputError, match=message):
        build(method, **options)
