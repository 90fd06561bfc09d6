import math

import numpy as np
import pytest

from equipoise.checks import count, image, name_and_options, probability, real, several
from equipoise.errors import InputError


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_of_any_kind_become_python_integers(value):
    assert type(count(value, "width")) is int
    assert count(value, "width") == 3


@pytest.mark.parametrize(
    ("value", "least", "shown"),
    [
        (0, 1, "0"),
        (-1, 0, "-1"),
        (True, 1, "True"),
        (2.0, 1, "2.0"),
        ("2", 1, "'2'"),
        (None, 1, "None"),
    ],
)
def test_what_is_no_whole_number_or_too_small_is_refused(value, least, shown):
    with pytest.raises(
        InputError, match=f"^width must be a whole number of at least {least}, got {shown}$"
    ):
        count(value, "width", least=least)


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2)])
def test_real_numbers_of_any_kind_become_python_floats(value):
    assert type(real(value, "beta")) is float
    assert real(value, "beta") == 2.0


@pytest.mark.parametrize(
    ("value", "least", "expected"),
    [
        (0, None, "above 0, got 0"),
        (-1.5, None, "above 0, got -1.5"),
        (math.inf, None, "above 0, got inf"),
        (math.nan, 1, "of at least 1, got nan"),
        (0.5, 1, "of at least 1, got 0.5"),
        (True, None, "above 0, got True"),
        ("1", None, "above 0, got '1'"),
        (1j, None, "above 0, got 1j"),
    ],
)
def test_what_is_no_finite_number_or_too_small_is_refused(value, least, expected):
    with pytest.raises(InputError, match=f"^beta must be a finite number {expected}$"):
        real(value, "beta", least=least)


def test_the_smallest_real_number_is_valid():
    assert real(1, "imbalance", least=1) == 1.0
    assert real(0, "share", least=0) == 0.0


def test_items_of_a_list_are_checked_one_by_one():
    assert several(np.array([1, 2]).tolist(), "channels", count) == (1, 2)
    with pytest.raises(
        InputError, match="^each of channels must be a whole number of at least 1, got 0$"
    ):
        several((1, 0), "channels", count)
    with pytest.raises(InputError, match="^channels must be a list, got 'ab'$"):
        several("ab", "channels", count)
    with pytest.raises(InputError, match="^channels must be a list of 2 numbers, got"):
        several((1,), "channels", count, length=2)


@pytest.mark.parametrize("value", [1, -0.1, math.nan, True, "0.5"])
def test_probabilities_are_from_0_to_below_1(value):
    assert probability(0, "dropout") == 0.0
    with pytest.raises(InputError, match="^dropout must be a number from 0 to below 1, got "):
        probability(value, "dropout")


def test_images_have_three_axes_and_enough_pixels():
    assert image((3, 4, 5), "cnn2", smallest=4) == (3, 4, 5)
    with pytest.raises(InputError, match="images of shape"):
        image((4, 5), "cnn2", smallest=4)
    with pytest.raises(InputError, match="at least 4 x 4"):
        image((3, 4, 3), "cnn2", smallest=4)


def test_a_name_may_come_with_options():
    given = {"name": "crop", "padding": 2}
    assert name_and_options(given, "augment") == ("crop", {"padding": 2})
    assert given == {"name": "crop", "padding": 2}
    assert name_and_options("flip", "augment") == ("flip", {})
    for wrong in ({"padding": 2}, {"name": 3}, 3, None, ["flip"]):
        with pytest.raises(
            InputError, match="^augment must be a name or a mapping with 'name', got "
        ):
            name_and_options(wrong, "augment")
