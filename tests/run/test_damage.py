"""Damaged or edited files of a run are detected, whatever the file and the position."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from equipoise import Evaluation, load, train
from equipoise.errors import InputError, RunError
from equipoise.report import write_report
from equipoise.run import files
from equipoise.run.checksums import read_sums, verify
from equipoise.run.files import load_tensors, save_tensors
from equipoise.study.runs import finished
from tests.run.small import Stop, federation, promised, small_run, stop_after
from tests.trials import trials

HOW = {
    "method": "ditto",
    "evaluation": Evaluation(select="best", local=True, keep_local=True),
    "rounds": 4,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the directory of a finished run with every kind of file."""
    directory = tmp_path_factory.mktemp("damage") / "whole"
    small_run(directory, **HOW)
    return directory


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory):
    """Return the directory of a run that was killed after three rounds."""
    directory = tmp_path_factory.mktemp("damage") / "broken-off"
    with pytest.raises(Stop):
        small_run(directory, **HOW, on_round=stop_after(3))
    return directory


def use(directory):
    """Use a run directory in all ways: resume it, load its models, report on it."""
    small_run(directory, **HOW, resume=True)
    load(directory)
    load(directory, 1)
    load(
        directory,
        client=files.load_tensors(directory / "local.safetensors")[1]["clients"][0],
        local=True,
    )
    write_report([directory], directory.parent / "report.html")


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def damaged(original, tmp_path, seed, *, cut):
    """Copy a run directory and flip a random bit of a file, or truncate a file."""
    chance = random.Random(seed)
    directory = tmp_path / f"damaged-{seed}"
    shutil.copytree(original, directory)
    paths = sorted(path for path in directory.iterdir() if path.stat().st_size)
    path = chance.choice(paths)
    size = path.stat().st_size
    if cut:
        os.truncate(path, chance.randrange(size))
    else:
        flip(path, chance.randrange(8 * size))
    return directory, path.name


def check(original, tmp_path, seeds, *, cut=False):
    unnoticed = []
    for seed in seeds:
        directory, name = damaged(original, tmp_path, seed, cut=cut)
        try:
            use(directory)
        except (RunError, InputError):
            pass
        else:
            unnoticed.append((seed, name))
        shutil.rmtree(directory)
    assert unnoticed == []


def test_nothing_is_wrong_with_the_runs_themselves(whole, broken_off, tmp_path):
    for original in (whole, broken_off):
        shutil.copytree(original, tmp_path / original.name)
        use(tmp_path / original.name)
    assert promised(tmp_path / broken_off.name) == promised(whole)


def test_flipped_bits_are_noticed(whole, broken_off, tmp_path):
    check(whole, tmp_path, range(10))
    check(broken_off, tmp_path, range(10, 20))


def test_cut_files_are_noticed(whole, broken_off, tmp_path):
    check(whole, tmp_path, range(5), cut=True)
    check(broken_off, tmp_path, range(5, 10), cut=True)


@pytest.mark.slow
def test_many_flipped_bits_and_cut_files_are_noticed(whole, broken_off, tmp_path):
    flips, cuts = trials(500), trials(100)
    check(whole, tmp_path, range(flips))
    check(broken_off, tmp_path, range(flips, 2 * flips))
    check(whole, tmp_path, range(cuts), cut=True)
    check(broken_off, tmp_path, range(cuts, 2 * cuts), cut=True)


def test_bits_anywhere_in_a_file_count(tmp_path):
    path = tmp_path / "model.safetensors"
    save_tensors(
        path, {"w": torch.tensor([1.0, -2.0]), "n": torch.tensor(3)}, {"round": 1, "name": "é"}
    )
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        path.write_bytes(whole)
        flip(path, bit)
        with pytest.raises(RunError, match=r"model.safetensors"):
            load_tensors(path)


# ---- edited files --------------------------------------------------------------------------------


@pytest.fixture
def killed(broken_off, tmp_path):
    return shutil.copytree(broken_off, tmp_path / "killed")


def test_an_edited_configuration_is_noticed(killed):
    config = yaml.safe_load((killed / "config.yaml").read_text())
    config["training"]["optimizer"]["lr"] = 0.05
    (killed / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    with pytest.raises(
        RunError,
        match=r"config.yaml differs from what the run wrote: its SHA-256 is not that in SHA256SUMS",
    ):
        small_run(killed, **HOW, resume=True)


@pytest.mark.parametrize("journal", ["metrics", "rounds", "timings"])
def test_a_journal_edited_in_place_is_noticed_and_left_as_it_is(journal, killed):
    path = killed / f"{journal}.jsonl"
    text = path.read_text()
    place = text.index('"round": 2') + 9
    path.write_text(text[:place] + "1" + text[place + 1 :])
    before = {each.name: each.read_bytes() for each in killed.iterdir()}
    with pytest.raises(
        RunError, match=f"{journal}.jsonl was changed since the checkpoint was written"
    ):
        small_run(killed, **HOW, resume=True)
    assert {each.name: each.read_bytes() for each in killed.iterdir()} == before


def test_the_checkpoint_of_another_seed_is_refused(killed, tmp_path):
    with pytest.raises(Stop):
        small_run(tmp_path / "other", **HOW, seed=4, on_round=stop_after(2))
    shutil.copy(tmp_path / "other" / "checkpoint.safetensors", killed)
    with pytest.raises(RunError, match=r"checkpoint.safetensors is the checkpoint of another run"):
        small_run(killed, **HOW, resume=True)


def test_the_checkpoint_of_another_model_is_refused(killed, tmp_path):
    with pytest.raises(Stop):
        small_run(
            tmp_path / "other", **HOW, model={"name": "mlp", "hidden": [7]}, on_round=stop_after(2)
        )
    shutil.copy(tmp_path / "other" / "checkpoint.safetensors", killed)
    with pytest.raises(
        RunError, match=r"is a checkpoint of another model: features.1.bias differs"
    ):
        small_run(killed, **HOW, resume=True)


def test_rows_appended_to_a_finished_run_are_noticed_and_kept(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    with (run / "rounds.jsonl").open("a") as file:
        file.write('{"round": 9}\n')
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(RunError, match=r"rounds.jsonl differs from what the run wrote"):
        small_run(run, **HOW, resume=True)
    (run / "SHA256SUMS").unlink()
    # Without checksums damage is not detected, but a finished run is not changed either.
    small_run(run, **HOW, resume=True)
    del before["SHA256SUMS"]
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_summary_that_was_cut_off_is_one_line(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    os.truncate(run / "summary.json", 100)
    for look in (write_report, lambda paths: finished(paths[0], "test")):
        with pytest.raises(RunError, match=r"summary.json differs from what the run wrote"):
            look([run])
    (run / "SHA256SUMS").unlink()
    for look in (
        write_report,
        lambda paths: finished(paths[0], "test"),
        lambda paths: small_run(paths[0], **HOW, resume=True),
    ):
        with pytest.raises(RunError, match=r"cannot read .*summary.json"):
            look([run])


def test_checksums_are_those_of_sha256sum(whole):
    names = {
        "config.yaml",
        "metrics.jsonl",
        "rounds.jsonl",
        "timings.jsonl",
        "names.json",
        "summary.json",
    }
    assert set(read_sums(whole)) == names
    for name, digest in read_sums(whole).items():
        assert hashlib.sha256((whole / name).read_bytes()).hexdigest() == digest
    if shutil.which("sha256sum"):
        assert (
            subprocess.run(["sha256sum", "--check", "--status", "SHA256SUMS"], cwd=whole).returncode
            == 0
        )


@pytest.mark.parametrize(
    "text", ["", "0" * 64 + " config.yaml\n", "0" * 63 + "  config.yaml\n", "\xff"]
)
def test_damaged_checksums_are_refused(text, whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "SHA256SUMS").write_bytes(text.encode("latin1"))
    with pytest.raises(RunError, match="SHA256SUMS"):
        verify(run, "config.yaml")


# ---- runs of older versions ----------------------------------------------------------------------


def as_before_checksums(directory):
    """Remove all checksums from a run directory."""
    (directory / "SHA256SUMS").unlink()
    for path in directory.glob("*.safetensors"):
        tensors, note = load_tensors(path)
        for key in ("sha256", "run"):
            note.pop(key, None)
        save_file(tensors, path, {"equipoise": json.dumps(note, sort_keys=True)})
        with safe_open(path, "pt") as file:
            assert "sha256" not in file.metadata()["equipoise"]


def test_runs_without_checksums_are_used_as_before(whole, broken_off, tmp_path):
    for original in (whole, broken_off):
        run = shutil.copytree(original, tmp_path / original.name)
        as_before_checksums(run)
        use(run)
        assert not (run / "SHA256SUMS").exists()
        for name, content in promised(whole).items():
            if name.endswith(".safetensors"):
                found, wanted = load_tensors(run / name)[0], load_tensors(whole / name)[0]
                assert all(torch.equal(found[key], wanted[key]) for key in wanted)
            else:
                assert (run / name).read_bytes() == content


# ---- full disks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "checkpoint.safetensors", "summary.json", "config.yaml"]
)
def test_a_full_disk_names_the_file(name, tmp_path, monkeypatch):
    """The file system is full when one of the files is written."""
    real = os.fsync

    def full(number):
        if name.split(".")[0] in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=rf"cannot write .*{name}: No space left on device"):
        train(federation(), rounds=2, out=tmp_path / "run")
    monkeypatch.undo()
    train(federation(), rounds=2, out=tmp_path / "run", resume=True)
    train(federation(), rounds=2, out=tmp_path / "alone")
    assert promised(tmp_path / "run") == promised(tmp_path / "alone")
