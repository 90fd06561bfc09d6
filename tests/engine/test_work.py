"""Numbers of steps that differ by client: their distribution, and independence of the stack."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise import Evaluation
from equipoise.engine.settings import Training
from equipoise.engine.work import chunks, steps_of
from equipoise.errors import InputError
from equipoise.method import Phase
from equipoise.methods import build
from equipoise.optimizers import Sgd
from equipoise.random import fold_tensor
from tests.engine.comparison import distance
from tests.engine.federations import SIZES, THREE_COHORTS, images
from tests.engine.small_models import WITHOUT_GRADIENT, batchnorm
from tests.flower.loop import write_experiment, write_silos
from tests.flower.parity import compare
from tests.rounds import play
from tests.run.small import promised, small_run

MANY = fold_tensor(3, torch.arange(20_000))
WORK = [
    {"epochs": (1, 4)},
    {"steps": (2, 9)},
    {"epochs": 3, "stragglers": 0.6},
    {"steps": (3, 8), "stragglers": 1.0},
]


def test_a_range_is_uniform():
    steps = steps_of(Phase(), Training(steps=(2, 5)), np.full(len(MANY), 30), MANY)
    counts = np.bincount(steps, minlength=7) / len(steps)
    assert counts[[0, 1, 6]].sum() == 0
    np.testing.assert_allclose(counts[2:6], 0.25, atol=0.02)
    epochs = steps_of(Phase(), Training(epochs=(2, 3), batch_size=10), np.full(len(MANY), 31), MANY)
    assert set(epochs.tolist()) == {8, 12}


def test_stragglers_do_a_uniform_share_of_their_work():
    steps = steps_of(Phase(), Training(steps=10, stragglers=0.5), np.full(len(MANY), 30), MANY)
    counts = np.bincount(steps, minlength=11) / len(steps)
    assert counts[0] == 0
    np.testing.assert_allclose(counts[1:10], 0.05, atol=0.01)
    assert counts[10] == pytest.approx(0.55, abs=0.02)
    assert set(
        steps_of(Phase(), Training(steps=1, stragglers=1.0), np.full(len(MANY), 30), MANY).tolist()
    ) == {1}


def test_a_phase_with_a_length_of_its_own_keeps_it():
    how = Training(epochs=(1, 9), batch_size=5)
    assert set(steps_of(Phase(epochs=2), how, np.full(len(MANY), 10), MANY).tolist()) == {4}
    assert set(steps_of(Phase(steps=3), how, np.full(len(MANY), 10), MANY).tolist()) == {3}


def test_adaptation_lasts_as_long_as_it_may():
    how = Training(epochs=(1, 3), batch_size=5, stragglers=1.0)
    assert set(steps_of(Phase(), how, np.full(len(MANY), 10), MANY, adapting=True).tolist()) == {6}


def test_chunks_are_full_where_steps_fall():
    order = np.arange(7)
    falling, uneven = np.arange(7)[::-1], np.array([3, 3, 2, 5, 1, 1, 0])
    assert [chunk.tolist() for chunk in chunks(order, [falling], 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [chunk.tolist() for chunk in chunks(order, [falling, uneven], 3)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]
    assert [chunk.tolist() for chunk in chunks(order, [falling, uneven], 5)] == [
        [0, 1, 2],
        [3, 4, 5, 6],
    ]


@pytest.mark.parametrize("how", WORK, ids=str)
@pytest.mark.parametrize("method", ["fedavg", "fednova", "scaffold", "fedrep", "ditto", "bgp"])
def test_a_clients_update_does_not_depend_on_the_chunk(method, how):
    def trained(chunk):
        optimizer = Sgd(lr=0.05, momentum=0.5)
        return play(
            build(method),
            images(),
            batchnorm(),
            THREE_COHORTS,
            chunk=chunk,
            batch_size=8,
            optimizer=optimizer,
            **how,
        )

    alone, stacked = trained(1), trained(10)
    assert distance(stacked.model, alone.model, skip=WITHOUT_GRADIENT) < 1e-9
    for one, other in zip(alone.updates, stacked.updates, strict=True):
        assert one.reports["steps"].tolist() == other.reports["steps"].tolist()
        torch.testing.assert_close(
            one.reports["train_loss"], other.reports["train_loss"], rtol=1e-9, atol=0
        )
    # Not all are in the order of their sizes; otherwise this would not test the order.
    rates = alone.updates[0].reports["steps"].numpy() / np.ceil(np.array(SIZES) / 8)
    assert len(set(rates.tolist())) > 2


def test_a_client_draws_anew_in_every_round():
    how = {"steps": (1, 50), "optimizer": Sgd(lr=0.01)}
    played = play(build("fedavg"), images(), batchnorm(), [np.arange(10)] * 2, **how)
    first, second = (updates.reports["steps"] for updates in played.updates)
    assert (first != second).sum() >= 8


@pytest.mark.parametrize("how", WORK[:1] + WORK[2:3], ids=str)
@pytest.mark.parametrize("method", ["fednova", "fedrep"])
def test_clients_on_flower_draw_the_same(method, how, tmp_path):
    write_silos(tmp_path / "silos")
    plain = {
        name: list(value) if isinstance(value, tuple) else value for name, value in how.items()
    }
    path = write_experiment(tmp_path, method=method, training={"rounds": 2, **plain})
    compare(path, tmp_path)


def test_a_run_is_resumed_with_the_same_work(tmp_path):
    how = {
        "method": "fednova",
        "epochs": (1, 3),
        "stragglers": 0.3,
        "evaluation": Evaluation(every=2),
    }
    small_run(tmp_path / "whole", **how, rounds=4)
    small_run(tmp_path / "run", **how, rounds=2)
    small_run(tmp_path / "run", **how, rounds=4, resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"epochs": (3, 2)},
            r"training.epochs must be a range from a smaller to a larger number, got \[3, 2\]",
        ),
        ({"epochs": (0, 2)}, "training.epochs"),
        ({"steps": (1, 2, 3)}, "training.steps"),
        ({"stragglers": 1.5}, "training.stragglers"),
    ],
)
def test_mistakes_are_named(how, message):
    with pytest.raises(InputError, match=message):
        Training(**how)
