"""FedGCR: equations by hand, rounds against a plain loop, and clusters of changing clients."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from equipoise import Evaluation, Machine, Training, tasks, train
from equipoise.client import Client
from equipoise.client_index import ClientIndex
from equipoise.clustering import purity
from equipoise.data import load
from equipoise.engine.network import Network
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError
from equipoise.grouping import place
from equipoise.method import State, Updates
from equipoise.methods import build, describe
from equipoise.methods.fedgc import FedGC, balanced_mean, representations_of
from equipoise.methods.fedgcr import FedGCR
from equipoise.methods.fedgr import FedGR, group_weights
from equipoise.models.passes import Forward
from equipoise.optimizers import Sgd
from equipoise.privacy import gaussian_epsilon
from equipoise.run.trainer import Trainer
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.small_models import transformer
from tests.methods.plain_fedgcr import rounds_by_hand
from tests.rounds import everyone_of, play

SIZES = [4, 2, 6, 3, 3]
COHORTS = [[0, 1, 2, 3], [0, 2, 4], [0, 1, 2, 3, 4]]


float64 = partial(torch.tensor, dtype=torch.float64)


def pictures():
    """Clients of two types: those with odd numbers have brighter images."""
    federation = images(sizes=SIZES, shape=(1, 8, 8))
    odd = torch.from_numpy(np.repeat(np.arange(len(SIZES)) % 2, SIZES)).double()
    return replace(federation, x=federation.x + 3 * odd.view(-1, 1, 1, 1))


# ---- equations by hand ---------------------------------------------------------------------------


def client_with(h, **about):
    """A client with three images, for which GC-Net returns the same h."""
    module = transformer("fedgc")
    with torch.no_grad():
        module.features.gcnet[2].weight.zero_()
        module.features.gcnet[2].bias.copy_(torch.tensor(h + [0.0] * (16 - len(h))))
    network = Network(module, tasks.build("classification"), dtype=torch.float64)
    draws = torch.Generator().manual_seed(0)
    given = {
        "network": network,
        "params": network.initial(),
        "x": torch.randn(3, 1, 8, 8, generator=draws, dtype=torch.float64),
        "y": torch.tensor([0, 1, 3]),
        "forward": Forward(train=False),
        "sent": {"model": network.initial()},
        "each": {},
        "memory": {},
        "seen": torch.tensor(True),
        "round": torch.tensor(1),
    }
    return Client(**{**given, **about})


def vector(*values):
    return torch.tensor([*values, *[0.0] * (16 - len(values))]).double()


@pytest.mark.parametrize(
    ("similarity", "products", "own"),
    [
        ("dot", [2.0, 10.0, -4.0], 3.0),
        ("cosine", [1 / math.sqrt(5), 1.0, -2 / math.sqrt(5)], 1 / math.sqrt(5)),
    ],
)
def test_group_customization_by_hand(similarity, products, own):
    centres = torch.stack([vector(2, 0), vector(2, 4), vector(0, -2)])
    client = client_with(
        [1.0, 2.0],
        sent={"centres": {"h": centres}},
        memory={"representation": {"h": vector(3, 0)}},
        each={"cluster": torch.tensor(2)},
    )
    found = FedGC(similarity=similarity, tau=0.7).customization(client)
    below = sum(math.exp(value / 0.7) for value in (*products, own))
    wanted = -math.log(math.exp(products[2] / 0.7) / below)
    assert found.tolist() == pytest.approx([wanted] * 3, rel=1e-12)


def test_terms_that_are_not_known_are_left_out():
    centres = {"centres": {"h": torch.stack([vector(2, 0), vector(0, 1)])}}
    memory = {"representation": {"h": vector(9, 9)}}
    stranger = client_with(
        [1.0, 2.0], sent=centres, memory=memory, each={"cluster": torch.tensor(-1)}
    )
    assert FedGC().customization(stranger).tolist() == [0, 0, 0]
    forgetful = client_with(
        [1.0, 2.0],
        sent=centres,
        memory=memory,
        each={"cluster": torch.tensor(0)},
        seen=torch.tensor(False),
    )
    wanted = -math.log(math.exp(4) / (math.exp(4) + math.exp(4)))
    assert FedGC().customization(forgetful).tolist() == pytest.approx([wanted] * 3, rel=1e-12)


def test_shares_of_clusters_mix_the_losses_of_both():
    centres = {"centres": {"h": torch.stack([vector(2, 0), vector(0, 1), vector(1, 1)])}}
    about = {"sent": centres, "memory": {"representation": {"h": vector(1, 0)}}}
    alone = [
        FedGC()
        .customization(client_with([1.0, 2.0], each={"cluster": torch.tensor(t)}, **about))[0]
        .item()
        for t in range(3)
    ]
    both = client_with([1.0, 2.0], each={"membership": torch.tensor([0.25, 0.0, 0.75])}, **about)
    assert FedGC().customization(both)[0].item() == pytest.approx(
        0.25 * alone[0] + 0.75 * alone[2], rel=1e-12
    )


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_representation_alignment_by_hand(similarity):
    client = client_with([1.0, 2.0])
    trained = [name for name in client.params if name.startswith("features")]
    received, previous = (
        {name: client.params[name] + 0.3 * (seed + 1) for name in trained}
        for seed, _ in enumerate("ab")
    )
    client = client_with([1.0, 2.0], sent={"model": received}, memory={"previous": previous})
    z, z0, z_prev = (client.at(tree).features() for tree in ({}, received, previous))
    found = FedGC(similarity=similarity, tau=0.7).alignment(client)
    for image in range(3):
        near, far = (
            (
                F.cosine_similarity(z[image], other[image], dim=0)
                if similarity == "cosine"
                else z[image] @ other[image]
            )
            for other in (z0, z_prev)
        )
        wanted = -torch.log(torch.exp(near / 0.7) / (torch.exp(near / 0.7) + torch.exp(far / 0.7)))
        assert found[image].item() == pytest.approx(wanted.item(), rel=1e-9)
    stranger = client_with(
        [1.0], sent={"model": received}, memory={"previous": previous}, seen=torch.tensor(False)
    )
    assert FedGC().alignment(stranger).tolist() == [0, 0, 0]


def test_anchors_drop_nothing():
    module = transformer("fedgc", dropout=0.5)
    network = Network(module, tasks.build("classification"), dtype=torch.float64)
    tree = {
        name: tensor for name, tensor in network.initial().items() if name.startswith("features")
    }
    client = client_with([1.0])
    about = {
        "network": network,
        "params": network.initial(),
        "moving": frozenset(network.initial()),
    }
    about |= {"sent": {"model": network.initial()}, "memory": {"previous": tree}}
    training = Client(
        **{
            **{n: getattr(client, n) for n in ("x", "y", "each", "seen", "round")},
            **about,
            "forward": Forward(train=True, key=torch.tensor(3)),
        }
    )
    assert bool((training.features() == 0).any())
    assert not bool((training.at(tree).features() == 0).any())
    # Both anchors are the same model, so the loss is log 2.
    assert FedGC().alignment(training).tolist() == pytest.approx([math.log(2)] * 3, rel=1e-12)


def test_client_representations_by_hand():
    """Two classes are present: means (2, 4) of three samples and (0, 6) of one."""
    sums = {
        "h": torch.tensor([[6.0, 12.0], [0.0, 0.0], [0.0, 6.0]]),
        "count": torch.tensor([3.0, 0.0, 1.0]),
    }
    assert balanced_mean(sums)["h"].tolist() == [1.0, 5.0]


def test_beta_by_hand():
    assert [FedGR(delta=0.8, gamma=0.9).beta(r) for r in range(3)] == pytest.approx(
        [0, 0.08, 0.152]
    )
    assert FedGR().beta(50) == pytest.approx(0.5)


PRIOR, LOSSES = float64([0.1, 0.2, 0.3, 0.4]), float64([1.0, 2.0, 100 / 33, 4.0])
PAIRS = F.one_hot(torch.tensor([0, 0, 1, 1]))


def test_group_weights_by_hand():
    single = PRIOR * LOSSES**2
    assert group_weights(PRIOR, LOSSES, PAIRS, 1, 0).tolist() == pytest.approx(
        (single / single.sum()).tolist()
    )
    wanted = [0.015674, 0.062697, 0.333923, 0.587705]
    assert group_weights(PRIOR, LOSSES, PAIRS, 1, 0.5).tolist() == pytest.approx(wanted, abs=5e-7)
    equal = torch.full((4,), 0.37)
    for beta in (0, 0.3, 1):
        assert group_weights(PRIOR, equal, PAIRS, 2, beta).tolist() == pytest.approx(
            PRIOR.tolist(), rel=1e-12
        )
    assert group_weights(PRIOR, LOSSES, PAIRS, -1, 0.5).tolist() == pytest.approx(
        PRIOR.tolist(), rel=1e-12
    )


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        ([0.0, 0.0, 0.0, 0.0], PRIOR.tolist()),
        ([0.0, 0.0, 0.0, 3.0], [0, 0, 0, 1]),
        ([1e200, 1e200, 1e200, 1e200], PRIOR.tolist()),
    ],
)
def test_weights_of_extreme_losses(losses, wanted):
    assert group_weights(PRIOR, float64(losses), PAIRS, 1, 0.0).tolist() == pytest.approx(wanted)


def test_a_loss_of_zero_does_not_matter_if_only_groups_do():
    found = group_weights(PRIOR, float64([0.0, 2.0, 1.0, 1.0]), PAIRS, 1, 1.0)
    assert found.tolist() == pytest.approx((PRIOR / PRIOR.sum()).tolist())


def test_the_group_of_a_client_with_shares_is_a_mixture():
    # Its group loss is the mean of both groups' losses with these shares.
    shares, losses = float64([[1, 0], [0, 1], [0.5, 0.5]]), float64([1, 4, 2])
    means = [(1 + 0.5 * 2) / 1.5, (4 + 0.5 * 2) / 1.5]
    raw = float64([means[0], means[1], sum(means) / 2]) ** 2
    found = group_weights(torch.ones(3) / 3, losses, shares, 1, 1.0)
    assert found.tolist() == pytest.approx((raw / raw.sum()).tolist(), rel=1e-12)


def test_given_groups_weigh_clients():
    """Losses and groups determine the weights through combine, with β of the second round."""
    cohort = SimpleNamespace(ids=np.arange(4), groups=np.array([3, 3, 7, 7]), prior=PRIOR)
    updates = Updates({"w": torch.eye(4).double()}, {}, {}, {"loss_before": LOSSES})
    method = FedGR(groups="given", delta=1.0)
    state = method.combine(State(1, {"w": torch.zeros(4).double()}), updates, cohort)
    assert state.model["w"].tolist() == pytest.approx(
        [0.015674, 0.062697, 0.333923, 0.587705], abs=5e-7
    )
    assert state.notes["beta"] == 0.5
    assert torch.equal(state.notes["weights"], state.model["w"])


# ---- rounds against a plain loop -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "chunk"),
    [
        ("fedgcr", {}, 10),
        ("fedgcr", {"similarity": "cosine", "representation": "received"}, 1),
        ("fedgc", {"representation": "received"}, 2),
    ],
)
def test_rounds_equal_the_plain_loop(name, options, chunk):
    module = transformer("fedgc", dropout=0.25)
    with torch.no_grad():
        # At initialization h is close to 0 and ℓ_GC close to a constant.
        module.features.gcnet[2].weight.mul_(3)
    method = build(name, clusters=2, clustering="kmeans", **options)
    how = {"batch_size": 4, "optimizer": Sgd(lr=0.1)}
    played = play(method, pictures(), module, COHORTS, chunk=chunk, **how)
    wanted, told = rounds_by_hand(
        module,
        pictures(),
        COHORTS,
        seed=5,
        lr=0.1,
        batch=4,
        clusters=2,
        cosine=options.get("similarity") == "cosine",
        received="representation" in options,
        reweighted=name == "fedgcr",
    )
    for state, updates, plain in zip(played.states[1:], played.updates, told, strict=True):
        assert state.notes["clusters"].tolist() == plain["clusters"]
        assert (updates.uploads["representation"]["h"] - plain["h"]).norm() <= 1e-9 * plain[
            "h"
        ].norm()
        if name == "fedgcr":
            assert state.notes["weights"].tolist() == pytest.approx(plain["weights"], rel=1e-9)
    assert distance(played.model, wanted) <= 1e-9
    assert any(len(set(plain["clusters"])) == 2 for plain in told)


def test_both_terms_of_the_loss_count():
    how = {"batch_size": 4, "optimizer": Sgd(lr=0.1)}
    both, *others = (
        play(build("fedgc", **options), pictures(), transformer("fedgc"), COHORTS, **how).model
        for options in ({}, {"lam1": 0.0}, {"lam2": 0.0}, {"tau": 2.0}, {"similarity": "cosine"})
    )
    assert min(distance(other, both) for other in others) > 1e-5


def test_without_centres_the_first_round_is_federated_averaging():
    how = {"batch_size": 4, "optimizer": Sgd(lr=0.1)}
    found, wanted = (
        play(build(name), pictures(), transformer("fedgc"), COHORTS[:1], **how).model
        for name in ("fedgc", "fedavg")
    )
    assert distance(found, wanted) <= 1e-12


@pytest.mark.parametrize("name", ["fedgcr", "fedgr"])
def test_encoded_and_plain_first_passes_agree(name):
    def trained(encode):
        trainer = Trainer(
            pictures(),
            build(name, clusters=2),
            transformer("fedgc" if name == "fedgcr" else "vitprompts"),
            Training(rounds=3, cohort=4, batch_size=4, optimizer=Sgd(lr=0.1)),
            Machine(device="cpu", precision="float64", encode=encode),
            Evaluation(every=0),
            seed=0,
        )
        trainer.run()
        assert trainer.engine.network.encoded == encode
        return trainer.state.model

    assert distance(trained(True), trained(False)) <= 1e-9


# ---- class tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vitprompts", "fedgc"])
def test_class_tokens_are_asked_for_once(kind):
    module = transformer(kind)
    asked = []

    class Watched(FedGR):
        def class_tokens(self, client):
            asked.append(len(client.y))
            return super().class_tokens(client)

    method = build("fedavg", aggregation=Watched(clusters=2))
    played = play(method, pictures(), module, COHORTS, chunk=1, batch_size=4, optimizer=Sgd(lr=0.1))
    # All clients in the first round; client 4 is new in the second.
    assert sorted(asked) == sorted([4, 2, 6, 3, 4, 6, 3])
    tokens = module.stem.tokens if kind == "fedgc" else module.stem
    for client in range(5):
        x = pictures().x[torch.from_numpy(pictures().train.of(client))]
        wanted = module.features.encoder(tokens(x)).mean(0)
        found = played.states[-1].server["clients"]["h"][client]
        assert (found - wanted).norm() <= 1e-9 * wanted.norm()


def test_notes_have_clusters_every_round():
    run = train(load("digits"), method={"name": "fedgr", "clusters": 3}, model=SMALL, rounds=2)
    for row in run.trainer.rounds:
        assert len(row["notes"]["clusters"]) == len(row["notes"]["weights"]) == 22
        assert sum(row["notes"]["weights"]) == pytest.approx(1)


SMALL = {"name": "vitprompts", "width": 16, "depth": 1, "heads": 2}


def test_styles_of_digits_are_found_by_class_tokens():
    federation = load("digits")
    run = train(federation, method="fedgr", model=SMALL, rounds=1)
    clusters = next(iter(run.trainer.rounds))["notes"]["clusters"]
    pairs = set(zip(clusters, federation.groups.tolist(), strict=True))
    assert len(pairs) == 5


def test_styles_of_digits_are_found_by_representations_of_the_received_model():
    """Representations of trained models do not show the styles, because all GC-Nets differ."""
    federation = load("digits")
    found = {}
    for representation in ("received", "trained"):
        method = {"name": "fedgcr", "representation": representation, "similarity": "cosine"}
        run = train(federation, method=method, model={**SMALL, "name": "fedgc"}, rounds=2)
        noted = [np.array(row["notes"]["clusters"]) for row in run.trainer.rounds]
        found[representation] = [purity(clusters, federation.groups) for clusters in noted]
    assert min(found["received"]) >= 0.9
    assert max(found["trained"]) < 0.7


def test_a_run_that_was_stopped_goes_on_with_the_same_clusters(tmp_path):
    how = {
        "method": {"name": "fedgcr", "representation": "received"},
        "model": {**SMALL, "name": "fedgc"},
        "rounds": 4,
    }
    whole = train(load("digits"), **how, out=tmp_path / "whole")

    def stop(progress):
        if progress.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(load("digits"), **how, out=tmp_path / "stopped", on_round=stop)
    resumed = train(load("digits"), **how, out=tmp_path / "stopped", resume=True)
    assert all(
        torch.equal(t, resumed.trainer.state.model[n]) for n, t in whole.trainer.state.model.items()
    )
    assert (tmp_path / "whole" / "rounds.jsonl").read_bytes() == (
        tmp_path / "stopped" / "rounds.jsonl"
    ).read_bytes()


# ---- combinations and refusals -------------------------------------------------------------------


def test_parts_combine():
    assert isinstance(build("fedgr", local="fedgc", groups="representation").local, FedGC)
    assert (
        build("fedgcr").usual_model
        == build("fedgr", local="fedgc", groups="representation").usual_model
        == "fedgc"
    )
    assert build("fedprox", aggregation="fedgr").usual_model == "vitprompts"
    made = build("fedgcr", clusters=7, similarity="cosine", groups="given")
    assert build(**describe(made)) == made
    played = [
        play(
            method, pictures(), transformer("fedgc"), COHORTS, batch_size=4, optimizer=Sgd(lr=0.1)
        ).model
        for method in (build("fedgcr"), build("fedgr", local="fedgc", groups="representation"))
    ]
    assert distance(*played) == 0


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            {"name": "fedgc", "lam1": -1.0},
            "fedgc.lam1 must be a finite number of at least 0, got -1.0",
        ),
        ({"name": "fedgcr", "tau": 0.0}, "fedgcr.tau must be a finite number above 0, got 0.0"),
        ({"name": "fedgcr", "similarity": "l2"}, "unknown value 'l2' in fedgcr.similarity"),
        (
            {"name": "fedgc", "representation": "first"},
            "unknown value 'first' in fedgc.representation",
        ),
        (
            {"name": "fedgr", "clusters": 0},
            "fedgr.clusters must be a whole number of at least 1, got 0",
        ),
        ({"name": "fedgr", "clustering": "dbscan"}, "unknown value 'dbscan' in fedgr.clustering"),
        ({"name": "fedgr", "choice": "aic"}, "unknown value 'aic' in fedgr.choice"),
        ({"name": "fedgr", "groups": "own"}, "unknown value 'own' in fedgr.groups"),
        ({"name": "fedgcr", "groups": "classtoken"}, "unknown value 'classtoken' in fedgcr.groups"),
        ({"name": "fedgr", "delta": 1.5}, "fedgr.delta must be a number from 0 to 1, got 1.5"),
        ({"name": "fedgr", "q": -2.0}, "fedgr.q must be a finite number of at least -1, got -2.0"),
        (
            {"name": "fedgr", "groups": "representation"},
            "FedGR needs representation, which PlainTraining does not provide",
        ),
        (
            {"name": "fedgc", "aggregation": "qffl"},
            "FedGC needs centres, which QFedAvg does not provide",
        ),
    ],
)
def test_refusals(method, message):
    with pytest.raises(InputError) as caught:
        build(**method)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["fedgc", "fedgcr", "fedgr"])
def test_other_models_are_refused(name):
    with pytest.raises(
        InputError, match="GC-Net, which the model lacks|needs a model with a frozen transformer"
    ):
        train(load("digits"), method=name, model="mlp", rounds=1)


# ---- beyond the paper ----------------------------------------------------------------------------

RECEIVED = {"clusters": 2, "representation": "received"}


def rounds_on(federations, method, module):
    """Run one round per federation, with the same clients and changing data; return the states."""
    engine, memory = None, {}
    states = []
    for round_, federation in enumerate(federations):
        training = Training(rounds=len(federations), batch_size=4, optimizer=Sgd(lr=0.05))
        engine = StackedEngine(
            federation, module, training, Machine(device="cpu", precision="float64"), 3
        )
        engine.restore(memory)
        state = replace(states[-1], round=round_) if states else State(0, engine.network.initial())
        cohort = engine.cohort(method, federation.seen, round_)
        shared, each = method.aggregation.send(state, cohort)
        states.append(
            method.aggregation.combine(state, cohort.train(shared, each, method.local), cohort)
        )
        engine.commit(cohort)
        memory = engine.export()
    return states


def of_types(*shares, samples=12):
    """Clients whose images are brighter in the given share of samples."""
    federation = images(sizes=[samples] * len(shares), shape=(1, 8, 8))
    bright = torch.cat([torch.arange(samples) < round(share * samples) for share in shares])
    return replace(federation, x=federation.x + 3 * bright.double().view(-1, 1, 1, 1))


def test_a_client_whose_data_change_changes_its_cluster():
    before, after = of_types(0, 0, 0, 1, 1, 1), of_types(0, 0, 1, 1, 1, 1)
    states = rounds_on(
        [before, before, after, after], build("fedgcr", **RECEIVED), transformer("fedgc")
    )
    found = [state.notes["clusters"].tolist() for state in states]
    assert found == [[0, 0, 0, 1, 1, 1]] * 2 + [[0, 0, 1, 1, 1, 1]] * 2


def test_shares_of_a_client_with_two_types_are_those_of_its_data():
    mixed = of_types(0, 0, 0, 1, 1, 1, 0.25)
    state = rounds_on([mixed] * 2, build("fedgcr", soft=True, **RECEIVED), transformer("fedgc"))[-1]
    shares = state.notes["memberships"]
    bright = shares[3].argmax()
    assert shares[3:6, bright].min() > 0.9
    assert shares[:3, bright].max() < 0.1
    # Classes have different brightness, and h is not a linear function of an image.
    assert shares[6, bright].item() == pytest.approx(0.25, abs=0.15)


def test_clients_that_never_took_part_are_placed_by_their_representations():
    federation, method = of_types(0, 0, 1, 1, 1, 0), build("fedgcr", **RECEIVED)
    played = play(
        method,
        federation,
        transformer("fedgc"),
        [range(4)] * 2,
        batch_size=4,
        optimizer=Sgd(lr=0.05),
    )
    newcomers = played.engine.cohort(method, np.array([4, 5]), 2)
    found = place(played.states[-1], representations_of(played.states[-1], newcomers))
    assert found.tolist() == played.states[-1].notes["clusters"][[2, 0]].tolist()


def test_representations_are_clipped_and_noised_once(monkeypatch):
    plain, clipped = (
        play(
            build("fedgc", **options, **RECEIVED),
            pictures(),
            transformer("fedgc"),
            COHORTS[:1],
            batch_size=4,
        )
        for options in ({}, {"clip": 0.1})
    )
    h, short = (made.updates[0].uploads["representation"]["h"] for made in (plain, clipped))
    assert (h.norm(dim=1) > 0.1).all()
    torch.testing.assert_close(short, 0.1 * h / h.norm(dim=1, keepdim=True))

    def noised(chunk=10, seed=5):
        method = build("fedgc", clip=0.1, noise=2.0, **RECEIVED)
        how = {"batch_size": 4, "chunk": chunk, "seed": seed}
        return play(method, pictures(), transformer("fedgc"), COHORTS[:1], **how)

    first = noised()
    noise = first.updates[0].uploads["representation"]["h"] - short
    assert float(noise.std()) == pytest.approx(0.2, rel=0.25)
    assert abs(float(torch.corrcoef(noise).fill_diagonal_(0).max())) < 0.7
    # The noise depends on the seed, but not on the number of passes over a client's samples or on
    # its chunk.
    monkeypatch.setattr("equipoise.engine.chunking._PASS", 2)
    again = noised(chunk=1).updates[0].uploads["representation"]["h"]
    torch.testing.assert_close(again, short + noise, rtol=1e-9, atol=1e-12)
    assert (
        noised(seed=6).updates[0].uploads["representation"]["h"] - short - noise
    ).abs().max() > 0.1
    assert first.states[1].notes["epsilon"] == gaussian_epsilon(2.0, 1, 1e-5)


def test_noise_needs_a_length():
    with pytest.raises(
        InputError, match=r"fedgc.noise=1.0 is a multiple of fedgc.clip, which is not given"
    ):
        build("fedgc", noise=1.0)
    with pytest.raises(InputError, match="fedgcr.privacy_delta must be between 0 and 1, got 2"):
        build("fedgcr", privacy_delta=2.0)


# ---- a client index as cold start ----------------------------------------------------------------


@pytest.fixture
def index(tmp_path):
    """An index of five clients with other clusters than the images: {0, 1, 4} and {2, 3}."""
    features = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0], [1.0, 0.05]])
    ClientIndex(np.arange(5), features, torch.ones(5, 3)).write(tmp_path / "index")
    return str(tmp_path / "index")


def h_of_clients(module, federation):
    """h̃ of every client under a model, image by image."""
    means = []
    for client in range(federation.clients):
        samples = federation.train.of(client)
        x, y = federation.x[samples], federation.y[samples]
        with torch.no_grad():
            h = module.features.gcnet(module.stem(x)[:, 0])
        means.append(torch.stack([h[y == label].mean(0) for label in y.unique()]).mean(0))
    return torch.stack(means)


@pytest.mark.parametrize("name", ["fedgc", "fedgcr"])
def test_clusters_and_centres_are_known_before_round_1(name, index):
    module = transformer("fedgc").double()
    method = build(name, clusters=2, index=index)
    played = play(method, pictures(), module, COHORTS[:1], batch_size=4, optimizer=Sgd(lr=0.1))
    start = played.states[0]
    assert start.server["clients"]["share"].argmax(1).tolist() == [0, 0, 1, 1, 0]
    h = h_of_clients(module, pictures())
    torch.testing.assert_close(start.server["clients"]["h"], h, rtol=1e-9, atol=1e-12)
    wanted = torch.stack([h[[0, 1, 4]].mean(0), h[[2, 3]].mean(0)])
    torch.testing.assert_close(start.server["clusters"]["h"], wanted, rtol=1e-9, atol=1e-12)
    shared, each = method.aggregation.send(start, played.cohorts[0])
    torch.testing.assert_close(shared["centres"]["h"], wanted, rtol=1e-9, atol=1e-12)
    assert each["cluster"].tolist() == [0, 0, 1, 1]
    # Client 4 was absent, and keeps the cluster of its index.
    assert played.states[1].server["clients"]["ids"].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(played.states[1].server["clients"]["h"][4], start.server["clients"]["h"][4])


def test_customization_begins_in_round_1_with_an_index(index):
    with_index, without = (
        play(
            build("fedgc", clusters=2, **more),
            pictures(),
            transformer("fedgc"),
            COHORTS[:1],
            batch_size=4,
        )
        for more in ({"index": index}, {})
    )
    assert distance(with_index.model, without.model) > 1e-6


@pytest.mark.parametrize(
    "make",
    [partial(build, "fedgc"), lambda **o: build("fedavg", aggregation={"name": "fedgr"} | o)],
)
def test_an_index_changes_nothing_between_stacked_and_one_by_one(make, index):
    more = {"index": index, "clusters": 2}
    method = (
        make(**more) if make(clusters=2).local.name == "fedgc" else make(groups="index", **more)
    )
    one, all_ = (
        play(
            method,
            pictures(),
            transformer("fedgc"),
            COHORTS,
            batch_size=4,
            chunk=chunk,
            optimizer=Sgd(lr=0.1),
        ).model
        for chunk in (1, 10)
    )
    assert distance(all_, one) <= 1e-9


def test_fedgr_weighs_by_clusters_of_the_index_with_any_model(index):
    """No client is asked; the second round has β = 0.5."""
    method = FedGR(groups="index", index=index, clusters=2, delta=1.0)
    state = method.begin(State(0, {"w": torch.zeros(4).double()}), everyone_of(range(5), key=3))
    cohort = SimpleNamespace(ids=np.array([0, 1, 2, 3]), prior=PRIOR)
    updates = Updates({"w": torch.eye(4).double()}, {}, {}, {"loss_before": LOSSES})
    state = method.combine(replace(state, round=1), updates, cohort)
    assert state.model["w"].tolist() == pytest.approx(
        [0.015674, 0.062697, 0.333923, 0.587705], abs=5e-7
    )
    assert state.notes["clusters"].tolist() == [0, 0, 1, 1]


def test_clients_that_join_are_clustered_by_their_index(index):
    method = FedGR(groups="index", index=index, clusters=2)
    state = method.begin(State(0, {}), everyone_of([0, 2, 3], key=3))
    joined = method.admit(state, everyone_of(range(5), key=3))
    assert joined.server["clients"]["share"].argmax(1).tolist() == [0, 0, 1, 1, 0]


def test_the_first_representation_is_clipped_and_noised_too(index):
    def start(**options):
        method = build("fedgc", clusters=2, index=index, **options)
        played = play(method, pictures(), transformer("fedgc"), COHORTS[:1], batch_size=4)
        return played.states[0].server["clients"]["h"], played

    plain, clipped, (noised, played) = (
        start()[0],
        start(clip=0.1)[0],
        start(clip=0.1, noise=2.0, representation="received"),
    )
    torch.testing.assert_close(clipped, 0.1 * plain / plain.norm(dim=1, keepdim=True))
    noise = noised - clipped
    assert float(noise.std()) == pytest.approx(0.2, rel=0.25)
    # In round 1 the same h̃ is released once more, with other noise.
    again = played.updates[0].uploads["representation"]["h"] - clipped[:4]
    assert (
        abs(float(torch.corrcoef(torch.stack([again.flatten(), noise[:4].flatten()]))[0, 1])) < 0.5
    )
    assert played.states[1].notes["epsilon"] == gaussian_epsilon(2.0, 2, 1e-5)


def test_an_index_that_is_not_used_is_refused(index):
    with pytest.raises(InputError, match="fedgr.index is not used with fedgr.groups='given'"):
        FedGR(groups="given", index=index)
    with pytest.raises(
        InputError, match="fedgr.groups='index' needs fedgr.index, the file of a client index"
    ):
        FedGR(groups="index")
    assert describe(build("fedgc", index=index))["digest"] == ClientIndex.read(index).digest()


def test_fedgcr_is_fedgc_and_fedgr():
    assert issubclass(FedGCR, FedGR)
    assert {"loss_before"} == set(FedGCR.needs)
