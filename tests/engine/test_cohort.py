"""Cohorts: what server and clients exchange, which questions are allowed, and what is reported."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise import train
from equipoise.data import load
from equipoise.engine.arithmetic import exact_arithmetic
from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.method import LocalRule, Phase
from equipoise.methods import build
from equipoise.methods.fedavg import FedAvg
from equipoise.models import build as build_model
from equipoise.models.base import Model
from equipoise.optimizers import Sgd
from tests.engine.federations import images
from tests.rounds import play

SIZES = [4, 9, 6, 1]


def federation():
    return images(sizes=SIZES)


def with_validation():
    """Three clients; the last holds no validation sample."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(25, 2, 5, 5, generator=draws, dtype=torch.float64)
    y = torch.arange(25) % 4
    return Federation.from_arrays(
        x, y, clients=[0] * 10 + [1] * 14 + [2], splits=(0.6, 0.4, 0.0), classes=4
    )


def small():
    """50 inputs, 6 features with BatchNorm, 4 outputs."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Flatten(), nn.Linear(50, 6), nn.BatchNorm1d(6), nn.Tanh())
    return Model(features, nn.Linear(6, 4)).double()


# 50·6 + 6 of the first layer, 6 + 6 of BatchNorm, 6·4 + 4 of the head; 6 + 6 running statistics.
PARAMETERS, BUFFERS, NUMBER, REPORTS = 50 * 6 + 6 + 12 + 6 * 4 + 4, 12, 8, 2 * 8


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_fedavg_moves_one_model_each_way_and_two_reports(precision):
    number = {"float64": 8, "float32": 4}[precision]
    played = play(build("fedavg"), federation(), small(), [[0, 1, 2], [1, 3]], precision=precision)
    for cohort in played.cohorts:
        clients = len(cohort.ids)
        assert cohort.bytes_down == clients * (PARAMETERS + BUFFERS) * number
        assert cohort.bytes_up == clients * ((PARAMETERS + BUFFERS) * number + REPORTS)


def test_local_receives_nothing_and_sends_reports_only():
    """Clients build the initial model themselves."""
    played = play(build("local"), federation(), small(), [[0, 1], [1, 2], [0, 1, 2]])
    assert [cohort.bytes_down for cohort in played.cohorts] == [0, 0, 0]
    assert [cohort.bytes_up for cohort in played.cohorts] == [2 * REPORTS, 2 * REPORTS, 3 * REPORTS]


def test_scaffold_moves_twice_as_much():
    """Model and control variate down, update and change of the control variate up."""
    module = Model(nn.Flatten(), nn.Linear(50, 4)).double()
    played = play(build("scaffold"), federation(), module, [[0, 1, 2]] * 2)
    for cohort in played.cohorts:
        assert cohort.bytes_down == 3 * 2 * 204 * NUMBER
        # The correction of the loss is also reported.
        assert cohort.bytes_up == 3 * (2 * 204 * NUMBER + REPORTS + 8)


def test_a_kept_head_never_travels():
    @dataclass(frozen=True)
    class KeepsHead(LocalRule):
        keeps = "head"

    played = play(build("fedavg", local=KeepsHead()), federation(), small(), [[0, 1], [1, 2]])
    head = (6 * 4 + 4) * NUMBER
    rest = (PARAMETERS + BUFFERS) * NUMBER - head
    assert [cohort.bytes_down for cohort in played.cohorts] == [2 * rest, 2 * rest]
    assert [cohort.bytes_up for cohort in played.cohorts] == [2 * (rest + REPORTS)] * 2


def test_what_each_client_gets_and_what_evaluations_cost_is_counted():
    @dataclass(frozen=True)
    class Curious(FedAvg):
        def send(self, state, cohort):
            return {"model": state.model}, {
                "step_factor": torch.ones(len(cohort.ids), dtype=torch.float64)
            }

        def combine(self, state, updates, cohort):
            cohort.evaluate(state.model, "train")
            return super().combine(state, updates, cohort)

    (cohort,) = play(
        build("fedavg", aggregation=Curious()), federation(), small(), [[0, 1, 2]]
    ).cohorts
    model = (PARAMETERS + BUFFERS) * NUMBER
    assert cohort.bytes_down == 3 * model + 3 * 8 + 3 * model
    assert cohort.bytes_up == 3 * (model + REPORTS) + 3 * 2 * 8, (
        "loss and accuracy of three clients come back"
    )


# ---- prior ---------------------------------------------------------------------------------------


def engine(module=None, data=None, **machine):
    machine = Machine(**{"device": "cpu", "precision": "float64", "chunk": 2, **machine})
    return StackedEngine(
        data or federation(), module or small(), Training(batch_size=4), machine, seed=3
    )


def test_the_prior_is_the_share_of_training_samples_or_uniform():
    by_size = engine().cohort(build("fedavg"), np.array([2, 0]), 0)
    assert by_size.ids.tolist() == [0, 2]
    assert by_size.prior.tolist() == [0.4, 0.6]
    assert by_size.prior.dtype == torch.float64
    uniform = engine().cohort(build("fedavg", weights="uniform"), np.array([0, 1, 2, 3]), 0)
    assert uniform.prior.tolist() == [0.25] * 4


def test_the_order_in_which_clients_are_named_does_not_matter():
    there, back = (
        play(build("fedavg"), federation(), small(), [ids]).model for ids in ([0, 1, 3], [3, 1, 0])
    )
    assert all(torch.equal(there[name], back[name]) for name in there)


def test_a_cohort_trains_once():
    method = build("fedavg")
    cohort = engine().cohort(method, np.array([0, 1]), 0)
    model = cohort.engine.network.initial()
    cohort.train({"model": model}, {}, method.local)
    with pytest.raises(
        InputError, match="this cohort has already trained.*valid: one train\\(\\) per round"
    ):
        cohort.train({"model": model}, {}, method.local)


def test_the_key_of_the_server_depends_on_round_and_seed_alone():
    def key(round_, seed, ids=(0, 1)):
        machine = Machine(device="cpu", precision="float64", chunk=2)
        made = StackedEngine(federation(), small(), Training(batch_size=4), machine, seed=seed)
        return made.cohort(build("fedavg"), np.array(ids), round_).key

    keys = [key(round_, seed) for round_ in range(3) for seed in range(3)]
    assert len(set(keys)) == 9
    assert key(1, 2) == key(1, 2, ids=(2, 3)) == keys[5]


# ---- questions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers(LocalRule):
    """A rule with its own questions to clients."""

    scale: float = 2.0
    keeps = "personal.head"

    def phases(self):
        return (
            Phase(),
            Phase(move="personal.head", loss=lambda client: client.personal().task_loss()),
        )

    def scaled_loss(self, client, shift):
        """Sum of losses, each scaled and shifted."""
        return {"loss": client.sum(client.task_loss() * self.scale + shift)}

    def samples(self, client):
        return client.mask.sum()

    def own_bias(self, client):
        """The kept bias and whether the client has been seen, once for every sample."""
        samples = client.mask.sum()
        return client.params["personal.head.bias"] * samples, client.seen * samples

    def loss_without_a_model(self, client):
        return client.sum(client.task_loss())


def loss_by_hand(module, data, samples):
    module.eval()
    samples = torch.from_numpy(samples)
    with torch.no_grad():
        return F.cross_entropy(module(data.x[samples]), data.y[samples]).item()


@pytest.mark.parametrize("chunk", [1, 2, 10])
def test_a_question_is_answered_by_every_client_on_its_whole_training_split(chunk):
    data = federation()
    asking = engine(chunk=chunk)
    cohort = asking.cohort(build("fedavg", local=Answers()), np.array([1, 3, 2]), 0)
    assert cohort.ask("samples").tolist() == [9, 6, 1]
    answer = cohort.ask("scaled_loss", torch.tensor(0.5).double(), model=asking.network.initial())
    wanted = [
        len(held) * (2 * loss_by_hand(small(), data, held) + 0.5)
        for held in map(data.train.of, (1, 2, 3))
    ]
    assert answer["loss"].tolist() == pytest.approx(wanted, abs=1e-12)
    model = (PARAMETERS + BUFFERS) * NUMBER
    assert cohort.bytes_down == 3 * (model + 8)
    assert cohort.bytes_up == 3 * 8 + 3 * 8


def test_a_question_sees_what_the_client_keeps_and_changes_nothing():
    rule = Answers()
    played = play(build("fedavg", local=rule), federation(), small(), [[0, 1]], batch_size=4)
    before = {name: stack.clone() for name, stack in played.engine.memory.export().items()}
    cohort = played.engine.cohort(build("fedavg", local=rule), np.array([0, 1, 2]), 1)
    bias, seen = cohort.ask("own_bias")
    samples = torch.from_numpy(cohort.sizes)
    bias = bias / samples.unsqueeze(1)
    assert seen.tolist() == [samples[0], samples[1], 0]
    torch.testing.assert_close(bias[2], small().head.bias.detach(), rtol=1e-14, atol=0)
    torch.testing.assert_close(bias[:2], before["kept/personal.head.bias"], rtol=1e-14, atol=0)
    played.engine.memory.commit()
    after = played.engine.memory.export()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    "question",
    ["scaled_los", "phases", "finish", "first_memory", "keeps", "scale", "__init__", "name"],
)
def test_only_questions_of_the_rule_itself_may_be_asked(question):
    cohort = engine().cohort(build("fedavg", local=Answers()), np.array([0, 1]), 0)
    with pytest.raises(
        InputError, match=f"unknown question '{question}' in the local rule Answers.*scaled_loss"
    ):
        cohort.ask(question)


# ---- reports -------------------------------------------------------------------------------------


REPORTED = {
    "loss_before": "train",
    "loss_after": "train",
    "val_loss_before": "val",
    "val_loss_after": "val",
}


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("how", ["needed", "wanted"])
def test_reports_equal_an_independent_loop(how, chunk):
    @dataclass(frozen=True)
    class Needs(FedAvg):
        needs = tuple(REPORTED)

    data = with_validation()
    method = build("fedavg", aggregation=Needs()) if how == "needed" else build("fedavg")
    reports = REPORTED if how == "wanted" else ()
    played = play(
        method,
        data,
        small(),
        [[0, 1, 2]],
        chunk=chunk,
        reports=reports,
        batch_size=3,
        optimizer=Sgd(lr=0.2),
    )
    (updates,) = played.updates
    assert set(updates.reports) == {*REPORTED, "train_loss", "steps"}
    for name, split in REPORTED.items():
        for client in range(3):
            module = small()
            if name.endswith("after"):
                own = {
                    n: stack[client] for n, stack in {**updates.params, **updates.buffers}.items()
                }
                module.load_state_dict(own, strict=False)
            held = data.split(split).of(client)
            found = updates.reports[name][client].item()
            if len(held):
                assert found == pytest.approx(loss_by_hand(module, data, held), abs=1e-12)
            else:
                assert np.isnan(found)
    assert (updates.reports["loss_after"] != updates.reports["loss_before"]).all()


@pytest.mark.parametrize("chunk", [1, 3])
def test_reports_may_look_at_some_samples_drawn_anew_each_round(chunk):
    data, limit, module = with_validation(), 3, Model(nn.Flatten(), nn.Linear(50, 4)).double()
    how = {"chunk": chunk, "reports": ["loss_before"], "optimizer": Sgd(lr=0.0)}
    played = play(build("fedavg"), data, module, [[0, 1, 2]] * 2, report_samples=limit, **how)
    for client in range(3):
        held = data.train.of(client)
        # All subsets of this size of the client's samples; with a learning rate of zero the model
        # does not change.
        ways = [
            loss_by_hand(module, data, np.array(some))
            for some in combinations(held, min(limit, len(held)))
        ]
        found = [updates.reports["loss_before"][client].item() for updates in played.updates]
        assert all(min(abs(way - loss) for way in ways) <= 1e-12 for loss in found)
        assert len(held) <= limit or found[0] != found[1]
    everything = (
        play(build("fedavg"), data, module, [[0, 1, 2]], report_samples=10**6, **how)
        .updates[0]
        .reports
    )
    whole = play(build("fedavg"), data, module, [[0, 1, 2]], **how).updates[0].reports
    assert everything["loss_before"].tolist() == pytest.approx(
        whole["loss_before"].tolist(), abs=1e-12
    )


def test_only_the_reports_somebody_needs_are_made():
    played = play(build("fedavg"), with_validation(), small(), [[0, 1]], reports=["val_loss_after"])
    assert set(played.updates[0].reports) == {"train_loss", "steps", "val_loss_after"}


def test_the_training_loss_is_the_mean_over_the_samples_as_they_were_seen():
    """With a learning rate of zero, all samples are evaluated with the model that was sent."""
    data, module = federation(), Model(nn.Flatten(), nn.Linear(50, 4)).double()
    played = play(
        build("fedavg"),
        data,
        module,
        [range(4)],
        chunk=3,
        epochs=2,
        batch_size=4,
        optimizer=Sgd(lr=0.0),
    )
    reports = played.updates[0].reports
    wanted = [loss_by_hand(module, data, data.train.of(k)) for k in range(4)]
    assert reports["train_loss"].tolist() == pytest.approx(wanted, abs=1e-12)
    assert reports["steps"].tolist() == [2, 6, 4, 2]


def test_evaluate_answers_for_the_cohort_only():
    data = with_validation()
    asking = engine(data=data)
    cohort = asking.cohort(build("fedavg"), np.array([0, 2]), 0)
    answer = cohort.evaluate(asking.network.initial(), "val")
    assert answer["loss"][0].item() == pytest.approx(
        loss_by_hand(small(), data, data.val.of(0)), abs=1e-12
    )
    assert answer["loss"].isnan().tolist() == [False, True]


@dataclass(frozen=True)
class Looks(FedAvg):
    """Average the models, and note what each client's loss of the average is."""

    def combine(self, state, updates, cohort):
        new = super().combine(state, updates, cohort)
        return new.with_notes(val_loss=cohort.evaluate(new.model, "val")["loss"])


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("rule", ["fedper", "fedbn", "ditto"])
def test_averages_are_evaluated_with_the_parts_that_clients_keep(rule, chunk):
    """After the round these are the personal models; Ditto keeps second copies only."""
    run = train(
        images(sizes=[9, 14, 6, 11, 8], splits=(0.5, 0.5, 0.0)),
        method=build(rule, aggregation=Looks()),
        model=small(),
        training=Training(rounds=3, cohort=3, batch_size=4, optimizer=Sgd(lr=0.1)),
        machine=Machine(device="cpu", precision="float64", chunk=chunk),
    )
    which = "global" if rule == "ditto" else "personal"
    found = {
        (row["round"], client): loss
        for row in run.trainer.rounds
        for client, loss in zip(row["clients"], row["notes"]["val_loss"], strict=True)
    }
    wanted = {
        (row["round"], row["client"]): row["loss"]
        for row in run.trainer.metrics
        if row["model"] == which and row["split"] == "val"
    }
    assert len(found) == 9
    assert found == pytest.approx({key: wanted[key] for key in found}, abs=1e-12)


# ---- the engine around it ------------------------------------------------------------------------


def test_a_round_that_is_repeated_starts_from_the_same_memory():
    method = build("local")
    playing = engine()
    ids = np.array([0, 1])

    def once():
        playing.cohort(method, ids, 0).train({"model": playing.network.initial()}, {}, method.local)

    once()
    once()
    playing.memory.commit()
    twice = playing.memory.export()
    fresh = engine()
    fresh.cohort(method, ids, 0).train({"model": fresh.network.initial()}, {}, method.local)
    fresh.memory.commit()
    for name, tensor in fresh.memory.export().items():
        assert torch.equal(tensor, twice[name])


def test_a_part_that_moves_but_is_not_kept_is_refused():
    @dataclass(frozen=True)
    class Stray(LocalRule):
        keeps = "personal.head"

        def phases(self):
            return (Phase(move="personal.features"),)

    with pytest.raises(InputError, match=r"personal\.features"):
        play(build("fedavg", local=Stray()), federation(), small(), [[0]])


def test_exact_arithmetic_is_asked_for_and_given_back():
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
    with exact_arithmetic(Machine(device="cpu")):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32) == before


def test_a_cohort_knows_sizes_and_groups_of_its_clients_in_the_order_of_ids():
    digits = load("digits", unseen=[1])
    engine = StackedEngine(
        digits,
        build_model("logistic", shape=digits.shape, classes=10),
        Training(),
        Machine(device="cpu"),
    )
    cohort = engine.cohort(build("fedavg"), np.array([21, 4, 0]), 0)
    assert cohort.ids.tolist() == [0, 4, 21]
    assert cohort.sizes.tolist() == [len(digits.train.of(k)) for k in (0, 4, 21)]
    names = [digits.group_names[group] for group in cohort.groups]
    assert names == ["plain", "plain", "textured"]
