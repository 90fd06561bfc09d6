"""Models by name. Every model has two parts, ``features`` and ``head``; see :class:`equipoise.models.base.Model`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from equipoise.errors import InputError, unknown
from equipoise.models.checks import count, several

if TYPE_CHECKING:
    from equipoise.models.base import Model

__all__ = ["MODELS", "build", "defaults"]

MODELS: dict[str, str] = {
    "logistic": "equipoise.models.dense",
    "mlp": "equipoise.models.dense",
    "cnn2": "equipoise.models.cnn",
    "cnn4": "equipoise.models.cnn",
    "bncnn": "equipoise.models.cnn",
    "pflcnn": "equipoise.models.cnn",
    "resnet18": "equipoise.models.resnet",
    "charlstm": "equipoise.models.recurrent",
}
"""Where each model is built: the module that holds a function of the model's name, imported when first asked for."""


def build(name: str, *, shape: Sequence[int], classes: int, seed: int = 0, **options: Any) -> Model:
    """Build a model and draw its initial parameters from a seed.

    The same seed gives the same parameters wherever and whenever it is used; the global random generator is neither
    read nor changed.

    Parameters
    ----------
    name : str
        A name from ``MODELS``.
    shape : sequence of int
        The shape of one sample, such as ``(1, 28, 28)``.
    classes : int
        Number of classes, or of outputs in regression.
    seed : int
        What the initial parameters are drawn from.
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
    import torch

    make = _maker(name)
    _refuse_unknown(options, name)
    sample = several(shape, "shape", count)
    if not sample:
        raise InputError("shape () has no dimension: a sample must be at least a vector, such as (1,)")
    outputs = count(classes, "classes")
    start = count(seed, "seed", least=0)
    if start >= 2**63:
        raise InputError(f"seed must be below 2**63, got {seed!r}")
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        # torch.manual_seed would reseed the GPUs too, which fork_rng(devices=[]) does not restore.
        torch.default_generator.manual_seed(start)
        return make(sample, outputs, **options)


def defaults(name: str) -> dict[str, Any]:
    """List the options of a model with their default values.

    Parameters
    ----------
    name : str
        A name from ``MODELS``.

    Returns
    -------
    dict
        Default value by option name, in the order they are documented.

    Examples
    --------
    >>> defaults("mlp")
    {'hidden': (64,), 'dropout': 0.0}
    """
    parameters = inspect.signature(_maker(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _maker(name: str) -> Callable[..., Model]:
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    maker: Callable[..., Model] = getattr(import_module(MODELS[name]), name)
    return maker


def _refuse_unknown(given: dict[str, Any], name: str) -> None:
    valid = defaults(name)
    for option in given:
        if not valid:
            raise InputError(f"model {name!r} takes no options, got {option!r}")
        if option not in valid:
            raise unknown("option", option, valid, where=f"model {name!r}")
