"""The interface of optimizers, and checks of their settings."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from equipoise.checks import real, within
from equipoise.errors import InputError

Column = float | Tensor
Count = int | Tensor
OptimizerState = dict[str, list[Tensor]]
# Larger numbers are typing errors, such as a missing exponent.
LARGEST_DECAY = 10.0


class Optimizer(Protocol):
    """How a gradient becomes a step."""

    @property
    def lr(self) -> float:
        """The learning rate before any schedule."""

    @property
    def stacked(self) -> bool:
        """Whether it can step many clients at once."""

    @property
    def replays(self) -> bool:
        """Whether all steps run the same operations if ``count`` is a tensor."""

    def begin(self, params: list[Tensor]) -> OptimizerState:
        """Return the initial state for stacked parameters."""

    def step(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        state: OptimizerState,
        lr: Column,
        count: Count,
    ) -> None:
        """Update parameters and state in place.

        ``lr`` is one number or a column over clients. ``count`` is the number of the step, from 1.
        For a recorded step it is a float64 tensor. Do not keep gradients: the next step uses their
        memory again.
        """


def check_optimizer(optimizer: Any, what: str) -> None:
    """Refuse values that are not settings, such as a class or an optimizer of ``torch.optim``.

    Parameters
    ----------
    optimizer : object
        What was given.
    what : str
        How the message names it.

    Examples
    --------
    >>> import torch
    >>> check_optimizer(torch.optim.SGD, "training.optimizer")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: training.optimizer must be settings such as Sgd(lr=0.1) or ...
    """
    if isinstance(optimizer, type) or not all(
        hasattr(optimizer, name) for name in ("lr", "stacked", "begin", "step")
    ):
        kind = (
            f"the class {optimizer.__name__}"
            if isinstance(optimizer, type)
            else f"a {type(optimizer).__name__}"
        )
        raise InputError(
            f'{what} must be settings such as Sgd(lr=0.1) or {{"name": "adam", "lr": 0.001}}, got '
            f"{kind}; each client's own optimizer is made from them"
        )


def check_rates(optimizer: Any) -> None:
    """Refuse a learning rate or weight decay that is negative or beyond any use."""
    real(optimizer.lr, "optimizer.lr", least=0)
    within(optimizer.weight_decay, "optimizer.weight_decay", 0, LARGEST_DECAY)
