"""Wrapped methods: what is passed on, how they are written, and their runs."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import yaml

from equipoise import load
from equipoise.cli.show.methods import method_documents
from equipoise.config import experiment_from, load_experiment
from equipoise.engine.settings import Machine, Training
from equipoise.errors import InputError
from equipoise.method import Method, Sees
from equipoise.methods import build, describe, describe_part, make_part, names, options_of
from equipoise.methods.fedprox import FedProx
from equipoise.optimizers import Sgd
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from tests.engine.every_method import fitting
from tests.engine.federations import images
from tests.engine.small_models import batchnorm
from tests.own_wrappers import Sharpened, Twice, Unchanged, make_known
from tests.rounds import play, scalar, targets, weight
from tests.run.small import Stop, promised, small_run, stop_after

FAIR = {
    "name": "fedprox",
    "mu": 0.3,
    "aggregation": {"name": "fedadam", "lr": 0.5},
    "weights": "uniform",
}


@pytest.fixture(autouse=True)
def known(monkeypatch):
    make_known(monkeypatch)


def trained(method, data, model, rounds=2):
    """The state and the personal models after two rounds."""
    trainer = Trainer(
        data,
        method,
        method.extend(model, data.shape, 0),
        Training(rounds=rounds, cohort=6, batch_size=8, optimizer=Sgd(lr=0.05)),
        Machine(device="cpu", precision="float64", chunk=10),
        Evaluation(every=0),
        seed=0,
    )
    trainer.run()
    own = trainer.personal_models(trainer.federation.seen)[1] if trainer.engine.remembering else {}
    return trainer.state.model, trainer.global_model, own, list(trainer.rounds)


@pytest.mark.parametrize("name", names())
def test_a_wrapper_that_changes_nothing_gives_what_its_host_gives(name):
    *found, rows = trained(build("unchanged", host=name), *fitting(name))
    *wanted, plain = trained(build(name), *fitting(name))
    assert rows == plain
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("name", names())
def test_a_wrapper_says_of_itself_what_its_host_says(name):
    host = build(name)
    method = build("unchanged", host=host)
    assert method.needs_images == host.needs_images
    assert method.name == "unchanged"
    assert (method.weights, method.sees, method.usual_model, method.personal) == (
        host.weights,
        host.sees,
        host.usual_model,
        host.personal,
    )


def test_losses_and_the_prior_by_hand():
    """F = (w - 3)² with 1 sample and (w + 1)² with 3: from w = 1, gradients -4 and 4, doubled;
    steps of 0.1.

    Models 1.8 and 0.2; the prior (1/4, 3/4) squared is (1, 9)/10.
    """
    method = build("sharpened", factor=2.0, power=2.0)
    played = play(
        method,
        targets(3.0, -1.0, samples=[1, 3]),
        scalar(1.0),
        [[0, 1]],
        steps=1,
        optimizer=Sgd(lr=0.1),
    )
    assert weight(played.model) == pytest.approx(0.1 * 1.8 + 0.9 * 0.2, abs=1e-13)
    assert (
        weight(
            played.updates[0].params | {"head.weight": played.updates[0].params["head.weight"][0]}
        )
        == 1.8
    )


def test_bytes_asked_through_another_prior_are_counted():
    method, plain = build("sharpened", host="faa", power=2.0), build("faa")
    ours, theirs = (play(m, images(), batchnorm(), [[0, 3, 4]]).cohorts[0] for m in (method, plain))
    # The wrapper changes the loss, so clients report the difference.
    assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up + 8 * 3, theirs.bytes_down)


# ---- how they are written ------------------------------------------------------------------------

NESTED = [
    {"name": "unchanged", "host": "fedprox"},
    {"name": "unchanged", "host": FAIR},
    {
        "name": "sharpened",
        "factor": 2.0,
        "uses": ["a", "b"],
        "host": {"name": "scaffold", "sampling": "size"},
    },
    {"name": "unchanged", "host": {"name": "sharpened", "power": 0.5, "host": FAIR}},
    {"name": "fedavg", "local": {"name": "twice", "inner": {"name": "fedprox", "mu": 0.7}}},
]


@pytest.mark.parametrize("given", NESTED, ids=str)
def test_describe_and_build_are_inverse(given):
    method = build(**given)
    plain = json.loads(json.dumps(describe(method)))
    assert build(**plain) == method
    assert hash(build(**plain)) == hash(method)
    assert describe(build(**plain)) == describe(method)
    assert experiment_from({"method": plain, "data": "digits"}).method == method


def test_a_method_inside_keeps_its_name_and_options():
    assert describe(build("unchanged", host=FAIR)) == {
        "name": "unchanged",
        "host": {
            "name": "fedprox",
            "mu": 0.3,
            "weights": "uniform",
            "sampling": {"name": "uniform"},
            "aggregation": {"name": "fedadam", "lr": 0.5, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
        },
    }
    assert describe_part(Twice(FedProx(0.7))) == {
        "name": "twice",
        "inner": {"name": "fedprox", "mu": 0.7},
    }
    assert make_part({"name": "twice", "inner": "fedprox"}) == Twice(FedProx())


def test_a_host_may_be_a_name_a_mapping_or_a_method():
    wanted = build("unchanged", host="fedprox")
    assert (
        wanted
        == build("unchanged", host={"name": "fedprox"})
        == build("unchanged", host=build("fedprox"))
    )
    assert (
        build("unchanged")
        == build("unchanged", host="fedavg")
        == build("unchanged", **options_of("unchanged"))
    )
    assert isinstance(options_of("unchanged")["host"], Method)


def test_weights_and_parts_beside_the_host_are_the_hosts():
    method = build(
        "unchanged", host={"name": "fedprox", "mu": 2.0}, weights="uniform", aggregation="fedyogi"
    )
    inside = {"name": "fedprox", "mu": 2.0, "weights": "uniform", "aggregation": "fedyogi"}
    assert method == build("unchanged", host=inside)
    sized = build("unchanged", host={"name": "fedavg", "sampling": "size"})
    assert (
        build("unchanged", host=sized.local.host)
        == sized
        != build("unchanged", host=sized.local.host, sampling="uniform")
    )


def test_the_server_sees_what_the_host_shows_it():
    assert build("unchanged", host="fedavg").sees is Sees.SUMS
    assert build("unchanged", host={"name": "sharpened", "host": "fedmgda"}).sees is Sees.UPDATES


def test_the_table_of_methods_names_the_host():
    (row,) = [document for document in method_documents() if document["name"] == "unchanged"]
    assert row["hyper_parameters"]["host"]["name"] == "fedavg"
    json.dumps(row)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            {"name": "unchanged", "host": "fedporx"},
            "method.host: unknown method 'fedporx'; did you mean 'fedprox'",
        ),
        (
            {"name": "unchanged", "host": {"name": "fedprox", "mu": "x"}},
            "^method.host.mu: fedprox.mu must be a number",
        ),
        (
            {"name": "unchanged", "host": 3},
            "method.host must be a name, a mapping with 'name' or a method, got 3",
        ),
        ({"name": "unchanged", "hots": "fedavg"}, "'hots'.*did you mean 'host'"),
        (
            {"name": "fedavg", "local": {"name": "twice", "inner": "fedadam"}},
            "'fedadam' is not a local",
        ),
        (
            {"name": "fedavg", "local": "unchanged"},
            "method.local: 'unchanged' wraps a whole method; valid: method: {name",
        ),
    ],
)
def test_mistakes_are_named(method, message):
    with pytest.raises(InputError, match=message):
        build(**method)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            {"name": "unchanged", "host": {"name": "fedprox", "muu": 1}},
            "'method.host.muu'.*did you mean 'method.host.mu'",
        ),
        (
            {"name": "unchanged", "host": {"name": "fedprox", "mu": "x"}},
            "method.host.mu must be a number, got 'x'",
        ),
        ({"name": "unchanged", "host": "fedporx"}, "unknown method 'fedporx' in method.host of"),
        (
            {
                "name": "unchanged",
                "host": {"name": "fedavg", "aggregation": {"name": "qffl", "qq": 1}},
            },
            "'method.host.aggregation.qq'",
        ),
    ],
)
def test_mistakes_in_experiments_name_the_key(method, message):
    with pytest.raises(InputError, match=message):
        experiment_from({"method": method, "data": "digits"})


def test_options_of_the_host_can_be_overridden(tmp_path):
    (tmp_path / "experiment.yaml").write_text(
        "method: {name: sharpened, host: fedprox}\ndata: digits\n"
    )
    made = load_experiment(tmp_path / "experiment.yaml", ["method.host.mu=2", "method.factor=0.5"])
    assert made.method == build("sharpened", factor=0.5, host={"name": "fedprox", "mu": 2.0})
    again = experiment_from(made.plain())
    assert again.method == made.method


# ---- runs ----------------------------------------------------------------------------------------

RUN = {"name": "sharpened", "factor": 0.9, "power": 0.5, "host": {"name": "scaffold", "lr": 0.9}}


def test_a_run_can_be_resumed_and_loaded(tmp_path):
    whole = small_run(tmp_path / "whole", RUN, rounds=4)
    with pytest.raises(Stop):
        small_run(tmp_path / "run", RUN, rounds=4, on_round=stop_after(2))
    small_run(tmp_path / "run", build(**RUN), rounds=4, resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")
    assert whole.config["method"] == describe(build(**RUN))
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert build(**written["method"]) == build(**RUN)
    shape = np.zeros((2, 5), dtype=np.float32)
    assert load(tmp_path / "run")(torch.from_numpy(shape)).shape == (2, 3)


def test_a_run_with_another_host_is_not_resumed(tmp_path):
    with pytest.raises(Stop):
        small_run(tmp_path / "run", RUN, rounds=3, on_round=stop_after(1))
    with pytest.raises(InputError, match="lr"):
        small_run(
            tmp_path / "run",
            {**RUN, "host": {"name": "scaffold", "lr": 0.8}},
            rounds=3,
            resume=True,
        )


def test_classes_pass_on_what_they_do_not_have():
    assert Unchanged(build("fediir")).head_gradient.__name__ == "head_gradient"
    with pytest.raises(AttributeError):
        _ = Sharpened().nothing_of_the_kind


def test_clients_finish_only_if_the_host_or_the_wrapper_does():
    @dataclass(frozen=True)
    class Finishing(Unchanged):
        def finish(self, client):
            return super().finish(client)

    plain, scaffold = build("fedavg"), build("scaffold")
    assert not Unchanged(plain).finishes
    assert Unchanged(scaffold).finishes
    assert Finishing(plain).finishes
