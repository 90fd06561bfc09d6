"""The losses of DSA-IGN by hand and in rounds, stacked clients, and the index of digits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from equipoise import train
from equipoise.client_index import ClientIndex, index_of, make_index
from equipoise.data import load
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.methods import build
from equipoise.methods.dsaign import diversity
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from equipoise.privacy import gaussian_epsilon
from tests.engine.comparison import distance
from tests.methods.plain_rounds import COHORTS, SIZES, assert_equal, average, samples_of, steps
from tests.rounds import play

HOW = {"steps": 2, "batch_size": 64, "optimizer": Sgd(lr=0.02)}


def embeddings(sizes=SIZES):
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(sum(sizes), 16, generator=draws, dtype=torch.float64)
    y = torch.arange(sum(sizes)) % 4
    return Federation.from_arrays(
        x, y, clients=np.repeat(np.arange(len(sizes)), sizes), splits=(1, 0, 0), classes=4
    )


def network():
    return build_model("dsaign", shape=(16,), classes=4, feedforward=12, depth=1, seed=4).double()


def cosine(one, other):
    return torch.dot(one, other) / (one.norm() * other.norm())


def by_hand(model, x, y, which):
    """The four losses, pair by pair."""
    split = model.features(x)
    z, u = split[:, :16], split[:, 16:]
    size, total = len(x), 0.0
    for j in range(size):
        if "sim" in which:
            total = total + 1 - cosine(z[j], model.head.vectors[y[j]])
        if "recon" in which:
            total = total + ((model.reconstruction(split[j]) - x[j]) ** 2).mean()
        if "orth" in which:
            total = total + sum(torch.dot(z[j], u[k]).abs() for k in range(size)) / size
        if "div" in which:
            total = total + torch.log(
                sum(torch.exp(cosine(u[j], u[k])) for k in range(size) if k != j)
            )
    return total / size


ALL = ("div", "sim", "orth", "recon")


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("which", [ALL, *((name,) for name in ALL)], ids="+".join)
def test_rounds_equal_a_plain_loop(which, chunk):
    data, module = embeddings([4, 6, 3, 5]), network()
    cohorts = COHORTS if which == ALL else COHORTS[:1]
    for cohort in cohorts:
        trained = []
        for k in cohort:
            x, y = samples_of(data, k)
            trained.append(
                steps(module, lambda m, x=x, y=y: by_hand(m, x, y, which), lr=0.02, count=2)
            )
        sizes = np.array([[4, 6, 3, 5][k] for k in cohort])
        module = average(trained, sizes / sizes.sum())
    method = build("fedavg", local={"name": "dsaign", **{name: name in which for name in ALL}})
    found = play(method, data, network(), cohorts, chunk=chunk, **HOW)
    assert_equal(found.model, module)


def test_diversity_by_hand():
    """Directions (1, 0), (0, 1) and (1, 0): cosines 0 and 1. The last row is padding."""
    u = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 0.0], [7.0, 7.0]])
    found = diversity(u, torch.tensor([1.0, 1.0, 1.0, 0.0]))[:3]
    assert found.tolist() == pytest.approx(
        [math.log(1 + math.e), math.log(2), math.log(math.e + 1)]
    )


def test_a_single_sample_has_no_diversity():
    u = torch.tensor([[1.0, 0.0], [5.0, 5.0]], requires_grad=True)
    found = diversity(u, torch.tensor([1.0, 0.0]))[0]
    found.backward()
    assert found.item() == 0
    assert bool(torch.isfinite(u.grad).all())


def test_stacked_clients_with_padding_equal_one_by_one():
    data, method = embeddings([1, 9, 5, 17]), build("fedavg", local="dsaign")
    how = {"batch_size": 4, "epochs": 2, "optimizer": Sgd(lr=0.02)}
    one, all_ = (
        play(method, data, network(), [range(4)] * 2, chunk=chunk, **how).model for chunk in (1, 4)
    )
    assert distance(all_, one) <= 1e-9
    assert set(one) == {name for name, _ in network().named_parameters()}


def test_it_brings_its_model_and_needs_a_loss():
    assert build("fedavg", local="dsaign").usual_model == "dsaign"
    with pytest.raises(InputError, match="dsaign needs at least one of the losses"):
        build("fedavg", local={"name": "dsaign", **dict.fromkeys(ALL, False)})


def test_an_index_is_the_mean_over_the_training_samples():
    data, module = embeddings(), network()
    index = index_of(module, data)
    for k in range(4):
        x, y = samples_of(data, k)
        wanted = module.features(x)[:, 16:].mean(0).float()
        torch.testing.assert_close(index.features[k], wanted.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            index.labels[k], module.head.vectors[y].mean(0).float(), rtol=1e-5, atol=1e-6
        )
    assert index.made_by != index_of(module, embeddings([2, 2, 2, 2])).made_by
    with pytest.raises(InputError, match="only model 'dsaign' makes a client index, got Model"):
        index_of(build_model("mlp", shape=(16,), classes=4), data)


def test_a_run_leaves_a_clipped_and_noised_index_with_its_epsilon(tmp_path):
    def left(**options):
        method = {"name": "fedavg", "local": {"name": "dsaign", **options}}
        out = tmp_path / str(len(options))
        train(
            embeddings(),
            method=method,
            model={"name": "dsaign", "feedforward": 16},
            rounds=1,
            out=out,
        )
        return ClientIndex.read(out / "client_index.safetensors")

    plain, clipped, noised = left(), left(clip=0.5), left(clip=0.5, noise=4.0)
    assert (plain.epsilon, clipped.epsilon) == (None, None)
    assert noised.epsilon == gaussian_epsilon(4.0, 2, 1e-5)
    for name in ("features", "labels"):
        vectors = getattr(plain, name)
        wanted = vectors * (0.5 / vectors.norm(dim=1, keepdim=True).clamp(min=0.5))
        torch.testing.assert_close(getattr(clipped, name), wanted, rtol=1e-5, atol=1e-6)
        noise = getattr(noised, name) - getattr(clipped, name)
        assert float(noise.std()) == pytest.approx(2.0, rel=0.3)
    assert noised.of(np.array([1])).epsilon == noised.epsilon


@pytest.mark.parametrize(
    "method",
    [{"name": "fedavg", "local": "dsaign"}, {"name": "central", "samples": 128, "local": "dsaign"}],
    ids=["federated", "global"],
)
def test_clients_of_a_group_have_similar_indices_on_digits(method, tmp_path):
    """The nearest neighbour of a client is in its group, and a method can use the file."""
    digits = load("digits")
    how = {"rounds": 5, "epochs": 2, "batch_size": 64, "optimizer": {"name": "adam", "lr": 1e-3}}
    run = train(digits, method=method, model={"name": "dsaign", "feedforward": 64}, **how)
    index, groups = index_of(run.model(), digits), digits.groups
    similarity = index.similarity("features") - 2 * torch.eye(len(groups))
    same = torch.from_numpy(groups[:, None] == groups[None])
    nearest = similarity.argmax(1).numpy()
    assert (groups[nearest] == groups).sum() >= 20
    off = ~torch.eye(len(groups), dtype=torch.bool)
    gap = similarity[same & off].mean() - similarity[~same].mean()
    average_ = make_index(digits, lambda x, y: (x.flatten(1), torch.eye(10)[y])).similarity(
        "features"
    )
    assert gap > 0.3 + (average_[same & off].mean() - average_[~same].mean())
    index.write(tmp_path / "index")
    used = train(
        digits, method={"name": "client2vec", "index": str(tmp_path / "index")}, rounds=2, cohort=5
    )
    assert used.trainer.state.model["projection.weight"].shape[0] == 64


def test_only_some_samples_of_each_client_are_pooled():
    data = embeddings()
    view = build("central", samples=6).view.of(data)
    assert view.train.sizes.tolist() == [6 + 6 + 5 + 6]
    assert build("central").view.of(data).train.sizes.tolist() == [sum(SIZES)]
    with pytest.raises(
        InputError, match=r"central\.samples must be a whole number of at least 1, got 0"
    ):
        build("central", samples=0)


@pytest.mark.parametrize("recon", [True, False])
def test_another_model_is_refused_before_training(recon, tmp_path):
    method = {"name": "fedavg", "local": {"name": "dsaign", "recon": recon}}
    with pytest.raises(InputError, match="which Model lacks; valid: model 'dsaign'"):
        train(embeddings(), method=method, model="mlp", rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
