"""Gradients by weights that are left as two factors, so that they are never written to memory.

The gradient by the weights of a linear layer is a product of two small matrices of a client,
summed over its samples, and as large as the weights. An optimizer that gets the factors
(:class:`equipoise.models.update_kernels.Factors`) multiplies them where it updates the weights.

That is right only if nothing else adds to the gradient. :func:`gradient` therefore looks at the
graph of the losses: weights that are used twice, for example in a regularisation term, get an
ordinary gradient. Only imported if Triton is installed: see ``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.models import row_kernels
from equipoise.models.convolutions import precision_on
from equipoise.models.kernel_tools import all_merged, one_client
from equipoise.models.update_kernels import Factors, multiplies

# With more rows than this a product of large matrices is limited by arithmetic, and PyTorch's
# kernels are the better ones.
_MOST_ROWS = 128
# Up to this many rows a step by factors takes less time with float32 products than with products of
# parts of the factors, which must be split first: into three parts, or into two for TF32.
_FEW_ROWS = {"ieee": 64, "split": 64, "tf32": 16, "bfloat16": 0}
# Functions on the way from a parameter to a product that return the same numbers in the same order,
# up to rounding. Their gradients do so, too.
_SAME_NUMBERS = {
    "AliasBackward0",
    "SqueezeBackward1",
    "ToCopyBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply a client's batch by its weights, as ``F.linear`` does.

    Parameters
    ----------
    x : Tensor
        ``[samples, columns]``.
    weight : Tensor
        ``[rows, columns]``.
    bias : Tensor or None
        ``[rows]``.

    Returns
    -------
    Tensor
        ``[samples, rows]``.
    """
    of_bias = None if bias is None else bias.unsqueeze(0)
    y = StackedProduct.apply(
        x.unsqueeze(0), weight.unsqueeze(0), of_bias, precision_on(weight.device)
    )
    return one_client(y)


class StackedProduct(torch.autograd.Function):
    """What :func:`product` does for clients stacked along a leading axis.

    If a node of the graph is told so (``wants_factors``), its backward pass keeps the factors of
    the gradient by the weights (``factors``) and does not return this gradient.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> Tensor:
        """Multiply."""
        if row_kernels.fit(x, weight, precision):
            return row_kernels.multiply(x, weight, bias, precision)
        y = torch.bmm(x, weight.mT)
        return y if bias is None else y.add_(bias.unsqueeze(1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients need."""
        x, weight, bias, ctx.precision = inputs
        ctx.biased = bias is not None
        ctx.wants_factors, ctx.factors = False, None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient by input, weight and bias."""
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = StackedInputGradient.apply(upper, weight, ctx.precision)
        if ctx.wants_factors:
            plain = x.shape[1] <= _FEW_ROWS[ctx.precision]
            ctx.factors = Factors(upper, x, "ieee" if plain else ctx.precision)
        elif ctx.needs_input_grad[1]:
            of_weight = torch.bmm(upper.mT, x)
        if ctx.biased and ctx.needs_input_grad[2]:
            of_bias = upper.sum(1)
        return of_x, of_weight, of_bias, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Count stacked clients among the clients there already are."""
        x, weight, bias, _ = inputs
        if in_dims[1:3] == (None, None) and len(weight) == 1:
            # All clients share their weights: one product for all of them.
            x = (
                x.expand(info.batch_size, *x.shape)
                if in_dims[0] is None
                else x.movedim(in_dims[0], 0)
            )
            return F.linear(x, weight[0], None if bias is None else bias[0]), 0
        made = StackedProduct.apply(*all_merged(info, in_dims, inputs, tensors=3))
        return made.unflatten(0, (info.batch_size, -1)), 0


class StackedInputGradient(torch.autograd.Function):
    """The gradient by the input of :class:`StackedProduct`. It can itself be differentiated."""

    @staticmethod
    def forward(upper: Tensor, weight: Tensor, precision: str) -> Tensor:
        """Multiply the gradient by the result by the weights."""
        if row_kernels.fit(upper, weight, precision):
            return row_kernels.multiply_back(upper, weight, precision)
        return torch.bmm(upper, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients need."""
        upper, weight, ctx.precision = inputs
        ctx.save_for_backward(upper, weight)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient by both factors."""
        upper, weight = ctx.saved_tensors
        of_upper = of_weight = None
        if ctx.needs_input_grad[0]:
            of_upper = StackedProduct.apply(given, weight, None, ctx.precision)
        if ctx.needs_input_grad[1]:
            of_weight = torch.bmm(upper.mT, given)
        return of_upper, of_weight, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Count stacked clients among the clients there already are."""
        upper, weight, _ = inputs
        if in_dims[1] is None and len(weight) == 1:
            return upper.movedim(in_dims[0], 0) @ weight[0], 0
        made = StackedInputGradient.apply(*all_merged(info, in_dims, inputs, tensors=2))
        return made.unflatten(0, (info.batch_size, -1)), 0


def gradient(
    value: Callable[[list[Tensor]], Tensor], params: list[Tensor]
) -> tuple[Tensor, list[Tensor | Factors]]:
    """Return the gradient at the current parameters, of some parameters as factors.

    Parameters
    ----------
    value : callable
        Returns every client's loss, ``[K]``, for a list of stacked parameters.
    params : list of Tensor
        The stacked parameters that are trained.

    Returns
    -------
    tuple
        The losses, and one gradient per parameter: factors if the parameter is contiguous float32
        weights that one :func:`product` uses and nothing else.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in params]
    losses = value(leaves)
    total = losses.sum()
    nodes = _only_products(total, leaves)
    for node in nodes.values():
        node.wants_factors = True
    whole = torch.autograd.grad(total, leaves, allow_unused=True)
    gradients: list[Tensor | Factors] = []
    for index, (leaf, found) in enumerate(zip(leaves, whole, strict=True)):
        given = nodes[index].factors if index in nodes else found
        gradients.append(torch.zeros_like(leaf) if given is None else given)
    return losses.detach(), gradients


def _only_products(total: Tensor, leaves: Sequence[Tensor]) -> dict[int, Any]:
    """Return the node of the product that alone uses a leaf, by the leaf's index.

    The graph has an edge from a node to each of those that its gradients go to.
    """
    edges: Counter[Any] = Counter()
    # The latest node with an edge to another, and which of the inputs that is.
    users: dict[Any, tuple[Any, int]] = {}
    # All nodes are kept, because PyTorch may make a new object of one that is not.
    met: set[Any] = {total.grad_fn}
    ahead = list(met)
    while ahead:
        node = ahead.pop()
        for position, (after, _) in enumerate(node.next_functions):
            if after is None:
                continue
            edges[after] += 1
            users[after] = node, position
            if after not in met:
                met.add(after)
                ahead.append(after)
    ends = {id(node.variable): node for node in met if hasattr(node, "variable")}
    found: dict[int, Any] = {}
    for index, leaf in enumerate(leaves):
        node, position = ends.get(id(leaf)), 0
        while node is not None and edges[node] == 1:
            node, position = users[node]
            if not _keeps_numbers(node):
                break
        else:
            continue
        if _takes(node, position, leaf):
            found[index] = node
    return found


def _keeps_numbers(node: Any) -> bool:
    """Return whether a function's results are the numbers that it gets, in the same order."""
    if node.name() == "PermuteBackward0":
        axes = node._saved_dims
        # Axes that were counted from the last are stored as unsigned numbers of 64 bits.
        counted = [(axis - 2**64 if axis >= 2**63 else axis) % len(axes) for axis in axes]
        return counted == list(range(len(axes)))
    return node.name() in _SAME_NUMBERS


def _takes(node: Any, position: int, leaf: Tensor) -> bool:
    """Return whether a node is a product that takes a leaf as its weights."""
    if getattr(node, "_forward_cls", None) is not StackedProduct or position != 1:
        return False
    x, weight = node.saved_tensors
    return multiplies(leaf) and weight.shape == leaf.shape and 0 < x.shape[1] <= _MOST_ROWS
