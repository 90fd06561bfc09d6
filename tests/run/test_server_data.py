"""Validation and test data that the server holds."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from equipoise import Evaluation, Federation, data
from equipoise.config import load_experiment
from equipoise.data import Iid, Source, federate
from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.study import study_from, value_of
from tests.flower.loop import run_on_loop
from tests.run.server_data import CLIENTS, HELD, federation
from tests.run.small import Stop, promised, rows_of, small_run, stop_after


def test_the_server_evaluates_the_global_model_on_what_it_holds(tmp_path):
    held = federation()
    run = small_run(
        tmp_path / "run", federation=held, evaluation=Evaluation(metrics=["f1_macro"]), rounds=3
    )
    rows = rows_of(tmp_path / "run", "server")
    assert [(row["round"], row["split"]) for row in rows] == [
        (r, s) for r in (1, 2, 3) for s in ("val", "test")
    ]
    for split in ("val", "test"):
        x, y = torch.from_numpy(HELD[split][0]).float(), torch.from_numpy(HELD[split][1])
        with torch.no_grad():
            output = run.model()(x).double()
        found = run.summary["server"][split]
        assert found["loss"] == pytest.approx(
            float(torch.nn.functional.cross_entropy(output, y)), rel=1e-5
        )
        assert found["accuracy"] == pytest.approx(float((output.argmax(1) == y).double().mean()))
        assert set(found) == {"loss", "accuracy", "f1_macro"}
    assert value_of(run.summary, "server.score") == run.summary["server"]["test"]["accuracy"]
    assert value_of(run.summary, "val.server.loss") == run.summary["server"]["val"]["loss"]


def test_clients_are_not_changed_by_it(tmp_path):
    without = Federation.from_arrays(*CLIENTS, clients=np.arange(120) % 6, classes=3)
    small_run(tmp_path / "with", federation=federation(), rounds=2)
    small_run(tmp_path / "without", federation=without, rounds=2)
    with_it, without_it = promised(tmp_path / "with"), promised(tmp_path / "without")
    for name in ("metrics.jsonl", "rounds.jsonl", "model.safetensors"):
        assert with_it[name] == without_it[name]
    assert not (tmp_path / "without" / "server.jsonl").exists()
    assert federation().fingerprint() != without.fingerprint()


def test_a_run_is_resumed_and_made_longer_with_it(tmp_path):
    how = {
        "federation": federation(),
        "evaluation": Evaluation(every=2, select="best", select_on="server"),
    }
    small_run(tmp_path / "whole", **how, rounds=7)
    with pytest.raises(Stop):
        small_run(tmp_path / "run", **how, rounds=5, on_round=stop_after(3))
    small_run(tmp_path / "run", **how, rounds=5, resume=True)
    small_run(tmp_path / "run", **how, rounds=7, resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")
    assert rows_of(tmp_path / "run", "server") == rows_of(tmp_path / "whole", "server")


def test_the_servers_validation_data_choose_the_round():
    run = small_run(
        federation=federation(),
        evaluation=Evaluation(select="best", select_on="server", select_by="accuracy"),
        rounds=6,
    )
    rows = [row for row in run.trainer.server if row["split"] == "val"]
    best = max(rows, key=lambda row: (row["accuracy"], -row["round"]))
    assert run.summary["round"] == best["round"]
    with pytest.raises(
        InputError, match="choosing a round needs validation data, but the server does not have any"
    ):
        small_run(evaluation=Evaluation(select="best", select_on="server"), rounds=1)
    with pytest.raises(InputError, match="'fedper' keep parts of it; valid: evaluation.select_on"):
        small_run(method="fedper", evaluation=Evaluation(patience=1, select_on="server"))
    with pytest.raises(InputError, match="'servers'"):
        Evaluation(select_on="servers")


def test_official_test_samples_stay_with_the_server():
    for_testing = np.arange(60) % 6 == 0
    source = Source(x=torch.arange(60.0).unsqueeze(1), y=torch.arange(60) % 3, test=for_testing)
    made = federate(source, Iid(4), test="server", server_val=0.2, seed=1)
    assert made.server["test"].tolist() == np.flatnonzero(for_testing).tolist()
    assert len(made.server["val"]) == 10
    held = np.concatenate([made.split(name).indices for name in ("train", "val", "test")])
    everything = np.concatenate([held, made.server["val"], made.server["test"]])
    assert sorted(everything.tolist()) == list(range(60))
    assert (made.test.sizes > 0).all()
    # Without the option, the official test samples are divided among clients, as before.
    assert federate(source, Iid(4)).server == {}
    with pytest.raises(InputError, match="needs published test samples"):
        federate(Source(x=source.x, y=source.y), Iid(4), test="server")
    with pytest.raises(InputError, match="server_val must be a share"):
        federate(source, Iid(4), server_val=1.5)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"train": (CLIENTS[0], CLIENTS[1])}, "'train'"),
        (
            {"val": (np.zeros((3, 4)), np.zeros(3, int))},
            r"server\['val'\] has samples of shape \(3, 4\)",
        ),
    ],
)
def test_mistakes_are_named(server, message):
    with pytest.raises(InputError, match=message):
        Federation.from_arrays(*CLIENTS, clients=np.arange(120) % 6, server=server)


def test_nobody_trains_on_what_the_server_holds():
    x, y = torch.zeros(6, 1), torch.tensor([0, 1, 0, 1, 0, 1])
    made = Federation.from_arrays(x, y, clients=[0] * 6)
    held = {"val": made.train.of(0)[:1]}
    with pytest.raises(
        InputError, match="is in the train split of client 0 and a val sample of the server"
    ):
        Federation(
            x,
            y,
            made.train,
            made.val,
            made.test,
            made.groups,
            made.group_names,
            made.unseen,
            server=held,
        )


def test_pooled_data_do_not_contain_it():
    held = federation()
    assert not np.isin(
        held.pooled().train.indices, np.concatenate(list(held.server.values()))
    ).any()
    run = small_run(federation=held, method=build("central"), rounds=1, cohort=1)
    assert set(run.summary["server"]) == {"val", "test"}


def test_a_table_shows_it(tmp_path):
    base = {"data": {"name": "digits", "server_val": 0.1}, "training": {"rounds": 1}}
    study = study_from(
        {"base": base, "methods": ["fedavg"], "metrics": ["mean", "val.server.score"]}
    )
    results = study.run(tmp_path)
    row = next(row for row in results.plain()["results"] if row["metric"] == "val.server.score")
    summary = json.loads((tmp_path / "base/fedavg/seed0/summary.json").read_text())
    assert row["mean"] == summary["server"]["val"]["accuracy"]
    assert study_from(
        {"base": base, "methods": ["fedavg"], "split": "val", "metrics": ["server.score"]}
    ).run(tmp_path).plain()["results"][0]["mean"] == pytest.approx(row["mean"])


def test_on_flower_the_server_reads_its_own_samples(tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_text(
        "data: {name: digits, server_val: 0.1}\ntraining: {rounds: 1}\nmachine: {device: cpu, "
        "precision: float64}\n"
        "evaluation: {select: best, select_on: server}\nflower: {clients: 22}\n"
    )
    alone = load_experiment(file).run()
    run, _ = run_on_loop(
        file, [{"partition-id": client, "memory": str(tmp_path / "memory")} for client in range(22)]
    )
    assert run.summary["server"]["val"] == pytest.approx(alone.summary["server"]["val"], rel=1e-9)


def test_a_recipe_may_return_a_federation(monkeypatch):
    monkeypatch.setattr(data, "SOURCES", dict(data.SOURCES))

    @data.register
    def ready(*, seed: int, clients: int = 3):
        return Federation.from_arrays(*CLIENTS, clients=np.arange(120) % clients, seed=seed)

    assert data.load("ready", clients=4).clients == 4
    run = (
        study_from({"base": {"data": "ready", "training": {"rounds": 1}}, "methods": ["fedavg"]})
        .jobs[0]
        .experiment.run()
    )
    assert run.summary["rounds"] == 1
    for option, value in {
        "splits": (0.5, 0.2, 0.3),
        "unseen": 1,
        "partition": "iid",
        "server_val": 0.1,
    }.items():
        with pytest.raises(InputError, match=f"data.{option}=.* cannot be used with data 'ready'"):
            data.load("ready", **{option: value})
