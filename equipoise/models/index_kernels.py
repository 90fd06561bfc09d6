"""The terms that Client2Vec adds to the loss of a sample, as Triton kernels for a GPU.

There are few numbers: two rows of scores and a row of products for each sample. With PyTorch's
operations these terms take more than twenty launches a step, here one forward and one backward. The
backward pass computes the probabilities again instead of reading them. With few classes the same
kernels multiply the projections by the weights of their classifier and by the index.

Everything is computed from a client's own numbers only, in a fixed order. Only imported if Triton
is installed: see ``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.models.convolutions import precision_on
from equipoise.models.kernel_tools import FUSED, all_merged, one_client
from equipoise.models.products import stages

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
            given = tl.load(products + row[:, None] * count + place[None, :], mask=there, other=0.0)
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


# ---- with the products ---------------------------------------------------------------------------

# Classes and samples of a client beyond which the products are left to PyTorch: a program has all
# classes of some samples, and backward some columns of all samples.
_FEW_CLASSES, _FEW_SAMPLES = 128, 128
# Samples and indices that a program has at a time, and columns that it adds up, or writes backward.
_SAMPLES, _INDICES, _WIDTH, _COLUMNS = 16, 64, 64, 32
# Size in bytes of the largest tiles that are loaded while others are multiplied.
_STAGE = 4 * _WIDTH * (_SAMPLES + max(_FEW_CLASSES, _INDICES))
# How products are made, by the precision that is asked for.
_ARITHMETIC = {"ieee": "ieee", "split": "tf32x3", "tf32": "tf32"}


@triton.jit
def _product(
    batch: tl.tensor,
    exists: tl.tensor,
    matrix: tl.tensor,
    number: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    ARITHMETIC: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Multiply rows, to which ``batch`` points, by the rows ``number`` of a matrix with ``count``.

    ``exists`` tells which rows of the batch there are.
    """
    along = tl.arange(0, WIDTH)
    left = batch[:, None] + along[None, :]
    right = matrix + (number[:, None] * width + along[None, :])
    known = (number < count)[:, None]
    total = tl.zeros((batch.shape[0], number.shape[0]), dtype=tl.float32)
    for done in range(0, width, WIDTH):
        inside = (along < width - done)[None, :]
        given = tl.load(left + done, mask=exists[:, None] & inside, other=0.0)
        factors = tl.load(right + done, mask=known & inside, other=0.0)
        total = tl.dot(given, tl.trans(factors), total, input_precision=ARITHMETIC)
    return total


@triton.jit(do_not_specialize=["samples", "blocks"])
def _add_head_terms(
    values: tl.tensor,
    scores: tl.tensor,
    projected: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    index: tl.tensor,
    y: tl.tensor,
    others: tl.tensor,
    products: tl.tensor,
    samples: tl.tensor,
    classes: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    i_client: tl.tensor,
    factor: tl.tensor,
    blocks: tl.tensor,
    ORTHOGONAL: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    SAMPLES: tl.constexpr,
    CLASSES: tl.constexpr,
    INDICES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write the losses of some samples of a client with the terms added, and the products."""
    client = (tl.program_id(0) // blocks).to(tl.int64)
    sample = (tl.program_id(0) % blocks) * SAMPLES + tl.arange(0, SAMPLES)
    exists, column = sample < samples, tl.arange(0, CLASSES)
    real = (column < classes)[None, :]
    row = client * samples + sample
    at, inside = row[:, None] * classes + column[None, :], exists[:, None] & real
    batch, own_weight = projected + row * width, weight + client * classes * width
    other = _product(batch, exists, own_weight, column, classes, width, ARITHMETIC, WIDTH)
    added = tl.load(bias + client * classes + column, mask=column < classes, other=0.0)
    other += added[None, :]
    tl.store(others + at, other, mask=inside)
    own = _log_probabilities(tl.load(scores + at, mask=inside, other=0.0), real)
    total = _divergence(own, _log_probabilities(other, real), real)
    if ORTHOGONAL:
        sums = tl.zeros((SAMPLES,), dtype=tl.float32)
        vectors = index + client * i_client
        for done in range(0, count, INDICES):
            number = done + tl.arange(0, INDICES)
            found = _product(batch, exists, vectors, number, count, width, ARITHMETIC, WIDTH)
            there = exists[:, None] & (number < count)[None, :]
            tl.store(products + row[:, None] * count + number[None, :], found, mask=there)
            sums += tl.sum(tl.abs(found), 1)
        total += sums / count
    before = tl.load(values + row, mask=exists, other=0.0)
    tl.store(y + row, before + factor * total, mask=exists)


@triton.jit(do_not_specialize=["samples", "tiles"])
def _head_term_gradients(
    upper: tl.tensor,
    scores: tl.tensor,
    projected: tl.tensor,
    weight: tl.tensor,
    others: tl.tensor,
    products: tl.tensor,
    index: tl.tensor,
    of_scores: tl.tensor,
    of_projected: tl.tensor,
    of_weight: tl.tensor,
    of_bias: tl.tensor,
    samples: tl.tensor,
    classes: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    i_client: tl.tensor,
    factor: tl.tensor,
    tiles: tl.tensor,
    u_client: tl.tensor,
    u_sample: tl.tensor,
    ORTHOGONAL: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    SAMPLES: tl.constexpr,
    CLASSES: tl.constexpr,
    INDICES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write some columns of a client's gradients by projections and weights.

    The programs of the first columns also write the gradients by scores and bias.
    """
    tile, client = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    column, along = tl.arange(0, CLASSES), tile * COLUMNS + tl.arange(0, COLUMNS)
    known, ahead = column < classes, (along < width)[None, :]
    real = known[None, :]
    at_weight = client * classes * width + (column[:, None] * width + along[None, :])
    factors = tl.load(weight + at_weight, mask=known[:, None] & ahead, other=0.0)
    by_weight = tl.zeros((CLASSES, COLUMNS), dtype=tl.float32)
    by_bias = tl.zeros((CLASSES,), dtype=tl.float32)
    for first in range(0, samples, SAMPLES):
        sample = first + tl.arange(0, SAMPLES)
        exists = sample < samples
        row = client * samples + sample
        at, inside = row[:, None] * classes + column[None, :], exists[:, None] & real
        change = tl.load(upper + client * u_client + sample * u_sample, mask=exists, other=0.0)
        share = change * factor
        own = _log_probabilities(tl.load(scores + at, mask=inside, other=0.0), real)
        other = _log_probabilities(tl.load(others + at, mask=inside, other=0.0), real)
        probability = tl.exp(own)
        # Zero beyond the classes and the samples.
        by_other = share[:, None] * (tl.exp(other) - probability)
        if tile == 0:
            distance = _divergence(own, other, real)
            by_own = probability * (own - other - distance[:, None])
            tl.store(of_scores + at, share[:, None] * by_own, mask=inside)
            by_bias += tl.sum(by_other, 0)
        there, place = exists[:, None] & ahead, row[:, None] * width + along[None, :]
        given = tl.load(projected + place, mask=there, other=0.0)
        by_weight = tl.dot(tl.trans(by_other), given, by_weight, input_precision=ARITHMETIC)
        total = tl.dot(by_other, factors, input_precision=ARITHMETIC)
        if ORTHOGONAL:
            each = (share / count)[:, None]
            for done in range(0, count, INDICES):
                number = done + tl.arange(0, INDICES)
                found = tl.load(
                    products + row[:, None] * count + number[None, :],
                    mask=exists[:, None] & (number < count)[None, :],
                    other=0.0,
                )
                signed = tl.where(found > 0, each, tl.where(found < 0, -each, 0.0))
                vectors = tl.load(
                    index + client * i_client + (number[:, None] * width + along[None, :]),
                    mask=(number < count)[:, None] & ahead,
                    other=0.0,
                )
                total = tl.dot(signed, vectors, total, input_precision=ARITHMETIC)
        tl.store(of_projected + place, total, mask=there)
    tl.store(of_weight + at_weight, by_weight, mask=known[:, None] & ahead)
    if tile == 0:
        tl.store(of_bias + client * classes + column, by_bias, mask=known)


def fit_head(
    values: Tensor, scores: Tensor, projected: Tensor, weight: Tensor, index: Tensor | None
) -> bool:
    """Return whether :func:`add_head_terms` can serve: float32, few samples and classes."""
    given = [values, scores, projected, weight, *([] if index is None else [index])]
    return (
        all(tensor.dtype == torch.float32 for tensor in given)
        and scores.dim() == 2
        and weight.shape[0] == scores.shape[1] <= _FEW_CLASSES
        and len(values) <= _FEW_SAMPLES
        # Places in an index are numbers of 32 bits.
        and (index is None or 0 < index.numel() < 1 << 30)
    )


def add_head_terms(
    values: Tensor,
    scores: Tensor,
    projected: Tensor,
    layer: tuple[Tensor, Tensor],
    index: Tensor | None,
    factor: float,
) -> Tensor:
    """Do what :func:`add_terms` does, and make the products, too; see :func:`fit_head`.

    Parameters
    ----------
    values, scores : Tensor
        As for :func:`add_terms`.
    projected : Tensor
        The projections, ``[samples, width]``.
    layer : tuple of Tensor
        Weights ``[classes, width]`` and bias ``[classes]`` of the projection's classifier.
    index : Tensor or None
        ``[indices, width]``, constant.
    factor : float
        The weight of both terms.

    Returns
    -------
    Tensor
        ``[samples]``.
    """
    given = (values, scores, projected, *layer, index)
    stacked = (None if tensor is None else tensor.unsqueeze(0) for tensor in given)
    y, _, _ = HeadTerms.apply(*stacked, factor, precision_on(projected.device))
    return one_client(y)


class HeadTerms(torch.autograd.Function):
    """What :func:`add_head_terms` does for clients stacked along a leading axis.

    It also returns the scores of the projection's classifier and the products with the index.
    """

    @staticmethod
    def forward(
        values: Tensor,
        scores: Tensor,
        projected: Tensor,
        weight: Tensor,
        bias: Tensor,
        index: Tensor | None,
        factor: float,
        precision: str,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Multiply, and add the terms."""
        y, others = _empty(values), _empty(scores)
        products = None if index is None else scores.new_empty(*values.shape, index.shape[1])
        if values.numel() > 0:
            given = _rows(values, scores, projected, weight, bias)
            vectors, sizes, options = _head_cut(projected, weight, index, precision)
            blocks = triton.cdiv(values.shape[1], _SAMPLES)
            with torch.cuda.device_of(scores):
                _add_head_terms[(blocks * len(values),)](
                    *given,
                    vectors,
                    y,
                    others,
                    products,
                    *sizes,
                    factor,
                    blocks,
                    WIDTH=_WIDTH,
                    num_stages=stages(scores.device, _STAGE, 3),
                    **options,
                    **FUSED,
                )
        return y, others, products

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Keep what the gradients need."""
        _, *used, ctx.factor, ctx.precision = inputs
        scores, projected, weight, bias, index = used
        _, others, products = output
        ctx.mark_non_differentiable(*(each for each in (others, products) if each is not None))
        # Otherwise zeros would be written as gradients by others and products.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(scores, projected, weight, bias, index, others, products)

    @staticmethod
    def backward(ctx: Any, upper: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients by losses, scores, projections, and weights and bias."""
        scores, projected, weight, bias, index, others, products = ctx.saved_tensors
        if torch.is_grad_enabled():
            # These gradients will be differentiated in turn, which the kernel cannot be.
            others = projected @ weight.mT + bias.unsqueeze(-2)
            products = None if index is None else projected @ index.mT
            of_scores, of_others, of_products = _plain_gradients(
                upper * ctx.factor, scores, others, products
            )
            of_projected = of_others @ weight
            if of_products is not None:
                of_projected = of_projected + of_products @ index
            of_layer = of_others.mT @ projected, of_others.sum(-2)
            return upper, of_scores, of_projected, *of_layer, None, None, None
        made = [_empty(tensor) for tensor in (scores, projected, weight, bias)]
        vectors, sizes, options = _head_cut(projected, weight, index, ctx.precision)
        tiles = triton.cdiv(projected.shape[2], _COLUMNS)
        with torch.cuda.device_of(scores):
            _head_term_gradients[(tiles * len(scores),)](
                upper,
                *_rows(scores, projected, weight, others, products),
                vectors,
                *made,
                *sizes,
                ctx.factor,
                tiles,
                *upper.stride(),
                COLUMNS=_COLUMNS,
                num_stages=2,
                **options,
                **FUSED,
            )
        return upper, *made, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], *inputs: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Count stacked clients among the clients there already are."""
        made = HeadTerms.apply(*all_merged(info, in_dims, inputs, tensors=6))
        apart = tuple(
            None if tensor is None else tensor.unflatten(0, (info.batch_size, -1))
            for tensor in made
        )
        return apart, tuple(None if tensor is None else 0 for tensor in made)


def _head_cut(
    projected: Tensor, weight: Tensor, index: Tensor | None, precision: str
) -> tuple[Tensor | None, tuple[int, ...], dict[str, Any]]:
    """Choose what programs work on.

    Returns
    -------
    tuple
        The index, which clients may share; the numbers of samples, classes, indices and columns,
        and how far apart the indices of clients are; and options of the kernels.
    """
    samples, width = projected.shape[1:]
    classes, count = weight.shape[1], 0 if index is None else index.shape[1]
    if index is not None and index.stride()[1:] != (width, 1):
        index = index.contiguous()
    apart = 0 if index is None or len(index) == 1 else index.stride(0)
    sizes = samples, classes, count, width, apart
    options = {"ORTHOGONAL": index is not None, "ARITHMETIC": _ARITHMETIC[precision]}
    options |= {"SAMPLES": _SAMPLES, "CLASSES": _padded(classes)}
    options |= {"INDICES": min(_INDICES, _padded(count)), "num_warps": 8}
    return index, sizes, options


def _padded(count: int) -> int:
    """Return the next power of two, at least 16, which products need."""
    return max(16, triton.next_power_of_2(count))


# ---- without the products ------------------------------------------------------------------------


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
        and scores.dim() == 2
        and scores.shape == others.shape
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
        y = _empty(values)
        if len(values) == 0:
            return y
        given = _rows(values, scores, others, products)
        programs, options = _cut(scores, products)
        with torch.cuda.device_of(scores):
            _add_terms[(programs,)](
                *given, y, *_sizes(scores, products), weight, **options, **FUSED
            )
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
        made = [None if tensor is None else _empty(tensor) for tensor in (scores, others, products)]
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
                    **FUSED,
                )
        return upper, *made, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Count the samples of stacked clients through."""
        made = Terms.apply(*all_merged(info, in_dims, inputs, tensors=4))
        return made.unflatten(0, (info.batch_size, -1)), 0


def _empty(like: Tensor) -> Tensor:
    """Return new memory for a tensor of the same shape."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _rows(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors whose rows follow each other in memory."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _sizes(scores: Tensor, products: Tensor | None) -> tuple[int, int, int]:
    """Return the numbers of rows, of classes and of products of a row."""
    return *scores.shape, 0 if products is None else products.shape[1]


def _cut(scores: Tensor, products: Tensor | None) -> tuple[int, dict[str, Any]]:
    """Choose how many programs there are, and what each of them works on."""
    rows, classes, count = _sizes(scores, products)
    width = _padded(classes)
    of_program = min(_ROWS, max(1, _SCORES // width))
    options = {"ROWS": of_program, "CLASSES": width, "ORTHOGONAL": products is not None}
    options["PRODUCTS"] = min(_PRODUCTS, _padded(count))
    return triton.cdiv(rows, of_program), options


def _plain_gradients(
    share: Tensor, scores: Tensor, others: Tensor, products: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients by operations that can be differentiated."""
    own, other, each = scores.log_softmax(-1), others.log_softmax(-1), share.unsqueeze(-1)
    probability, apart = own.exp(), own - other
    distance = (probability * apart).sum(-1, keepdim=True)
    of_products = None if products is None else each * products.sgn() / products.shape[-1]
    by_own = probability * (apart - distance)
    return each * by_own, each * (other.exp() - probability), of_products
