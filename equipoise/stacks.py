"""Sums over stacked clients, and copies of their rows, in few operations.

On a GPU one kernel serves all tensors of a model; see ``equipoise.models.stack_kernels``. On a CPU,
and where Triton does not work, PyTorch's operations are called for one tensor after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise import reused_memory
from equipoise.errors import InputError
from equipoise.models.kernel_modules import module_with_triton
from equipoise.tree import flat_rows, pieces

# The types that the kernels can add and copy.
_ADDED = {torch.float32, torch.float64}
_COPIED = {*_ADDED, torch.float16, torch.bfloat16, torch.int64}


def kernels_for(device: torch.device) -> Any:
    """Return the module of kernels for a device, or ``None`` if there is none."""
    if device.type != "cuda":
        return None
    return module_with_triton("stack_kernels", device)


def weighted_sums(
    stacks: Sequence[Tensor],
    weights: Tensor,
    changed: tuple[Tensor, Sequence[Tensor | None]] | None = None,
) -> list[Tensor]:
    """Return the weighted sum over clients of each stacked tensor.

    Sums are in float64 and in the order of the clients. Clients with weight 0 are left out: 0 · inf
    is NaN, and a mask may hold infinities.

    Parameters
    ----------
    stacks : sequence of Tensor
        ``[K, ...]`` each.
    weights : Tensor
        ``[K]``.
    changed : tuple of Tensor and sequence of Tensor, optional
        Positions of clients, ascending, and for each tensor a stack of the rows that count instead
        of theirs, or None if they do not change. Sums have the bits of those over stacks with these
        rows.

    Returns
    -------
    list of Tensor
        In the types of the stacks.

    Examples
    --------
    >>> stack = torch.tensor([[1.0], [3.0], [torch.inf]])
    >>> weighted_sums([stack], torch.tensor([0.25, 0.75, 0.0]))
    [tensor([2.5000])]
    >>> weighted_sums([stack], torch.full((3,), 0.5), (torch.tensor([2]), [torch.zeros(1, 1)]))
    [tensor([2.])]
    """
    for stack in stacks:
        if len(stack) != len(weights):
            raise InputError(
                f"there are {len(weights)} weights for a stack of {len(stack)} clients; valid: one "
                "weight per client"
            )
    if stacks and (kernels := _serving(stacks, _ADDED)) is not None:
        if changed is not None:
            # New memory costs little on a GPU, and its kernel reads a tensor's rows from one stack.
            replaced = changed[0].to(stacks[0].device)
            stacks = [
                stack if rows is None else stack.index_copy(0, replaced, rows)
                for stack, rows in zip(stacks, changed[1], strict=True)
            ]
        totals = kernels.weighted_sums([_in_rows(stack) for stack in stacks], weights)
        return [total.view(stack.shape[1:]) for total, stack in zip(totals, stacks, strict=True)]
    counted = weights.nonzero().flatten()
    everyone = len(counted) == len(weights)
    if changed is not None:
        replaced = changed[0].to(weights.device)
        used = weights[replaced].nonzero().flatten()
        places = torch.searchsorted(counted, replaced[used])
    weights = weights[counted]
    sums = []
    for number, stack in enumerate(stacks):
        weights, counted = weights.to(stack.device, torch.float64), counted.to(stack.device)
        # Rows are chosen piece by piece. In new memory for whole rows, page faults would take
        # longer than the sum itself.
        blocks: Iterable[Tensor] = (
            piece if everyone else piece.index_select(0, counted)
            for piece in pieces(flat_rows(stack), len(counted))
        )
        if changed is not None and (rows := changed[1][number]) is not None:
            blocks = _with_rows(blocks, pieces(flat_rows(rows), len(counted)), used, places)
        parts = [torch.mv(block.double().T, weights) for block in blocks]
        total = parts[0] if len(parts) == 1 else torch.cat(parts)
        sums.append(total.view(stack.shape[1:]).to(stack.dtype))
    return sums


def _with_rows(
    blocks: Iterable[Tensor], others: Iterable[Tensor], used: Tensor, places: Tensor
) -> Iterator[Tensor]:
    """Go through blocks of columns, in which rows ``used`` of others are put at ``places``."""
    for block, rows in zip(blocks, others, strict=True):
        taken = rows if len(used) == len(rows) else rows.index_select(0, used.to(rows.device))
        yield block.index_copy(0, places.to(block.device), taken)


def chosen_rows(stacks: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """Return some rows of each stacked tensor, in any order.

    Parameters
    ----------
    stacks : sequence of Tensor
        ``[K, ...]`` each.
    rows : Tensor
        Positions of the rows, int64, on any device.

    Examples
    --------
    >>> chosen_rows([torch.tensor([[1.0], [2.0], [3.0]])], torch.tensor([2, 0]))
    [tensor([[3.],
            [1.]])]
    """
    if stacks and (kernels := _serving(stacks, _COPIED)) is not None:
        made = [stack.new_empty(len(rows), *stack.shape[1:]) for stack in stacks]
        kernels.copy_rows(made, [_in_rows(stack) for stack in stacks], rows)
        return made
    made = [
        reused_memory.empty((len(rows), *stack.shape[1:]), stack.dtype, stack.device)
        for stack in stacks
    ]
    for stack, chosen in zip(stacks, made, strict=True):
        torch.index_select(stack, 0, rows.to(stack.device), out=chosen)
    return made


def put_rows(targets: Sequence[Tensor], sources: Sequence[Tensor], places: Tensor) -> None:
    """Copy the rows of stacked tensors to places in other stacked tensors.

    Parameters
    ----------
    targets, sources : sequence of Tensor
        ``[K, ...]`` and ``[R, ...]`` each. Rows of the targets are contiguous.
    places : Tensor
        The rows of the targets that become those of the sources, ``[R]``, all different, int64, on
        any device.

    Examples
    --------
    >>> stack = torch.zeros(3, 1)
    >>> put_rows([stack], [torch.tensor([[1.0], [2.0]])], torch.tensor([2, 0]))
    >>> stack
    tensor([[2.],
            [0.],
            [1.]])
    """
    if not targets or not len(places):
        return
    alike = all(t.dtype == s.dtype for t, s in zip(targets, sources, strict=True))
    if alike and (kernels := _serving([*targets, *sources], _COPIED)) is not None:
        rows = torch.arange(len(places), device=places.device)
        kernels.copy_rows(targets, [_in_rows(source) for source in sources], rows, places)
        return
    for target, source in zip(targets, sources, strict=True):
        target.index_copy_(0, places.to(target.device), source.to(target))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors onto others of the same shapes, with few launches for all of the same type.

    Examples
    --------
    >>> room = [torch.empty(2, 1), torch.empty(2)]
    >>> copy_all(room, [torch.tensor([3.0]).expand(2, 1), torch.tensor([4.0, 5.0])])
    >>> room
    [tensor([[3.],
            [3.]]), tensor([4., 5.])]
    """
    groups: dict[tuple[torch.dtype, int | None], list[tuple[Tensor, Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        clients = len(target) if _repeats_a_row(target, source) else None
        groups.setdefault((target.dtype, clients), []).append((target, source))
    for (_, clients), pairs in groups.items():
        into, of = [target for target, _ in pairs], [source for _, source in pairs]
        kernels = None if clients is None else _serving(into, _COPIED)
        if kernels is None:
            torch._foreach_copy_(into, of)
        else:
            # PyTorch would launch one copy per tensor here.
            kernels.copy_rows(into, of, torch.arange(len(into[0])))


def _repeats_a_row(target: Tensor, source: Tensor) -> bool:
    """Return whether all rows of the source are the same memory, and the kernels can copy it."""
    return (
        source.dim() > 0
        and source.stride(0) == 0
        and source.shape == target.shape
        and len(source) > 1
        and source.dtype == target.dtype
        and source.device == target.device
        and source[0].is_contiguous()
        and target.is_contiguous()
    )


def _serving(stacks: Sequence[Tensor], types: Collection[torch.dtype]) -> Any:
    """Return the module of kernels if it can serve all of the tensors, else ``None``."""
    device = stacks[0].device
    if any(stack.device != device or stack.dtype not in types for stack in stacks):
        return None
    return kernels_for(device)


def _in_rows(stack: Tensor) -> Tensor:
    """View a stack as a matrix whose rows are contiguous; copy it if that is not possible."""
    rows = flat_rows(stack)
    return rows if rows.shape[1] < 2 or rows.stride(1) == 1 else rows.contiguous()
