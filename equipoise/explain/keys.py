"""Every key with its type, default, meaning and example, read from the code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from equipoise import config, data, methods, models
from equipoise.config import Experiment
from equipoise.config.options import defaults_of, in_words, types_of
from equipoise.config.origins import Origins
from equipoise.data.augment import AUGMENTATIONS
from equipoise.data.encode import encode_federation
from equipoise.data.federate import federate
from equipoise.explain.docstrings import choices_in, descriptions_in, summary_in
from equipoise.explain.examples import EXAMPLES, example_of, given_example, one_line, parsed
from equipoise.explain.given import FIRST_LEVEL, KINDS, METHOD, METHOD_OF_STUDY, STUDY, TUNING_SET
from equipoise.method import Method
from equipoise.metrics import Metric
from equipoise.optimizers import Adam, Sgd
from equipoise.run.plain import to_plain
from equipoise.study.plan import Tuning
from equipoise.study.reading import KEYS


@dataclass(frozen=True)
class Setting:
    """A key of an experiment or study.

    Attributes
    ----------
    key : str
        Dotted, such as ``training.schedule.warmup``.
    kind : str
        Which values are valid, in words.
    default : str or None
        The default in YAML; None if a value is required.
    meaning : str
        What it does.
    example : str
        A line of YAML.
    of : str
        What the key belongs to, if not to all experiments: the name of a source, partition,
        optimizer or augmentation.
    """

    key: str
    kind: str
    default: str | None
    meaning: str
    example: str
    of: str = ""


def settings() -> list[Setting]:
    """Return every key with its type, default, meaning and example.

    Returns
    -------
    list of Setting
        In the order of the documentation.

    Examples
    --------
    >>> [setting.default for setting in settings() if setting.key == "training.rounds"]
    ['50']
    """
    return list(_all())


def _all() -> Iterator[Setting]:
    documented, types = descriptions_in(Experiment), get_type_hints(Experiment)
    for key in config.SECTIONS:
        kind, default, meaning = FIRST_LEVEL.get(key, ("keys; see below", "{}", ""))
        example = f"{key}: {one_line(EXAMPLES[key])}" if key in EXAMPLES else ""
        yield Setting(key, kind, default, meaning or documented.get(key, ""), example)
    for key in config.SECTIONS:
        if key == "data":
            yield from _data()
        elif (settings_class := _settings_in(types[key])) is not None:
            yield from _of(settings_class, key)
    for key in KEYS:
        kind, default, meaning, example = STUDY[key]
        yield Setting(key, kind, default, meaning, f"{key}: {example}", of="studies")
    for key, (kind, default, meaning, example) in METHOD_OF_STUDY.items():
        yield Setting(f"methods.{key}", kind, default, meaning, f"methods: {example}", of="studies")
    yield from _of(Tuning, "tuning", of="studies")
    yield Setting(
        "tuning.set", "keys with values", "{}", TUNING_SET, EXAMPLES["tuning.set"], of="studies"
    )


def options_of_names() -> list[Setting]:
    """Return the keys of ``method`` and ``model``, most of which depend on the name.

    Returns
    -------
    list of Setting
        The keys that all methods take, then every method, part of a method and model with its
        options.

    Examples
    --------
    >>> [setting.example for setting in options_of_names() if setting.of == "ditto"]
    ['method: ditto', 'method: {name: ditto, lam: 1.0}']
    """
    return [*_methods(), *_models()]


def _methods() -> Iterator[Setting]:
    for option, (kind, meaning, example) in METHOD.items():
        yield Setting(f"method.{option}", kind, "", meaning, f"method: {example}")
    kind, default, _ = FIRST_LEVEL["method"]
    for name in methods.names():
        part = methods.part_class(name)
        yield Setting("method", kind, default, summary_in(part), f"method: {name}", name)
        yield from _of(part, "method", of=name, fixed={"name": name})
    for slot in methods.SLOTS:
        option = methods.option_of(slot)
        kind, *_ = METHOD[option]
        for name in sorted(set(methods.fitting(slot)) - set(methods.names())):
            part = methods.part_class(name)
            example = f"method: {{name: fedavg, {option}: {name}}}"
            yield Setting(f"method.{option}", kind, "", summary_in(part), example, name)
            yield from _of(
                part,
                f"method.{option}",
                of=name,
                fixed={"name": name},
                around={"method": {"name": "fedavg"}},
            )


def _models() -> Iterator[Setting]:
    kind, default, _ = FIRST_LEVEL["model"]
    for name in models.MODELS:
        maker = models.maker_of(name)
        yield Setting("model", kind, default, summary_in(maker), f"model: {name}", name)
        yield from _of(
            maker, "model", of=name, fixed={"name": name}, without=("shape", "classes", "seed")
        )


def _data() -> Iterator[Setting]:
    shared = (
        descriptions_in(data.load) | descriptions_in(encode_federation) | descriptions_in(federate)
    )
    shared["encode"], shared["encode_size"] = (
        descriptions_in(data.load)[name] for name in ("encode", "encode_size")
    )
    shared["seed"] = (
        "Determines the partition, the splits and everything else that is drawn when the data are "
        "read. By default the seed of the experiment."
    )
    yield from _of(data.load, "data", meanings=shared, fixed={"name": "digits"})
    for name in data.SOURCES:
        recipe = data.recipe_of(name)
        if _ours(recipe):
            yield from _of(recipe, "data", of=name, fixed={"name": name}, without=("seed",))
    for name, partition in data.PARTITIONS.items():
        if _ours(partition):
            yield from _of(
                partition,
                "data.partition",
                of=name,
                fixed={"name": name},
                around={"data": {"name": "digits"}},
            )


def _ours(made_from: Any) -> bool:
    """Return whether something belongs to the library and was not registered by a user."""
    return str(made_from.__module__).startswith("equipoise.")


def _of(
    made_from: Callable[..., Any],
    section: str,
    *,
    of: str = "",
    fixed: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    meanings: Mapping[str, str] | None = None,
    around: Mapping[str, Any] | None = None,
    listed: bool = False,
) -> Iterator[Setting]:
    """Yield the fields of a dataclass or the keyword options of a function."""
    documented, defaults, choices = (
        meanings or descriptions_in(made_from),
        _defaults(made_from),
        choices_in(made_from),
    )
    types = {name: kind for name, kind in types_of(made_from).items() if name not in without}
    needed = {
        name: parsed(given_example(f"{section}.{name}", of))
        for name in types
        if name not in defaults
    }
    for name, kind in types.items():
        key = f"{section}.{name}"
        default = (
            "null" if key == "data.seed" else _plain(defaults[name]) if name in defaults else None
        )
        inner = {**(fixed or {}), **needed}
        example = example_of(
            key, given_example(key, of), default, inner, listed=listed, around=around
        )
        words = _kind(key, kind)
        if name in choices:
            words = f"one of {choices[name]}{' or null' if words.endswith(' or null') else ''}"
        yield Setting(key, words, default, documented.get(name, ""), example, of)
    for name, kind in types.items():
        key = f"{section}.{name}"
        if key == "training.optimizer":
            yield from _of(Sgd, key, of="sgd", fixed={"name": "sgd"})
            yield from _of(
                Adam, key, of="adam, adamw", fixed={"name": "adam"}, without=("decoupled",)
            )
        elif key == "training.augment":
            for own, augmentation in AUGMENTATIONS.items():
                if _ours(augmentation):
                    yield from _of(augmentation, key, of=own, fixed={"name": own}, listed=True)
        elif (inner_class := _settings_in(kind)) is not None:
            yield from _of(inner_class, key, of=of)


def _settings_in(kind: Any) -> type[Any] | None:
    """Return the dataclass of settings in a type annotation; None if there is none."""
    found = [option for option in (kind, *get_args(kind)) if dataclasses.is_dataclass(option)]
    own = [
        option
        for option in found
        if isinstance(option, type) and option not in (Method, Metric, Origins)
    ]
    return own[0] if own else None


def _defaults(made_from: Callable[..., Any]) -> dict[str, Any]:
    if not dataclasses.is_dataclass(made_from):
        return defaults_of(made_from)
    found = {}
    for item in dataclasses.fields(made_from):
        if item.default is not dataclasses.MISSING:
            found[item.name] = item.default
        elif item.default_factory is not dataclasses.MISSING:
            found[item.name] = item.default_factory()
    return found


def _plain(default: Any) -> str:
    if isinstance(default, Method):
        return default.name
    return (
        one_line(json.loads(json.dumps(to_plain(default))))
        if not isinstance(default, str)
        else default
    )


def _kind(key: str, kind: Any) -> str:
    if key in KINDS:
        return KINDS[key]
    return "keys; see below" if _settings_in(kind) else in_words(kind)


def lacking(found: list[Setting]) -> list[str]:
    """List the settings without a meaning or an example, and what to do about it.

    Examples
    --------
    >>> lacking([Setting("training.colour", "text", "red", "Its colour.", "")])
    ['training.colour has no example: give it one in EXAMPLES of equipoise/explain/examples.py']
    """
    hints = {
        "meaning": "describe it in the docstring of its class, under 'Parameters'",
        "example": "give it one in EXAMPLES of equipoise/explain/examples.py",
    }
    return [
        f"{setting.key} has no {what}: {hint}"
        for setting in found
        for what, hint in hints.items()
        if not getattr(setting, what).strip()
    ]
