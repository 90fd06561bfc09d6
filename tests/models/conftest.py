"""What tests of models share: a repair of Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

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

    dot = interpreter.InterpreterBuilder.create_dot

    def dot_of_numbers(self: Any, a: Any, b: Any, *others: Any) -> Any:
        """Multiply bfloat16 numbers, which the interpreter keeps as integers of the same bits."""
        a, b = (
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            if x.dtype.scalar == tl.bfloat16
            else x
            for x in (a, b)
        )
        return dot(self, a, b, *others)

    interpreter._patch_lang_tensor = patch_tensors_for_new_numpy
    interpreter.InterpreterBuilder.create_dot = dot_of_numbers
