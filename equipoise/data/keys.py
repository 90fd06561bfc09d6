"""The keys of options in configurations, for messages of code that knows only their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from equipoise.errors import InputError


def below(path: str, options: Iterable[str]) -> dict[str, str]:
    """Return the key of each option.

    Examples
    --------
    >>> below("data.partition", ["beta"])
    {'beta': 'data.partition.beta'}
    """
    return {option: f"{path}.{option}" for option in options}


@contextmanager
def naming(keys: Mapping[str, str]) -> Iterator[None]:
    """Add the key of the option to errors raised inside.

    A message that begins with the option or mentions ``in option`` gets the key instead. The key
    comes before a message that mentions ``option=``, ``unknown option`` or ``31 option``. Other
    messages stay as they are, as do those that contain the key already.

    Parameters
    ----------
    keys : mapping of str to str
        The key of each option.

    Examples
    --------
    >>> with naming({"beta": "data.partition.beta"}):
    ...     raise InputError("beta must be a finite number above 0, got -1")
    Traceback (most recent call last):
    equipoise.errors.InputError: data.partition.beta must be a finite number above 0, got -1
    """
    try:
        yield
    except InputError as error:
        message = str(error)
        named = message if any(key in message for key in keys.values()) else _named(message, keys)
        if named == message:
            raise
        raise InputError(named) from error


def _named(message: str, keys: Mapping[str, str]) -> str:
    # Longer names first: "clients" is the beginning of "clients_per_group".
    options = "|".join(map(re.escape, sorted(keys, key=len, reverse=True)))
    if not options:
        return message
    if first := re.match(rf"((?:each of )?)({options})(?=[ =])", message):
        return f"{first[1]}{keys[first[2]]}{message[first.end() :]}"
    if inside := re.search(rf"\bin ({options})\b", message):
        return f"{message[: inside.start(1)]}{keys[inside[1]]}{message[inside.end() :]}"
    mentioned = re.search(rf"\b({options})=|(?:^unknown|\b\d+(?: \w+)?) ({options})\b", message)
    return f"{keys[mentioned[1] or mentioned[2]]}: {message}" if mentioned else message
