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
    """Ask PyTorch for deterministic kernels, and for TF32 only if the machine settings say so, while the block runs."""
    cudnn, matmul, deterministic = (
        torch.backends.cudnn,
        torch.backends.cuda.matmul,
        torch.utils.deterministic,
    )
    # Deterministic mode would also overwrite all fresh memory, which costs time and matters only to
    # code that reads it.
    wanted = (
        (cudnn, "benchmark", False),
        (cudnn, "allow_tf32", machine.tf32),
        (matmul, "allow_tf32", machine.tf32),
        (deterministic, "fill_uninitialized_memory", False),
    )
    found = [(owner, name, getattr(owner, name)) for owner, name, _ in wanted]
    mode = torch.get_deterministic_debug_mode()
    # As ``use_deterministic_algorithms(True)``, which would also import PyTorch's compiler: a
    # second at every start.
    torch.set_deterministic_debug_mode("error")
    for owner, name, value in wanted:
        setattr(owner, name, value)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        for owner, name, value in found:
            setattr(owner, name, value)
