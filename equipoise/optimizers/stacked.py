"""SGD and Adam for stacked clients.

They compute the same steps as ``torch.optim`` (the tests compare them). They get only the rows of
clients that are still training, so momentum, decay or Adam's averages never change a client that
has finished.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from equipoise.checks import within
from equipoise.errors import InputError
from equipoise.optimizers import steps
from equipoise.optimizers.base import Column, Count, OptimizerState, check_rates
from equipoise.optimizers.penalties import Penalties


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent, as ``torch.optim.SGD``.

    Parameters
    ----------
    lr : float
        Learning rate.
    momentum : float
        Factor of the earlier steps. A client's momentum starts at 0 in every round.
    dampening : float
        Share of the gradient that does not enter the momentum.
    nesterov : bool
        Whether to use Nesterov's momentum.
    weight_decay : float
        Factor of the parameters that is added to the gradient.

    Examples
    --------
    >>> w = [torch.ones(2, 1)]
    >>> Sgd(lr=0.5).step(w, [torch.ones(2, 1)], {}, 0.5, 1)
    >>> w
    [tensor([[0.5000],
            [0.5000]])]
    """

    lr: float = 0.1
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    stacked = True

    @property
    def replays(self) -> bool:
        """With dampening the first step differs from the others."""
        return self.dampening == 0

    def uses_kernels(self, lr: Column) -> bool:
        """Return whether GPU kernels make steps with such a learning rate.

        Then gradients may be factors (:mod:`equipoise.models.factored`), and a
        :meth:`penalized_step` takes hardly longer than one without penalties.
        """
        return steps.kernels_for(lr) is not None

    def __post_init__(self) -> None:
        """Refuse values that ``torch.optim.SGD`` refuses, and values beyond any use."""
        check_rates(self)
        within(self.momentum, "optimizer.momentum", 0, 1, below=True)
        within(self.dampening, "optimizer.dampening", 0, 1)
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise InputError("optimizer.nesterov needs a momentum above 0 and dampening 0")

    def begin(self, params: list[Tensor]) -> OptimizerState:
        """Allocate the momentum, if any, and on a CPU the gradients with weight decay."""
        state = (
            {"momentum": [torch.zeros_like(tensor) for tensor in params]} if self.momentum else {}
        )
        if self.weight_decay and all(tensor.device.type == "cpu" for tensor in params):
            # Allocating memory in every step takes longer than the addition, because the operating
            # system maps it page by page.
            state["decayed"] = [torch.zeros_like(tensor) for tensor in params]
        return state

    def step(
        self,
        params: list[Tensor],
        gradients: list[Any],
        state: OptimizerState,
        lr: Column,
        count: Count,
    ) -> None:
        """Make one step.

        On a GPU with learning rates of clients, kernels make it: see
        :mod:`equipoise.models.update_kernels`. Then gradients may be factors.
        """
        self._step(params, gradients, state, lr, count)

    def penalized_step(
        self,
        params: list[Tensor],
        gradients: list[Any],
        state: OptimizerState,
        lr: Column,
        count: Count,
        penalties: Penalties,
    ) -> Tensor:
        """Add the gradient of penalties to the others, and make one step.

        Returns
        -------
        Tensor
            Every client's penalty before the step, ``[K]``, or that of a single client.

        Examples
        --------
        >>> w, penalties = [torch.ones(2, 1)], Penalties(1.0, [torch.zeros(1)], None)
        >>> Sgd(lr=0.5).penalized_step(w, [torch.ones(2, 1)], {}, 0.5, 1, penalties)
        tensor([0.5000, 0.5000])
        >>> w
        [tensor([[0.],
                [0.]])]
        """
        return reduce(torch.add, self._step(params, gradients, state, lr, count, penalties))

    def _step(
        self,
        params: list[Tensor],
        gradients: list[Any],
        state: OptimizerState,
        lr: Column,
        count: Count,
        penalties: Penalties | None = None,
    ) -> list[Tensor]:
        """Make one step, and return the penalties on parts of the parameters before it."""
        updated, of_updated = steps.updated_by_kernels(
            params,
            gradients,
            state.get("momentum"),
            lr,
            penalties,
            momentum=self.momentum,
            kept=1 - self._dampening(count),
            nesterov=self.nesterov,
            decay=self.weight_decay,
        )
        values = [] if of_updated is None else [of_updated]
        if any(updated):
            rest = [not done for done in updated]
            params, gradients = list(compress(params, rest)), list(compress(gradients, rest))
            state = {name: list(compress(tensors, rest)) for name, tensors in state.items()}
            penalties = None if penalties is None else penalties.of(rest)
        if params:
            if penalties is not None:
                of_others, gradients = penalties.added_to(gradients, params)
                values.append(of_others)
            self._step_plainly(params, gradients, state, lr, count)
        return values

    def _step_plainly(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        state: OptimizerState,
        lr: Column,
        count: Count,
    ) -> None:
        """Make one step with PyTorch's operations."""
        if "decayed" in state:
            for room, gradient, param in zip(state["decayed"], gradients, params, strict=True):
                torch.add(gradient, param, alpha=self.weight_decay, out=room)
            gradients = state["decayed"]
        elif self.weight_decay:
            gradients = list(torch._foreach_add(gradients, params, alpha=self.weight_decay))
        if self.momentum:
            velocity = state["momentum"]
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, gradients, alpha=1 - self._dampening(count))
            gradients = (
                list(torch._foreach_add(gradients, velocity, alpha=self.momentum))
                if self.nesterov
                else velocity
            )
        steps.descend(params, gradients, lr)

    def _dampening(self, count: Count) -> float:
        # A recorded step cannot depend on its number.
        return self.dampening if self.dampening and count > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam, as ``torch.optim.Adam``, or ``torch.optim.AdamW`` with ``decoupled``.

    Parameters
    ----------
    lr : float
        Learning rate.
    betas : tuple of float
        Decay rates of the two moments.
    eps : float
        Added to the denominator.
    weight_decay : float
        Weight decay factor.
    decoupled : bool
        Whether weight decay is applied to the parameters instead of the gradient.

    Examples
    --------
    >>> w = [torch.ones(1, 1)]
    >>> adam = Adam(lr=0.1)
    >>> adam.step(w, [torch.ones(1, 1)], adam.begin(w), 0.1, 1)
    >>> round(w[0].item(), 6)
    0.9
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    stacked = True
    replays = True

    def __post_init__(self) -> None:
        """Refuse values that ``torch.optim.Adam`` refuses, and values beyond any use."""
        check_rates(self)
        within(self.eps, "optimizer.eps", 0, 1)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"optimizer.betas must be two numbers in [0, 1), got {self.betas!r}")

    def begin(self, params: list[Tensor]) -> OptimizerState:
        """Allocate both moments."""
        return {
            moment: [torch.zeros_like(tensor) for tensor in params]
            for moment in ("first", "second")
        }

    def step(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        state: OptimizerState,
        lr: Column,
        count: Count,
    ) -> None:
        """Make one step."""
        if self.weight_decay and self.decoupled:
            factors = [1 - column * self.weight_decay for column in steps.as_columns(lr, params)]
            torch._foreach_mul_(params, factors)
        elif self.weight_decay:
            gradients = list(torch._foreach_add(gradients, params, alpha=self.weight_decay))
        first, second = state["first"], state["second"]
        torch._foreach_lerp_(first, gradients, 1 - self.betas[0])
        torch._foreach_mul_(second, self.betas[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - self.betas[1])
        scales = torch._foreach_sqrt(second)
        unbiased = 1 - self.betas[1] ** count
        root = (
            unbiased.sqrt().to(scales[0].dtype)
            if isinstance(unbiased, Tensor)
            else math.sqrt(unbiased)
        )
        torch._foreach_div_(scales, root)
        torch._foreach_add_(scales, self.eps)
        steps.descend(
            params, list(torch._foreach_div(first, scales)), lr / (1 - self.betas[0] ** count)
        )
