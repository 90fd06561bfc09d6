"""Aggregations in Flower apps with a ``ClientApp`` of their own."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from equipoise import methods
from equipoise.errors import InputError, RunError
from equipoise.flower import AggregationStrategy
from tests.flower.loop import LoopGrid

SIZES = (1, 1, 2)


class Grid(LoopGrid):
    """Answers as soon as it is asked. Another client may join after round 1."""

    def __init__(self, app, clients, late=None):
        super().__init__(app, clients)
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
        ({"num-examples": [1.0]}, "other records or metrics than most clients"),
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
    assert "dropped clients [2]" in caplog.text
    with pytest.raises(RunError, match="the guard 'krum' needs the updates of 5 clients"):
        run(strategy_of({"name": "fedavg", "guard": "krum"}))


def test_a_report_that_is_missing_is_named(caplog):
    def without(node, answer):
        del answer["metrics"]["loss_before"]
        return answer

    run(strategy_of("qffl"), own_app(without))
    assert "answered with nothing as loss_before (its MetricRecord)" in caplog.text


def reporting(node, answer):
    """Send all reports that an aggregation may need."""
    for name in ("loss_after", "val_loss_before", "val_loss_after", "gradient_weight"):
        answer["metrics"][name] = float(node + 1)
    return answer


def test_the_page_lists_the_methods_that_work():
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    listed = re.search(r"change only the aggregation are valid:(.*?)with\s+any guard", page, re.S)[
        1
    ]
    works, app = [], own_app(reporting)
    for name in set(methods.names()) - {"central"}:
        options = {"average": False} if name == "afl" else {}
        with suppress(InputError):
            weight = run(strategy_of({"name": name, **options}), app)["linear.weight"]
            assert bool(torch.isfinite(weight).all())
            works.append(name)
    assert re.findall(r"`(\w+)`", listed) == sorted(works)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("scaffold", "'scaffold' changes what clients do"),
        ("fedper", "'fedper' changes what clients do"),
        ("fedgr", "'fedgr' changes what clients do"),
        ({"name": "fedavg", "sampling": "size"}, "chooses clients by 'size'"),
        ("faa", "'faa' asks clients questions"),
        ("afl", "'afl' evaluates another model .* set average: false"),
    ],
)
def test_methods_that_need_more_are_refused(method, says):
    with pytest.raises(InputError, match=says):
        run(strategy_of(method), own_app(reporting))
