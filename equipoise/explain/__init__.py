"""Every key of experiments and studies with its type, default, meaning and an example.

They are read from the code: types and defaults from the dataclasses and functions that use the
values, meanings from their docstrings. ``equipoise explain training.schedule`` prints them, and
``docs/settings.md`` is made from them.
"""

from __future__ import annotations

from equipoise.errors import unknown
from equipoise.explain.keys import Setting, lacking, settings
from equipoise.explain.markdown import page

__all__ = ["Setting", "explain", "lacking", "page", "settings"]


def explain(key: str = "") -> list[Setting]:
    """Return a key and all keys below it. The end of a key suffices if it is unique.

    Parameters
    ----------
    key : str
        Such as ``training.schedule``, or its end, ``schedule``; without one, all keys of the first
        level.

    Returns
    -------
    list of Setting
        With the key itself first, or all keys with this end.

    Examples
    --------
    >>> [setting.key for setting in explain("schedule")][:3]
    ['training.schedule', 'training.schedule.kind', 'training.schedule.decay']
    """
    every = settings()
    if not key:
        return [setting for setting in every if "." not in setting.key]
    ends = {setting.key for setting in every if setting.key.endswith(f".{key}")}
    if not any(setting.key == key for setting in every):
        if len(ends) > 1:
            return [setting for setting in every if setting.key in ends]
        key = ends.pop() if ends else key
    found = [
        setting for setting in every if setting.key == key or setting.key.startswith(f"{key}.")
    ]
    if not found:
        raise unknown(
            "key",
            key,
            {setting.key for setting in every},
            where="experiments and studies",
            listed="equipoise explain --markdown",
        )
    return found
