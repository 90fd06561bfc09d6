"""Deterministic arithmetic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from equipoise.engine.settings import Machine

# cuBLAS is deterministic only with a fixed workspace, and reads this once, before its first call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def exact_arithmetic(machine: Machine) -> Iterator[None]:
    """Use deterministic kernels in this context, and TF32 only if the settings allow it."""
    cudnn, matmul, deterministic = (
        torch.backends.cudnn,
        torch.backends.cuda.matmul,
        torch.utils.deterministic,
    )
    # Deterministic mode would also fill all new memory, which takes time and matters only for code
    # that reads uninitialized values.
    wanted = (
        (cudnn, "benchmark", False),
        (cudnn, "allow_tf32", machine.tf32),
        (matmul, "allow_tf32", machine.tf32),
        (deterministic, "fill_uninitialized_memory", False),
    )
    found = [(owner, name, getattr(owner, name)) for owner, name, _ in wanted]
    mode = torch.get_deterministic_debug_mode()
    # This is ``use_deterministic_algorithms(True)`` without importing PyTorch's compiler, which
    # takes a second at every start.
    torch.set_deterministic_debug_mode("error")
    for owner, name, value in wanted:
        setattr(owner, name, value)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        for owner, name, value in found:
            setattr(owner, name, value)
