"""Values of runs in TensorBoard's event files, read back with TensorBoard."""

from __future__ import annotations

import pytest

from equipoise.config import experiment_from
from equipoise.errors import InputError
from tests.run.small import Stop, rows_of, stop_after

pytest.importorskip("tensorboard")

EXPERIMENT = {
    "data": "digits",
    "model": "logistic",
    "training": {"rounds": 3},
    "tracking": "tensorboard",
}


def read(directory):
    # TensorBoard's own reader.
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    found = {}
    for name in set(events.Tags()["tensors"]) - {"config/text_summary"}:
        found[name] = {
            event.step: event.tensor_proto.double_val[0] for event in events.Tensors(name)
        }
        assert len(found[name]) == len(events.Tensors(name))
    (text,) = events.Tensors("config/text_summary")
    assert "rounds: " in text.tensor_proto.string_val[0].decode()
    return found


def check(found, directory):
    """Compare all values of a run with its journals."""
    rounds = {row["round"]: row for row in rows_of(directory, "rounds")}
    assert found["round/train_loss"] == pytest.approx(
        {n: row["train_loss"] for n, row in rounds.items()}, rel=1e-12
    )
    assert found["round/bytes_up"] == {n: row["bytes_up"] for n, row in rounds.items()}
    for number in rounds:
        rows = [
            r
            for r in rows_of(directory)
            if (r["round"], r["model"], r["split"]) == (number, "global", "test")
        ]
        values = [row["accuracy"] for row in rows]
        assert found["test/global/seen/mean"][number] == pytest.approx(
            sum(values) / len(values), rel=1e-12
        )
        own = [row["accuracy"] for row in rows if row["group"] == "rotated"]
        assert found["test/global/seen/groups/rotated"][number] == pytest.approx(
            sum(own) / len(own), rel=1e-12
        )


def test_values_are_read_back(tmp_path):
    experiment_from(EXPERIMENT).run(tmp_path / "run")
    check(read(tmp_path / "run" / "tensorboard"), tmp_path / "run")


def test_a_resumed_run_continues_its_curves(tmp_path):
    made = experiment_from({**EXPERIMENT, "checkpoint_every": 2, "training": {"rounds": 4}})
    with pytest.raises(Stop):
        # Round 3 is written, and then repeated after the checkpoint of round 2.
        made.run(tmp_path / "run", on_round=stop_after(3))
    made.run(tmp_path / "run", resume=True)
    found = read(tmp_path / "run" / "tensorboard")
    assert set(found["round/train_loss"]) == {1, 2, 3, 4}
    check(found, tmp_path / "run")


def test_a_run_without_a_directory_needs_one(tmp_path):
    with pytest.raises(InputError, match="tracking: tensorboard needs a directory"):
        experiment_from(EXPERIMENT).run()
    where = {"name": "tensorboard", "directory": str(tmp_path / "logs")}
    experiment_from({**EXPERIMENT, "tracking": where}).run()
    assert set(read(tmp_path / "logs")["round/train_loss"]) == {1, 2, 3}
