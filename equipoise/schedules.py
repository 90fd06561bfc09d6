"""Custom learning rate schedules: functions of the round, registered by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

from equipoise.errors import InputError

Factors = Callable[..., float]
F = TypeVar("F", bound=Factors)

_SCHEDULES: dict[str, Factors] = {}


def register(function: F) -> F:
    """Register a schedule under the name of its function. Use it as a decorator.

    Parameters
    ----------
    function : callable
        Takes ``round``, counted from 0 after any warm-up, and returns the factor on the optimizer's
        learning rate. If it also takes ``rounds``, it is called with the number of rounds without
        warm-up. A run with such a schedule cannot be made longer.

    Returns
    -------
    callable
        The same function.

    Examples
    --------
    >>> @register
    ... def slower(round):
    ...     return 0.5 ** (round // 10)
    >>> from equipoise.optimizers import Schedule
    >>> Schedule(kind="slower").factor(25, 100)
    0.25
    """
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise InputError(
            f"a schedule needs the name of its function, got {function!r}; define it with def"
        )
    takes = list(signature(function).parameters)
    if takes not in (["round"], ["round", "rounds"]):
        raise InputError(
            f"schedule {name!r} takes {', '.join(takes) or 'nothing'}; valid: round, or round and "
            "rounds"
        )
    before = _SCHEDULES.get(name, function)
    # A schedule that is defined again, as in a notebook, replaces the earlier one.
    if (before.__module__, before.__qualname__) != (function.__module__, function.__qualname__):
        raise InputError(
            f"the name {name!r} of a schedule is taken by {before.__module__}.{before.__qualname__}"
        )
    _SCHEDULES[name] = function
    return function


def names() -> list[str]:
    """Return the names of all registered schedules.

    Examples
    --------
    >>> isinstance(names(), list)
    True
    """
    return sorted(_SCHEDULES)


def takes_rounds(name: str) -> bool:
    """Return whether a registered schedule depends on the number of rounds.

    Examples
    --------
    >>> @register
    ... def sinking(round, rounds):
    ...     return 1 - round / rounds
    >>> takes_rounds("sinking")
    True
    """
    return "rounds" in signature(_SCHEDULES[name]).parameters


def factor(name: str, round_: int, rounds: int) -> float:
    """Return the factor of a registered schedule in a round, counted from 0.

    Examples
    --------
    >>> @register
    ... def sinking(round, rounds):
    ...     return 1 - round / rounds
    >>> factor("sinking", 25, 100)
    0.75
    """
    given: dict[str, Any] = {"round": round_} | ({"rounds": rounds} if takes_rounds(name) else {})
    value = float(_SCHEDULES[name](**given))
    if not 0 <= value < math.inf:
        raise InputError(
            f"schedule {name!r} returned {value!r} for round {round_}; valid: at least 0 and finite"
        )
    return value
