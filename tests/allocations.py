"""Memory of tensors that a test makes."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Note the bytes of the largest tensor in new memory."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not function.is_view:
            self.bytes = max(self.bytes, made.nbytes)
        return made
