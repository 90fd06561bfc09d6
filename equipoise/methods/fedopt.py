"""Server optimizers: FedAvgM (Hsu et al., 2019), FedAdam and FedYogi (Reddi et al., 2021).

They use Δ = w − Σ a_k w_k as a gradient. Only parameters are updated in this way; buffers are
averaged as in FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.checks import real, within
from equipoise.errors import InputError, unknown
from equipoise.method import Aggregation, Cohort, Sees, State, Updates, mix
from equipoise.methods import register
from equipoise.tree import Tree, tree_map


def pseudo_gradient(state: State, updates: Updates, averaged: Tree) -> Tree:
    """Return Δ = w − w̄ of the shared parameters."""
    return {name: state.model[name] - averaged[name] for name in updates.param_names}


@register("fedavgm", paper="Hsu et al., 2019", sees=Sees.SUMS)
@dataclass(frozen=True)
class FedAvgM(Aggregation):
    """Server momentum: v ← βv + Δ, w ← w − ηv (Hsu et al.).

    Parameters
    ----------
    momentum : float
        β.
    lr : float
        η.
    variant : {"hsu", "dampened", "nesterov"}
        ``dampened`` adds (1−β)Δ instead of Δ, as the MOON code does; ``nesterov`` steps along βv +
        Δ, as FL-bench does.
    """

    reads_reports: ClassVar[bool] = False
    momentum: float = 0.9
    lr: float = 1.0
    variant: str = "hsu"

    def __post_init__(self) -> None:
        """Refuse an unknown variant and values outside the paper's range."""
        if self.variant not in ("hsu", "dampened", "nesterov"):
            raise unknown("fedavgm.variant", self.variant, ("hsu", "dampened", "nesterov"))
        within(self.momentum, "fedavgm.momentum", 0, 1, below=True)
        real(self.lr, "fedavgm.lr", least=0)

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Step along the velocity."""
        averaged = mix(updates, cohort.prior)
        delta = pseudo_gradient(state, updates, averaged)
        before = state.server.get("velocity") or tree_map(torch.zeros_like, delta)
        gain = 1 - self.momentum if self.variant == "dampened" else 1.0
        velocity = tree_map(lambda v, d: self.momentum * v + gain * d, before, delta)
        direction = velocity
        if self.variant == "nesterov":
            direction = tree_map(lambda v, d: self.momentum * v + d, velocity, delta)
        moved = {name: state.model[name] - self.lr * step for name, step in direction.items()}
        return state.with_global({**averaged, **moved}).with_server(velocity=velocity)


@dataclass(frozen=True)
class _Adaptive(Aggregation):
    """Common part of FedAdam and FedYogi: w ← w − η m / (√v + τ), with m ← β₁m + (1−β₁)Δ.

    v starts at τ², and its update differs between the two.

    Parameters
    ----------
    lr : float
        η, the server's learning rate.
    beta1, beta2 : float
        Decay of the first and second moment.
    tau : float
        τ, the degree of adaptivity.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    yogi: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse values outside the paper's range."""
        real(self.lr, f"{self.name}.lr", least=0)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(
                    f"{self.name}.{name} must be in [0, 1), got {getattr(self, name)!r}"
                )
        if not self.tau > 0:
            raise InputError(f"{self.name}.tau must be above 0, got {self.tau!r}")

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """Return the new v from the squared pseudo-gradient."""
        square = delta.square()
        if self.yogi:
            return v - (1 - self.beta2) * square * torch.sign(v - square)
        return self.beta2 * v + (1 - self.beta2) * square

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Step with an adaptive learning rate for every parameter."""
        averaged = mix(updates, cohort.prior)
        delta = pseudo_gradient(state, updates, averaged)
        first = state.server.get("first") or tree_map(torch.zeros_like, delta)
        second = state.server.get("second") or tree_map(
            lambda d: torch.full_like(d, self.tau**2), delta
        )
        first = tree_map(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, first, delta)
        second = tree_map(self.second_moment, second, delta)
        moved = {
            n: state.model[n] - self.lr * m / (second[n].sqrt() + self.tau)
            for n, m in first.items()
        }
        return state.with_global({**averaged, **moved}).with_server(first=first, second=second)


@register("fedadam", paper="Reddi et al., ICLR 2021", sees=Sees.SUMS)
@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """Adam on the server: v ← β₂v + (1−β₂)Δ²."""

    reads_reports: ClassVar[bool] = False


@register("fedyogi", paper="Reddi et al., ICLR 2021", sees=Sees.SUMS)
@dataclass(frozen=True)
class FedYogi(_Adaptive):
    """Yogi on the server: v ← v − (1−β₂)Δ² sign(v − Δ²)."""

    reads_reports: ClassVar[bool] = False
    yogi = True
