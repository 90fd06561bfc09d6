"""Figures of attributes of samples in studies: columns, tables and tuning."""

from __future__ import annotations

import json

import pytest

from equipoise.errors import InputError
from equipoise.study import study_from, value_of
from equipoise.study.metrics import should_be_high
from tests.data.small_adult import write_adult

PARITY = "attributes.sex.demographic_parity_difference"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("adult")
    write_adult(root, train=500, test=300)
    data = {"name": "adult", "root": str(root), "splits": [0.7, 0.3, 0.0]}
    return {
        "data": data,
        "model": "logistic",
        "training": {"rounds": 2},
        "evaluation": {"min_cell": 1},
    }


def test_columns_are_looked_up_in_summaries(base, tmp_path):
    columns = [
        "mean",
        PARITY,
        f"val.global.{PARITY}",
        "attributes.race.worst",
        "attributes.age.worst",
    ]
    results = study_from({"base": base, "methods": ["fedavg", "ditto"], "metrics": columns}).run(
        tmp_path / "study"
    )
    for method, model in (("fedavg", "global"), ("ditto", "personal")):
        (path,) = [
            path for path in (tmp_path / "study").rglob("summary.json") if method in str(path)
        ]
        summary = json.loads(path.read_text())
        found = summary["results"][model]["seen"]["attributes"]
        assert value_of(summary, PARITY) == found["sex"]["demographic_parity_difference"]
        assert value_of(summary, "attributes.race.worst") == found["race"]["worst"]
        of_validation = summary["validation"]["global"]["seen"]["attributes"]["sex"][
            "demographic_parity_difference"
        ]
        assert value_of(summary, f"val.global.{PARITY}") == of_validation
        # The data have no such attribute.
        assert value_of(summary, "attributes.age.worst") is None
    assert PARITY in json.dumps(results.plain())


def test_each_figure_has_its_direction():
    assert not should_be_high(PARITY, higher_is_better=True)
    assert should_be_high("attributes.sex.equalized_odds_ratio", higher_is_better=False)
    assert should_be_high("attributes.sex.worst", higher_is_better=True)


def test_a_study_may_be_tuned_by_a_figure(base, tmp_path):
    grid = {"name": "fedprox", "grid": {"mu": [0.01, 30.0]}, "set": {"training.epochs": 3}}
    study = study_from(
        {"base": base, "methods": ["fedavg", grid], "tuning": {"by": PARITY, "tolerance": 1.0}},
        tune=True,
    )
    results = study.run(tmp_path / "runs")
    values = {
        mu: value_of(results.summaries[study.jobs[place].path], PARITY)
        for place, mu in ((1, 0.01), (2, 30.0))
    }
    assert values[0.01] != values[30.0]
    assert results.chosen("base") == {"fedprox": {"mu": min(values, key=values.__getitem__)}}


@pytest.mark.parametrize("name", ["attributes.sex", "attributes.sex.parity", "attributes"])
def test_unknown_figures_are_named(name, base):
    with pytest.raises(InputError, match=f"unknown metric {name!r} in metrics of the study"):
        study_from({"base": base, "methods": ["fedavg"], "metrics": [name]})
