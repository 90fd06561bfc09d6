"""Which descriptions of clients are accepted when they register."""

from __future__ import annotations

import json

import pytest
from flwr.app import ConfigRecord, RecordDict

from equipoise.data import load
from equipoise.flower.checks import Misfit
from equipoise.flower.registration import read_registration
from equipoise.flower.roster import Description
from equipoise.flower.settings import FlowerSettings


def about(**changes):
    plain = json.loads(Description.of(load("digits"), 3).text()) | changes
    return RecordDict({"about": ConfigRecord({"text": json.dumps(plain)})})


def test_client_numbers_are_bounded_by_the_operator():
    assert read_registration(about(client=9_999), FlowerSettings()).client == 9_999
    assert (
        read_registration(about(client=21_000), FlowerSettings(max_client=21_000)).client == 21_000
    )
    assert read_registration(about(client=20_000), FlowerSettings(clients=2_000)).client == 20_000
    with pytest.raises(
        Misfit, match=r"client 22; valid: a whole number from 0 to 21 \(flower.max_client\)"
    ):
        read_registration(about(client=22), FlowerSettings(max_client=21))


def test_a_client_without_training_samples_must_be_unseen():
    sizes = {"train": 0, "val": 0, "test": 9}
    with pytest.raises(
        Misfit, match="without training samples; valid: one or more, or unseen=true"
    ):
        read_registration(about(sizes=sizes), FlowerSettings())
    assert read_registration(about(sizes=sizes, unseen=True), FlowerSettings()).unseen
