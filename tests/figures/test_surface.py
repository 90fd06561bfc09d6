"""Loss surfaces against NumPy: grid, losses and positions of models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise import Evaluation, Machine, Training, train
from equipoise.data import load as load_data
from equipoise.errors import InputError
from equipoise.figures import draw_surfaces, loss_surface
from equipoise.figures.opened import open_run
from equipoise.optimizers import Sgd
from tests.figures.linear_runs import KEPT, linear_run, weights_of, world
from tests.methods.domains import loss
from tests.rounds import linear


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run with three local models and two unseen clients."""
    directory = tmp_path_factory.mktemp("surface") / "run"
    data = world()
    return data, directory, linear_run(directory, data)


def test_losses_are_those_of_the_models_at_each_point(kept):
    data, directory, run = kept
    surface = loss_surface(directory, federation=data, module=linear(), steps=4, device="cpu")
    first, second, third = (weights_of(run.local_model(k)) for k in range(3))
    across = (second - first) / np.linalg.norm(second - first)
    up = (third - first) - ((third - first) @ across) * across
    up /= np.linalg.norm(up)
    assert (len(surface.x), surface.loss.shape) == (4, (4, 4))
    for row, y in enumerate(surface.y):
        for column, x in enumerate(surface.x):
            losses = [loss(data, k, first + x * across + y * up, "test") for k in (3, 4)]
            wanted = np.average(losses, weights=data.test.sizes[3:])
            assert surface.loss[row, column] == pytest.approx(wanted, rel=1e-9)
    middle = weights_of(run.model())
    places = {"client 0": first, "client 1": second, "client 2": third, "global": middle}
    assert list(surface.models) == list(places)
    for name, w in places.items():
        assert surface.models[name] == pytest.approx(
            [(w - first) @ across, (w - first) @ up], abs=1e-9
        )
    # The average of three models is in their plane.
    assert surface.off_plane == pytest.approx(0, abs=1e-9)
    low, high = np.min(list(surface.models.values()), 0), np.max(list(surface.models.values()), 0)
    assert np.ptp(surface.x) == pytest.approx(np.ptp(surface.y))
    assert np.ptp(surface.x) == pytest.approx(1.6 * (high - low).max())


def test_mixtures_outside_the_hull_of_the_models(kept):
    data, directory, run = kept
    opened = open_run(directory, federation=data, module=linear(), device="cpu", local=True)
    own = [weights_of(run.local_model(k)) for k in range(3)]
    mixture = opened.mixed([0, 2], np.array([1.5, -0.5]))["head.weight"].numpy()[0]
    np.testing.assert_allclose(mixture, 1.5 * own[0] - 0.5 * own[2], rtol=1e-12)


def test_a_global_model_outside_the_plane_is_projected(tmp_path):
    """The mean of four models is off the plane of three, by its distance to the nearest point."""
    data = world(unseen=(4,))
    run = linear_run(tmp_path / "run", data)
    surface = loss_surface(
        tmp_path / "run", clients=[0, 1, 3], federation=data, module=linear(), steps=2, device="cpu"
    )
    own = [weights_of(run.local_model(k)) for k in (0, 1, 3)]
    edges = np.stack([own[1] - own[0], own[2] - own[0]], axis=1)
    difference = weights_of(run.model()) - own[0]
    nearest = edges @ np.linalg.lstsq(edges, difference, rcond=None)[0]
    assert surface.off_plane == pytest.approx(np.linalg.norm(difference - nearest), rel=1e-9)
    assert np.hypot(*surface.models["global"]) == pytest.approx(np.linalg.norm(nearest), rel=1e-9)


def test_batch_statistics_stay_valid_outside_the_models(tmp_path):
    data = {"name": "digits", "leave_out": "textured"}
    training = Training(rounds=1, cohort=4, batch_size=16, optimizer=Sgd(lr=0.2))
    model = {"name": "bncnn", "channels": [4], "hidden": [], "pools": 1}
    how = {"training": training, "evaluation": KEPT, "machine": Machine(device="cpu")}
    run = train(load_data(**data), data=data, model=model, out=tmp_path / "run", **how)
    clients = run.trainer.local_models().clients
    with pytest.raises(InputError, match=r"three clients, got \[.*\]; valid: clients= three of"):
        loss_surface(tmp_path / "run", device="cpu")
    surface = loss_surface(tmp_path / "run", clients=clients[:3], steps=3, margin=2.0, device="cpu")
    assert np.isfinite(surface.loss).all()
    assert surface.off_plane > 0
    opened = open_run(tmp_path / "run", device="cpu", local=True)
    outside = opened.mixed(clients[:2], np.array([3.0, -2.0]))
    ours, theirs = (run.local_model(client).state_dict() for client in clients[:2])
    torch.testing.assert_close(outside["features.1.running_var"], ours["features.1.running_var"])
    torch.testing.assert_close(
        outside["head.weight"], 3 * ours["head.weight"] - 2 * theirs["head.weight"]
    )
    draw_surfaces({"one": surface, "again": surface}, tmp_path / "figure5.png")
    assert (tmp_path / "figure5.png").stat().st_size > 5000


def test_refusals(kept, tmp_path):
    data, directory, _ = kept
    given = {"federation": data, "module": linear(), "device": "cpu"}
    for clients in ([0, 1], [0, 1, 3], [0, 1, 1]):
        with pytest.raises(InputError, match="a plane needs the local models of three clients"):
            loss_surface(directory, clients=clients, **given)
    with pytest.raises(InputError, match="are not in its configuration; pass them as federation="):
        loss_surface(directory, module=linear(), device="cpu")
    other = world(unseen=(1,))
    with pytest.raises(InputError, match="was trained on other data"):
        loss_surface(directory, federation=other, module=linear(), device="cpu")
    everyone = world(unseen=())
    linear_run(tmp_path / "everyone", everyone)
    with pytest.raises(InputError, match="no unseen client has test data"):
        loss_surface(
            tmp_path / "everyone",
            clients=[0, 1, 2],
            federation=everyone,
            module=linear(),
            device="cpu",
        )
    best = Evaluation(keep_local=True, select="best")
    run = linear_run(tmp_path / "best", data, rounds=6, evaluation=best, optimizer=Sgd(lr=0.9))
    assert run.summary["round"] < 6
    with pytest.raises(
        InputError, match=r"the global model is from round \d .* local models are from round 6"
    ):
        loss_surface(tmp_path / "best", **given)
