"""Results averaged over the last evaluated rounds: in summaries, studies, tuning and reports."""

from __future__ import annotations

import json
import statistics

import pytest
import yaml

from equipoise import Evaluation, Training
from equipoise.config import experiment_from
from equipoise.errors import InputError
from equipoise.report import write_report
from equipoise.report.reading import Part, read_run
from equipoise.run.records import average_rows, averaged_over
from equipoise.study import study_from, value_of
from equipoise.study.runs import counted_rows
from tests.report.pages import Page
from tests.run.small import Stop, promised, rows_of, small_run, stop_after

# Evaluated after rounds 2, 4 and 6, and after the last one.
TRAINING = Training(rounds=7, cohort=4)
EVALUATION = Evaluation(every=2, last=3, local=True, metrics=["auroc"])
ROUNDS = [4, 6, 7]


def means_by_hand(rows, *, model="global", split="test", unseen=False, column="accuracy"):
    """Average a column over the last rounds, client by client, in plain Python."""
    found = {}
    for row in rows:
        which = (row["model"], row["split"], row["unseen"])
        if row["round"] in ROUNDS and which == (model, split, unseen) and column in row:
            found.setdefault(row["client"], []).append(row[column])
    return {client: sum(values) / len(values) for client, values in found.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tail") / "run"
    return small_run(directory, method="ditto", training=TRAINING, evaluation=EVALUATION)


@pytest.mark.parametrize("model", ["global", "personal", "local"])
@pytest.mark.parametrize("split", ["test", "val"])
def test_each_client_is_averaged_and_then_clients_are_summarised(run, model, split):
    rows = rows_of(run.directory)
    part = run.summary["results" if split == "test" else "validation"][model]["seen"]
    values = list(means_by_hand(rows, model=model, split=split).values())
    assert part["clients"] == len(values)
    assert part["mean"] == pytest.approx(sum(values) / len(values), rel=1e-12)
    assert part["sigma_clients"] == pytest.approx(statistics.pstdev(values), rel=1e-9)
    assert part["worst_client"] == pytest.approx(min(values), rel=1e-12)
    losses = means_by_hand(rows, model=model, split=split, column="loss").values()
    assert part["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    aurocs = means_by_hand(rows, model=model, split=split, column="auroc").values()
    assert part["metrics"]["auroc"]["mean"] == pytest.approx(sum(aurocs) / len(aurocs), rel=1e-12)


def test_clients_held_out_of_training_are_averaged_too(run):
    values = means_by_hand(rows_of(run.directory), unseen=True)
    unseen = run.summary["results"]["global"]["unseen"]
    assert (unseen["clients"], unseen["mean"]) == (
        1,
        pytest.approx(next(iter(values.values())), rel=1e-12),
    )


def test_gaps_are_those_of_the_rounds_in_which_a_client_trained(run):
    gaps = {}
    for row in rows_of(run.directory):
        if row["round"] in ROUNDS and "gap" in row:
            gaps.setdefault(row["client"], []).append(row["gap"])
    means = [sum(values) / len(values) for values in gaps.values()]
    assert len(means) > 4
    found = run.summary["results"]["global"]["seen"]["gap_variance"]
    assert found == pytest.approx(statistics.pvariance(means), rel=1e-9)


def test_the_selected_round_and_the_mean_over_rounds_are_beside(run):
    tail, rows = run.summary["tail"], rows_of(run.directory)
    assert (tail["rounds"], run.summary["round"]) == (ROUNDS, 7)
    spreads, means = [], []
    for number in ROUNDS:
        chosen = [
            r
            for r in rows
            if (r["round"], r["model"], r["split"], r["unseen"])
            == (number, "global", "test", False)
        ]
        values = [row["accuracy"] for row in chosen]
        spreads.append(statistics.pstdev(values))
        means.append(sum(values) / len(values))
    assert tail["selected"]["results"]["global"]["seen"]["sigma_clients"] == pytest.approx(
        spreads[-1], rel=1e-9
    )
    each = tail["each"]["results"]["global"]["seen"]
    assert each["sigma_clients"] == pytest.approx(sum(spreads) / 3, rel=1e-9)
    # The mean over clients is equal for both definitions; the spread over clients is not.
    assert each["mean"] == pytest.approx(sum(means) / 3, rel=1e-12)
    assert each["mean"] == pytest.approx(
        run.summary["results"]["global"]["seen"]["mean"], rel=1e-12
    )
    assert run.summary["results"]["global"]["seen"]["sigma_clients"] < each["sigma_clients"]
    for prefix, part in (("selected.", tail["selected"]), ("each.", tail["each"])):
        assert (
            value_of(run.summary, f"{prefix}global.sigma_clients")
            == part["results"]["global"]["seen"]["sigma_clients"]
        )
        val = part["validation"]["global"]["seen"]
        assert value_of(run.summary, f"val.{prefix}global.auroc") == val["metrics"]["auroc"]["mean"]


def test_training_and_the_models_that_are_kept_are_the_same(run, tmp_path):
    plain = Evaluation(every=2, local=True, metrics=["auroc"])
    without = small_run(tmp_path / "run", method="ditto", training=TRAINING, evaluation=plain)
    assert "tail" not in without.summary
    assert "last" not in without.config["evaluation"]
    ours, theirs = promised(run.directory), promised(without.directory)
    assert [name for name in theirs if ours[name] != theirs[name]] == ["summary.json"]
    assert without.summary["results"] == run.summary["tail"]["selected"]["results"]
    # Without averaging, the prefixes have no effect.
    for prefix in ("selected.", "each."):
        assert value_of(without.summary, f"{prefix}mean") == value_of(without.summary, "mean")


def test_a_resumed_run_averages_the_same_rounds(run, tmp_path):
    options = {"method": "ditto", "training": TRAINING, "evaluation": EVALUATION}
    with pytest.raises(Stop):
        small_run(tmp_path / "run", on_round=stop_after(5), **options)
    small_run(tmp_path / "run", resume=True, **options)
    assert promised(tmp_path / "run") == promised(run.directory)


def test_the_best_round_keeps_its_models_and_the_results_are_those_of_the_tail():
    best = small_run(training=TRAINING, evaluation=Evaluation(select="best", last=2))
    last = small_run(training=TRAINING, evaluation=Evaluation(last=2))
    assert best.summary["tail"]["rounds"] == [6, 7]
    assert best.summary["results"] == last.summary["results"]
    assert best.trainer.selected().round == best.summary["round"]


def test_with_fewer_rounds_than_asked_for_all_are_averaged():
    run = small_run(training=Training(rounds=2, cohort=4), evaluation=Evaluation(last=8))
    assert run.summary["tail"]["rounds"] == [1, 2]
    assert averaged_over([1, 2]) == "mean over the last 2 evaluated rounds (1 to 2)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"last": 0}, "evaluation.last must be"),
        ({"last": 2.5}, "evaluation.last must be"),
        ({"last": 2, "every": 0}, "evaluation.last needs evaluation.every of at least 1"),
    ],
)
def test_what_cannot_be_averaged_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Evaluation(**settings)
    with pytest.raises(InputError, match=message):
        experiment_from({"data": "digits", "evaluation": settings})


def test_a_metric_that_some_rounds_lack_is_averaged_over_the_others():
    same = {"model": "global", "split": "test", "client": 0, "group": "a", "unseen": False, "n": 4}
    first = {"round": 1, **same, "loss": 2.0, "auroc": 0.6}
    second = {
        "round": 2,
        **same,
        "loss": 1.0,
        "left_out": {"auroc": "one class", "ece": "undefined"},
    }
    (row,) = average_rows([first, second])
    assert (row["loss"], row["auroc"], row["round"], row["left_out"]) == (
        1.5,
        0.6,
        2,
        {"ece": "undefined"},
    )


# ---- studies and reports -------------------------------------------------------------------------

BASE = {
    "data": "digits",
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 3},
    "evaluation": {"last": 2},
}


def test_tables_and_tuning_use_the_averages(tmp_path):
    tilted = {"name": "term", "t": 1, "grid": {"t": [1, 30]}}
    metrics = [
        "mean",
        "sigma_clients",
        "selected.sigma_clients",
        "each.sigma_clients",
        "val.sigma_clients",
    ]
    mapping = {"base": BASE, "methods": ["fedavg", tilted], "metrics": metrics, "seeds": [0]}
    results = study_from(mapping).run(tmp_path / "study")
    summary = json.loads((tmp_path / "study/base/fedavg/seed0/summary.json").read_text())
    seen = summary["results"]["global"]["seen"]
    assert results.values("base", "fedavg", "sigma_clients")[0] == seen["sigma_clients"]
    ours = [results.values("base", "fedavg", metric)[0] for metric in metrics[2:]]
    tail = summary["tail"]
    assert ours == [
        tail["selected"]["results"]["global"]["seen"]["sigma_clients"],
        tail["each"]["results"]["global"]["seen"]["sigma_clients"],
        summary["validation"]["global"]["seen"]["sigma_clients"],
    ]
    # Intervals are those of the averaged clients.
    rows = counted_rows(tmp_path / "study/base/fedavg/seed0", summary)
    tested = [row["accuracy"] for row in rows if row["split"] == "test"]
    assert statistics.fmean(tested) == pytest.approx(seen["mean"], rel=1e-12)
    assert results.interval("base", "fedavg", "mean") is not None
    assert results.interval("base", "fedavg", "selected.sigma_clients") is None

    tuned = study_from(mapping, tune=True).run(tmp_path / "tuned")
    spreads = {}
    for t in (1, 30):
        own = json.loads((tmp_path / f"tuned/base/term t={t}/seed0/summary.json").read_text())
        spreads[t] = own["validation"]["global"]["seen"]["sigma_clients"]
        label, rounds = f"term t={t}", own["tail"]["each"]["validation"]["global"]["seen"]
        assert tuned.values("base", label, "sigma_clients")[0] == spreads[t]
        assert tuned.values("base", label, "each.sigma_clients")[0] == rounds["sigma_clients"]


def test_reports_show_the_averaged_clients(run):
    record = read_run(run.directory)
    part = Part("personal", "seen", "test")
    assert record.values(part) == pytest.approx(
        means_by_hand(rows_of(run.directory), model="personal")
    )
    page = Page(write_report([run.directory]).read_text(encoding="utf-8"))
    assert (
        "Mean over the last 3 evaluated rounds (4 to 7) of 7: the mean of each client, then "
        "summarised." in page.text
    )
    shown = page.table("All metrics of the accuracy of clients")["sigma_clients"]
    expected = run.summary["results"]["personal"]["seen"]["sigma_clients"]
    assert shown["personal models, seen clients, test data"] == f"{expected:.3f}"


def test_an_unfinished_run_is_reported_by_the_same_rule(tmp_path):
    with pytest.raises(Stop):
        small_run(
            tmp_path,
            training=TRAINING,
            evaluation=Evaluation(every=2, last=3),
            on_round=stop_after(5),
        )
    record = read_run(tmp_path)
    assert record.summary["tail"]["rounds"] == [2, 4]
    found = {}
    for row in rows_of(tmp_path):
        if (row["split"], row["unseen"]) == ("test", False):
            found.setdefault(row["client"], []).append(row["accuracy"])
    values = [sum(own) / len(own) for own in found.values()]
    assert record.parts[Part("global", "seen", "test")]["mean"] == pytest.approx(
        sum(values) / len(values)
    )
    page = Page(write_report([tmp_path]).read_text(encoding="utf-8"))
    assert (
        "(2 to 4) of 7: the mean of each client, then summarised. The run is unfinished (5 of 7 "
        "rounds)." in page.text
    )


def test_the_setting_is_part_of_the_configuration(run):
    assert yaml.safe_load((run.directory / "config.yaml").read_text())["evaluation"]["last"] == 3
