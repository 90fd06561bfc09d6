"""How columns become inputs: stored with a run, and applied to other rows."""

from __future__ import annotations

import csv
import gzip
import json
import math
import re

import numpy as np
import pytest
import torch

import equipoise
from equipoise import train
from equipoise.data import load
from equipoise.data.columns import COLUMNS, Columns, Number, Target, Text, read_columns
from equipoise.errors import InputError, RunError
from tests.flower.loop import run_on_loop
from tests.run.small import Stop, stop_after

HEADER = ["id", "hospital", "age", "ward", "blood", "diagnosis"]


def rows_of(count=60):
    """Return rows whose ages, and no other values, are numbers of three digits or more."""
    draws = np.random.default_rng(0)
    return [
        {
            "id": f"P-{row}",
            "hospital": "AB"[row % 2],
            "age": "" if row % 7 == 0 else str(200 + row),
            "ward": ["surgery", "medicine", "NA", "icu"][row % 4],
            "blood": f"{draws.normal():.2f}",
            "diagnosis": ["ill", "healthy", "unclear"][row % 3],
        }
        for row in range(count)
    ]


def write(path, rows, header=HEADER, delimiter=","):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, header, delimiter=delimiter, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def patients(file, **options):
    return load(
        "table", file=file, y="diagnosis", clients="hospital", **{"ignore": ["id"], **options}
    )


def run_of(federation, out, **options):
    return train(federation, model="logistic", rounds=1, out=out, **options)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The file of a table, and the directory of a run that was trained on it."""
    folder = tmp_path_factory.mktemp("first")
    file = write(folder / "patients.csv", rows_of())
    run_of(patients(file), folder / "run")
    return file, folder / "run"


def test_a_run_stores_what_makes_its_inputs_again(first):
    file, run = first
    federation, columns = patients(file), read_columns(run)
    assert columns == federation.columns
    assert torch.equal(columns.inputs(file), federation.x)
    assert columns.names == ("age", "ward=icu", "ward=medicine", "ward=surgery", "blood")
    assert columns.class_names == federation.class_names == ("healthy", "ill", "unclear")
    assert columns.target == Target("diagnosis", "classification", federation.class_names)
    assert len(columns.names) == federation.x.shape[1]


def test_other_files_have_the_same_inputs(first, tmp_path):
    """Order of columns, further columns, the delimiter and compression do not matter."""
    _, run = first
    columns, rows = read_columns(run), rows_of()
    wanted = columns.inputs(rows)
    few = write(tmp_path / "few.csv", rows, ["blood", "ward", "age"])
    assert torch.equal(columns.inputs(few), wanted)
    more = write(tmp_path / "more.csv", rows, [*reversed(HEADER), "ill"], ";")
    assert torch.equal(columns.inputs(tmp_path / "more.csv", delimiter=";"), wanted)
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress((tmp_path / "few.csv").read_bytes()))
    assert torch.equal(columns.inputs(packed), wanted)
    with pytest.raises(InputError, match=r"more.csv has one column, .*; delimiter sets another"):
        columns.inputs(more)


def test_new_rows_by_hand():
    columns = Columns(
        (Number("age", 40.0, 10.0), Text("ward", ("b", "c")), Number("dose", 3.0)),
        Target("y", "classification", ("no", "yes")),
    )
    rows = [
        {"age": 55, "ward": "c", "dose": "1e1", "more": 1},
        {"age": None, "ward": "?", "dose": math.nan},
        {"age": " 30.0 ", "ward": " b", "dose": np.float32(0.5)},
    ]
    assert columns.inputs(rows).tolist() == [[1.5, 0, 1, 10], [0, 0, 0, 3], [-1, 1, 0, 0.5]]
    assert columns.inputs(iter(rows)).dtype == torch.float32
    # All rows had the same number in training.
    constant = Columns((Number("age", 40.0, 0.0),), columns.target)
    assert constant.inputs([{"age": 7}]).tolist() == [[0]]


def test_a_file_with_the_only_input(tmp_path):
    columns = Columns((Number("age", 40.0),), Target("y", "regression"))
    (tmp_path / "new.csv").write_text("age\n30\n\n50\n")
    assert columns.inputs(str(tmp_path / "new.csv")).tolist() == [[30], [50]]
    assert columns.class_names is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ward": "new"}, "column 'ward' of the rows has 'new' in row 1, which was not in train"),
        ({"ward": 7}, "has '7' in row 1, which was not in training; valid: 'icu', 'medicine', 'su"),
        ({"age": "old"}, "'age' of the rows has 'old' in row 1; valid for an input that was num"),
        ({"age": "36,5"}, r"'age' of the rows has decimal commas: '36,5' in row 1; .* \(36.5\)"),
        ({"age": "inf"}, "'age' of the rows has 'inf' in row 1; valid: finite numbers of at most"),
    ],
)
def test_values_that_do_not_fit_are_refused(first, given, message):
    rows = rows_of(3)
    with pytest.raises(InputError, match=message):
        read_columns(first[1]).inputs([rows[0], rows[1] | given, rows[2]])


def test_rows_that_do_not_fit_are_refused(first, tmp_path):
    columns = read_columns(first[1])
    file = write(tmp_path / "new.csv", rows_of(3), ["age", "blood"])
    with pytest.raises(
        InputError, match=r"new.csv has no column 'ward', which is an input of the model; its colum"
    ):
        columns.inputs(file)
    for rows, message in (
        ([{"age": 3, "ward": "icu"}], "row 0 has no column 'blood', .*; valid: a value, or None"),
        ([], "there are no rows"),
        ([["age", 3]], r"row 0 is \['age', 3\]; valid: a mapping from columns to values"),
    ):
        with pytest.raises(InputError, match=message):
            columns.inputs(rows)
    with pytest.raises(InputError, match=r"cannot read .*nowhere.csv: No such file"):
        columns.inputs(tmp_path / "nowhere.csv")


def test_the_stored_file_has_no_rows(first):
    text = (first[1] / COLUMNS).read_text()
    age, ward, _ = json.loads(text)["inputs"]
    ages = [float(row["age"]) for row in rows_of() if row["age"]]
    assert age == {
        "kind": "number",
        "name": "age",
        "mean": pytest.approx(np.mean(ages)),
        "deviation": pytest.approx(np.std(ages)),
    }
    assert ward == {"kind": "text", "name": "ward", "values": ["icu", "medicine", "surgery"]}
    # Ages and ids are those of single patients.
    words = set(re.findall(r"[\w.-]+", text))
    assert not words.intersection(row[name] for row in rows_of() for name in ("id", "age", "blood"))


def test_it_is_listed_with_its_checksum_from_the_start(first, tmp_path):
    file, run = first
    assert COLUMNS in (run / "SHA256SUMS").read_text()
    with pytest.raises(Stop):
        run_of(patients(file), tmp_path / "run", on_round=stop_after(1))
    assert read_columns(tmp_path / "run") == read_columns(run)
    path = tmp_path / "run" / COLUMNS
    path.write_text(path.read_text().replace("surgery", "surgerx"))
    with pytest.raises(RunError, match="columns.json differs from what the run wrote"):
        read_columns(tmp_path / "run")
    path.unlink()
    with pytest.raises(InputError, match="columns.json does not exist; valid: the directory of a"):
        read_columns(tmp_path / "run")


NUMBER = {"kind": "number", "name": "a", "mean": 1.0, "deviation": None}
TEXT = {"kind": "text", "name": "b", "values": ["c", "d"]}
TARGET = {"name": "y", "task": "classification", "classes": ["no", "yes"]}


def test_a_file_by_hand(tmp_path):
    (tmp_path / COLUMNS).write_text(json.dumps({"inputs": [NUMBER, TEXT], "target": TARGET}))
    assert read_columns(tmp_path).inputs([{"b": "d", "a": 3}]).tolist() == [[3, 0, 1]]


@pytest.mark.parametrize(
    ("inputs", "target", "message"),
    [
        ([], TARGET, "there are no inputs"),
        (3, TARGET, "not iterable"),
        ([3], TARGET, "mapping"),
        ([TEXT, TEXT], TARGET, "twice"),
        ([{"kind": "number", "name": "a"}], TARGET, "'mean'"),
        ([NUMBER | {"kind": "date"}], TARGET, "kind 'date' is unknown"),
        ([NUMBER | {"name": ["a"]}], TARGET, "are no texts"),
        ([NUMBER | {"mean": math.nan}], TARGET, "nan is not a number"),
        ([NUMBER | {"mean": True}], TARGET, "True is not a number"),
        ([NUMBER | {"deviation": "x"}], TARGET, "'x' is not a number"),
        ([TEXT | {"values": "abc"}], TARGET, "are no texts"),
        ([TEXT | {"values": ["c", 3]}], TARGET, "are no texts"),
        ([TEXT | {"values": ["c", "c"]}], TARGET, "twice"),
        ([TEXT | {"values": []}], TARGET, "has 0 values"),
        ([TEXT | {"values": [*map(str, range(101))]}], TARGET, "has 101 values"),
        ([TEXT], 3, "mapping"),
        ([TEXT], {"name": "y"}, "task"),
        ([TEXT], TARGET | {"more": 1}, "more"),
        ([TEXT], TARGET | {"name": 1}, "are no texts"),
        ([TEXT], TARGET | {"classes": ["a", "a"]}, "twice"),
        ([TEXT], TARGET | {"classes": 2}, "are no texts"),
    ],
)
def test_other_files_are_refused(tmp_path, inputs, target, message):
    (tmp_path / COLUMNS).write_text(json.dumps({"inputs": inputs, "target": target}))
    with pytest.raises(
        RunError, match=rf"columns.json does not describe the columns of a table \(.*{message}"
    ):
        read_columns(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"inputs": '])
def test_damaged_files_are_refused(tmp_path, content):
    (tmp_path / COLUMNS).write_text(content)
    with pytest.raises(RunError, match=r"columns.json"):
        read_columns(tmp_path)


def test_names_are_kept(tmp_path):
    columns = Columns(
        (Number("größe 東京", -0.1, 1e-30), Text("a=b", ("", "ü", '"'))),
        Target("y", "regression"),
    )
    columns.write(tmp_path / "mine.json")
    assert read_columns(tmp_path / "mine.json") == columns


def changed(rows, **columns):
    return [
        {**row, **{name: change(row[name]) for name, change in columns.items()}} for row in rows
    ]


OTHERS = {
    "order": (rows_of(), ["id", "hospital", "blood", "ward", "age", "diagnosis"], "column 1 is "),
    "fewer": (rows_of(), [name for name in HEADER if name != "ward"], "column 2 is 'ward' there a"),
    "more": (
        [{**row, "size": 1} for row in rows_of()],
        [*HEADER, "size"],
        "column 4 is missing there and 'size' here",
    ),
    "kind": (
        changed(rows_of(), blood=lambda value: f"{value[:2]}g"),
        HEADER,
        "column 'blood' has numbers there and texts here",
    ),
    "kind of texts": (
        changed(rows_of(), ward=lambda value: str(len(value))),
        HEADER,
        "column 'ward' has texts there and numbers here",
    ),
    "values": (
        changed(rows_of(), ward=lambda value: value.replace("surgery", "theatre")),
        HEADER,
        "column 'ward': value 3 is 'surgery' there and 'theatre' here",
    ),
    "mean": (rows_of(59), HEADER, "column 'age' has mean 229.76"),
    "classes": (
        changed(rows_of(), diagnosis=lambda value: value.replace("unclear", "a")),
        HEADER,
        "class 0 is 'healthy' there and 'a' here",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_start_with_other_columns_is_refused(first, tmp_path, other):
    rows, header, message = OTHERS[other]
    federation = patients(write(tmp_path / "other.csv", rows, header))
    with pytest.raises(InputError) as caught:
        run_of(federation, tmp_path / "run", start=first[1])
    assert str(caught.value).startswith(
        f"start: the run in {first[1]} was trained on other columns: {message}"
    )
    assert f"valid: the same columns, or data.columns: {first[1]}, which" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_start_with_inputs_that_are_not_standardized_is_refused(first, tmp_path):
    with pytest.raises(InputError, match="'age' is standardized there and as it is here; valid"):
        run_of(patients(first[0], standardize=False), None, start=first[1])


def test_a_start_with_the_same_columns(first, tmp_path):
    file, run = first
    assert run_of(patients(file), None, start=run).summary
    # Rounding, as on another machine, does not matter.
    columns = read_columns(run)
    age, *others = columns.columns
    near = Columns(
        (Number(age.name, age.mean * (1 + 1e-15), age.deviation), *others), columns.target
    )
    assert near != columns
    assert near.difference(columns) is None


def test_a_start_of_parts_compares_what_they_depend_on(first, tmp_path):
    """Inputs matter to the features, and classes to the head."""
    file, _ = first
    model = {"name": "mlp", "hidden": [3]}
    train(patients(file), model=model, rounds=1, out=tmp_path / "run")
    others = {}
    for what in ("order", "classes"):
        rows, header, _ = OTHERS[what]
        others[what] = patients(write(tmp_path / f"{what}.csv", rows, header))
    for parts, refused in (("features", "order"), ("head", "classes")):
        start = {"path": str(tmp_path / "run"), "parts": parts}
        for what, federation in others.items():
            if what == refused:
                with pytest.raises(InputError, match="trained on other columns"):
                    train(federation, model=model, rounds=0, start=start)
            else:
                train(federation, model=model, rounds=0, start=start)


def test_runs_without_columns_are_a_start(first, tmp_path):
    """Runs of data in arrays, and those of older versions, do not say what their columns are."""
    x, y = torch.randn(30, 5), torch.arange(30) % 3
    arrays = equipoise.Federation.from_arrays(x, y, clients=[0, 1] * 15)
    assert arrays.columns is None
    run_of(arrays, tmp_path / "arrays")
    assert not (tmp_path / "arrays" / COLUMNS).exists()
    run_of(patients(first[0]), None, start=tmp_path / "arrays")
    run_of(arrays, None, start=first[1])


def test_resuming_with_other_columns_is_refused(tmp_path):
    """Columns with other names may have the same numbers."""
    file, out = write(tmp_path / "patients.csv", rows_of()), tmp_path / "run"
    run_of(patients(file), out)
    assert run_of(patients(file), out, resume=True).summary
    renamed = [{**row, "pressure": row["blood"]} for row in rows_of()]
    header = [name.replace("blood", "pressure") for name in HEADER]
    fingerprint = patients(file).fingerprint()
    other = patients(write(tmp_path / "patients.csv", renamed, header))
    assert other.fingerprint() == fingerprint
    with pytest.raises(
        InputError,
        match="holds another experiment: column 3 is 'blood' there and 'pressure' here; choose",
    ):
        run_of(other, out, resume=True)


def test_a_longer_run_keeps_its_columns(first, tmp_path):
    federation, out = patients(first[0]), tmp_path / "run"
    run_of(federation, out)
    train(federation, model="logistic", rounds=2, out=out, resume=True)
    assert read_columns(out) == federation.columns
    # A run of an older version has none, and gets none.
    lines = [line for line in (out / "SHA256SUMS").read_text().splitlines() if COLUMNS not in line]
    (out / "SHA256SUMS").write_text("\n".join([*lines, ""]))
    (out / COLUMNS).unlink()
    train(federation, model="logistic", rounds=3, out=out, resume=True)
    assert train(federation, model="logistic", rounds=3, out=out, resume=True).summary


def test_other_tables_are_made_as_in_a_run(first, tmp_path):
    _, run = first
    rows = [row for row in rows_of(20) if row["diagnosis"] != "ill"]
    other = write(tmp_path / "other.csv", rows, list(reversed(HEADER)))
    federation = patients(other, columns=str(run))
    columns = read_columns(run)
    assert torch.equal(federation.x, columns.inputs(rows))
    assert not torch.equal(federation.x, patients(other).x)
    assert federation.class_names == columns.class_names
    assert [federation.class_names[label] for label in federation.y] == [
        row["diagnosis"] for row in rows
    ]
    assert federation.columns == columns
    assert [column.name for column in federation.columns.overview] == list(reversed(HEADER))
    # The file of a run is enough, and the new run is one that others may start from.
    named = patients(other, columns=str(run / COLUMNS))
    assert named.fingerprint() == federation.fingerprint()
    assert run_of(federation, tmp_path / "next", start=run).summary
    assert read_columns(tmp_path / "next") == columns


def test_classes_that_are_numbers_are_recognized(tmp_path):
    rows = [{"age": str(row), "y": str(row % 2)} for row in range(30)]
    learned = load("table", file=write(tmp_path / "a.csv", rows, ["age", "y"]), y="y").columns
    learned.write(tmp_path / COLUMNS)
    others = [{"age": "1", "y": value} for value in ("1.0", "0", "1", "01") * 8]
    made = load(
        "table",
        file=write(tmp_path / "b.csv", others, ["age", "y"]),
        y="y",
        columns=str(tmp_path / COLUMNS),
    )
    assert made.y.tolist() == [1, 0, 1, 1] * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": ["age"]}, r"data.x cannot be used with data.columns \(.*run\), which says what the"),
        ({"standardize": False}, r"data.standardize cannot be used with data.columns"),
        (
            {"ignore": ["age"]},
            "column 'age' is named in data.ignore and in data.columns; valid: in",
        ),
        (
            {"task": "regression"},
            r"\(data.columns\) are for the task 'classification'; set data.ta",
        ),
        ({"y": "ward"}, "column 'ward' is named in data.y and in data.columns"),
        (
            {"columns": "nowhere"},
            "data.columns: nowhere does not exist; valid: the directory of a run",
        ),
    ],
)
def test_options_that_contradict_the_columns(first, options, message):
    file, run = first
    options = {"y": "diagnosis", "clients": "hospital", "columns": str(run), **options}
    with pytest.raises(InputError, match=message):
        load("table", file=file, **options)


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        (
            changed(rows_of(20), diagnosis=lambda value: value.upper()),
            HEADER,
            r"column 'diagnosis' of .*\(data.y\) has 'ILL' in line 2, which was no class in traini",
        ),
        (
            rows_of(20),
            [name for name in HEADER if name != "blood"],
            r"unknown column 'blood' in .*other.csv \(data.columns\)",
        ),
        (
            changed(rows_of(20), ward=lambda value: value.replace("icu", "ICU")),
            HEADER,
            r"column 'ward' of .*other.csv \(data.file\) has 'ICU' in line 5, which was not in tra",
        ),
    ],
)
def test_files_that_do_not_fit_the_columns(first, tmp_path, rows, header, message):
    file = write(tmp_path / "other.csv", rows, header)
    with pytest.raises(InputError, match=message):
        patients(file, columns=str(first[1]))


def test_regressions_have_columns_without_classes(tmp_path):
    rows = [{"age": str(row), "cost": str(2.5 * row)} for row in range(60)]
    federation = load(
        "table", file=write(tmp_path / "a.csv", rows, ["age", "cost"]), y="cost", task="regression"
    )
    run_of(federation, tmp_path / "run")
    columns = read_columns(tmp_path / "run")
    assert (columns.class_names, columns.target.task) == (None, "regression")
    model, again = (
        equipoise.load(tmp_path / "run"),
        load(
            "table",
            file=write(tmp_path / "b.csv", rows[:30], ["cost", "age"]),
            y="cost",
            task="regression",
            columns=str(tmp_path / "run"),
        ),
    )
    assert torch.equal(model(again.x), model(federation.x[:30]))
    assert torch.equal(again.y, federation.y[:30])


def test_a_table_on_flower(first, tmp_path):
    """Every node reads the table and uses its own client; the server reads no table."""
    file, run = first
    content = {
        "data": {
            "name": "table",
            "file": file,
            "y": "diagnosis",
            "clients": "hospital",
            "ignore": ["id"],
        },
        "model": "logistic",
        "training": {"rounds": 1},
        "start": str(run),
        "flower": {"clients": 2, "timeout": 60},
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(json.dumps(content))
    nodes = [{"client": client, "memory": str(tmp_path / f"{client}")} for client in range(2)]
    there, _ = run_on_loop(path, nodes, tmp_path / "run")
    here = run_of(patients(file), None, start=run)
    assert there.summary["results"]["global"]["seen"]["mean"] == pytest.approx(
        here.summary["results"]["global"]["seen"]["mean"]
    )
    assert not (tmp_path / "run" / COLUMNS).exists()
