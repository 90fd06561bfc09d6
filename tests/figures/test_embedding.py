"""Embedded features: the samples, their features by hand, and scikit-learn's t-SNE."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.manifold import TSNE

from equipoise import Machine, load, train
from equipoise.data import load as load_data
from equipoise.errors import InputError
from equipoise.figures import draw_embeddings, embed_features

DATA = {"name": "digits", "leave_out": "textured"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("embedding") / "run"
    digits = load_data(**DATA)
    machine = Machine(device="cpu", precision="float64")
    train(
        digits,
        data=DATA,
        model={"name": "mlp", "hidden": [6]},
        rounds=1,
        out=directory,
        machine=machine,
    )
    return digits, directory


def test_features_and_points(trained):
    digits, directory = trained
    found = embed_features(directory, samples=8, seed=3, device="cpu")
    module = load(directory)
    with torch.no_grad():
        wanted = np.stack(
            [module.features(digits.x[p : p + 1].double()).numpy()[0] for p in found.samples]
        )
    np.testing.assert_allclose(found.features, wanted, atol=1e-10)
    own = TSNE(perplexity=len(wanted) / 3, init="pca", random_state=3).fit_transform(
        found.features.astype(np.float32)
    )
    np.testing.assert_array_equal(found.points, own.astype(float))
    np.testing.assert_array_equal(found.labels, digits.y.numpy()[found.samples])


def test_seen_clients_give_training_samples_and_unseen_ones_test_samples(trained):
    digits, directory = trained
    found = embed_features(directory, samples=8, device="cpu")
    assert len(set(found.samples.tolist())) == len(found.samples) == 40
    for sample, group, unseen in zip(found.samples, found.groups, found.unseen, strict=True):
        split = digits.split("test" if unseen else "train")
        (client,) = [c for c in range(digits.clients) if sample in split.of(c)]
        assert (digits.groups[client], digits.unseen[client]) == (group, unseen)
    assert {found.group_names[g] for g in found.groups[found.unseen]} == {"textured"}
    assert np.bincount(found.groups).tolist() == [8] * 5


@pytest.mark.parametrize("by", ["domain", "group", "label"])
def test_the_figure_is_written(trained, tmp_path, by):
    embedding = embed_features(trained[1], samples=5, device="cpu")
    path = draw_embeddings({"one": embedding, "again": embedding}, tmp_path / f"{by}.png", by=by)
    assert path.stat().st_size > 5000


def test_refusals(trained, tmp_path):
    with pytest.raises(InputError, match="samples must be a whole number of at least 1, got 0"):
        embed_features(trained[1], samples=0)
    train(load_data(**DATA), data=DATA, method="fedper", rounds=1, out=tmp_path / "fedper")
    with pytest.raises(InputError, match="there is no global model"):
        embed_features(tmp_path / "fedper")
