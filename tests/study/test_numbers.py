"""Numbers in tables: three decimals, or more if they are small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from equipoise.cli.show.study import show_results
from equipoise.study import Results, study_from
from equipoise.study.numbers import Difference, number, numbers, style_of, with_spread

SEEDS = [0, 1]
STUDY = {
    "base": {"data": "digits"},
    "methods": ["fedavg", "fedprox", "local"],
    "seeds": SEEDS,
    "metrics": ["mean", "gap_variance", "sigma_clients"],
    "baseline": "fedavg",
}
# By method and seed: mean, variance of gaps, σ.
VALUES = {
    "fedavg": [(0.851, 0.00021, 0.0002), (0.853, 0.00033, 0.0004)],
    "fedprox": [(0.8512, 0.00003, 0.1), (0.8510, 0.00005, 0.2)],
    "local": [(0.7, 0.0, 0.3), (0.7, 0.0, 0.3)],
}


@pytest.fixture
def results():
    study = study_from(STUDY)
    found = {}
    for job in study.jobs:
        mean, gap, sigma = VALUES[job.method][job.seed]
        part = {"mean": mean, "gap_variance": gap, "sigma_clients": sigma, "groups": {}}
        summary = {"score": "accuracy", "round": 1, "results": {"global": {"seen": part}}}
        found[job.path] = summary
    return Results(study, found, {})


CELLS = {
    "fedavg": ["0.852 ± 0.001", "0.00027 ± 0.00008", "0.00030 ± 0.00014"],
    "fedprox": ["0.851 ± 0.000", "0.00004 ± 0.00001", "0.150 ± 0.071"],
    "local": ["0.700 ± 0.000", "0.00000 ± 0.00000", "0.300 ± 0.000"],
}


def test_a_column_of_small_numbers_has_more_decimals_everywhere(results, capsys):
    show_results(results, Path("runs"))
    unmarked = re.sub(r"\*\*|</?u>", "", results.markdown())
    tex = results.latex().replace("$\\pm$", "±")
    for text, between in (
        (capsys.readouterr().out, " +"),
        (unmarked, r" \| "),
        (re.sub(r"\\(textbf|underline)\{([^}]*)\}", r"\2", tex), " & "),
    ):
        for method, cells in CELLS.items():
            row = between.join(map(re.escape, [method, *cells]))
            assert re.search(row, text), (method, text)


def test_differences_have_the_decimals_of_their_metric(results):
    cells = [results.difference_cell("base", "fedprox", metric) for metric in STUDY["metrics"]]
    assert cells == [
        "-0.001 ± 0.001 (0.002; 2)",
        "-0.00023 ± 0.00005 (0.00007; 2)",
        "+0.150 ± 0.050 (0.071; 2)",
    ]


@pytest.mark.parametrize(
    ("values", "style"),
    [
        ([], ".3f"),
        ([None, 0.0], ".3f"),
        ([0.5, 0.0001], ".3f"),
        ([0.01], ".3f"),
        ([0.0099, -0.002], ".4f"),
        ([-0.00027], ".5f"),
        ([0.00001], ".6f"),
        ([0.000009], ".1e"),
    ],
)
def test_the_largest_number_decides(values, style):
    assert style_of(values) == style


def test_no_number_but_zero_is_shown_as_zero():
    assert number(0.0004) == "0.00040"
    assert number(-3e-9) == "-3.0e-09"
    assert number(0.0) == "0.000"
    assert number(0.0005) == "0.001"
    assert numbers([12345.6, 0.5, None, 0.0002]) == ["12,346", "0.500", "–", "0.00020"]


def test_a_spread_has_the_decimals_of_its_mean():
    assert with_spread(0.9, 0.00001) == "0.900 ± 0.000"
    assert with_spread(0.0004, 0.00012) == "0.00040 ± 0.00012"
    assert with_spread(3e-8, 1e-8, ".1e") == "3.0e-08 ± 1.0e-08"
    assert with_spread(1234.5, 12.5) == "1,234 ± 12.500"
    assert Difference.of([0.0001]).cell == "+0.000 (1)"
    assert Difference.of([0.0001]).in_style(".5f") == "+0.00010 (1)"
