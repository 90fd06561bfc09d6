"""The options of a function or dataclass: their types, also in words, and their defaults."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from equipoise.annotations import types_in

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


def types_of(made_from: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a dataclass or the keyword-only ones of a function, with types.

    Examples
    --------
    >>> def crop(image: str, *, size: int = 3) -> None: ...
    >>> types_of(crop)
    {'size': <class 'int'>}
    """
    hints = types_in(made_from)
    if dataclasses.is_dataclass(made_from):
        return {item.name: hints[item.name] for item in dataclasses.fields(made_from) if item.init}
    return {name: hints[name] for name in _keyword_only(made_from)}


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of the keyword-only options of a function.

    Examples
    --------
    >>> def crop(image: str, *, size: int = 3) -> None: ...
    >>> defaults_of(crop)
    {'size': 3}
    """
    return {
        name: option.default
        for name, option in _keyword_only(function).items()
        if option.default is not option.empty
    }


def _keyword_only(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {
        name: option for name, option in parameters.items() if option.kind is option.KEYWORD_ONLY
    }


def in_words(kind: Any) -> str:
    """Describe a type in words.

    Examples
    --------
    >>> in_words(int | None), in_words(tuple[float, float, float])
    ('a whole number or null', 'a list of 3 numbers')
    """
    arguments = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        # "a number" includes whole numbers.
        return " or ".join(
            in_words(option) for option in arguments if not (option is int and float in arguments)
        )
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if get_origin(kind) in (dict, Mapping):
        return "keys with values"
    if arguments:
        inner = [option for option in arguments if option is not ...]
        if set(get_args(inner[-1])) == {int, str}:
            return "a list of whole numbers or names"
        length = f"{len(inner)} " if get_origin(kind) is tuple and ... not in arguments else ""
        return (
            f"a list of {length}{in_words(inner[-1]).removeprefix('a ')}s"
            if inner[-1] in (int, float)
            else "a list"
        )
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
