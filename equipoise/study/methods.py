"""The methods of a study: their options, and the variants that tuning tries."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from equipoise.config import Override
from equipoise.errors import InputError
from equipoise.study.checks import INSTEAD, checked_label
from equipoise.study.choice import Choices
from equipoise.study.runs import flat

Tried = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class StudyMethod:
    """The description of a method in a study.

    Attributes
    ----------
    options : dict
        Its name and hyper-parameters.
    variants : dict
        The values of its grid, by the labels of its variants.
    changes : list of Override
        Other settings that are different for this method, such as the number of epochs.
    """

    options: dict[str, Any]
    variants: dict[str, dict[str, Any]]
    changes: list[Override]

    def with_values(self, values: Mapping[str, Any]) -> StudyMethod:
        """Return a variant."""
        return replace(self, options=self.options | dict(values))


def methods_from(given: Any, where: str) -> dict[str, StudyMethod]:
    """Return the methods by their labels."""
    if not isinstance(given, list) or not given:
        raise InputError(
            f"{where}: methods must be a list of names or mappings with a name, got {given!r}"
        )
    methods: dict[str, StudyMethod] = {}
    for item in given:
        options = dict(item) if isinstance(item, Mapping) else {"name": item}
        label = checked_label(options.pop("label", options.get("name")), "methods", where)
        if label in methods:
            raise _called_alike(label, where)
        variants, changes = _variants(options.pop("grid", {}), label, where), options.pop("set", {})
        origin = f"set of method {label!r} of {where}"
        if not isinstance(changes, Mapping):
            raise InputError(f"{origin} must hold keys with values, got {changes!r}")
        overrides = [Override(key, value, origin) for key, value in flat(changes)]
        if strays := [
            override.key for override in overrides if override.key.partition(".")[0] in INSTEAD
        ]:
            raise InputError(f"{origin}: {strays[0]} is not valid there")
        methods[label] = StudyMethod(options, variants, overrides)
    return methods


def _called_alike(label: str, where: str) -> InputError:
    return InputError(f"{where}: two methods are called {label!r}; give them different labels")


def _variants(grid: Any, label: str, where: str) -> dict[str, dict[str, Any]]:
    """Return every combination of a grid's values by its label."""
    if not isinstance(grid, Mapping) or not all(
        isinstance(values, list) and values for values in grid.values()
    ):
        raise InputError(
            f"{where}: grid of method {label!r} must have hyper-parameters with lists of values, "
            f"got {grid!r}"
        )
    variants: dict[str, dict[str, Any]] = {}
    for combination in itertools.product(*grid.values()) if grid else ():
        values = dict(zip(grid, combination, strict=True))
        variant = checked_label(variant_label(label, values), "methods", where)
        if variant in variants:
            raise InputError(
                f"{where}: grid of method {label!r} has {variant.removeprefix(f'{label} ')} twice"
            )
        variants[variant] = values
    return variants


def variant_label(label: str, values: Mapping[str, Any]) -> str:
    """Return the label of a method with values of its grid."""
    return " ".join([label, *(f"{name}={_written(value)}" for name, value in values.items())])


def _written(value: Any) -> str:
    """Return a value as part of a label, such as ``qffl,q=1`` for ``{name: qffl, q: 1}``."""
    if isinstance(value, Mapping):
        named = [_written(value["name"])] if "name" in value else []
        return ",".join(
            named + [f"{key}={_written(inner)}" for key, inner in value.items() if key != "name"]
        )
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return str(value)


def methods_to_tune(
    described: Mapping[str, StudyMethod], kept: Mapping[str, StudyMethod], where: str
) -> tuple[dict[str, StudyMethod], Tried]:
    """Return the methods that tuning runs, and the values of their variants.

    These are the study's first method and all variants of the methods that are kept.
    """
    tried = {label: method.variants for label, method in kept.items() if method.variants}
    if not tried:
        raise InputError(
            f"{where}: no method has a grid of values to try, such as grid: {{q: [0.1, 1]}}"
        )
    first, method = next(iter(described.items()))
    reference = dict(itertools.islice(method.variants.items(), 1)) or {first: {}}
    made: dict[str, StudyMethod] = {}
    for label, variants in ({first: reference} | tried).items():
        for variant, values in variants.items():
            if variant in made:
                raise _called_alike(variant, where)
            made[variant] = described[label].with_values(values)
    return made, tried


def used_choices(chosen: Choices, methods: Mapping[str, StudyMethod], where: str) -> Choices:
    """Return the choices for methods with a grid. Values that are not in the grid are refused."""
    used: Choices = {}
    for setting, of in chosen.items():
        for label, choice in of.items():
            if label not in methods:
                continue
            if dict(choice.values) not in methods[label].variants.values():
                variant = variant_label(label, choice.values)
                raise InputError(
                    f"{where}: tuning has chosen {variant!r} for {setting}, which is no longer in "
                    "the grid of the method; tune the study again (--tune), or ignore the choice "
                    "(--untuned)"
                )
            used.setdefault(setting, {})[label] = choice
    return used
