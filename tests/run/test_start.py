"""Runs that start with the model of another run or of a file."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import save_file

import equipoise
from equipoise.config import experiment_from, load_experiment
from equipoise.errors import InputError
from equipoise.run.files import load_tensors
from tests.flower.loop import write_experiment, write_silos
from tests.flower.parity import compare
from tests.run.small import MODEL, Stop, federation, promised, small_run, stop_after


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The directory of a run of three rounds."""
    directory = tmp_path_factory.mktemp("first") / "run"
    small_run(directory, rounds=3)
    return directory


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


def test_a_run_begins_with_the_model_of_another(first):
    wanted = equipoise.load(first).state_dict()
    run = small_run(rounds=0, start=first)
    assert same(run.model().state_dict(), wanted)
    assert not same(small_run(rounds=0).model().state_dict(), wanted)
    assert run.config["start"] == {"path": str(first), "parts": "all"}


def test_a_file_is_a_start_too(first, tmp_path):
    wanted = equipoise.load(first).state_dict()
    save_file(wanted, tmp_path / "model.safetensors")
    assert same(
        small_run(rounds=0, start=tmp_path / "model.safetensors").model().state_dict(), wanted
    )


def test_parts_are_taken_and_the_others_drawn(first):
    wanted, cold = equipoise.load(first).state_dict(), small_run(rounds=0).model().state_dict()
    found = (
        small_run(rounds=0, start={"path": str(first), "parts": "features"}).model().state_dict()
    )
    for name, tensor in found.items():
        assert torch.equal(tensor, (wanted if name.startswith("features") else cold)[name])


def test_other_classes_need_a_head_of_their_own(first):
    more = {"federation": federation(), "model": {**MODEL, "hidden": [12, 12]}, "rounds": 0}
    with pytest.raises(
        InputError, match=r"start: features.* is missing in .*name the parts to load"
    ):
        small_run(**more, start=first)


def test_training_goes_on_from_the_start(first):
    """A round from this start is the run's fourth, with the random numbers of a first."""
    warm, cold = small_run(rounds=1, start=first), small_run(rounds=1)
    assert (
        warm.summary["results"]["global"]["seen"]["loss"]
        < cold.summary["results"]["global"]["seen"]["loss"]
    )


def test_a_run_with_a_start_is_resumed_and_another_start_refused(first, tmp_path):
    shutil.copy(first / "model.safetensors", tmp_path / "start.safetensors")
    how = {"start": tmp_path / "start.safetensors", "method": "scaffold"}
    small_run(tmp_path / "whole", **how)
    with pytest.raises(Stop):
        small_run(tmp_path / "run", **how, on_round=stop_after(2))
    small_run(tmp_path / "run", **how, resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")
    with pytest.raises(InputError, match="holds another experiment: start is"):
        small_run(tmp_path / "run", method="scaffold", resume=True)
    tensors, _ = load_tensors(first / "model.safetensors")
    save_file(
        {name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / "start.safetensors"
    )
    with pytest.raises(InputError, match="holds another experiment: resolved.start is"):
        small_run(tmp_path / "run", **how, resume=True)


def test_an_experiment_names_a_start():
    made = experiment_from({"data": "digits", "start": "runs/first"})
    assert made.plain()["start"] == {"path": "runs/first", "parts": "all"}
    assert experiment_from(made.plain()).start == made.start
    listed = experiment_from(
        {"data": "digits", "start": {"path": "a.safetensors", "parts": ["features"]}}
    )
    assert experiment_from(listed.plain()).start == listed.start


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("nowhere", "start: cannot read nowhere as a safetensors file"),
        ({"parts": "head"}, "start must be a path"),
        ({"path": "a", "part": "head"}, "'part'.*did you mean 'part"),
        (3, "start must be a path"),
    ],
)
def test_mistakes_are_named(start, message):
    with pytest.raises(InputError, match=message):
        small_run(rounds=0, start=start)


def test_an_unfinished_run_is_no_start(first, tmp_path):
    shutil.copytree(first, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(InputError, match="start: the run in .* is not finished"):
        small_run(rounds=0, start=tmp_path / "run")


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedbabu"])
def test_a_warm_start_is_the_same_on_flower(method, tmp_path):
    write_silos(tmp_path / "silos")
    path = write_experiment(
        tmp_path, method="fedavg", training={"rounds": 1, "optimizer": {"lr": 0.5}}
    )
    load_experiment(path).run(tmp_path / "first")
    path = write_experiment(
        tmp_path, method=method, training={"rounds": 2}, start=str(tmp_path / "first")
    )
    compare(path, tmp_path)
