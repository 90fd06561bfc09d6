"""Runs of 0 rounds: the initial model is evaluated, and nothing is trained."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from torch import nn

from equipoise import Evaluation, Federation, Machine, load, train
from equipoise.config import load_experiment
from equipoise.engine.settings import FineTune
from equipoise.errors import InputError
from equipoise.models import build
from equipoise.models.base import Model
from tests.run.small import MODEL, federation, measure, promised, rows_of
from tests.tiny_clip import write_clip

SMALL = {"name": "clip", "patch": 4, "width": 8, "depth": 1, "heads": 2}


def untrained(out=None, **options):
    return train(federation(), model=MODEL, rounds=0, seed=3, out=out, **options)


def test_the_initial_model_is_evaluated_on_every_client(tmp_path):
    run = untrained(tmp_path / "run")
    module = build(**MODEL, shape=(5,), classes=3, seed=3).eval()
    rows = rows_of(tmp_path / "run")
    assert {row["client"] for row in rows} == set(range(9))
    for row in rows:
        loss, accuracy = measure(module, federation(), row["split"], row["client"])
        assert row["round"] == 0
        assert (row["loss"], row["accuracy"]) == (
            pytest.approx(loss, rel=1e-5),
            pytest.approx(accuracy),
        )
    assert (
        run.summary["rounds"],
        run.summary["round"],
        run.summary["bytes_up"],
        run.summary["bytes_down"],
    ) == (0,) * 4
    assert {
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "model.safetensors",
        "checkpoint.safetensors",
    } <= {path.name for path in (tmp_path / "run").iterdir()}
    for name, tensor in load(tmp_path / "run").state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name])


def test_a_finished_run_is_resumed_as_it_is(tmp_path):
    untrained(tmp_path / "run")
    before = promised(tmp_path / "run")
    assert untrained(tmp_path / "run", resume=True).summary == json.loads(before["summary.json"])
    (tmp_path / "run" / "summary.json").unlink()
    untrained(tmp_path / "run", resume=True)
    assert promised(tmp_path / "run") == before


def test_a_run_that_ended_before_its_checkpoint_is_evaluated_again(tmp_path):
    untrained(tmp_path / "run")
    before = promised(tmp_path / "run")
    for name in ("summary.json", "checkpoint.safetensors"):
        (tmp_path / "run" / name).unlink()
    untrained(tmp_path / "run", resume=True)
    assert promised(tmp_path / "run") == before


@pytest.mark.parametrize("method", ["ditto", "gifair", "fedper", "fedbabu", "local", "central"])
def test_methods_that_keep_or_ask_more_can_be_evaluated_too(method):
    summary = untrained(method=method, schedule="cosine").summary
    assert summary["results"]
    assert summary["bytes_down"] == 0


def test_the_best_round_is_the_only_one():
    run = untrained(evaluation=Evaluation(select="best", patience=2))
    assert run.summary["round"] == 0


def test_without_evaluation_there_is_nothing():
    assert untrained(evaluation=Evaluation(every=0)).summary["results"] == {}


def test_no_chunk_size_is_measured():
    assert isinstance(untrained(machine=Machine(chunk="measure")).config["resolved"]["chunk"], int)


def pictures(**options):
    draws = torch.Generator().manual_seed(0)
    x = torch.rand(24, 3, 16, 16, generator=draws)
    return Federation.from_arrays(
        x, torch.arange(24) % 3, clients=[0, 1, 2] * 8, classes=3, **options
    )


def test_zero_shot_clip_is_a_run_like_any_other(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    source = write_clip(tmp_path / "clip", longest=32)
    data = pictures(class_names=["cat", "dog", "big_mouse"])
    run = train(data, model={"name": "clip", "source": source}, rounds=0, out=tmp_path / "run")
    # The names of the classes are recorded, so the model can be built without the data.
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"] == {
        "name": "clip",
        "source": source,
        "class_names": ["cat", "dog", "big_mouse"],
    }
    module = load(tmp_path / "run")
    for row in rows_of(tmp_path / "run"):
        loss, accuracy = measure(module, data, row["split"], row["client"])
        assert (row["loss"], row["accuracy"]) == (
            pytest.approx(loss, rel=1e-5),
            pytest.approx(accuracy),
        )
    torch.testing.assert_close(run.model()(data.x), module(data.x))
    again = train(
        data, model={"name": "clip", "source": source}, rounds=0, out=tmp_path / "run", resume=True
    )
    assert again.summary == run.summary


def test_other_names_of_classes_are_another_experiment(tmp_path):
    train(pictures(class_names=["a", "b", "c"]), model=SMALL, rounds=0, out=tmp_path / "run")
    with pytest.raises(InputError, match="holds another experiment: model.class_names"):
        train(
            pictures(class_names=["a", "b", "d"]),
            model=SMALL,
            rounds=0,
            out=tmp_path / "run",
            resume=True,
        )


def test_the_option_comes_before_the_data():
    run = train(
        pictures(class_names=["a", "b", "c"]),
        model={**SMALL, "class_names": ["x", "y", "z"]},
        rounds=0,
    )
    assert run.config["model"]["class_names"] == ["x", "y", "z"]


def test_from_an_experiment(tmp_path):
    file = tmp_path / "zero.yaml"
    file.write_text(yaml.safe_dump({"data": "digits", "model": SMALL, "training": {"rounds": 0}}))
    summary = load_experiment(file).run(tmp_path / "run").summary
    assert (summary["rounds"], len(rows_of(tmp_path / "run"))) == (0, 44)


@pytest.mark.parametrize(
    "model", [SMALL, Model(nn.Flatten(), nn.Linear(768, 3).requires_grad_(False))]
)
def test_a_model_without_trained_parameters_cannot_be_trained(model):
    for method, options in (
        ("fedavg", {"rounds": 2}),
        ("ditto", {"rounds": 0}),
        ("perfedavg", {"rounds": 0}),
        ("fedavg", {"rounds": 0, "evaluation": Evaluation(fine_tune=FineTune())}),
    ):
        got = f"got {options['rounds']} rounds of '{method}'"
        with pytest.raises(
            InputError, match=f"no parameter that can be trained, .* training.rounds of 0 .* {got}"
        ):
            train(pictures(), model=model, method=method, **options)
    assert (
        train(pictures(), model=model, rounds=0).summary["results"]["global"]["seen"]["mean"] >= 0
    )


def test_fewer_rounds_than_none_are_refused():
    with pytest.raises(InputError, match="^rounds must be a whole number of at least 0, got -1"):
        train(pictures(), model=SMALL, rounds=-1)
