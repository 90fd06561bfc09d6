"""The steps of stochastic gradient descent for stacked clients, as Triton kernels for a GPU.

A step reads a parameter and its gradient once, and writes the parameter once. With momentum it also
reads and writes the velocity. Small tensors share a launch. A gradient may be given as two factors,
whose product is made where it is used and never written to memory.

The arithmetic of a step is that of PyTorch's operations on a GPU, so results have the same bits.
Each element is computed from its own client's values only, in a fixed order. Only imported if
Triton is installed: see ``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.models.convolution_kernels import add_products

# Elements of a program, and of one that updates small tensors.
_BLOCK, _SMALL_BLOCK = 2048, 512
# Elements of all clients up to which a tensor shares a launch with others.
_SMALL = 1 << 18
# Small tensors of one launch. Kernels of older versions of Triton do not take tuples of tensors.
_TOGETHER = 16 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 4) else 1


# As ``torch.addcmul`` does, steps round the product of gradient and learning rate, and then the
# difference. The compiler must not join the two. Where PyTorch rounds once, kernels use ``tl.fma``.
_ROUNDED = {"enable_fp_fusion": False}
# Rows, columns and samples of a product of factors that a program makes.
_TILE = {"M": 64, "N": 64, "K": 16, "num_warps": 4, "num_stages": 1}


@dataclass(frozen=True)
class Factors:
    """The gradient by a matrix as two factors, whose product is summed over samples.

    Attributes
    ----------
    upper : Tensor
        The gradient by the result, ``[clients, samples, rows]``.
    x : Tensor
        The input, ``[clients, samples, columns]``.
    precision : str
        As for :func:`equipoise.models.convolutions.convolve`.
    """

    upper: Tensor
    x: Tensor
    precision: str


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
    return value - gradient * rate


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
    values: tl.tuple,
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
    """Update a block of one of several small tensors, which may have rows of several clients.

    No argument may be named ``params``, which is a variable of Triton's launcher.
    """
    block = tl.program_id(0)
    for index in tl.static_range(NUMBER):
        elements = clients * sizes[index]
        if (block >= 0) & (block * BLOCK < elements):
            at = block * BLOCK + tl.arange(0, BLOCK)
            inside = at < elements
            value = tl.load(values[index] + at, mask=inside, other=0.0)
            change = tl.load(gradients[index] + at, mask=inside, other=0.0)
            rate = tl.load(rates + at // sizes[index], mask=inside, other=0.0).to(tl.float32)
            there = velocities[index] + at if GATHERS else at
            value = _stepped(
                value, change, there, inside, rate, decay, momentum, kept, DECAYS, GATHERS, NESTEROV
            )
            tl.store(values[index] + at, value, mask=inside)
        # Negative for programs whose tensor has come already.
        block -= tl.cdiv(elements, BLOCK)


@triton.jit(do_not_specialize=["tiles", "samples"])
def _step_by_factors(
    param: tl.tensor,
    upper: tl.tensor,
    x: tl.tensor,
    velocity: tl.tensor,
    rates: tl.tensor,
    tiles: tl.tensor,
    samples: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    u_client: tl.tensor,
    u_sample: tl.tensor,
    x_client: tl.tensor,
    x_sample: tl.tensor,
    decay: tl.tensor,
    momentum: tl.tensor,
    kept: tl.tensor,
    DECAYS: tl.constexpr,
    GATHERS: tl.constexpr,
    NESTEROV: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Update a tile of one client's matrix by the product of two factors."""
    client = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    across = tl.cdiv(columns, N)
    row = (tile // across) * M + tl.arange(0, M)
    column = (tile % across) * N + tl.arange(0, N)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = client * rows * columns + (row[:, None] * columns + column[None, :])
    # Loaded first, because it takes longest.
    value = tl.load(param + at, mask=inside, other=0.0)
    rate = tl.load(rates + client).to(tl.float32)
    changes, inputs = upper + client * u_client, x + client * x_client
    total = tl.zeros((M, N), dtype=tl.float32)
    for done in range(0, samples, K):
        sample = (done + tl.arange(0, K)).to(tl.int64)
        exists = (sample < samples)[:, None]
        change = tl.load(
            changes + sample[:, None] * u_sample + row[None, :],
            mask=exists & (row < rows)[None, :],
            other=0.0,
        )
        given = tl.load(
            inputs + sample[:, None] * x_sample + column[None, :],
            mask=exists & (column < columns)[None, :],
            other=0.0,
        )
        total = add_products(total, change, given, PRECISION)
    there = velocity + at if GATHERS else velocity
    value = _stepped(
        value, total, there, inside, rate, decay, momentum, kept, DECAYS, GATHERS, NESTEROV
    )
    tl.store(param + at, value, mask=inside)


def fits(param: Tensor, gradient: Tensor | Factors) -> bool:
    """Return whether the kernels can update a parameter."""
    if isinstance(gradient, Factors):
        return True
    return (
        param.dtype == gradient.dtype == torch.float32
        and param.is_contiguous()
        and gradient.is_contiguous()
    )


def descend(
    params: Sequence[Tensor],
    gradients: Sequence[Tensor | Factors],
    velocities: Sequence[Tensor] | None,
    rates: Tensor,
    rule: Rule,
) -> None:
    """Make one step in place.

    Parameters
    ----------
    params : sequence of Tensor
        Stacked over clients, float32, contiguous. Without an axis of clients if ``rates`` is a
        single number.
    gradients : sequence of Tensor or Factors
        One per parameter, float32 and contiguous; see :func:`fits`.
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
            param, gradient, velocity = group[0]
            if isinstance(gradient, Factors):
                _launch_factors(param, gradient, velocity, rates, rule)
            elif len(group) == 1:
                size = param.numel() // clients
                tiles = triton.cdiv(size, _BLOCK)
                _step_one[(tiles * clients,)](
                    *group[0],
                    rates,
                    tiles,
                    size,
                    *rule.numbers,
                    BLOCK=_BLOCK,
                    **rule.options,
                    **_ROUNDED,
                )
            else:
                _launch_several(group, rates, rule)


def _launch_several(group: list[Any], rates: Tensor, rule: Rule) -> None:
    """Update several small tensors."""
    params, gradients, velocities = zip(*group, strict=True)
    blocks = sum(triton.cdiv(param.numel(), _SMALL_BLOCK) for param in params)
    _step_several[(blocks,)](
        params,
        gradients,
        velocities if rule.momentum else params,
        tuple(param.numel() // len(rates) for param in params),
        rates,
        len(rates),
        *rule.numbers,
        NUMBER=len(group),
        BLOCK=_SMALL_BLOCK,
        **rule.options,
        **_ROUNDED,
    )


def _launch_factors(
    param: Tensor, factors: Factors, velocity: Tensor | None, rates: Tensor, rule: Rule
) -> None:
    """Update a stack of matrices by the product of two factors."""
    # Neighbours must lie side by side; a view of a larger tensor may stay where it is.
    upper, x = (
        each if each.stride(2) == 1 else each.contiguous() for each in (factors.upper, factors.x)
    )
    clients, samples, rows = upper.shape
    columns = x.shape[2]
    tile = _TILE | {"M": min(_TILE["M"], max(16, triton.next_power_of_2(rows)))}
    tiles = triton.cdiv(rows, tile["M"]) * triton.cdiv(columns, tile["N"])
    _step_by_factors[(tiles * clients,)](
        param,
        upper,
        x,
        velocity,
        rates,
        tiles,
        samples,
        rows,
        columns,
        *upper.stride()[:2],
        *x.stride()[:2],
        *rule.numbers,
        PRECISION=factors.precision,
        **rule.options,
        **tile,
    )


def _launches(triples: list[Any]) -> Iterator[list[Any]]:
    """Divide tensors into those that share a launch. The order of updates does not matter."""
    shares = [
        param.numel() <= _SMALL and not isinstance(gradient, Factors)
        for param, gradient, _ in triples
    ]
    yield from ([triple] for triple, small in zip(triples, shares, strict=True) if not small)
    together = list(compress(triples, shares))
    for first in range(0, len(together), _TOGETHER):
        yield together[first : first + _TOGETHER]
