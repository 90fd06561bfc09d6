"""FedSAM (Qu et al., 2022; Caldarola et al., 2022): sharpness-aware minimization on clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.checks import real
from equipoise.method import LocalRule, Phase, Value, plain_gradient
from equipoise.methods import register
from equipoise.tree import norms, scaled


@dataclass(frozen=True)
class SharpnessGradient:
    """The gradient at w + ε, with ε = ρ g/‖g‖ and g = ∇f(w).

    ε is the step of length ρ that increases the loss most, in first order. The norm is taken over
    all trained parameters, for each client separately. Both gradients are taken on the same batch.
    If g is 0, so is ε.

    The adaptive form (ASAM, Kwon et al., 2021) is ε = ρ T² g/‖T g‖ with T = |w| + η, element by
    element and for all parameters. (Public code scales the tensors called "weight" only.)

    Parameters
    ----------
    rho : float
        ρ.
    eta : float, optional
        η of the adaptive form. By default the form is not adaptive.

    Examples
    --------
    >>> square = lambda params: params[0].square()
    >>> SharpnessGradient(0.5)([square], [torch.tensor(3.0)])
    (tensor(9.), [tensor(7.)])
    >>> SharpnessGradient(0.5, eta=1.0)([square], [torch.tensor(3.0)])
    (tensor(9.), [tensor(10.)])
    """

    rho: float
    eta: float | None = None
    batches = 1

    def __call__(
        self, values: Sequence[Value], params: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the losses at w and the gradient."""
        losses, climb = plain_gradient(values[0], params)
        if self.eta is not None:
            scale = [w.detach().abs() + self.eta for w in params]
            climb = [t * g for t, g in zip(scale, climb, strict=True)]
        length = norms(climb, stacked=losses.dim() > 0)
        if self.eta is not None:
            climb = [t * g for t, g in zip(scale, climb, strict=True)]
        epsilon = scaled(climb, self.rho / torch.where(length > 0, length, 1.0))
        _, gradient = plain_gradient(values[0], list(torch._foreach_add(params, epsilon)))
        return losses, gradient


@register("fedsam", paper="Qu et al., ICML 2022")
@dataclass(frozen=True)
class FedSam(LocalRule):
    """Minimise the largest loss within a distance ρ of w: step along the gradient at w + ρ g/‖g‖.

    A step needs two gradients. See :class:`SharpnessGradient`. BatchNorm statistics and the
    reported training loss are those at w.

    Parameters
    ----------
    rho : float
        ρ, at least 0; 0 is FedAvg.
    adaptive : bool
        Whether to use the adaptive form (FedASAM).
    eta : float
        η of the adaptive form, at least 0.
    """

    rho: float = 0.05
    adaptive: bool = False
    eta: float = 0.2

    def __post_init__(self) -> None:
        """Refuse negative values."""
        real(self.rho, "fedsam.rho", least=0)
        real(self.eta, "fedsam.eta", least=0)

    def phases(self) -> Sequence[Phase]:
        """Return one phase with the gradient at w + ε."""
        return (Phase(gradient=SharpnessGradient(self.rho, self.eta if self.adaptive else None)),)
