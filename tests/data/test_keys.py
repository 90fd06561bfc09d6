"""Errors about options of sources and partitions name the whole key, the value and what is valid.

All registered sources and partitions are tested with values of a wrong type and out of range.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from equipoise.config import experiment_from
from equipoise.data import PARTITIONS, SOURCES, Iid, load, recipe_of
from equipoise.data.files import VARIABLE
from equipoise.data.keys import naming
from equipoise.errors import InputError

OURS = [name for name, place in SOURCES.items() if isinstance(place, str)]
# What partitions and sources need in addition to the option that is tested.
NEEDED = {
    "iid": {"clients": 3},
    "dirichlet": {"clients": 3, "beta": 0.5},
    "classes": {"clients": 3, "classes": 2},
    "group": {"imbalance": 2.0},
    "arrays": {"x": "x.npy", "y": "y.npy"},
    "table": {"file": "patients.csv", "y": "ill"},
    "imagefolder": {"root": "."},
    "prostate": {"root": "."},
}


def message_about(data: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        experiment_from({"data": data}, "x.yaml").federation()
    return str(caught.value)


def shown(value: Any) -> str:
    return repr(value[0]) if isinstance(value, list) else str(value)


def options_of(made_from: Any) -> dict[str, Any]:
    return {
        option: kind
        for option, kind in get_type_hints(made_from).items()
        if option not in ("seed", "return")
    }


def out_of_range(kind: Any) -> list[Any]:
    """Return a value of the right type that is not valid, if there is one."""
    options = [option for option in (get_args(kind) or (kind,)) if option is not NoneType]
    if get_origin(kind) in (tuple, Sequence):
        options = [kind]
    if bool in options:
        return []
    if get_origin(options[0]) in (tuple, Sequence):
        return [["nonsense!"] if get_args(options[0])[0] is str else [-1]]
    return [{int: -1, float: -1.0, str: "nonsense!"}[options[0]]]


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name, kind in PARTITIONS.items() for option in options_of(kind)],
)
def test_options_of_partitions(name: str, option: str) -> None:
    kind = options_of(PARTITIONS[name])[option]
    for value in ({"not": "valid"}, *out_of_range(kind)):
        given = {"name": name, **NEEDED.get(name, {}), option: value}
        message = message_about({"name": "digits", "partition": given})
        assert message.startswith("x.yaml: ")
        assert f"data.partition.{option}" in message
        assert shown(value) in message
        assert re.search("must (be|name)|Valid: ", message)


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in OURS for option in options_of(recipe_of(name))],
)
def test_options_of_sources(name: str, option: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    # Enough of the files for sources that read them before they can check the option.
    (tmp_path / "site" / "class").mkdir(parents=True)
    np.save("x.npy", np.zeros((6, 2)))
    np.save("y.npy", np.arange(6) % 2)
    Path("patients.csv").write_text("age,ill\n30,yes\n40,no\n")
    kind = options_of(recipe_of(name))[option]
    mappings = dict in map(get_origin, get_args(kind))
    for value in ["nonsense!"] if mappings else [{"not": "valid"}, *out_of_range(kind)]:
        message = message_about({"name": name, **NEEDED.get(name, {}), option: value})
        assert message.startswith("x.yaml: ")
        assert f"data.{option}" in message
        assert shown(value) in message
        assert re.search("must be|[Vv]alid: |expected|is not a folder|no client's dir", message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"splits": [0.5, 0.5, 0.5]}, "data.splits"),
        ({"unseen": 99}, "data.unseen=99 must leave a client to train"),
        ({"unseen": [99]}, "data.unseen client 99 does not exist"),
        ({"leave_out": "blured"}, "unknown group 'blured' in data.leave_out"),
        ({"test": "grup"}, "unknown value 'grup' in data.test"),
        ({"server_val": 2.0}, "data.server_val must be a share from 0 to below 1, got 2.0"),
        (
            {"partition": {"name": "iid", "clients": 3}},
            "data.partition.clients=3 is fewer than the 5 groups",
        ),
        (
            {"partition": {"name": "iid", "clients": 5, "min_samples": 900}},
            "data.partition.clients: source 'digits' has 1797 samples, too few for 5 clients with "
            "min_samples=900",
        ),
        (
            {"partition": {"name": "group", "imbalance": 2, "clients_per_group": [1]}},
            "data.partition.clients_per_group=[1] must name one number for each of the 5 groups",
        ),
    ],
)
def test_options_that_do_not_fit_the_data(options: dict[str, Any], message: str) -> None:
    assert message in message_about({"name": "digits", **options})


def test_missing_files_are_not_a_mistake_in_an_option(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    message = message_about({"name": "cifar"})
    assert message.startswith("x.yaml: no files of data 'cifar' in ")
    assert "download=True" in message


def test_the_python_interface_names_the_keys_as_well() -> None:
    with pytest.raises(InputError, match=r"^data\.imbalance must be a finite number"):
        load("digits", imbalance="ten")
    with pytest.raises(InputError, match=r"^data\.partition\.beta must be a finite number"):
        load("digits", partition={"name": "dirichlet", "clients": 9, "beta": "wide"})
    with pytest.raises(InputError, match=r"^data\.partition\.clients=3 is fewer than"):
        load("digits", partition=Iid(3))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("beta must be above 0", "data.beta must be above 0"),
        ("each of beta must be above 0", "each of data.beta must be above 0"),
        ("betas must be above 0", "betas must be above 0"),
        ("no sample at beta=3", "data.beta: no sample at beta=3"),
        ("9 wide beta requested", "data.beta: 9 wide beta requested"),
        ("too few for 9 beta", "data.beta: too few for 9 beta"),
        ("file x (data.beta) is empty", "file x (data.beta) is empty"),
        ("something else", "something else"),
    ],
)
def test_where_the_key_is_put(said: str, named: str) -> None:
    with pytest.raises(InputError) as caught, naming({"beta": "data.beta"}):
        raise InputError(said)
    assert str(caught.value) == named
    with pytest.raises(InputError) as caught, naming({}):
        raise InputError(said)
    assert str(caught.value) == said
