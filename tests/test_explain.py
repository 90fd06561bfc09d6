"""Every key is explained, every example is valid, and the page in docs/ matches the code."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml

from equipoise import config, methods, models
from equipoise.config import Experiment, experiment_from
from equipoise.config.options import types_of
from equipoise.data import PARTITIONS, SOURCES, load, recipe_of
from equipoise.engine.settings import FineTune, Machine, Training
from equipoise.errors import InputError
from equipoise.explain import explain, lacking, page, settings
from equipoise.explain.keys import _of, options_of_names
from equipoise.flower.settings import FlowerSettings, Privacy
from equipoise.optimizers import Adam, Schedule, Sgd
from equipoise.run.evaluation import Evaluation
from equipoise.study import Tuning, study_from
from equipoise.study.reading import KEYS

DOCS = Path(__file__).parents[1] / "docs"
EVERY = settings()
OWN_SOURCES = [
    name
    for name, entry in SOURCES.items()
    if isinstance(entry, str) and entry.startswith("equipoise.")
]


def keys_of(section, of=None):
    begins = f"{section}."
    found = [
        setting
        for setting in EVERY
        if setting.key.startswith(begins) and (of is None or setting.of == of)
    ]
    return {
        setting.key.removeprefix(begins)
        for setting in found
        if "." not in setting.key.removeprefix(begins)
    }


def test_every_key_has_a_meaning_and_an_example():
    assert lacking(EVERY) == []
    assert all(setting.kind for setting in EVERY)


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ("training", Training),
        ("training.schedule", Schedule),
        ("evaluation", Evaluation),
        ("evaluation.fine_tune", FineTune),
        ("machine", Machine),
        ("flower", FlowerSettings),
        ("flower.privacy", Privacy),
    ],
)
def test_every_field_is_a_key(section, kind):
    assert keys_of(section) == {item.name for item in dataclasses.fields(kind)}


def test_the_keys_of_the_first_level_are_those_that_are_read():
    first = {setting.key for setting in EVERY if "." not in setting.key}
    assert first == {*config.SECTIONS, *KEYS}
    classes = {
        key
        for key, kind in get_type_hints(Experiment).items()
        if key in config.SECTIONS
        and any(dataclasses.is_dataclass(k) for k in (kind, *get_args(kind)))
    }
    assert all(keys_of(section) for section in classes - {"method"})


def test_optimizers_data_partitions_and_tuning():
    assert keys_of("training.optimizer", "sgd") == {item.name for item in dataclasses.fields(Sgd)}
    assert keys_of("training.optimizer", "adam, adamw") == {
        item.name for item in dataclasses.fields(Adam)
    } - {"decoupled"}
    assert keys_of("data", "") == set(types_of(load))
    for name in OWN_SOURCES:
        assert keys_of("data", name) == set(types_of(recipe_of(name))) - {"seed"}, name
    for name, partition in PARTITIONS.items():
        assert keys_of("data.partition", name) == set(types_of(partition)), name
    assert keys_of("tuning") == {item.name for item in dataclasses.fields(Tuning)} | {"set"}


@pytest.mark.parametrize("setting", EVERY, ids=lambda setting: f"{setting.key} {setting.of}")
def test_every_example_is_valid_and_sets_its_key(setting):
    example = yaml.safe_load(setting.example)
    value = example
    for part in setting.key.split("."):
        value = value[0] if isinstance(value, list) else value
        value = value[part]
    if setting.of == "studies":
        study_from({"base": {"data": "digits"}, "methods": ["fedavg"], **example})
    else:
        experiment_from({"data": "digits", **example})


@pytest.mark.parametrize("section", [Training, Evaluation, Machine, FlowerSettings, Schedule])
def test_defaults_are_those_of_the_code(section):
    names = {
        Training: "training",
        Evaluation: "evaluation",
        Machine: "machine",
        FlowerSettings: "flower",
    }
    prefix = names.get(section, "training.schedule")
    made = section()
    for setting in EVERY:
        if setting.key.rpartition(".")[0] == prefix:
            value = getattr(made, setting.key.rpartition(".")[2])
            if isinstance(value, bool | int | float | str | type(None)):
                assert yaml.safe_load(setting.default) == value, setting.key


def test_a_new_key_without_a_description_is_found():
    @dataclass(frozen=True)
    class Inner:
        """More.

        Parameters
        ----------
        deep : int
            Described.
        """

        deep: int = 3

    @dataclass(frozen=True)
    class Fresh:
        """Settings.

        Parameters
        ----------
        known : int
            Described.
        """

        known: int = 2
        new: int = 5
        bare: str | None = None
        inner: Inner = field(default_factory=Inner)

    # If annotations are text, types are looked up in the module.
    globals().update(Inner=Inner)
    found = list(_of(Fresh, "fresh"))
    assert [setting.key for setting in found] == [
        "fresh.known",
        "fresh.new",
        "fresh.bare",
        "fresh.inner",
        "fresh.inner.deep",
    ]
    assert found[0].example == "fresh: {known: 2}"
    assert [said.partition(":")[0] for said in lacking(found)] == [
        "fresh.new has no meaning",
        "fresh.bare has no meaning",
        "fresh.bare has no example",
        "fresh.inner has no meaning",
    ]


def test_the_page_is_up_to_date():
    # In a process of its own: other tests and examples register names.
    code = "from equipoise.explain import page; print(page(), end='')"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (DOCS / "settings.md").read_text() == made.stdout, "run: make settings"


def test_explain_finds_keys_by_their_ends_and_names_mistakes():
    assert next(setting.key for setting in explain("schedule")) == "training.schedule"
    assert {setting.key for setting in explain("training.rounds")} == {"training.rounds"}
    assert {setting.key for setting in explain("lr")} == {
        "training.optimizer.lr",
        "evaluation.fine_tune.lr",
    }
    assert "training" in {setting.key for setting in explain()}
    assert [setting.key for setting in explain("grid")] == ["methods.grid"]
    assert [setting.key for setting in explain("methods")] == [
        *("methods", "methods.label", "methods.grid", "methods.set")
    ]
    assert {setting.key for setting in explain("set")} == {"methods.set", "tuning.set"}
    assert {setting.key for setting in explain("studies")} >= {*KEYS, "methods.grid", "tuning.by"}
    with pytest.raises(InputError, match="unknown key 'study' .*; did you mean 'studies'"):
        explain("study")
    with pytest.raises(
        InputError,
        match="unknown key 'training.epoch' .*; did you mean 'training.epochs' or "
        r".*\? All are listed by: equipoise explain --markdown$",
    ):
        explain("training.epoch")


def test_methods_models_and_parts_are_explained_by_name():
    assert [setting.key for setting in explain("ditto")] == ["method", "method.lam"]
    assert {setting.of for setting in explain("method.lam")} >= {"ditto", "gifair"}
    assert [setting.key for setting in explain("mlp")] == ["model", "model.hidden", "model.dropout"]
    assert "method.guard.multiple" in {setting.key for setting in explain("norm")}
    assert {setting.key for setting in explain("dirichlet")} >= {"data.partition.beta"}
    assert {setting.of for setting in explain("method")} == {""}
    with pytest.raises(InputError, match="unknown key 'diito' .*; did you mean 'ditto'"):
        explain("diito")


def is_ours(setting):
    section = setting.key.partition(".")[0]
    made_from = {"model": models.maker_of, "method": methods.part_class}[section](setting.of)
    return made_from.__module__.startswith("equipoise.")


def test_every_option_of_methods_and_models_has_a_meaning_and_a_valid_example():
    # Other tests register models and methods of their own.
    named = [setting for setting in options_of_names() if not setting.of or is_ours(setting)]
    assert len(named) > 200
    assert [said for said in lacking(named) if "has no meaning" in said] == []
    for setting in named:
        if setting.example:
            experiment_from({"data": "digits", **yaml.safe_load(setting.example)})


def test_the_command_line_explains(call):
    code, stdout, _ = call("explain", "training.schedule")
    assert code == 0
    assert all(line == line.rstrip() for line in stdout.splitlines())
    assert "training.schedule.warmup: a whole number; default 0" in stdout
    assert "example: training: {schedule: {kind: cosine, over: 100}}" in stdout
    # What is not printed below is explained by another command.
    assert "training: keys; see equipoise explain training; default {}" in call("explain")[1]
    assert json.loads(call("explain", "machine.device", "--json")[1])[0]["default"] == "auto"
    assert call("explain", "--markdown")[1] == page()
    code, _, stderr = call("explain", "machine.devise")
    assert (code, "did you mean 'machine.device'" in stderr) == (2, True)
