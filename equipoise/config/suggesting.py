"""Errors for unknown keys, with the keys that may have been meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from equipoise import methods, models
from equipoise.errors import InputError, unknown


def unknown_key(key: str, valid: Iterable[str], *, where: str, of: str | None = None) -> InputError:
    """Return the error for an unknown key of an experiment.

    It suggests the keys with the same name elsewhere, such as ``training.optimizer.lr`` for ``lr``,
    else a valid key that is spelt alike.

    Parameters
    ----------
    key, valid, where, of
        As in :func:`equipoise.errors.unknown`, with dotted keys.

    Returns
    -------
    InputError
        For the caller to raise.

    Examples
    --------
    >>> str(unknown_key("rounds", ["data", "training"], where="a.yaml"))
    "unknown key 'rounds' in a.yaml; did you mean 'training.rounds'? Valid: data, training"
    """
    return unknown("key", key, valid, where=where, of=of, elsewhere=_with_end(key))


def _with_end(key: str) -> list[str]:
    """Return other keys with the same last component, those of the same section if there are any.

    Options of methods and models are returned only if no other key has this end.
    """
    section, end = key.partition(".")[0], key.rpartition(".")[2]
    for known in (_settings(), _options()):
        found = {other for other in known if other.endswith(f".{end}") and other != key}
        near = {other for other in found if other.startswith(f"{section}.")}
        if found:
            return sorted(near or found)
    return []


def _settings() -> Iterator[str]:
    # That package reads this one. Only errors need it.
    from equipoise.explain.keys import settings

    return (setting.key for setting in settings() if setting.of != "studies")


def _options() -> Iterator[str]:
    yield from (f"method.{name}" for of in methods.names() for name in methods.options_of(of))
    yield from (f"model.{name}" for of in models.MODELS for name in models.defaults(of))
