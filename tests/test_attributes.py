"""Attributes of samples: what is accepted, what is counted, and what is withheld."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from equipoise import Federation, tasks
from equipoise.attributes import Attribute, Counting, column_of, counting_of, counts_in, read_column
from equipoise.data.federate import federate
from equipoise.data.partition import Iid
from equipoise.data.source import Source
from equipoise.errors import InputError
from tests.attributed import attributed, people

CLASSIFICATION = tasks.build("classification")


def one(values, **options):
    samples = len(values)
    options = {"clients": [0] * samples, "classes": 2, **options}
    return Federation.from_arrays(
        np.zeros((samples, 1)), np.zeros(samples, int), attributes={"sex": values}, **options
    )


def test_values_are_text_in_alphabetical_order():
    assert one(["m", "f", "m", "m"]).attributes["sex"].names == ("f", "m")
    assert one(np.array([2, 10, 2, 2])).attributes["sex"].names == ("10", "2")
    assert one([True, False, True, True]).attributes["sex"].codes.tolist() == [1, 0, 1, 1]
    assert one(torch.tensor([1, 0, 0, 0])).attributes["sex"].names == ("0", "1")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["f", None, "m"], "attribute 'sex' of sample 1 is missing"),
        (["f", "m", float("nan")], "attribute 'sex' of sample 2 is missing"),
        (["f", ["m"], "m"], r"attribute 'sex' of sample 1 must be text or a number, got \['m'\]"),
        (list(range(101)), "attribute 'sex' has 101 values; valid: at most 100"),
        ("fm", "attribute 'sex' must be a list with one value per sample, got 'fm'"),
    ],
)
def test_unusable_values_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        one(values)


def test_attributes_must_fit_the_samples():
    with pytest.raises(
        InputError,
        match="attribute 'sex' of federation 'custom' has 2 values, but there are 3 samples",
    ):
        Federation.from_arrays(
            np.zeros((3, 1)), [0, 1, 0], clients=[0] * 3, attributes={"sex": ["f", "m"]}
        )
    with pytest.raises(InputError, match="attributes of source 'custom' must be a mapping"):
        Source(x=torch.zeros(2, 1), y=torch.zeros(2).long(), attributes=["f", "m"])
    wrong = {"sex": Attribute(np.array([0, 2, 1]), ("f", "m"))}
    with pytest.raises(
        InputError,
        match="'sex' of federation 'custom' has codes that are not positions in its 2 names",
    ):
        Federation.from_arrays(np.zeros((3, 1)), [0, 1, 0], clients=[0] * 3, attributes=wrong)
    many = {f"a{number}": ["f", "m", "m"] for number in range(21)}
    with pytest.raises(
        InputError, match="federation 'custom' has 21 attributes; valid: at most 20"
    ):
        Federation.from_arrays(np.zeros((3, 1)), [0, 1, 0], clients=[0] * 3, attributes=many)
    with pytest.raises(
        InputError, match="an attribute of federation 'custom' must have a name, got ''"
    ):
        Federation.from_arrays(
            np.zeros((3, 1)), [0, 1, 0], clients=[0] * 3, attributes={"": ["f", "m", "m"]}
        )


def test_they_reach_the_federation_and_its_fingerprint():
    x, y, attributes = people()
    source = Source(x=torch.from_numpy(x), y=torch.from_numpy(y), attributes=attributes)
    made = federate(source, Iid(3))
    assert made.attributes["origin"].names == ("north", "south", "west")
    assert made.pooled().attributes is not None
    assert set(made.pooled().attributes) == {"sex", "origin"}
    plain = replace(made, attributes={})
    assert (
        len(
            {
                made.fingerprint(),
                plain.fingerprint(),
                replace(made, attributes={"sex": attributes["sex"]}).fingerprint(),
            }
        )
        == 3
    )
    assert repr(made).endswith("; attributes sex, origin>")
    assert "attributes" not in repr(plain)
    shared = federate(source, Iid(3), test="group")
    assert set(shared.attributes) == {"sex", "origin"}


def test_names_of_counts_are_read_back():
    name = column_of('se"x', "a.b/c", "n")
    assert read_column(name) == ('se"x', "a.b/c", "n")
    for other in ("loss", "[1, 2]", '["sex", "f", "client"]', "[", '["sex", 3, "n"]'):
        assert read_column(other) is None


def outputs(predicted):
    return torch.nn.functional.one_hot(torch.as_tensor(predicted), 2).double()


def released(cells, min_cell):
    """Count samples given as {value: (positives, negatives)}, without positive predictions."""
    values = [value for value, (pos, neg) in cells.items() for _ in range(pos + neg)]
    y = torch.tensor(
        [int(place < pos) for pos, neg in cells.values() for place in range(pos + neg)]
    )
    counting = Counting({"v": Attribute.of(values, "v")}, CLASSIFICATION, 1, min_cell)
    found = counts_in(counting(outputs([0] * len(y)), y, np.arange(len(y)))).get("v", {})
    return {value for value in found}, {value for value, of in found.items() if "positives" in of}


def test_all_counts_of_a_value():
    counting = Counting(
        {"v": Attribute.of(["a", "b", "a", "a", "b", "z"], "v")}, CLASSIFICATION, 1, 1
    )
    truth, predicted = torch.tensor([1, 0, 0, 1, 1]), [1, 1, 0, 0, 1]
    # The last sample belongs to another client.
    found = counts_in(counting(outputs(predicted), truth, np.arange(5)))
    assert found == {
        "v": {
            "a": dict(
                n=3,
                selected=1,
                scored=3,
                score_sum=2,
                positives=2,
                negatives=1,
                true_positives=1,
                false_positives=0,
            ),
            "b": dict(
                n=2,
                selected=2,
                scored=2,
                score_sum=1,
                positives=1,
                negatives=1,
                true_positives=1,
                false_positives=1,
            ),
        }
    }


@pytest.mark.parametrize(
    ("cells", "given", "by_target"),
    [
        # Nothing is small.
        ({"a": (9, 9), "b": (5, 5)}, "ab", "ab"),
        # A cell without samples is not small.
        ({"a": (9, 0), "b": (5, 5)}, "ab", "ab"),
        # One of two values has few samples, which the other would reveal.
        ({"a": (9, 9), "b": (2, 2)}, "", ""),
        # The smallest other value is withheld with it.
        ({"a": (9, 9), "b": (2, 2), "c": (6, 6)}, "a", "a"),
        # Two small values together have too few samples.
        ({"a": (9, 9), "b": (1, 1), "c": (1, 1), "d": (6, 6)}, "a", "a"),
        ({"a": (9, 9), "b": (2, 2), "c": (2, 2)}, "a", ""),
        # Enough samples, but few positive ones: what depends on targets is withheld, with the next
        # value.
        ({"a": (9, 9), "b": (2, 8), "c": (5, 7)}, "abc", "a"),
        ({"a": (9, 9), "b": (2, 8)}, "ab", ""),
    ],
)
def test_small_cells_are_withheld(cells, given, by_target):
    assert released(cells, 5) == (set(given), set(by_target))
    assert released(cells, 1) == (set(cells), set(cells))


def test_withheld_counts_do_not_follow_from_totals():
    draws = np.random.default_rng(0)
    for _ in range(300):
        cells = {
            value: tuple(draws.integers(0, 12, 2).tolist())
            for value in "abcd"[: draws.integers(1, 5)]
        }
        if not sum(pos + neg for pos, neg in cells.values()):
            continue
        given, by_target = released(cells, 4)
        for shown, sums in (
            (given, [sum]),
            (by_target, [lambda cell: cell[0], lambda cell: cell[1]]),
        ):
            hidden = [cell for value, cell in cells.items() if value not in shown and sum(cell)]
            for of in sums:
                assert all(of(cells[value]) >= 4 or of(cells[value]) == 0 for value in shown)
                # Either nothing else can be withheld, or the rest is large and has several values.
                if hidden and shown:
                    assert len(hidden) >= 2
                    assert not 0 < sum(map(of, hidden)) < 4


def test_the_positive_class():
    named = {"classes": 3, "class_names": ("low", "middle", "high"), "min_cell": 5}
    sex = {"sex": Attribute.of(["f"], "sex")}
    assert counting_of(sex, CLASSIFICATION, positive=None, **named).positive is None
    assert counting_of(sex, CLASSIFICATION, positive="high", **named).positive == 2
    assert counting_of(sex, CLASSIFICATION, positive=0, **named).positive == 0
    assert counting_of({}, CLASSIFICATION, positive=None, **named) is None
    with pytest.raises(InputError, match="unknown class 'rich' in evaluation.positive"):
        counting_of(sex, CLASSIFICATION, positive="rich", **named)
    with pytest.raises(InputError, match="evaluation.positive must be a class from 0 to 2, got 3"):
        counting_of(sex, CLASSIFICATION, positive=3, **named)
    with pytest.raises(InputError, match="evaluation.positive=1 is not valid for a regression"):
        counting_of(sex, tasks.build("regression"), None, None, positive=1, min_cell=5)


def test_tasks_without_classes_have_scores_only():
    counting = Counting(
        {"v": Attribute.of(["a", "b", "a"], "v")}, tasks.build("regression"), None, 1
    )
    found = counts_in(
        counting(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0.0, 2.0, 2.0]), np.arange(3))
    )
    assert found == {
        "v": {
            "a": {"n": 2, "scored": 2, "score_sum": 5.0},
            "b": {"n": 1, "scored": 1, "score_sum": 0.0},
        }
    }


def test_four_clients_have_people_of_both_sexes():
    made = attributed()
    sex = made.attributes["sex"]
    assert all(set(sex.codes[made.test.of(client)].tolist()) == {0, 1} for client in range(4))
