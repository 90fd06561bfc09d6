"""Checks of single values: each returns the value, or raises an error that says what is valid."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from equipoise.errors import InputError, unknown
from equipoise.text import printable, unprintable_in

# In the metadata of a field: configurations leave the field out if it has its default.
UNLESS_DEFAULT = "unless default"
T = TypeVar("T")

LONGEST_NAME = 200


def count(value: object, what: str, *, least: int = 1) -> int:
    """Return a whole number that is large enough.

    Parameters
    ----------
    value : object
        What was given.
    what : str
        How the message names it.
    least : int
        The smallest valid number.

    Returns
    -------
    int
        The value as a Python ``int``.

    Examples
    --------
    >>> count(3, "width of model 'resnet18'")
    3
    >>> count(0, "width of model 'resnet18'")
    Traceback (most recent call last):
    equipoise.errors.InputError: width of model 'resnet18' must be a whole number of at least 1,
    got 0
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise InputError(f"{what} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def real(value: object, what: str, *, least: float | None = None) -> float:
    """Return a finite number that is large enough.

    Parameters
    ----------
    value : object
        What was given.
    what : str
        How the message names it.
    least : float, optional
        The smallest valid number. Without it, the number must be above 0.

    Returns
    -------
    float
        The value as a Python ``float``.

    Examples
    --------
    >>> real(2, "beta")
    2.0
    >>> real(0, "beta")
    Traceback (most recent call last):
    equipoise.errors.InputError: beta must be a finite number above 0, got 0
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or (number <= 0 if least is None else number < least):
        smallest = "above 0" if least is None else f"of at least {least:g}"
        raise InputError(f"{what} must be a finite number {smallest}, got {value!r}")
    return number


def within(value: object, what: str, least: float, most: float, *, below: bool = False) -> float:
    """Return a number in a range.

    Parameters
    ----------
    value : object
        What was given.
    what : str
        How the message names it.
    least, most : float
        The smallest and the largest valid number.
    below : bool
        Whether ``most`` itself is not valid.

    Returns
    -------
    float
        The value as a Python ``float``.

    Examples
    --------
    >>> within(0.9, "optimizer.momentum", 0, 1, below=True)
    0.9
    >>> within(1.5, "optimizer.momentum", 0, 1, below=True)
    Traceback (most recent call last):
    equipoise.errors.InputError: optimizer.momentum must be at least 0 and below 1, got 1.5
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not (least <= number < most if below else least <= number <= most):
        raise InputError(
            f"{what} must be at least {least:g} and {'below' if below else 'at most'} {most:g}, "
            f"got {value!r}"
        )
    return number


def several(
    value: object, what: str, check: Callable[[object, str], T], *, length: int | None = None
) -> tuple[T, ...]:
    """Return a sequence as a tuple and check each item.

    Parameters
    ----------
    value : object
        What was given.
    what : str
        How the message names it.
    check : callable
        One of the checks of this module, applied to each item.
    length : int, optional
        How many items there must be.

    Returns
    -------
    tuple
        What the check returned for each item.

    Examples
    --------
    >>> several([32, 64], "channels of model 'cnn2'", count, length=2)
    (32, 64)
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InputError(f"{what} must be a list, got {value!r}")
    if length not in (None, len(value)):
        raise InputError(f"{what} must be a list of {length} numbers, got {value!r}")
    return tuple(check(item, f"each of {what}") for item in value)


def probability(value: object, what: str) -> float:
    """Return a dropout probability, which is at least 0 and below 1.

    Parameters
    ----------
    value : object
        What was given.
    what : str
        How the message names it.

    Returns
    -------
    float
        The value as a Python ``float``.

    Examples
    --------
    >>> probability(0.5, "dropout of model 'mlp'")
    0.5
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise InputError(f"{what} must be a number from 0 to below 1, got {value!r}")
    return float(value)


def image(shape: tuple[int, ...], model: str, *, smallest: int) -> tuple[int, int, int]:
    """Return channels, height and width of the images that a model is built for.

    Parameters
    ----------
    shape : tuple of int
        The shape of one sample.
    model : str
        The name of the model, for the message.
    smallest : int
        The smallest height and width for which pooling leaves at least one pixel.

    Returns
    -------
    tuple of int
        Channels, height, width.

    Examples
    --------
    >>> image((1, 28, 28), "cnn2", smallest=4)
    (1, 28, 28)
    >>> image((1, 3, 28), "cnn2", smallest=4)
    Traceback (most recent call last):
    equipoise.errors.InputError: shape (1, 3, 28) is too small for model 'cnn2': images must be at
    least 4 x 4
    """
    if len(shape) != 3:
        hint = "; x[:, None] gives grey images their channel" if len(shape) == 2 else ""
        raise InputError(
            f"model {model!r} needs images of shape (channels, height, width), got shape "
            f"{shape}{hint}"
        )
    channels, height, width = shape
    if min(height, width) < smallest:
        channels_last = width in (1, 3, 4) and channels > width
        hint = "; numpy.moveaxis(x, -1, 1) moves channels to the front" if channels_last else ""
        raise InputError(
            f"shape {shape} is too small for model {model!r}: images must be at least {smallest} x "
            f"{smallest}{hint}"
        )
    return channels, height, width


def name_and_options(value: object, what: str) -> tuple[str, dict[str, Any]]:
    """Return a name and its options, given the name alone or a mapping with ``name``.

    Parameters
    ----------
    value : object
        What was given.
    what : str
        How the message names it.

    Returns
    -------
    tuple of str and dict
        The name, and everything else in the mapping.

    Examples
    --------
    >>> name_and_options({"name": "crop", "padding": 2}, "training.augment")
    ('crop', {'padding': 2})
    >>> name_and_options("flip", "training.augment")
    ('flip', {})
    """
    options = (
        {"name": value}
        if isinstance(value, str)
        else dict(value)
        if isinstance(value, Mapping)
        else {}
    )
    if not isinstance(options.get("name"), str):
        raise InputError(f"{what} must be a name or a mapping with 'name', got {value!r}")
    return options.pop("name"), options


def name(value: object, what: str) -> str:
    r"""Return a name that can be printed in one line.

    Parameters
    ----------
    value : object
        What was given.
    what : str
        How the message names it.

    Returns
    -------
    str
        The value.

    Raises
    ------
    InputError
        If it is not text, contains control characters such as newlines and escape sequences, or is
        very long.

    Examples
    --------
    >>> name("ward 3", "group")
    'ward 3'
    >>> name("ward\x1b[2J", "group")
    Traceback (most recent call last):
    equipoise.errors.InputError: group must be text in one line without control characters, got
    'ward\x1b[2J'
    """
    if not isinstance(value, str):
        raise InputError(f"{what} must be text, got {value!r}")
    if len(value) > LONGEST_NAME:
        raise InputError(
            f"{what} must have at most {LONGEST_NAME} characters, got {len(value)}: "
            f"{printable(value, 40)!r}"
        )
    if unprintable_in(value):
        raise InputError(
            f"{what} must be text in one line without control characters, got '{printable(value)}'"
        )
    return value


def one_of(value: str, valid: Sequence[str], where: str) -> str:
    """Return one of several words.

    Parameters
    ----------
    value : str
        What was given.
    valid : sequence of str
        The words.
    where : str
        How the message names the place.

    Returns
    -------
    str
        The value.

    Examples
    --------
    >>> one_of("dot", ("cosine", "dot"), "fedgc.similarity")
    'dot'
    """
    if value not in valid:
        raise unknown("value", value, valid, where=where)
    return value


def flag(value: object, what: str) -> bool:
    """Return a boolean. Values that only look like one are refused.

    Parameters
    ----------
    value : object
        What was given.
    what : str
        How the message names it.

    Returns
    -------
    bool
        The value.

    Raises
    ------
    InputError
        If it is anything else.

    Examples
    --------
    >>> flag("no", "equal")
    Traceback (most recent call last):
    equipoise.errors.InputError: equal must be true or false, got 'no'
    """
    if not isinstance(value, bool):
        raise InputError(f"{what} must be true or false, got {value!r}")
    return value
