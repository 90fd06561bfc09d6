"""Sums over stacked clients and copies of their rows, as Triton kernels for a GPU.

A model has up to hundreds of tensors, most of them small. One launch serves all of a type: it reads
from a table where the tensors are. Weighted sums read every number once, add in float64 in the
order of the clients, and write the result, without copies in float64.

This module is imported only if Triton is installed: see ``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.models.kernel_tools import FUSED

# How many numbers of a row a program adds over all clients, or copies.
_ADDED, _COPIED = 1024, 4096
# How many clients a program reads before it adds them, because it would wait for each otherwise.
_AHEAD = 8
# How many tensors a table has room for. Every program looks through their list.
_LEAST_TENSORS, _MOST_TENSORS = 16, 512


@triton.jit
def _place(
    table: tl.tensor, block: tl.tensor, TENSORS: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return the tensor that a block belongs to, where the block is in a row, and what exists."""
    number = tl.sum((tl.load(table + tl.arange(0, TENSORS)) <= block).to(tl.int32), axis=0) - 1
    first = tl.load(table + number)
    column = (block - first) * BLOCK + tl.arange(0, BLOCK)
    of_tensor = table + TENSORS + number
    return of_tensor, column, column < tl.load(of_tensor)


@triton.jit(do_not_specialize=["clients"])
def _sum(
    table: tl.tensor,
    weights: tl.tensor,
    like: tl.tensor,
    clients: tl.tensor,
    TENSORS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    """Write the weighted sums over clients of a block of numbers."""
    of_tensor, column, inside = _place(table, tl.program_id(0), TENSORS, BLOCK)
    target = tl.load(of_tensor + TENSORS).to(like.dtype)
    source = tl.load(of_tensor + 2 * TENSORS).to(like.dtype) + column
    stride = tl.load(of_tensor + 3 * TENSORS)
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, clients, AHEAD):
        for offset in tl.static_range(AHEAD):
            # There are weights of zero after the last client.
            weight = tl.load(weights + first + offset)
            client = tl.minimum(first + offset, clients - 1)
            values = tl.load(source + client * stride, mask=inside, other=0.0).to(tl.float64)
            # 0 · inf is NaN, and a mask may hold infinities.
            total += weight * tl.where(weight == 0.0, 0.0, values)
    tl.store(target + column, total.to(like.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["number"])
def _copy(
    table: tl.tensor,
    rows: tl.tensor,
    like: tl.tensor,
    number: tl.tensor,
    TENSORS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy a block of one of the rows of a tensor."""
    which = tl.program_id(0) % number
    of_tensor, column, inside = _place(table, tl.program_id(0) // number, TENSORS, BLOCK)
    target = tl.load(of_tensor + TENSORS).to(like.dtype)
    source = tl.load(of_tensor + 2 * TENSORS).to(like.dtype)
    source += tl.load(rows + which) * tl.load(of_tensor + 3 * TENSORS)
    target += tl.load(rows + number + which) * tl.load(of_tensor + 4 * TENSORS)
    tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)


def weighted_sums(stacks: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """Return the weighted sum over clients of each stacked tensor.

    Parameters
    ----------
    stacks : sequence of Tensor
        ``[clients, ...]`` each, float32 or float64, with the same number of clients. Rows are
        contiguous.
    weights : Tensor
        One weight per client. A client with weight 0 is left out, even if it has infinities.

    Returns
    -------
    list of Tensor
        In the types of the stacks.
    """
    sums = [
        torch.empty(stack.shape[1:], dtype=stack.dtype, device=stack.device) for stack in stacks
    ]
    device, clients = stacks[0].device, len(weights)
    padded = torch.nn.functional.pad(weights.double(), (0, -clients % _AHEAD))
    padded = padded.to(device, non_blocking=True)
    with torch.cuda.device_of(stacks[0]):
        for targets, sources in _groups([total.unsqueeze(0) for total in sums], stacks):
            table, blocks = _table(targets, sources, _ADDED)
            _sum[(blocks,)](
                table.to(device, non_blocking=True),
                padded,
                targets[0],
                clients,
                TENSORS=table.shape[1],
                BLOCK=_ADDED,
                AHEAD=_AHEAD,
                **FUSED,
            )
    return sums


def copy_rows(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    rows: Tensor,
    places: Tensor | None = None,
) -> None:
    """Copy rows of stacked tensors onto rows of other stacked tensors of the same types.

    Parameters
    ----------
    targets, sources : sequence of Tensor
        ``[clients, ...]`` each, with contiguous rows. A source may be expanded along its leading
        axis: then all rows are the same memory.
    rows : Tensor
        The rows of the source that are copied, int64, on any device.
    places : Tensor, optional
        The rows of the target that they are copied to, different from each other, int64, on the
        same device as ``rows``. By default the first ones.
    """
    device, number = targets[0].device, len(rows)
    if places is None:
        places = torch.arange(number, device=rows.device)
    both = torch.cat([rows, places]).to(device, non_blocking=True)
    with torch.cuda.device_of(targets[0]):
        for into, of in _groups(targets, sources):
            table, blocks = _table(into, of, _COPIED)
            _copy[(blocks * number,)](
                table.to(device, non_blocking=True),
                both,
                into[0],
                number,
                TENSORS=table.shape[1],
                BLOCK=_COPIED,
                **FUSED,
            )


def _groups(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Divide tensors into groups that one launch can serve, without those that are empty."""
    by_type: dict[torch.dtype, list[int]] = {}
    for index, target in enumerate(targets):
        if target.numel():
            by_type.setdefault(target.dtype, []).append(index)
    for where in by_type.values():
        for first in range(0, len(where), _MOST_TENSORS):
            chosen = where[first : first + _MOST_TENSORS]
            yield [targets[index] for index in chosen], [sources[index] for index in chosen]


def _table(targets: Sequence[Tensor], sources: Sequence[Tensor], block: int) -> tuple[Tensor, int]:
    """Say where tensors are, and which blocks of numbers they consist of.

    Returns
    -------
    tuple
        For each tensor its first block, the size of a row, the addresses of target and source, and
        how far apart their rows are, ``[6, tensors]``, padded to a power of two; and the number of
        blocks.
    """
    sizes = np.array([target.numel() // target.shape[0] for target in targets])
    blocks = -(-sizes // block)
    ends = np.cumsum(blocks)
    width = max(_LEAST_TENSORS, triton.next_power_of_2(len(sizes)))
    table = np.zeros((6, width), np.int64)
    # Padding begins after the last block.
    table[0] = ends[-1]
    rows = (
        ends - blocks,
        sizes,
        [target.data_ptr() for target in targets],
        [source.data_ptr() for source in sources],
        [source.stride(0) for source in sources],
        [target.stride(0) for target in targets],
    )
    for row, numbers in zip(table, rows, strict=True):
        row[: len(sizes)] = numbers
    return torch.from_numpy(table), int(ends[-1])
