"""FedGCR on Flower: one exchange per round, and bytes of prompts, GC-Net, head, h̃ and H."""

from __future__ import annotations

import pytest

from tests.flower.loop import write_experiment, write_silos
from tests.flower.parity import compare

WIDTH, CLASSES, PROMPTS, CLUSTERS = 16, 10, 4, 2
SMALL = {"name": "fedgc", "patch": 4, "width": WIDTH, "depth": 1, "heads": 2, "prompts": PROMPTS}
GCNET = WIDTH * 4 * WIDTH + 4 * WIDTH + 4 * WIDTH * WIDTH + WIDTH
MOVED = PROMPTS * WIDTH + GCNET + CLASSES * (WIDTH + 1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_silos(tmp_path / "silos")
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    ("method", "reports"),
    [
        # Training loss, terms of the method, steps, a validation loss, and for FedGR the loss of
        # the received model.
        ({"name": "fedgcr"}, 5),
        ({"name": "fedgc", "representation": "received"}, 4),
    ],
)
def test_one_exchange_a_round_and_bytes_by_hand(method, reports, folder):
    path = write_experiment(
        folder,
        method={**method, "clusters": CLUSTERS},
        model=SMALL,
        training={"rounds": 3, "optimizer": {"lr": 0.1}},
    )
    alone, run, grid = compare(path, folder)
    for made in (alone, run):
        rows = list(made.trainer.rounds)
        assert [row["bytes_up"] for row in rows] == [8 * 4 * (MOVED + WIDTH + reports)] * 3
        # From the second round on: H, and the index of its cluster for each client.
        assert rows[0]["bytes_down"] == 8 * 4 * MOVED
        assert [row["bytes_down"] for row in rows[1:]] == [
            8 * 4 * (MOVED + CLUSTERS * WIDTH + 1)
        ] * 2
    assert grid.kinds.count("train") == 3 * 4
    assert "query.ask" not in grid.kinds
