"""Evaluation against a loop over clients and samples."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score
from torch import nn

from equipoise import tasks
from equipoise.engine import chunking, evaluation
from equipoise.engine.data import DeviceData
from equipoise.engine.evaluation import evaluate_shared, evaluate_stacked
from equipoise.engine.network import Network
from equipoise.federation import Federation, Split
from equipoise.metrics import Metric, build
from equipoise.models.base import Model

HELD = [[0, 5, 9], [], [1], list(range(10, 31)), [2, 3, 4, 6, 7, 8]]
SPLIT = Split.from_lists(HELD)
CLIENTS = len(HELD)


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def federation(task="classification", targets=None):
    empty = Split.from_lists([[]] * CLIENTS)
    y = torch.arange(31) % 3 if task == "classification" else normal(31, *(targets or ()), seed=1)
    return Federation(
        x=normal(31, 2, 4, 4),
        y=y,
        train=SPLIT,
        val=empty,
        test=empty,
        groups=np.zeros(CLIENTS, np.int64),
        group_names=("all",),
        unseen=np.array([False, True, False, False, False]),
        task=task,
    )


def module(outputs=3, running=True):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, track_running_stats=running)
    features = nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.Dropout(0.5), nn.Flatten())
    return Model(features, nn.Linear(12, outputs)).double()


def setting(task="classification", outputs=3, targets=None, running=True):
    data = federation(task, targets)
    network = Network(module(outputs, running), tasks.build(task), dtype=torch.float64)
    return network, DeviceData(data, torch.device("cpu"), torch.float64), data


def by_hand(data, params, held, running=True):
    """Evaluate an ordinary model with these parameters, by sample or by client."""
    if not held:
        return np.nan, np.nan
    plain = module(running=running).eval()
    plain.load_state_dict(params, strict=False)
    losses, hits = [], []
    with torch.no_grad():
        for samples in [[sample] for sample in held] if running else [held]:
            output = plain(data.x[samples])
            losses += F.cross_entropy(output, data.y[samples], reduction="none").tolist()
            hits += (output.argmax(1) == data.y[samples]).double().tolist()
    return np.mean(losses), np.mean(hits)


RUNNING = pytest.mark.parametrize(
    "running", [True, False], ids=["running statistics", "the batch's own"]
)


@pytest.mark.parametrize("clients", [[0, 1, 2, 3, 4], [3], [4, 0], [1, 2], [2, 1, 3]])
@pytest.mark.parametrize("together", [4096, 7])
@RUNNING
def test_one_model_on_every_client(clients, together, running, monkeypatch):
    monkeypatch.setattr(chunking, "_PASS", together)
    network, device_data, data = setting(running=running)
    params = {name: tensor + 0.1 for name, tensor in network.initial().items()}
    found = evaluate_shared(network, device_data, params, SPLIT, np.array(clients))
    wanted = [by_hand(data, params, HELD[client], running) for client in clients]
    np.testing.assert_allclose(found["loss"], [loss for loss, _ in wanted], rtol=1e-12)
    np.testing.assert_allclose(found["accuracy"], [hit for _, hit in wanted], rtol=1e-12)


@pytest.mark.parametrize("clients", [[0, 1, 2, 3, 4], [3], [4, 0], [2, 1, 3]])
@pytest.mark.parametrize("chunk", [1, 2, 10])
@pytest.mark.parametrize("together", [4096, 7])
@RUNNING
def test_every_clients_own_model(clients, chunk, together, running, monkeypatch):
    monkeypatch.setattr(chunking, "_PASS", together)
    network, device_data, data = setting(running=running)
    initial = network.initial()
    still = {name: tensor for name, tensor in initial.items() if name.startswith("features")}
    own = {
        n: t + 0.3 * normal(len(clients), *t.shape, seed=3)
        for n, t in initial.items()
        if n.startswith("head")
    }
    found = evaluate_stacked(network, device_data, own, still, SPLIT, np.array(clients), chunk)
    wanted = [
        by_hand(
            data,
            {**still, **{name: stack[row] for name, stack in own.items()}},
            HELD[client],
            running,
        )
        for row, client in enumerate(clients)
    ]
    np.testing.assert_allclose(found["loss"], [loss for loss, _ in wanted], rtol=1e-12)
    np.testing.assert_allclose(found["accuracy"], [hit for _, hit in wanted], rtol=1e-12)


def test_clients_without_samples_only():
    network, data, _ = setting()
    assert np.isnan(
        evaluate_shared(network, data, network.initial(), SPLIT, np.array([1]))["loss"]
    ).all()
    own = {name: tensor.unsqueeze(0) for name, tensor in network.initial().items()}
    assert np.isnan(evaluate_stacked(network, data, own, {}, SPLIT, np.array([1]), 2)["loss"]).all()


@pytest.mark.parametrize(("outputs", "targets"), [(1, ()), (2, (2,))])
def test_a_regression_is_judged_by_its_squared_error(outputs, targets):
    network, device_data, data = setting("regression", outputs, targets)
    found = evaluate_shared(network, device_data, network.initial(), SPLIT, np.arange(CLIENTS))
    assert set(found) == {"loss"}
    plain = module(outputs).eval()
    with torch.no_grad():
        errors = (plain(data.x).view(31, -1) - data.y.view(31, -1)).square().mean(1).numpy()
    wanted = [errors[held].mean() if held else np.nan for held in HELD]
    np.testing.assert_allclose(found["loss"], wanted, rtol=1e-12)


def test_a_sample_that_several_clients_hold_is_evaluated_once(monkeypatch):
    network, data, _ = setting()
    split = Split.from_lists([[4, 2, 9], [], [9, 2, 4], [2], [30, 2]])
    fetched = []
    fetch = data.fetch
    monkeypatch.setattr(data, "fetch", lambda where: fetched.append(where.numel()) or fetch(where))
    clients = np.arange(CLIENTS)
    shared = evaluate_shared(network, data, network.initial(), split, clients)
    assert sum(fetched) == 4
    apart = [
        evaluate_shared(network, data, network.initial(), split, clients[k : k + 1])
        for k in range(CLIENTS)
    ]
    for name, values in shared.items():
        np.testing.assert_allclose(
            values, [one.get(name, [np.nan])[0] for one in apart], rtol=1e-12
        )
    some = evaluate_shared(network, data, network.initial(), split, np.array([2, 4]))
    np.testing.assert_allclose(some["loss"], shared["loss"][[2, 4]], rtol=1e-12)


def test_clients_that_hold_the_same_samples_have_the_values_of_one_of_them():
    network, data, _ = setting()
    lists = [[4, 2, 9], [], [9, 2, 4], [4, 2, 9], [30, 2], [], [4, 2, 9]]
    split = Split.from_lists(lists)
    assert split.alike.tolist() == [0, 1, 2, 0, 4, 1, 0]
    # In any order of clients, and for some of them.
    clients = np.array([6, 4, 3, 5, 2])
    found = evaluate_shared(network, data, network.initial(), split, clients)
    for name in ("loss", "accuracy"):
        wanted = [
            evaluate_shared(
                network, data, network.initial(), Split.from_lists([lists[k]]), np.array([0])
            ).get(name, [np.nan])[0]
            for k in clients
        ]
        np.testing.assert_allclose(found[name], wanted, rtol=1e-12)
        assert found[name][0] == found[name][2]


@pytest.mark.parametrize("lists", [HELD, [[4, 2, 9], [], [9, 2, 4], [4, 2, 9], [30, 2]]])
def test_the_order_of_samples_is_kept_for_all_clients_of_a_split(lists, monkeypatch):
    network, data, _ = setting()
    split, other = Split.from_lists(lists), Split.from_lists(lists[::-1])
    made, of = [], evaluation._gather
    monkeypatch.setattr(evaluation, "_gather", lambda *args: made.append(args) or of(*args))

    def values(split, clients):
        return evaluate_shared(network, data, network.initial(), split, np.array(clients))["loss"]

    first = values(split, range(CLIENTS))
    made.clear()
    np.testing.assert_array_equal(values(split, range(CLIENTS)), first)
    assert not made
    # Not for others, and not for another split.
    np.testing.assert_allclose(values(split, [2, 0]), first[[2, 0]], rtol=1e-12)
    np.testing.assert_allclose(values(split, range(CLIENTS)[::-1]), first[::-1], rtol=1e-12)
    np.testing.assert_allclose(values(other, range(CLIENTS)), first[::-1], rtol=1e-12)
    assert list(data.orders) == [split, other]
    # Nothing is kept for a split that is gone.
    del other
    made.clear()
    gc.collect()
    assert list(data.orders) == [split]


@pytest.mark.parametrize("personal", [False, True])
def test_values_are_copied_to_the_host_once(personal, monkeypatch):
    """Every copy makes the host wait for the device."""
    network, data, _ = setting()
    copies = []
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda tensor: copies.append(tensor.shape) or tensor.to("cpu")
    )
    clients = np.arange(CLIENTS)
    if personal:
        own = {name: torch.stack([t] * CLIENTS) for name, t in network.initial().items()}
        found = evaluate_stacked(network, data, own, {}, SPLIT, clients, 2)
    else:
        found = evaluate_shared(network, data, network.initial(), SPLIT, clients)
    assert len(copies) == 1
    assert set(found) == {"loss", "accuracy"}


# ---- metrics of all outputs of a client ----------------------------------------------------------


def spread_of_scores(output, y):
    """A metric that is not a mean over samples, of outputs and targets together."""
    return float((output - torch.nn.functional.one_hot(y, 3)).std()) if len(y) > 1 else None


METRICS = (build("f1_macro"), Metric(function=spread_of_scores, higher_is_better=False))


def metrics_by_hand(data, params, held, running=True):
    if not held:
        return {metric.name: np.nan for metric in METRICS}
    plain = module(running=running).eval()
    plain.load_state_dict(params, strict=False)
    with torch.no_grad():
        # With running statistics, one sample at a time gives the same result.
        output = (
            torch.cat([plain(data.x[[sample]]) for sample in held])
            if running
            else plain(data.x[held])
        )
    spread = spread_of_scores(output, data.y[held])
    return {
        "f1_macro": f1_score(data.y[held], output.argmax(1), average="macro", zero_division=0.0),
        "spread_of_scores": np.nan if spread is None else spread,
    }


@pytest.mark.parametrize("clients", [[0, 1, 2, 3, 4], [4, 0], [2, 1, 3]])
@pytest.mark.parametrize("together", [4096, 7, 1])
@RUNNING
def test_metrics_of_one_model_on_every_client(clients, together, running, monkeypatch):
    monkeypatch.setattr(chunking, "_PASS", together)
    network, device_data, data = setting(running=running)
    params = {name: tensor + 0.1 for name, tensor in network.initial().items()}
    found = evaluate_shared(network, device_data, params, SPLIT, np.array(clients), METRICS)
    wanted = [metrics_by_hand(data, params, HELD[client], running) for client in clients]
    for metric in METRICS:
        np.testing.assert_allclose(
            found[metric.name], [values[metric.name] for values in wanted], rtol=1e-12
        )
    without = evaluate_shared(network, device_data, params, SPLIT, np.array(clients))
    for name, values in without.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("clients", [[0, 1, 2, 3, 4], [2, 1, 3]])
@pytest.mark.parametrize("chunk", [1, 2, 10])
@pytest.mark.parametrize("together", [4096, 7])
@RUNNING
def test_metrics_of_every_clients_own_model(clients, chunk, together, running, monkeypatch):
    monkeypatch.setattr(chunking, "_PASS", together)
    network, device_data, data = setting(running=running)
    initial = network.initial()
    still = {name: tensor for name, tensor in initial.items() if name.startswith("features")}
    own = {
        n: t + 0.3 * normal(len(clients), *t.shape, seed=3)
        for n, t in initial.items()
        if n.startswith("head")
    }
    found = evaluate_stacked(
        network, device_data, own, still, SPLIT, np.array(clients), chunk, METRICS
    )
    for row, client in enumerate(clients):
        params = {**still, **{name: stack[row] for name, stack in own.items()}}
        for name, value in metrics_by_hand(data, params, HELD[client], running).items():
            np.testing.assert_allclose(found[name][row], value, rtol=1e-12)
    without = evaluate_stacked(network, device_data, own, still, SPLIT, np.array(clients), chunk)
    for name, values in without.items():
        np.testing.assert_array_equal(found[name], values)


def test_metrics_of_samples_that_several_clients_hold():
    network, device_data, data = setting()
    held = [[4, 2, 9], [], [9, 2, 4], [4, 2, 9], [30, 2]]
    measured = []

    def counting(output, y):
        measured.append(len(y))
        return spread_of_scores(output, y)

    metric = Metric(function=counting, name="spread_of_scores", higher_is_better=True)
    found = evaluate_shared(
        network,
        device_data,
        network.initial(),
        Split.from_lists(held),
        np.arange(CLIENTS),
        [metric],
    )
    wanted = [metrics_by_hand(data, network.initial(), own)["spread_of_scores"] for own in held]
    np.testing.assert_allclose(found["spread_of_scores"], wanted, rtol=1e-12)
    # Clients with the same samples in the same order are evaluated once.
    assert measured == [3, 3, 2]


@pytest.mark.parametrize(("shared", "most"), [(True, 1), (False, 3)], ids=["one client", "a chunk"])
@pytest.mark.slow
def test_no_more_outputs_are_kept_than_those_of(shared, most, monkeypatch):
    monkeypatch.setattr(chunking, "_PASS", 4)
    clients, each = 40, 20
    split = Split(np.arange(clients * each), np.arange(0, clients * each + 1, each))
    data = Federation.from_arrays(
        normal(clients * each, 5).numpy(),
        np.arange(clients * each) % 3,
        clients=np.repeat(np.arange(clients), each),
    )
    network = Network(
        Model(nn.Identity(), nn.Linear(5, 3)).double(),
        tasks.build("classification"),
        dtype=torch.float64,
    )
    on_device = DeviceData(data, torch.device("cpu"), torch.float64)
    rows = []

    def alive(output=None, y=None):
        """Count the rows of all tensors that may be outputs, without views."""
        tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
        memory = [
            tensor.untyped_storage()
            for tensor in tensors
            if tensor.dim() > 1 and tensor.shape[-1] == 3
        ]
        rows.append(sum({held.data_ptr(): held.nbytes() for held in memory}.values()) // (3 * 8))

    alive()
    metric = Metric(function=alive, higher_is_better=True)
    if shared:
        evaluate_shared(network, on_device, network.initial(), split, np.arange(clients), [metric])
    else:
        own = {
            name: tensor.expand(clients, *tensor.shape)
            for name, tensor in network.initial().items()
        }
        evaluate_stacked(network, on_device, own, {}, split, np.arange(clients), 3, [metric])
    before, *during = rows
    assert len(during) == clients
    # The pieces, the outputs of the client that the metric gets, and the current pass.
    assert max(during) - before <= (most + 2) * each
