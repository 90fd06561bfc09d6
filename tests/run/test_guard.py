"""Guards in the round loop: attacks, dropped clients, records, and what is refused."""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
import pytest
import torch

from equipoise.config import experiment_from
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, RunError
from equipoise.exchange import Updates, _Assembled
from equipoise.method import Sees
from equipoise.methods import build, describe
from equipoise.optimizers import Sgd
from equipoise.run.checkpoint import read_local
from equipoise.run.evaluation import Evaluation
from equipoise.run.files import load_tensors
from tests.attacks import ATTACKS, LIAR, accuracy, longer, lying, trained
from tests.run.small import Stop, promised, rows_of, small_run, stop_after

HOLDING = {
    "norm": {"name": "fedavg", "guard": "norm"},
    "norm, fixed": {"name": "fedavg", "guard": {"name": "norm", "bound": 3.0}},
    "krum": {"name": "fedavg", "guard": "krum"},
    "multikrum": {"name": "fedavg", "guard": "multikrum"},
    "median": {"name": "median"},
    "trimmedmean": {"name": "trimmedmean"},
}


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, logger="equipoise")


@cache
def honest(rounds=12):
    """Federated averaging of the nine honest clients."""
    return accuracy(trained("fedavg", unseen=(LIAR,), rounds=rounds))


# ---- attacks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("method", HOLDING)
def test_one_liar_of_ten_costs_at_most_two_points(method, attack):
    assert accuracy(trained(HOLDING[method], engine=lying(ATTACKS[attack]))) >= honest() - 0.02


@pytest.mark.parametrize("method", ["norm", "multikrum"])
def test_a_slow_learning_rate_does_not_help_the_liar(method):
    """Far from convergence, a liar that is bounded but not dropped costs ten points."""
    slow = {"optimizer": Sgd(lr=0.1), "rounds": 8}
    without = accuracy(trained("fedavg", unseen=(LIAR,), **slow))
    attacked = trained(HOLDING[method], engine=lying(ATTACKS["flipped"]), **slow)
    assert accuracy(attacked) >= without - 0.02


@pytest.mark.parametrize("attack", ["x1e6", "flipped"])
def test_without_a_guard_one_liar_spoils_the_model(attack):
    assert accuracy(trained("fedavg", engine=lying(ATTACKS[attack]))) < honest() - 0.3


def test_lies_about_control_variates_do_not_pass_the_guard():
    def scaffold(guard, **options):
        return accuracy(
            trained(
                {"name": "scaffold", "guard": guard}, optimizer=Sgd(lr=0.3), rounds=8, **options
            )
        )

    lies, alone = lying(ATTACKS["x1e6"], uploads_only=True), scaffold(None, unseen=(LIAR,))
    assert scaffold("multikrum", engine=lies) >= alone - 0.02
    # A bound accepts a hostile update of ordinary length.
    assert scaffold("norm", engine=lies) >= alone - 0.1
    assert scaffold(None, engine=lies) < alone - 0.3


# ---- updates that cannot be used -----------------------------------------------------------------


def test_an_absurd_update_is_left_out_by_name_and_nobody_else_is_blamed(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="equipoise")
    trainer = trained(
        "fedavg", engine=lying(ATTACKS["1e300"]), rounds=3, every=1, directory=tmp_path
    )
    reason = "answered with a number beyond 1e+12 in features.1.weight"
    assert [row["left_out"] for row in rows_of(tmp_path, "rounds")] == [{str(LIAR): reason}] * 3
    assert [row["cohort"] for row in rows_of(tmp_path, "rounds")] == [9] * 3
    said = [f"continues without client {LIAR}: {reason}"] * 3
    advice = ["; a smaller learning rate or training.clip may help", "", ""]
    assert caplog.messages == [f"round {n + 1} {said[n]}{advice[n]}" for n in range(3)]
    assert trainer.summary()["updates_left_out"] == {
        "clients": 1,
        "worst": [
            {
                "client": LIAR,
                "name": f"client {LIAR}",
                "rounds_left_out": 3,
                "rounds_asked": 3,
                "reason": reason,
            }
        ],
    }
    tensors, note = load_tensors(tmp_path / "checkpoint.safetensors")
    assert note["round"] == 3
    assert max(float(t.abs().max()) for t in tensors.values() if t.is_floating_point()) < 100
    # Its weight is distributed to the others, as if it had not been asked.
    wanted = trained("fedavg", unseen=(LIAR,), rounds=3).state.model
    for name, tensor in trainer.state.model.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 2e12])
def test_one_such_number_is_enough(value):
    def put_one(own, received):
        return own.flatten().index_fill(0, torch.tensor([0]), value).view(own.shape)

    for uploads_only in (False, True):
        lies = lying(put_one, uploads_only=uploads_only)
        (row,) = trained("scaffold", engine=lies, rounds=1).rounds
        assert list(row["left_out"]) == [str(LIAR)]


# ---- without a guard, and with one that does nothing ---------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto"])
def test_a_bound_that_nobody_reaches_changes_no_byte(name, tmp_path):
    small_run(tmp_path / "without", method=name)
    small_run(
        tmp_path / "with",
        method={
            "name": name,
            "guard": {"name": "norm", "bound": 1e9, "multiple": 1e9, "drop": 1e9},
        },
    )
    without, guarded = promised(tmp_path / "without"), promised(tmp_path / "with")
    assert without.keys() == guarded.keys()
    for file in without:
        # The guard notes norms in rounds.jsonl.
        assert (without[file] == guarded[file]) == (file != "rounds.jsonl"), file


# ---- what is recorded and remembered -------------------------------------------------------------


def test_dropped_clients_are_named_and_do_not_count(tmp_path):
    method = {"name": "fedavg", "guard": "multikrum"}
    trainer = trained(method, engine=lying(ATTACKS["flipped"]), rounds=2, directory=tmp_path)
    honest_ids = [client for client in range(10) if client != LIAR]
    for row in rows_of(tmp_path, "rounds"):
        assert row["notes"]["guard_dropped"] == [LIAR]
        assert row["left_out"] == {str(LIAR): "dropped by the guard 'multikrum'"}
        assert (row["cohort"], row["clients"]) == (9, honest_ids)
    (entry,) = trainer.summary()["updates_left_out"]["worst"]
    assert (entry["rounds_left_out"], entry["rounds_asked"], entry["reason"]) == (
        2,
        2,
        "dropped by the guard 'multikrum'",
    )
    wanted = trained("fedavg", unseen=(LIAR,), rounds=2)
    for name, tensor in trainer.state.model.items():
        torch.testing.assert_close(tensor, wanted.state.model[name], rtol=1e-9, atol=1e-12)
    # The answer of the dropped client was sent, and its bytes are counted.
    assert next(iter(trainer.rounds))["bytes_up"] * 9 == next(iter(wanted.rounds))["bytes_up"] * 10


def test_who_was_scaled_is_noted(tmp_path):
    method = {"name": "fedavg", "guard": {"name": "norm", "multiple": 3.0, "drop": None}}
    (row,) = trained(method, engine=lying(ATTACKS["flipped"]), rounds=1).rounds
    assert row["notes"]["guard_scaled"] == [LIAR]
    lengths = row["notes"]["guard_norms"]
    assert int(np.argmax(lengths)) == LIAR
    assert len(lengths) == row["cohort"] == 10
    assert "left_out" not in row


def test_dropped_clients_remember_nothing_of_the_round():
    """SCAFFOLD's c stays the mean of all c_k: both sides ignore the round of a dropped client."""
    trainer = trained(
        {"name": "scaffold", "guard": "multikrum"}, engine=lying(ATTACKS["flipped"]), rounds=3
    )
    assert trainer.engine.remembering == [client for client in range(10) if client != LIAR]
    first = {
        "control": {name: torch.zeros_like(tensor) for name, tensor in trainer.state.model.items()}
    }
    memory, _ = trainer.engine.memory.read(np.arange(10), first)
    for name, tensor in trainer.state.server["control"].items():
        torch.testing.assert_close(memory["control"][name].mean(0), tensor, rtol=1e-9, atol=1e-12)


def test_local_models_are_kept_as_trained(tmp_path):
    """Models before the guard scales them, and only those of clients that are kept."""
    for guard in ({"name": "norm", "bound": 1e-6}, {"name": "multikrum", "f": 0, "m": 2}):
        folder = tmp_path / guard["name"]
        options = {"cohort": 4, "rounds": 1, "evaluation": Evaluation(local=True, keep_local=True)}
        small_run(folder, method={"name": "fedavg", "guard": guard}, **options)
        small_run(folder / "plain", **options)
        (row,) = rows_of(folder, "rounds")
        kept, plain = read_local(folder), read_local(folder / "plain")
        places = [plain.clients.index(client) for client in kept.clients]
        assert len(places) == row["cohort"] == (4 if guard["name"] == "norm" else 2)
        for name, stack in kept.own.items():
            assert torch.equal(stack, plain.own[name][places])
        # Only the clients that are kept are evaluated.
        measured = {r["client"] for r in rows_of(folder) if r["model"] == "local"}
        assert measured == set(kept.clients)


@pytest.fixture
def copied(monkeypatch):
    """The names of tensors whose rows are put together."""
    names = []
    put_together = _Assembled._together

    def listed(updates, tree_of):
        made = put_together(updates, tree_of)
        names.extend(made)
        return made

    monkeypatch.setattr(_Assembled, "_together", listed)
    return names


def of_models(names):
    """Return whether rows of models or of trees of the same names are among them."""
    return any(name.endswith(("weight", "bias")) for name in names)


@pytest.mark.parametrize("guard", ["norm", "krum", "multikrum"])
def test_an_average_copies_no_rows_of_models(guard, copied):
    """Page faults of such a copy would take longer than the guard itself."""
    method = {"name": "fedavg", "guard": guard}
    (row,) = trained(method, engine=lying(ATTACKS["x1e6"]), rounds=1).rounds
    assert LIAR in row["notes"]["guard_dropped"]
    assert "train_loss" in copied
    assert not of_models(copied)
    # The median looks at every row.
    trained({"name": "median", "guard": guard}, engine=lying(ATTACKS["x1e6"]), rounds=1)
    assert of_models(copied)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedavgm", "fedadam", "fedyogi", "feddyn", "scaffold", "term"]
)
@pytest.mark.parametrize("what", ["dropped", "scaled"])
def test_methods_that_need_only_averages_copy_no_rows_of_models(name, what, copied):
    lies = lying({"dropped": ATTACKS["x1e6"], "scaled": longer}[what])
    (row,) = trained(
        {"name": name, "guard": "norm"}, engine=lies, rounds=1, optimizer=Sgd(lr=0.1)
    ).rounds
    assert row["notes"][f"guard_{what}"] == [LIAR]
    assert "train_loss" in copied
    assert not of_models(copied)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "median"])
def test_scaled_updates_give_the_model_of_an_eager_copy(name, monkeypatch):
    """The same bits as if all rows were written anew."""
    method = {"name": name, "guard": {"name": "norm", "drop": None}}

    def run():
        return trained(method, engine=lying(ATTACKS["flipped"]), rounds=3, optimizer=Sgd(lr=0.1))

    lazy = run()
    assert all(LIAR in row["notes"]["guard_scaled"] for row in lazy.rounds)
    with_rows = Updates.with_rows

    def eager(updates, which, rows):
        whole = with_rows(updates, which, rows)
        return Updates(whole.params, whole.buffers, whole.uploads, whole.reports)

    monkeypatch.setattr(Updates, "with_rows", eager)
    found, wanted = lazy.state, run().state
    for tree in ("model", *found.server):
        given, other = (
            state.model if tree == "model" else state.server[tree] for state in (found, wanted)
        )
        assert all(torch.equal(tensor, other[key]) for key, tensor in given.items())


def test_a_guarded_run_resumes_to_the_same_bytes(tmp_path):
    method = {"name": "ditto", "guard": {"name": "krum", "f": 0}}
    small_run(tmp_path / "whole", method=method)
    with pytest.raises(Stop):
        small_run(tmp_path / "run", method=method, on_round=stop_after(3))

    small_run(tmp_path / "run", method=method, resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")


# ---- settings ------------------------------------------------------------------------------------


def test_guards_are_parts_that_are_described_and_read_back():
    method = build("fedprox", mu=0.5, guard={"name": "multikrum", "f": 2, "m": 3})
    assert build(**describe(method)) == method
    assert method.sees is Sees.UPDATES
    assert build("fedprox").sees is Sees.SUMS
    assert "guard" not in describe(build("fedprox"))
    read = experiment_from(
        {"data": "digits", "method": {"name": "fedavg", "guard": {"name": "norm", "bound": 2}}}
    )
    assert read.method.guard.bound == 2
    assert (
        experiment_from(
            {"data": "digits", "method": {"name": "fedavg", "guard": None}}
        ).method.guard
        is None
    )


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"name": "fedavg", "guard": "nrom"}, "did you mean 'norm'"),
        (
            {"name": "fedavg", "guard": "median"},
            "unknown method.guard 'median'.*Valid: krum, multikrum, norm",
        ),
        (
            {"name": "fedavg", "guard": {"name": "norm", "bund": 1}},
            "did you mean 'method.guard.bound'",
        ),
        ({"name": "local", "guard": "norm"}, "clients keep the whole model and send nothing"),
        ({"name": "norm"}, "unknown method 'norm'"),
    ],
)
def test_wrong_guards_are_refused(method, message):
    with pytest.raises(InputError, match=message):
        experiment_from({"data": "digits", "method": method})


def test_too_few_clients_are_refused_before_training_or_stop_the_run(tmp_path):
    with pytest.raises(
        InputError, match="the guard 'krum' needs 5 clients per round, but a cohort has 4"
    ):
        small_run(None, method={"name": "fedavg", "guard": "krum"})
    # One of ten clients is left out in every round.
    method = {"name": "fedavg", "guard": {"name": "multikrum", "f": 1, "m": 9}}
    with pytest.raises(
        RunError,
        match="round 1: the guard 'multikrum' needs the updates of 10 clients, but only 9 sent",
    ):
        trained(method, engine=lying(ATTACKS["1e300"]))
    assert trained(method, engine=StackedEngine, rounds=1).state.round == 1
