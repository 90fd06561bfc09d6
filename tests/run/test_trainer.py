"""The round loop: what it measures, when it stops, the selected round, and its settings."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from equipoise import Evaluation, Federation, Machine, Training, train
from equipoise.data import load as load_data
from equipoise.data.augment import Crop, Flip
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, RunError
from equipoise.federation import Split
from equipoise.method import LocalRule
from equipoise.methods import build as build_method
from equipoise.methods.fedavg import FedAvg
from equipoise.models import build
from equipoise.models.base import Model
from equipoise.optimizers import Schedule, Sgd, optimizer_named
from equipoise.random import fold
from equipoise.run.files import load_tensors
from tests.engine.plain_loop import train_client
from tests.run.small import (
    MODEL,
    TRAINING,
    Stop,
    federation,
    measure,
    rows_of,
    small_run,
    stop_after,
)

EXACT = Machine(precision="float64")
NO_DROPOUT = {"name": "mlp", "hidden": [12]}


def double(data):
    """Return a federation of the same data in float64."""
    return Federation(
        **{name: getattr(data, name) for name in data.__dataclass_fields__ if name != "x"},
        x=data.x.double(),
    )


def final_rows(run, **wanted):
    rows = [row for row in run.trainer.metrics if row["round"] == run.summary["rounds"]]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def distance(found, wanted):
    return max(
        float((found[n].double() - wanted[n].double()).norm() / wanted[n].double().norm())
        for n in wanted
    )


# ---- rows ----------------------------------------------------------------------------------------


def test_rows_that_wait_for_a_busy_device_are_written_in_any_case(tmp_path, monkeypatch):
    """Also if no device is ever busy, and if the run is broken off."""
    small_run(tmp_path / "whole")
    monkeypatch.setattr(StackedEngine, "while_busy", lambda engine, work: None)
    small_run(tmp_path / "waiting")
    with pytest.raises(Stop):
        small_run(tmp_path / "broken off", on_round=stop_after(3))
    whole, waiting, broken_off = (
        (tmp_path / name / "metrics.jsonl").read_text()
        for name in ("whole", "waiting", "broken off")
    )
    assert waiting == whole
    assert json.loads(broken_off.splitlines()[-1])["round"] == 3
    assert whole.startswith(broken_off)


@pytest.mark.parametrize(
    ("method", "models"),
    [
        ("fedavg", {"global"}),
        ("local", {"personal"}),
        ("central", {"global"}),
        ("scaffold", {"global"}),
    ],
)
def test_every_evaluated_client_has_one_row_a_round_a_model_and_a_split(method, models):
    run = small_run(None, method, evaluation=Evaluation(every=3))
    data, rows = federation(), list(run.trainer.metrics)
    # Rounds 3 and 6, and the last one, 7. With ``local`` an unseen client also trains its own
    # model.
    wanted = [
        (number, model, split, client)
        for number in (3, 6, 7)
        for model in sorted(models)
        for split in ("val", "test")
        for client in range(data.clients)
    ]
    assert [(row["round"], row["model"], row["split"], row["client"]) for row in rows] == wanted
    for row in rows:
        assert row["n"] == len(data.split(row["split"]).of(row["client"]))
        assert row["group"] == "abc"[row["client"] % 3]
        assert row["unseen"] == (row["client"] == 7)
    assert set(run.summary["results"]) == models
    for model in models:
        assert set(run.summary["results"][model]) == {"seen", "unseen"}


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_values_equal_a_loop_over_clients_and_samples(rounds):
    data = double(federation())
    run = small_run(None, federation=data, machine=EXACT, rounds=rounds)
    module = run.model()
    rows = final_rows(run)
    assert len(rows) == 2 * data.clients
    for row in rows:
        loss, accuracy = measure(module, data, row["split"], row["client"])
        assert row["loss"] == pytest.approx(loss, rel=1e-12)
        assert row["accuracy"] == pytest.approx(accuracy, rel=1e-12)


def test_the_gap_is_global_minus_local_validation_loss():
    data = double(federation())
    how = {"federation": data, "machine": EXACT, "model": NO_DROPOUT, "seed": 3}
    before, after = small_run(None, **how, rounds=2), small_run(None, **how, rounds=3)
    rows = final_rows(after, split="val")
    with_gap = [row for row in rows if "gap" in row]
    # Only clients that have just trained have a local model to compare with, on validation data.
    assert len(with_gap) == TRAINING.cohort
    assert not any("gap" in row for row in final_rows(after, split="test"))
    for row in with_gap:
        client = row["client"]
        samples = torch.from_numpy(data.train.of(client))
        local = train_client(
            before.model(),
            data.x[samples],
            data.y[samples],
            client_key=fold(fold(3, 2), client),
            make_optimizer=lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.5),
            batch_size=8,
            epochs=2,
        )
        gap = (
            measure(after.model(), data, "val", client)[0]
            - measure(local.eval(), data, "val", client)[0]
        )
        assert row["gap"] == pytest.approx(gap, rel=1e-9, abs=1e-12)
    gaps = np.array([row["gap"] for row in with_gap])
    assert after.summary["results"]["global"]["seen"]["gap_variance"] == pytest.approx(
        np.mean((gaps - gaps.mean()) ** 2)
    )


@pytest.mark.parametrize("method", ["local", "central"])
def test_methods_without_a_local_and_a_global_model_have_no_gap(method):
    assert not any("gap" in row for row in small_run(None, method, rounds=2).trainer.metrics)


def with_holes():
    """Four clients: client 1 has no test samples, client 2 no validation samples, 3 is unseen."""
    data = federation()
    pieces = {
        name: [data.split(name).of(client) for client in (1, 3, 4, 6)]
        for name in ("train", "val", "test")
    }
    pieces["test"][1] = pieces["val"][2] = np.empty(0, np.int64)
    splits = {name: Split.from_lists(lists) for name, lists in pieces.items()}
    unseen = np.array([False, False, False, True])
    return Federation(
        data.x,
        data.y,
        **splits,
        groups=np.array([0, 0, 1, 1]),
        group_names=("a", "b"),
        unseen=unseen,
    )


def test_the_client_served_worst_is_named(tmp_path):
    """Two clients agree on the classes of both halves; the third has them exchanged."""
    x, y = np.tile([[-1.0], [1.0]], (30, 1)), np.tile([0, 1], 30)
    y[40:] = 1 - y[40:]
    data = Federation.from_arrays(x, y, clients=np.repeat(["north", "south", "west"], 20))
    run = train(data, model="logistic", rounds=5, out=tmp_path / "run")
    seen = run.summary["results"]["global"]["seen"]
    assert (seen["worst_client"], seen["worst_client_name"]) == (0.0, "west")
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["results"]["global"]["seen"]
        == seen
    )


@pytest.mark.parametrize(("method", "model"), [("fedavg", "global"), ("local", "personal")])
def test_clients_without_samples_in_a_split_are_left_out_of_it(method, model):
    run = small_run(None, method, federation=with_holes(), cohort=3)
    assert [row["client"] for row in final_rows(run, split="test")] == [0, 2, 3]
    assert [row["client"] for row in final_rows(run, split="val")] == [0, 1, 3]
    if model == "global":
        assert ["gap" in row for row in final_rows(run, split="val")] == [True, True, False]
    scores = [row["accuracy"] for row in final_rows(run, split="test", unseen=False)]
    seen = run.summary["results"][model]["seen"]
    assert (seen["clients"], seen["mean"], seen["left_out"]) == (
        2,
        pytest.approx(sum(scores) / 2),
        1,
    )
    assert len(seen["groups"]) == len({run.trainer.federation.groups[k] for k in range(3)})
    apart = run.summary["results"][model]["unseen"]
    assert (apart["clients"], apart["worst_client_id"]) == (1, 3)
    assert apart["mean"] == final_rows(run, split="test", unseen=True)[0]["accuracy"]


def test_a_federation_without_test_samples_trains_and_reports_on_validation_data():
    data = federation()
    nothing = Split.from_lists([[] for _ in range(data.clients)])
    bare = Federation(
        **{**{name: getattr(data, name) for name in data.__dataclass_fields__}, "test": nothing}
    )
    seen = []
    run = small_run(None, federation=bare, rounds=2, on_round=seen.append)
    assert {row["split"] for row in run.trainer.metrics} == {"val"}
    assert run.summary["results"] == {}
    last = [
        row["accuracy"] for row in run.trainer.metrics if row["round"] == 2 and not row["unseen"]
    ]
    assert (
        seen[-1].mean
        == run.summary["validation"]["global"]["seen"]["mean"]
        == pytest.approx(np.mean(last))
    )


def test_evaluation_can_be_left_out_altogether(tmp_path):
    run = small_run(tmp_path / "run", evaluation=Evaluation(every=0))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert run.summary["results"] == {}
    assert len(rows_of(tmp_path / "run", "rounds")) == TRAINING.rounds
    evaluated = small_run()
    assert all(
        torch.equal(t, evaluated.model().state_dict()[n])
        for n, t in run.model().state_dict().items()
    )


def test_rounds_tell_who_took_part_and_what_was_moved(tmp_path):
    run = small_run(tmp_path / "run", evaluation=Evaluation(every=0))
    rows = rows_of(tmp_path / "run", "rounds")
    parameters = 5 * 12 + 12 + 12 * 3 + 3
    for number, row in enumerate(rows, 1):
        assert (row["round"], row["cohort"]) == (number, 4)
        assert row["bytes_down"] == 4 * 4 * parameters
        # Up: the parameters, and two numbers of eight bytes: the training loss and the number of
        # steps.
        assert row["bytes_up"] == 4 * (4 * parameters + 16)
    assert run.summary["bytes_up"] == sum(row["bytes_up"] for row in rows)
    assert run.summary["bytes_down"] == sum(row["bytes_down"] for row in rows)
    assert [row["round"] for row in rows_of(tmp_path / "run", "timings")] == list(range(1, 8))


def test_progress_shows_the_latest_evaluation():
    seen = []
    run = small_run(None, evaluation=Evaluation(every=3), on_round=seen.append)
    assert [progress.round for progress in seen] == list(range(1, 8))
    assert {progress.rounds for progress in seen} == {7}
    assert [progress.mean is None for progress in seen] == [
        True,
        True,
        False,
        False,
        False,
        False,
        False,
    ]
    scores = {
        number: np.array(
            [
                r["accuracy"]
                for r in run.trainer.metrics
                if (r["round"], r["split"], r["unseen"]) == (number, "test", False)
            ]
        )
        for number in (3, 6, 7)
    }
    for progress, number in zip(seen[2:], (3, 3, 3, 6, 7), strict=True):
        assert progress.mean == pytest.approx(scores[number].mean())
        assert progress.worst == scores[number].min()
        assert progress.sigma == pytest.approx(scores[number].std())
    assert [progress.train_loss for progress in seen] == [
        row["train_loss"] for row in run.trainer.rounds
    ]


def test_an_evaluation_that_is_not_finite_ends_the_run(tmp_path):
    data = federation()
    # Samples that are not used in training and overflow float32 when they are multiplied by a
    # weight above one.
    x = data.x.clone()
    victim = 6
    x[torch.from_numpy(data.test.of(victim))] = 3e38
    spoiled = Federation(
        **{**{name: getattr(data, name) for name in data.__dataclass_fields__}, "x": x}
    )
    with pytest.raises(
        RunError,
        match=r"round 1: the test loss of the global model of client 6 \(6\) is not finite",
    ):
        small_run(tmp_path / "run", federation=spoiled, model="logistic", optimizer=Sgd(lr=50.0))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


class Masked(nn.Module):
    """Attends to five of its seven features; a mask of minus infinity hides the others."""

    def __init__(self, *, buffer):
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(5, 7)
        self.hidden = torch.tensor([False, True, False, False, True, False, False])
        if buffer:
            self.register_buffer("mask", torch.where(self.hidden, -torch.inf, 0.0))

    def forward(self, x):
        z = self.linear(x)
        return torch.softmax(
            z + self.mask if hasattr(self, "mask") else z.masked_fill(self.hidden, -torch.inf), 1
        )


# FedMGDA+ and AFL leave clients out of the mean, SCAFFOLD uses differences of all tensors, and AFL
# a mean over rounds.
@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        {"name": "fedmgda", "epsilon": 1.0},
        {"name": "afl", "ascent": 5.0},
        "scaffold",
        "ditto",
        "qffl",
    ],
)
def test_a_mask_of_minus_infinity_is_no_failure_and_stays_what_it_is(method):
    how = {"method": method, "machine": EXACT, "rounds": 4, "cohort": 8}
    with_mask, without = (
        small_run(None, model=Model(Masked(buffer=buffer), nn.Linear(7, 3)), **how)
        for buffer in (True, False)
    )
    found, wanted = with_mask.trainer.global_model, without.trainer.global_model
    assert found["features.mask"].tolist() == [0, -math.inf, 0, 0, -math.inf, 0, 0]
    assert set(found) == {*wanted, "features.mask"}
    assert distance(found, wanted) <= 1e-9


class Scaled(nn.Module):
    """Multiplies scores that differ by thousands by one learned number."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, z):
        return z[:, :3] * self.temperature * torch.tensor([1e3, -1e3, 5e3])


def test_a_model_with_a_mask_that_becomes_non_finite_still_ends_the_run():
    """The only step of the round moves the temperature out of the range of float32."""
    model = Model(Masked(buffer=True), Scaled())
    with pytest.raises(
        RunError,
        match=r"round 1: the model of client \d \(\d\) is not finite; a smaller learning rate",
    ):
        small_run(None, model=model, optimizer=Sgd(lr=3e38), steps=1)


# ---- which round counts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "every", "patience"),
    [("fedavg", 1, 3), ("fedavg", 2, 2), ("local", 1, 2), ("fedavg", 1, None)],
)
def test_the_round_that_counts_has_the_lowest_mean_validation_loss(
    method, every, patience, tmp_path
):
    evaluation = Evaluation(every=every, select="best", patience=patience)
    rounds = 20 if patience else 12
    run = small_run(tmp_path / "run", method, evaluation=evaluation, rounds=rounds)
    losses = {}
    for row in rows_of(tmp_path / "run"):
        if row["split"] == "val" and not row["unseen"]:
            losses.setdefault(row["round"], []).append(row["loss"])
    means = {number: sum(values) / len(values) for number, values in losses.items()}
    best = min(means, key=means.get)
    assert run.summary["round"] == best < run.summary["rounds"]
    assert run.summary["select"] == "best"
    if patience:
        # Patience counts evaluations: this many in a row did not improve on the best one before
        # them.
        assert run.summary["rounds"] == best + patience * every < rounds
        numbers = list(means)
        for position in range(patience, len(numbers) - 1):
            recent = [means[number] for number in numbers[position - patience + 1 : position + 1]]
            assert min(recent) < min(means[number] for number in numbers[: position - patience + 1])
    else:
        assert run.summary["rounds"] == rounds

    # The kept model is that of this round: training that many rounds gives the same tensors.
    until = small_run(tmp_path / "until", method, rounds=best)
    for name in ("model", "personal") if method == "local" else ("model",):
        kept, note = load_tensors(tmp_path / "run" / f"{name}.safetensors")
        wanted, _ = load_tensors(tmp_path / "until" / f"{name}.safetensors")
        assert note["round"] == best
        assert set(kept) == set(wanted)
        assert all(torch.equal(kept[leaf], wanted[leaf]) for leaf in wanted)
    assert run.summary["results"] == until.summary["results"]
    in_memory = small_run(None, method, evaluation=evaluation, rounds=rounds)
    assert in_memory.summary == run.summary
    client = 0 if method == "local" else None
    given = in_memory.model(client).state_dict()
    assert all(
        torch.equal(tensor, given[name]) for name, tensor in run.model(client).state_dict().items()
    )


def test_the_last_round_counts_unless_asked_otherwise(tmp_path):
    run = small_run(tmp_path / "run", evaluation=Evaluation(patience=3), rounds=20)
    assert run.summary["round"] == run.summary["rounds"] < 20
    last = load_tensors(tmp_path / "run" / "checkpoint.safetensors")[0]
    kept = load_tensors(tmp_path / "run" / "model.safetensors")[0]
    assert all(torch.equal(tensor, last[f"model/{name}"]) for name, tensor in kept.items())
    assert not (tmp_path / "run" / "best.safetensors").exists()


# ---- settings take effect ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [
        (Schedule(kind="exponential", decay=0.5), 0.5),
        (Schedule(kind="steps", at=(1,), factors=(0.25,)), 0.25),
        (Schedule(kind="cosine"), (1 + math.cos(math.pi / 4)) / 2),
        (Schedule(kind="cosine", floor=0.2), 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2),
    ],
)
def test_the_schedule_scales_the_second_update_by_its_factor(schedule, factor, tmp_path):
    # One step of plain SGD per round: the second update is the gradient at the same point times the
    # learning rate.
    plain = Training(rounds=4, cohort=3, steps=1, optimizer=Sgd(lr=0.1))
    how = {"model": NO_DROPOUT, "machine": EXACT, "federation": double(federation())}

    def model_after(number, **options):
        out = tmp_path / f"{len(options)}-{number}"
        with pytest.raises(Stop):
            small_run(out, training=plain, **how, **options, on_round=stop_after(number))
        tensors = load_tensors(out / "checkpoint.safetensors")[0]
        return {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}

    first, constant = model_after(1), model_after(2)
    same_first, scheduled = (model_after(number, schedule=schedule) for number in (1, 2))
    for name in first:
        assert torch.equal(same_first[name], first[name])
        moved = constant[name] - first[name]
        torch.testing.assert_close(
            scheduled[name] - first[name], factor * moved, rtol=1e-9, atol=1e-15
        )
        assert moved.norm() > 0


@pytest.mark.parametrize(
    "model", [{"name": "mlp"}, {"name": "cnn2", "channels": [4, 8], "hidden": 16}]
)
def test_bfloat16_stays_near_float32(model):
    data = load_data("digits")
    how = {"model": model, "rounds": 2, "cohort": 8, "batch_size": 10, "optimizer": Sgd(lr=0.05)}
    start = build(**model, shape=data.shape, classes=10, seed=0).state_dict()
    ends = {}
    for precision in ("float32", "bfloat16"):
        run = train(data, **how, machine=Machine(precision=precision), seed=0)
        ends[precision] = run.model().state_dict()
        assert all(tensor.dtype == torch.float32 for tensor in ends[precision].values())
        assert all(math.isfinite(row["loss"]) for row in run.trainer.metrics)
    moved = math.sqrt(sum(float((ends["float32"][n] - start[n]).square().sum()) for n in start))
    apart = math.sqrt(
        sum(float((ends["float32"][n] - ends["bfloat16"][n]).square().sum()) for n in start)
    )
    # Eight bits of mantissa: results differ by about a percent.
    assert 1e-5 < apart / moved < 0.05


@pytest.fixture(scope="module")
def pictures():
    """A few small images per client, in float64."""
    rng = np.random.default_rng(1)
    sizes = [9, 4, 14, 6, 11]
    x = torch.from_numpy(rng.normal(size=(sum(sizes), 1, 6, 6)))
    y = torch.from_numpy(rng.integers(0, 3, sum(sizes)))
    return Federation.from_arrays(
        x, y, clients=np.repeat(np.arange(5), sizes), splits=(0.6, 0.2, 0.2), classes=3
    )


@pytest.mark.parametrize("augment", [(Flip(),), (Crop(padding=1),), (Flip(), Crop(padding=2))])
def test_augmentation_changes_training_is_repeatable_and_does_not_depend_on_the_chunk(
    augment, pictures
):
    def end(chunk, seed=2, **options):
        machine = Machine(precision="float64", chunk=chunk)
        settings = Training(
            rounds=2, batch_size=4, optimizer=optimizer_named("sgd", lr=0.1, momentum=0.9)
        )
        run = train(pictures, model=MODEL, training=settings, machine=machine, seed=seed, **options)
        return run.model().state_dict()

    changed = end(5, augment=augment)
    assert all(
        torch.equal(tensor, changed[name]) for name, tensor in end(5, augment=augment).items()
    )
    assert distance(end(5), changed) > 1e-4
    for chunk in (1, 2):
        assert distance(end(chunk, augment=augment), changed) <= 1e-9


def test_flipping_pictures_that_are_their_own_mirror_image_changes_nothing(pictures):
    even = (pictures.x + pictures.x.flip(-1)) / 2
    mirrored = Federation(
        **{**{n: getattr(pictures, n) for n in pictures.__dataclass_fields__}, "x": even}
    )
    how = {"model": "mlp", "machine": EXACT, "rounds": 2, "seed": 0}
    plain, flipped = (
        train(mirrored, **how, augment=augment).model().state_dict() for augment in ((), (Flip(),))
    )
    assert all(torch.equal(plain[name], flipped[name]) for name in plain)


def test_partial_participation_draws_new_cohorts_and_touches_nobody_else(tmp_path):
    @dataclass(frozen=True)
    class KeepsHead(LocalRule):
        keeps = "head"

    small_run(tmp_path / "run", build_method("fedavg", local=KeepsHead()), rounds=2)
    data = federation()
    start = build(**MODEL, shape=data.shape, classes=3, seed=3).state_dict()
    own, note = load_tensors(tmp_path / "run" / "personal.safetensors")
    moved = [
        client
        for row, client in enumerate(note["clients"])
        if any(not torch.equal(stack[row], start[name]) for name, stack in own.items())
    ]
    assert moved == note["clients"]
    # Two cohorts of four among eight: at least four clients have trained, and the unseen one never.
    assert 4 < len(moved) <= 8
    memory = load_tensors(tmp_path / "run" / "checkpoint.safetensors")[0]
    assert sorted(memory["memory/clients"].tolist()) == moved


@dataclass(frozen=True)
class Forgetful(FedAvg):
    """Averages, but does not declare it."""

    def combine(self, state, updates, cohort):
        """Average."""
        super().combine(state, updates, cohort)


def test_an_aggregation_that_gives_no_state_back_is_named():
    with pytest.raises(
        InputError, match="aggregation 'fedavg': combine must return a State, got NoneType"
    ):
        small_run(None, build_method("fedavg", aggregation=Forgetful()))
