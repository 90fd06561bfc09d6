"""FedMGDA+: steps by hand, limits, clients without an update, and descent for every client."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.engine.evaluation import evaluate_shared
from equipoise.errors import InputError
from equipoise.method import State, Updates
from equipoise.methods import build
from equipoise.methods.fedmgda import inner_products
from equipoise.optimizers import Sgd
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.small_models import WITHOUT_GRADIENT, batchnorm, mlp
from tests.rounds import linear, play, random_regression, scalar, targets, weight


def combined(rows, *, round_=0, buffers=None, **options):
    """The model after one round in which clients send these parameters, from a model of zeros."""
    stack = torch.tensor(rows, dtype=torch.float64)
    sent = {} if buffers is None else {"running_mean": torch.tensor(buffers, dtype=torch.float64)}
    params = {"a": stack[:, :1], "b": stack[:, 1:]}
    state = State(round_, {name: torch.zeros_like(part[0]) for name, part in params.items()})
    new = build("fedmgda", **options).aggregation.combine(
        state, Updates(params, sent, {}, {}), None
    )
    moved = torch.cat([new.model["a"], new.model["b"]]).tolist()
    return moved if buffers is None else (moved, new.model["running_mean"].tolist())


def test_two_clients_by_hand():
    # Unit vectors u = (1, 0) and v = (0.6, 0.8): the shortest point between two of equal length is
    # the middle.
    assert combined([[5.0, 0.0], [0.3, 0.4]], epsilon=1.0) == pytest.approx([0.8, 0.4], abs=1e-12)


def test_three_clients_by_hand():
    # (1, 0), (0, 1) and (0.6, 0.8): the third has weight 0, and the shortest point is the middle of
    # the first two.
    rows = [[2.0, 0.0], [0.0, 7.0], [0.3, 0.4]]
    assert combined(rows, epsilon=1.0, lr=0.5) == pytest.approx([0.25, 0.25], abs=1e-10)
    # At most 0.1 from a third each: the third client keeps 7/30, the others a and 23/30 - a. The
    # sum (a + 0.6·7/30, 23/30 - a + 0.8·7/30) is shortest where both entries are equal, which the
    # bounds allow: a = 0.407.
    half = (23 / 30 + 1.4 * 7 / 30) / 2
    assert combined(rows, epsilon=0.1) == pytest.approx([half, half], abs=1e-12)


def test_a_single_number_is_part_of_the_inner_products():
    params = {"a": torch.tensor([[1.0, 2.0], [3.0, 0.0]]), "temperature": torch.tensor([2.0, 3.0])}
    model = {"a": torch.zeros(2), "temperature": torch.tensor(5.0)}
    # Differences (1, 2, -3) and (3, 0, -2).
    found = inner_products(State(0, model), Updates(params, {}, {}, {}))
    assert found.tolist() == [[14.0, 9.0], [9.0, 13.0]]


def test_the_length_runs_over_the_whole_model():
    # Both clients have length 5 over a and b together.
    assert combined([[3.0, 4.0, 0.0], [3.0, 0.0, 4.0]], epsilon=0.0) == pytest.approx(
        [0.6, 0.4, 0.4], abs=1e-14
    )


def test_without_a_region_it_is_the_plain_mean_of_normalised_updates():
    federation, how = images(), {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.1)}
    played = play(build("fedmgda", epsilon=0.0, lr=0.7), federation, mlp(), THREE_COHORTS, **how)
    for before, after, updates in zip(
        played.states, played.states[1:], played.updates, strict=False
    ):
        moves = {name: rows - before.model[name] for name, rows in updates.params.items()}
        lengths = (
            torch.stack([move.square().flatten(1).sum(1) for move in moves.values()]).sum(0).sqrt()
        )
        for name, move in moves.items():
            unit = move / lengths.view(-1, *(1,) * (move.dim() - 1))
            torch.testing.assert_close(
                after.model[name], before.model[name] + 0.7 * unit.mean(0), rtol=0, atol=1e-13
            )


def test_sizes_and_lengths_do_not_matter():
    short = combined([[1e-6, 0.0], [0.0, 1e3]], epsilon=1.0)
    assert short == pytest.approx([0.5, 0.5], abs=1e-9)
    how = {"steps": 1, "optimizer": Sgd(lr=0.1)}
    found = play(
        build("fedmgda", epsilon=0.0),
        targets(3.0, -1.0, 9.0, samples=[1, 5, 2]),
        scalar(0.0),
        [range(3)],
        **how,
    )
    assert weight(found.model) == pytest.approx(1 / 3, abs=1e-14)


def test_opposite_clients_leave_the_model_where_it_is():
    # Between 3 and -1 every step is worse for one client: the point is Pareto-stationary.
    played = play(
        build("fedmgda", epsilon=1.0), targets(3.0, -1.0), scalar(0.0), [[0, 1]] * 3, steps=1
    )
    assert weight(played.model) == pytest.approx(0.0, abs=1e-7)


def test_a_client_that_stands_still_is_handled():
    assert combined([[0.0, 0.0], [3.0, 4.0]], epsilon=1.0) == pytest.approx([0.0, 0.0], abs=1e-9)
    assert combined([[0.0, 0.0], [3.0, 4.0]], epsilon=0.0) == pytest.approx([0.3, 0.4], abs=1e-14)
    assert combined([[0.0, 0.0], [0.0, 0.0]], epsilon=1.0) == [0.0, 0.0]
    assert combined([[3.0, 4.0]], epsilon=1.0) == pytest.approx([0.6, 0.8])


def test_steps_shorten_from_round_to_round():
    assert combined([[3.0, 4.0]], round_=3, lr=2.0, decay=0.5) == pytest.approx([0.15, 0.2])


def test_buffers_are_averaged_with_the_mixture():
    # Lengths 1 and 100 are equal after normalising; the mixture of (1, 0) and (0, 1) is half and
    # half.
    _, mean = combined([[1.0, 0.0], [0.0, 100.0]], epsilon=1.0, lr=50.0, buffers=[[2.0], [6.0]])
    assert mean == pytest.approx([4.0], abs=1e-9)


def test_small_steps_lower_the_loss_of_every_client():
    federation = random_regression([30, 12, 20, 8], features=8, seed=4)
    how = {"steps": 1, "batch_size": 30, "optimizer": Sgd(lr=0.01)}
    start = linear(8)
    played = play(build("fedmgda", epsilon=1.0, lr=0.05), federation, start, [range(4)] * 10, **how)
    engine = played.engine
    losses = np.array(
        [
            evaluate_shared(
                engine.network, engine.data, state.model, federation.train, np.arange(4)
            )["loss"]
            for state in played.states
        ]
    )
    assert (np.diff(losses, axis=0) < 0).all()


@pytest.mark.parametrize("epsilon", [0.05, 1.0])
@pytest.mark.parametrize("make", [mlp, batchnorm], ids=["mlp", "bn"])
def test_stacked_equals_one_by_one(make, epsilon):
    method, how = (
        build("fedmgda", epsilon=epsilon),
        {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.05)},
    )
    one, all_ = (
        play(method, images(), make(), THREE_COHORTS, chunk=chunk, **how) for chunk in (1, 10)
    )
    assert distance(all_.model, one.model, WITHOUT_GRADIENT) <= 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": -0.1}, r"fedmgda\.epsilon must be in \[0, 1\], got -0\.1"),
        ({"epsilon": 1.5}, r"fedmgda\.epsilon must be in"),
        ({"lr": 0.0}, r"fedmgda\.lr must be above 0 and finite, got 0\.0"),
        ({"lr": float("nan")}, r"fedmgda\.lr must be above 0"),
        ({"decay": 1.1}, r"fedmgda\.decay must be above 0 and at most 1, got 1\.1"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        build("fedmgda", **options)
