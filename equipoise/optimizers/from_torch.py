"""Other optimizers of ``torch.optim``, one client at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.checks import real
from equipoise.errors import InputError
from equipoise.optimizers.base import Column, Count, OptimizerState


@dataclass(frozen=True, kw_only=True)
class TorchOptimizer:
    """Any other optimizer of ``torch.optim``, one client at a time.

    Examples
    --------
    >>> TorchOptimizer(kind="RMSprop", lr=0.01, options={"alpha": 0.9}).stacked
    False
    """

    kind: str
    lr: float
    options: dict[str, Any] = field(default_factory=dict)
    stacked = False
    replays = False

    def __post_init__(self) -> None:
        """Try the options on a dummy parameter, so that mistakes are found before training."""
        real(self.lr, "optimizer.lr", least=0)
        try:
            self._make([torch.zeros(1, requires_grad=True)], self.lr)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"torch.optim.{self.kind} refuses its options {self.options}: {error}"
            ) from error

    def _make(self, leaves: list[Tensor], lr: float) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, self.kind)(leaves, lr=lr, **self.options)
        return made

    def begin(self, params: list[Tensor]) -> OptimizerState:
        """Return the optimizer object and the tensors that it updates."""
        leaves = [tensor.detach()[0].requires_grad_() for tensor in params]
        optimizer = self._make(leaves, self.lr)
        return {"leaves": leaves, "optimizer": [optimizer]}  # type: ignore[list-item]

    def step(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        state: OptimizerState,
        lr: Column,
        count: Count,
    ) -> None:
        """Make one step."""
        optimizer: Any = state["optimizer"][0]
        for group in optimizer.param_groups:
            group["lr"] = float(lr)
        for leaf, gradient in zip(state["leaves"], gradients, strict=True):
            leaf.grad = gradient
        optimizer.step()
