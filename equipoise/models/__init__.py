"""Models by name.

All models of this package have two parts, ``features`` and ``head``; see
:class:`equipoise.models.base.Model`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from equipoise.checks import count, several
from equipoise.errors import InputError, unknown
from equipoise.imports import Registry, enter, look_up

if TYPE_CHECKING:
    from equipoise.models.base import Model

__all__ = ["MODELS", "build", "defaults", "maker_of", "register", "with_class_names"]

Maker = Callable[..., "Model"]
M = TypeVar("M", bound=Maker)

MODELS: Registry = {
    "logistic": "equipoise.models.dense:logistic",
    "mlp": "equipoise.models.dense:mlp",
    "cnn2": "equipoise.models.cnn:cnn2",
    "cnn4": "equipoise.models.cnn:cnn4",
    "bncnn": "equipoise.models.cnn:bncnn",
    "pflcnn": "equipoise.models.cnn:pflcnn",
    "resnet18": "equipoise.models.resnet:resnet18",
    "charlstm": "equipoise.models.recurrent:charlstm",
    "unet": "equipoise.models.unet:unet",
    "vit": "equipoise.models.vit:vit",
    "cct": "equipoise.models.cct:cct",
    "vitprompts": "equipoise.models.vit:vitprompts",
    "fedgc": "equipoise.models.fedgc:fedgc",
    "dsaign": "equipoise.models.dsaign:dsaign",
    "pretrained": "equipoise.models.pretrained:pretrained",
    "clip": "equipoise.models.clip:clip",
    "clipadapter": "equipoise.models.clip:clipadapter",
    "clipprompts": "equipoise.models.clip:clipprompts",
}
"""What builds each model."""


def register(maker: M) -> M:
    """Register a model under the name of the function that builds it. Use it as a decorator.

    Parameters
    ----------
    maker : callable
        Takes the shape of a sample, the number of classes and options as keyword arguments, with
        defaults and type annotations. Returns a :class:`equipoise.models.base.Model` or any other
        module; see :func:`equipoise.models.headed.with_head`.

    Returns
    -------
    callable
        The same function.

    Examples
    --------
    >>> @register
    ... def narrow(shape, classes, *, width: int = 8):
    ...     return build("mlp", shape=shape, classes=classes, hidden=(width,))
    >>> build("narrow", shape=(8,), classes=2, width=3).head
    Linear(in_features=3, out_features=2, bias=True)
    """
    return enter(MODELS, maker, "model")


def build(name: str, *, shape: Sequence[int], classes: int, seed: int = 0, **options: Any) -> Model:
    """Build a model and draw its initial parameters from a seed.

    The same seed always gives the same parameters. The global random generator is neither read nor
    changed.

    Parameters
    ----------
    name : str
        A name from ``MODELS``.
    shape : sequence of int
        The shape of one sample, such as ``(1, 28, 28)``.
    classes : int
        Number of classes, or of outputs in regression.
    seed : int
        Seed of the initial parameters.
    **options
        The model's own options, see :func:`defaults`.

    Returns
    -------
    Model
        On the CPU, in training mode.

    Examples
    --------
    >>> model = build("mlp", shape=(1, 8, 8), classes=10, hidden=(32,))
    >>> sum(p.numel() for p in model.parameters())
    2410
    """
    from torch import nn

    from equipoise.random import seeded

    make = maker_of(name)
    _check_names(options, name)
    sample = several(shape, "shape", count)
    if not sample:
        raise InputError(
            "shape () has no dimension; a sample must be at least a vector, such as (1,)"
        )
    outputs = count(classes, "classes")
    start = count(seed, "seed", least=0)
    if start >= 2**63:
        raise InputError(f"seed must be below 2**63, got {seed!r}")
    with seeded(start):
        made = make(sample, outputs, **options)
    if not isinstance(made, nn.Module):
        raise InputError(f"the function of model {name!r} returned {made!r}; valid: an nn.Module")
    return made


def defaults(name: str) -> dict[str, Any]:
    """Return the options of a model with their default values, without required options.

    Parameters
    ----------
    name : str
        A name from ``MODELS``.

    Returns
    -------
    dict
        Default values by name of the option, in the documented order.

    Examples
    --------
    >>> defaults("mlp")
    {'hidden': (64,), 'dropout': 0.0}
    """
    return {option: p.default for option, p in _options(name).items() if p.default is not p.empty}


def with_class_names(
    options: Mapping[str, Any], class_names: Sequence[str] | None
) -> dict[str, Any]:
    """Add the names of the classes to the options of a model that takes them, unless they are set.

    Parameters
    ----------
    options : mapping
        ``name`` and the model's options.
    class_names : sequence of str or None
        The names of the federation's classes, if it has them.

    Returns
    -------
    dict
        The name and all options for :func:`build`.

    Examples
    --------
    >>> with_class_names({"name": "mlp"}, ["cat", "dog"])
    {'name': 'mlp'}
    >>> with_class_names({"name": "clip"}, ["cat", "dog"])
    {'name': 'clip', 'class_names': ['cat', 'dog']}
    """
    completed = dict(options)
    takes = "class_names" in _options(completed["name"])
    if takes and class_names is not None and completed.get("class_names") is None:
        completed["class_names"] = list(class_names)
    return completed


def maker_of(name: str) -> Maker:
    """Return the function that builds a model.

    Examples
    --------
    >>> maker_of("mlp").__module__
    'equipoise.models.dense'
    """
    return look_up(MODELS, name, "model")


def _options(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(maker_of(name)).parameters
    return {option: p for option, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _check_names(given: dict[str, Any], name: str) -> None:
    """Refuse unknown options and missing required ones."""
    valid = _options(name)
    for option in given:
        if not valid:
            raise InputError(f"model {name!r} takes no options, got {option!r}")
        if option not in valid:
            raise unknown("option", option, valid, where=f"model {name!r}")
    for option, parameter in valid.items():
        if parameter.default is parameter.empty and option not in given:
            raise InputError(f"model {name!r} needs the option {option!r}")
