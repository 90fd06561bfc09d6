"""CLIP on Flower: clients register with the names of their classes; zero-shot evaluation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from equipoise.config import load_experiment
from equipoise.data import load
from equipoise.errors import InputError
from equipoise.flower.roster import Description, Roster
from tests.flower.loop import own_nodes, run_on_loop, write_experiment, write_silos
from tests.flower.parity import assert_same_rows, differ
from tests.tiny_clip import write_clip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write_images(root, domains=("photo", "art"), classes=("dog", "cat")):
    """Write six images of each class in each domain; return the options of the source."""
    draws = np.random.default_rng(0)
    for domain in domains:
        for name in classes:
            (root / domain / name).mkdir(parents=True)
            for number in range(6):
                pixels = draws.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / domain / name / f"{number}.png")
    return {"name": "imagefolder", "root": str(root), "size": 16}


@pytest.mark.parametrize(("method", "rounds"), [("fedclip", 2), ("promptfl", 2), ("fedavg", 0)])
def test_clients_say_the_names_of_their_classes(folder, method, rounds):
    path = write_experiment(
        folder, method=method, training={"rounds": rounds, "optimizer": {"lr": 0.1}}
    )
    content = load_experiment(path).plain()
    model = {"fedclip": "clipadapter", "promptfl": "clipprompts", "fedavg": "clip"}[method]
    content["data"] = write_images(folder / "images")
    content["model"] = {"name": model, "source": write_clip(folder / "clip", longest=32)}
    content["flower"]["clients"] = 2
    path.write_text(yaml.safe_dump(content))
    alone = load_experiment(path).run()
    nodes = [
        {"client": client, "memory": str(folder / "memory" / str(client))} for client in range(2)
    ]
    run, _ = run_on_loop(path, nodes)
    assert (
        alone.config["model"]["class_names"] == run.config["model"]["class_names"] == ["cat", "dog"]
    )
    assert_same_rows(list(alone.trainer.metrics), list(run.trainer.metrics))
    here, there = alone.trainer.selected().shared, run.trainer.selected().shared
    assert here.keys() == there.keys()
    assert not here or differ(here, there) <= 1e-9


def test_an_initial_model_is_evaluated_by_messages(folder):
    write_silos(folder / "silos")
    path = write_experiment(folder, model={"name": "mlp", "hidden": [6]}, training={"rounds": 0})
    alone = load_experiment(path).run()
    run, grid = run_on_loop(path, own_nodes(folder), folder / "run")
    assert run.summary["rounds"] == 0
    assert set(grid.kinds) == {"query.describe", "evaluate.models", "query.adopt"}
    assert_same_rows(list(alone.trainer.metrics), list(run.trainer.metrics))
    assert all(torch.isfinite(tensor).all() for tensor in run.trainer.selected().shared.values())


def test_clients_with_other_names_are_refused():
    digits = load("digits")
    one, other = (Description.of(digits, client) for client in (0, 1))
    named = Description.read(other.text().replace('"class_names": null', '"class_names": ["zero"]'))
    assert named.class_names == ("zero",)
    with pytest.raises(
        InputError,
        match=r"client 1 .* has class_names \('zero',\), client 0 .* None; they must agree",
    ):
        Roster("digits", {0: one, 1: named})
