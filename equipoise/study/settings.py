"""The settings of a study, and those that leave out one group each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from equipoise.config import Override
from equipoise.errors import InputError
from equipoise.study.checks import checked_label, checked_list, with_labels
from equipoise.study.runs import flat
from equipoise.study.selection import pair_label

LEAVE_OUT = "data.leave_out"


@dataclass(frozen=True)
class StudySetting:
    """What a setting changes, and for folds the group that is left out."""

    changes: list[Override]
    left_out: tuple[Override, ...] = ()


def settings_from(given: Any, where: str) -> dict[str, list[Override]]:
    """Return what each setting changes, by its label; one without changes by default."""
    if given is None:
        return {"base": []}
    if not isinstance(given, Mapping) or not given:
        raise InputError(f"{where}: settings must be labels with what they change, got {given!r}")
    settings = {}
    for label, changes in given.items():
        origin = f"settings.{label} of {where}"
        if not isinstance(changes, Mapping | NoneType):
            raise InputError(f"{origin} must hold keys with values, got {changes!r}")
        overrides = [Override(key, value, origin) for key, value in flat(changes or {})]
        if any(override.key == "seed" for override in overrides):
            raise InputError(f"{origin}: seed is not valid in a setting; use seeds")
        settings[checked_label(label, "settings", where)] = overrides
    return settings


def folds_of(
    base: Mapping[str, Any],
    label: str,
    changes: list[Override],
    later: list[Override],
    where: str,
    *,
    named: bool,
) -> dict[str, StudySetting]:
    """Return one setting for each group that is left out, by its label.

    If ``leave_out`` is not a list, return the setting itself.
    """
    data = base.get("data")
    given, origin = (
        (data.get("leave_out") if isinstance(data, Mapping) else None),
        f"base of {where}",
    )
    for override in (*changes, *later):
        if override.key in ("data", LEAVE_OUT):
            given, origin = (override.value if override.key == LEAVE_OUT else None), override.origin
    if not isinstance(given, list):
        return {label: StudySetting(changes)}
    groups = checked_list(given, f"{origin}: {LEAVE_OUT}", str)
    return {
        checked_label(f"{label}-{group}" if named else group, LEAVE_OUT, where): StudySetting(
            changes, (Override(LEAVE_OUT, group, origin),)
        )
        for group in groups
    }


def pairs_of(
    whole: str, folds: Sequence[str], part: Mapping[str, StudySetting], where: str
) -> dict[str, StudySetting]:
    """Return one setting for each pair of groups that are left out together, by its label."""
    if len(folds) < 3:
        raise InputError(
            f"tuning of {where}: leave-one-domain-out needs three left-out groups or more in "
            f"setting {whole!r}, got {', '.join(folds) or 'none'}"
        )
    found = {}
    for one, other in itertools.combinations(folds, 2):
        (first,), (second,) = part[one].left_out, part[other].left_out
        label = checked_label(pair_label(one, other), LEAVE_OUT, where)
        found[label] = StudySetting(
            part[one].changes, (replace(first, value=[first.value, second.value]),)
        )
    return found


def kept_settings(
    divided: Mapping[str, Mapping[str, StudySetting]], chosen: Sequence[str] | None, where: str
) -> dict[str, StudySetting]:
    """Return the settings and folds with the given labels, which may be those of settings."""
    every: dict[str, StudySetting] = {}
    for label, own in divided.items():
        for fold, setting in own.items():
            if fold in every or (fold != label and fold in divided):
                raise InputError(
                    f"{where}: two settings are called {fold!r}; one of them is named after a "
                    "left-out group"
                )
            every[fold] = setting
    folds = {label: list(own) for label, own in divided.items()} | {fold: [fold] for fold in every}
    wanted = {fold for own in with_labels(folds, chosen, "setting").values() for fold in own}
    return {label: setting for label, setting in every.items() if label in wanted}
