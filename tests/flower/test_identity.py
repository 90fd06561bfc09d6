"""A client's number belongs to the node that registered it first."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from flwr.proto.node_pb2 import NodeInfo
from typer.testing import CliRunner

from equipoise.cli import app as cli
from equipoise.config import load_experiment
from equipoise.errors import InputError, RunError
from equipoise.flower.client import client_app
from equipoise.flower.identity import (
    OWNERS,
    Invited,
    Owner,
    Owners,
    fingerprint,
    read_invited,
    release,
    sealed,
)
from equipoise.flower.memory import proof_of_home
from equipoise.flower.server import serve
from tests.flower.certificates import make_key
from tests.flower.loop import (
    FIRST_NODE,
    LoopGrid,
    own_nodes,
    run_on_loop,
    write_experiment,
    write_silos,
)

THIEF, RETURNED = FIRST_NODE + 10_000, FIRST_NODE + 20_000


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    return write_silos(tmp_path_factory.mktemp("identity") / "silos")


@pytest.fixture
def folder(tmp_path, silos):
    (tmp_path / "silos").symlink_to(silos)
    return tmp_path


@pytest.fixture
def at_once(monkeypatch):
    """Look for nodes at every opportunity, instead of every other second."""
    monkeypatch.setattr("equipoise.flower.nodes._LOOK_FOR_NODES", 0.0)


class Changing(LoopGrid):
    """A grid that changes after a number of training messages; nodes may have keys."""

    def __init__(self, *args, events=(), keys=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.events, self.keys = dict(events), keys or {}

    def get_nodes(self):
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.nodes]

    def push_messages(self, messages):
        pushed = super().push_messages(messages)
        trained = self.kinds.count("train")
        for moment in [moment for moment in self.events if trained >= moment]:
            self.events.pop(moment)(self)
        return pushed


def node(place):
    return FIRST_NODE + 7 * place


def leave(place):
    return lambda grid: grid.nodes.pop(node(place))


def join(number, config):
    return lambda grid: grid.nodes.update({number: config})


def both(*events):
    return lambda grid: [event(grid) for event in events]


def thief_of(folder, client, **changes):
    """Create a node with another node's data and number, but its own disk."""
    return {**own_nodes(folder, [client])[0], "memory": str(folder / "memory" / "thief"), **changes}


def run_on(folder, path, out=None, nodes=range(4), **changes):
    configs = [
        config if isinstance(config, dict) else own_nodes(folder, [config])[0] for config in nodes
    ]
    return serve(Changing(client_app(path), configs, **changes), load_experiment(path), out)


def same_models(one, other):
    mine, theirs = one.trainer.state.model, other.trainer.state.model
    return all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def refusals(run):
    return run.trainer.engine.nodes.refused


def left_out(run):
    return [row.get("left_out", {}) for row in run.trainer.rounds]


def test_a_number_is_not_taken_over_while_its_client_is_offline(folder, at_once, caplog):
    path = write_experiment(folder, method="ditto", training={"rounds": 5}, flower={"timeout": 5})
    back = join(RETURNED, own_nodes(folder, [1])[0])
    attacked = {4: both(leave(1), join(THIEF, thief_of(folder, 1))), 10: back}
    with caplog.at_level(logging.WARNING):
        run = run_on(folder, path, events=attacked)
    assert refusals(run)[THIEF].startswith(
        f"client 1 belongs to the node that registered it first (node {node(1)})"
    )
    assert f"node {THIEF} cannot take part: client 1 belongs to" in caplog.text
    assert {"1": "not connected"} in left_out(run)
    assert left_out(run)[-1] == {}, "the rightful client is back, with another node id"
    for memory in (folder / "memory").iterdir():
        shutil.rmtree(memory / "runs", ignore_errors=True)
    alone = run_on(folder, path, events={4: leave(1), 10: back})
    assert left_out(alone) == left_out(run)
    assert same_models(run, alone)


def test_a_number_is_not_taken_over_while_its_client_is_there(folder, at_once):
    path = write_experiment(folder, training={"rounds": 2})
    run = run_on(folder, path, events={4: join(THIEF, thief_of(folder, 1))})
    assert "client 1 belongs to the node" in refusals(run)[THIEF]
    assert left_out(run) == [{}] * 2
    assert same_models(run, run_on(folder, path))


@pytest.mark.parametrize("disk", ["thief", "2"], ids=["another disk", "the same disk"])
def test_two_nodes_with_one_number_before_round_1(disk, folder):
    path = write_experiment(folder, training={"rounds": 1})
    double = {**own_nodes(folder, [2])[0], "memory": str(folder / "memory" / disk)}
    run = run_on(folder, path, nodes=[0, 1, 2, double, 3])
    assert list(refusals(run)) == [node(3)]
    assert "client 2" in refusals(run)[node(3)]
    assert left_out(run) == [{}]
    assert same_models(run, run_on(folder, path))
    missing = write_experiment(folder, flower={"wait": 0.3})
    with pytest.raises(
        RunError, match=rf"3 of 4 clients have registered .* node {node(3)} was refused: .*client 2"
    ):
        run_on(folder, missing, nodes=[0, 1, 2, double])


def test_a_double_on_the_same_disk_may_follow_the_one_that_went(folder, at_once):
    """A SuperNode is restarted while the server waits, and Flower notices it late."""
    path = write_experiment(folder, training={"rounds": 1})

    class Waiting(Changing):
        looked = 0

        def get_nodes(self):
            self.looked += 1
            if self.looked == 3:
                leave(2)(self)
            if self.looked == 6:
                self.nodes[node(9)] = own_nodes(folder, [0])[0]
            return super().get_nodes()

    grid = Waiting(client_app(path), [own_nodes(folder, [client])[0] for client in (1, 2, 3, 3)])
    run = serve(grid, load_experiment(path))
    assert run.trainer.engine.nodes.node_of == {0: node(9), 1: node(0), 2: node(1), 3: node(3)}


def test_a_node_that_was_refused_may_return_with_another_number(folder, at_once):
    """A SuperNode with a key has the same node id after a restart."""
    path = write_experiment(folder, flower={"clients": 3}, training={"rounds": 5})
    events = {
        3: join(THIEF, thief_of(folder, 1)),
        6: lambda grid: grid.nodes.pop(THIEF),
        9: join(THIEF, {**own_nodes(folder, [3])[0], "memory": str(folder / "memory" / "thief")}),
    }
    run = run_on(folder, path, nodes=[0, 1, 2], events=events, keys=with_keys(THIEF))
    assert not refusals(run)
    assert [row["cohort"] for row in run.trainer.rounds] == [3, 3, 3, 4, 4]


class Killed(BaseException):
    pass


def stopped_after_round_1(folder, path, out):
    def stop(grid):
        raise Killed

    with pytest.raises(Killed):
        run_on(folder, path, out, events={5: stop})


def test_a_number_stays_with_its_node_when_the_run_is_resumed(folder):
    path, out = write_experiment(folder, flower={"wait": 0.3}), folder / "out"
    stopped_after_round_1(folder, path, out)
    with pytest.raises(
        RunError, match=r"client 1 belongs to .* `equipoise flower release 1 .*/out`"
    ):
        run_on(folder, path, out, nodes=[0, 2, thief_of(folder, 1), 3])
    resumed = run_on(folder, path, out)
    assert len(list(resumed.trainer.rounds)) == 3
    assert left_out(resumed) == [{}] * 3


def test_the_operator_may_give_a_number_to_another_node(folder):
    path, out = write_experiment(folder, flower={"wait": 0.3}), folder / "out"
    stopped_after_round_1(folder, path, out)
    said = CliRunner().invoke(cli, ["flower", "release", "1", str(out)])
    assert said.exit_code == 0, said.output
    assert f"client 1 no longer belongs to node {node(1)}" in said.output
    run = run_on(folder, path, out, nodes=[0, 2, thief_of(folder, 1), 3])
    assert left_out(run) == [{}] * 3
    # Now it belongs to the other node, in the same way.
    with pytest.raises(RunError, match="client 1 belongs to"):
        run_on(
            folder,
            path,
            out,
            nodes=[0, {**own_nodes(folder, [1])[0], "memory": str(folder / "old")}, 2, 3],
        )


def test_a_number_may_be_given_away_while_the_run_goes_on(folder, at_once):
    path, out = (
        write_experiment(folder, training={"rounds": 5}, flower={"timeout": 5}),
        folder / "out",
    )
    events = {4: both(leave(1), join(THIEF, thief_of(folder, 1))), 10: lambda grid: release(out, 1)}
    run = run_on(folder, path, out, events=events)
    assert {"1": "not connected"} in left_out(run)
    assert left_out(run)[-1] == {}
    assert run.trainer.engine.nodes.node_of[1] == THIEF


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["9", "OUT"], "client 9 has no owner in .*; clients with an owner: 0, 1, 2, 3"),
        (["1", "OUT/elsewhere"], "holds no owners.jsonl; valid: the directory of a run on Flower"),
    ],
)
def test_a_release_that_frees_nothing_is_an_error(arguments, says, folder):
    out = folder / "out"
    run_on(folder, write_experiment(folder, training={"rounds": 1}), out)
    said = CliRunner().invoke(
        cli, ["flower", "release", *(text.replace("OUT", str(out)) for text in arguments)]
    )
    assert said.exit_code == 2
    with pytest.raises(InputError, match=says):
        release(out / "elsewhere" if "elsewhere" in arguments[1] else out, int(arguments[0]))


# ---- keys ----------------------------------------------------------------------------------------


def with_keys(*more):
    return {number: f"key of {number}".encode() for number in (*map(node, range(5)), *more)}


@pytest.mark.parametrize("rule", ["key", "memory"])
def test_only_the_same_key_comes_back_if_the_operator_says_so(rule, folder, at_once):
    path = write_experiment(folder, training={"rounds": 5}, flower={"timeout": 5, "identity": rule})
    events = {4: both(leave(1), join(RETURNED, own_nodes(folder, [1])[0]))}
    run = run_on(folder, path, events=events, keys=with_keys(RETURNED))
    if rule == "key":
        assert (
            "client 1 belongs to the node that registered it first (SHA256:"
            in refusals(run)[RETURNED]
        )
        assert left_out(run)[-1] == {"1": "not connected"}
    else:
        assert left_out(run)[-1] == {}


@pytest.mark.parametrize("rule", ["key", "memory"])
def test_the_same_key_comes_back_with_a_new_disk(rule, folder):
    path, out = write_experiment(folder, flower={"wait": 0.3, "identity": rule}), folder / "out"
    run_on(folder, path, out, keys=with_keys())
    new = {**own_nodes(folder, [1])[0], "memory": str(folder / "new disk")}
    assert not refusals(run_on(folder, path, out, nodes=[0, new, 2, 3], keys=with_keys()))


def test_a_key_has_one_number(folder, at_once):
    path = write_experiment(folder, flower={"clients": 3}, training={"rounds": 4})

    def change_number(grid):
        grid.nodes[node(0)] = own_nodes(folder, [3])[0]

    class Blinking(Changing):
        """Node 0 disconnects for a moment, and answers with another number afterwards."""

        def get_nodes(self):
            away = (
                self.kinds.count("train") >= 3 and self.nodes[node(0)] == own_nodes(folder, [0])[0]
            )
            infos = super().get_nodes()
            if away:
                change_number(self)
                infos = [info for info in infos if info.node_id != node(0)]
            return infos

    grid = Blinking(client_app(path), own_nodes(folder, range(3)), keys=with_keys())
    run = serve(grid, load_experiment(path))
    assert (
        refusals(run)[node(0)] == "it registers as client 3, but has registered as client 0 before"
    )
    assert [row["cohort"] for row in run.trainer.rounds][-1] == 2


def public_key(path):
    """Return the public key in PEM, as Flower has it."""
    loaded = serialization.load_ssh_public_key(path.with_name(f"{path.name}.pub").read_bytes())
    return loaded.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def test_a_fingerprint_is_that_of_ssh_keygen(tmp_path):
    path = make_key(tmp_path / "key")
    line = (tmp_path / "key.pub").read_bytes()
    assert (
        fingerprint(public_key(path))
        == fingerprint(line)
        != fingerprint(public_key(make_key(tmp_path / "other")))
    )
    if command := shutil.which("ssh-keygen"):
        said = subprocess.run(
            [command, "-l", "-f", f"{path}.pub"], capture_output=True, text=True, check=True
        )
        assert said.stdout.split()[1] == fingerprint(line)


# ---- the roster ----------------------------------------------------------------------------------


def test_who_is_not_in_the_roster_cannot_join(folder, at_once):
    (folder / "roster.yaml").write_text("0:\n1: {name: client-1}\n2: {}\n")
    path = write_experiment(folder, flower={"clients": 3, "roster": str(folder / "roster.yaml")})
    run = run_on(folder, path, nodes=[0, 1, 2], events={3: join(THIEF, own_nodes(folder, [3])[0])})
    assert refusals(run) == {THIEF: "client 3 is not in the roster"}
    assert [row["cohort"] for row in run.trainer.rounds] == [3, 3, 3]


def test_a_roster_gives_a_number_to_a_key_and_a_name(folder, tmp_path):
    keys = [make_key(tmp_path / f"key{client}") for client in range(3)]
    line = (tmp_path / "key0.pub").read_text().strip()
    (folder / "roster.yaml").write_text(
        f"0: {{key: '{line}'}}\n1: {{key: key1.pub, name: client-1}}\n"
    )
    path = write_experiment(
        folder,
        training={"rounds": 1},
        flower={"clients": 2, "roster": str(folder / "roster.yaml"), "wait": 0.3},
    )
    pem = [public_key(key) for key in keys]
    nodes = own_nodes(folder, [0, 1])
    rightful = dict(zip(map(node, range(2)), pem, strict=False))
    assert not refusals(run_on(folder, path, nodes=nodes, keys=rightful))
    wrong = {node(0): pem[0], node(1): pem[2]}
    with pytest.raises(RunError, match="the roster gives client 1 the key SHA256:.*, not SHA256:"):
        run_on(folder, path, nodes=nodes, keys=wrong)
    with pytest.raises(RunError, match="the roster calls client 1 'client-1', not 'client-3'"):
        run_on(folder, path, nodes=[0, {**own_nodes(folder, [3])[0], "client": 1}], keys=rightful)


def test_a_key_in_the_roster_replaces_the_owner(tmp_path):
    """The operator's roster decides: a new key there needs no release."""
    invited = {3: Invited(key="SHA256:new")}
    owners = Owners(invited=invited)
    owners._of[3] = Owner("SHA256:old", "", "north")
    assert owners.objection(3, Owner("SHA256:new", "", "north")) is None
    assert "the roster gives client 3 the key SHA256:new" in owners.objection(
        3, Owner("SHA256:old", "", "north")
    )


def test_a_roster_beside_the_experiment(folder):
    (folder / "members.yaml").write_text("{0: , 1: , 2: }\n")
    path = write_experiment(folder, flower={"roster": "members.yaml", "wait": 0.3})
    grid = Changing(client_app(path), own_nodes(folder))
    with pytest.raises(RunError, match="client 3 is not in the roster"):
        serve(grid, load_experiment(path), beside=folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x: {}", "'x' is no client; valid: whole numbers from 0"),
        ("-1: {}", "-1 is no client"),
        ("true: {}", "True is no client"),
        ("0: north", "client 0 must have keys with values, such as name: north, got 'north'"),
        ("0: {nam: north}", "unknown key 'nam' in .*client 0; did you mean 'name'"),
        ("0: {name: 3}", "name of client 0 must be text, got 3"),
        ("0: {key: nowhere.pub}", "cannot read .*nowhere.pub, the key of client 0: No such file"),
        ("0: {key: roster.yaml}", "the key of client 0, is no public key of ssh-keygen"),
    ],
)
def test_a_wrong_roster_is_an_error(text, says, tmp_path):
    (tmp_path / "roster.yaml").write_text(text)
    with pytest.raises(InputError, match=says):
        read_invited(tmp_path / "roster.yaml")


def test_settings_are_checked(folder):
    with pytest.raises(
        InputError, match="unknown value 'keys' in flower.identity.*did you mean 'key'"
    ):
        load_experiment(write_experiment(folder, flower={"identity": "keys"}))


# ---- the record ----------------------------------------------------------------------------------


def test_the_record_survives_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / OWNERS
    north, south = Owner("SHA256:n", sealed("1"), "north"), Owner("SHA256:s", sealed("2"), "south")
    owners = Owners(path)
    owners.claim(0, north)
    owners.save()
    path.write_bytes(path.read_bytes() + b'{"client": 1, "key": "SHA2')
    again = Owners(path)
    again.claim(1, south)
    again.save()
    release(tmp_path, 0)
    assert again.released()
    assert again._of == Owners(path)._of == {1: south}


def test_nothing_in_the_run_directory_lets_others_pass_for_a_client(folder):
    out = folder / "out"
    run, _ = run_on_loop(write_experiment(folder, training={"rounds": 1}), own_nodes(folder), out)
    secret = folder / "memory" / "0" / "home"
    assert secret.stat().st_mode & 0o077 == 0
    proof = proof_of_home(secret.parent, run.trainer.engine.run())
    written = "".join(file.read_text(errors="replace") for file in out.iterdir())
    assert secret.read_text() not in written
    assert proof not in written
    entry = json.loads((out / OWNERS).read_text().split("\n")[1])
    assert entry["home"] == sealed(proof)
