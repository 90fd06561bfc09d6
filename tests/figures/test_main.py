"""Figures from the command line."""

from __future__ import annotations

import pytest

from equipoise import Evaluation, Machine, train
from equipoise.data import load
from equipoise.figures.__main__ import main

DATA = {"name": "digits", "leave_out": "textured"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("main") / "run"
    how = {"model": "logistic", "rounds": 1, "cohort": 3, "machine": Machine(device="cpu")}
    train(
        load(**DATA),
        data=DATA,
        method="faa",
        out=directory,
        evaluation=Evaluation(keep_local=True),
        **how,
    )
    return str(directory)


@pytest.mark.parametrize(
    "arguments",
    [
        ["gaps"],
        ["gaps", "--sweep"],
        ["surface", "--steps", "3"],
        ["embedding", "--samples", "4", "--by", "group"],
    ],
    ids=" ".join,
)
def test_figures(run, arguments, tmp_path, capsys):
    out = tmp_path / "figure.png"
    # Two runs of one method have separate panels.
    assert main([*arguments, "--out", str(out), "--", run, run]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.stat().st_size > 5000


def test_mistakes(run, tmp_path, capsys):
    assert main(["gaps", str(tmp_path), "--out", str(tmp_path / "a.png")]) == 1
    assert "error: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["surface", run])
    assert "--out" in capsys.readouterr().err
