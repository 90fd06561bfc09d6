"""The same method, seed and data give the same numbers in one process and by messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise import methods
from equipoise.data import load
from tests.flower import own_methods as their_methods
from tests.flower.loop import write_experiment, write_silos
from tests.flower.parity import compare, with_clients
from tests.methods.domains import (
    adjusted_by_hand,
    assert_on_the_simplex,
    equal_gaps_by_hand,
    shares,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four clients' directories."""
    folder = tmp_path_factory.mktemp("parity")
    write_silos(folder / "silos")
    return folder


@pytest.mark.parametrize("name", with_clients())
def test_every_method_gives_the_same_models_and_metrics(name, folder):
    # Three of four clients per round: some have no memory yet, and the sampler has a choice.
    path = write_experiment(
        folder, method=name, training={"rounds": 3, "cohort": 3, "optimizer": {"lr": 0.1}}
    )
    _, run, _ = compare(path, folder)
    assert all(torch.isfinite(tensor).all() for tensor in run.trainer.state.model.values())


def test_the_best_round_is_the_same_and_clients_keep_its_memory(folder):
    path = write_experiment(
        folder,
        method="ditto",
        training={"rounds": 3, "cohort": 3, "optimizer": {"lr": 3.0}},
        evaluation={"select": "best"},
        seed=1,
    )
    alone, _, _ = compare(path, folder)
    assert alone.trainer.selected().round < 3


def test_fine_tuned_and_averaged_models_are_the_same(folder):
    path = write_experiment(
        folder, method="fedper", evaluation={"fine_tune": {"epochs": 1}, "average_kept": True}
    )
    compare(path, folder)


@pytest.mark.parametrize("aggregation", ["faa", {"name": "gifair", "exact": True}], ids=str)
def test_averages_with_the_parts_that_clients_keep_are_the_same(aggregation, folder):
    path = write_experiment(
        folder,
        method={"name": "fedper", "aggregation": aggregation},
        training={"rounds": 3, "cohort": 3, "optimizer": {"lr": 0.1}},
    )
    compare(path, folder)


def keep_samples(silos, client, count):
    """Leave a client the first of its samples."""
    path = silos / f"client-{client}" / "data.npz"
    with np.load(path) as data:
        kept = {name: values[:count] for name, values in data.items()}
    np.savez(path, **kept)


@pytest.mark.parametrize("cohort", [3, 2])
@pytest.mark.parametrize(
    "method",
    [
        {"name": "ga"},
        {"name": "faa"},
        {"name": "faa", "every": 2},
        {"name": "faa", "metric": "score"},
        {"name": "fftgp"},
    ],
    ids=lambda method: "-".join(map(str, method.values())),
)
def test_weights_follow_the_gaps_if_a_client_has_no_validation_data(method, cohort, tmp_path):
    """It has no gap. All weights stay on the simplex, in cohorts smaller than the federation."""
    write_silos(tmp_path / "silos")
    keep_samples(tmp_path / "silos", 1, 2)
    training = {"rounds": 4, "cohort": cohort, "optimizer": {"lr": 0.1}}
    path = write_experiment(tmp_path, method=method, training=training)
    alone, _, _ = compare(path, tmp_path)
    assert alone.trainer.federation.val.sizes[1] == 0
    a, known = np.full(4, 0.25), {client: [] for client in range(4)}
    for row in alone.trainer.rounds:
        here, notes = row["clients"], row["notes"]
        gap, change = (np.array(notes.get(n, []), float) for n in ("gaps", "gap_changes"))
        share = shares(a, here)
        wanted = adjusted_by_hand(share, gap, 0.2 * (1 - (row["round"] - 1) / 4))
        if len(change):
            wanted = equal_gaps_by_hand(share, gap, wanted, -change)
        np.testing.assert_allclose(notes["weights"], wanted, rtol=1e-9, atol=1e-12)
        a[here] = wanted * a[here].sum()
        assert_on_the_simplex(notes["weights"], a)
        for client, measured in zip(here, np.isfinite(gap), strict=True):
            known[client].append(measured)
    assert known[1]
    assert not any(known.pop(1))
    assert any(any(measured) for measured in known.values())


def test_batch_statistics_and_augmentation_are_the_same(folder):
    path = write_experiment(
        folder,
        method="fedprox",
        model={"name": "resnet18", "width": 4, "norm": "batch"},
        training={"rounds": 2, "augment": [{"name": "crop", "padding": 1}]},
    )
    compare(path, folder)


def test_test_samples_in_a_file_of_their_own_are_the_same(tmp_path):
    write_silos(tmp_path / "silos")
    rng = np.random.default_rng(0)
    for number in range(4):
        where = tmp_path / "silos" / f"client-{number}" / "test.npz"
        np.savez(where, x=rng.random((5, 1, 8, 8)), y=np.arange(5))
    alone, _, _ = compare(write_experiment(tmp_path, training={"rounds": 2}), tmp_path)
    assert alone.trainer.federation.test.sizes.tolist() == [5] * 4


def test_masks_are_the_same(tmp_path):
    sites = load("ellipses", images=8, size=12, empty=0.2)
    for client in range(4):
        rows = np.concatenate([sites.split(split).of(client) for split in ("train", "val", "test")])
        folder = tmp_path / "silos" / f"client-{client}"
        folder.mkdir(parents=True)
        np.savez(folder / "data.npz", x=sites.x[rows].numpy(), y=sites.y[rows].numpy())
    path = write_experiment(
        tmp_path,
        data={"classes": 2, "task": "segmentation"},
        method="ditto",
        model={"name": "unet", "width": 2, "depth": 1},
        training={
            "rounds": 2,
            "cohort": 3,
            "batch_size": 3,
            "optimizer": {"name": "adam", "lr": 0.01},
            "augment": ["flip"],
        },
    )
    alone, _, _ = compare(path, tmp_path)
    assert alone.summary["score"] == "dice"


@pytest.mark.parametrize("guard", [{"name": "norm"}, {"name": "multikrum", "f": 0, "m": 2}])
@pytest.mark.parametrize("name", ["scaffold", "ditto", "gifair"])
def test_guards_give_the_same_and_what_they_drop_is_not_missed(name, guard, folder):
    # Fewer clients than flower.min_clients are kept, but all have answered.
    exact = {"exact": True} if name == "gifair" else {}
    path = write_experiment(
        folder,
        method={"name": name, "guard": guard, **exact},
        training={"rounds": 3, "cohort": 3, "optimizer": {"lr": 0.1}},
        flower={"min_clients": 3},
    )
    alone, run, _ = compare(path, folder)
    kept = 3 if guard["name"] == "norm" else 2
    for one, other in zip(alone.trainer.rounds, run.trainer.rounds, strict=True):
        assert (one["cohort"], one.get("left_out")) == (other["cohort"], other.get("left_out"))
        assert one["cohort"] == kept
    assert run.trainer.engine.remembering == []
    assert (
        sorted(run.trainer.engine.ledger.now) == alone.trainer.engine.remembering
        or name == "gifair"
    )


OWN = {
    "ask": {"name": "fedavg", "local": "asking", "aggregation": "asking"},
    "frozen backbone": {"name": "fedavg", "local": "headonly"},
    "sampler with state": {"name": "scaffold", "sampling": "turns"},
}


@pytest.fixture
def own_methods(monkeypatch):
    """User-defined methods that are registered on both sides."""
    monkeypatch.setattr(methods, "_PARTS", dict(methods._discover()))
    their_methods.register_all()


@pytest.mark.parametrize("what", OWN)
def test_methods_of_the_users_own_give_the_same(what, folder, own_methods):
    path = write_experiment(
        folder, method=OWN[what], training={"rounds": 3, "cohort": 2, "optimizer": {"lr": 0.1}}
    )
    _, run, grid = compare(path, folder)
    assert ("query.ask" in grid.kinds) == (what == "ask")
    if what == "frozen backbone":
        # Tensors that are never trained are not sent, because both sides have them.
        head = sum(
            t.numel() * 8 for n, t in run.trainer.state.model.items() if n.startswith("head.")
        )
        whole = sum(t.numel() * 8 for t in run.trainer.state.model.values())
        row = next(iter(run.trainer.rounds))
        assert row["bytes_down"] == 2 * head < whole
        assert row["bytes_up"] == 2 * (head + 3 * 8)
