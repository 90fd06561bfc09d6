"""Reports: their numbers are those of the runs, and missing sections have a reason."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys

import numpy as np
import pytest
import yaml

from equipoise import Evaluation, Federation, Training
from equipoise.errors import InputError, RunError
from equipoise.fairness import GROUP_METRICS, METRICS
from equipoise.report import weights, write_report
from equipoise.report.comparison import CRITERIA, comparisons
from equipoise.report.entries import find_entries
from equipoise.report.reading import Part, read_run
from equipoise.report.results import COLUMNS
from tests.report.browser import EXECUTABLE, MISSING, Browser
from tests.report.pages import Page
from tests.report.synthetic import write_run
from tests.run.small import small_run

NOTES = {
    "weights": lambda number, ids: [
        1 / len(ids) + 0.01 * (position % 2) for position in range(len(ids))
    ],
    "clusters": lambda number, ids: [int(client) % 2 if client else -1 for client in ids],
}
SECTIONS = (
    "headline",
    "clients",
    "progress",
    "groups",
    "weights",
    "sampling",
    "clusters",
    "costs",
    "reproduce",
)


def page_of(*paths, **options):
    return Page(write_report(paths, **options).read_text(encoding="utf-8"))


def rows_of(run, name):
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def ditto(tmp_path_factory):
    """A run with global and personal models, seen and unseen clients and partial cohorts."""
    directory = tmp_path_factory.mktemp("runs") / "ditto"
    small_run(directory, method="ditto", rounds=4, evaluation=Evaluation(every=2))
    return directory


def test_the_numbers_are_those_of_the_summary(ditto):
    summary = json.loads((ditto / "summary.json").read_text())
    shown = page_of(ditto).table("All metrics of the accuracy of clients")
    columns = {
        "global model, seen clients, test data": summary["results"]["global"]["seen"],
        "global model, unseen clients, test data": summary["results"]["global"]["unseen"],
        "personal models, seen clients, test data": summary["results"]["personal"]["seen"],
    }
    for column, results in columns.items():
        for metric in METRICS:
            value = results.get(metric)
            if metric in shown:
                assert shown[metric][column] == ("–" if value is None else f"{value:.3f}")
    assert {"mean", "worst10", "sigma_clients", "group_gap", "jain"} <= set(shown)


def test_every_client_is_in_the_table_and_in_the_figure(ditto):
    page = page_of(ditto)
    rows = [row for row in rows_of(ditto, "metrics") if (row["round"], row["split"]) == (4, "test")]
    table = page.table("Accuracy of each client")
    names = (
        json.loads((ditto / "names.json").read_text()) if (ditto / "names.json").exists() else None
    )
    for row in rows:
        shown = table[names[row["client"]] if names else f"client {row['client']}"]
        assert shown[f"{row['model']}, test"] == f"{row['accuracy']:.3f}"
        assert (shown["group"], shown["in training"], shown["test samples"]) == (
            row["group"],
            "unseen" if row["unseen"] else "seen",
            str(row["n"]),
        )
    for model, who in itertools.product(("global", "personal"), ("seen", "unseen")):
        mine = [row for row in rows if (row["model"], row["unseen"]) == (model, who == "unseen")]
        if mine:
            assert page.figures[f"clients-{model}-{who}"]["marks"] == len(mine)


def test_the_history_is_that_of_the_journal(ditto):
    history = read_run(ditto).history
    assert list(history[Part("personal", "seen", "test")]) == [2, 4]
    for part, of_part in history.items():
        for number, summary in of_part.items():
            scores = sorted(
                row["accuracy"]
                for row in rows_of(ditto, "metrics")
                if (row["round"], row["model"], row["split"]) == (number, part.model, part.split)
                and row["unseen"] == (part.who == "unseen")
            )
            assert summary["mean"] == pytest.approx(sum(scores) / len(scores))
            assert summary["worst10"] == pytest.approx(scores[0])
            assert summary["sigma_clients"] == pytest.approx(statistics.pstdev(scores))


def test_who_took_part_how_often(ditto):
    counts = dict.fromkeys(range(9), 0)
    for row in rows_of(ditto, "rounds"):
        for client in row["clients"]:
            counts[client] += 1
    del counts[7]  # unseen
    assert read_run(ditto).sampled == counts
    table = page_of(ditto).table("Rounds in which a client of each group took part")
    for position, group in enumerate("abc"):
        mine = [count for client, count in counts.items() if client % 3 == position]
        row = table[group]
        assert (row["clients"], row["fewest"], row["most"]) == (
            str(len(mine)),
            str(min(mine)),
            str(max(mine)),
        )
        assert row["mean"] == f"{statistics.fmean(mine):.1f}"


def test_bytes_and_seconds(tmp_path):
    table = page_of(write_run(tmp_path / "run", clients=12, rounds=6)).table(
        "In total and for each round"
    )
    assert table["sent by clients"] == {
        "what": "sent by clients",
        "total": "72.0 kB",
        "each round": "12.0 kB",
    }
    assert table["received by clients"]["total"] == "144.0 kB"
    assert table["local training"]["total"] == "1.50 s"
    assert table["evaluation"]["each round"] == "0.062 s"


def test_a_run_that_was_slow_says_why(tmp_path):
    what = "steps ran from Python and were not replayed on the GPU: <b>no</b> room"
    runs = {
        name: write_run(tmp_path / name / "seed0", seed=0, method=name)
        for name in ("fedavg", "fedprox")
    }
    slow = runs["fedprox"] / "summary.json"
    slow.write_text(json.dumps(json.loads(slow.read_text()) | {"slowed_by": [what]}))
    assert f"The run was slower than it could be: {what}." in page_of(runs["fedprox"]).text
    assert "slower" not in page_of(runs["fedavg"]).text
    both = page_of(*runs.values(), out=tmp_path / "both.html").text
    assert f"Some runs were slower than they could be. fedprox: {what}." in both


def test_which_accuracy_it_is(tmp_path, ditto):
    text = page_of(ditto).text
    assert "Which accuracy is it?" in text
    assert "The personal models: each client is evaluated with its own." in text
    assert "Round 4 of 4, the last." in text
    best = small_run(tmp_path / "best", rounds=3, evaluation=Evaluation(select="best"))
    expected = f"Round {best.summary['round']} of 3, the best on validation data."
    assert expected in page_of(tmp_path / "best").text


def test_all_sections_are_there_if_the_run_has_what_they_show(tmp_path):
    run = write_run(tmp_path / "run", cohort=5, notes=NOTES, unseen=2)
    page = page_of(run)
    assert set(SECTIONS) <= set(page.ids)
    assert "Not in this report" not in page.text
    assert {
        "weights-by-group",
        "losses-by-group",
        "weights-and-losses",
        "sampled",
        "seconds",
        "gaps-global-seen",
    } <= set(page.figures)


def test_sections_without_content_are_left_out_with_a_reason(tmp_path):
    page = page_of(write_run(tmp_path / "run", groups=1))
    assert set(SECTIONS) <= set(page.ids)
    _, _, reasons = page.text.partition("Not in this report")
    assert "All evaluated clients are in one group" in reasons
    assert "The method wrote no weights" in reasons
    assert "The method wrote no clusters" in reasons
    assert "All 12 clients took part in each of the 6 rounds." in page.text


@pytest.mark.parametrize("groups", [1, 3])
def test_a_single_group_is_not_called_the_worst(groups, tmp_path):
    text = page_of(write_run(tmp_path / "run", groups=groups)).text
    assert ("Worst: group" in text) == ("gap between groups" in text) == (groups > 1)
    assert ("Worst: client" in text) == (groups == 1)


@pytest.mark.parametrize("groups", [1, 3])
def test_metrics_of_a_single_group_are_left_out(groups, tmp_path):
    runs = [
        write_run(tmp_path / method, groups=groups, method=method, unseen=2)
        for method in ("fedavg", "fedprox")
    ]
    page = page_of(runs[0])
    shown = page.table("All metrics of the accuracy of clients")
    # Runs of this kind have no generalization gaps.
    there = [name for name in METRICS if not name.startswith("gap_")]
    assert list(shown) == [name for name in there if groups > 1 or name not in GROUP_METRICS]
    of_client = next(iter(page.table("Accuracy of each client").values()))
    assert ("group" in of_client) == (groups > 1)
    assert ("Colour and shape show its group" in page.text) == (groups > 1)
    compared = page_of(*runs, out=tmp_path / "compared.html")
    for who in ("seen", "unseen"):
        row = compared.table(f"Accuracy, {who} clients")["fedavg"]
        columns = [head.split()[0] for head in row if head.split()[0] in METRICS]
        assert {"mean", "worst10", "sigma_clients"} <= set(columns)
        assert any(name in GROUP_METRICS for name in columns) == (groups > 1)


def test_clusters_against_groups(tmp_path):
    run = write_run(tmp_path / "run", clients=8, groups=2, notes=NOTES)
    page = page_of(run)
    # Client 0 is in no cluster; the clusters of the others are their groups.
    rows = page.table("Clients of each group in each cluster")
    assert rows["group 0"] == {"group": "group 0", "cluster 0": "3", "cluster 1": "0"}
    assert rows["group 1"] == {"group": "group 1", "cluster 0": "0", "cluster 1": "4"}
    assert "Adjusted Rand index: 1.000" in page.text


def test_weights_and_losses(tmp_path):
    run = write_run(tmp_path / "run", clients=6, groups=2, rounds=3, notes=NOTES)
    record = read_run(run)
    assert [weighed.round for weighed in record.weighed] == [1, 2, 3]
    (chart,) = [c for c in _charts(record) if c.name == "weights-by-group"]
    for series, position in zip(chart.series, (0, 1), strict=True):
        weight = 1 / 6 + 0.01 * position
        assert series.y == pytest.approx([weight * 6 / (1 + 0.03)] * 3)
    (chart,) = [c for c in _charts(record) if c.name == "losses-by-group"]
    losses = [
        r["loss"]
        for r in rows_of(run, "metrics")
        if r["round"] == 3 and r["split"] == "val" and r["client"] % 2
    ]
    assert chart.series[1].y[2] == pytest.approx(statistics.fmean(losses))
    (chart,) = [c for c in _charts(record) if c.name == "weights-and-losses"]
    of_round = {
        r["client"]: r["loss"]
        for r in rows_of(run, "metrics")
        if r["round"] == 2 and r["split"] == "val"
    }
    noted = rows_of(run, "rounds")[1]["notes"]["weights"]
    expected = statistics.correlation(noted, [of_round[client] for client in range(6)])
    assert chart.series[0].y[1] == pytest.approx(expected)


def _charts(record):
    return weights.of_run(record).charts


def test_runs_of_earlier_releases(tmp_path):
    run = write_run(tmp_path / "run", cohort=4)
    summary = json.loads((run / "summary.json").read_text())
    for key in ("validation", "task", "select"):
        del summary[key]
    (run / "summary.json").write_text(json.dumps(summary))
    rounds = rows_of(run, "rounds")
    for row in rounds:
        for key in ("clients", "messages", "evaluations"):
            del row[key]
    (run / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rounds))
    (run / "timings.jsonl").unlink()
    page = page_of(run)
    assert "The run did not record which clients took part" in page.text
    assert "a release that did not count messages" in page.text
    assert "The run has no timings." in page.text
    assert page.table("All metrics of the accuracy of clients")["mean"]


def test_an_unfinished_run_is_judged_at_its_last_evaluated_round(tmp_path):
    finished = write_run(tmp_path / "finished", rounds=6)
    run = write_run(tmp_path / "run", rounds=6, finish=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 7, "mod')  # interrupted while it was written
    page = page_of(run)
    caption = "All metrics of the accuracy of clients"
    assert page.table(caption) == page_of(finished).table(caption)
    assert "the run is unfinished (6 of 6 rounds)" in page.text


def test_seen_clients_without_test_data_are_judged_by_validation_data(tmp_path):
    run = write_run(tmp_path / "run", unseen=3)
    kept = [row for row in rows_of(run, "metrics") if row["split"] == "val" or row["unseen"]]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    summary = json.loads((run / "summary.json").read_text())
    del summary["results"]["global"]["seen"]
    (run / "summary.json").write_text(json.dumps(summary))
    header = page_of(run).tables["All metrics of the accuracy of clients"][0]
    assert header[1:-1] == [
        "global model, seen clients, validation data",
        "global model, unseen clients, test data",
    ]


# ---- several runs --------------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path):
    """A study of three methods, of which the second dominates the third."""
    for method, seed in itertools.product(("fedavg", "faa", "ga"), (0, 1, 2)):
        groups = {"fedavg": 1, "faa": 2, "ga": 4}[method]
        write_run(
            tmp_path / "study/base" / method / f"seed{seed}",
            method=method,
            seed=seed,
            groups=groups,
        )
    return tmp_path / "study"


def test_a_study_is_a_table_of_methods_and_metrics_with_spread(study):
    page = page_of(study)
    table = page.table("Accuracy, seen clients")
    assert set(table) == {"fedavg", "faa", "ga"}
    for method, row in table.items():
        summaries = [
            json.loads((study / f"base/{method}/seed{s}/summary.json").read_text())
            for s in range(3)
        ]
        for metric in COLUMNS:
            values = [summary["results"]["global"]["seen"][metric] for summary in summaries]
            (cell,) = [
                cell
                for header, cell in row.items()
                if header.split("\xa0")[0].split(" ")[0] == metric
            ]
            assert cell == f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"
        assert (row["runs"], row["model"]) == ("3", "global")
    assert page.figures["rounds-mean-seen"]["label"].startswith("Mean over clients, seen clients.")
    assert page.figures["clients-seen"]["marks"] == 3 * 3 * 12


def test_the_pareto_set_holds_what_nothing_dominates(study):
    (comparison,) = comparisons(find_entries([study])[0])
    points = {
        label: [
            comparison.mean(label, "seen", metric) * sign
            for metric, sign in zip(CRITERIA, (1, 1, -1), strict=True)
        ]
        for label in comparison.runs
    }
    expected = [
        label
        for label, mine in points.items()
        if not any(other != label and (np.array(points[other]) >= mine).all() for other in points)
    ]
    assert comparison.pareto("seen") == expected
    table = page_of(study).table("Accuracy, seen clients")
    assert [label for label in table if table[label]["Pareto"]] == expected


def test_from_five_seeds_on_methods_are_tested_against_the_best(tmp_path):
    for seed in range(5):
        write_run(tmp_path / f"study/base/fedavg/seed{seed}", clients=20, seed=seed)
        write_run(tmp_path / f"study/base/ga/seed{seed}", clients=20, seed=seed, method="ga")
        worse = write_run(
            tmp_path / f"study/base/worse/seed{seed}", clients=20, seed=seed, method="fedprox"
        )
        summary = json.loads((worse / "summary.json").read_text())
        summary["results"]["global"]["seen"]["mean"] -= 0.2 + 0.001 * seed
        (worse / "summary.json").write_text(json.dumps(summary))
    page = page_of(tmp_path / "study")
    shown = {label: row["mean ↑"] for label, row in page.table("Accuracy, seen clients").items()}
    assert ["†" in cell for cell in shown.values()] == [False, False, True]
    assert (
        "† marks values that are worse than the best: p < 0.05, two-sided paired t-test over seeds"
        in page.text
    )
    (comparison,) = comparisons(find_entries([tmp_path / "study"])[0])
    low, high = comparison.interval(comparison.runs["fedavg"], "seen", "mean")
    intervals = page.table("95% bootstrap intervals over clients, seen clients")
    assert intervals["fedavg"]["mean"] == f"{low:.3f} to {high:.3f}"
    assert low < comparison.mean("fedavg", "seen", "mean") < high


def test_below_five_seeds_nothing_is_claimed(study):
    page = page_of(study)
    assert "Differences are not tested: that needs 5 seeds." in page.text
    assert "†" not in page.text


def test_methods_are_in_the_order_of_the_study(study):
    rows = [{"setting": "base", "method": method} for method in ("ga", "fedavg", "faa")]
    (study / "results.json").write_text(json.dumps({"results": rows}))
    assert list(page_of(study).table("Accuracy, seen clients")) == ["ga", "fedavg", "faa"]


def test_settings_have_sections_of_their_own(tmp_path):
    for setting in ("iid", "skewed"):
        write_run(tmp_path / "study" / setting / "fedavg/seed0")
        write_run(tmp_path / "study" / setting / "local/seed0", method="local")
    titles = [title for level, title in page_of(tmp_path / "study").headings if level == 2]
    assert {"Results: iid", "Results: skewed"} <= set(titles)


def test_runs_given_one_by_one_are_told_apart_by_what_differs(tmp_path):
    first = small_run(tmp_path / "a", method={"name": "fedprox", "mu": 0.1}, rounds=1).directory
    second = small_run(tmp_path / "b", method={"name": "fedprox", "mu": 1.0}, rounds=1).directory
    third = small_run(
        tmp_path / "c", method={"name": "fedprox", "mu": 1.0}, rounds=1, seed=4
    ).directory
    labels = [entry.label for entry in find_entries([first, second, third])[0]]
    assert labels == ["fedprox, mu=0.1", "fedprox, mu=1.0", "fedprox, mu=1.0"]
    page = page_of(first, second, third, out=tmp_path / "page.html")
    assert page.table("Accuracy, seen clients")["fedprox, mu=1.0"]["runs"] == "2"
    assert "Methods have different seeds." in page.text


def test_runs_on_other_data_are_compared_with_care(tmp_path):
    runs = [write_run(tmp_path / name, method=name) for name in ("fedavg", "local")]
    assert "Compare with care" not in page_of(*runs, out=tmp_path / "a.html").text
    config = (runs[1] / "config.yaml").read_text()
    (runs[1] / "config.yaml").write_text(
        config.replace("clients: 12", "clients: 12\n  fingerprint: other")
    )
    assert "trained on different data" in page_of(*runs, out=tmp_path / "a.html").text


def test_runs_with_different_scores_are_not_compared(tmp_path):
    accuracies = [small_run(tmp_path / name, name, rounds=1) for name in ("fedavg", "local")]
    losses = {}
    for name, options in {
        "ridge": {},
        "prox": {"method": "fedprox"},
        "huber": {"training": Training(rounds=1, loss="huber")},
    }.items():
        x = np.random.default_rng(0).normal(size=(60, 3))
        data = Federation.from_arrays(
            x, x.sum(1), clients=np.arange(60) % 3, task="regression", name="loads"
        )
        given = {"federation": data, "model": "logistic", "training": Training(rounds=1)}
        losses[name] = small_run(tmp_path / name, **{**given, **options})
    runs = [run.directory for run in (*accuracies, *losses.values())]
    page = page_of(*runs, out=tmp_path / "page.html")
    scores = ("accuracy", "loss (regression)", "loss (huber)")
    said = f"Runs with different scores are compared separately: {', '.join(scores)}."
    assert said in page.text
    titles = [title for level, title in page.headings if level == 2]
    assert {f"Results: {score}" for score in scores} <= set(titles)
    rows = {
        score: page.tables[f"{name}, seen clients: {score}"]
        for name, score in zip(("Accuracy", "Loss", "Loss"), scores, strict=True)
    }
    assert [len(of) - 1 for of in rows.values()] == [2, 2, 1]
    assert [of[0][4][-1] for of in rows.values()] == ["↑", "↓", "↓"]
    # Labels tell apart only runs that are compared.
    assert [row[0] for row in rows["loss (regression)"][1:]] == ["fedavg", "fedprox"]
    assert [row[0] for row in rows["loss (huber)"][1:]] == ["fedavg"]
    assert "compared separately" not in page_of(*runs[:2], out=tmp_path / "one.html").text


def test_small_numbers_are_not_shown_as_zero(tmp_path):
    runs = []
    for method, variance in (("fedavg", 0.00027), ("faa", 0.0000312)):
        run = write_run(tmp_path / method, method=method)
        summary = json.loads((run / "summary.json").read_text())
        part = summary["results"]["global"]["seen"]
        part |= {"gap_variance": variance, "sigma_clients": 30 * variance}
        (run / "summary.json").write_text(json.dumps(summary))
        runs.append(run)
    shown = page_of(runs[0]).table("All metrics of the accuracy of clients")
    column = "global model, seen clients, test data"
    assert shown["gap_variance"][column] == "0.00027"
    assert re.fullmatch(r"0\.\d{3}", shown["mean"][column])
    table = page_of(*runs, out=tmp_path / "page.html").table("Accuracy, seen clients")
    sigmas = [row["sigma_clients ↓"] for row in table.values()]
    assert sigmas == ["0.0081", "0.0009"]


# ---- the page ------------------------------------------------------------------------------------


@pytest.fixture(params=["one", "several"])
def page(request, tmp_path):
    runs = [
        write_run(tmp_path / name, method=name, cohort=5, notes=NOTES, unseen=2)
        for name in ("faa", "ga")
    ]
    return page_of(*(runs if request.param == "several" else runs[:1]), out=tmp_path / "page.html")


def test_the_page_needs_nothing_else(page):
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    assert not [tag for tag, _ in page.tags if tag in ("script", "img", "iframe")]
    assert "http" not in page.text


def test_the_page_can_be_read_without_seeing_it(page):
    assert len(page.ids) == len(set(page.ids))
    assert all(
        reference[1:] in page.ids for reference in page.references if reference.startswith("#")
    )
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert all(len(figure["label"]) > 20 for figure in page.figures.values())
    assert all(title for _, title in page.headings)
    assert all(
        attributes.get("scope") in ("row", "col") for tag, attributes in page.tags if tag == "th"
    )
    assert all(header for rows in page.tables.values() for header in rows[0])


def test_names_are_text_and_not_markup(tmp_path):
    run = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "summary.json"):
        (run / name).write_text((run / name).read_text().replace("group 1", "<b>&amp;</b>"))
    page = page_of(run)
    assert "<b>&amp;</b>" in page.text
    assert "b" not in {tag for tag, _ in page.tags}


def test_a_large_run_makes_a_small_page(tmp_path):
    run = write_run(tmp_path / "run", clients=1000, rounds=500, groups=10, cohort=100, every=50)
    assert write_report([run]).stat().st_size < 2e6
    record = read_run(run)
    assert len(record.rounds) == 500
    assert sum(record.sampled.values()) == 500 * 100


@pytest.mark.slow
def test_a_run_with_many_evaluations_makes_a_small_page_that_is_drawn_quickly(tmp_path):
    run = write_run(tmp_path / "run", clients=1000, rounds=500, groups=10, cohort=100, notes=NOTES)
    made = write_report([run])
    assert made.stat().st_size < 10e6
    if EXECUTABLE is None:
        pytest.skip(MISSING)
    browser = Browser(tmp_path / "profile")
    assert min(browser.open(made) for _ in range(3)) < 2
    assert browser.evaluate("document.querySelectorAll('figure > svg use').length") == 2000
    browser.close()


def test_figures_are_also_written_for_papers(tmp_path):
    run = write_run(tmp_path / "run", groups=1, rounds=2)
    page = page_of(run, figures=tmp_path / "figures")
    written = {path.name for path in (tmp_path / "figures").iterdir()}
    assert written == {
        f"{name}.{suffix}" for name in page.figures for suffix in ("png", "pdf", "svg")
    }
    assert (tmp_path / "figures/seconds.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "figures/seconds.png").read_bytes().startswith(b"\x89PNG")


def test_figures_need_matplotlib_and_the_page_does_not(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_report([run]).exists()
    with pytest.raises(InputError, match=r"pip install 'equipoise\[report\]'"):
        write_report([run], figures=tmp_path / "figures")


# ---- what cannot be reported ---------------------------------------------------------------------


def test_directories_without_runs_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InputError, match="does not exist; valid: a run directory or the directory of a study"
    ):
        write_report([tmp_path / "none"])
    with pytest.raises(InputError, match="is a file"):
        write_report([tmp_path / "file"])
    with pytest.raises(InputError, match="holds no run and no study"):
        write_report([tmp_path / "empty"])
    with pytest.raises(InputError, match="nothing to report"):
        write_report([])
    (tmp_path / "empty/config.yaml").write_text("method: fedavg")
    with pytest.raises(InputError, match=r"config.yaml is not a run's configuration"):
        write_report([tmp_path / "empty"])


def test_a_run_without_evaluated_rounds_is_refused(tmp_path):
    run = write_run(tmp_path / "study/base/fedavg/seed0", rounds=0, finish=False)
    with pytest.raises(InputError, match="has no evaluated round yet"):
        write_report([run])
    with pytest.raises(InputError, match="has nothing to report yet"):
        write_report([tmp_path / "study"])
    # The other runs of the study are reported.
    write_run(tmp_path / "study/base/fedavg/seed1", seed=1)
    page = page_of(tmp_path / "study")
    assert "fedavg on digits" in page.text
    assert f"the run in {run} has no evaluated round yet" in page.text.partition("Runs left out")[2]


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "rounds.jsonl"])
def test_damaged_files_are_named_with_their_run(tmp_path, name):
    run = write_run(tmp_path / "run")
    (run / name).write_text('{"round": 1, "clients"\n' + (run / name).read_text())
    with pytest.raises(RunError, match=f"cannot read (the run in )?{run}"):
        write_report([run])


def test_a_damaged_number_of_clients_is_named_with_its_run(tmp_path):
    run = write_run(tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["resolved"]["clients"] = [3]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(RunError, match=f"cannot read the run in {run}: TypeError"):
        write_report([run])


def test_a_report_that_cannot_be_written_is_refused(tmp_path):
    run = write_run(tmp_path / "run")
    with pytest.raises(InputError, match="cannot write the report to"):
        write_report([run], run / "config.yaml/report.html")
