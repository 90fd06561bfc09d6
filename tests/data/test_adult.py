"""Adult, read from files in the layout of UCI."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from equipoise.config import experiment_from
from equipoise.data import load
from equipoise.data.adult import CATEGORIES, COLUMNS
from equipoise.errors import InputError
from tests.data.small_adult import write_adult


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_adult(folder / "adult")
    return folder


def table(root, name):
    with (root / "adult" / name).open() as file:
        return [
            dict(zip((*COLUMNS, "class"), (value.strip() for value in row), strict=True))
            for row in csv.reader(file)
            if len(row) > 2
        ]


def test_people_and_clients(root):
    made = load("adult", root=str(root), splits=(0.8, 0.2, 0.0))
    trained, tested = table(root, "adult.data"), table(root, "adult.test")
    held = {}
    for row in trained:
        held.setdefault(
            f"{row['workclass']}, {row['occupation']}".replace("?", "unknown"), []
        ).append(row)
    large = {name for name, rows in held.items() if len(rows) >= 20}
    assert set(made.client_names) == large
    assert len(large) == 9
    assert set(made.group_names) == {"Private", "Local-gov", "Self-emp-inc"}
    for client, name in enumerate(made.client_names):
        own = [
            row
            for row in tested
            if f"{row['workclass']}, {row['occupation']}".replace("?", "unknown") == name
        ]
        assert made.test.sizes[client] == len(own)
        assert made.train.sizes[client] + made.val.sizes[client] == len(held[name])
        assert int(made.y[made.test.of(client)].sum()) == sum(
            row["class"] == ">50K." for row in own
        )
        assert made.group_names[made.groups[client]] == name.split(", ")[0]
        sex = made.attributes["sex"]
        women = sum(sex.names[code] == "Female" for code in sex.codes[made.test.of(client)])
        assert women == sum(row["sex"] == "Female" for row in own)
    assert (made.classes, made.class_names) == (2, ("<=50K", ">50K"))
    assert set(made.attributes) == {"sex", "race"}


def test_inputs(root):
    made = load("adult", root=str(root))
    first = next(row for row in table(root, "adult.data") if row["workclass"] != "?")
    position = [row["workclass"] != "?" for row in table(root, "adult.data")].index(True)
    inputs = made.x[position].tolist()
    hours = (int(first["hours-per-week"]) - 40) / 12
    assert inputs[0] == pytest.approx((int(first["age"]) - 40) / 13)
    assert inputs[2] == pytest.approx(hours)
    assert inputs[3] == pytest.approx(np.log1p(int(first["capital-gain"])) / 3)
    named = [
        f"{column}={value}" for column, values in CATEGORIES.items() for value in values.split()
    ]
    ones = {name for name, value in zip(named, inputs[5:], strict=True) if value}
    assert ones == {f"{column}={first[column]}" for column in CATEGORIES}


def test_attributes_may_be_hidden_from_the_model(root):
    seen, blind = (load("adult", root=str(root), use_attributes=use) for use in (True, False))
    assert seen.shape[0] - blind.shape[0] == 7
    assert set(blind.attributes) == {"sex", "race"}


def test_other_clients_and_attributes(root):
    made = load(
        "adult", root=str(root), clients=("occupation",), attributes=("workclass",), min_samples=1
    )
    assert set(made.client_names) == {"Sales", "Exec-managerial", "Adm-clerical"}
    assert made.attributes["workclass"].names == ("Local-gov", "Private", "Self-emp-inc", "unknown")


def test_without_published_tests_samples_are_divided(root, tmp_path):
    (tmp_path / "adult.data").write_bytes((root / "adult" / "adult.data").read_bytes())
    made = load("adult", root=str(tmp_path))
    assert (made.test.sizes > 0).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "39, Private\n",
            r"line 1 of .*adult.data must have 14 values and one of the classes <=50K and >50K, "
            r"got '39, Pr",
        ),
        ("\n\n", "adult.data has no rows"),
        ("é", "adult.data is not a file of Adult"),
    ],
)
def test_other_files_are_refused(text, message, tmp_path):
    (tmp_path / "adult.data").write_text(text)
    with pytest.raises(InputError, match=message):
        load("adult", root=str(tmp_path))


def test_wrong_options_are_named(root):
    with pytest.raises(InputError, match="unknown column 'gender' in data.attributes of data"):
        load("adult", root=str(root), attributes=("gender",))
    with pytest.raises(InputError, match="unknown column 'age' in data.clients of data 'adult'"):
        load("adult", root=str(root), clients=("age",))
    with pytest.raises(InputError, match="clients of data 'adult' must name at least one column"):
        load("adult", root=str(root), clients=())
    with pytest.raises(
        InputError, match="no client of data 'adult' has min_samples=99999 samples to train on"
    ):
        load("adult", root=str(root), min_samples=99999)


def test_an_attribute_may_define_clients_and_groups(root):
    data = {"name": "adult", "root": str(root), "clients": ["sex", "occupation"]}
    method = {"name": "gifair", "fairness": "group"}
    made = experiment_from(
        {"data": data, "method": method, "model": "logistic", "training": {"rounds": 1}}
    )
    groups = made.run().summary["results"]["global"]["seen"]["groups"]
    assert set(groups) == {"Female", "Male"}
