"""The terms that Client2Vec adds to the loss of a sample, as Triton kernels for a GPU.

There are few numbers: two rows of scores and a row of products for each sample. With PyTorch's
operations these terms take more than twenty launches a step, here one forward and one backward. The
backward pass computes the probabilities again instead of reading them.

Each row is computed from its own numbers only, in a fixed order. Only imported if Triton is
installed: see ``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.models.kernel_tools import all_merged

# Rows of a program, and scores that fit its registers. With more classes it has fewer rows.
_ROWS, _SCORES = 4, 4096
# Products that a program reads at a time.
_PRODUCTS = 1024


@triton.jit
def _log_probabilities(scores: tl.tensor, real: tl.tensor) -> tl.tensor:
    """Return the logarithm of the softmax of each row; zero beyond the classes."""
    values = tl.where(real, scores, float("-inf"))
    values -= tl.max(values, 1)[:, None]
    return tl.where(real, values - tl.log(tl.sum(tl.exp(values), 1))[:, None], 0.0)


@triton.jit
def _divergence(own: tl.tensor, other: tl.tensor, real: tl.tensor) -> tl.tensor:
    """Return the Kullback-Leibler divergence of rows of logarithms of probabilities."""
    return tl.sum(tl.where(real, tl.exp(own) * (own - other), 0.0), 1)


@triton.jit(do_not_specialize=["rows"])
def _add_terms(
    values: tl.tensor,
    scores: tl.tensor,
    others: tl.tensor,
    products: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    classes: tl.tensor,
    count: tl.tensor,
    weight: tl.tensor,
    ORTHOGONAL: tl.constexpr,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
    PRODUCTS: tl.constexpr,
) -> None:
    """Write the losses of some rows with the terms added; ``count`` is that of a row's products."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists, column = row < rows, tl.arange(0, CLASSES)
    real = (column < classes)[None, :]
    at, inside = row[:, None] * classes + column[None, :], exists[:, None] & real
    own = _log_probabilities(tl.load(scores + at, mask=inside, other=0.0), real)
    other = _log_probabilities(tl.load(others + at, mask=inside, other=0.0), real)
    total = _divergence(own, other, real)
    if ORTHOGONAL:
        along = tl.arange(0, PRODUCTS)
        sums = tl.zeros((ROWS,), dtype=tl.float32)
        for done in range(0, count, PRODUCTS):
            place = done + along
            there = exists[:, None] & (place < count)[None, :]
            given = tl.load(
                products + row[:, None] * count + place[None, :], mask=there, other=0.0
            )
            sums += tl.sum(tl.abs(given), 1)
        total += sums / count
    before = tl.load(values + row, mask=exists, other=0.0)
    tl.store(y + row, before + weight * total, mask=exists)


@triton.jit(do_not_specialize=["rows"])
def _term_gradients(
    upper: tl.tensor,
    scores: tl.tensor,
    others: tl.tensor,
    products: tl.tensor,
    of_scores: tl.tensor,
    of_others: tl.tensor,
    of_products: tl.tensor,
    rows: tl.tensor,
    classes: tl.tensor,
    count: tl.tensor,
    weight: tl.tensor,
    u_row: tl.tensor,
    ORTHOGONAL: tl.constexpr,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
    PRODUCTS: tl.constexpr,
) -> None:
    """Write the gradients by the scores of both heads, and by the products, of some rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists, column = row < rows, tl.arange(0, CLASSES)
    real = (column < classes)[None, :]
    at, inside = row[:, None] * classes + column[None, :], exists[:, None] & real
    share = tl.load(upper + row * u_row, mask=exists, other=0.0) * weight
    own = _log_probabilities(tl.load(scores + at, mask=inside, other=0.0), real)
    other = _log_probabilities(tl.load(others + at, mask=inside, other=0.0), real)
    distance = _divergence(own, other, real)
    probability = tl.exp(own)
    by_own = probability * (own - other - distance[:, None])
    tl.store(of_scores + at, share[:, None] * by_own, mask=inside)
    tl.store(of_others + at, share[:, None] * (tl.exp(other) - probability), mask=inside)
    if ORTHOGONAL:
        along = tl.arange(0, PRODUCTS)
        each = (share / count)[:, None]
        for done in range(0, count, PRODUCTS):
            place = done + along
            there = exists[:, None] & (place < count)[None, :]
            where = row[:, None] * count + place[None, :]
            given = tl.load(products + where, mask=there, other=0.0)
            signed = tl.where(given > 0, each, tl.where(given < 0, -each, 0.0))
            tl.store(of_products + where, signed, mask=there)


def fit(values: Tensor, scores: Tensor, others: Tensor, products: Tensor | None) -> bool:
    """Return whether the kernels can compute the terms: float32, and not too many classes.

    Examples
    --------
    >>> rows, scores = torch.zeros(2), torch.zeros(2, 3)
    >>> fit(rows, scores, scores, None), fit(rows.double(), scores, scores, None)
    (True, False)
    """
    given = [values, scores, others] if products is None else [values, scores, others, products]
    return (
        all(tensor.dtype == torch.float32 for tensor in given)
        and 0 < scores.shape[1] <= _SCORES
        and (products is None or products.shape[1] > 0)
    )


def add_terms(
    values: Tensor, scores: Tensor, others: Tensor, products: Tensor | None, weight: float
) -> Tensor:
    """Add ``weight`` times both terms to the loss of each sample; see :func:`fit`.

    Parameters
    ----------
    values : Tensor
        The losses, ``[samples]``.
    scores, others : Tensor
        Scores of the head and of the projection's classifier, ``[samples, classes]``. The first
        term is the divergence of the second softmax from the first.
    products : Tensor or None
        Products of the projection and all indices, ``[samples, indices]``. The second term is the
        mean of their absolute values.
    weight : float
        The weight of both.

    Returns
    -------
    Tensor
        ``[samples]``.
    """
    made: Tensor = Terms.apply(values, scores, others, products, weight)
    return made


class Terms(torch.autograd.Function):
    """What :func:`add_terms` does. Rows of stacked clients are counted through."""

    @staticmethod
    def forward(
        values: Tensor, scores: Tensor, others: Tensor, products: Tensor | None, weight: float
    ) -> Tensor:
        """Add the terms."""
        y = torch.empty_like(values, memory_format=torch.contiguous_format)
        if len(values) == 0:
            return y
        given = _rows(values, scores, others, products)
        programs, options = _cut(scores, products)
        with torch.cuda.device_of(scores):
            _add_terms[(programs,)](*given, y, *_sizes(scores, products), weight, **options)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients need."""
        _, scores, others, products, ctx.weight = inputs
        ctx.save_for_backward(scores, others, products)

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients by losses, scores and products."""
        scores, others, products = ctx.saved_tensors
        if torch.is_grad_enabled():
            # These gradients will be differentiated in turn, which the kernel cannot be.
            return upper, *_plain_gradients(upper * ctx.weight, scores, others, products), None
        made = [
            None
            if tensor is None
            else torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor in (scores, others, products)
        ]
        if len(upper) > 0:
            programs, options = _cut(scores, products)
            with torch.cuda.device_of(scores):
                _term_gradients[(programs,)](
                    upper,
                    *_rows(scores, others, products),
                    *made,
                    *_sizes(scores, products),
                    ctx.weight,
                    upper.stride(0),
                    **options,
                )
        return upper, *made, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Count the samples of stacked clients through."""
        made = Terms.apply(*all_merged(info, in_dims, inputs, tensors=4))
        return made.unflatten(0, (info.batch_size, -1)), 0


def _rows(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors whose rows follow each other in memory."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _sizes(scores: Tensor, products: Tensor | None) -> tuple[int, int, int]:
    """Return the numbers of rows, of classes and of products of a row."""
    return *scores.shape, 0 if products is None else products.shape[1]


def _cut(scores: Tensor, products: Tensor | None) -> tuple[int, dict[str, Any]]:
    """Choose how many programs there are, and what each of them works on."""
    rows, classes, count = _sizes(scores, products)
    width = max(16, triton.next_power_of_2(classes))
    of_program = min(_ROWS, max(1, _SCORES // width))
    options = {"ROWS": of_program, "CLASSES": width, "ORTHOGONAL": products is not None}
    options["PRODUCTS"] = min(_PRODUCTS, max(16, triton.next_power_of_2(count)))
    return triton.cdiv(rows, of_program), options


def _plain_gradients(
    share: Tensor, scores: Tensor, others: Tensor, products: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients by operations that can be differentiated."""
    own, other, each = scores.log_softmax(1), others.log_softmax(1), share.unsqueeze(1)
    probability, apart = own.exp(), own - other
    distance = (probability * apart).sum(1, keepdim=True)
    of_products = None if products is None else each * products.sgn() / products.shape[1]
    by_own = probability * (apart - distance)
    return each * by_own, each * (other.exp() - probability), of_products
