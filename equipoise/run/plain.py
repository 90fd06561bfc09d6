"""Conversion of settings to the plain values of a configuration file, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from equipoise import losses
from equipoise.checks import UNLESS_DEFAULT, name_and_options
from equipoise.data.augment import AUGMENTATIONS, augmentation_to_plain
from equipoise.engine.settings import Training
from equipoise.errors import unknown
from equipoise.metrics import Metric
from equipoise.optimizers import Adam, Optimizer, Schedule, Sgd, TorchOptimizer, optimizer_named


def to_plain(settings: Any) -> Any:
    """Convert settings to mappings, lists, numbers and text.

    Examples
    --------
    >>> to_plain((Sgd(lr=0.5),))[0]["name"], to_plain(Schedule(decay=0.9))["decay"]
    ('sgd', 0.9)
    """
    if isinstance(settings, (list, tuple)):
        return [to_plain(item) for item in settings]
    if isinstance(settings, Metric):
        return settings.name
    if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
        return settings
    plain = {
        field.name: to_plain(getattr(settings, field.name))
        for field in dataclasses.fields(settings)
        if not (
            field.metadata.get(UNLESS_DEFAULT) and getattr(settings, field.name) == field.default
        )
    }
    if isinstance(settings, Training) and settings.loss is not None:
        plain["loss"] = losses.to_plain(settings.loss)
    if isinstance(settings, Sgd):
        return {"name": "sgd", **plain}
    if isinstance(settings, Adam):
        return {"name": "adamw" if plain.pop("decoupled") else "adam", **plain}
    if isinstance(settings, TorchOptimizer):
        return {"name": settings.kind.lower(), "lr": settings.lr, **settings.options}
    if type(settings) in AUGMENTATIONS.values():
        return augmentation_to_plain(settings)
    return plain


def optimizer_from(plain: str | Mapping[str, Any]) -> Optimizer:
    """Make an optimizer from its plain form.

    Examples
    --------
    >>> optimizer_from({"name": "sgd", "lr": 0.5})
    Sgd(lr=0.5, momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.0)
    """
    name, options = name_and_options(plain, "training.optimizer")
    return optimizer_named(name, **options)


def schedule_from(plain: str | Mapping[str, Any]) -> Schedule:
    """Make a schedule from its plain form: its kind, or a mapping of its fields.

    Examples
    --------
    >>> schedule_from({"kind": "exponential", "decay": 0.9}).factor(1, 10)
    0.9
    """
    fields: dict[str, Any] = {"kind": plain} if isinstance(plain, str) else dict(plain)
    valid = [field.name for field in dataclasses.fields(Schedule)]
    for key in fields:
        if key not in valid:
            raise unknown("key", key, valid, where="training.schedule")
    for key in ("at", "factors"):
        if key in fields:
            fields[key] = tuple(fields[key])
    return Schedule(**fields)


def first_difference(found: Any, wanted: Any, path: str = "") -> str | None:
    """Return the first key in which nested mappings differ, or ``None``.

    Examples
    --------
    >>> first_difference({"training": {"rounds": 1}}, {"training": {"rounds": 2}})
    'training.rounds is 1 there and 2 here'
    """
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*found, *(k for k in wanted if k not in found)]:
            inner = first_difference(
                found.get(key), wanted.get(key), f"{path}.{key}" if path else str(key)
            )
            if inner:
                return inner
        return None
    return None if found == wanted else f"{path} is {found!r} there and {wanted!r} here"
