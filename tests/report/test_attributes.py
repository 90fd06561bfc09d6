"""The section of a report on attributes of samples."""

from __future__ import annotations

import json

import numpy as np
import pytest

from equipoise import Evaluation, Federation, Training
from equipoise.parity import FIGURES
from equipoise.report import write_report
from tests.attributed import SAMPLES, attributed, people
from tests.report.pages import Page
from tests.run.small import small_run

TITLE = (2, "Attributes of samples: rates and parity by value")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "ditto"):
        small_run(
            folder / method,
            method,
            federation=attributed(unseen=[3]),
            model="logistic",
            training=Training(rounds=2),
            evaluation=Evaluation(min_cell=3),
        )
    return folder


def page_of(*paths):
    return Page(write_report(paths, paths[0] / "report.html").read_text(encoding="utf-8"))


def test_one_run_has_rates_by_value(runs):
    page = page_of(runs / "ditto")
    summary = json.loads((runs / "ditto" / "summary.json").read_text())
    assert TITLE in page.headings
    for who in ("seen", "unseen"):
        # Clients that were not part of training also adapt the model.
        found = summary["results"]["personal"][who]["attributes"]
        words = f"personal models, {who} clients, test data"
        for name, of in found.items():
            shown = page.table(f"By {name}: {words}")
            assert set(shown) == set(of["values"])
            for value, rates in of["values"].items():
                assert shown[value]["samples"] == str(rates["n"])
                assert ("scored" in shown[value]) == (of["without_targets"] > 0)
                if "scored" in shown[value]:
                    assert shown[value]["scored"] == str(rates.get("scored", 0))
                expected = (
                    "–" if rates["selection_rate"] is None else f"{rates['selection_rate']:.3f}"
                )
                assert shown[value]["selection rate"] == expected
        between = page.table(f"Between values: {words}")
        for figure in FIGURES:
            if figure in between:
                value = found["sex"][figure]
                assert between[figure]["sex"] == ("–" if value is None else f"{value:.3f}")
        assert between["worst value"]["sex"] == str(found["sex"]["worst_value"] or "–")
        assert "demographic_parity_difference" in between
        within = page.table(f"By sex within each client: {words}")
        over = found["sex"]["over_clients"]
        assert set(within) == {figure for figure, of in over.items() if of.get("worst") is not None}
        for figure, shown in within.items():
            assert shown["worst client"] == f"{over[figure]['worst']:.3f}"
            assert shown["which"] == over[figure]["worst_client_name"]
    withheld = summary["results"]["personal"]["seen"]["attributes"]["origin"]
    assert withheld["withheld"] > 0
    assert (
        f"origin: {withheld['withheld']} samples of {withheld['withheld_clients']} clients not "
        "counted" in page.text
    )
    assert {"attributes-sex-personal-seen", "attributes-sex-personal-unseen"} <= set(page.figures)


def test_every_client_has_its_score_by_value(runs):
    page = page_of(runs / "fedavg")
    shown = page.table(
        "Accuracy (samples) of each client by sex: global model, seen clients, test data"
    )
    rows = [
        json.loads(line) for line in (runs / "fedavg" / "metrics.jsonl").read_text().splitlines()
    ]
    names = json.loads((runs / "fedavg" / "names.json").read_text())
    own = [row for row in rows if (row["round"], row["split"], row["unseen"]) == (2, "test", False)]
    assert set(shown) == {names[row["client"]] for row in own}
    for row in own:
        for value in ("Female", "Male"):
            cell = shown[names[row["client"]]][value]
            found = row["attributes"]["sex"]["values"].get(value)
            score = found and ("–" if found["accuracy"] is None else f"{found['accuracy']:.3f}")
            assert cell == (f"{score} ({found['n']})" if found else "–")


def test_several_runs_have_their_figures_side_by_side(runs):
    page = page_of(runs / "fedavg", runs / "ditto")
    shown = page.table("Between values of sex: seen clients")
    for method, model in (("fedavg", "global"), ("ditto", "personal")):
        summary = json.loads((runs / method / "summary.json").read_text())
        found = summary["results"][model]["seen"]["attributes"]["sex"]
        for figure in FIGURES:
            assert shown[method][figure] == (
                "–" if found[figure] is None else f"{found[figure]:.3f}"
            )
        assert shown[method]["score of the worst value"] == f"{found['worst']:.3f}"
    assert page.figures["attributes-sex-seen"]["marks"] == 2


def test_data_without_attributes_have_no_section(tmp_path):
    small_run(tmp_path / "run", training=Training(rounds=1))
    assert TITLE not in page_of(tmp_path / "run").headings


def text_of(tmp_path, name="run", *, y, **options):
    """Return the page of a run whose clients have an attribute, and other targets."""
    x, _, attributes = people()
    federation = Federation.from_arrays(
        x,
        y,
        clients=np.arange(len(x)) % 4,
        attributes=attributes,
        task=options.pop("task", "classification"),
    )
    small_run(
        tmp_path / name,
        federation=federation,
        model="logistic",
        training=Training(rounds=1),
        evaluation=Evaluation(min_cell=1, **options),
    )
    return page_of(tmp_path / name)


RATES = "The selection rate is the share of positive predictions."
ADVICE = "If evaluation.positive names one, there are also selection rates, TPR and FPR"


def test_rates_are_explained_only_if_there_are_rates(tmp_path):
    classes, numbers = np.arange(SAMPLES) % 3, np.linspace(0.0, 1.0, SAMPLES)
    positive = text_of(tmp_path, "positive", y=classes, positive=1).text
    assert RATES in positive
    assert ADVICE not in positive
    without = text_of(tmp_path, "without", y=classes).text
    assert RATES not in without
    assert ADVICE in without
    regression = text_of(tmp_path, "regression", y=numbers, task="regression").text
    for words in (RATES, ADVICE, "evaluation.positive", "ratios"):
        assert words not in regression
    assert "Differences should be 0." in regression


def test_several_runs_have_only_figures_with_values(tmp_path):
    for name in ("one", "two"):
        text_of(tmp_path, name, y=np.arange(SAMPLES) % 3)
    page = page_of(tmp_path / "one", tmp_path / "two")
    assert ADVICE in page.text
    header, *_ = page.tables["Between values of sex: seen clients"]
    assert header == ["sex, seen", "score of the worst value", "score_difference"]
