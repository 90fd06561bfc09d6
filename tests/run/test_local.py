"""Local models: clients' models before aggregation, evaluated and optionally saved."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from equipoise import Evaluation, Machine, Training, load, train
from equipoise.engine import reports
from equipoise.errors import InputError
from equipoise.run.trainer import Trainer
from tests.methods.domains import LR, first_weights, local_step, loss
from tests.rounds import linear, random_regression
from tests.run.small import Stop, federation, measure, promised, rows_of, small_run, stop_after

LOCAL = Evaluation(local=True, keep_local=True)


def local_rows(run):
    return [row for row in run.trainer.metrics if row["model"] == "local"]


def test_losses_by_hand():
    """Two rounds of one gradient step on a linear model, in NumPy."""
    world = random_regression([12, 20, 9, 15], seed=4, splits=(0.5, 0.25, 0.25))
    training = {"rounds": 2, "batch_size": 100, "optimizer": {"name": "sgd", "lr": LR}}
    run = train(
        world, model=linear(), machine=Machine(precision="float64"), evaluation=LOCAL, **training
    )
    w, sizes, wanted = first_weights(), world.train.sizes, {}
    for number in (1, 2):
        trained = [local_step(world, client, w) for client in range(4)]
        for client, own in enumerate(trained):
            for split in ("val", "test"):
                wanted[number, client, split] = loss(world, client, own, split)
        w = sum(n * own for n, own in zip(sizes, trained, strict=True)) / sizes.sum()
    found = {(row["round"], row["client"], row["split"]): row["loss"] for row in local_rows(run)}
    assert found == pytest.approx(wanted, rel=1e-10)
    for client, own in enumerate(trained):
        assert run.local_model(client).head.weight.detach().numpy()[0] == pytest.approx(
            own, rel=1e-10
        )
    # A client's gap: its loss with the global model minus that with its own.
    rows = [row for row in run.trainer.metrics if "gap" in row]
    assert len(rows) == 8
    for row in rows:
        own = wanted[row["round"], row["client"], "val"]
        assert row["gap"] == pytest.approx(row["loss"] - own, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedper", "fedcrc", "fedbabu"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_what_is_kept_is_what_was_evaluated(tmp_path, method, chunk):
    data = federation()
    run = small_run(
        tmp_path / "run", method, evaluation=LOCAL, machine=Machine(device="cpu", chunk=chunk)
    )
    clients = run.trainer.local_models().clients
    last = [row for row in local_rows(run) if row["round"] == 7]
    assert {row["client"] for row in last} == set(clients)
    assert len(clients) == 4
    for row in last:
        module = load(tmp_path / "run", row["client"], local=True)
        own, hits = measure(module, data, row["split"], row["client"])
        assert row["loss"] == pytest.approx(own, rel=1e-5)
        assert row["accuracy"] == pytest.approx(hits)
        again = run.local_model(row["client"]).state_dict()
        assert all(torch.equal(tensor, again[name]) for name, tensor in module.state_dict().items())
    # Federated averaging of the local models gives the parts of the global model that are shared.
    shares = data.train.sizes[clients] / data.train.sizes[clients].sum()
    states = [run.local_model(client).state_dict() for client in clients]
    shared = [name for name in run.trainer.state.model if name.startswith("features.")]
    for name in shared:
        mean = sum(
            share * state[name].double() for share, state in zip(shares, states, strict=True)
        )
        torch.testing.assert_close(
            mean.float(), run.trainer.state.model[name], rtol=1e-5, atol=1e-6
        )


def test_a_local_model_has_the_parts_the_client_keeps():
    """FedPer's clients keep their heads: a local model has the client's head."""
    run = small_run(None, "fedper", evaluation=LOCAL)
    for client in run.trainer.local_models().clients:
        local, personal = run.local_model(client).state_dict(), run.model(client).state_dict()
        same = {name for name, tensor in local.items() if torch.equal(tensor, personal[name])}
        assert same == {"head.weight", "head.bias"}


def test_ditto_reports_global_personal_and_local_models():
    results = small_run(None, "ditto", evaluation=LOCAL).summary["results"]
    assert list(results) == ["global", "personal", "local"]
    assert set(results["local"]) == {"seen"}
    assert set(results["local"]["seen"]) == set(results["personal"]["seen"])
    assert results["local"]["seen"]["loss"] != results["personal"]["seen"]["loss"]


def test_the_summary_is_of_the_cohort_of_the_round_that_counts():
    run = small_run(None, evaluation=Evaluation(local=True, every=3))
    rows = local_rows(run)
    assert sorted({row["round"] for row in rows}) == [3, 6, 7]
    scores = [row["accuracy"] for row in rows if (row["round"], row["split"]) == (7, "test")]
    seen = run.summary["results"]["local"]["seen"]
    assert (seen["clients"], seen["mean"]) == (len(scores), pytest.approx(np.mean(scores)))
    assert seen["sigma_clients"] == pytest.approx(np.std(scores))
    assert seen["gap_variance"] is None


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedper", "faa", "scaffold"])
def test_nothing_else_changes(tmp_path, method):
    """The same models, bytes and rows, bit for bit; only rows of local models are added."""
    for name, evaluation in (("with", LOCAL), ("without", Evaluation())):
        small_run(tmp_path / name, method, evaluation=evaluation)
    ours, theirs = promised(tmp_path / "with"), promised(tmp_path / "without")
    for name in ("model.safetensors", "personal.safetensors", "rounds.jsonl"):
        assert ours.get(name) == theirs.get(name)
    assert [row for row in rows_of(tmp_path / "with") if row["model"] != "local"] == rows_of(
        tmp_path / "without"
    )
    results = json.loads(ours["summary.json"])["results"]
    del results["local"]
    assert results == json.loads(theirs["summary.json"])["results"]
    assert not (tmp_path / "without" / "local.safetensors").exists()


@pytest.mark.parametrize(("local", "passes"), [(False, 2), (True, 3)])
def test_reports_and_evaluation_share_their_pass(monkeypatch, local, passes):
    """GA needs validation losses before and after training; local models add only test data."""
    looked = []

    def counting(*given):
        looked.append(given)
        return evaluate(*given)

    evaluate = reports.launch_stacked
    monkeypatch.setattr(reports, "launch_stacked", counting)
    small_run(
        None,
        "ga",
        training=Training(rounds=1),
        evaluation=Evaluation(local=local),
        machine=Machine(chunk=9),
    )
    assert len(looked) == passes


def test_reports_of_some_samples_do_not_limit_evaluation():
    limited, whole = (
        small_run(None, evaluation=LOCAL, training=Training(rounds=2, report_samples=limit))
        for limit in (1, None)
    )
    assert local_rows(limited) == local_rows(whole)
    assert limited.summary["results"] == whole.summary["results"]


def test_pooled_data_have_no_local_models():
    assert set(
        small_run(None, "central", evaluation=Evaluation(local=True)).summary["results"]
    ) == {"global"}
    with pytest.raises(
        InputError, match="evaluation.keep_local needs clients that train; method 'central' pools"
    ):
        small_run(None, "central", evaluation=LOCAL)


@pytest.mark.parametrize("stopped", [3, 7])
def test_a_resumed_run_keeps_the_same_models(tmp_path, stopped):
    small_run(tmp_path / "alone", "fedper", evaluation=LOCAL)
    with pytest.raises(Stop):
        small_run(tmp_path / "run", "fedper", evaluation=LOCAL, on_round=stop_after(stopped))
    assert (tmp_path / "run" / "local.safetensors").exists() == (stopped == 7)
    run = small_run(tmp_path / "run", "fedper", evaluation=LOCAL, resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "alone")
    assert run.local_model(run.trainer.local_models().clients[0]).head.weight.shape == (3, 12)


def test_a_run_that_ends_between_its_local_models_and_its_checkpoint_is_resumed(
    tmp_path, monkeypatch
):
    small_run(tmp_path / "alone", evaluation=LOCAL)
    save = Trainer.save_checkpoint

    def broken(trainer):
        if trainer.state.round == 7:
            raise Stop
        save(trainer)

    monkeypatch.setattr(Trainer, "save_checkpoint", broken)
    with pytest.raises(Stop):
        small_run(tmp_path / "run", evaluation=LOCAL)
    monkeypatch.undo()
    assert (tmp_path / "run" / "local.safetensors").exists()
    small_run(tmp_path / "run", evaluation=LOCAL, resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "alone")


def test_patience_ends_with_the_local_models_of_that_round():
    evaluation = Evaluation(patience=2, local=True, keep_local=True)
    run = small_run(None, evaluation=evaluation, rounds=30, optimizer={"name": "sgd", "lr": 3.0})
    assert run.summary["rounds"] < 30
    assert run.trainer.local_models().round == run.summary["rounds"]


def test_refusals(tmp_path):
    run = small_run(tmp_path / "run", training=Training(rounds=1, cohort=2), evaluation=LOCAL)
    there = ", ".join(map(str, run.trainer.local_models().clients))
    with pytest.raises(
        InputError, match=f"client 7 has no local model; .* trained in round 1: {there}"
    ):
        run.local_model(7)  # held out of training
    with pytest.raises(InputError, match="local models belong to clients; valid: client= one of"):
        load(tmp_path / "run", local=True)
    small_run(tmp_path / "none", training=Training(rounds=1))
    with pytest.raises(
        InputError, match="has no local.safetensors; train with evaluation.keep_local: true"
    ):
        load(tmp_path / "none", 0, local=True)
    with pytest.raises(InputError, match="the run has kept no local models"):
        small_run(None, training=Training(rounds=1)).local_model(0)
    with pytest.raises(InputError, match="evaluation.local needs evaluation.every of at least 1"):
        Evaluation(every=0, local=True)


def test_a_module_of_the_users_own_is_passed_to_load(tmp_path):
    module = linear(features=5).float()
    data = random_regression([6, 6], features=5, splits=(0.5, 0.25, 0.25))
    run = train(data, model=module, rounds=1, evaluation=LOCAL, out=tmp_path / "run", batch_size=4)
    again = load(tmp_path / "run", 1, local=True, module=linear(features=5))
    assert torch.equal(again.head.weight, run.local_model(1).head.weight)
