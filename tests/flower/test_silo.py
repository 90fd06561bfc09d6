"""Where a client's data come from, and what the server gets to know."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import pytest
import torch

from equipoise.config import load_experiment
from equipoise.data import load
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.flower.roster import Description, Roster, read_roster
from equipoise.flower.silo import check_node, client_number, open_silo, placed
from equipoise.flower.wire import versions_here
from tests.flower.loop import own_nodes, run_on_loop, write_experiment, write_silos
from tests.flower.parity import assert_same_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("silos")
    write_silos(folder / "silos")
    return folder


@pytest.mark.parametrize(
    ("node", "number"),
    [
        ({"client": 5, "partition-id": 1, "data": "/srv/clinic-9"}, 5),
        ({"partition-id": 1, "num-partitions": 4}, 1),
        ({"data": "/srv/clinic-9/"}, 9),
        ({"data": "/srv/007"}, 7),
    ],
)
def test_a_client_has_one_number_for_good(node, number):
    assert client_number(node) == number


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({}, "has no client number"),
        ({"data": "/srv/clinic"}, "has no client number"),
        (
            {"client": -1},
            "client in the node's configuration must be a whole number from 0, got -1",
        ),
        ({"client": "three"}, "got 'three'"),
        ({"client": True}, "got True"),
    ],
)
def test_a_node_without_a_number_is_told_how_to_give_one(node, says):
    with pytest.raises(InputError, match=says):
        client_number(node)


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"unseen": "false"}, "unseen in the node's configuration must be true or false, got 'f"),
        ({"data": 3}, 'data in the node\'s configuration must be text, such as data="...", got 3'),
        ({"memory": ""}, "memory in the node's configuration must be text"),
        ({"limit": "limits.yaml"}, "unknown key 'limit' .*; did you mean 'limits'"),
        ({"min_cell": 20}, "did you mean 'min-cell'"),
    ],
)
def test_mistakes_in_the_configuration_of_a_node_are_not_ignored(node, says):
    with pytest.raises(InputError, match=says):
        check_node({"client": 3, **node})


def test_a_node_may_have_further_keys():
    check_node({"partition-id": 1, "num-partitions": 4, "ward": "north", "nan-in-round": 3})


def test_a_silo_has_the_splits_it_has_among_all_others(folder):
    together = load("silos", root=str(folder / "silos"), classes=10, seed=4)
    path = write_experiment(folder, seed=4)
    for client, node in enumerate(own_nodes(folder)):
        own = open_silo(path, {}, node).engine.federation
        for split in ("train", "val", "test"):
            here, there = own.split(split).of(client), together.split(split).of(client)
            assert torch.equal(own.x[here], together.x[there])
            assert torch.equal(own.y[here], together.y[there])
        said = Description.of(own, client)
        assert (said.name, said.group) == (f"client-{client}", together.group_names[client])
        assert said.sizes == {
            s: int(together.split(s).sizes[client]) for s in ("train", "val", "test")
        }


def own_federation(node):
    """A user-defined function that returns the client's own data."""
    together = load("silos", root=node["where"], classes=10)
    client = node["client"]
    rows = {s: together.split(s).of(client) for s in ("train", "val", "test")}
    index = np.concatenate(list(rows.values()))
    ends = np.cumsum([0, *map(len, rows.values())])
    from equipoise.federation import Split

    return Federation(
        together.x[index],
        together.y[index],
        *(Split.from_lists([np.arange(ends[i], ends[i + 1])]) for i in range(3)),
        groups=[0],
        group_names=(together.group_names[together.groups[client]],),
        unseen=[False],
        classes=10,
        client_names=(together.client_name(client),),
    )


def test_a_function_a_directory_and_a_shared_source_give_the_same_run(folder):
    path = write_experiment(folder, method="ditto", training={"rounds": 1})
    memories = [{"memory": str(folder / "memory" / f"own-{c}")} for c in range(4)]
    by_directory, _ = run_on_loop(path, own_nodes(folder))
    by_source, _ = run_on_loop(path, [{"client": c, **memory} for c, memory in enumerate(memories)])
    nodes = [
        {"client": c, "where": str(folder / "silos"), **memory} for c, memory in enumerate(memories)
    ]
    by_function, _ = run_on_loop(path, nodes, data=own_federation)
    for other in (by_source, by_function):
        for name, tensor in by_directory.trainer.state.model.items():
            assert torch.equal(tensor, other.trainer.state.model[name])
        assert list(by_directory.trainer.metrics) == list(other.trainer.metrics)


def test_a_node_must_hold_one_client():
    with pytest.raises(
        InputError, match="must have exactly one client; federation 'digits' has 22"
    ):
        placed(load("digits"), 3)


def test_a_directory_needs_an_experiment_on_silos(tmp_path, folder):
    path = write_experiment(tmp_path, data={"name": "digits"})
    path.write_text("data: digits\n")
    with pytest.raises(InputError, match="experiment's data are 'digits'; valid: data: silos"):
        open_silo(path, {}, own_nodes(folder)[0])


def test_test_samples_of_other_clients_are_not_there(folder, tmp_path):
    path = write_experiment(tmp_path, data={"root": str(folder / "silos"), "test": "group"})
    with pytest.raises(
        InputError, match="data.test: group needs the test samples of other clients"
    ):
        open_silo(path, {}, own_nodes(folder)[0])


def test_a_left_out_group_of_a_shared_source_is_evaluated_as_in_one_process(folder):
    path = write_experiment(
        folder,
        data={"splits": [0.8, 0.2, 0.0], "leave_out": "plain"},
        method="perfedavg",
        training={"rounds": 2},
    )
    alone = load_experiment(path).run()
    nodes = [{"client": c, "memory": str(folder / "memory" / f"left-out-{c}")} for c in range(4)]
    run, _ = run_on_loop(path, nodes)
    assert_same_rows(list(alone.trainer.metrics), list(run.trainer.metrics))
    assert {row["group"] for row in run.trainer.metrics if row["split"] == "test"} == {"plain"}
    assert set(run.summary["results"]) == {"global"}


def test_leaving_out_a_group_of_directories_is_refused(folder):
    path = write_experiment(folder, data={"leave_out": "plain"})
    with pytest.raises(
        InputError,
        match="data.leave_out='plain' is not applied to data in the nodes' own directories",
    ):
        open_silo(path, {}, own_nodes(folder)[0])


def test_a_number_beyond_the_source_is_refused(folder):
    with pytest.raises(InputError, match="client 4 does not exist in data 'silos'; valid: 0 to 3"):
        open_silo(write_experiment(folder), {}, {"client": 4})


def said(client, **changes):
    digits = load("digits")
    plain = Description.of(digits, client)
    return Description(**{**plain.__dict__, **changes})


def test_the_roster_keeps_numbers_and_puts_new_groups_last():
    roster = Roster(
        "x", {3: said(3, group="b", group_names=("b",)), 1: said(1, group="a", group_names=("a",))}
    )
    assert roster.group_names == ("a", "b")
    roster.admit(
        [
            said(0, group="c", group_names=("c",)),
            said(2, group="a", group_names=("a",), unseen=True),
        ]
    )
    assert roster.group_names == ("a", "b", "c")
    assert roster.groups.tolist() == [2, 0, 0, 1]
    assert roster.seen.tolist() == [0, 1, 3]
    assert roster.unseen.tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"shape": (1, 28, 28)},
            r"client 2 \(plain 3\) has shape \(1, 28, 28\), client 0 .* \(1, 8, 8\); they must "
            "agree",
        ),
        (
            {"outputs": 9},
            "client 2 .* has outputs 9, client 0 .* 10; they must agree; set data.classes",
        ),
        ({"task": "regression"}, "has task 'regression', client 0"),
    ],
)
def test_clients_that_do_not_fit_together_are_named(changes, says):
    roster = Roster("x", {0: said(0)})
    with pytest.raises(InputError, match=says):
        roster.admit([said(2, **changes)])


def test_a_roster_survives_on_disk_in_the_order_clients_came(tmp_path):
    roster = Roster("x", {3: said(3, group="b", group_names=("b",))})
    roster.admit([said(0, group="a", group_names=("a",))])
    roster.save(tmp_path / "clients.json", run="r")
    again, more = read_roster(tmp_path / "clients.json")
    assert again == roster
    assert again.group_names == ("b", "a")
    assert more == {"run": "r"}


def test_central_is_refused():
    with pytest.raises(InputError, match="'central' pools all data, but on Flower they stay"):
        Roster("x", {0: said(0)}).pooled()


def test_settings_of_the_run_are_set_over_the_experiment(folder):
    path = write_experiment(folder)
    silo = open_silo(
        path, {"set": "training.rounds=9; method=fedprox; method.mu=0.5"}, own_nodes(folder)[0]
    )
    assert silo.experiment.training.rounds == 9
    assert silo.experiment.method.local.mu == 0.5
    assert load_experiment(path).training.rounds == 3


def test_a_node_says_its_own_device(folder):
    path = write_experiment(folder, machine={"device": "auto"})
    assert (
        open_silo(path, {}, {**own_nodes(folder)[0], "device": "cpu"}).engine.machine.device
        == "cpu"
    )
    with pytest.raises(InputError, match="--set machine.device=gpu.*unknown device 'gpu'"):
        open_silo(path, {}, {**own_nodes(folder)[0], "device": "gpu"})


def test_other_versions_of_a_client_are_named(folder, caplog, monkeypatch):
    there = {"equipoise": "0.0.7", "torch": versions_here()["torch"]}
    monkeypatch.setattr("equipoise.flower.client.versions_here", lambda: there)
    path = write_experiment(folder, training={"rounds": 0})
    run_on_loop(path, own_nodes(folder))
    here = version("equipoise")
    assert [message for message in caplog.messages if "client 2 has " in message] == [
        f"client 2 has equipoise 0.0.7, the server {here}; results may differ, so install the same"
    ]
