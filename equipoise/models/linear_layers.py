"""Linear layers whose weights are never copied when clients are stacked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.models import cpu_products
from equipoise.models.frozen import transforms
from equipoise.models.kernel_modules import module_with_triton
from equipoise.models.linear_products import linear
from equipoise.models.passes import current_pass
from equipoise.models.replacing import adopt, has_hooks

# Rows and columns of weights from which on their product has tiles for a GPU's tensor cores.
_WIDE = 64


class Linear(nn.Linear):
    """A linear layer with one matrix product per client, whatever the leading axes of its input.

    If ``[samples, tokens, width]`` is not contiguous in memory, ``vmap`` multiplies stacked weights
    by it once for every sample, and copies the weights for each. With all leading axes in one there
    is nothing to copy.

    Parameters
    ----------
    layer : nn.Linear
        The layer to replace.

    Examples
    --------
    >>> Linear(nn.Linear(4, 3))(torch.zeros(2, 5, 4)).shape
    torch.Size([2, 5, 3])
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(
            layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta"
        )
        adopt(self, layer)
        # Set by Frozen: weights and bias are never trained.
        self.constant = False

    @staticmethod
    def replaces(layer: nn.Module) -> bool:
        """Return whether a layer is an ordinary linear one, without hooks as of ``weight_norm``."""
        return type(layer) is nn.Linear and not has_hooks(layer)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the last axis of a tensor by the weights."""
        if x.dim() < 3:
            return self._product(x)
        return self._product(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    def _product(self, x: Tensor) -> Tensor:
        forward = current_pass()
        # In evaluation of a shared model, weights need no gradient either.
        evaluates = forward is not None and forward.shared
        fixed = self.constant or (evaluates and min(self.weight.shape) >= _WIDE)
        products = _split_products(x) if fixed else None
        if products is not None:
            made: Tensor = products.SplitProduct.apply(x, self.weight, self.bias)
            return made
        factored = forward is not None and forward.factored
        stacked = forward is not None and forward.stacked
        if self.constant or x.dim() != 2 or not (factored or stacked):
            return cpu_products.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias, factored=factored)


def _split_products(x: Tensor) -> Any:
    """Return the module of split products if they can serve a matrix and are faster."""
    in_float32 = x.is_cuda and x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    if not in_float32 or x.dim() != 2 or torch.backends.cuda.matmul.allow_tf32 or transforms():
        return None
    products = module_with_triton("products", x.device)
    return products if products is not None and products.pay_on(x.device) else None
