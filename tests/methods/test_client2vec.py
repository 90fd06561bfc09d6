"""Client2Vec: its three uses by hand, around plain hosts and every method, and refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import nn

from equipoise.client_index import ClientIndex
from equipoise.data import load
from equipoise.engine import delivered
from equipoise.engine.settings import Machine, Training
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.method import Phase, State
from equipoise.methods import build, describe, names
from equipoise.methods.client2vec import USES, rested, similar_weights
from equipoise.methods.feddyn import FedDyn
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from equipoise.privacy import gaussian_epsilon
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from equipoise.tree import inner_product
from tests.engine.comparison import distance
from tests.engine.every_method import fitting, model_for_digits, skipped
from tests.engine.federations import SIZES as SIZES_OF_TEN
from tests.engine.federations import images
from tests.engine.local_rules import Written
from tests.engine.small_models import WITHOUT_GRADIENT, batchnorm, mlp
from tests.methods.plain_rounds import (
    COHORTS,
    FULL_BATCHES,
    SIZES,
    assert_equal,
    average,
    by_size,
    federation,
    samples_of,
    smooth_model,
    steps,
)
from tests.rounds import everyone_of, play, scalar, targets, weight
from tests.run.small import Stop, promised, small_run, stop_after


def random_index(clients=4, width=5, seed=2):
    draws = torch.Generator().manual_seed(seed)
    features, labels = (torch.randn(clients, size, generator=draws) for size in (width, 3))
    return ClientIndex(np.arange(clients), features, labels, "by hand")


@pytest.fixture
def path(tmp_path):
    random_index().write(tmp_path / "index.safetensors")
    return str(tmp_path / "index.safetensors")


def similarity(index, member, client):
    """The mean of both cosines."""
    return np.mean(
        [
            float(F.cosine_similarity(rows[member].double(), rows[client].double(), dim=0))
            for rows in (index.features, index.labels)
        ]
    )


def to_cohort(index, cohort, sizes, client):
    """S(β_i, C), one client after the other."""
    total = sum(sizes[j] for j in cohort)
    return sum(sizes[j] / total * similarity(index, j, client) for j in cohort)


# ---- sampling ------------------------------------------------------------------------------------


def candidates(key, sizes=(3, 1, 4, 1)):
    return SimpleNamespace(ids=np.arange(len(sizes)), sizes=np.array(sizes), key=key)


def begun(method, sizes=(3, 1, 4, 1)):
    everyone = everyone_of(range(len(sizes)), sizes=np.array(sizes))
    return method.sampler.begin(State(0, {}), everyone)


def after(method, state, cohort):
    """The state after a round of a cohort."""
    return replace(
        method.sampler.learn(state, SimpleNamespace(ids=np.array(cohort))), round=state.round + 1
    )


def test_probabilities_are_those_of_eq_1(path):
    """One of three clients is drawn; the fourth took part in the previous round."""
    method = build("client2vec", uses=["sampling"], index=path, tau=0.3)
    state = after(method, begun(method), [1])
    drawn = np.array([method.sampler.select(state, candidates(key), 1)[0] for key in range(4000)])
    odds = np.array(
        [math.exp(to_cohort(random_index(), [1], [3, 1, 4, 1], i) / 0.3) for i in range(4)]
    )
    odds[1] = 0
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 4000, odds / odds.sum(), atol=0.03)


def test_large_clients_of_the_round_before_count_more(path):
    """Similarity is weighted by the number of samples, and only the previous round is used."""
    method = build("client2vec", uses=["sampling"], index=path, tau=0.2)
    sizes = (30, 1, 4, 1, 7, 7)
    random_index(6).write(path)
    method = build("client2vec", uses=["sampling"], index=path, tau=0.2)
    state = after(method, after(method, begun(method, sizes), [5]), [0, 1])
    drawn = np.array(
        [method.sampler.select(state, candidates(key, sizes), 1)[0] for key in range(4000)]
    )
    odds = np.array(
        [math.exp(to_cohort(random_index(6), [0, 1], sizes, i) / 0.2) for i in range(6)]
    )
    # 6 / (2 · 2) = 1.5 rounds: the clients of the previous round are left out, and client 5 may be
    # drawn again.
    odds[[0, 1]] = 0
    np.testing.assert_allclose(np.bincount(drawn, minlength=6) / 4000, odds / odds.sum(), atol=0.03)


@pytest.mark.parametrize("tau", [1e-3, 1e-9])
def test_a_small_temperature_draws_the_most_similar_clients(path, tau):
    """Although exp(S/τ) is too large for a float64, and other weights too small."""
    method = build("client2vec", uses=["sampling"], index=path, tau=tau)
    state = after(method, begun(method), [1])
    rest = [0, 2, 3]
    closest = max(rest, key=lambda i: to_cohort(random_index(), [1], [3, 1, 4, 1], i))
    drawn = [method.sampler.select(state, candidates(key), 3).tolist() for key in range(20)]
    assert all(ids[0] == closest and sorted(ids) == rest for ids in drawn)


def test_round_1_is_uniform(path):
    method = build("client2vec", uses=["sampling"], index=path, tau=0.01)
    state = begun(method)
    drawn = np.concatenate(
        [method.sampler.select(state, candidates(key), 2) for key in range(2000)]
    )
    np.testing.assert_allclose(np.bincount(drawn) / 2000, 0.5, atol=0.04)


@pytest.mark.parametrize(
    ("last", "ban", "count", "wanted"),
    [
        ([5, 4, 3, 2, 0], 2.0, 2, [False, False, True, True, True]),
        ([5, 4, 3, 2, 0], 2.5, 3, [False, False, True, True, True]),
        ([5, 4, 3, 2, 0], 5.0, 1, [False, False, False, False, True]),
        ([5, 4, 3, 2, 0], 5.0, 3, [False, False, True, True, True]),
        ([5, 5, 5], 3.0, 1, [True, True, True]),
        ([0, 0, 0], 3.0, 2, [True, True, True]),
    ],
)
def test_clients_rest_unless_too_few_remain(last, ban, count, wanted):
    assert rested(torch.tensor(last), 6, ban, count).tolist() == wanted


def trainer(method, data, module, *, rounds=2, chunk=10, cohort=6):
    return Trainer(
        data,
        method,
        method.extend(module, data.shape, 0),
        Training(rounds=rounds, cohort=cohort, batch_size=8, optimizer=Sgd(lr=0.05)),
        Machine(device="cpu", precision="float64", chunk=chunk),
        Evaluation(every=0),
        seed=0,
    )


def test_nobody_is_drawn_twice_within_the_ban():
    """Ten clients, two per round: 10 / (2 · 2) = 2.5, so a client pauses for two rounds."""
    run = trainer(
        build("client2vec", uses=["sampling"]), images(), batchnorm(), rounds=12, cohort=2
    )
    drawn = []
    select = run.engine.cohort
    run.engine.cohort = lambda method, ids, round_: (
        drawn.append(ids.tolist()) or select(method, ids, round_)
    )
    run.run()
    rounds = [ids for ids in drawn if len(ids) == 2]
    assert len(rounds) == 12
    for number, ids in enumerate(rounds):
        assert not set(ids) & {k for before in rounds[max(0, number - 2) : number] for k in before}


def test_clients_that_a_guard_drops_were_drawn(path):
    """Client 1 was dropped: it rests, and the next clients are compared with it, too."""
    method = build("client2vec", uses=["sampling"], index=path, tau=0.3)
    plain, guarded = begun(method), begun(method).with_notes(guard_dropped=[1])
    assert torch.equal(
        after(method, guarded, [2]).server["client2vec"]["last"],
        after(method, plain, [1, 2]).server["client2vec"]["last"],
    )


def with_unseen(ids, unseen=()):
    """Some of ten clients and their samples, renumbered in order."""
    data, clients = images(), np.repeat(np.arange(10), SIZES_OF_TEN)
    rows = torch.from_numpy(np.isin(clients, ids))
    return Federation.from_arrays(
        data.x[rows],
        data.y[rows],
        clients=clients[rows],
        splits=(1, 0, 0),
        unseen=unseen,
        classes=4,
    )


@pytest.mark.parametrize("from_file", [True, False])
@pytest.mark.parametrize("seen", [[2, 3, 5, 6, 7, 8, 9], [0, 2, 4, 6, 8], [0, 1, 2, 3, 4]])
def test_unseen_clients_shift_neither_who_is_drawn_nor_weights(seen, from_file, path):
    """Numbers of clients and rows of their indices differ if unseen clients come before them."""
    every = random_index(10)
    unseen = [k for k in range(10) if k not in seen]
    found = []
    for ids, data in ((range(10), with_unseen(range(10), unseen)), (seen, with_unseen(seen))):
        ids = np.array(ids)
        ClientIndex(np.arange(len(ids)), every.features[ids], every.labels[ids]).write(path)
        index = {"index": path} if from_file else {}
        method = build("client2vec", uses=["sampling", "aggregation"], tau=0.2, **index)
        run = trainer(method, data, mlp(), rounds=6, cohort=2)
        run.run()
        cohorts = [ids[row["clients"]].tolist() for row in run.rounds]
        found.append((cohorts, [row["notes"]["prior"] for row in run.rounds]))
    (with_others, weights), (alone, same_weights) = found
    assert with_others == alone
    assert {k for cohort in alone for k in cohort} <= set(seen)
    np.testing.assert_allclose(weights, same_weights, rtol=1e-9, atol=0)


# ---- aggregation ---------------------------------------------------------------------------------


def test_weights_maximise_eq_2():
    """Weights found by a general optimizer are those of eq. 3."""
    q, profit, lam = np.array([0.2, 0.5, 0.3]), np.array([0.9, -0.4, 0.3]), 0.7

    def lost(logits):
        p = np.exp(logits - logits.max())
        p /= p.sum()
        return -(p @ profit + lam * p @ np.log(q / p))

    best = minimize(lost, np.zeros(3), tol=1e-14).x
    best = np.exp(best - best.max()) / np.exp(best - best.max()).sum()
    found = similar_weights(torch.from_numpy(q), torch.from_numpy(profit), lam)
    np.testing.assert_allclose(found, best, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_weights_of_rounds_are_those_of_eq_3(path, gamma):
    index, sizes, lam, cohorts = random_index(), [1, 3, 2, 5], 0.4, [[0, 1], [1, 2, 3], [0, 3]]
    values = (3.0, -1.0, 0.5, 2.0)
    method = build("client2vec", uses=["aggregation"], index=path, gamma=gamma, lam=lam)
    played = play(
        method,
        targets(*values, samples=sizes),
        scalar(1.0),
        cohorts,
        steps=1,
        optimizer=Sgd(lr=0.1),
    )
    w = 1.0
    for number, cohort in enumerate(cohorts):
        profit = [
            sum(
                gamma ** (number - r) * to_cohort(index, cohorts[r], sizes, i)
                for r in range(number + 1)
            )
            for i in cohort
        ]
        weights = np.array([sizes[i] for i in cohort]) * np.exp(np.array(profit) / lam)
        weights /= weights.sum()
        w = float(
            sum(a * (w - 0.2 * (w - values[i])) for a, i in zip(weights, cohort, strict=True))
        )
        assert weight(played.states[number + 1].model) == pytest.approx(w, abs=1e-7)
        assert played.states[number + 1].notes["prior"].tolist() == pytest.approx(
            weights.tolist(), abs=1e-7
        )


def test_the_prior_of_the_host_is_what_is_changed(path):
    """FedIIR asks in prepare, with the same weights as in combine."""
    method = build(
        "client2vec", uses=["aggregation"], index=path, host={"name": "fediir", "ema": 0.0}
    )
    values = (3.0, -1.0, 0.5, 2.0)
    played = play(
        method, targets(*values), scalar(1.0), [[0, 1, 2]], steps=1, optimizer=Sgd(lr=0.1)
    )
    share = played.states[1].notes["prior"].tolist()
    gradients = [2 * (1.0 - t) for t in values[:3]]
    found = played.states[1].server["mean_gradient"]["head.weight"].item()
    assert found == pytest.approx(np.dot(share, gradients), abs=1e-12)
    assert share != pytest.approx([1 / 3] * 3, abs=1e-2)


# ---- training ------------------------------------------------------------------------------------


def with_projection(index, seed=8):
    """The small model with a projection and its classifier."""
    torch.manual_seed(seed)
    module = smooth_model()
    module.add_module("projection", nn.Linear(6, index.width, bias=False).double())
    module.add_module("projection_head", nn.Linear(index.width, 4).double())
    return module


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize(
    ("factor", "orthogonal", "unit"),
    [(1.0, True, True), (5.0, True, True), (1.0, True, False), (1.0, False, True)],
)
def test_rounds_equal_a_plain_loop(path, factor, orthogonal, unit, chunk):
    index, data = random_index(), federation()
    vectors = [beta / beta.norm() if unit else beta for beta in index.features.double()]
    module = with_projection(index)
    for cohort in COHORTS:
        trained = []
        for k in cohort:

            def loss(copy, k=k):
                x, y = samples_of(data, k)
                total = 0.0
                for sample, label in zip(x.split(1), y, strict=True):
                    z = copy.features(sample)[0]
                    scores, projected = copy.head(z), copy.projection.weight @ z
                    p, q = scores.softmax(0), copy.projection_head(projected).softmax(0)
                    total = total - torch.log(p[label]) + factor * (p * torch.log(p / q)).sum()
                    if orthogonal:
                        products = [torch.dot(projected, beta).abs() for beta in vectors]
                        total = total + factor * sum(products) / len(products)
                return total / len(x)

            trained.append(steps(module, loss))
        module = average(trained, by_size(cohort))
    method = build(
        "client2vec",
        uses=["training"],
        index=path,
        weight=factor,
        orthogonal=orthogonal,
        unit_length=unit,
    )
    found = play(method, data, with_projection(index), COHORTS, chunk=chunk, **FULL_BATCHES)
    assert_equal(found.model, module)


@dataclass(frozen=True)
class WrittenFedDyn(FedDyn):
    """FedDyn with its terms in the loss."""

    def phases(self):
        return (Phase(loss=self.loss),)

    def loss(self, client):
        linear = inner_product(client.moved(), client.memory["dual"])
        return client.task_loss() - linear + self.alpha / 2 * client.distance_to_received()


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("host", ["fedprox", "feddyn"])
def test_the_hosts_penalty_is_on_the_projection_too(host, path, chunk):
    written = {
        "fedprox": build("fedavg", local=Written(0.5, sloped=False)),
        "feddyn": replace(build("feddyn"), local=WrittenFedDyn(0.5)),
    }
    strength = {"fedprox": "mu", "feddyn": "alpha"}[host]
    weaker, declared = (build(host, **{strength: value}) for value in (0.4, 0.5))
    ours, wanted, others = (
        play(
            build("client2vec", uses=["training"], index=path, host=each),
            federation(),
            with_projection(random_index()),
            COHORTS,
            chunk=chunk,
            **FULL_BATCHES,
        ).updates
        for each in (declared, written[host], weaker)
    )
    for found, own, other in zip(ours, wanted, others, strict=True):
        assert distance(found.params, own.params) <= 1e-9
        assert found.reports["method_terms"].tolist() == pytest.approx(
            own.reports["method_terms"].tolist(), abs=1e-9
        )
        for name in ("projection.weight", "projection_head.weight"):
            assert not torch.allclose(found.params[name], other.params[name], rtol=1e-6, atol=0)


def test_the_model_gets_a_projection_as_wide_as_the_index(path):
    method = build("client2vec", index=path)
    model = method.extend(smooth_model(), (2, 5, 5), 0)
    shapes = {
        name: tuple(p.shape)
        for name, p in model.named_parameters()
        if name.startswith("projection")
    }
    assert shapes == {
        "projection.weight": (5, 6),
        "projection_head.weight": (4, 5),
        "projection_head.bias": (4,),
    }
    without = build("client2vec", index=path, uses=["sampling", "aggregation"]).extend(
        smooth_model(), (2, 5, 5), 0
    )
    assert not [name for name, _ in without.named_parameters() if name.startswith("projection")]


@pytest.mark.parametrize(
    ("host", "moves"),
    [
        ("fedavg", ["all"]),
        ("fedbabu", [("features", "projection", "projection_head")]),
        ("fedrep", ["head", ("features", "projection", "projection_head")]),
        ("ditto", ["personal", "all"]),
    ],
)
def test_the_projection_moves_wherever_features_move(host, moves):
    phases = build("client2vec", host=host).local.phases()
    found = [
        phase.move[0] if isinstance(phase.move, tuple) and len(phase.move) == 1 else phase.move
        for phase in phases
    ]
    assert found == moves


def test_personal_features_get_terms_of_their_own_outputs():
    """After one round they cannot have changed because shared ones have."""
    plain, found = (
        trainer(method, *fitting("ditto"), rounds=1)
        for method in (build("ditto"), build("client2vec", host="ditto", uses=["training"]))
    )
    without, own = models_of(plain), models_of(found)
    (cohort,) = (row["clients"] for row in found.rounds)
    for name in trained_in(plain, without):
        if name.startswith("own features"):
            assert distance({name: own[name][cohort]}, {name: without[name][cohort]}) > 1e-6


def test_the_index_is_hashed_once(monkeypatch):
    hashed, original = [], delivered.digest
    monkeypatch.setattr(delivered, "digest", lambda tree: hashed.append(tree) or original(tree))
    small_run(method=build("client2vec", uses=["training"]), rounds=3)
    assert len(hashed) == 1


def test_the_index_is_sent_once(path):
    data, index = federation(), random_index()
    method = build("client2vec", uses=["training"], index=path)
    module = with_projection(index)
    plain = build("client2vec", uses=["training"], index=path, orthogonal=False)
    ours, without = (
        play(m, data, module, [[0, 1, 2], [0, 1, 3]], **FULL_BATCHES).cohorts
        for m in (method, plain)
    )
    size = index.features.numel() * 8
    assert [a.bytes_down - b.bytes_down for a, b in zip(ours, without, strict=True)] == [
        3 * size,
        size,
    ]


def test_regression_cannot_be_distilled(path):
    method = build("client2vec", uses=["training"], index=path)
    module = method.extend(scalar(), (1,), 0)
    with pytest.raises(
        InputError, match="training compares class probabilities, but the task .* is regression"
    ):
        play(method, targets(1.0, 2.0, 3.0, 4.0), module, [[0, 1]])


# ---- the index -----------------------------------------------------------------------------------


def test_without_a_file_the_index_is_the_mean_of_z_and_of_labels():
    data, method = federation(), build("client2vec", uses=["sampling"])
    module = smooth_model()
    played = play(method, data, module, [[0]], **FULL_BATCHES)
    kept = played.states[0].server["client2vec"]
    for k in range(4):
        x, y = samples_of(data, k)
        wanted = module.features(x).mean(0).detach()
        torch.testing.assert_close(kept["features"][k], wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            kept["labels"][k], torch.bincount(y, minlength=4).double() / len(y)
        )
    assert kept["size"].tolist() == SIZES


def asked_for(**options):
    """The index that clients send, as stored by the server."""
    method = build("client2vec", uses=["sampling"], **options)
    return play(method, federation(), smooth_model(), [[0, 1]], **FULL_BATCHES)


def test_an_index_is_clipped_and_noised_by_the_client(monkeypatch):
    plain, clipped, noised = (
        asked_for(**options).states[0].server["client2vec"]
        for options in ({}, {"clip": 0.2}, {"clip": 0.2, "noise": 3.0})
    )
    for name in ("features", "labels"):
        wanted = plain[name] * (0.2 / plain[name].norm(dim=1, keepdim=True).clamp(min=0.2))
        torch.testing.assert_close(clipped[name], wanted, rtol=1e-9, atol=1e-12)
    noise = torch.cat([noised[name] - clipped[name] for name in ("features", "labels")], 1)
    assert float(noise.std()) == pytest.approx(0.6, rel=0.3)
    assert float(torch.corrcoef(noise).fill_diagonal_(0).max()) < 0.9
    monkeypatch.setattr("equipoise.engine.chunking._PASS", 2)
    again = asked_for(clip=0.2, noise=3.0)
    torch.testing.assert_close(again.states[0].server["client2vec"]["features"], noised["features"])
    assert again.states[1].notes["index_epsilon"] == gaussian_epsilon(3.0, 2, 1e-5)


def test_a_noised_index_is_released_once():
    """The same noise on the means of another model would reveal their difference."""
    played = asked_for(clip=0.2, noise=3.0)
    before = played.states[0].server["client2vec"]
    method = build("client2vec", uses=["sampling"], clip=0.2, noise=3.0)
    everyone = played.engine.cohort(method, np.arange(4), 0)
    new = {"new": torch.tensor([False, False, True, False])}
    said = everyone.ask("mean_index", model=played.states[0].model, each=new)
    assert not said["features"][[0, 1, 3]].any()
    torch.testing.assert_close(said["features"][2], before["features"][2])
    three = {name: rows[[0, 1, 3]] for name, rows in before.items()}
    joined = method.sampler.admit(played.states[-1].with_server(client2vec=three), everyone).server[
        "client2vec"
    ]
    assert torch.equal(joined["features"][[0, 1, 3]], before["features"][[0, 1, 3]])
    assert joined["features"][2].norm() > 0


def test_noise_is_for_an_index_that_is_asked_for(path):
    with pytest.raises(InputError, match="client2vec.clip is for an index that clients send"):
        build("client2vec", index=path, clip=1.0)
    with pytest.raises(
        InputError,
        match="client2vec.noise=1.0 is a multiple of client2vec.clip, which is not given",
    ):
        build("client2vec", noise=1.0)


def test_clients_that_join_get_their_index(path):
    method = build("client2vec", uses=["sampling", "aggregation"], index=path)
    two = method.sampler.begin(State(0, {}), everyone_of([0, 2], sizes=np.array([3, 4])))
    state = after(method, two, [2])
    everyone = everyone_of(range(4), sizes=np.array([3, 1, 4, 1]))
    joined = method.sampler.admit(state, everyone)
    kept = joined.server["client2vec"]
    assert kept["last"].tolist() == [0, 0, 1, 0]
    torch.testing.assert_close(kept["features"], random_index().features.double())


def test_clients_without_an_index_are_named(path):
    method = build("client2vec", uses=["sampling"], index=path)
    with pytest.raises(InputError, match="no rows for 1 of 5 clients, such as client 4"):
        begun(method, sizes=(1, 1, 1, 1, 1))


def test_width_and_hash_of_the_index_are_written_down(path):
    method = build("client2vec", index=path)
    plain = describe(method)
    assert plain["width"] == 5
    assert plain["digest"] == random_index().digest()
    assert build(**plain) == method
    random_index(seed=9).write(path)
    with pytest.raises(InputError, match="client2vec.digest is .*, but that of the index in"):
        build(**plain)


def test_machines_without_the_file_need_the_width(tmp_path):
    nowhere = str(tmp_path / "nowhere")
    assert build("client2vec", index=nowhere, width=7).local.width == 7
    with pytest.raises(
        InputError, match="there is no file .*nowhere; valid: a file, or client2vec.width"
    ):
        build("client2vec", index=nowhere)


def test_a_run_can_be_resumed_but_not_with_another_index(tmp_path):
    path = tmp_path / "index.safetensors"
    random_index(9).write(path)
    method = {"name": "client2vec", "host": {"name": "fedprox", "mu": 0.1}, "index": str(path)}
    small_run(tmp_path / "whole", method, rounds=3)
    with pytest.raises(Stop):
        small_run(tmp_path / "run", method, rounds=3, on_round=stop_after(2))
    random_index(9, seed=5).write(path)
    with pytest.raises(InputError, match="digest"):
        small_run(tmp_path / "run", method, rounds=3, resume=True)
    random_index(9).write(path)
    small_run(tmp_path / "run", method, rounds=3, resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")


# ---- around every method -------------------------------------------------------------------------

IGNORING = {"qffl", "afl", "fedmgda", "gifair", "ga", "faa", "fftgp", "median", "trimmedmean"}
NO_HOSTS = {"local", "central", "client2vec"}
HOSTS = sorted(set(names()) - NO_HOSTS)


def on_digits(host):
    """The embedded digits, with a small model that fits the host."""
    digits = load("digits")
    model = build_model(**model_for_digits(host), shape=digits.shape, classes=10, seed=0)
    return digits, model


def models_of(run):
    """Run, and return the shared model and what the personal models of all clients have instead."""
    run.run()
    _, own = run.personal_models(run.federation.seen)
    return {f"shared {name}": tensor for name, tensor in run.state.model.items()} | {
        f"own {name}": stack for name, stack in own.items()
    }


def trained_in(run, models):
    """The parameters that a run has changed; the running statistics of BatchNorm are none."""
    network = run.engine.network
    initial, parameters = network.initial(), dict(network.blank().named_parameters())
    return {
        key
        for key, tensor in models.items()
        if (name := key.split()[1]) in parameters
        and name not in WITHOUT_GRADIENT
        and not torch.equal(tensor, initial[name].expand_as(tensor))
    }


def assert_every_use_matters(host, world, rounds):
    """Each use alone and all together change every trained parameter of the host, shared and
    personal, in a different way, however clients are stacked.
    """
    allowed = tuple(use for use in USES if use != "aggregation" or host not in IGNORING)
    for uses in (("aggregation",), USES) if host in IGNORING else ():
        with pytest.raises(
            InputError, match=f"prior weights of clients, which '{host}' does not use"
        ):
            build("client2vec", host=host, uses=uses)
    plain = trainer(build(host), *world(host), rounds=rounds)
    found = {"no use": models_of(plain)}
    trained = trained_in(plain, found["no use"])
    assert trained
    for uses in (*((use,) for use in allowed), allowed):
        method = build("client2vec", host=host, uses=uses, lam=0.1)
        one, stacked = (
            models_of(trainer(method, *world(host), rounds=rounds, chunk=chunk))
            for chunk in (1, 10)
        )
        assert distance(stacked, one, skipped(one, "images")) <= 1e-9, uses
        found["+".join(uses)] = one
    for (uses, one), (others, other) in combinations(found.items(), 2):
        for name in sorted(trained):
            assert distance({name: one[name]}, {name: other[name]}) > 1e-6, (uses, others, name)


def hosts(*quick):
    """All hosts, most of them for slow tests."""
    slow = pytest.mark.slow
    return [host if host in quick else pytest.param(host, marks=slow) for host in HOSTS]


@pytest.mark.parametrize("host", hosts("fedavg", "feddyn", "ditto", "qffl"))
def test_every_use_matters_around_every_host(host):
    assert_every_use_matters(host, fitting, rounds=2)


@pytest.mark.parametrize("host", hosts("fedavg", "fedper", "ga"))
def test_every_use_matters_on_digits_around_every_host(host):
    # In round 2 AFL may give weight 0 to all new clients, whoever is drawn.
    assert_every_use_matters(host, on_digits, rounds=3)


@pytest.mark.parametrize("host", sorted(NO_HOSTS))
@pytest.mark.parametrize("use", USES)
def test_some_methods_have_nothing_to_wrap(host, use):
    with pytest.raises(InputError, match=f"client2vec cannot wrap '{host}'"):
        build("client2vec", host=host, uses=[use])


@pytest.mark.parametrize("name", sorted(set(names()) - {"central"}))
def test_aggregations_say_whether_the_prior_matters(name):
    """Other weights give another model, unless the aggregation declares that it ignores them."""
    method = build(name)
    models = []
    for power in (1.0, 3.0):
        run = trainer(method, *fitting(name), rounds=1)
        gather = run.engine.cohort

        def raised(*given, gather=gather, power=power):
            cohort = gather(*given)
            if len(cohort.ids) == 6:
                cohort.prior = torch.arange(1.0, 7.0).double() ** power
                cohort.prior /= cohort.prior.sum()
            return cohort

        run.engine.cohort = raised
        run.run()
        models.append({n: t for n, t in run.state.model.items() if "running" not in n})
    changed = distance(*models, WITHOUT_GRADIENT) > 1e-9
    assert changed == (method.aggregation.ignores_prior is None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"uses": ["sample"]}, "unknown use 'sample' in client2vec.uses; did you mean 'sampling'"),
        ({"uses": []}, r"client2vec.uses must name each use once, got \[\]"),
        ({"uses": ["sampling", "sampling"]}, "client2vec.uses must name each use once"),
        ({"tau": 0.0}, "client2vec.tau must be a finite number above 0"),
        ({"lam": -1.0}, "client2vec.lam must be a finite number above 0"),
        ({"gamma": 1.5}, r"client2vec.gamma must be in \[0, 1\], got 1.5"),
        ({"weight": -1.0}, "client2vec.weight must be a finite number of at least 0"),
        (
            {"compare": "label"},
            "unknown value 'label' in client2vec.compare; did you mean 'labels'",
        ),
        (
            {"width": 3},
            "client2vec.width and client2vec.digest need client2vec.index, which is not set",
        ),
    ],
)
def test_refusals(options, message):
    with pytest.raises(InputError, match=message):
        build("client2vec", **options)
