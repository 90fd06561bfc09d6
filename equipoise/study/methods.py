"""The methods of a study: their options, and the variants that tuning tries.

A key of a grid whose first component is a key of experiments, such as ``training.optimizer.lr`` or
``model``, is that key of the experiment, as in ``set``. Any other key is an option of the method,
such as ``mu`` or ``aggregation.t``. ``method.mu`` is always an option of the method.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from equipoise.config import SECTIONS, Override
from equipoise.errors import InputError
from equipoise.study.checks import INSTEAD, checked_label
from equipoise.study.choice import Choices
from equipoise.study.runs import flat

if TYPE_CHECKING:
    from equipoise.study.plan import Job

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
    grid_origin : str
        Where the grid came from, for errors.
    tuned_options, tuned_settings : tuple of Override
        The values of a variant: options of the method, and other settings.
    """

    options: dict[str, Any]
    variants: dict[str, dict[str, Any]]
    changes: list[Override]
    grid_origin: str
    tuned_options: tuple[Override, ...] = ()
    tuned_settings: tuple[Override, ...] = ()

    def with_values(self, values: Mapping[str, Any]) -> StudyMethod:
        """Return a variant."""
        tuned = [Override(_key_of(key), value, self.grid_origin) for key, value in values.items()]
        return replace(
            self,
            tuned_options=tuple(one for one in tuned if one.key.startswith("method.")),
            tuned_settings=tuple(one for one in tuned if not one.key.startswith("method.")),
        )


def _key_of(name: str) -> str:
    """Return the key of an experiment that a key of a grid means.

    Examples
    --------
    >>> [_key_of(name) for name in ("training.epochs", "mu", "aggregation.t", "method.mu")]
    ['training.epochs', 'method.mu', 'method.aggregation.t', 'method.mu']
    """
    first, dot, _ = name.partition(".")
    # A study has seeds of its own, so seed alone is an option of the method, too.
    known = dot if first in ("method", "seed") else first in SECTIONS
    return name if known else f"method.{name}"


def methods_from(given: Any, where: str) -> dict[str, StudyMethod]:
    """Return the methods by their labels."""
    if not isinstance(given, list) or not given:
        raise InputError(
            f"{where}: methods must be a list of names or mappings with a name, got {given!r}"
        )
    methods: dict[str, StudyMethod] = {}
    for item in given:
        options = dict(item) if isinstance(item, Mapping) else {"name": item}
        if not options.keys() & {"name", "label"}:
            raise _without_name(options, where)
        label = checked_label(options.pop("label", options.get("name")), "methods", where)
        if label in methods:
            raise _called_alike(label, where)
        grid, changes = options.pop("grid", {}), options.pop("set", {})
        variants, grid_origin = (
            _variants(grid, label, where),
            f"grid of method {label!r} of {where}",
        )
        origin = f"set of method {label!r} of {where}"
        if not isinstance(changes, Mapping):
            raise InputError(f"{origin} must hold keys with values, got {changes!r}")
        overrides = [Override(key, value, origin) for key, value in flat(changes)]
        if strays := [
            override.key for override in overrides if override.key.partition(".")[0] in INSTEAD
        ]:
            raise InputError(f"{origin}: {strays[0]} is not valid there")
        made = StudyMethod(options, variants, overrides, grid_origin)
        for variant in itertools.islice(map(made.with_values, variants.values()), 1):
            refuse_replaced(overrides, variant.tuned_settings)
            for tuned in (variant.tuned_options, variant.tuned_settings):
                for number, override in enumerate(tuned):
                    refuse_replaced([override], tuned[number + 1 :])
        methods[label] = made
    return methods


def refuse_replaced(earlier: Iterable[Override], later: Iterable[Override]) -> None:
    """Refuse values that replace earlier ones, of which at least one belongs to a grid."""
    for before, after in itertools.product(earlier, later):
        if f"{before.key}.".startswith(f"{after.key}."):
            raise InputError(
                f"{after.origin}: {after.key} replaces {before.key} in {before.origin}; leave one "
                "of them out"
            )


def _without_name(options: Mapping[str, Any], where: str) -> InputError:
    inner = next(iter(options.values()), None) if len(options) == 1 else None
    meant = {"name": next(iter(options)), **inner} if isinstance(inner, Mapping) else None
    written = ", ".join(f"{key}: {value}" for key, value in (meant or {"name": "fedprox"}).items())
    return InputError(
        f"{where}: the method {dict(options)!r} in methods has no name; "
        f"{'write' if meant else 'it needs one, such as'} {{{written}}}"
    )


def _called_alike(label: str, where: str) -> InputError:
    return InputError(f"{where}: two methods are called {label!r}; give them different labels")


def _variants(grid: Any, label: str, where: str) -> dict[str, dict[str, Any]]:
    """Return every combination of a grid's values by its label."""
    lists = dict(flat(grid)) if isinstance(grid, Mapping) else {"": None}
    if not all(isinstance(values, list) and values for values in lists.values()):
        raise InputError(
            f"{where}: grid of method {label!r} must have hyper-parameters with lists of values, "
            f"got {grid!r}"
        )
    variants: dict[str, dict[str, Any]] = {}
    for combination in itertools.product(*lists.values()) if lists else ():
        values = dict(zip(lists, combination, strict=True))
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
) -> tuple[dict[str, StudyMethod], Tried, tuple[str, ...]]:
    """Return the methods that tuning runs, and the values of their variants.

    These are the study's first method and the methods that are kept, with all their variants. The
    labels of the first method and its variants are returned last.
    """
    tried = {label: method.variants for label, method in kept.items() if method.variants}
    if not tried:
        raise InputError(
            f"{where}: no method has a grid of values to try, such as grid: {{q: [0.1, 1]}}"
        )
    first, method = next(iter(described.items()))
    reference = method.variants or {first: {}}
    made: dict[str, StudyMethod] = {}
    for label, variants in ({first: reference} | tried).items():
        for variant, values in variants.items():
            if variant in made:
                raise _called_alike(variant, where)
            made[variant] = described[label].with_values(values)
    return made, tried, tuple(reference)


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


def unused_grids(jobs: Iterable[Job], methods: Mapping[str, StudyMethod]) -> tuple[str, ...]:
    """Say which methods run without values that were chosen from their grids, and with which."""
    settings: dict[str, None] = {}
    found: dict[str, dict[str, None]] = {}
    for (setting, label), job in {(job.setting, job.method): job for job in jobs}.items():
        settings[setting] = None
        variants = methods[label].variants
        if variants and job.tried_as is None:
            plain = job.experiment.plain()
            values = {key: _value_at(_key_of(key), plain) for key in next(iter(variants.values()))}
            used = variant_label(label, values).removeprefix(f"{label} ")
            said = f"the grid of {label} is not used: its runs have {used}; tune it with --tune"
            found.setdefault(said, {})[setting] = None
    return tuple(
        said if of == settings else f"{', '.join(of)}: {said}" for said, of in found.items()
    )


def _value_at(key: str, plain: Any) -> Any:
    """Return the value of a dotted key; ``default`` for a part of a method that is not given.

    Examples
    --------
    >>> _value_at("method.lam", {"method": {"lam": 1.0}}), _value_at("method.guard", {"method": {}})
    (1.0, 'default')
    """
    for part in key.split("."):
        if not isinstance(plain, Mapping) or part not in plain:
            return "default"
        plain = plain[part]
    return plain
