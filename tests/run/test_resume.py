"""A repeated run, and a run that was interrupted and resumed, leave the same bytes."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

from equipoise import Evaluation, Machine
from equipoise.cli.show.run import show_run
from equipoise.errors import InputError, RunError
from equipoise.models.base import Model
from equipoise.optimizers import optimizer_named
from equipoise.run import api, save_times
from equipoise.run.files import load_tensors
from equipoise.run.trainer import Trainer
from tests.run.killing import contents
from tests.run.small import PROMISED, TRAINING, Stop, promised, rows_of, small_run, stop_after

METHODS = ["fedavg", "scaffold", "local", "fedadam"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the directory of an undisturbed run, which is made once."""
    made = {}

    def directory(**options):
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("undisturbed") / "run"
            small_run(made[key], **options)
        return made[key]

    return directory


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_bytes(method, undisturbed, tmp_path):
    wanted = promised(undisturbed(method=method))
    small_run(tmp_path / "again", method=method)
    assert promised(tmp_path / "again") == wanted
    kept_on_request = {"local.safetensors"}
    assert set(wanted) == set(PROMISED) - kept_on_request - (
        set() if method == "local" else {"personal.safetensors"}
    )


@pytest.mark.parametrize("method", METHODS)
def test_another_seed_gives_other_bytes(method, undisturbed, tmp_path):
    wanted = promised(undisturbed(method=method))
    small_run(tmp_path / "other", method=method, seed=4)
    found = promised(tmp_path / "other")
    assert set(found) == set(wanted)
    assert all(found[name] != wanted[name] for name in wanted)


def test_the_global_generators_are_neither_read_nor_moved(undisturbed, tmp_path):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    small_run(tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)
    assert promised(tmp_path / "run") == promised(undisturbed(method="fedavg"))


@pytest.mark.parametrize("checkpoint_every", [1, 3])
@pytest.mark.parametrize("finished", [1, 5])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_broken_off_goes_on_as_if_nothing_had_happened(
    method, finished, checkpoint_every, undisturbed, tmp_path
):
    how = {"method": method, "checkpoint_every": checkpoint_every}
    with pytest.raises(Stop):
        small_run(tmp_path / "run", **how, on_round=stop_after(finished))
    assert not (tmp_path / "run" / "summary.json").exists()
    seen = []
    small_run(
        tmp_path / "run", **how, resume=True, on_round=lambda progress: seen.append(progress.round)
    )
    # The rounds after the last checkpoint are repeated, those before it are not.
    assert seen == list(range(finished - finished % checkpoint_every + 1, TRAINING.rounds + 1))
    assert promised(tmp_path / "run") == promised(undisturbed(**how))


@pytest.mark.parametrize(
    ("seconds", "repeated"), [(3600.0, (2, 3, 4, 5, 6, 7)), (0.0, (6, 7))], ids=["short", "long"]
)
def test_by_default_a_run_repeats_the_rounds_of_the_last_seconds(
    seconds, repeated, undisturbed, tmp_path, monkeypatch
):
    monkeypatch.setattr(save_times, "SECONDS", seconds)
    monkeypatch.setattr(save_times, "TIMES", 0.0)
    how, seen = {"method": "scaffold", "checkpoint_every": None}, []
    with pytest.raises(Stop):
        small_run(tmp_path / "run", **how, on_round=stop_after(5))
    small_run(
        tmp_path / "run", **how, resume=True, on_round=lambda progress: seen.append(progress.round)
    )
    assert tuple(seen) == repeated
    assert promised(tmp_path / "run") == promised(undisturbed(**how))


@pytest.mark.parametrize(
    ("begun_with", "asked", "in_force", "rounds"),
    [
        (2, None, 2, [5, 5, 6, 7]),
        (2, 3, 3, [5, 5, 6, 7]),
        (None, 1000, 1000, [2, 2, 3, 4, 5, 6, 7]),
        # A run without any checkpoint starts again.
        (1000, 1, 1, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_a_run_keeps_its_checkpoints_unless_others_are_asked_for(
    begun_with, asked, in_force, rounds, undisturbed, tmp_path
):
    seen = []

    def stop_at_once(progress):
        seen.append(progress.round)
        raise Stop

    with pytest.raises(Stop):
        small_run(tmp_path / "run", checkpoint_every=begun_with, on_round=stop_after(5))
    how = {"resume": True, "checkpoint_every": asked, "on_round": stop_at_once}
    with pytest.raises(Stop):
        small_run(tmp_path / "run", **how)
    # What was asked for stays in force.
    how |= {"checkpoint_every": None, "on_round": lambda progress: seen.append(progress.round)}
    small_run(tmp_path / "run", **how)
    assert seen == rounds
    assert promised(tmp_path / "run") == promised(undisturbed(checkpoint_every=in_force))
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["checkpoint_every"] == in_force


def test_a_lost_checkpoint_is_noticed_with_other_checkpoints_too(tmp_path):
    with pytest.raises(Stop):
        small_run(tmp_path / "run", checkpoint_every=1, on_round=stop_after(3))
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    before = contents(tmp_path / "run")
    with pytest.raises(RunError, match="journals of past rounds but no checkpoint"):
        small_run(tmp_path / "run", checkpoint_every=1000, resume=True)
    assert contents(tmp_path / "run") == before


def test_other_checkpoints_change_nothing_in_a_finished_run(tmp_path):
    small_run(tmp_path / "run", checkpoint_every=3)
    before = contents(tmp_path / "run")
    assert (
        small_run(tmp_path / "run", checkpoint_every=2, resume=True).config["checkpoint_every"] == 3
    )
    assert contents(tmp_path / "run") == before


def test_checkpoints_of_older_versions_contain_their_distance(tmp_path, monkeypatch):
    """They are still resumed: their hash of the settings contains the setting."""
    with monkeypatch.context() as older:
        identity_of = api.identity_of
        older.setattr(
            api, "identity_of", lambda config, *_: identity_of(config, config["checkpoint_every"])
        )
        with pytest.raises(Stop):
            small_run(tmp_path / "run", checkpoint_every=2, on_round=stop_after(3))
    small_run(tmp_path / "run", checkpoint_every=None, resume=True)
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("checkpoint_every", [1, 3])
@pytest.mark.parametrize("since_best", [-2, 0, 1])
@pytest.mark.parametrize(("method", "patience"), [("fedavg", 3), ("local", 2)])
def test_resuming_keeps_the_best_round_and_the_patience(
    method, patience, since_best, checkpoint_every, undisturbed, tmp_path
):
    evaluation = Evaluation(select="best", patience=patience)
    how = {
        "method": method,
        "checkpoint_every": checkpoint_every,
        "evaluation": evaluation,
        "rounds": 20,
    }
    whole = undisturbed(**how)
    summary = json.loads((whole / "summary.json").read_text())
    assert 3 <= summary["round"] == summary["rounds"] - patience < 20 - patience
    with pytest.raises(Stop):
        small_run(tmp_path / "run", **how, on_round=stop_after(summary["round"] + since_best))
    small_run(tmp_path / "run", **how, resume=True)
    assert promised(tmp_path / "run") == promised(whole)


def test_breaking_off_after_every_round_changes_nothing(undisturbed, tmp_path):
    how = {"method": "scaffold", "evaluation": Evaluation(every=2)}
    for number in range(1, TRAINING.rounds):
        with pytest.raises(Stop):
            small_run(tmp_path / "run", **how, resume=True, on_round=stop_after(number))
    small_run(tmp_path / "run", **how, resume=True)
    assert promised(tmp_path / "run") == promised(undisturbed(**how))


def test_resuming_a_finished_run_changes_nothing_and_gives_its_summary(tmp_path):
    first = small_run(tmp_path / "run", "local", evaluation=Evaluation(select="best"))
    before = {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (tmp_path / "run").iterdir()
    }

    def no_more(progress):
        raise AssertionError("a finished run trained again")

    again = small_run(
        tmp_path / "run",
        "local",
        evaluation=Evaluation(select="best"),
        resume=True,
        on_round=no_more,
    )
    after = {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (tmp_path / "run").iterdir()
    }
    assert after == before
    assert again.summary == first.summary
    one, other = first.model(4).state_dict(), again.model(4).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_resuming_a_run_that_patience_ended_between_checkpoints_changes_nothing(tmp_path):
    how = {"evaluation": Evaluation(patience=3), "rounds": 20, "checkpoint_every": 20}
    first = small_run(tmp_path / "run", **how)
    before = promised(tmp_path / "run")
    again = small_run(tmp_path / "run", **how, resume=True)
    assert again.summary == first.summary
    assert promised(tmp_path / "run") == before
    assert again.trainer.state.round == first.summary["rounds"] < 20


def test_a_run_broken_off_before_its_summary_is_completed_without_training(tmp_path):
    small_run(tmp_path / "run")
    wanted = promised(tmp_path / "run")
    for name in ("summary.json", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    small_run(tmp_path / "run", resume=True, on_round=stop_after(TRAINING.rounds))
    assert promised(tmp_path / "run") == wanted


def test_resuming_an_empty_or_missing_directory_starts_from_the_beginning(undisturbed, tmp_path):
    wanted = promised(undisturbed(method="fedavg"))
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        small_run(tmp_path / name, resume=True)
        assert promised(tmp_path / name) == wanted


def test_a_run_that_ends_early_says_why(capsys):
    evaluation = Evaluation(patience=1)
    run = small_run(rounds=200, evaluation=evaluation)
    show_run(run)
    made = run.summary["rounds"]
    assert made < 200
    said = " ".join(capsys.readouterr().out.split())
    assert f"ended after {made} of 200 rounds: no better value in 1 evaluation" in said
    run.summary["stopped"] = "enough"
    show_run(run)
    assert f"ended after {made} of 200 rounds: enough" in capsys.readouterr().out
    show_run(small_run(evaluation=evaluation, rounds=1))
    assert "ended after" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["config.yaml", "checkpoint.safetensors", "summary.json", "model.safetensors"]
)
def test_leftovers_of_an_interrupted_write_do_not_matter(name, undisturbed, tmp_path):
    how = {"method": "scaffold"}
    with pytest.raises(Stop):
        small_run(tmp_path / "run", **how, on_round=stop_after(4))
    (tmp_path / "run" / f"{name}.tmp").write_bytes(b"half a fi")
    small_run(tmp_path / "run", **how, resume=True)
    assert promised(tmp_path / "run") == promised(undisturbed(**how))


def test_a_process_killed_while_it_wrote_its_very_first_file_can_be_resumed(undisturbed, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml.tmp").write_bytes(b"method:\n  na")
    small_run(tmp_path / "run", resume=True)
    assert promised(tmp_path / "run") == promised(undisturbed(method="fedavg"))


def test_rows_written_after_the_checkpoint_are_dropped(undisturbed, tmp_path):
    with pytest.raises(Stop):
        small_run(tmp_path / "run", on_round=stop_after(3))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "model": "glo')
    small_run(tmp_path / "run", resume=True)
    assert promised(tmp_path / "run") == promised(undisturbed(method="fedavg"))


def test_a_checkpoint_holds_the_server_state_and_the_memories_of_those_who_took_part(tmp_path):
    with pytest.raises(Stop):
        small_run(tmp_path / "run", "scaffold", on_round=stop_after(1))
    tensors, note = load_tensors(tmp_path / "run" / "checkpoint.safetensors")
    assert note["round"] == 1
    assert len(tensors["memory/clients"]) == TRAINING.cohort
    shapes = {
        name.removeprefix("model/"): tuple(t.shape)
        for name, t in tensors.items()
        if name.startswith("model/")
    }
    for name, shape in shapes.items():
        assert tuple(tensors[f"memory/control/{name}"].shape) == (TRAINING.cohort, *shape)
        assert tuple(tensors[f"server/control/{name}"].shape) == shape
        # From c = 0 and c_k = 0, option II gives c⁺ = |S|/N · mean of c_k⁺, with N = 8 registered
        # clients.
        wanted = tensors[f"memory/control/{name}"].double().mean(0) * (TRAINING.cohort / 8)
        torch.testing.assert_close(
            tensors[f"server/control/{name}"].double(), wanted, rtol=1e-5, atol=1e-7
        )


def test_a_measured_chunk_is_written_down_and_used_again(tmp_path, monkeypatch):
    machine = Machine(chunk="measure")
    with pytest.raises(Stop):
        small_run(tmp_path / "run", machine=machine, on_round=stop_after(3))
    before = (tmp_path / "run" / "config.yaml").read_bytes()

    def refuse(self):
        raise AssertionError("measured again")

    monkeypatch.setattr(Trainer, "measure_chunk", refuse)
    resumed = small_run(tmp_path / "run", machine=machine, resume=True)
    chunk = resumed.config["resolved"]["chunk"]
    assert chunk in (1, TRAINING.cohort)
    assert resumed.trainer.engine.chunk == chunk
    assert f"  chunk: {chunk}\n".encode() in before
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before
    # Measuring trains, but has no effect: the run equals one with a given chunk.
    small_run(tmp_path / "given", machine=Machine(chunk=chunk))
    assert promised(tmp_path / "run") == promised(tmp_path / "given")


def test_measuring_leaves_no_memory_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "equipoise.run.round_training.fastest", lambda candidates, seconds: (seconds(2), 2)[1]
    )
    small_run(tmp_path / "measured", "scaffold", machine=Machine(chunk="measure"))
    small_run(tmp_path / "given", "scaffold", machine=Machine(chunk=2))
    assert promised(tmp_path / "measured") == promised(tmp_path / "given")


def test_without_a_directory_a_run_gives_the_same_numbers_and_writes_nothing(
    undisturbed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with_files = undisturbed(method="local")
    run = small_run(method="local")
    assert list(tmp_path.iterdir()) == []
    assert list(run.trainer.metrics) == rows_of(with_files)
    assert run.summary == small_run(with_files, method="local", resume=True).summary


def test_a_moved_directory_can_be_resumed(undisturbed, tmp_path):
    with pytest.raises(Stop):
        small_run(tmp_path / "run", on_round=stop_after(3))
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    small_run(tmp_path / "elsewhere", resume=True)
    assert promised(tmp_path / "elsewhere") == promised(undisturbed(method="fedavg"))


# ---- checkpoints that are gone -------------------------------------------------------------------


def everything_in(directory):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()}


def test_a_finished_run_without_its_checkpoint_is_left_as_it_is(tmp_path):
    small_run(tmp_path / "run")
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    before = everything_in(tmp_path / "run")
    with pytest.raises(
        RunError,
        match=r"is finished, but its checkpoint.safetensors is missing; its results are intact",
    ):
        small_run(tmp_path / "run", resume=True)
    assert everything_in(tmp_path / "run") == before
    assert {"metrics.jsonl", "rounds.jsonl", "summary.json"} <= set(before)


@pytest.mark.parametrize(("every", "finished"), [(1, 3), (2, 3), (2, 5)])
def test_an_unfinished_run_without_its_checkpoint_is_left_as_it_is(every, finished, tmp_path):
    with pytest.raises(Stop):
        small_run(tmp_path / "run", checkpoint_every=every, on_round=stop_after(finished))
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    before = everything_in(tmp_path / "run")
    with pytest.raises(
        RunError,
        match="has journals of past rounds but no checkpoint, so the run cannot be resumed",
    ):
        small_run(tmp_path / "run", checkpoint_every=every, resume=True)
    assert everything_in(tmp_path / "run") == before


@pytest.mark.parametrize(
    "half_a_row", [b"", b'{"round": 3, "coh'], ids=["whole rows", "half a row"]
)
@pytest.mark.parametrize("journal", ["rounds", "metrics"])
def test_a_run_killed_before_its_first_checkpoint_begins_anew(
    journal, half_a_row, undisturbed, tmp_path
):
    with pytest.raises(Stop):
        small_run(tmp_path / "run", checkpoint_every=5, on_round=stop_after(2))
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()
    assert [row["round"] for row in rows_of(tmp_path / "run", "rounds")] == [1, 2]
    with (tmp_path / "run" / f"{journal}.jsonl").open("ab") as file:
        file.write(half_a_row)
    small_run(tmp_path / "run", checkpoint_every=5, resume=True)
    assert promised(tmp_path / "run") == promised(undisturbed(checkpoint_every=5))


# ---- modules of one's own ------------------------------------------------------------------------


class Activation(nn.Module):
    """A layer that prints the function that it applies, including its address."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def extra_repr(self):
        return repr(self.function)

    def forward(self, x):
        return self.function(x)


def module(width=8, dropout=0.1, activation=None, dtype=torch.float32, seed=7):
    torch.manual_seed(seed)
    layers = (
        nn.Linear(5, width),
        nn.BatchNorm1d(width),
        activation or nn.ReLU(),
        nn.Dropout(dropout),
    )
    return Model(nn.Sequential(*layers), nn.Linear(width, 3)).to(dtype)


def test_a_head_that_never_moves_is_the_same_after_resuming(tmp_path):
    how = {"method": "fedbabu", "model": module(), "optimizer": optimizer_named("adamw", lr=0.02)}
    small_run(tmp_path / "whole", **how)
    with pytest.raises(Stop):
        small_run(tmp_path / "run", **how, on_round=stop_after(3))
    small_run(tmp_path / "run", **how, resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")


@pytest.mark.parametrize(
    "other",
    [{"width": 9}, {"dropout": 0.9}, {"activation": nn.Sigmoid()}, {"dtype": torch.float64}],
    ids=lambda other: next(iter(other)),
)
def test_another_module_is_not_resumed(other, tmp_path):
    with pytest.raises(Stop):
        small_run(tmp_path / "run", model=module(), on_round=stop_after(3))
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(
        InputError,
        match=r"holds another experiment: resolved.module is '\w{16}' there and '\w{16}' here; "
        "pass the module the run began with or choose another directory",
    ):
        small_run(tmp_path / "run", model=module(**other), resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_module_built_again_is_resumed_whatever_its_values(tmp_path):
    small_run(tmp_path / "whole", model=module())
    with pytest.raises(Stop):
        small_run(tmp_path / "run", model=module(), on_round=stop_after(3))
    small_run(tmp_path / "run", model=module(seed=8), resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")


def test_the_address_of_a_function_is_no_part_of_a_module(tmp_path):
    """A new function has another address, as in another process."""
    one, other = (lambda x: F.relu(x) for _ in range(2))
    assert repr(one) != repr(other)
    with pytest.raises(Stop):
        small_run(
            tmp_path / "run", model=module(activation=Activation(one)), on_round=stop_after(3)
        )
    small_run(tmp_path / "run", model=module(activation=Activation(other)), resume=True)


def test_a_directory_that_says_nothing_of_its_module_is_resumed(tmp_path):
    small_run(tmp_path / "whole", model=module())
    with pytest.raises(Stop):
        small_run(tmp_path / "run", model=module(), on_round=stop_after(3))
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    del config["resolved"]["module"]
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    # Runs of older versions have no checksums either.
    (tmp_path / "run" / "SHA256SUMS").unlink()
    small_run(tmp_path / "run", model=module(), resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")


def test_only_a_module_of_ones_own_is_written_down():
    assert "module" not in small_run(rounds=1).config["resolved"]
    assert "module" in small_run(rounds=1, model=module()).config["resolved"]
