"""Per-FedAvg (Fallah, Mokhtari and Ozdaglar, 2020): a model that adapts in one local step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.checks import count
from equipoise.errors import InputError
from equipoise.method import LocalRule, Phase, Value, plain_gradient
from equipoise.methods import register
from equipoise.optimizers import Column, Sgd, descended


@dataclass(frozen=True)
class MetaGradient:
    """The gradient of F(w) = f(w − α ∇f(w)), with a different batch for each f.

    That is (I − α ∇²f(w)) v with v = ∇f(w − α ∇f(w)). The first-order form leaves out the Hessian.
    With δ its product with v is (∇f(w + δ v) − ∇f(w − δ v))/(2 δ), on a third batch. In the
    first-order form, the two f may be different losses.

    Parameters
    ----------
    alpha : float or Tensor, optional
        α, the inner step: one number, or a column over clients. By default the learning rate of the
        training settings.
    delta : float, optional
        δ; by default the first-order form is used.

    Examples
    --------
    >>> square = lambda params: params[0].square()
    >>> MetaGradient(0.25)([square, square], [torch.tensor(4.0)])
    (tensor(4.), [tensor(4.)])
    >>> MetaGradient(0.25, delta=0.5)([square] * 3, [torch.tensor(4.0)])
    (tensor(4.), [tensor(2.)])
    """

    alpha: Column | None = None
    delta: float | None = None

    def at_rate(self, lr: Column) -> MetaGradient:
        """Return the rule with the learning rate as α, unless α is set."""
        return replace(self, alpha=lr) if self.alpha is None else self

    @property
    def batches(self) -> int:
        """Return the number of batches: for the inner step, for v and for the Hessian."""
        return 2 if self.delta is None else 3

    def __call__(
        self, values: Sequence[Value], params: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the losses after the inner step, and the gradient."""
        if self.alpha is None:
            raise InputError(
                "a MetaGradient without alpha follows the learning rate; call at_rate(lr) first"
            )
        _, inner = plain_gradient(values[0], params)
        losses, outer = plain_gradient(values[1], descended(params, inner, self.alpha))
        if self.delta is not None:
            ahead, behind = (
                plain_gradient(values[2], descended(params, outer, -sign * self.delta))[1]
                for sign in (1, -1)
            )
            curved = list(torch._foreach_sub(ahead, behind))
            outer = descended(outer, curved, self.alpha / (2 * self.delta))
        return losses, outer


@register("perfedavg", paper="Fallah et al., NeurIPS 2020")
@dataclass(frozen=True)
class PerFedAvg(LocalRule):
    """Minimise the mean over clients of f_k(w − α ∇f_k(w)).

    Personal models are the global model after one inner step. A training step takes the gradient of
    this objective (see :class:`MetaGradient`) and passes it to the optimizer of the training
    settings, whose learning rate is the paper's β. A step uses two batches, or three with
    ``hessian``, so an epoch has half or a third as many steps as in other methods, at about the
    same cost. The paper weights clients equally.

    Parameters
    ----------
    alpha : float
        α, the size of the inner step, at least 0. It does not follow the learning rate schedule,
        neither in training nor for personal models.
    hessian : bool
        Whether to use second derivatives, by finite differences of length ``delta`` (Per-FedAvg
        (HF)), or not (Per-FedAvg (FO)).
    delta : float
        δ, above 0.
    adapt_steps : int
        Number of inner steps for a personal model.
    """

    alpha: float = 0.01
    hessian: bool = False
    delta: float = 1e-3
    adapt_steps: int = 1
    usual_weights: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        if not 0 <= self.alpha < float("inf"):
            raise InputError(f"perfedavg.alpha must be at least 0 and finite, got {self.alpha!r}")
        if not 0 < self.delta < float("inf"):
            raise InputError(f"perfedavg.delta must be above 0 and finite, got {self.delta!r}")
        count(self.adapt_steps, "perfedavg.adapt_steps")

    def phases(self) -> Sequence[Phase]:
        """Return one phase with the gradient after an inner step."""
        return (Phase(gradient=MetaGradient(self.alpha, self.delta if self.hessian else None)),)

    def adapt(self) -> Sequence[Phase]:
        """Make inner steps."""
        return (Phase(steps=self.adapt_steps, optimizer=Sgd(lr=self.alpha), scheduled=False),)
