"""Settings as the plain values a configuration file holds, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from equipoise.data.augment import Augmentation, Crop, Flip
from equipoise.errors import InputError, unknown
from equipoise.optimizers import Adam, Optimizer, Schedule, Sgd, TorchOptimizer, optimizer_named

AUGMENTATIONS: dict[str, type[Any]] = {"flip": Flip, "crop": Crop}


def to_plain(settings: Any) -> Any:
    """Write settings as mappings, lists, numbers and words.

    Examples
    --------
    >>> to_plain(Sgd(lr=0.5))["name"], to_plain((Flip(),))
    ('sgd', [{'name': 'flip'}])
    """
    if isinstance(settings, (list, tuple)):
        return [to_plain(item) for item in settings]
    if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
        return settings
    plain = {field.name: to_plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}
    if isinstance(settings, Sgd):
        return {"name": "sgd", **plain}
    if isinstance(settings, Adam):
        return {"name": "adamw" if plain.pop("decoupled") else "adam", **plain}
    if isinstance(settings, TorchOptimizer):
        return {"name": settings.kind.lower(), "lr": settings.lr, **settings.options}
    for name, kind in AUGMENTATIONS.items():
        if isinstance(settings, kind):
            return {"name": name, **plain}
    return plain


def optimizer_from(plain: str | Mapping[str, Any]) -> Optimizer:
    """Make an optimizer from its plain form.

    Examples
    --------
    >>> optimizer_from({"name": "sgd", "lr": 0.5})
    Sgd(lr=0.5, momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.0)
    """
    name, options = _name_and_options(plain, "training.optimizer")
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


def augmentation_from(plain: str | Mapping[str, Any]) -> Augmentation:
    """Make an augmentation from its plain form.

    Examples
    --------
    >>> augmentation_from({"name": "crop", "padding": 2})
    Crop(padding=2)
    """
    name, options = _name_and_options(plain, "training.augment")
    if name not in AUGMENTATIONS:
        raise unknown("augmentation", name, AUGMENTATIONS, where="training.augment")
    kind = AUGMENTATIONS[name]
    valid = [field.name for field in dataclasses.fields(kind)]
    for key in options:
        if key not in valid:
            raise unknown(f"option of {name}", key, valid, where="training.augment")
    made: Augmentation = kind(**options)
    return made


def _name_and_options(plain: str | Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {"name": plain} if isinstance(plain, str) else dict(plain)
    if not isinstance(options.get("name"), str):
        raise InputError(f"{where} must be a name or a mapping with 'name', got {plain!r}")
    return options.pop("name"), options
