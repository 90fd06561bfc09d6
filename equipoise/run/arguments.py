"""The arguments of ``equipoise.train``: names, mappings and objects, and errors that name them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from equipoise import methods
from equipoise.engine.settings import FineTune, Machine, Training
from equipoise.errors import InputError, unknown
from equipoise.method import Method
from equipoise.optimizers import OPTIMIZER_OPTIONS
from equipoise.run.evaluation import Evaluation
from equipoise.run.plain import optimizer_from, schedule_from

# What train() takes besides names.
_OBJECTS = {"method": "a Method", "model": "an nn.Module"}

S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])


def names_arguments(function: F) -> F:
    """Name settings in errors like the arguments: ``rounds`` instead of ``training.rounds``."""

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        try:
            return function(*args, **given)
        except InputError as error:
            said = re.sub(
                r"^training\.(\w+)",
                lambda found: found[1] if found[1] in given else found[0],
                str(error),
            )
            if said == str(error):
                raise
            raise InputError(said) from error

    return called  # type: ignore[return-value]


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a function takes by keyword only.

    Examples
    --------
    >>> keywords_of(lambda x, *, seed=0, **more: x)
    ['seed']
    """
    arguments = inspect.signature(function).parameters.values()
    return [one.name for one in arguments if one.kind is one.KEYWORD_ONLY]


def named(value: str | Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the name and the options of a method or a model, which may be given as a name.

    Examples
    --------
    >>> named("fedavg", "method"), named({"name": "mlp", "hidden": [8]}, "model")
    ({'name': 'fedavg'}, {'name': 'mlp', 'hidden': [8]})
    """
    if not isinstance(value, (str, Mapping)):
        made = f", such as {value.__name__}(...)" if isinstance(value, type) else ""
        raise InputError(
            f"{what} must be a name or a mapping with 'name', got {value!r}; in Python it may also "
            f"be {_OBJECTS[what]}{made}"
        )
    options = {"name": value} if isinstance(value, str) else dict(value)
    if "name" not in options:
        raise InputError(f"{what} {options!r} has no name")
    return options


def settings_from(settings: S | Mapping[str, Any] | None, kind: type[S], name: str) -> S | None:
    """Return settings, which may be given as a mapping.

    Examples
    --------
    >>> settings_from({"every": 5}, Evaluation, "evaluation").every
    5
    """
    if isinstance(settings, Mapping):
        valid = [f"{name}.{field}" for field in _fields(kind)]
        for key in settings:
            if f"{name}.{key}" not in valid:
                # That package imports ``train``. Only errors need it.
                from equipoise.config.suggesting import unknown_key

                raise unknown_key(f"{name}.{key}", valid, where="train()")
        return kind(**_converted(settings))
    if settings is not None and not isinstance(settings, kind):
        raise InputError(
            f"{name} must be a mapping or of the class {kind.__name__} (from equipoise import "
            f"{kind.__name__}), got {settings!r}"
        )
    return settings


def _fields(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _converted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Make the objects that may be given as names or mappings in settings."""
    made = dict(settings)
    for key, read in (("optimizer", optimizer_from), ("schedule", schedule_from)):
        if isinstance(made.get(key), (str, Mapping)):
            made[key] = read(made[key])
    if isinstance(made.get("fine_tune"), Mapping):
        made["fine_tune"] = settings_from(made["fine_tune"], FineTune, "evaluation.fine_tune")
    return made


def training_from(
    training: Training | None,
    settings: Mapping[str, Any],
    method: str | Mapping[str, Any] | Method,
    arguments: Sequence[str],
) -> Training:
    """Return the settings of training, changed by single ones.

    Parameters
    ----------
    training : Training, optional
        The settings, by default the usual ones.
    settings : mapping
        Single settings.
    method : str, mapping or Method
        The method, for errors: an unknown setting may be one of its options.
    arguments : sequence of str
        The other arguments of ``train``, for errors.

    Examples
    --------
    >>> training_from(None, {"rounds": 3}, "fedavg", ["seed"]).rounds
    3
    """
    for key, value in settings.items():
        if key not in _fields(Training):
            raise _unknown_argument(key, value, method, arguments)
    made = _converted(settings)
    return dataclasses.replace(training, **made) if training else Training(**made)


def _unknown_argument(
    key: str,
    value: Any,
    method: str | Mapping[str, Any] | Method,
    arguments: Sequence[str],
) -> InputError:
    """Return the error for an unknown argument of ``train``. It says where the key belongs."""
    # That package imports ``train``. Only errors need it.
    from equipoise.config.suggesting import setting_called

    called = setting_called(key)
    meant = (called or key).rpartition(".")[2]
    given = f"{meant!r}: {value!r}}}"
    chosen = method.get("name") if isinstance(method, Mapping) else getattr(method, "name", method)
    takers = [name for name in methods.names() if key in methods.options_of(name)]
    belongs = None
    if meant in OPTIMIZER_OPTIONS:
        belongs = f"an option of the optimizer: optimizer={{'name': 'sgd', {given}"
    elif meant in _fields(Evaluation):
        belongs = f"a setting of the evaluation: evaluation={{{given}"
    elif meant in _fields(Machine):
        belongs = f"a setting of the machine: machine={{{given}"
    elif takers:
        shown = [chosen] if chosen in takers else takers[:3]
        belongs = f"an option of {', '.join(shown)}: method={{'name': {shown[0]!r}, {given}"
    if belongs:
        return InputError(f"unknown setting {key!r} in train(); it is {belongs}")
    valid = [*_fields(Training), *arguments]
    elsewhere = [meant if meant in valid else called] if called else ()
    return unknown("setting", key, valid, where="train()", elsewhere=elsewhere)
