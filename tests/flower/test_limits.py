"""What a silo refuses, whatever the server and its messages request."""

from __future__ import annotations

import json
import logging
import math

import pytest
import yaml
from flwr.app import ConfigRecord, Message, RecordDict

from equipoise.config import experiment_from, load_experiment
from equipoise.errors import InputError, RunError
from equipoise.flower.client import client_app
from equipoise.flower.limits import Limits, Refusal, read_limits, stricter
from equipoise.flower.memory import Versions
from equipoise.flower.server import serve
from equipoise.flower.settings import Privacy
from equipoise.flower.silo import open_silo, read_experiment
from equipoise.flower.wire import from_record, settings_of
from equipoise.methods import build, describe_part
from tests.flower.loop import (
    LoopGrid,
    number_of,
    own_nodes,
    run_on_loop,
    write_experiment,
    write_silos,
)


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    return write_silos(tmp_path_factory.mktemp("limits") / "silos")


@pytest.fixture
def folder(tmp_path, silos):
    (tmp_path / "silos").symlink_to(silos)
    return tmp_path


class Hostile(LoopGrid):
    """A server that changes its messages of one kind to client 1 in its second round."""

    def __init__(self, *args, kind, order, **kwargs):
        super().__init__(*args, **kwargs)
        self.kind, self.order, self.answered = kind, order, []

    def _answer(self, message):
        asked = settings_of(message.content)
        hit = message.metadata.message_type == self.kind and asked["round"] == 1
        if hit and number_of(self.nodes[message.metadata.dst_node_id]) == 1:
            self.order(message.content)
            self.answered.append(super()._answer(message))
            return self.answered[-1]
        return super()._answer(message)


def setting(**changes):
    def order(content):
        content["settings"] = ConfigRecord(settings_of(content) | changes)

    return order


def evaluating_locally(content):
    content["evaluation"] = ConfigRecord({"local": True})


ORDERS = {
    "another local rule": (
        setting(local=json.dumps(describe_part(build("fedprox", mu=9.0).local))),
        "the message has another local rule",
    ),
    "a path upwards": (setting(run="../../elsewhere"), "'../../elsewhere' is not a name for a run"),
    "an absolute path": (setting(run="/tmp/elsewhere"), "'/tmp/elsewhere' is not a name for a run"),
    "two dots": (setting(run=".."), "'..' is not a name for a run"),
    "a path as the name of a tree": (
        setting(once='{"model": "../../x"}'),
        "'../../x' is not a name for a tree",
    ),
    "no run": (setting(run=""), "'' is not a name for a run"),
    "a round that is no number": (
        setting(oldest="../x"),
        "oldest is '../x', not a whole number from 0",
    ),
    "a round below 0": (setting(version=-1), "version is -1, not a whole number from 0"),
    "an evaluation that is off": (evaluating_locally, "evaluation.local is off"),
}


@pytest.mark.parametrize("what", ORDERS)
def test_a_message_that_asks_for_more_than_the_experiment_is_refused_and_logged(
    what, folder, caplog
):
    order, says = ORDERS[what]
    path = write_experiment(folder, training={"rounds": 2})
    grid = Hostile(client_app(path), own_nodes(folder), kind="train", order=order)
    with caplog.at_level(logging.WARNING):
        run = serve(grid, load_experiment(path))
    assert len(grid.answered) == 1
    assert grid.answered[0].has_error()
    assert says in grid.answered[0].error.reason
    assert (
        f"refused a message 'train': {grid.answered[0].error.reason.partition(': ')[2]}"
        in caplog.text
    )
    rows = list(run.trainer.rounds)
    assert list(rows[1]["left_out"]) == ["1"]
    assert "the client refuses: " in rows[1]["left_out"]["1"]
    assert [row["cohort"] for row in rows] == [4, 3], "the run went on with the others"
    (entry,) = run.summary["updates_left_out"]["worst"]
    assert (entry["client"], entry["rounds_left_out"], entry["rounds_asked"]) == (1, 1, 2)
    assert entry["reason"] == rows[1]["left_out"]["1"]
    inside = folder / "memory"
    assert not (folder / "elsewhere").exists()
    assert {file.parent.parent.parent.name for file in inside.rglob("*.safetensors")} <= {"runs"}


def test_a_rule_that_is_the_experiment_s_own_is_obeyed(folder):
    path = write_experiment(folder, training={"rounds": 2}, method={"name": "fedprox", "mu": 0.5})
    own = setting(local=json.dumps(describe_part(build("fedprox", mu=0.5).local)))
    run = serve(
        Hostile(client_app(path), own_nodes(folder), kind="train", order=own), load_experiment(path)
    )
    assert [row["cohort"] for row in run.trainer.rounds] == [4, 4]


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "/tmp", "..\\x", "a\0b", "a\nb", ".hidden", "a" * 300]
)
def test_memories_are_below_their_directory(name, tmp_path):
    with pytest.raises(Refusal, match="is not a name for a run"):
        Versions(tmp_path, name, 0)
    with pytest.raises(Refusal, match="is not a name for a tree"):
        Versions(tmp_path, "run", 0).held(name or "/")


def answer_of(path, config, kind, **settings):
    """Send one message to a client, as any server could, and return its answer."""
    grid = LoopGrid(client_app(path), [config])
    usual = {"run": "mine", "round": 0, "version": 0, "oldest": 0, "held": "", "frozen": ""}
    content = RecordDict({"settings": ConfigRecord(usual | settings)})
    (id_,) = grid.push_messages([Message(content, next(iter(grid.nodes)), kind)])
    return grid.replies[id_]


def test_parts_that_clients_keep_stay_there_unless_the_experiment_averages_them(folder):
    path = write_experiment(folder, method="fedper")
    said = answer_of(path, own_nodes(folder)[0], "query.kept")
    assert "but evaluation.average_kept is off" in said.error.reason
    path = write_experiment(
        folder,
        method="fedper",
        evaluation={"average_kept": True},
        flower={"privacy": {"clip": 1.0}},
    )
    said = answer_of(path, own_nodes(folder)[0], "query.kept")
    assert (
        "a part of the model that clients keep would leave without the protection"
        in said.error.reason
    )


def test_what_is_private_to_a_rule_is_not_a_question(folder):
    said = answer_of(
        write_experiment(folder), own_nodes(folder)[0], "query.ask", question="__init__"
    )
    assert "'__init__' is not a question" in said.error.reason


def test_questions_are_not_answered_under_privacy(folder):
    path = write_experiment(folder, method="fedgr", flower={"privacy": {"clip": 1.0}})
    said = answer_of(path, own_nodes(folder)[0], "query.ask", question="class_tokens")
    assert (
        "the answer to 'class_tokens' would leave without the protection of flower.privacy"
        in said.error.reason
    )


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"method": "scaffold"}, "Scaffold also uploads control_change"),
        (
            {"model": {"name": "resnet18", "width": 4, "norm": "batch"}},
            "noise on the statistics of BatchNorm",
        ),
    ],
)
def test_what_cannot_be_protected_does_not_leave(sections, says, folder):
    """The server would refuse this too, but a client does not rely on it."""
    path = write_experiment(folder, **sections, flower={"privacy": {"clip": 1.0}})
    assert says in answer_of(path, own_nodes(folder)[0], "train").error.reason


def test_a_client_that_is_held_out_does_not_train(folder):
    config = {**own_nodes(folder)[0], "unseen": True}
    said = answer_of(write_experiment(folder), config, "train")
    assert "this client evaluates models and never trains" in said.error.reason


# ---- privacy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        "flower.privacy=null",
        "flower.privacy.clip=2.0",
        "flower.privacy.epsilon=null",
        "flower.privacy.delta=0.1",
    ],
)
def test_a_run_cannot_weaken_the_privacy_of_its_app(override, folder):
    privacy = {"clip": 1.0, "epsilon": 8.0, "delta": 1e-5}
    path = write_experiment(folder, flower={"privacy": privacy, "wait": 0.3})
    with pytest.raises(
        Refusal, match="the run weakens flower.privacy: .* instead of clip 1.0, epsilon 8.0"
    ):
        open_silo(path, {"set": override}, own_nodes(folder)[0])
    with pytest.raises(
        RunError, match="0 of 4 clients .* was refused: the client refuses: the run weakens"
    ):
        run_on_loop(path, own_nodes(folder), settings=override)
    assert (
        open_silo(path, {"set": "flower.privacy.clip=0.5"}, own_nodes(folder)[0]).privacy.clip
        == 0.5
    )


def with_limits(folder, nodes, **limits):
    (folder / "limits.yaml").write_text(yaml.safe_dump(limits))
    return [{**config, "limits": str(folder / "limits.yaml")} for config in nodes]


def test_a_silo_protects_its_updates_if_the_experiment_does_not(folder):
    path = write_experiment(folder, training={"rounds": 1, "optimizer": {"lr": 0.5}})
    nodes = own_nodes(folder)
    nodes[1:2] = with_limits(folder, nodes[1:2], privacy={"clip": 0.05})
    norms = {}

    def watch(node, message, reply):
        if message.metadata.message_type == "train":
            received = from_record(message.content.array_records["model"])
            update = from_record(reply.content.array_records["update"])
            norms[number_of(node)] = math.sqrt(
                sum(float((update[name] - received[name]).square().sum()) for name in update)
            )
        return reply

    run, _ = run_on_loop(path, nodes, tamper=watch)
    assert norms[1] == pytest.approx(0.05, rel=1e-6)
    assert min(norms[client] for client in (0, 2, 3)) > 0.1
    assert [row["cohort"] for row in run.trainer.rounds] == [4]


def test_the_stricter_protection_is_stricter_than_both():
    some = [
        Privacy(clip=1.0),
        Privacy(clip=2.0),
        Privacy(clip=2.0, epsilon=4.0, delta=1e-6),
        Privacy(clip=1.0, epsilon=8.0, delta=1e-5),
        Privacy(clip=3.0, epsilon=1.0, delta=1e-3, sensitivity=9.0),
        Privacy(clip=0.5, epsilon=2.0, delta=1e-7, sensitivity=0.1),
    ]
    for one in some:
        assert stricter(one, None) == stricter(None, one) == stricter(one, one) == one
        for other in some:
            made = stricter(one, other)
            for each in (one, other):
                assert made.clip <= each.clip
                assert made.noise / made.clip >= each.noise / each.clip * (1 - 1e-12)
                assert each.epsilon is None or made.epsilon <= each.epsilon
                assert each.epsilon is None or made.delta <= each.delta
    assert stricter(None, None) is None


# ---- the limits file -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "sections", "says"),
    [
        (
            {"methods": ["fedavg", "fedprox"]},
            {"method": "scaffold"},
            "methods fedavg, fedprox, .* uses scaffold",
        ),
        (
            {"methods": ["fedavg"]},
            {"method": {"name": "fedavg", "local": "fedprox"}},
            "uses fedprox",
        ),
        (
            {"methods": ["fedavg"]},
            {"method": {"name": "fedavg", "aggregation": "qffl"}},
            "uses qffl",
        ),
        (
            {"methods": ["client2vec"]},
            {"method": {"name": "client2vec", "host": "ditto"}},
            "uses ditto",
        ),
        ({"methods": []}, {}, r"methods \(none\), but the experiment uses fedavg"),
        (
            {"max_epochs": 2},
            {"training": {"epochs": 3}},
            "2 epochs in a round, but training takes 3",
        ),
        ({"max_epochs": 2}, {"training": {"steps": 50, "batch_size": 14}}, "but training takes 50"),
        ({"max_epochs": 1.5}, {"method": "ditto"}, "1.5 epochs in a round, but training takes 2"),
        (
            {"max_epochs": 1},
            {"evaluation": {"fine_tune": {"epochs": 2}}},
            "but evaluation.fine_tune takes 2",
        ),
    ],
)
def test_an_experiment_beyond_the_limits_is_refused(limits, sections, says, folder):
    content = {"data": "digits", **sections}
    (folder / "limits.yaml").write_text(yaml.safe_dump(limits))
    with pytest.raises(Refusal, match=says):
        read_limits(folder / "limits.yaml").check(experiment_from(content), 14)


@pytest.mark.parametrize(
    ("limits", "sections"),
    [
        (Limits(methods=("fedprox",)), {"method": "fedprox"}),
        (
            Limits(methods=("fedprox", "qffl")),
            {"method": {"name": "fedprox", "aggregation": "qffl"}},
        ),
        (
            Limits(methods=("client2vec", "ditto")),
            {"method": {"name": "client2vec", "host": "ditto"}},
        ),
        (Limits(max_epochs=2), {"method": "ditto"}),
        (Limits(max_epochs=1), {"training": {"steps": 1, "batch_size": 14}}),
    ],
)
def test_an_experiment_within_the_limits_is_not(limits, sections):
    limits.check(experiment_from({"data": "digits", **sections}), 14)


def test_a_silo_beyond_whose_limits_a_run_goes_is_not_part_of_it(folder, caplog):
    path = write_experiment(folder, flower={"clients": 3}, training={"rounds": 1, "epochs": 2})
    nodes = own_nodes(folder)
    nodes[2:3] = with_limits(folder, nodes[2:3], max_epochs=1)
    with caplog.at_level(logging.WARNING):
        run, _ = run_on_loop(path, nodes)
    assert {row["client"] for row in run.trainer.metrics} == {0, 1, 3}
    refused = "this silo allows 1 epochs in a round, but training takes 2"
    assert f"refused a message 'query.describe': {refused}" in caplog.text
    assert list(run.trainer.engine.nodes.refused.values()) == [f"the client refuses: {refused}"]


def test_a_silo_that_only_evaluates(folder):
    path = write_experiment(folder, training={"rounds": 2})
    nodes = own_nodes(folder)
    nodes[2:3] = with_limits(folder, nodes[2:3], evaluate_only=True)
    run, _ = run_on_loop(path, nodes)
    assert [row["cohort"] for row in run.trainer.rounds] == [3, 3]
    assert {row["client"] for row in run.trainer.metrics} == {0, 1, 2, 3}
    assert (
        "this client evaluates models and never trains"
        in answer_of(path, nodes[2], "train").error.reason
    )


def test_limits_that_cannot_be_read_stop_the_client(folder):
    config = {**own_nodes(folder)[0], "limits": str(folder / "nowhere.yaml")}
    with pytest.raises(InputError, match="cannot read .*nowhere.yaml: No such file"):
        open_silo(write_experiment(folder), {}, config)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"method": ["fedavg"]}, "unknown key 'limits.method' .*did you mean 'limits.methods'"),
        ({"max_epochs": 0}, "limits.max_epochs must be above 0, got 0"),
        ({"max_epochs": "many"}, "limits.max_epochs must be a number or null, got 'many'"),
        ({"evaluate_only": 1}, "limits.evaluate_only must be true or false, got 1"),
        ({"privacy": {"epsilon": 1.0}}, "limits.privacy needs clip"),
    ],
)
def test_a_wrong_limits_file_is_an_error(limits, says, tmp_path):
    (tmp_path / "limits.yaml").write_text(yaml.safe_dump(limits))
    with pytest.raises(InputError, match=says):
        read_limits(tmp_path / "limits.yaml")


def test_a_run_cannot_import_code_of_its_own(folder):
    with pytest.raises(
        InputError, match="'imports=/tmp/x.py'; a run cannot import other code than its app"
    ):
        read_experiment(write_experiment(folder), {"set": "seed=1; imports=/tmp/x.py"})
