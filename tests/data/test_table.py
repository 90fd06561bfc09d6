"""Tables in CSV files."""

from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from equipoise import Evaluation, train
from equipoise.cli import app
from equipoise.config import experiment_from
from equipoise.data import Iid, Natural, load
from equipoise.data.table import recipe, table
from equipoise.errors import InputError

SMALL = """\
hospital,region,sex,age,pressure,ward,diagnosis
A,north,f,30,120,surgery,ill
A,north,m,50,120,,healthy
B,south,?,40,,medicine,healthy
B,south,f,n/a,120,Emergency,ill
"""
ROLES = {"y": "diagnosis", "clients": "hospital", "groups": "region", "attributes": ["sex"]}


@pytest.fixture
def written(tmp_path):
    def write(content, name="patients.csv"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def column(cells, name="a"):
    """Return a table with a column of these cells and a target of two classes."""
    return "\n".join([f"{name},y", *(f"{cell},{row % 2}" for row, cell in enumerate(cells))])


def test_inputs_by_hand(written):
    made = table(file=written(SMALL), **ROLES)
    # The ages 30, 50 and 40 have mean 40 and variance (100 + 100 + 0) / 3.
    scaled = 10 / math.sqrt(200 / 3)
    # Age, pressure, the wards Emergency, medicine and surgery.
    expected = [
        [-scaled, 0, 0, 0, 1],
        [scaled, 0, 0, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 1, 0, 0],
    ]
    assert made.x.dtype == torch.float32
    assert torch.allclose(made.x, torch.tensor(expected))
    plain = table(file=written(SMALL), **ROLES, standardize=False)
    assert plain.x[:, 0].tolist() == [30, 50, 40, 40]
    assert plain.x[:, 1].tolist() == [120] * 4
    assert plain.x[:, 2:].equal(made.x[:, 2:])


def test_roles_by_hand(written):
    made = table(file=written(SMALL), **ROLES)
    assert (made.classes, made.class_names) == (2, ("healthy", "ill"))
    assert made.y.tolist() == [1, 0, 0, 1]
    assert made.ids.tolist() == ["A", "A", "B", "B"]
    assert (made.group_names, made.groups.tolist()) == (("north", "south"), [0, 0, 1, 1])
    assert made.attributes["sex"].names == ("f", "m", "unknown")
    assert made.attributes["sex"].codes.tolist() == [0, 1, 2, 0]
    assert made.name == "patients"


def test_attributes_are_inputs_only_if_x_names_them(written):
    file = written(SMALL)
    made = table(file=file, y="diagnosis", attributes=["sex"], x=["sex", "age"])
    assert made.x[:, :2].tolist() == [[1, 0], [0, 1], [0, 0], [1, 0]]
    assert made.x.shape == (4, 3)
    assert set(made.attributes) == {"sex"}
    left = table(file=file, **ROLES, ignore=["ward", "pressure"])
    assert left.x.shape == (4, 1)
    assert table(file=file, **ROLES, x=["hospital"]).x.tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("cells", "names", "labels"),
    [
        (["10", "9", "10", "-1"], ("-1", "9", "10"), [2, 1, 2, 0]),
        (["b", "10", "9", "b"], ("10", "9", "b"), [2, 0, 1, 2]),
        (["1", "0.0", "1.0", "0"], ("0.0", "1"), [1, 0, 1, 0]),
        (["no", " yes ", '"no"', "no "], ("no", "yes"), [0, 1, 0, 0]),
    ],
)
def test_order_of_classes(written, cells, names, labels):
    made = table(file=written("\n".join(["y,a", *(f"{cell},3" for cell in cells)])), y="y")
    assert made.class_names == names
    assert made.y.tolist() == labels
    assert not made.x.any()


def test_constant_and_tiny_columns(written):
    # The standard deviation of three times 0.1 is not exactly 0.
    for cells in (["0.1"] * 3, ["0.1"] * 10, ["1e-200", "2e-200"], ["", "7"]):
        assert not table(file=written(column(cells)), y="y").x.any()


def test_other_ways_to_write_a_file(written):
    expected = table(file=written(SMALL), **ROLES)
    quoted = "\n".join(f'"{row}"' for row in SMALL.replace(",", '","').splitlines())
    files = {
        "bom.csv": b"\xef\xbb\xbf" + SMALL.encode(),
        "crlf.csv": SMALL.replace("\n", "\r\n").encode(),
        "blank.csv": SMALL.replace("\n", "\n\n").encode(),
        "spaces.csv": SMALL.replace(",", " , ").encode(),
        "packed.csv.gz": gzip.compress(SMALL.encode()),
        "quoted.csv": quoted.encode(),
    }
    for name, content in files.items():
        made = table(file=written(content, name), **ROLES)
        assert made.x.equal(expected.x), name
        assert made.ids.tolist() == expected.ids.tolist()
    for delimiter, character in ((";", ";"), ("tab", "\t"), ("\t", "\t")):
        file = written(SMALL.replace(",", character))
        assert table(file=file, **ROLES, delimiter=delimiter).x.equal(expected.x)


def test_names_of_columns(written):
    # pandas writes row numbers without a name, and spreadsheets break long names.
    file = written(',"blood\npressure",NA,y,\n0,3,5,a,\n1,4,5,b,\n')
    made = table(file=file, y="y", x=["blood pressure"])
    assert made.x.tolist() == [[-1], [1]]
    assert table(file=file, y="y").x.tolist() == [[-1, 0], [1, 0]]


def test_regression(written):
    text = "\n".join(["age,cost", *(f"{row},{row * 2.5}" for row in range(60))])
    source, partition = recipe(seed=0, file=written(text), y="cost", task="regression")
    assert source.y.dtype == torch.float32
    assert source.y[:3].tolist() == [0, 2.5, 5]
    assert source.class_names is None
    federation = load("table", file=written(text), y="cost", task="regression")
    assert (federation.clients, federation.task, partition.clients) == (10, "regression", 10)
    run = train(federation, model="mlp", rounds=1)
    assert run.summary["score"] == "loss"


def test_partitions(written):
    text = "\n".join(["age,ill", *(f"{row},{row % 2}" for row in range(200))])
    assert load("table", file=written(text), y="ill").clients == 10
    assert recipe(seed=0, file=written(SMALL), **ROLES)[1] == Natural(1)
    assert load("table", file=written(text), y="ill", partition=dict(name="iid", clients=4)).clients


@pytest.mark.parametrize("partition", [{"name": "iid", "clients": 2}, Iid(2)])
def test_a_partition_may_not_mix_the_given_clients(written, partition):
    given = {"file": written(SMALL), **ROLES}
    message = (
        r"^data\.partition is .*iid.*, but data\.clients='\w+' names the client of each sample; "
        r"valid: data\.clients without data\.partition"
    )
    with pytest.raises(InputError, match=f"(?i){message}"):
        load("table", **given, partition=partition)
    natural = {"name": "natural", "min_samples": 1}
    assert load("table", **given, partition=natural).client_names
    assert load("table", **given).client_names


def many(count, cell="v{}"):
    return column([cell.format(row) for row in range(count)])


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, r"patients.csv \(data.file\) is empty; valid: a CSV file with a header row"),
        ("a,y\n\n", {}, r"\(data.file\) has no rows below its header; valid: one for each sample"),
        (
            "a;y\n1;2\n",
            {},
            r"has one column, 'a;y'; valid: two or more. Cells are divided at ','; data.delimiter",
        ),
        ("a,y,a\n1,2,3\n", {}, r"\(data.file\) has 2 columns called 'a'; valid: different names"),
        (
            'a,y\n1,0\n"2\n",1\n3,1,5\n',
            {},
            r"line 5 of .*patients.csv \(data.file\) has 3 cells; valid: 2, as in the header",
        ),
        ('a,y\n1,0\n"2,1\n', {}, r"line 3 of .*\(data.file\) cannot be read \(unexpected end"),
        ("a,y\n1,é\n".encode("latin-1"), {}, r"is not text in UTF-8 \(line 2\); .*'CSV UTF-8'"),
        (b"\x1f\x8bno", {}, r"is a broken gzip file .*\(data.file\); valid: a CSV file"),
        (
            "ages,y\n1,0\n",
            {"x": ["age"]},
            r"unknown column 'age' in .*patients.csv \(data.x\); did you mean 'ages'\? Valid: ",
        ),
        ("a,b\n1,0\n", {}, r"unknown column 'y' in .*patients.csv \(data.y\). Valid: a, b"),
        ("a,y\n1,0\n", {"groups": "y"}, "column 'y' is named in data.y and in data.groups; valid:"),
        ("a,y\n1,0\n", {"attributes": ["y"]}, "'y' is named in data.y and in data.attributes"),
        (
            "a,y\n1,0\n",
            {"clients": "a", "ignore": ["a"]},
            "'a' is named in data.ignore and in data.clients",
        ),
        (
            "a,y\n1,0\n",
            {"clients": "a", "groups": "a"},
            "'a' is named in data.clients and in data.groups",
        ),
        ("a,y\n1,0\n", {"x": ["a", "a"]}, "data.x names column 'a' twice; valid: once"),
        ("a,y\n1,0\n", {"x": "a"}, "data.x must be a list, got 'a'"),
        ("a,y\n1,0\n", {"x": [3]}, "each of data.x must be text, got 3"),
        (
            "a,y\n1,0\n",
            {"ignore": ["a"]},
            r"no column of .*patients.csv \(data.file\) is left as an input; name columns in",
        ),
        ("a,y\n1,0\n", {"x": []}, "is left as an input"),
        (
            "a,y\n1,0\n2,\n3,1\n4,na\n5,?\n",
            {},
            r"column 'y' of .*patients.csv \(data.y\) has no value in line 3 and 2 further lines; "
            "fill it in, or remove the line",
        ),
        (
            "a,b,y\n1,,0\n1,2,1\n",
            {"clients": "b"},
            r"column 'b' of .*\(data.clients\) has no value in li",
        ),
        (
            "a,b,y\n1,NaN,0\n1,2,1\n",
            {"groups": "b"},
            r"column 'b' of .*\(data.groups\) has no value in l",
        ),
        ("a,y\n1,0\n2,0\n", {}, r"\(data.y\) has one value only, '0'; valid: two classes or more"),
        (
            "\n".join(["y,a", *(f"{row},1" for row in range(101))]),
            {},
            r"has 101 different numbers, and each would be a class; valid: at most 100, or "
            "data.task: regression",
        ),
        ("a,y\n1,0\n-inf,1\n", {}, r"column 'a' of .*has '-inf' in line 3; valid: finite numbers"),
        ("a,y\n1,0\n1e39,1\n", {}, r"column 'a' of .*has '1e39' in line 3; valid: finite numbers"),
        ("a,y\n+nan,0\n3,1\n", {}, r"column 'a' of .*has '\+nan' in line 2; valid: finite"),
        ("a,y\n,0\n?,1\n", {}, r"column 'a' of .* has no values; valid: at least one, or leave"),
        (
            many(101),
            {},
            r"column 'a' of .*\(data.file\) has 101 different texts; valid: at most 100 \('v0' in "
            r"line 2 is not a number\). Leave the column out with data.ignore",
        ),
        (
            "\n".join(["a,b,y", *(f"{row},{row},{row % 2}" for row in range(101))]),
            {"attributes": ["a"]},
            "attribute 'a' has 101 values; valid: at most 100",
        ),
        (
            "a,y\n1,3\n1,high\n",
            {"task": "regression"},
            r"\(data.y\) has 'high' in line 3; valid for a regression: numbers",
        ),
        (
            "a,y\n1,3\n1,4\n",
            {"task": "segmentation"},
            "data.task must be classification, regression or a task derived .*'segmentation'",
        ),
        ("a,y\n1,3\n", {"standardize": "no"}, "data.standardize must be true or false, got 'no'"),
        ("a,y\n1,3\n", {"delimiter": ",,"}, "data.delimiter must be one character, .*got ',,'"),
        ("a,y\n1,3\n", {"delimiter": '"'}, "data.delimiter must be one character"),
        (
            "a,b,y\n1,\x1b[2J,0\n1,2,1\n",
            {"clients": "b"},
            r"each value of column 'b' of .*\(data.clients\) must be text in one line",
        ),
    ],
)
def test_what_is_refused(written, content, options, message):
    with pytest.raises(InputError, match=message):
        load("table", file=written(content), **{"y": "y", **options})


def test_missing_files(written, tmp_path, monkeypatch):
    written(SMALL)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        load("table", file="patient.csv", y="y")
    assert str(caught.value) == (
        "cannot read patient.csv: No such file or directory (data.file); valid: a CSV file with a "
        "header row; did you mean 'patients.csv'?; relative paths start in the working directory, "
        f"{tmp_path}"
    )
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory \(data.file\); valid: "):
        load("table", file=str(tmp_path), y="y")
    with pytest.raises(InputError, match=r"null byte \(data.file\)"):
        load("table", file="a\0", y="y")


def test_numbers_that_are_read_as_text_are_warned_of(written):
    cells = [*map(str, range(10)), "<5", "<5"]
    with pytest.warns(UserWarning, match="column 'a' of .* as text, because '<5' in line 12 is no"):
        made = table(file=written(column(cells)), y="y")
    assert made.x.shape == (12, 11)
    # Three grades, one of which is text, are no numbers. Python reads 1_0 as a number.
    assert table(file=written(column(["1", "2", "3+", "1_0"])), y="y").x.shape == (4, 4)


@pytest.mark.parametrize("count", [2, 45, 101])
@pytest.mark.parametrize("option", ["x", "y"])
def test_decimal_commas_are_refused(written, count, option):
    """Also if each of them could be a value of a text column."""
    cells = ["37", *(f"{20 + number},5" for number in range(count))]
    rows = [f"{cell};{row % 2}" for row, cell in enumerate(cells)]
    file = written("\n".join(["temperature;ill", *rows]))
    names = {"x": ["temperature"], "y": "ill"} if option == "x" else {"y": "temperature"}
    where = "data.file" if option == "x" else "data.y"
    with pytest.raises(InputError) as caught:
        table(file=file, delimiter=";", **names)
    assert str(caught.value) == (
        f"column 'temperature' of {file} ({where}) has decimal commas: '20,5' in line 3; valid: "
        "decimal points (20.5), or texts that do not look like numbers"
    )


def test_decimal_commas_of_a_regression_are_refused(written):
    file = written('a,y\n1,"-1.234,5"\n2,3\n')
    with pytest.raises(InputError, match=r"\(data.y\) has decimal commas: .* points \(-1234.5\)"):
        table(file=file, y="y", task="regression")


def test_decimal_commas_beside_a_few_texts_are_refused(written):
    cells = ["low", *(f'"{number},5"' for number in range(10))]
    with pytest.raises(InputError, match=r"decimal commas: '0,5' in line 3"):
        table(file=written(column(cells)), y="y")


def test_texts_with_commas_are_texts(written):
    for cells in (['"1,2"', '"1,2,3"', '"2,3"'], ['"1,"', '"a,5"'], ['"1,5"', "none", "2"]):
        assert table(file=written(column(cells)), y="y").x.shape[1] == len(cells)
    assert "a1,5" in table(file=written(column(['"a1,5"', "b"])), y="y").columns.names[0]


def people(rows=240):
    """Return a table in which only women's diagnosis depends on the blood value."""
    draws = np.random.default_rng(0)
    lines = ["patient,hospital,sex,blood,diagnosis"]
    for row in range(rows):
        sex, blood = "fm"[row % 2], draws.normal()
        ill = blood > 0 if sex == "f" else draws.random() < 0.5
        lines.append(f"p{row},{'ABC'[row % 3]},{sex},{blood:.4f},{'ill' if ill else 'healthy'}")
    return "\n".join(lines)


def test_a_run_reports_by_attribute(written):
    data = {
        "name": "table",
        "file": written(people()),
        "y": "diagnosis",
        "clients": "hospital",
        "attributes": ["sex"],
        "ignore": ["patient"],
    }
    federation = load(**data)
    assert federation.shape == (1,)
    how = {"rounds": 20, "optimizer": {"name": "sgd", "lr": 0.5}}
    run = train(federation, model="logistic", **how, evaluation=Evaluation(min_cell=1))
    seen = run.summary["results"]["global"]["seen"]
    assert seen["worst_client_name"] in ("A", "B", "C")
    values = seen["attributes"]["sex"]["values"]
    tested = np.concatenate([federation.test.of(client) for client in range(3)])
    right = (run.model()(federation.x[tested]).argmax(1) == federation.y[tested]).numpy()
    sex = federation.attributes["sex"]
    for code, name in enumerate(sex.names):
        assert values[name]["n"] == (sex.codes[tested] == code).sum()
        assert values[name]["accuracy"] == pytest.approx(right[sex.codes[tested] == code].mean())
    assert values["f"]["accuracy"] > values["m"]["accuracy"] + 0.2
    made = experiment_from(yaml.safe_load(yaml.safe_dump({"data": data})))
    assert made.federation().fingerprint() == federation.fingerprint()


def test_the_command_line_shows_a_table(written, tmp_path, monkeypatch):
    written(people())
    monkeypatch.chdir(tmp_path)
    given = ["file=patients.csv", "y=diagnosis", "clients=hospital", "ignore=[patient]"]
    options = [word for setting in given for word in ("--set", setting)]
    result = CliRunner().invoke(app, ["data", "table", *options, "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["clients"][0]["name"] == "A"


def test_the_command_line_shows_the_columns(written, tmp_path, monkeypatch):
    odd = SMALL.replace("region", "region,code,\x1b[2Jempty").replace("th,", "th,7,NA,")
    written(odd)
    monkeypatch.chdir(tmp_path)
    given = ["file=patients.csv", "y=diagnosis", "clients=hospital", "groups=region"]
    given += ["attributes=[sex]", "x=[age, ward, sex]", "partition.name=natural"]
    given += ["partition.min_samples=1"]
    options = [word for setting in given for word in ("--set", setting)]
    result = CliRunner().invoke(app, ["data", "table", *options, "--json"])
    assert result.exit_code == 0, result.output
    columns = {column.pop("name"): column for column in json.loads(result.stdout)["columns"]}
    assert [*columns] == odd.splitlines()[0].split(",")
    assert columns["age"] == {
        "role": "input",
        "kind": "number",
        "missing": 1,
        "different": 3,
        "range": [30, 50],
        "values": [],
    }
    assert columns["ward"] == {
        "role": "input",
        "kind": "text",
        "missing": 1,
        "different": 3,
        "range": None,
        "values": ["Emergency", "medicine", "surgery"],
    }
    roles = {name: column["role"] for name, column in columns.items()}
    assert roles == {
        "hospital": "client",
        "region": "group",
        "code": "ignored",
        "\x1b[2Jempty": "ignored",
        "sex": "attribute, input",
        "age": "input",
        "pressure": "ignored",
        "ward": "input",
        "diagnosis": "target",
    }
    assert columns["\x1b[2Jempty"]["kind"] == "empty"
    shown = CliRunner().invoke(app, ["data", "table", *options]).output
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "age input number 3 1 30 to 50" in lines
    assert "ward input text 3 1 'Emergency', 'medicine', 'surgery'" in lines
    assert "code ignored number 1 0 7 to 7" in lines
    assert r"\x1b[2Jempty ignored empty 0 4" in lines


def test_only_tables_have_columns():
    document = CliRunner().invoke(app, ["data", "digits", "--json"]).stdout
    assert json.loads(document)["columns"] is None
