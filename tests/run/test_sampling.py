"""Samplers that ask clients, samplers with state, and samplers with invalid choices."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from equipoise.engine import planning
from equipoise.errors import InputError
from equipoise.method import Sampler
from equipoise.methods import build
from equipoise.methods.fedavg import UniformSampler
from equipoise.models import build as build_model
from equipoise.random import Purpose, choose_by_weight, fold
from equipoise.run.participants import Participants
from equipoise.tree import size_in_bytes
from tests.own_rules import Noting, make_known
from tests.own_samplers import PowerOfChoice
from tests.run.small import MODEL, Stop, federation, promised, rows_of, small_run, stop_after


@pytest.fixture(autouse=True)
def known(monkeypatch):
    make_known(monkeypatch)


def test_power_of_choice_takes_the_highest_losses_of_candidates_drawn_by_size():
    models = []

    @dataclass(frozen=True)
    class Watched(PowerOfChoice):
        name = "powerofchoice"

        def select(self, state, candidates, count):
            models.append(dict(state.model))
            return super().select(state, candidates, count)

    data = federation()
    run = small_run(method=build("fedavg", sampling=Watched(candidates=6), aggregation=Noting()))
    module = build_model(**MODEL, shape=data.shape, classes=3, seed=3).eval()
    for round_, (row, model) in enumerate(zip(run.trainer.rounds, models, strict=True)):
        sizes = data.train.sizes[data.seen].astype(float)
        drawn = np.sort(data.seen[choose_by_weight(fold(3, round_, Purpose.SAMPLE), sizes, 6)])
        module.load_state_dict(model)
        losses = {}
        for client in drawn.tolist():
            held = torch.from_numpy(data.train.of(client))
            losses[client] = F.cross_entropy(module(data.x[held]), data.y[held]).item()
        assert row["clients"] == sorted(sorted(losses, key=losses.get)[-4:])
    assert len({tuple(row["clients"]) for row in run.trainer.rounds}) > 2


def test_what_candidates_are_asked_is_counted_in_the_round():
    run = small_run(
        method={"name": "fedavg", "sampling": {"name": "powerofchoice", "candidates": 6}}
    )
    model = size_in_bytes(run.trainer.state.model)
    for row in run.trainer.rounds:
        assert row["bytes_down"] == (6 + 4) * model
        # Candidates report loss and accuracy; the cohort reports training loss, steps and
        # validation loss.
        assert row["bytes_up"] == 6 * 2 * 8 + 4 * (model + 3 * 8)
    assert run.summary["bytes_up"] == sum(row["bytes_up"] for row in run.trainer.rounds)


LONGEST_AWAY = {"name": "fedavg", "sampling": "longestaway", "aggregation": "noting"}


def test_a_sampler_keeps_what_it_learns(tmp_path):
    small_run(tmp_path / "run", method=LONGEST_AWAY, cohort=3)
    last = dict.fromkeys(federation().seen.tolist(), 0)
    for row in rows_of(tmp_path / "run", "rounds"):
        expected = sorted(last, key=lambda client: (last[client], client))[:3]
        assert row["clients"] == sorted(expected)
        last |= dict.fromkeys(expected, row["round"])


def test_what_a_sampler_has_learned_survives_a_stop(tmp_path):
    how = {"method": LONGEST_AWAY, "cohort": 3}
    small_run(tmp_path / "whole", **how)
    with pytest.raises(Stop):
        small_run(tmp_path / "run", **how, on_round=stop_after(4))
    small_run(tmp_path / "run", **how, resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")


@dataclass(frozen=True)
class Wrong(Sampler):
    """Returns a given choice."""

    name = "wrong"
    chosen: tuple[int, ...] = ()

    def select(self, state, candidates, count):
        """Choose."""
        assert count == 4
        return np.array(self.chosen)


@pytest.mark.parametrize(
    "chosen",
    [(0, 1, 1, 2), (0, 1, 2, 7), (0, 1, 2, 9), (-1, 0, 1, 2), (0, 1, 2), (0, 1, 2, 3, 4), ()],
    ids=["twice", "unseen", "unknown", "negative", "too few", "too many", "nobody"],
)
def test_a_wrong_choice_is_refused_by_name(chosen):
    with pytest.raises(
        InputError,
        match=r"^sampler 'wrong' chose \[.*\]; valid: 4 distinct ids of registered clients$",
    ):
        small_run(method=build("fedavg", sampling=Wrong(chosen)))


@pytest.mark.parametrize(
    "answer",
    [
        None,
        3,
        "clients",
        [0.0, 1.0, 2.0, 3.0],
        [True, False, True, True],
        [[0, 1], [2, 3]],
        ["0", "1", "2", "3"],
    ],
    ids=["nothing", "a number", "text", "floats", "a mask", "a table", "names"],
)
def test_an_answer_that_is_no_list_of_ids_is_refused(answer):
    @dataclass(frozen=True)
    class Odd(Sampler):
        name = "odd"

        def select(self, state, candidates, count):
            return answer

    with pytest.raises(
        InputError, match=r"^sampler 'odd' chose .*; valid: 4 distinct ids of registered clients$"
    ):
        small_run(method=build("fedavg", sampling=Odd()))


def test_ids_in_any_order_and_form_are_accepted():
    @dataclass(frozen=True)
    class Backwards(Sampler):
        def select(self, state, candidates, count):
            return torch.tensor([5, 3, 1, 0])

    run = small_run(method=build("fedavg", sampling=Backwards()), rounds=1)
    assert next(iter(run.trainer.rounds))["clients"] == [0, 1, 3, 5]


def test_a_sampler_without_a_name_is_named_by_its_class():
    @dataclass(frozen=True)
    class Nameless(Wrong):
        name = ""

    with pytest.raises(InputError, match="^sampler 'Nameless' chose"):
        small_run(method=build("fedavg", sampling=Nameless((0, 0, 1, 2))))


def test_a_sampler_may_have_options_without_a_hash():
    @dataclass(frozen=True)
    class Preferring(Sampler):
        weights: dict[int, float] = field(default_factory=lambda: {0: 1.0})

        def select(self, state, candidates, count):
            return sorted(self.weights)

    run = small_run(method=build("fedavg", sampling=Preferring()), cohort=1, rounds=1)
    assert next(iter(run.trainer.rounds))["clients"] == [0]


def test_candidates_know_their_groups():
    groups = []

    @dataclass(frozen=True)
    class OneGroup(Sampler):
        def select(self, state, candidates, count):
            groups.append(candidates.groups)
            return candidates.ids[candidates.groups == 2][:count]

    data = federation()
    small_run(method=build("fedavg", sampling=OneGroup()), cohort=2, rounds=1)
    assert groups[0].tolist() == data.groups[data.seen].tolist()


# ---- cohorts chosen ahead ------------------------------------------------------------------------


CHOSEN_AHEAD = {
    "uniform": {"name": "fedavg", "sampling": "uniform"},
    "size": {"name": "fedavg", "sampling": "size"},
    "wrapped": {"name": "client2vec", "host": "fedavg", "uses": ["aggregation", "training"]},
}


@pytest.mark.parametrize("method", CHOSEN_AHEAD)
@pytest.mark.parametrize("cohort", [4, 1.0])
def test_a_cohort_that_is_chosen_ahead_is_the_same(monkeypatch, method, cohort):
    draws = []
    original = planning.draw_batches

    def counted(*args, **how):
        draws.append(args)
        return original(*args, **how)

    monkeypatch.setattr(planning, "draw_batches", counted)
    how = {"method": CHOSEN_AHEAD[method], "cohort": cohort, "rounds": 3}
    ahead = small_run(**how)
    with_ahead = len(draws)
    monkeypatch.setattr(Participants, "look_ahead", lambda participants, state: None)
    plain = small_run(**how)
    assert list(ahead.trainer.rounds) == list(plain.trainer.rounds)
    wanted = plain.trainer.state.model
    assert all(torch.equal(t, wanted[name]) for name, t in ahead.trainer.state.model.items())
    # What is drawn ahead is used, and not drawn again.
    assert with_ahead == len(draws) - with_ahead > 0


def test_a_sampler_made_from_one_without_state_may_read_it():
    seen = []

    @dataclass(frozen=True)
    class Watching(UniformSampler):
        def select(self, state, candidates, count):
            seen.append((state.round, candidates.key))
            return super().select(state, candidates, count)

    small_run(method=build("fedavg", sampling=Watching()), rounds=3)
    assert seen == [(round_, fold(3, round_, Purpose.SAMPLE)) for round_ in range(3)]


def test_a_cohort_that_the_index_chooses_is_not_chosen_ahead():
    @dataclass(frozen=True)
    class Own(UniformSampler):
        pass

    for host, use, wanted in (
        (build("fedavg"), "training", True),
        (build("fedavg"), "sampling", False),
        (build("fedavg", sampling=Own()), "training", False),
    ):
        assert build("client2vec", host=host, uses=[use]).sampler.looks_ahead == wanted
