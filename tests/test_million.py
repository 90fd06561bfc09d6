"""A million registered clients need memory only for the cohort and for clients' memories."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from equipoise.run.files import load_tensors
from tests.peak import PEAK
from tests.run.small import rows_of

CLIENTS, SAMPLES, COHORT, ROUNDS = 1_000_000, 10, 100, 3
PROGRAM = f"""
import json, sys
import numpy as np
import torch
from equipoise import Evaluation, Federation, train
from equipoise.federation import Split

torch.set_num_threads(1)
rng = np.random.default_rng(0)
nobody = Split(np.empty(0, np.int64), np.zeros({CLIENTS} + 1, np.int64))
federation = Federation(
    x=torch.from_numpy(rng.normal(size=(2000, 8, 8)).astype(np.float32)),
    y=torch.from_numpy(rng.integers(0, 10, 2000)),
    train=Split(rng.integers(0, 2000, {CLIENTS * SAMPLES}), np.arange({CLIENTS} + 1) * {SAMPLES}),
    val=nobody,
    test=nobody,
    groups=np.arange({CLIENTS}) % 7,
    group_names=tuple("abcdefg"),
    unseen=np.arange({CLIENTS}) % 1000 == 0,
    classes=10,
)
run = train(
    federation, method="scaffold", rounds={ROUNDS}, cohort={COHORT}, batch_size=5,
    evaluation=Evaluation(every=0),
    out=sys.argv[1],
)
print(json.dumps({{"peak": peak(), "rounds": run.summary["rounds"]}}))
"""


@pytest.fixture(scope="module")
def million(tmp_path_factory):
    out = tmp_path_factory.mktemp("million") / "run"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK + PROGRAM, str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_a_million_clients_fit_into_two_gigabytes(million):
    _, said = million
    assert said["rounds"] == ROUNDS
    assert said["peak"] < 2e9


def test_every_round_has_its_cohort_and_only_they_are_remembered(million):
    out, _ = million
    assert [row["cohort"] for row in rows_of(out, "rounds")] == [COHORT] * ROUNDS
    tensors, _ = load_tensors(out / "checkpoint.safetensors")
    who = tensors["memory/clients"]
    # Three draws of a hundred out of a million: two share a client in about one of thirty runs.
    assert COHORT * ROUNDS - 3 <= len(who) <= COHORT * ROUNDS
    assert len(who.unique()) == len(who)
    assert all(
        len(stack) == len(who) for name, stack in tensors.items() if name.startswith("memory/")
    )
    assert (who % 1000 != 0).all(), "an unseen client trained"
    # Of 300 uniform draws the mean is within five standard errors of the middle, and a tenth holds
    # about thirty.
    assert abs(float(who.double().mean()) - CLIENTS / 2) < 5 * CLIENTS / (12 * len(who)) ** 0.5
    assert all(
        10 < int(((who >= low) & (who < low + CLIENTS // 10)).sum()) < 60
        for low in range(0, CLIENTS, CLIENTS // 10)
    )


def test_what_is_moved_and_written_depends_on_the_cohort_alone(million):
    out, _ = million
    parameters = 64 * 64 + 64 + 64 * 10 + 10
    for row in rows_of(out, "rounds"):
        # Down: the model and the server's control variate.
        assert row["bytes_down"] == COHORT * 2 * 4 * parameters
    remembered = len(load_tensors(out / "checkpoint.safetensors")[0]["memory/clients"])
    # Model, control variate, one control variate per client that took part, and a header.
    assert (out / "checkpoint.safetensors").stat().st_size < (
        remembered + 2
    ) * 4 * parameters + 10_000
