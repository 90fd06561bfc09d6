"""Experiment files: what they accept, what they refuse, and with which messages."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml

from equipoise import methods
from equipoise.config import Override, experiment_from, load_experiment, read_yaml
from equipoise.config.suggesting import SYNONYMS
from equipoise.data.augment import Crop, Flip
from equipoise.engine.settings import FineTune, Machine, Training
from equipoise.errors import InputError
from equipoise.explain import settings
from equipoise.optimizers import Adam, Schedule, Sgd, TorchOptimizer
from equipoise.run.evaluation import Evaluation


def experiment(*overrides, **sections):
    return experiment_from({"data": "digits", **sections}, "x.yaml", overrides)


def refusal(*overrides, **sections):
    with pytest.raises(InputError) as caught:
        experiment(*overrides, **sections)
    return str(caught.value)


def test_defaults():
    made = experiment_from({"data": "digits"})
    assert made.method == methods.build("fedavg")
    assert made.training == Training(rounds=50, batch_size=10, epochs=1, optimizer=Sgd(lr=0.1))
    assert (made.machine, made.evaluation) == (Machine(), Evaluation())
    assert made.model == {"name": "mlp", "hidden": (64,), "dropout": 0.0}
    assert (made.seed, made.checkpoint_every) == (0, None)
    assert made.data == {
        "name": "digits",
        "partition": None,
        "splits": (0.7, 0.1, 0.2),
        "unseen": 0,
        "leave_out": None,
        "test": None,
        "encode": None,
        "encode_size": None,
        "seed": 0,
        "imbalance": 10.0,
    }


def test_the_partition_follows_the_seed_unless_it_has_its_own():
    assert experiment(seed=7).data["seed"] == 7
    assert experiment(seed=7, data={"name": "digits", "seed": 2}).data["seed"] == 2


def test_all_sections_arrive():
    made = experiment(
        method={
            "name": "fedprox",
            "mu": 2,
            "sampling": "size",
            "aggregation": {"name": "fedadam", "lr": 1},
        },
        data={
            "name": "digits",
            "imbalance": None,
            "unseen": [1, 2],
            "partition": {"name": "iid", "clients": 9},
        },
        model={"name": "mlp", "hidden": [8, 4]},
        training={
            "cohort": 3,
            "optimizer": {"name": "adamw", "betas": [0.5, 0.6]},
            "schedule": {"kind": "steps", "at": [2], "factors": ["1e-1"]},
            "augment": ["flip", {"name": "crop", "padding": 2}],
        },
        machine={"precision": "float64", "chunk": 2},
        evaluation={"select": "best", "patience": 4},
        checkpoint_every=5,
    )
    assert (made.method.local.mu, made.method.sampler.name, made.method.aggregation.lr) == (
        2.0,
        "size",
        1.0,
    )
    assert made.data["imbalance"] is None
    assert made.data["partition"] == {"name": "iid", "clients": 9, "min_samples": 3}
    assert made.federation().clients == 9
    assert made.federation().unseen.nonzero()[0].tolist() == [1, 2]
    assert made.model["hidden"] == [8, 4]
    assert made.training.optimizer == Adam(betas=(0.5, 0.6), decoupled=True, weight_decay=0.01)
    assert made.training.schedule == Schedule(kind="steps", at=(2,), factors=(0.1,))
    assert made.training.augment == (Flip(), Crop(padding=2))
    assert made.training.cohort == 3
    assert isinstance(made.training.cohort, int)
    assert (made.machine.chunk, made.evaluation.patience, made.checkpoint_every) == (2, 4, 5)


@pytest.mark.parametrize("name", methods.names())
def test_every_method_has_types_that_can_be_checked(name):
    options = {
        key: value
        for key, value in methods.options_of(name).items()
        if isinstance(value, int | float | str)
    }
    assert experiment(method={"name": name, **options}).method == methods.build(name)
    for key, value in options.items():
        if isinstance(value, int | float):
            assert refusal(method={"name": name, key: "big"}).startswith(
                f"x.yaml: method.{key} must be "
            )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["training.rounds=ten"],
            "--set training.rounds=ten: training.rounds must be a whole number, got 'ten'",
        ),
        (
            ["training.epochs=1.5"],
            "--set training.epochs=1.5: training.epochs must be a whole number or a list of 2 "
            "whole numbers, got 1.5",
        ),
        (
            ["training.clip=[1]"],
            "--set training.clip=[1]: training.clip must be a number or null, got [1]",
        ),
        (
            ["training.shuffle=maybe"],
            "--set training.shuffle=maybe: training.shuffle must be true or false, got 'maybe'",
        ),
        (
            ["training.rounds=yes"],
            "--set training.rounds=yes: training.rounds must be a whole number, got True "
            "(YAML reads yes, no, on and off as true and false)",
        ),
        (
            ["method=fedprox", "method.mu=big"],
            "--set method.mu=big: method.mu must be a number, got 'big'",
        ),
        (
            ["method=fedprox", "method.mu=-1"],
            "x.yaml, --set method=fedprox, --set method.mu=-1: method.mu: fedprox.mu must be at "
            "least 0 and finite, got "
            "-1.0",
        ),
        (
            ["data.splits=[0.5, 0.5]"],
            "--set data.splits=[0.5, 0.5]: data.splits must be a list of 3 numbers, got [0.5, 0.5]",
        ),
        (
            ["data.unseen=some"],
            "--set data.unseen=some: data.unseen must be a number or a list of whole numbers or "
            "names, got 'some'",
        ),
        (
            ["model.hidden=3"],
            "--set model.hidden=3: model.hidden must be a list of whole numbers, got 3",
        ),
        (["training=3"], "--set training=3: training must hold keys with values, got 3"),
        (
            ["method=[fedavg]"],
            "--set method=[fedavg]: method must be a name or a mapping with a name, got ['fedavg']",
        ),
        (["seed=-1"], "--set seed=-1: seed must be from 0 to 2**63 - 1, got -1"),
        (["seed.a=1"], "--set seed.a=1: seed is 0 and has no keys of its own"),
        (
            ["training.rounds=2024-01-01"],
            "--set training.rounds=2024-01-01: training.rounds must be a whole number",
        ),
        (
            ["training.augment=[crop, {name: crop, padding: a}]"],
            "training.augment.padding must be a whole number",
        ),
        (["rounds"], "--set 'rounds' is not of the form key=value, such as training.rounds=20"),
        (["training..rounds=1"], "--set 'training..rounds=1' is not of the form"),
        (["seed=[1"], "--set seed=[1: '[1' is not valid YAML"),
        (["seed={a: 1, a: 2}"], "the key 'a' comes twice"),
        (
            ["data.partition.clients=9"],
            "--set data.partition.clients=9: data.partition must be a name or a mapping",
        ),
        (
            ["data.partition=dirichlet"],
            "x.yaml, --set data.partition=dirichlet: partition 'dirichlet' needs clients",
        ),
        (
            ["model=logistic", "model.hidden=3"],
            "unknown key 'model.hidden' in --set model.hidden=3; there are no options",
        ),
    ],
)
def test_ill_typed_values_are_refused(overrides, message):
    assert message in refusal(*overrides, seed=0)


@pytest.mark.parametrize(
    ("sections", "unknown", "near"),
    [
        ({"trainig": {}}, "unknown key 'trainig' in x.yaml", "training"),
        ({"training": {"rouns": 3}}, "unknown key 'training.rouns' in x.yaml", "training.rounds"),
        (
            {"training": {"optimizer": {"lrr": 3}}},
            "unknown key 'training.optimizer.lrr' in x.yaml",
            "training.optimizer.lr",
        ),
        (
            {"training": {"schedule": {"flor": 3}}},
            "unknown key 'training.schedule.flor' in x.yaml",
            "training.schedule.floor",
        ),
        ({"training": {"schedule": "cosin"}}, "x.yaml: unknown schedule 'cosin'", "cosine"),
        ({"training": {"optimizer": "sdg"}}, "x.yaml: unknown optimizer 'sdg'", "sgd"),
        (
            {"training": {"augment": ["flipp"]}},
            "unknown augmentation 'flipp' in training.augment of x.yaml",
            "flip",
        ),
        ({"method": "fedprx"}, "unknown method 'fedprx' in x.yaml", "fedprox"),
        (
            {"method": {"name": "fedprox", "mue": 1}},
            "unknown key 'method.mue' in x.yaml",
            "method.mu",
        ),
        ({"method": {"sampling": "sise"}}, "unknown method.sampling 'sise' in x.yaml", "size"),
        (
            {"method": {"aggregation": {"name": "qfl"}}},
            "unknown method.aggregation 'qfl' in x.yaml",
            "qffl",
        ),
        ({"model": "mpl"}, "unknown model 'mpl' in x.yaml", "mlp"),
        ({"model": {"hiden": [1]}}, "unknown key 'model.hiden' in x.yaml", "model.hidden"),
        ({"data": "digit"}, "unknown data 'digit' in x.yaml", "digits"),
        (
            {"data": {"name": "digits", "imbalanse": 2}},
            "unknown key 'data.imbalanse' in x.yaml",
            "data.imbalance",
        ),
        (
            {"data": {"name": "digits", "partition": "idd"}},
            "unknown partition 'idd' in data.partition of x.yaml",
            "iid",
        ),
        (
            {"data": {"name": "digits", "partition": {"name": "iid", "client": 3}}},
            "unknown key 'data.partition.client' in x.yaml",
            "data.partition.clients",
        ),
        (
            {"machine": {"devise": "cpu"}},
            "unknown key 'machine.devise' in x.yaml",
            "machine.device",
        ),
        (
            {"evaluation": {"select": "lst"}},
            "x.yaml: unknown value 'lst' in evaluation.select",
            "last",
        ),
    ],
)
def test_unknown_names_get_the_nearest_one(sections, unknown, near):
    assert f"{unknown}; did you mean {near!r}?" in refusal(**sections)


def test_an_override_is_named_as_the_place_of_an_unknown_key():
    assert refusal("trainig.rounds=3").startswith(
        "unknown key 'trainig' in --set trainig.rounds=3; did you mean"
    )


def test_data_must_be_named():
    with pytest.raises(InputError, match=r"^a\.yaml names no data; valid: digits"):
        experiment_from({"method": "fedavg"}, "a.yaml")


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.1e-2", "+1.e-3"])
def test_scientific_numbers_are_numbers(text):
    assert experiment(f"training.optimizer.lr={text}").training.optimizer.lr == 0.001
    assert experiment(
        "training.optimizer.name=rmsprop", f"training.optimizer.lr={text}"
    ).training.optimizer == (TorchOptimizer(kind="RMSprop", lr=0.001))


def test_overrides_replace_names_or_reach_inside():
    base = {"method": {"name": "fedprox", "mu": 0.5}}
    assert experiment("method=fedprox", **base).method.local.mu == 0.1
    assert experiment("method.mu=3", **base).method.local.mu == 3
    assert experiment("method.mu=3", method="fedprox").method.local.mu == 3
    assert experiment("method.name=scaffold").method.name == "scaffold"
    assert experiment(
        "training.schedule=cosine", "training.schedule.floor=0.5"
    ).training.schedule == Schedule(kind="cosine", floor=0.5)
    # The remaining options of the other method are not valid for the new one.
    assert "unknown key 'method.mu' in x.yaml" in refusal("method.name=scaffold", **base)


def test_overrides_leave_the_given_mapping_alone():
    base = {"data": {"name": "digits"}, "training": {"optimizer": {"lr": 0.5}}}
    experiment_from(base, "x.yaml", ["training.optimizer.lr=1", "data.seed=4"])
    assert base == {"data": {"name": "digits"}, "training": {"optimizer": {"lr": 0.5}}}


def test_an_override_may_have_an_origin_of_its_own():
    assert "unknown method 'x' in --method" in refusal(Override("method", "x", "--method"))


def test_empty_sections_are_the_defaults():
    assert experiment(training=None, method=None) == experiment()


def test_plain_is_read_back_as_it_was():
    made = experiment(
        "method=fedprox",
        "training.optimizer=adamw",
        "data.partition={name: iid, clients: 6}",
        seed=3,
    )
    again = experiment_from(yaml.safe_load(yaml.safe_dump(made.plain())))
    assert again.plain() == made.plain()
    assert again.training == made.training
    assert again.method == made.method


def test_a_runs_configuration_is_an_experiment(tmp_path):
    made = experiment(
        "training.rounds=1",
        "model.hidden=[4]",
        "training.optimizer.eps=1e-8",
        training={"optimizer": "adam"},
    )
    run = made.run(tmp_path / "run")
    again = load_experiment(tmp_path / "run" / "config.yaml")
    assert "resolved" in read_yaml(tmp_path / "run" / "config.yaml")
    assert {
        key: value for key, value in run.config.items() if key != "resolved"
    }.keys() == made.plain().keys()
    assert again.plain() == made.plain()
    assert dataclasses.replace(again, origins=made.origins).run().summary == run.summary


def test_errors_of_the_data_name_the_file():
    partition = {"name": "dirichlet", "clients": 9, "beta": -1}
    said = r"^x\.yaml: data\.partition\.beta must be a finite number above 0, got -1\.0$"
    with pytest.raises(InputError, match=said):
        experiment(data={"name": "digits", "partition": partition})
    made = experiment(data={"name": "digits", "unseen": 99})
    with pytest.raises(InputError, match=r"^x\.yaml: data\.unseen=99 must leave a client"):
        made.federation()


def test_errors_of_training_name_what_was_set_for_them_or_the_file():
    with pytest.raises(
        InputError, match=r"^--set training\.cohort=99: training\.cohort asks for 99 clients"
    ):
        experiment("training.cohort=99", "seed=3").run()
    with pytest.raises(InputError, match=r"^x\.yaml: training\.cohort asks for 99 clients"):
        experiment("seed=3", training={"cohort": 99}).run()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"seed: 1\nseed: 2\n", "the key 'seed' comes twice"),
        (
            b"data: &a {name: digits}\nmethod: {<<: *a, name: fedavg, name: fedprox}",
            "the key 'name' comes twice",
        ),
        (b"data: {name: digits, name: digits}", "the key 'name' comes twice"),
        (b"seed: [1", "is not valid YAML"),
        (b"\xff\xfe\xff", "is not valid YAML"),
        (b"- a\n", r"must hold keys with values, such as 'data: digits', got \['a'\]"),
        (b"", "must hold keys with values, such as 'data: digits', got None"),
    ],
)
def test_broken_files_are_refused(tmp_path, content, message):
    file = tmp_path / "broken.yaml"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_experiment(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_that_are_merged_may_be_replaced(tmp_path):
    content = (
        "a: &a {name: x, mu: 1}\nb: &b {<<: *a, mu: 2}\nc: {<<: *b, name: y}\nd: [*b, {<<: *b}]\n"
    )
    (tmp_path / "merged.yaml").write_text(content)
    found = read_yaml(tmp_path / "merged.yaml")
    changed = {"name": "x", "mu": 2}
    assert (found["a"], found["b"]) == ({"name": "x", "mu": 1}, changed)
    assert (found["c"], found["d"]) == ({"name": "y", "mu": 2}, [changed, changed])


@pytest.mark.parametrize("key", ["lr", "momentum", "weight_decay", "betas"])
def test_options_of_the_optimizer_are_pointed_to(key):
    message = (
        rf"unknown key 'training\.{key}' in x\.yaml; did you mean 'training\.optimizer\.{key}'\? "
        r"Valid: .*training\.rounds"
    )
    with pytest.raises(InputError, match=message):
        experiment_from({"data": "digits", "training": {key: 0.1}}, "x.yaml")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lr", "'evaluation.fine_tune.lr' or 'training.optimizer.lr'"),
        ("imbalance", "'data.imbalance' or 'data.partition.imbalance'"),
        ("rounds", "'training.rounds'"),
        ("optimizer.lr", "'training.optimizer'"),
        ("mu", "'method.mu'"),
        ("hidden", "'model.hidden'"),
        ("clients", "'data.clients' or 'data.partition.clients' or 'flower.clients'"),
        # Of the same section, if there is one.
        ("data.clients", "'data.partition.clients'"),
        ("machine.epochs", "'evaluation.fine_tune.epochs' or 'training.epochs'"),
        # What other libraries call so.
        ("learning_rate", "'training.optimizer.lr'"),
        ("training.learning_rate", "'training.optimizer.lr'"),
        ("evaluation.fine_tune.learning_rate", "'evaluation.fine_tune.lr'"),
        ("local-epochs", "'training.epochs'"),
        ("training.local_epochs", "'training.epochs'"),
        ("n_rounds", "'training.rounds'"),
        ("fraction_fit", "'training.cohort'"),
        ("device", "'machine.device'"),
    ],
)
def test_a_key_at_the_wrong_level_is_found(key, meant):
    with pytest.raises(InputError) as caught:
        experiment_from({"data": "digits"}, "x.yaml", [f"{key}=3"])
    assert f" in --set {key}=3; did you mean {meant}? Valid" in str(caught.value)


def test_other_names_of_settings_belong_to_one_existing_setting_and_are_no_keys():
    keys = {setting.key for setting in settings() if setting.of != "studies"}
    assert set(SYNONYMS) <= keys
    called = [name for names in SYNONYMS.values() for name in names]
    assert len(set(called)) == len(called)
    # Names of keys are found as such.
    assert not set(called) & {key.rpartition(".")[2] for key in keys}


@pytest.mark.parametrize("key", ["foo", "training.xyz", "method.q"])
def test_nothing_is_suggested_if_nothing_is_alike(key):
    with pytest.raises(InputError) as caught:
        experiment_from({"data": "digits"}, "x.yaml", [f"{key}=3"])
    assert f"unknown key {key!r} in --set {key}=3. Valid" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({"data": {"name": "custom"}}, "data 'custom'"),
        ({"model": {"name": "custom:Mine"}}, "model 'custom:Mine'"),
    ],
)
def test_a_run_from_python_is_continued_there(changes, own):
    config = {"data": {"name": "digits"}, "resolved": {}, **changes}
    with pytest.raises(InputError) as caught:
        experiment_from(config, "runs/mine/config.yaml")
    assert str(caught.value).startswith(
        f"runs/mine/config.yaml: the run was started from Python with {own} of its own; continue "
        "it there: equipoise.train(federation, ..., out='runs/mine', resume=True)"
    )


def test_a_single_metric_needs_no_list():
    made = experiment_from({"data": "digits", "evaluation": {"metrics": "auroc"}})
    assert [metric.name for metric in made.evaluation.metrics] == ["auroc"]
    with pytest.raises(InputError, match=r"^x.yaml: evaluation.metrics must be a list, got 3$"):
        experiment_from({"data": "digits", "evaluation": {"metrics": 3}}, "x.yaml")


def test_a_missing_file_is_named():
    with pytest.raises(InputError, match=r"^cannot read nowhere\.yaml: No such file"):
        load_experiment("nowhere.yaml")


@pytest.mark.parametrize("given", ["studdy.yaml", "study", "Study.yaml", "stduy.yaml"])
def test_files_with_names_like_that_of_a_missing_one_are_suggested(given, tmp_path):
    for name in ("study.yaml", "other.yaml", "studdy.md"):
        (tmp_path / name).write_text("")
    (tmp_path / "studd.yaml").mkdir()
    with pytest.raises(
        InputError, match=r"No such file or directory; did you mean 'study.yaml'\?$"
    ):
        load_experiment(tmp_path / given)
    with pytest.raises(InputError, match=r"No such file or directory$"):
        load_experiment(tmp_path / "nothing.yaml")
    with pytest.raises(InputError, match=r"No such file or directory$"):
        load_experiment(tmp_path / "missing" / "study.yaml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"method": {"name": "fedavg", "aggregation": {"name": "fedadam", "lr": -1}}},
            "a.yaml: method.aggregation.lr: fedadam.lr must be a finite number of at least 0",
        ),
        (
            {"method": {"name": "fedprox", "mu": -1}},
            "a.yaml: method.mu: fedprox.mu must be at least 0",
        ),
        (
            {"method": {"name": "client2vec", "host": {"name": "fedprox", "mu": -1}}},
            "a.yaml: method.host.mu: fedprox.mu must be at least 0",
        ),
        (
            {"method": {"name": "fedavg", "guard": {"name": "norm", "drop": 0.5}}},
            "a.yaml: method.guard.drop: norm.drop must be a finite number of at least 1",
        ),
        (
            {"training": {"optimizer": {"name": "sgd", "momentum": 2}}},
            "a.yaml: training.optimizer.momentum must be at least 0 and below 1",
        ),
    ],
)
def test_values_that_a_part_refuses_are_named_with_their_whole_key(settings, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        experiment_from({"data": "digits", **settings}, "a.yaml")


def test_fine_tuning_is_read_from_a_mapping():
    given = {
        "data": "digits",
        "evaluation": {"fine_tune": {"steps": 3, "move": "head"}, "average_kept": True},
    }
    evaluation = experiment_from(given).evaluation
    assert evaluation.fine_tune == FineTune(steps=3, move="head")
    assert evaluation.average_kept
    assert (
        experiment_from({**given, "evaluation": {"fine_tune": None}}).evaluation.fine_tune is None
    )
    with pytest.raises(
        InputError,
        match=r"a\.yaml: evaluation\.fine_tune\.epochs must be a whole number, got 'all'",
    ):
        experiment_from(
            {"data": "digits", "evaluation": {"fine_tune": {"epochs": "all"}}}, "a.yaml"
        )
    with pytest.raises(
        InputError,
        match=r"unknown key 'evaluation\.fine_tune\.epoch' .*evaluation\.fine_tune\.epochs",
    ):
        experiment_from({"data": "digits", "evaluation": {"fine_tune": {"epoch": 1}}})
