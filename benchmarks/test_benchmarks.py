"""The bare loop, the distance and the summary, against numbers worked out otherwise."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import environments, jobs, speed
from benchmarks.machine import Rates
from benchmarks.peers import bare, equipoise_engine
from benchmarks.protocol import Clock, Job, Pass, Work
from equipoise.errors import InputError

TINY = Job(
    name="small",
    model="logistic",
    options={},
    shape=(3,),
    classes=2,
    clients=3,
    samples=5,
    cohort=2,
    batch=2,
    epochs=2,
    lr=0.5,
    seed=0,
    threads=1,
    tolerance=1e-4,
    timed=Pass("timed", 1, 2, shuffle=True, dropout=True),
    exact=Pass("exact", 0, 3, shuffle=False, dropout=False),
)


def by_hand(
    weight: np.ndarray, bias: np.ndarray, x: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Train softmax regression on one client of TINY in plain numpy."""
    weight, bias = weight.copy(), bias.copy()
    for _ in range(2):
        for start in (0, 2, 4):
            batch_x, batch_y = x[start : start + 2], y[start : start + 2]
            scores = np.exp(batch_x @ weight.T + bias)
            error = scores / scores.sum(axis=1, keepdims=True) - np.eye(2)[batch_y]
            weight -= 0.5 * error.T @ batch_x / len(batch_x)
            bias -= 0.5 * error.mean(axis=0)
    return weight, bias


def test_bare_loop_is_federated_averaging(tmp_path: Path) -> None:
    jobs.materialize(TINY, tmp_path)
    final = bare.train(Work(TINY, tmp_path, torch.device("cpu")), TINY.exact, lambda: None)

    x, y = (tensor.numpy() for tensor in jobs.draw(TINY))
    weight, bias = (
        tensor.double().numpy()
        for tensor in torch.load(tmp_path / "initial.pt", weights_only=True).values()
    )
    for cohort in ([0, 1], [2, 0], [1, 2]):
        (weight_a, bias_a), (weight_b, bias_b) = (
            by_hand(weight, bias, x[client], y[client]) for client in cohort
        )
        weight, bias = (weight_a + weight_b) / 2, (bias_a + bias_b) / 2
    got_weight, got_bias = (tensor.numpy() for tensor in final.values())
    np.testing.assert_allclose(got_weight, weight, rtol=1e-5)
    np.testing.assert_allclose(got_bias, bias, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "job",
    [
        TINY,
        dataclasses.replace(
            TINY,
            model="textlstm",
            options={"hidden": 3, "embedding": 2},
            shape=(4,),
            classes=5,
        ),
    ],
    ids=lambda job: job.model,
)
def test_the_engine_does_the_same_work_as_the_bare_loop(job: Job, tmp_path: Path) -> None:
    jobs.materialize(job, tmp_path)
    work, ended = Work(job, tmp_path, torch.device("cpu")), []
    reference, final = (
        peer.train(work, job.exact, lambda: ended.append(None)) for peer in (bare, equipoise_engine)
    )
    initial = torch.load(tmp_path / "initial.pt", weights_only=True)
    assert len(ended) == 2 * job.exact.rounds
    assert speed.distance(final, reference, initial)["of_move"] < job.tolerance


@pytest.mark.slow
def test_processes_of_equipoise_do_the_same_work_and_are_reported(tmp_path: Path) -> None:
    """The peer's script starts the processes that its job asks for, and its result says so."""
    job = dataclasses.replace(TINY, processes=2)
    jobs.materialize(job, tmp_path)
    peer = environments.PEERS["equipoise"]
    out = tmp_path / "equipoise-0.json"
    command = [sys.executable, peer.path, "--job", tmp_path, "--out", out]
    subprocess.run(
        list(map(str, command)),
        env=environments.variables(peer, environments.Choices(), job.threads),
        check=True,
        timeout=120,
    )
    assert json.loads(out.read_text())["threads"] == "1 torch threads, 2 processes"
    reference = bare.train(Work(job, tmp_path, torch.device("cpu")), job.exact, lambda: None)
    initial, final = (
        torch.load(tmp_path / name, weights_only=True) for name in ("initial.pt", "equipoise-0.pt")
    )
    assert speed.distance(final, reference, initial)["of_move"] < job.tolerance


def test_job_survives_the_directory(tmp_path: Path) -> None:
    x, y = jobs.draw(TINY)
    TINY.write(tmp_path, {"w": torch.ones(1)}, x, y)
    assert Job.read(tmp_path) == TINY
    read_x, read_y = Work(TINY, tmp_path, torch.device("cpu")).data()
    assert torch.equal(read_x, x)
    assert torch.equal(read_y, y)


@pytest.mark.parametrize(("dropout", "p"), [(True, 0.25), (False, 0.0)])
def test_dropout_is_off_only_where_asked(tmp_path: Path, dropout: bool, p: float) -> None:
    job = dataclasses.replace(TINY, model="mlp", options={"hidden": [4], "dropout": 0.25})
    jobs.materialize(job, tmp_path)
    model = Work(job, tmp_path, torch.device("cpu")).model(
        dataclasses.replace(job.exact, dropout=dropout)
    )
    assert [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)] == [p]


def test_clock_leaves_warmup_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([10.0, 11.0, 13.0, 16.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ends))
    clock = Clock(
        Pass("timed", warmup=2, rounds=2, shuffle=False, dropout=False), torch.device("cpu")
    )
    for _ in range(4):
        clock.round_done()
    assert clock.round_seconds == [2.0, 3.0]
    assert clock.peak["resident_mib"] > 50


def test_processes_reach_the_job() -> None:
    arguments = speed._parser().parse_args(["--processes", "2"])
    made = jobs.make("small", device="cpu", threads=2, processes=arguments.processes)
    assert made.processes == 2
    assert equipoise_engine.in_words(made) == "2 processes"
    assert equipoise_engine.in_words(TINY) == "one process"


def test_jobs_have_the_agreed_sizes() -> None:
    sizes = {name: jobs.make(name, device="cpu", threads=2) for name in jobs.NAMES}
    assert {name: job.steps_per_round for name, job in sizes.items()} == {
        "small": 500,
        "pfl": 250,
        "big": 50,
        "text": 155,
    }
    assert sizes["pfl"].cohort_of(20) == list(range(50))


def results(rate: float, *, error: float = 1e-7) -> dict[str, object]:
    """Make the part of a peer's result that the summary reads."""
    return {
        "client_steps_per_second": {"median": rate, "total": rate},
        "seconds_per_round": 1 / rate,
        "peak": {"resident_mib": 1.0},
        "float32_error": {"matmul": error},
        "threads": "1",
        "device": "here",
        "versions": {},
    }


def test_summary_takes_medians_and_names_problems() -> None:
    runs = {
        "bare": [results(rate) for rate in (10.0, 30.0, 20.0)],
        "equipoise": [results(50.0), results(60.0), results(300.0, error=3e-4)],
    }
    distances = {
        "bare": {"relative": 0.0, "of_move": 0.0},
        "equipoise": {"relative": 1e-9, "of_move": math.nan},
    }
    limit = {"operations": 8, "bytes": 5e6, "client_steps_per_second": 240.0, "bound": "bytes"}
    summary = speed.summarize(TINY, runs, distances, {"pfl": "pfl failed"}, limit)
    assert summary["peers"]["bare"]["client_steps_per_second"] == 20
    assert (summary["peers"]["bare"]["lowest"], summary["peers"]["bare"]["highest"]) == (10, 30)
    assert summary["ratios"] == {"bare": 3.0}
    failed, different, tf32 = summary["problems"]
    assert failed == "pfl failed"
    assert "same work" in different
    assert "TF32" in tf32
    assert summary["peers"]["equipoise"]["share_of_limit"] == 0.25
    machine = dataclasses.asdict(Rates(2e12, 3e9, "here", "float32"))
    text = speed.markdown(
        {"device": "cpu", "tf32": False, "machine": machine, "notes": []}
        | {"jobs": {"small": summary}}
    )
    assert "3.00 times as fast" in text
    assert "25.0 %" in text
    assert "here: 2 TFLOP/s in float32, 3 GB/s" in text
    assert "8 FLOP and 5 MB at least; the limit is that of bytes" in text


def test_the_limit_of_a_job_by_hand() -> None:
    """Softmax regression of 3 numbers on 2 classes, batches of 2, with a bias."""
    limit = speed.limit_of(TINY, Rates(operations=1.0, bytes=100.0, device="", precision=""))
    # One product forwards and one for the weights' gradient: 2 samples x 3 x 2, twice two.
    assert limit["operations"] == 2 * 2 * 12
    # 6 inputs read twice, 4 outputs written and their gradients read, 8 parameters three times.
    assert limit["bytes"] == 4 * (12 + 8 + 24)
    assert limit["bound"] == "operations"
    assert limit["client_steps_per_second"] == pytest.approx(1 / 48)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "smal"], "did you mean 'small'"),
        (["--peers", "bear"], "did you mean 'bare'"),
        (["--env", "pfl=/nowhere"], "names no directory"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--processes", "0"], "--processes is 0"),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speed.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_environment_without_python_is_refused(tmp_path: Path) -> None:
    choices = environments.Choices(envs={"pfl": tmp_path})
    with pytest.raises(InputError, match="--env pfl"):
        environments.interpreter(environments.PEERS["pfl"], choices)
