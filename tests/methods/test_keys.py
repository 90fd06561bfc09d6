"""Errors about hyper-parameters name the whole key, of parts inside other parts as well."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from equipoise.config import experiment_from
from equipoise.errors import InputError
from equipoise.methods import SLOTS, build, fitting, make_part, part_class

# Values that many options refuse: by their type, by their range, or because they are not known.
BAD = ({"not": "valid"}, "nonsense", -1, -1.0, math.nan, 10**9)
KEY_OF_SLOT = {"sampler": "sampling"}


def refused(options: dict[str, Any], slot: str) -> InputError | None:
    try:
        make_part(options, slot)
    except InputError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("slot", "name", "option"),
    [
        (slot, name, field.name)
        for slot in SLOTS
        for name in fitting(slot)
        for field in dataclasses.fields(part_class(name))
    ],
)
def test_every_option_of_every_part(slot: str, name: str, option: str) -> None:
    key = f"method.{KEY_OF_SLOT.get(slot, slot)}.{option}"
    errors = [refused({"name": name, option: bad}, slot) for bad in BAD]
    said = [(str(error), bad) for error, bad in zip(errors, BAD, strict=True) if error]
    assert said, "at least the mapping has the wrong type"
    for message, _ in said:
        assert message.startswith(f"{key}: ")
        assert f"{name}.{option}" in message
    # Without an index, its digest is refused whatever it is.
    assert any(repr(bad) in message or "which is missing" in message for message, bad in said)


@pytest.mark.parametrize(
    ("host", "key", "said"),
    [
        ({"name": "fedprox", "mu": -1}, "mu", "fedprox.mu must be at least 0 and finite, got -1"),
        ({"name": "fedadam", "lr": -1}, "lr", "fedadam.lr must be a finite number"),
        ({"aggregation": {"name": "fedyogi", "tau": -1}}, "aggregation.tau", "fedyogi.tau must be"),
        (
            {"aggregation": {"name": "fedavgm", "variant": "hs"}},
            "aggregation.variant",
            "unknown fedavgm.variant 'hs'; did you mean 'hsu'",
        ),
        ({"guard": {"name": "norm", "drop": 0}}, "guard.drop", "norm.drop must be a finite number"),
        ({"guard": {"name": "krum", "f": -1}}, "guard.f", "krum.f must be a whole number"),
        ({"local": {"name": "fedprox", "mu": -1}}, "local.mu", "fedprox.mu must be at least 0"),
        (
            {"name": "fednova", "effective": "step"},
            "effective",
            "unknown value 'step' in fednova.effective; did you mean 'steps'",
        ),
        ({"weights": "equal"}, "weights", "unknown weights 'equal'. Valid: size, uniform"),
    ],
)
def test_parts_of_a_host(host: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(f'method.host.{key}: {said}')}"):
        build("client2vec", host=host)
    with pytest.raises(InputError, match=f"^{re.escape(f'x.yaml: method.host.{key}: {said}')}"):
        experiment_from(
            {"data": "digits", "method": {"name": "client2vec", "host": host}}, "x.yaml"
        )
    with pytest.raises(InputError, match=f"^{re.escape(f'method.{key}: {said}')}"):
        build(**{"name": "fedavg", **host})


def test_options_of_a_wrapper() -> None:
    with pytest.raises(InputError, match=r"^method\.compare: unknown value 'all' in client2vec"):
        build("client2vec", compare="all")
