"""The page about Flower is correct about methods, commands and settings."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import yaml
from flwr.supercore.control import control_http_client
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.config_loader import load_control_authn_plugin
from flwr.supernode import fleet_http_client

from equipoise.config import experiment_from, load_experiment
from equipoise.flower import QUIET
from equipoise.flower.limits import read_limits
from equipoise.flower.settings import FlowerSettings
from tests.flower.loop import own_nodes, run_on_loop, write_experiment, write_silos

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flower.md").read_text()


def test_the_settings_shown_are_the_defaults_there_are():
    blocks = re.findall(r"```yaml\n(flower:\n.*?)```", PAGE, re.DOTALL)
    shown = {
        name: value for block in blocks for name, value in yaml.safe_load(block)["flower"].items()
    }
    assert set(shown) == {item.name for item in fields(FlowerSettings)} - {"identity", "roster"}
    assert experiment_from({"data": "digits", "flower": shown}).flower.min_clients == 3


def test_the_privacy_shown_is_accepted():
    shown = yaml.safe_load(re.search(r"```yaml\n(flower:\n  privacy.*?)```", PAGE, re.DOTALL)[1])
    assert experiment_from({"data": "digits", **shown}).flower.privacy.epsilon == 8.0


def test_the_limits_and_the_identity_shown_are_accepted(tmp_path):
    page = (ROOT / "docs" / "security.md").read_text()
    (tmp_path / "limits.yaml").write_text(
        re.search(r"```yaml\n(methods:.*?)```", page, re.DOTALL)[1]
    )
    limits = read_limits(tmp_path / "limits.yaml")
    assert limits.methods == ("fedavg", "fedprox", "ditto")
    assert {item.name for item in fields(limits)} <= set(re.findall(r"^(\w+):", page, re.MULTILINE))
    shown = yaml.safe_load(re.search(r"```yaml\n(flower:\n  identity.*?)```", page, re.DOTALL)[1])
    assert experiment_from({"data": "digits", **shown}).flower.identity == "key"
    roster = yaml.safe_load(re.search(r"```yaml\n(0: {key.*?)```", page, re.DOTALL)[1])
    assert {key for facts in roster.values() for key in facts or {}} == {"key", "name"}


def test_what_is_turned_off_is_named():
    for name, value in QUIET.items():
        assert f"{name}={value}" in PAGE


def test_supernodes_and_operators_use_other_paths_of_the_one_port():
    """As in docs/security.md for Flower 1.41: access to the operators' path can start runs."""
    silo, operator = (
        set(re.findall(r'"(/v1/[a-z]+/)', inspect.getsource(module)))
        for module in (fleet_http_client, control_http_client)
    )
    assert silo == {"/v1/fleet/"}
    assert operator == {"/v1/control/"}
    assert isinstance(load_control_authn_plugin(), NoOpControlAuthnPlugin)
    for path in silo | operator:
        assert f"`{path}`" in (ROOT / "docs" / "security.md").read_text()


def test_silos_numbered_from_1_need_the_numbers_they_have_in_one_process(tmp_path):
    write_silos(tmp_path / "silos")
    for number in (3, 2, 1, 0):
        (tmp_path / "silos" / f"client-{number}").rename(
            tmp_path / "silos" / f"client-{number + 1}"
        )
    path, nodes = (
        write_experiment(tmp_path, training={"rounds": 2}),
        own_nodes(tmp_path, range(1, 5)),
    )

    def loss(run):
        return run.summary["results"]["global"]["seen"]["loss"]

    expected = loss(load_experiment(path).run())
    numbered, _ = run_on_loop(
        path, [{**node, "client": number} for number, node in enumerate(nodes)]
    )
    assert abs(loss(numbered) - expected) < 1e-9
    assert abs(loss(run_on_loop(path, nodes)[0]) - expected) > 1e-6
