"""The steps of stochastic gradient descent for stacked clients, as Triton kernels for a GPU.

A step reads a parameter and its gradient once, and writes the parameter once. With momentum it also
reads and writes the velocity. Small tensors share a launch. The arithmetic is that of PyTorch's
operations on a GPU, which round once for a product and a sum, so results have the same bits.

Each element is computed from its own client's values only. This module is imported only if Triton
is installed: see ``equipoise.models.layers``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a program, and elements of all clients up to which a tensor shares a launch with
# others.
_BLOCK, _SMALL = 2048, 1 << 18
# Small tensors of one launch. Kernels of older versions of Triton do not take tuples of tensors.
_TOGETHER = 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 4) else 1


@dataclass(frozen=True)
class Rule:
    """The numbers of :class:`equipoise.optimizers.Sgd`.

    ``kept`` is the share of the gradient that enters the velocity: 1 without dampening.
    """

    momentum: float = 0.0
    kept: float = 1.0
    nesterov: bool = False
    decay: float = 0.0

    @property
    def numbers(self) -> tuple[float, float, float]:
        """Return the numbers that kernels take as arguments."""
        return self.decay, self.momentum, self.kept

    @property
    def options(self) -> dict[str, Any]:
        """Return what kernels are compiled for."""
        return {
            "DECAYS": self.decay != 0,
            "GATHERS": self.momentum != 0,
            "NESTEROV": self.nesterov,
        }


@triton.jit
def _stepped(
    value: tl.tensor,
    gradient: tl.tensor,
    velocity: tl.tensor,
    inside: tl.tensor,
    rate: tl.tensor,
    decay: tl.tensor,
    momentum: tl.tensor,
    kept: tl.tensor,
    DECAYS: tl.constexpr,
    GATHERS: tl.constexpr,
    NESTEROV: tl.constexpr,
) -> tl.tensor:
    """Return parameters after a step, and update the velocity, to which ``velocity`` points."""
    if DECAYS:
        gradient = tl.fma(value, decay, gradient)
    if GATHERS:
        before = tl.load(velocity, mask=inside, other=0.0)
        after = tl.fma(gradient, kept, before * momentum)
        tl.store(velocity, after, mask=inside)
        gradient = tl.fma(after, momentum, gradient) if NESTEROV else after
    return tl.fma(-gradient, rate, value)


@triton.jit(do_not_specialize=["tiles"])
def _step_one(
    param: tl.tensor,
    gradient: tl.tensor,
    velocity: tl.tensor,
    rates: tl.tensor,
    tiles: tl.tensor,
    size: tl.tensor,
    decay: tl.tensor,
    momentum: tl.tensor,
    kept: tl.tensor,
    DECAYS: tl.constexpr,
    GATHERS: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update a block of one client's row of a tensor; rows have ``size`` elements."""
    client = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    at = client * size + column
    value = tl.load(param + at, mask=inside, other=0.0)
    change = tl.load(gradient + at, mask=inside, other=0.0)
    rate = tl.load(rates + client).to(tl.float32)
    there = velocity + at if GATHERS else velocity
    value = _stepped(
        value, change, there, inside, rate, decay, momentum, kept, DECAYS, GATHERS, NESTEROV
    )
    tl.store(param + at, value, mask=inside)


@triton.jit(do_not_specialize=["clients"])
def _step_several(
    params: tl.tuple,
    gradients: tl.tuple,
    velocities: tl.tuple,
    sizes: tl.tuple,
    rates: tl.tensor,
    clients: tl.tensor,
    decay: tl.tensor,
    momentum: tl.tensor,
    kept: tl.tensor,
    NUMBER: tl.constexpr,
    DECAYS: tl.constexpr,
    GATHERS: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update a block of one of several small tensors, which may have rows of several clients."""
    block = tl.program_id(0)
    for index in tl.static_range(NUMBER):
        elements = clients * sizes[index]
        if (block >= 0) & (block * BLOCK < elements):
            at = block * BLOCK + tl.arange(0, BLOCK)
            inside = at < elements
            value = tl.load(params[index] + at, mask=inside, other=0.0)
            change = tl.load(gradients[index] + at, mask=inside, other=0.0)
            rate = tl.load(rates + at // sizes[index], mask=inside, other=0.0).to(tl.float32)
            there = velocities[index] + at if GATHERS else at
            value = _stepped(
                value, change, there, inside, rate, decay, momentum, kept, DECAYS, GATHERS, NESTEROV
            )
            tl.store(params[index] + at, value, mask=inside)
        # Negative for programs whose tensor has come already.
        block -= tl.cdiv(elements, BLOCK)


def fits(param: Tensor, gradient: Tensor) -> bool:
    """Return whether the kernels can update a parameter."""
    return (
        param.dtype == gradient.dtype == torch.float32
        and param.is_contiguous()
        and gradient.is_contiguous()
    )


def descend(
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocities: Sequence[Tensor] | None,
    rates: Tensor,
    rule: Rule,
) -> None:
    """Make one step in place.

    Parameters
    ----------
    params, gradients : sequence of Tensor
        Stacked over clients, float32, contiguous; see :func:`fits`. Without an axis of clients if
        ``rates`` is a single number.
    velocities : sequence of Tensor or None
        One per parameter, if the rule has a momentum.
    rates : Tensor
        Learning rates, ``[clients]`` or a single number. They are rounded to float32.
    rule : Rule
        Momentum and weight decay.
    """
    rates = rates.reshape(-1).contiguous()
    clients = len(rates)
    kept = [None] * len(params) if velocities is None or not rule.momentum else velocities
    triples = [
        triple for triple in zip(params, gradients, kept, strict=True) if triple[0].numel() > 0
    ]
    if not triples:
        return
    with torch.cuda.device_of(rates):
        for group in _launches(triples):
            sizes = tuple(param.numel() // clients for param, _, _ in group)
            if len(group) == 1:
                tiles = triton.cdiv(sizes[0], _BLOCK)
                _step_one[(tiles * clients,)](
                    *group[0], rates, tiles, *sizes, *rule.numbers, **rule.options, BLOCK=_BLOCK
                )
                continue
            of_params, of_gradients, of_velocities = zip(*group, strict=True)
            blocks = sum(triton.cdiv(param.numel(), _BLOCK) for param in of_params)
            _step_several[(blocks,)](
                of_params,
                of_gradients,
                of_velocities if rule.momentum else (),
                sizes,
                rates,
                clients,
                *rule.numbers,
                NUMBER=len(group),
                **rule.options,
                BLOCK=_BLOCK,
            )


def _launches(triples: list[Any]) -> Iterator[list[Any]]:
    """Divide tensors into those that share a launch. The order of updates does not matter."""
    small = [triple for triple in triples if triple[0].numel() <= _SMALL]
    yield from ([triple] for triple in triples if triple[0].numel() > _SMALL)
    for first in range(0, len(small), _TOGETHER):
        yield small[first : first + _TOGETHER]
