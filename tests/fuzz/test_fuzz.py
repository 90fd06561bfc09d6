"""Odd configurations, arrays and files end in one line or a result, with little time and memory.

Cases are the same in every run.
"""

from __future__ import annotations

import resource
import time
import traceback
import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from equipoise import train
from equipoise.data import load
from equipoise.errors import InputError, RunError
from tests.fuzz.suites import SUITES
from tests.trials import trials

CASES = 60
ALL = 20_000


def fuzz(suite, folder, cases):
    """Try cases of a suite; return their number, how many were refused, and other outcomes."""
    tried, refused = 0, 0
    wrong = {}
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def one(data):
        nonlocal tried, refused
        tried += 1
        began = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                suite(data.draw, folder)
        except (InputError, RunError):
            refused += 1
        except Exception as error:
            # One of each kind is reported, and all are tried.
            place = traceback.extract_tb(error.__traceback__)[-1]
            wrong.setdefault(
                (type(error).__name__, place.filename, place.lineno), traceback.format_exc()
            )
        if (taken := time.monotonic() - began) > 10:
            wrong[f"took {taken} s"] = tried
        # In kB on Linux.
        if (grown := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) > 1_000_000:
            wrong[f"grew by {grown} kB"] = tried

    one()
    return tried, refused, "\n".join(map(str, wrong.items())).replace("\\n", "\n")


@pytest.fixture
def folder(tmp_path):
    train(load("digits"), model={"name": "mlp", "hidden": [4]}, rounds=2, out=tmp_path / "run")
    return tmp_path


@pytest.mark.parametrize("name", SUITES)
def test_a_few_cases(name, folder):
    tried, refused, wrong = fuzz(SUITES[name], folder, CASES)
    assert not wrong, wrong
    assert tried >= CASES * 0.9
    assert 0 < refused <= tried


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_many_cases(name, folder):
    cases = trials(ALL) // len(SUITES)
    tried, _, wrong = fuzz(SUITES[name], folder, cases)
    assert not wrong, wrong
    assert tried >= cases * 0.9
