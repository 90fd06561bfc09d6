"""Every key of experiments and studies with its type, default, meaning and an example.

They are read from the code: types and defaults from the dataclasses and functions that use the
values, meanings from their docstrings. ``equipoise explain training.schedule`` prints them, and
``docs/settings.md`` is made from them.
"""

from __future__ import annotations

from equipoise.errors import unknown
from equipoise.explain.keys import Setting, lacking, options_of_names, settings
from equipoise.explain.markdown import page

__all__ = ["Setting", "explain", "lacking", "page", "settings"]


def explain(key: str = "") -> list[Setting]:
    """Return a key and all keys below it. The end of a key suffices if it is unique.

    Parameters
    ----------
    key : str
        Such as ``training.schedule``, or its end, ``schedule``. Also the name of a method, a model,
        a source or a partition, such as ``ditto``, for its options, and ``studies`` for the keys of
        studies; without one, all keys of the first level.

    Returns
    -------
    list of Setting
        With the key itself first, or all keys with this end.

    Examples
    --------
    >>> [setting.key for setting in explain("schedule")][:3]
    ['training.schedule', 'training.schedule.kind', 'training.schedule.decay']
    >>> [setting.key for setting in explain("ditto")]
    ['method', 'method.lam']
    """
    every = settings()
    if not key:
        return [setting for setting in every if "." not in setting.key]
    # The modules of all methods and models take a while to import; other keys do not need them.
    section, dot, _ = key.partition(".")
    named = options_of_names() if section in ("method", "model") or not dot else []
    if key in ("method", "model"):
        # Their options depend on the name, and are too many to list.
        return [setting for setting in (*every, *named) if not setting.of and _below(setting, key)]
    of_name = [setting for setting in (*every, *named) if key in setting.of.split(", ")]
    found = [*(_with_key(every, key) or _with_key(named, key)), *of_name]
    if not found:
        known = [*every, *named]
        names = {name for setting in known if setting.of for name in setting.of.split(", ")}
        raise unknown(
            "key",
            key,
            names | {setting.key for setting in known},
            where="experiments and studies",
            listed="equipoise explain --markdown",
        )
    return found


def _with_key(given: list[Setting], key: str) -> list[Setting]:
    """Return the settings with a key and those below it, else all keys with this end."""
    ends = {setting.key for setting in given if setting.key.endswith(f".{key}")}
    if not any(setting.key == key for setting in given):
        if len(ends) > 1:
            return [setting for setting in given if setting.key in ends]
        key = ends.pop() if ends else key
    return [setting for setting in given if _below(setting, key)]


def _below(setting: Setting, key: str) -> bool:
    return setting.key == key or setting.key.startswith(f"{key}.")
