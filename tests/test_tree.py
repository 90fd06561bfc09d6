"""Trees: names, parts, and sums over them."""

from __future__ import annotations

import math

import pytest
import torch

from equipoise.errors import InputError
from equipoise.tree import (
    Magnitudes,
    flat_rows,
    in_parts,
    inner_product,
    select,
    size_in_bytes,
    squared_distance,
    tree_map,
    unusable,
)

NAMES = [
    "features.0.weight",
    "features.1.running_mean",
    "head.weight",
    "head.bias",
    "personal.head.weight",
    "header",
]


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ("all", [0, 1, 2, 3, 5]),
        ("features", [0, 1]),
        ("features.0", [0]),
        ("head", [2, 3]),
        ("head.bias", [3]),
        ("personal", [4]),
        ("personal.head", [4]),
        (("features", "personal.head"), [0, 1, 4]),
        (("head", "head.bias"), [2, 3]),
        ((), []),
    ],
)
def test_parts_are_prefixes_of_whole_names(parts, wanted):
    assert select(NAMES, parts) == [NAMES[i] for i in wanted]
    assert [name for name in NAMES if in_parts(name, parts)] == [NAMES[i] for i in wanted]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("feature", "unknown part 'feature' in the method; did you mean 'features'"),
        ("hea", "unknown part 'hea'"),
        (
            ("head", "prompt"),
            "unknown part 'prompt'.*Valid: all, features, head, header, personal.head",
        ),
        ("personal.features", "unknown part 'personal.features'"),
    ],
)
def test_a_part_that_holds_nothing_is_refused(parts, message):
    with pytest.raises(InputError, match=message):
        select(NAMES, parts)


NORMALISED = [
    "features.0.weight",
    "features.1.weight",
    "features.1.bias",
    "features.1.running_mean",
    "features.1.running_var",
    "features.10.weight",
    "head.norm.running_mean",
    "head.weight",
    "personal.features.1.weight",
    "personal.features.1.running_mean",
    "personal.head.weight",
]


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ("batchnorm", [1, 2, 3, 4, 6]),
        ("personal.batchnorm", [8, 9]),
        (("head", "batchnorm"), [1, 2, 3, 4, 6, 7]),
        (("batchnorm", "personal"), [1, 2, 3, 4, 6, 8, 9, 10]),
    ],
)
def test_batchnorm_is_every_layer_with_statistics(parts, wanted):
    assert select(NORMALISED, parts) == [NORMALISED[i] for i in wanted]


def test_a_model_without_batchnorm_is_refused_where_it_is_named():
    for part in ("batchnorm", "personal.batchnorm"):
        with pytest.raises(
            InputError, match=f"part '{part}', but the model has no BatchNorm layer.*such as bncnn"
        ):
            select(["features.0.weight", "head.weight", "personal.head.weight"], part)


def test_all_of_an_empty_tree_is_empty():
    assert select([], "all") == []


def test_maps_and_sums_by_hand():
    a = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor(2.0)}
    b = {
        "w": torch.tensor([[0.0, 1.0], [1.0, 1.0]]),
        "b": torch.tensor(5.0),
        "extra": torch.tensor(9.0),
    }
    assert tree_map(lambda x, y: x - y, a, b)["w"].tolist() == [[1.0, 1.0], [2.0, 3.0]]
    assert squared_distance(a, b).item() == 1 + 1 + 4 + 9 + 9
    assert inner_product(a, b).item() == 0 + 2 + 3 + 4 + 10
    assert list(tree_map(torch.neg, a)) == ["w", "b"]


def test_bytes_of_nested_structures():
    tree = {
        "model": {"w": torch.zeros(3, 2), "n": torch.zeros(2, dtype=torch.int64)},
        "more": [torch.zeros(5, dtype=torch.float64), (torch.zeros(1, dtype=torch.bool),)],
        "words": "not counted",
    }
    assert size_in_bytes(tree) == 6 * 4 + 2 * 8 + 5 * 8 + 1
    assert size_in_bytes({}) == 0


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((3, 2, 4), (3, 8)), ((3, 2), (3, 2)), ((3,), (3, 1)), ((0, 2, 4), (0, 8)), ((3, 0), (3, 0))],
)
def test_rows_are_flattened_whatever_they_hold(shape, wanted):
    stack = torch.arange(float(torch.Size(shape).numel())).view(shape)
    flat = flat_rows(stack)
    assert tuple(flat.shape) == wanted
    assert flat.flatten().tolist() == stack.flatten().tolist()


@pytest.mark.parametrize(
    ("names", "part"), [(["head.weight"], "features"), (["features.0.weight"], "head")]
)
def test_a_part_without_parameters_is_no_unknown_part(names, part):
    with pytest.raises(
        InputError,
        match=f"uses the part '{part}', but the model has no trainable tensors there; valid: .*mlp",
    ):
        select(names, part)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 4099, 6999])
def test_one_number_that_is_not_finite_makes_the_magnitude_not_finite(bad, dtype, place):
    values = torch.ones(7, 1000, dtype=dtype)
    (before,) = Magnitudes([values]).read()
    assert before == pytest.approx(7000**0.5, rel=1e-2)
    values.view(-1)[place] = bad
    assert not math.isfinite(Magnitudes([values]).read()[0])


def test_magnitudes_are_those_of_each_tensor_in_its_place():
    tensors = [
        torch.tensor([3.0, -4.0]),
        torch.tensor([[6.0], [8.0]], dtype=torch.float64),
        torch.tensor([5, 6]),
        torch.empty(2, 0),
        torch.tensor(2.0).to(torch.float8_e4m3fn),
        torch.full((2,), 1e30),
        torch.tensor([3j, 4.0]),
    ]
    assert Magnitudes(tensors).read() == [5.0, 10.0, 0.0, 0.0, 2.0, math.inf, 5.0]


def test_magnitudes_are_those_of_when_they_were_launched():
    values = torch.tensor([3.0, 4.0])
    norms = Magnitudes([values])
    values.zero_()
    assert norms.read() == [5.0]


def test_clients_are_usable_up_to_the_largest_number_whatever_their_norm():
    # The norm is beyond the limit, and in the second tensor its square overflows.
    many = torch.full((2, 100), 0.9e12)
    assert (
        unusable(
            [{"w": many, "mask": torch.full((2, 3), -1e30)}], {"mask": torch.full((3,), -1e30)}
        )
        == {}
    )
    many[1, 7] = 1.1e12
    assert unusable([{"w": many}], {}) == {1: "answered with a number beyond 1e+12 in w"}
