"""Optimizers of clients, and schedules over rounds."""

from __future__ import annotations

from typing import Any

import torch

from equipoise.errors import unknown
from equipoise.optimizers.base import Column, Count, Optimizer, OptimizerState, check_optimizer
from equipoise.optimizers.from_torch import TorchOptimizer
from equipoise.optimizers.schedule import Schedule
from equipoise.optimizers.stacked import Adam, Sgd
from equipoise.optimizers.steps import descended
from equipoise.optimizers.weights import gradient_weights

__all__ = [
    "OPTIMIZER_OPTIONS",
    "Adam",
    "Column",
    "Count",
    "Optimizer",
    "OptimizerState",
    "Schedule",
    "Sgd",
    "TorchOptimizer",
    "check_optimizer",
    "descended",
    "gradient_weights",
    "optimizer_named",
]

OPTIMIZER_OPTIONS = tuple(dict.fromkeys([*Sgd.__dataclass_fields__, *Adam.__dataclass_fields__]))
"""Options of SGD and Adam, which users often set one level higher by mistake."""


def optimizer_named(name: str, **options: Any) -> Optimizer:
    """Return an optimizer by its name in ``torch.optim``, in upper or lower case.

    Parameters
    ----------
    name : str
        ``sgd``, ``adam``, ``adamw`` or another class of ``torch.optim`` that steps without a
        closure.
    **options
        Its options, as ``torch.optim`` names them.

    Returns
    -------
    Optimizer
        The stacked form, if there is one.

    Examples
    --------
    >>> optimizer_named("adamw", lr=0.01).decoupled, optimizer_named("rmsprop", lr=0.01).stacked
    (True, False)
    """
    kinds = {
        kind.lower(): kind
        for kind in dir(torch.optim)
        if isinstance(getattr(torch.optim, kind), type)
        and issubclass(getattr(torch.optim, kind), torch.optim.Optimizer)
        and kind not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
    }
    if name not in kinds:
        raise unknown("optimizer", name, kinds)
    forms: dict[str, tuple[type[Any], dict[str, Any]]] = {
        "sgd": (Sgd, {}),
        "adam": (Adam, {}),
        "adamw": (Adam, {"decoupled": True, "weight_decay": 1e-2}),
    }
    if name in forms:
        form, preset = forms[name]
        fields = set(form.__dataclass_fields__) - {"decoupled"}
        if extra := sorted(set(options) - fields):
            raise unknown(f"option of optimizer {name}", extra[0], fields)
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        made: Optimizer = form(**{**preset, **options})
        return made
    lr = options.pop("lr", 1e-2)
    return TorchOptimizer(kind=kinds[name], lr=lr, options=options)
