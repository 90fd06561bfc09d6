"""The hash of random numbers as a Triton kernel for a GPU.

With PyTorch's operations a hash takes ten launches; see ``equipoise.random``. This module is
imported only if Triton is installed: see ``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.models.kernel_tools import FUSED
from equipoise.random import _MULTIPLIERS

# Hashes that a program makes.
_BLOCK = 512


@triton.jit(do_not_specialize=["count", "step"])
def _mix(
    keys: tl.tensor,
    mixed: tl.tensor,
    count: tl.tensor,
    step: tl.tensor,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add the step to keys and hash them: what ``random._mix_tensor`` does."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    z = (tl.load(keys + place, mask=inside, other=0) + step).to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    z = z ^ (z >> 31)
    tl.store(mixed + place, z.to(tl.int64, bitcast=True), mask=inside)


class Mixed(torch.autograd.Function):
    """Hash int64 keys elementwise, after a number is added to them."""

    @staticmethod
    def forward(keys: Tensor, step: int) -> Tensor:
        """Return the hashes, in the shape of the keys."""
        keys = keys.contiguous()
        mixed = torch.empty_like(keys)
        with torch.cuda.device_of(keys):
            _mix[(max(1, triton.cdiv(keys.numel(), _BLOCK)),)](
                keys,
                mixed,
                keys.numel(),
                step,
                FIRST=_MULTIPLIERS[0],
                SECOND=_MULTIPLIERS[1],
                BLOCK=_BLOCK,
                **FUSED,
            )
        return mixed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Say that there is nothing to differentiate."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[None, None]:
        """Return no gradient."""
        return None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], keys: Tensor, step: int
    ) -> tuple[Tensor, int | None]:
        """Hash the keys of all clients: every element has its own hash."""
        return Mixed.apply(keys, step), in_dims[0]
