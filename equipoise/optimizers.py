"""Optimizers over stacked clients, and schedules over rounds.

The stacked forms compute the same steps as ``torch.optim`` (the tests compare them). They get only
the rows of clients that are still training, so momentum, decay or Adam's averages never change a
client that has finished. Other optimizers of ``torch.optim`` run one client at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise import schedules
from equipoise.checks import UNLESS_DEFAULT, count, real, within
from equipoise.errors import InputError, unknown
from equipoise.models.kernel_modules import module_with_triton

Column = float | Tensor
Count = int | Tensor
OptimizerState = dict[str, list[Tensor]]

# Larger numbers are typing errors, such as a missing exponent.
LARGEST_DECAY = 10.0


def _check_rates(optimizer: Any) -> None:
    real(optimizer.lr, "optimizer.lr", least=0)
    within(optimizer.weight_decay, "optimizer.weight_decay", 0, LARGEST_DECAY)


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
        For a recorded step it is a float64 tensor.
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


def _columns(lr: Column, like: list[Tensor]) -> list[Tensor]:
    """Shape a column over clients so that it multiplies each tensor's rows."""
    if not isinstance(lr, Tensor):
        return [torch.tensor(lr, dtype=tensor.dtype, device=tensor.device) for tensor in like]
    return [
        lr.to(tensor.dtype).view(-1, *(1,) * (tensor.dim() - 1))
        if lr.dim()
        else lr.to(tensor.dtype)
        for tensor in like
    ]


def descended(params: list[Tensor], directions: list[Tensor], lr: Column) -> list[Tensor]:
    """Return the parameters after a step against the given directions.

    Parameters
    ----------
    params, directions : list of Tensor
        One direction a parameter, both stacked over clients.
    lr : float or Tensor
        The length of the step: one number, or a column over clients.

    Returns
    -------
    list of Tensor
        p − lr d.

    Examples
    --------
    >>> descended([torch.ones(2, 1)], [torch.ones(2, 1)], torch.tensor([0.5, 0.25]))
    [tensor([[0.5000],
            [0.7500]])]
    """
    if isinstance(lr, Tensor):
        columns = _columns(lr, directions)
        return [
            torch.addcmul(p, d, c, value=-1)
            for p, d, c in zip(params, directions, columns, strict=True)
        ]
    return list(torch._foreach_add(params, directions, alpha=-lr))


def _kernels(lr: Column) -> Any:
    """Return the module of GPU kernels if they can make steps with a learning rate, else None."""
    if not isinstance(lr, Tensor) or not lr.is_cuda:
        return None
    return module_with_triton("update_kernels", lr.device)


def _updated(
    params: list[Tensor],
    gradients: list[Any],
    velocities: list[Tensor] | None,
    lr: Column,
    **numbers: Any,
) -> list[bool]:
    """Make a step of SGD for the parameters that GPU kernels can update, and return which.

    ``numbers`` are those of :class:`equipoise.models.update_kernels.Rule`.
    """
    if (kernels := _kernels(lr)) is None:
        return [False] * len(params)
    fit = [kernels.fits(p, g) for p, g in zip(params, gradients, strict=True)]
    chosen = (
        None if each is None else list(compress(each, fit))
        for each in (params, gradients, velocities)
    )
    kernels.descend(*chosen, lr, kernels.Rule(**numbers))
    return fit


def _descend(params: list[Tensor], directions: list[Tensor], lr: Column) -> None:
    """Make the step of :func:`descended` in place."""
    if isinstance(lr, Tensor):
        rest = [not done for done in _updated(params, directions, None, lr)]
        params, directions = list(compress(params, rest)), list(compress(directions, rest))
        for param, direction, column in zip(
            params, directions, _columns(lr, directions), strict=True
        ):
            param.addcmul_(direction, column, value=-1)
    else:
        torch._foreach_add_(params, directions, alpha=-lr)


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

    def takes_factors(self, lr: Column) -> bool:
        """Return whether :meth:`step` takes gradients as factors with such a learning rate.

        See :mod:`equipoise.models.factored`.
        """
        return _kernels(lr) is not None

    def __post_init__(self) -> None:
        """Refuse values that ``torch.optim.SGD`` refuses, and values beyond any use."""
        _check_rates(self)
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
        updated = _updated(
            params,
            gradients,
            state.get("momentum"),
            lr,
            momentum=self.momentum,
            kept=1 - self._dampening(count),
            nesterov=self.nesterov,
            decay=self.weight_decay,
        )
        if any(updated):
            rest = [not done for done in updated]
            params, gradients = list(compress(params, rest)), list(compress(gradients, rest))
            state = {name: list(compress(tensors, rest)) for name, tensors in state.items()}
        if params:
            self._step_plainly(params, gradients, state, lr, count)

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
        _descend(params, gradients, lr)

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
        _check_rates(self)
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
            factors = [1 - column * self.weight_decay for column in _columns(lr, params)]
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
        _descend(params, list(torch._foreach_div(first, scales)), lr / (1 - self.betas[0] ** count))


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


def gradient_weights(
    optimizer: Optimizer, steps: NDArray[np.int64], pull: float | NDArray[np.float64] = 0.0
) -> NDArray[np.float64]:
    """Return FedNova's ‖a‖₁, the sum of the weights of gradients in the updates of clients.

    The update of SGD is a weighted sum of its gradients, w − w₀ = −η Σ a_t g_t. Without momentum
    all a_t are 1, and the sum is the number of steps τ. With momentum ρ it is
    (τ − ρ (1 − ρ^τ)/(1 − ρ))/(1 − ρ). With a proximal term it is (1 − (1 − α)^τ)/α, with α = ημ. It
    is the distance in units of η after τ steps with gradients of 1.

    Parameters
    ----------
    optimizer : Optimizer
        The clients' optimizer. For optimizers other than SGD the number of steps is returned.
    steps : int array
        τ, the number of steps of each client.
    pull : float or array
        α, the learning rate times the factor μ of a term μ/2 ‖w − w₀‖² in the loss.

    Returns
    -------
    float array
        One number per client.

    Examples
    --------
    >>> gradient_weights(Sgd(lr=0.1), np.array([3, 1])).tolist()
    [3.0, 1.0]
    >>> gradient_weights(Sgd(lr=0.1, momentum=0.5), np.array([3, 1])).tolist()
    [4.25, 1.0]
    """
    if not isinstance(optimizer, Sgd):
        return steps.astype(np.float64)
    moved, velocity = np.zeros(len(steps)), np.zeros(len(steps))
    for step in range(int(steps.max(initial=0))):
        gradient = direction = 1 - pull * moved
        if optimizer.momentum:
            velocity = (
                optimizer.momentum * velocity
                + (1 - (optimizer.dampening if step else 0.0)) * gradient
            )
            direction = gradient + optimizer.momentum * velocity if optimizer.nesterov else velocity
        moved = np.where(step < steps, moved + direction, moved)
    return moved


_KINDS = ("constant", "exponential", "steps", "cosine")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over rounds, as a factor of the optimizer's learning rate.

    Parameters
    ----------
    kind : str
        ``constant``; ``exponential`` multiplies by ``decay`` every round; ``steps`` sets the factor
        to ``factors[i]`` from round ``at[i]`` on; ``cosine`` falls from 1 to ``floor``; or the name
        of a custom function, see :func:`equipoise.schedules.register`.
    decay : float
        Factor per round of ``exponential``.
    at : tuple of int
        Rounds (counted from 0) from which the factors of ``steps`` apply.
    factors : tuple of float
        Factors of ``steps``.
    floor : float
        Last factor of ``cosine``.
    warmup : int
        The number of warm-up rounds. In round r, counted from 0, the factor is (r + 1) / warmup.
        The schedule begins after these rounds, but ``at`` always counts from the first round of the
        run.
    over : int, optional
        The number of rounds over which ``cosine`` falls, without warm-up. Afterwards the factor
        stays at ``floor``. By default it falls until the end of the run, and the run cannot be made
        longer.

    Examples
    --------
    >>> fedcrc = Schedule(kind="steps", at=(50, 75), factors=(0.2, 0.02))
    >>> [fedcrc.factor(r, 100) for r in (0, 50, 99)]
    [1.0, 0.2, 0.02]
    >>> [Schedule(kind="cosine", warmup=4, over=2).factor(r, 100) for r in (0, 3, 4, 5, 6, 99)]
    [0.25, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    kind: str = "constant"
    decay: float = 0.99
    at: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    floor: float = 0.0
    warmup: int = field(default=0, metadata={UNLESS_DEFAULT: True})
    over: int | None = field(default=None, metadata={UNLESS_DEFAULT: True})

    def __post_init__(self) -> None:
        """Refuse unknown kinds, steps that do not match, and negative factors."""
        kinds = (*_KINDS, *schedules.names())
        if self.kind not in kinds:
            raise unknown("schedule", self.kind, kinds)
        count(self.warmup, "schedule.warmup", least=0)
        if self.over is not None:
            count(self.over, "schedule.over")
            if self.kind != "cosine":
                raise InputError(
                    f"schedule.over={self.over} is valid only for the kind 'cosine', got "
                    f"{self.kind!r}"
                )
        if len(self.at) != len(self.factors) or list(self.at) != sorted(self.at):
            raise InputError(
                f"schedule.at {self.at} and schedule.factors {self.factors} must have the same "
                "length, and rounds must be in ascending order"
            )
        if not within(self.decay, "schedule.decay", 0, 1):
            raise InputError("schedule.decay must be above 0, got 0")
        within(self.floor, "schedule.floor", 0, 1)
        for factor in self.factors:
            real(factor, "each of schedule.factors", least=0)
        for start in self.at:
            count(start, "each of schedule.at", least=0)

    @property
    def needs_total(self) -> str | None:
        """Why the factors depend on the number of rounds; None if they do not."""
        if self.kind == "cosine" and self.over is None:
            return (
                "its schedule 'cosine' falls until the end of the run, because "
                "training.schedule.over is not set"
            )
        if self.kind not in _KINDS and schedules.takes_rounds(self.kind):
            return f"its schedule {self.kind!r} depends on the number of rounds"
        return None

    def factor(self, round_: int, rounds: int) -> float:
        """Return the factor of a round, counted from 0."""
        if round_ < self.warmup:
            return (round_ + 1) / self.warmup
        since, left = round_ - self.warmup, max(1, rounds - self.warmup)
        if self.kind == "exponential":
            return float(self.decay**since)
        if self.kind == "steps":
            passed = [
                factor
                for start, factor in zip(self.at, self.factors, strict=True)
                if round_ >= start
            ]
            return passed[-1] if passed else 1.0
        if self.kind == "cosine":
            progress = since / left if self.over is None else min(1.0, since / self.over)
            return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2
        if self.kind == "constant":
            return 1.0
        return schedules.factor(self.kind, since, left)
