"""The steps of stochastic gradient descent for stacked clients, as Triton kernels for a GPU.

A step reads a parameter and its gradient once, and writes the parameter once. With momentum it also
reads and writes the velocity. Small tensors share a launch. A gradient may be given as two factors,
whose product is made where it is used and never written to memory. The gradient of a penalty on the
parameters is added there, too; its value has kernels of its own.

The arithmetic of a step is that of PyTorch's operations on a GPU, so results have the same bits.
Each element is computed from its own client's values only, in a fixed order. Only imported if
Triton is installed: see ``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.models.convolution_kernels import add_products

if TYPE_CHECKING:
    from equipoise.optimizers.penalties import Penalties

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
def _penalized(
    gradient: tl.tensor,
    value: tl.tensor,
    anchor: tl.tensor,
    linear: tl.tensor,
    element: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    strength: tl.tensor,
    ANCHORED: tl.constexpr,
    LINEAR: tl.constexpr,
) -> tl.tensor:
    """Add the gradient of a penalty to that of a block of parameters.

    They are at ``at`` in the stack, and at ``element`` in the row of their client.
    """
    if ANCHORED:
        difference = value - tl.load(anchor + element, mask=inside, other=0.0)
        gradient = tl.fma(difference, strength, gradient)
    if LINEAR:
        gradient += tl.load(linear + at, mask=inside, other=0.0)
    return gradient


@triton.jit
def _penalty(
    value: tl.tensor,
    anchor: tl.tensor,
    linear: tl.tensor,
    element: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    half: tl.tensor,
    ANCHORED: tl.constexpr,
    LINEAR: tl.constexpr,
) -> tl.tensor:
    """Return the penalty on a block of parameters; ``half`` is half of its strength."""
    total = tl.zeros_like(value)
    if ANCHORED:
        difference = value - tl.load(anchor + element, mask=inside, other=0.0)
        total += half * difference * difference
    if LINEAR:
        total += value * tl.load(linear + at, mask=inside, other=0.0)
    return tl.sum(total, axis=0)


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
    anchor: tl.tensor,
    linear: tl.tensor,
    rates: tl.tensor,
    tiles: tl.tensor,
    size: tl.tensor,
    decay: tl.tensor,
    momentum: tl.tensor,
    kept: tl.tensor,
    strength: tl.tensor,
    DECAYS: tl.constexpr,
    GATHERS: tl.constexpr,
    NESTEROV: tl.constexpr,
    ANCHORED: tl.constexpr,
    LINEAR: tl.constexpr,
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
    change = _penalized(
        change, value, anchor, linear, column, at, inside, strength, ANCHORED, LINEAR
    )
    value = _stepped(
        value, change, there, inside, rate, decay, momentum, kept, DECAYS, GATHERS, NESTEROV
    )
    tl.store(param + at, value, mask=inside)


@triton.jit(do_not_specialize=["clients"])
def _step_several(
    values: tl.tuple,
    gradients: tl.tuple,
    velocities: tl.tuple,
    anchors: tl.tuple,
    linears: tl.tuple,
    sizes: tl.tuple,
    rates: tl.tensor,
    clients: tl.tensor,
    decay: tl.tensor,
    momentum: tl.tensor,
    kept: tl.tensor,
    strength: tl.tensor,
    NUMBER: tl.constexpr,
    DECAYS: tl.constexpr,
    GATHERS: tl.constexpr,
    NESTEROV: tl.constexpr,
    ANCHORED: tl.constexpr,
    LINEAR: tl.constexpr,
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
            element = at % sizes[index]
            anchor, linear = anchors[index], linears[index]
            change = _penalized(
                change, value, anchor, linear, element, at, inside, strength, ANCHORED, LINEAR
            )
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
    anchor: tl.tensor,
    linear: tl.tensor,
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
    strength: tl.tensor,
    DECAYS: tl.constexpr,
    GATHERS: tl.constexpr,
    NESTEROV: tl.constexpr,
    ANCHORED: tl.constexpr,
    LINEAR: tl.constexpr,
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
    element = row[:, None] * columns + column[None, :]
    at = client * rows * columns + element
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
    total = _penalized(
        total, value, anchor, linear, element, at, inside, strength, ANCHORED, LINEAR
    )
    value = _stepped(
        value, total, there, inside, rate, decay, momentum, kept, DECAYS, GATHERS, NESTEROV
    )
    tl.store(param + at, value, mask=inside)


@triton.jit(do_not_specialize=["tiles", "first", "width"])
def _penalty_of_one(
    param: tl.tensor,
    anchor: tl.tensor,
    linear: tl.tensor,
    partials: tl.tensor,
    tiles: tl.tensor,
    size: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    half: tl.tensor,
    ANCHORED: tl.constexpr,
    LINEAR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the penalty on a block of one client's row of a tensor; rows have ``size`` elements.

    A client has ``width`` partial sums, of which those of the tensor begin at ``first``.
    """
    client = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    column = tile * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    at = client * size + column
    value = tl.load(param + at, mask=inside, other=0.0)
    total = _penalty(value, anchor, linear, column, at, inside, half, ANCHORED, LINEAR)
    tl.store(partials + client * width + first + tile, total)


@triton.jit(do_not_specialize=["clients", "first", "width"])
def _penalty_of_several(
    values: tl.tuple,
    anchors: tl.tuple,
    linears: tl.tuple,
    sizes: tl.tuple,
    partials: tl.tensor,
    clients: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    half: tl.tensor,
    NUMBER: tl.constexpr,
    ANCHORED: tl.constexpr,
    LINEAR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the penalty on a block of one client's row of one of several small tensors.

    Partial sums are those of :func:`_penalty_of_one`, tensor after tensor.
    """
    block = tl.program_id(0)
    for index in tl.static_range(NUMBER):
        tiles = tl.cdiv(sizes[index], BLOCK)
        if (block >= 0) & (block < tiles * clients):
            client = block // tiles
            column = (block % tiles) * BLOCK + tl.arange(0, BLOCK)
            inside = column < sizes[index]
            at = client * sizes[index] + column
            value = tl.load(values[index] + at, mask=inside, other=0.0)
            anchor, linear = anchors[index], linears[index]
            total = _penalty(value, anchor, linear, column, at, inside, half, ANCHORED, LINEAR)
            tl.store(partials + client * width + first + block % tiles, total)
        # Negative for programs whose tensor has come already.
        block -= tiles * clients
        first += tiles


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
    penalties: Penalties | None = None,
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
    penalties : Penalties, optional
        A penalty on the parameters, float32. Its gradient is added to the others before the rule is
        applied.
    """
    rates = rates.reshape(-1).contiguous()
    kept = [None] * len(params) if velocities is None or not rule.momentum else velocities
    entries = _entries(params, gradients, kept, *_tensors_of(penalties, len(params)))
    if not entries:
        return
    numbers = (*rule.numbers, 0.0 if penalties is None else penalties.strength)
    options = rule.options | _options_of(penalties)
    with torch.cuda.device_of(rates):
        for group in _launches(entries):
            if isinstance(group[0][1], Factors):
                param, factors, velocity, anchor, linear = group[0]
                _launch_factors(param, factors, velocity, anchor, linear, rates, numbers, options)
            elif len(group) == 1:
                size = group[0][0].numel() // len(rates)
                tiles = triton.cdiv(size, _BLOCK)
                _step_one[(tiles * len(rates),)](
                    *group[0],
                    rates,
                    tiles,
                    size,
                    *numbers,
                    BLOCK=_BLOCK,
                    **options,
                    **_ROUNDED,
                )
            else:
                _launch_several(group, rates, numbers, options)


def penalties_of(params: Sequence[Tensor], penalties: Penalties, rates: Tensor) -> Tensor:
    """Return every client's penalty in float64, with the shape of ``rates``.

    Programs write partial sums, which are added in a fixed order.

    Parameters
    ----------
    params, rates
        As for :func:`descend`.
    penalties : Penalties
        A penalty on the parameters, float32.
    """
    clients = rates.numel()
    groups = list(_launches(_entries(params, *_tensors_of(penalties, len(params)))))
    # Blocks of a client's row of each tensor.
    tiles = [
        [
            triton.cdiv(size, _BLOCK if len(group) == 1 else _SMALL_BLOCK)
            for size in _sizes(group, clients)
        ]
        for group in groups
    ]
    width = sum(map(sum, tiles))
    partials = torch.empty(clients, width, dtype=torch.float32, device=rates.device)
    half, options, first = penalties.strength / 2, _options_of(penalties), 0
    with torch.cuda.device_of(rates):
        for group, of_group in zip(groups, tiles, strict=True):
            grid = (sum(of_group) * clients,)
            if len(group) == 1:
                size = group[0][0].numel() // clients
                _penalty_of_one[grid](
                    *group[0],
                    partials,
                    *of_group,
                    size,
                    first,
                    width,
                    half,
                    BLOCK=_BLOCK,
                    **options,
                )
            else:
                _penalty_of_several[grid](
                    *_columns(group),
                    _sizes(group, clients),
                    partials,
                    clients,
                    first,
                    width,
                    half,
                    NUMBER=len(group),
                    BLOCK=_SMALL_BLOCK,
                    **options,
                )
            first += sum(of_group)
    return partials.sum(1, dtype=torch.float64).view(rates.shape)


def _tensors_of(penalties: Penalties | None, count: int) -> tuple[list[Any], list[Any]]:
    """Return anchors and v of a penalty on so many parameters as kernels read them, or None."""
    nothing: list[Any] = [None] * count
    if penalties is None:
        return nothing, nothing
    anchors = [each.contiguous() for each in penalties.anchors] if penalties.strength else nothing
    linear = penalties.linear
    return anchors, nothing if linear is None else [each.contiguous() for each in linear]


def _options_of(penalties: Penalties | None) -> dict[str, Any]:
    """Return what kernels are compiled for, besides :attr:`Rule.options`."""
    return {
        "ANCHORED": penalties is not None and penalties.strength != 0,
        "LINEAR": penalties is not None and penalties.linear is not None,
    }


def _entries(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Put together what belongs to each parameter, which comes first; leave out empty ones."""
    return [entry for entry in zip(*lists, strict=True) if entry[0].numel() > 0]


def _columns(group: list[Any]) -> list[tuple[Tensor, ...]]:
    """Return the parameters of a group, then what belongs to them, or parameters for what is None.

    Kernels do not read that, but Triton takes no tuples of None.
    """
    params, *others = zip(*group, strict=True)
    return [params, *(params if each[0] is None else each for each in others)]


def _sizes(group: list[Any], clients: int) -> tuple[int, ...]:
    """Return how many elements a client has of each parameter."""
    return tuple(entry[0].numel() // clients for entry in group)


def _launch_several(
    group: list[Any], rates: Tensor, numbers: tuple[float, ...], options: dict[str, Any]
) -> None:
    """Update several small tensors."""
    blocks = sum(triton.cdiv(entry[0].numel(), _SMALL_BLOCK) for entry in group)
    _step_several[(blocks,)](
        *_columns(group),
        _sizes(group, len(rates)),
        rates,
        len(rates),
        *numbers,
        NUMBER=len(group),
        BLOCK=_SMALL_BLOCK,
        **options,
        **_ROUNDED,
    )


def _launch_factors(
    param: Tensor,
    factors: Factors,
    velocity: Tensor | None,
    anchor: Tensor | None,
    linear: Tensor | None,
    rates: Tensor,
    numbers: tuple[float, ...],
    options: dict[str, Any],
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
        anchor,
        linear,
        rates,
        tiles,
        samples,
        rows,
        columns,
        *upper.stride()[:2],
        *x.stride()[:2],
        *numbers,
        PRECISION=factors.precision,
        **options,
        **tile,
    )


def _launches(entries: list[Any]) -> Iterator[list[Any]]:
    """Divide tensors into those that share a launch. The order of updates does not matter."""
    shares = [
        entry[0].numel() <= _SMALL and not any(isinstance(each, Factors) for each in entry)
        for entry in entries
    ]
    yield from ([entry] for entry, small in zip(entries, shares, strict=True) if not small)
    together = list(compress(entries, shares))
    for first in range(0, len(together), _TOGETHER):
        yield together[first : first + _TOGETHER]
