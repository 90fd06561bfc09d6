"""Aggregations in Flower apps with a ``ClientApp`` of their own."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import flwr.app
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from equipoise import methods
from equipoise.errors import InputError, RunError
from equipoise.flower import AggregationStrategy
from equipoise.flower.strategy import _Row
from equipoise.method import Aggregation
from tests.flower.loop import FIRST_NODE, LoopGrid, error

SIZES = (1, 1, 2)


class Grid(LoopGrid):
    """Answers as soon as it is asked. Another client may join after round 1."""

    def __init__(self, app, clients, late=None, tamper=None):
        super().__init__(app, clients, tamper=tamper)
        self.late = late

    def send_and_receive(self, messages, *, timeout=None):
        replies = self.pull_messages(self.push_messages(messages))
        if self.late:
            self.nodes[max(self.nodes) + 7], self.late = self.late, None
        return replies


def own_app(change=lambda node, answer: answer):
    """Return an app of Flower alone: client k adds k + 1 to all numbers; its loss is k + 1."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        node = context.node_config["partition-id"]
        state = message.content["arrays"].to_torch_state_dict()
        state = {name: tensor + node + 1 for name, tensor in state.items()}
        metrics = {"num-examples": SIZES[node], "loss_before": float(node + 1), "lr": 0.1}
        answer = {"arrays": ArrayRecord(state), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(change(node, answer)), reply_to=message)

    return app


INITIAL = {
    "linear.weight": torch.zeros(2, 2),
    "norm.running_mean": torch.zeros(2),
    "norm.num_batches_tracked": torch.tensor(0),
}


def run(strategy, app=None, rounds=1, clients=3, **grid):
    grid = Grid(app or own_app(), [{"partition-id": k} for k in range(clients)], **grid)
    result = strategy.start(grid, ArrayRecord(INITIAL), rounds)
    return result.arrays.to_torch_state_dict()


def strategy_of(method, **options):
    return AggregationStrategy(method, fraction_evaluate=0.0, **options)


def test_fedavg_is_that_of_flower():
    ours = run(strategy_of("fedavg"), rounds=2)
    theirs = run(FedAvg(fraction_evaluate=0.0), rounds=2)
    assert list(ours) == list(theirs)
    for name in ("linear.weight", "norm.running_mean"):
        torch.testing.assert_close(ours[name], theirs[name])
        assert ours[name].flatten()[0] == 2 * (1 + 2 + 2 * 3) / 4
    # A number of batches is not averaged.
    assert ours["norm.num_batches_tracked"] == 6


def test_a_fair_aggregation_moves_towards_the_client_that_is_left_behind():
    weight = {
        tau: run(strategy_of({"name": "term", "t": tau}))["linear.weight"] for tau in (0.1, 9)
    }
    assert 2.25 < float(weight[0.1][0, 0]) < 2.5
    torch.testing.assert_close(weight[9], torch.full((2, 2), 3.0), atol=1e-3, rtol=0)


def test_weights_of_clients_last_and_new_clients_get_theirs():
    strategy = strategy_of({"name": "afl", "average": False, "weights": "uniform"})
    run(strategy, rounds=3, clients=2, late={"partition-id": 2})
    clients = strategy._state.server["clients"]
    assert clients["ids"].tolist() == [0, 1, 2]
    # Projections of (0.45, 0.55, 1/3) + (0.1, 0.2, 0.3), and of the result + (0.1, 0.2, 0.3).
    assert clients["weight"].tolist() == pytest.approx([5 / 36, 15.8 / 36, 15.2 / 36])


def nan_of(client):
    def change(node, answer):
        if node == client:
            answer["arrays"] = ArrayRecord({n: t * math.nan for n, t in FLOATS.items()} | COUNTER)
        return answer

    return change


FLOATS = {name: tensor for name, tensor in INITIAL.items() if tensor.is_floating_point()}
COUNTER = {"norm.num_batches_tracked": torch.tensor(0)}


def test_an_update_that_cannot_be_used_is_left_out(caplog):
    app = own_app(nan_of(2))
    assert run(strategy_of("median"), app)["linear.weight"][0, 0] == 1.5
    assert "continues without node" in caplog.text
    assert "answered with NaN or infinity in linear.weight" in caplog.text


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"num-examples": 1e30},
            "1e+30 as num-examples, which is not in the range from 1 to 1e+12",
        ),
        ({"num-examples": [1.0]}, "answered with a list as num-examples"),
        ({"num-examples": math.nan}, "answered with nan as num-examples"),
        ({"another": 1.0}, "other records or metrics than most clients"),
    ],
)
def test_one_client_with_wrong_metrics_does_not_end_the_run(more, says, caplog):
    def change(node, answer):
        if node == 2:
            answer["metrics"].update(more)
        return answer

    assert run(strategy_of("fedavg"), own_app(change))["linear.weight"][0, 0] == 1.5
    assert says in caplog.text


def test_a_guard_drops_clients(caplog):
    def far(node, answer):
        if node == 2:
            state = answer["arrays"].to_torch_state_dict()
            answer["arrays"] = ArrayRecord({n: t * 1000 for n, t in state.items()})
        return answer

    weight = run(strategy_of({"name": "fedavg", "guard": "norm"}), own_app(far))["linear.weight"]
    assert weight[0, 0] == 1.5
    far_node = FIRST_NODE + 2 * 7
    assert f"continues without the nodes {far_node}: dropped by the guard 'norm'" in caplog.text
    with pytest.raises(RunError, match="the guard 'krum' needs the updates of 5 clients"):
        run(strategy_of({"name": "fedavg", "guard": "krum"}))


def without(*names, clients=range(3)):
    """Leave out metrics of some clients."""

    def change(node, answer):
        for name in names if node in clients else ():
            del answer["metrics"][name]
        return answer

    return change


NODES = [FIRST_NODE, FIRST_NODE + 7, FIRST_NODE + 14]


def test_reports_that_all_clients_forget_end_the_run_with_one_error(caplog):
    app = own_app(without("loss_before", "lr"))
    with pytest.raises(RunError) as raised:
        run(strategy_of("qffl"), app, rounds=2)
    assert str(raised.value) == (
        "round 1: none of the answers can be used: answered without loss_before and lr in its "
        f"MetricRecord (nodes {NODES[0]}, {NODES[1]}, {NODES[2]}). Method 'qffl' needs "
        "num-examples, loss_before and lr in the MetricRecord of every client"
    )
    assert "continues without" not in caplog.text


def test_a_client_that_sends_all_reports_is_used_although_most_forget_one(caplog):
    app = own_app(without("loss_before", clients=(0, 1)))
    assert run(strategy_of("term"), app)["linear.weight"][0, 0] == 3
    assert caplog.text.count("answered without loss_before in its MetricRecord") == 2


def test_different_reasons_are_listed_with_their_nodes():
    def change(node, answer):
        if node == 1:
            answer["metrics"]["lr"] = 0.0
        return nan_of(2)(node, without("num-examples", clients=(0,))(node, answer))

    with pytest.raises(RunError) as raised:
        run(strategy_of("qffl"), own_app(change))
    for says in (
        f"answered without num-examples in its MetricRecord (node {NODES[0]})",
        f"answered with 0 as lr, which is not in the range from 1e-12 to 1e+24 (node {NODES[1]})",
        f"answered with NaN or infinity in linear.weight (node {NODES[2]})",
    ):
        assert says in str(raised.value)


def failing_in(*rounds):
    """Lose all answers of some rounds, as if the nodes had failed."""

    def tamper(node, message, reply):
        lost = message.content["config"]["server-round"] in rounds
        return error(message, reply) if lost else reply

    return tamper


@pytest.mark.parametrize(("lost", "expected"), [((2, 3), 2.25), ((1, 3), 2.25), ((1, 2, 3), 0.0)])
def test_rounds_without_answers_keep_the_model(lost, expected, caplog):
    weight = run(strategy_of("fedavg"), rounds=3, tamper=failing_in(*lost))["linear.weight"]
    assert weight[0, 0] == expected
    for number in lost:
        assert f"round {number}: no client answered, so the model stays as it is" in caplog.text
    assert ("the result has the initial arrays" in caplog.text) == (len(lost) == 3)


def test_sizes_are_those_of_the_round_as_in_flower():
    """The sizes of rounds 1 and 2 are (1, 1, 2) and (3, 1, 2)."""
    seen = []

    def change(node, answer):
        seen.append(node)
        if node == 0 and seen.count(0) % 2 == 0:
            answer["metrics"]["num-examples"] = 3
        return answer

    ours = run(strategy_of("fedavg"), own_app(change), rounds=2)
    assert ours["linear.weight"][0, 0] == pytest.approx(9 / 4 + (3 + 2 + 2 * 3) / 6)
    theirs = run(FedAvg(fraction_evaluate=0.0), own_app(change), rounds=2)
    torch.testing.assert_close(ours["linear.weight"], theirs["linear.weight"])


def test_a_strategy_that_is_started_again_forgets_the_nodes_of_the_first_run():
    strategy = strategy_of({"name": "afl", "average": False})
    run(strategy)
    run(strategy, clients=2)
    assert strategy._state.server["clients"]["ids"].tolist() == [0, 1]


def test_clients_without_validation_data_report_nan_and_take_part():
    def change(node, answer):
        values = math.nan if node == 2 else float(node + 1)
        answer["metrics"].update(val_loss_before=values, val_loss_after=0.0)
        return answer

    # Round 1 has no gaps. Those of round 2 are 1, 2 and none: 0.2 · (1 - 1 / 2) is added to the
    # weight of client 1 and subtracted from that of client 0, which are 1 / 3 each.
    weight = run(strategy_of("ga"), own_app(change), rounds=2)["linear.weight"][0, 0]
    assert float(weight) == pytest.approx(2 + (1 / 3 - 0.1) + 2 * (1 / 3 + 0.1) + 3 / 3)


def test_reports_are_not_rounded():
    """float64 has 0.1, float32 has 0.10000000149."""
    strategy = strategy_of("qffl")
    rows = {0: _Row(RecordDict(), {}, 1, {"loss_before": 0.1, "lr": 0.1})}
    assert strategy._stacked(rows, []).reports["lr"].tolist() == [0.1]


def test_a_model_that_is_not_finite_ends_the_run():
    """The power 1.5 of a negative loss is not defined."""

    def change(node, answer):
        answer["metrics"]["loss_before"] = float(node - 1)
        return answer

    with pytest.raises(RunError) as raised:
        run(strategy_of({"name": "qffl", "q": 1.5}), own_app(change))
    assert "has computed a model with NaN or infinity in linear.weight" in str(raised.value)
    assert "clients reported loss_before from -1 to 1 and lr from 0.1 to 0.1" in str(raised.value)


def reporting(node, answer):
    """Send all reports that an aggregation may need."""
    for name in ("loss_after", "val_loss_before", "val_loss_after", "gradient_weight"):
        answer["metrics"][name] = float(node + 1)
    return answer


PAGE = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()


def table(head):
    """Return the rows of a table of the page: for each cell, the names in it."""
    lines = PAGE.split(f"| {head} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[re.findall(r"`(\w+)`", cell) for cell in line.split("|")[1:-1]] for line in lines]


def test_the_page_lists_the_methods_that_work_and_their_reports():
    found, app = {}, own_app(reporting)
    for name in set(methods.names()) - {"central"}:
        options = {"average": False} if name == "afl" else {}
        with suppress(InputError):
            strategy = strategy_of({"name": name, **options})
            assert bool(torch.isfinite(run(strategy, app)["linear.weight"]).all())
            found[name] = list(strategy.needs)
    rows = table("method | reports of clients besides `num-examples`")
    assert {name: needs for names, needs in rows for name in names} == found
    explained = {name for names, _ in table("report | value") for name in names}
    assert explained == {report for needs in found.values() for report in needs}


class Shift(torch.nn.Module):
    """A model of one number."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))


def fit(model, data, lr):
    """Add the learning rate once for every sample."""
    model.weight.data += lr * len(data)


def measure(model, data):
    """Return a loss and an accuracy that do not depend on the model."""
    return float(len(data)), 1 / len(data)


def test_the_app_of_the_page_trains_and_names_the_worst_client():
    replacing = PAGE.split("### Replace the aggregation")[1]
    server, train, evaluate, fair = re.findall("```python\n(.*?)```", replacing, re.DOTALL)
    # Client k has k + 1 samples, so accuracies are 1, 1/2 and 1/3, in groups 0, 0 and 1.
    found = {
        **vars(flwr.app),
        **{"ClientApp": ClientApp, "Net": Shift, "fit": fit, "measure": measure},
        "load_data": lambda client, split: range(client + 1),
    }
    exec(train, found)
    exec(evaluate, found)
    found["grid"] = Grid(found["app"], [{"partition-id": k} for k in (2, 0, 1)])
    exec(server, found)
    assert len(found["result"].evaluate_metrics_clientapp) == 20
    assert found["result"].arrays.to_torch_state_dict()["weight"] > 0

    exec(fair, found)
    summaries = []
    for clients in ((2, 0, 1), (1, 2, 0)):
        grid = Grid(found["app"], [{"partition-id": k} for k in clients])
        result = found["strategy"].start(grid, ArrayRecord(Shift().state_dict()), num_rounds=1)
        summaries.append(dict(result.evaluate_metrics_clientapp[1]))
    assert summaries[0] == summaries[1]
    assert (summaries[0]["worst_client"], summaries[0]["worst_client_id"]) == (1 / 3, 2)
    assert (summaries[0]["worst_group_id"], summaries[0]["best_group_id"]) == (1, 0)
    assert summaries[0]["mean_samples"] == pytest.approx(3 / 6)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("scaffold", "'scaffold' changes what clients do"),
        ("fedper", "'fedper' changes what clients do"),
        ("fedgr", "'fedgr' changes what clients do"),
        ({"name": "fedavg", "sampling": "size"}, "chooses clients by 'size'"),
        ("faa", "'faa' asks clients questions"),
        ({"name": "faa", "every": 5}, "'faa' asks clients questions"),
        ({"name": "term", "tilts": "groups"}, "'term' uses groups of clients"),
        ({"name": "fednova", "effective": "steps"}, "uses the report 'steps'"),
        ("afl", "'afl' evaluates another model .* set average: false"),
    ],
)
def test_methods_that_need_more_are_refused_before_clients_train(method, says):
    with pytest.raises(InputError, match=says):
        strategy_of(method)


@dataclass(frozen=True)
class OnlyLinear(Aggregation):
    """Averages one layer, whose name it knows, and keeps the others."""

    def combine(self, state, updates, cohort):
        kept = {name: tensor.clone() for name, tensor in state.model.items()}
        averaged = updates.params["linear.weight"].mean(0)
        return state.with_global({**kept, "linear.weight": averaged})


def test_an_own_aggregation_that_needs_certain_tensors_is_not_refused():
    model = run(strategy_of({"name": "fedavg", "aggregation": OnlyLinear()}))
    assert (model["linear.weight"][0, 0], model["norm.running_mean"][0]) == (2, 0)
