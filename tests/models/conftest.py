"""What tests of models share: products of oneDNN, and a repair of Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest

from equipoise.models import cpu_products

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensors = interpreter._patch_lang_tensor

    def patch_tensors_for_new_numpy(tensor: Any, *scope: Any) -> None:
        """Let a tensor say how often a loop runs.

        Triton 3.6 makes a Python number of an array of one element in a way that NumPy 2.4 forbids.
        """
        patch_tensors(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def exact(handle: Any) -> Any:
        """Return numbers in float64. The interpreter keeps bfloat16 as integers of its bits."""
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return handle.data.astype(np.float64)

    def dot_in_float64(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        """Multiply in float64, and round once.

        As on a GPU, a product does not depend on its place in a tile then. NumPy's float32 products
        do so with the matrix kernels of some processors.
        """
        product = np.matmul(exact(a), exact(b)).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter._patch_lang_tensor = patch_tensors_for_new_numpy
    interpreter.InterpreterBuilder.create_dot = dot_in_float64


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Use oneDNN on any processor; return the list to which the shapes of its products are added.

    They are rows, columns and rows of the second matrix, which is transposed.
    """
    if not cpu_products.serves():
        pytest.skip("this PyTorch has no product of oneDNN")
    seen: list[tuple[int, ...]] = []
    multiply = cpu_products._multiplied

    def counted(x: Any, weight: Any, bias: Any) -> Any:
        seen.append((*x.shape, len(weight)))
        return multiply(x, weight, bias)

    monkeypatch.setattr(cpu_products, "is_faster", lambda: True)
    monkeypatch.setattr(cpu_products, "_multiplied", counted)
    return seen
