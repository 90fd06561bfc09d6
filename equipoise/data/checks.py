"""Checks of single values, so that every part of the data layer refuses them in the same words."""

from __future__ import annotations

import math
from numbers import Integral, Real

from equipoise.errors import InputError


def whole(value: object, name: str, *, least: int = 1) -> int:
    """Check a whole number.

    Parameters
    ----------
    value : object
        What was given.
    name : str
        What it was given for.
    least : int
        The smallest valid value.

    Returns
    -------
    int
        The value.

    Examples
    --------
    >>> whole(3, "clients")
    3
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name}={value!r} must be a whole number, {least} or more")
    return int(value)


def real(value: object, name: str, *, least: float | None = None) -> float:
    """Check a finite number, above 0 unless ``least`` says where it starts.

    Parameters
    ----------
    value : object
        What was given.
    name : str
        What it was given for.
    least : float, optional
        The smallest valid value.

    Returns
    -------
    float
        The value.

    Examples
    --------
    >>> real(0.5, "beta")
    0.5
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or (number <= 0 if least is None else number < least):
        raise InputError(
            f"{name}={value!r} must be a finite number {'above 0' if least is None else f'from {least} on'}"
        )
    return number
