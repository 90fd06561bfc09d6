"""The steps of stochastic gradient descent for stacked clients, as Triton kernels for a GPU.

A step reads a parameter and its gradient once, and writes the parameter once. With momentum it also
reads and writes the velocity. Small tensors share a launch. A gradient may be given as two factors,
whose product is made where it is used and never written to memory. A penalty on the parameters is
part of the step, too: its gradient is added, and its value before the step is written as partial
sums.

The arithmetic of a step is that of PyTorch's operations on a GPU, so results have the same bits.
Each element is computed from its own client's values only, in a fixed order. Only imported if
Triton is installed: see ``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.models.convolution_kernels import add_products
from equipoise.models.kernel_tools import FUSED

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
# Rows and columns of a product of factors that a program makes.
_TILE = {"M": 64, "N": 64, "num_warps": 4, "num_stages": 1}
# With a penalty, whose tensors take registers, float32 products of so few samples take less time
# than TF32 products, which are made of parts of the factors: on an H200, 77 µs instead of 92 for a
# step of ten matrices of 384 x 4,096.
_FEW_SAMPLES = 32


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
def _loaded(
    pointer: tl.tensor, at: tl.tensor, inside: tl.tensor, EXISTS: tl.constexpr
) -> tl.tensor:
    """Load a block of numbers, or return zero if there are none."""
    values = 0.0
    if EXISTS:
        values = tl.load(pointer + at, mask=inside, other=0.0)
    return values


@triton.jit
def _penalized(
    gradient: tl.tensor,
    value: tl.tensor,
    anchor: tl.tensor,
    linear: tl.tensor,
    strength: tl.tensor,
    ANCHORED: tl.constexpr,
    LINEAR: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Add the gradient of a penalty to that of a block of parameters, and return the penalty, too.

    It is one number per parameter.
    """
    penalty = tl.zeros_like(value)
    if ANCHORED:
        difference = value - anchor
        gradient = tl.fma(difference, strength, gradient)
        penalty += 0.5 * strength * difference * difference
    if LINEAR:
        gradient += linear
        penalty += value * linear
    return gradient, penalty


@triton.jit
def _stepped(
    value: tl.tensor,
    gradient: tl.tensor,
    velocity: tl.tensor,
    rate: tl.tensor,
    decay: tl.tensor,
    momentum: tl.tensor,
    kept: tl.tensor,
    DECAYS: tl.constexpr,
    GATHERS: tl.constexpr,
    NESTEROV: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return parameters and velocities after a step."""
    if DECAYS:
        gradient = tl.fma(value, decay, gradient)
    if GATHERS:
        velocity = tl.fma(gradient, kept, velocity * momentum)
        gradient = tl.fma(velocity, momentum, gradient) if NESTEROV else velocity
    return value - gradient * rate, velocity


@triton.jit(do_not_specialize=["tiles", "width"])
def _step_one(
    param: tl.tensor,
    gradient: tl.tensor,
    velocity: tl.tensor,
    anchor: tl.tensor,
    linear: tl.tensor,
    rates: tl.tensor,
    partials: tl.tensor,
    width: tl.tensor,
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
    """Update a block of one client's row of a tensor; rows have ``size`` elements.

    With a penalty, every program writes a partial sum; a client has ``width`` of them in all.
    """
    client = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    column = tile * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    at = client * size + column
    value = tl.load(param + at, mask=inside, other=0.0)
    change = tl.load(gradient + at, mask=inside, other=0.0)
    rate = tl.load(rates + client).to(tl.float32)
    change, penalty = _penalized(
        change,
        value,
        _loaded(anchor, column, inside, ANCHORED),
        _loaded(linear, at, inside, LINEAR),
        strength,
        ANCHORED,
        LINEAR,
    )
    if ANCHORED or LINEAR:
        tl.store(partials + client * width + tile, tl.sum(penalty))
    before = _loaded(velocity, at, inside, GATHERS)
    value, after = _stepped(
        value, change, before, rate, decay, momentum, kept, DECAYS, GATHERS, NESTEROV
    )
    tl.store(param + at, value, mask=inside)
    if GATHERS:
        tl.store(velocity + at, after, mask=inside)


@triton.jit(do_not_specialize=["clients", "width"])
def _step_several(
    values: tl.tuple,
    gradients: tl.tuple,
    velocities: tl.tuple,
    anchors: tl.tuple,
    linears: tl.tuple,
    sizes: tl.tuple,
    rates: tl.tensor,
    partials: tl.tensor,
    width: tl.tensor,
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
    """Update a block of one of several small tensors.

    A block may have rows of several clients, but not with a penalty: then a client's partial sums
    are those of its own blocks, tensor after tensor.

    No argument may be named ``params``, which is a variable of Triton's launcher.
    """
    block = tl.program_id(0)
    for index in tl.static_range(NUMBER):
        if ANCHORED or LINEAR:
            tiles = tl.cdiv(sizes[index], BLOCK)
            blocks = tiles * clients
        else:
            blocks = tl.cdiv(clients * sizes[index], BLOCK)
        if (block >= 0) & (block < blocks):
            if ANCHORED or LINEAR:
                element = block % tiles * BLOCK + tl.arange(0, BLOCK)
                inside = element < sizes[index]
                at = block // tiles * sizes[index] + element
            else:
                at = block * BLOCK + tl.arange(0, BLOCK)
                inside = at < clients * sizes[index]
                element = at
            value = tl.load(values[index] + at, mask=inside, other=0.0)
            change = tl.load(gradients[index] + at, mask=inside, other=0.0)
            rate = tl.load(rates + at // sizes[index], mask=inside, other=0.0).to(tl.float32)
            change, penalty = _penalized(
                change,
                value,
                _loaded(anchors[index], element, inside, ANCHORED),
                _loaded(linears[index], at, inside, LINEAR),
                strength,
                ANCHORED,
                LINEAR,
            )
            if ANCHORED or LINEAR:
                to = partials + block // tiles * width + block % tiles
                tl.store(to, tl.sum(penalty))
            before = _loaded(velocities[index], at, inside, GATHERS)
            value, after = _stepped(
                value, change, before, rate, decay, momentum, kept, DECAYS, GATHERS, NESTEROV
            )
            tl.store(values[index] + at, value, mask=inside)
            if GATHERS:
                tl.store(velocities[index] + at, after, mask=inside)
        # Negative for programs whose tensor has come already.
        block -= blocks
        if ANCHORED or LINEAR:
            partials += tiles


@triton.jit(do_not_specialize=["tiles", "samples", "width"])
def _step_by_factors(
    param: tl.tensor,
    upper: tl.tensor,
    x: tl.tensor,
    velocity: tl.tensor,
    anchor: tl.tensor,
    linear: tl.tensor,
    rates: tl.tensor,
    partials: tl.tensor,
    width: tl.tensor,
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
    """Update a tile of one client's matrix by the product of two factors.

    With a penalty, every program writes a partial sum as in :func:`_step_one`.
    """
    client = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    across = tl.cdiv(columns, N)
    row = (tile // across) * M + tl.arange(0, M)
    column = (tile % across) * N + tl.arange(0, N)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    # Numbers of 32 bits: see ``multiplies``.
    at = row[:, None] * columns + column[None, :]
    first = client * rows * columns
    # Tensors as large as the stack are loaded first, because that takes longest.
    value = tl.load(param + first + at, mask=inside, other=0.0)
    slope = _loaded(linear + first if LINEAR else linear, at, inside, LINEAR)
    before = _loaded(velocity + first if GATHERS else velocity, at, inside, GATHERS)
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
    of_anchor = _loaded(anchor, at, inside, ANCHORED)
    total, penalty = _penalized(total, value, of_anchor, slope, strength, ANCHORED, LINEAR)
    if ANCHORED or LINEAR:
        tl.store(partials + client * width + tile, tl.sum(penalty))
    value, after = _stepped(
        value, total, before, rate, decay, momentum, kept, DECAYS, GATHERS, NESTEROV
    )
    tl.store(param + first + at, value, mask=inside)
    if GATHERS:
        tl.store(velocity + first + at, after, mask=inside)


def multiplies(param: Tensor) -> bool:
    """Return whether the kernels can update stacked matrices by factors.

    Places in a client's matrix, and in tiles beyond its end, are numbers of 32 bits.

    Examples
    --------
    >>> sizes = (3, 4), (1 << 15, 1 << 15)
    >>> [multiplies(torch.empty(2, *size, device="meta")) for size in sizes]
    [True, False]
    """
    return param.dtype == torch.float32 and param.is_contiguous() and param[:1].numel() < 1 << 30


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
) -> Tensor | None:
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

    Returns
    -------
    Tensor or None
        Every client's penalty before the step, float64, with the shape of ``rates``. Programs write
        partial sums, which are added in a fixed order.
    """
    of_clients = rates.reshape(-1).contiguous()
    kept = [None] * len(params) if velocities is None or not rule.momentum else velocities
    entries = _entries(params, gradients, kept, *_tensors_of(penalties, len(params)))
    groups = [(group, _tiles(group, len(of_clients))) for group in _launches(entries)]
    step = _Step(
        of_clients,
        (*rule.numbers, 0.0 if penalties is None else penalties.strength),
        rule.options | _options_of(penalties),
    )
    partials = None
    if penalties is not None:
        width = sum(tiles for _, tiles in groups)
        partials = torch.empty(len(of_clients), width, dtype=torch.float32, device=rates.device)
    done = 0
    with torch.cuda.device_of(rates):
        for group, tiles in groups:
            own = (None, 0) if partials is None else (partials[:, done:], partials.stride(0))
            _launcher(group)(group, tiles, own, step)
            done += tiles
    return None if partials is None else partials.sum(1, dtype=torch.float64).view(rates.shape)


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


def _tiles(group: list[Any], clients: int) -> int:
    """Return how many blocks the rows of a client are divided into, for all tensors of a launch."""
    param, factors, *_ = group[0]
    if isinstance(factors, Factors):
        *_, rows, columns = param.shape
        tile = _tile(factors)
        return triton.cdiv(rows, tile["M"]) * triton.cdiv(columns, tile["N"])
    block = _BLOCK if len(group) == 1 else _SMALL_BLOCK
    return sum(triton.cdiv(size, block) for size in _sizes(group, clients))


def _tile(factors: Factors) -> dict[str, int]:
    """Choose the rows, columns and samples of a product that a program makes."""
    samples, rows = factors.upper.shape[1:]
    # Few rows need a smaller tile. Up to 32 samples are read at once.
    return _TILE | {
        "M": min(_TILE["M"], max(16, triton.next_power_of_2(rows))),
        "K": 32 if samples > 16 else 16,
    }


@dataclass(frozen=True)
class _Step:
    """What the launches of a step have in common.

    Attributes
    ----------
    rates : Tensor
        Learning rates, ``[clients]``.
    numbers : tuple of float
        The numbers of the rule, and the strength of the penalty.
    options : dict
        What kernels are compiled for.
    """

    rates: Tensor
    numbers: tuple[float, ...]
    options: dict[str, Any]


# Room for the partial sums of a penalty, and how far apart those of clients are.
_Partials = tuple[Tensor | None, int]


def _launcher(group: list[Any]) -> Callable[..., None]:
    """Return the function that updates the tensors of a launch."""
    if isinstance(group[0][1], Factors):
        return _launch_factors
    return _launch_one if len(group) == 1 else _launch_several


def _launch_one(group: list[Any], tiles: int, partials: _Partials, step: _Step) -> None:
    """Update a tensor."""
    _step_one[(tiles * len(step.rates),)](
        *group[0],
        step.rates,
        *partials,
        tiles,
        *_sizes(group, len(step.rates)),
        *step.numbers,
        BLOCK=_BLOCK,
        **step.options,
        **_ROUNDED,
    )


def _launch_several(group: list[Any], tiles: int, partials: _Partials, step: _Step) -> None:
    """Update several small tensors."""
    blocks = tiles * len(step.rates)
    if partials[0] is None:
        blocks = sum(triton.cdiv(entry[0].numel(), _SMALL_BLOCK) for entry in group)
    _step_several[(blocks,)](
        *_columns(group),
        _sizes(group, len(step.rates)),
        step.rates,
        *partials,
        len(step.rates),
        *step.numbers,
        NUMBER=len(group),
        BLOCK=_SMALL_BLOCK,
        **step.options,
        **_ROUNDED,
    )


def _launch_factors(group: list[Any], tiles: int, partials: _Partials, step: _Step) -> None:
    """Update a stack of matrices by the product of two factors."""
    param, factors, *others = group[0]
    # Neighbours must lie side by side; a view of a larger tensor may stay where it is.
    upper, x = (
        each if each.stride(2) == 1 else each.contiguous() for each in (factors.upper, factors.x)
    )
    clients, samples, rows = upper.shape
    precision = factors.precision
    if precision == "tf32" and partials[0] is not None and samples <= _FEW_SAMPLES:
        precision = "ieee"
    _step_by_factors[(tiles * clients,)](
        param,
        upper,
        x,
        *others,
        step.rates,
        *partials,
        tiles,
        samples,
        rows,
        x.shape[2],
        *upper.stride()[:2],
        *x.stride()[:2],
        *step.numbers,
        PRECISION=precision,
        **step.options,
        **_tile(factors),
        **FUSED,
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
