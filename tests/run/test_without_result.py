"""Clients without a result, in summaries, on the terminal, in studies and in reports."""

from __future__ import annotations

import json

import numpy as np
import pytest

from equipoise import Evaluation, Federation, Training
from equipoise.cli.show.run import run_document, show_run
from equipoise.data import load
from equipoise.report import write_report
from equipoise.run.left_out import (
    MOST_LISTED,
    groups_with_fewer,
    missing_in,
    missing_in_runs,
    missing_words,
    without_result,
)
from tests.report.pages import Page
from tests.run.small import Stop, promised, rows_of, small_run, stop_after

# The clients of the small federation have one sample or many.
SIZES = {"N1": 20, "N2": 25, "S1": 30, "S2": 20, "S3": 1}
GROUPS = {name: {"N": "North", "S": "South"}[name[0]] for name in SIZES}
SAID = "1 of 5 seen clients has no result: S3 (no test samples)"
OPTIONS = {"model": "logistic", "training": Training(rounds=3, batch_size=8)}


def wards(unseen=(), sizes=SIZES, **options):
    """A federation in which a client with one sample has no test and no validation samples."""
    rng = np.random.default_rng(0)
    clients = np.repeat(list(sizes), list(sizes.values()))
    return Federation.from_arrays(
        rng.normal(size=(len(clients), 4)),
        np.arange(len(clients)) % 2,
        clients=clients,
        groups=GROUPS,
        unseen=unseen,
        name="wards",
        **{"splits": (0.6, 0.2, 0.2), **options},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    evaluation = Evaluation(metrics=["auroc"])
    return small_run(directory, federation=wards(), evaluation=evaluation, **OPTIONS)


def found_among(members, rows, having, absent=None, who="seen"):
    names = "abcdefgh"
    return without_result(
        rows,
        {who: members},
        {"val": (), "test": (), **having},
        absent or {},
        group_of=lambda client: "even" if client % 2 == 0 else "odd",
        name_of=names.__getitem__,
    )


def row(client, *, split="test", model="global", unseen=False):
    return {"client": client, "split": split, "model": model, "unseen": unseen}


def test_entries_are_those_counted_by_hand():
    rows = [row(0), row(1, model="local"), row(5, model="personal"), row(0, split="val")]
    found = found_among(range(6), rows, {"test": {0, 2, 3, 5}, "val": {0}}, {2: "late", 3: "late"})
    assert list(found) == ["results", "validation"]
    entry = found["results"]["seen"]
    assert (entry["clients"], entry["of"]) == (4, 6)
    assert entry["groups"] == {"even": {"clients": 2, "of": 3}, "odd": {"clients": 2, "of": 3}}
    assert entry["reasons"] == {"late": 2, "no test samples": 2}
    assert [tuple(one.values()) for one in entry["listed"]] == [
        (2, "c", "even", "late"),
        (3, "d", "odd", "late"),
        (1, "b", "odd", "no test samples"),
        (4, "e", "even", "no test samples"),
    ]
    assert found["validation"]["seen"]["reasons"] == {"late": 2, "no validation samples": 3}


def test_a_split_that_nobody_has_and_nothing_evaluated_have_no_entry():
    assert found_among([0, 1], [row(0), row(1)], {"test": {0, 1}}) == {}
    assert found_among([0, 1], [], {"test": {0, 1}}) == {}
    # All clients of a part may be missing. Then it is not in the results at all.
    found = found_among([2], [row(0)], {}, who="unseen")["results"]["unseen"]
    assert (found["clients"], found["reasons"]) == (1, {"no test samples": 1})


def test_rare_reasons_come_first_and_many_clients_are_counted():
    reasons = {client: "not connected" for client in range(3000)} | {2999: "late"}
    found = without_result(
        [row(3000)],
        {"seen": range(3001)},
        {"test": range(3001), "val": ()},
        reasons,
        group_of=lambda client: "all",
        name_of="ward {}".format,
    )["results"]["seen"]
    assert len(found["listed"]) == MOST_LISTED
    assert missing_words("seen", found) == (
        "3,000 of 3,001 seen clients have no result: ward 2999 (late); ward 0, ward 1, ward 2, "
        "ward 3, ward 4 and 2,994 other clients (not connected)"
    )
    many = found_among(range(7), [row(7)], {"test": range(7)}, dict(enumerate("ABCDEFG")))
    assert missing_words("seen", many["results"]["seen"]) == (
        "7 of 7 seen clients have no result: a (A); b (B); c (C); d (D); e (E); 2 other clients "
        "for other reasons"
    )


def test_the_summary_names_the_client_and_counts_it(finished):
    summary = finished.summary
    part = summary["results"]["global"]["seen"]
    assert (part["clients"], part["left_out"]) == (4, 1)
    assert part["metrics"]["auroc"]["left_out_clients"]["4"] == "no samples"
    entry = summary["without_result"]["results"]["seen"]
    assert entry == {
        "clients": 1,
        "of": 5,
        "groups": {"South": {"clients": 1, "of": 3}},
        "reasons": {"no test samples": 1},
        "listed": [{"client": 4, "name": "S3", "group": "South", "reason": "no test samples"}],
    }
    assert missing_in(summary) == {"seen": entry}
    assert run_document(finished)["without_result"] == summary["without_result"]


def test_a_run_in_which_all_clients_have_a_result_says_nothing(tmp_path, capsys):
    run = small_run(tmp_path / "run", rounds=1)
    assert "without_result" not in run.summary
    show_run(run)
    assert "no result" not in capsys.readouterr().out
    text = write_report([run.directory]).read_text()
    assert "no result" not in text
    assert "Without a result" not in text


def test_unseen_clients_are_named_too():
    options = {**OPTIONS, "model": "mlp"}
    run = small_run(None, "fedper", federation=wards(unseen=["N2", "S3"]), **options)
    (entry,) = missing_in(run.summary).values()
    said = "1 of 2 unseen clients has no result: S3 (no test samples)"
    assert missing_words("unseen", entry) == said
    # Clients keep parts of the model, and without training data they cannot make them.
    left_out = load("digits", leave_out="plain")
    (entry,) = missing_in(small_run(None, "fedper", federation=left_out, rounds=1).summary).values()
    assert entry["clients"] == entry["of"] == entry["groups"]["plain"]["of"]
    assert entry["reasons"] == {"no model for this client": entry["of"]}
    assert not missing_in(small_run(None, "fedavg", federation=left_out, rounds=1).summary)


def test_without_test_data_validation_data_count():
    run = small_run(None, federation=wards(splits=(0.8, 0.2, 0)), **OPTIONS)
    assert list(run.summary["without_result"]) == ["validation"]
    assert missing_in(run.summary)["seen"]["reasons"] == {"no validation samples": 1}


def test_a_mean_over_rounds_and_a_resumed_run_have_the_same_entry(finished, tmp_path):
    options = {"federation": wards(), "evaluation": Evaluation(metrics=["auroc"]), **OPTIONS}
    with pytest.raises(Stop):
        small_run(tmp_path / "run", on_round=stop_after(2), **options)
    small_run(tmp_path / "run", resume=True, **options)
    assert promised(tmp_path / "run") == promised(finished.directory)
    tail = small_run(None, federation=wards(), evaluation=Evaluation(last=2), **OPTIONS)
    assert tail.summary["without_result"] == finished.summary["without_result"]


def test_the_terminal_names_it_and_counts_the_clients_of_groups(finished, capsys):
    show_run(finished)
    lines = capsys.readouterr().out.splitlines()
    assert SAID in lines
    groups = {line.split("  ")[0]: line for line in lines if line.startswith(("North", "South"))}
    assert groups["North"].split()[1] == "2"
    assert " ".join(groups["South"].split()[1:4]) == "2 of 3"


def test_groups_of_clients_that_train_are_counted_without_unseen_ones(tmp_path, capsys):
    show_run(small_run(tmp_path / "run", federation=wards(unseen=["S1"]), **OPTIONS))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("group seen clients test samples") for line in lines)
    (south,) = [line for line in lines if line.startswith("South")]
    assert south.startswith("South 1 of 2 ")


def test_the_report_names_it(finished):
    page = Page(write_report([finished.directory]).read_text())
    assert "Seed 3. 4 of 5 clients evaluated, in 2 groups." in page.text
    assert f"{SAID}." in page.text
    table = page.table("Without a result: 1 seen client")
    assert table == {"S3": {"client": "S3", "group": "South", "reason": "no test samples"}}
    assert "Means are over the seen clients with a result (South: 2 of 3 clients)." in page.text
    # It took part in training.
    assert "All 5 clients took part in each of the 3 rounds." in page.text


def test_the_report_of_an_unfinished_run_names_it_too(tmp_path):
    with pytest.raises(Stop):
        small_run(tmp_path / "run", federation=wards(), on_round=stop_after(2), **OPTIONS)
    page = Page(write_report([tmp_path / "run"]).read_text())
    said = "1 of 5 seen clients has no result: S3 (no row in metrics.jsonl)."
    assert said in page.text
    assert "Worst: group" in page.text
    assert not any(f"client {client}" in page.text for client in range(5))


def test_a_client_that_did_not_answer_is_found_in_the_journal(finished, tmp_path):
    """As on Flower, in a run of an earlier release, whose summary does not name the client."""
    rows = rows_of(finished.directory, "rounds")
    rows[-1]["not_evaluated"] = {"1": "not connected"}
    measured = rows_of(finished.directory)
    measured = [one for one in measured if (one["round"], one["client"]) != (3, 1)]
    summary = {key: value for key, value in finished.summary.items() if key != "without_result"}
    for name, content in (("rounds", rows), ("metrics", measured)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in content))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    for name in ("config.yaml", "names.json"):
        (tmp_path / name).write_bytes((finished.directory / name).read_bytes())
    page = Page(write_report([tmp_path]).read_text())
    assert "2 of 5 seen clients have no result: S3 (no row in metrics.jsonl); N2 (not" in page.text
    assert page.table("Without a result: 2 seen clients")["N2"]["group"] == "North"
    assert "(North: 1 of 2 clients)" in page.text


def test_the_report_of_several_runs_says_in_how_many(finished, tmp_path):
    other = small_run(tmp_path / "other", federation=wards(), seed=4, **OPTIONS)
    whole = {name: 20 for name in SIZES}
    third = small_run(tmp_path / "third", federation=wards(sizes=whole), seed=5, **OPTIONS)
    runs = [finished.directory, other.directory, third.directory]
    page = Page(write_report(runs, tmp_path / "report.html").read_text())
    assert "Seen clients without a result: S3 (no test samples; 2 of 3 runs)." in page.text
    title = (
        "Mean over the clients of each group, seen clients (South: 2 of 3 clients in 2 of 3 runs)"
    )
    assert title in page.tables


def test_clients_of_several_runs_are_named_by_how_often_they_lack_a_result():
    def entry(*names, more=0):
        listed = [{"name": name, "reason": "late"} for name in names]
        return {"clients": len(names) + more, "listed": listed}

    runs = [{"seen": entry("a", "b")}, {"seen": entry("b"), "unseen": entry("c")}, {}]
    assert missing_in_runs(runs) == [
        "seen clients without a result: b (late; 2 of 3 runs), a (late; 1 of 3 runs)",
        "unseen clients without a result: c (late; 1 of 3 runs)",
    ]
    (many,) = missing_in_runs([{"seen": entry(*"abcdefg")}])
    assert many.endswith("e (late; 1 of 1 run) and others")
    (hidden,) = missing_in_runs([{"seen": entry("a", more=MOST_LISTED)}])
    assert hidden.endswith("a (late; 1 of 1 run) and others")
    assert missing_in_runs([{}, {}]) == []


def test_groups_say_how_many_of_their_clients_count():
    def entry(**groups):
        return {"groups": {name: {"clients": a, "of": b} for name, (a, b) in groups.items()}}

    assert groups_with_fewer([None, None]) == ""
    runs = [entry(north=(1, 4), south=(2, 4)), entry(north=(2, 4), south=(2, 4))]
    assert groups_with_fewer(runs) == " (north: 3 of 4 or 2 of 4 clients; south: 2 of 4 clients)"
    many = entry(**{f"g{number}": (1, 2) for number in range(7)})
    assert groups_with_fewer([many]).endswith(
        "g4: 1 of 2 clients and fewer than all clients of 2 other groups)"
    )
