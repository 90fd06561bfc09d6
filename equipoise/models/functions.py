"""Replacements for PyTorch functions that models call in their own code.

They allow clients to be stacked. :func:`equipoise.models.layers.convert` replaces layers, but
cannot replace functions that draw random numbers, such as ``torch.nn.functional.dropout``. While a
:class:`Carried` is active, these functions draw the engine's random numbers, and attention uses
matrix products, which can be stacked and differentiated twice. Embeddings have the same gradients
stacked or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from equipoise.errors import InputError
from equipoise.models import cpu_products
from equipoise.models.dropout import dropped, kept_units
from equipoise.models.frozen import inside_frozen, transforms
from equipoise.models.passes import current_pass, next_key
from equipoise.random import fold_tensor, normal, uniform

# The value of a dropped unit in alpha dropout: SELU's limit at minus infinity.
_ALPHA = -1.7580993408473766


class Carried(TorchFunctionMode):
    """A context that replaces dropout, attention, random functions and some embeddings.

    Frozen modules are not affected: they are in evaluation mode and may use fused attention.

    Attributes
    ----------
    seen : set of str
        The names of the functions that were called and replaced.

    Examples
    --------
    >>> with Carried() as carried:
    ...     y = F.dropout(torch.ones(2), 0.5, training=False)
    >>> y, carried.seen
    (tensor([1., 1.]), {'dropout'})
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the replacement of a function, or the function itself."""
        replacement = None if inside_frozen() else _REPLACED.get(func)
        if func is F.embedding and not _is_special(*args, **(kwargs or {})):
            replacement = None
        if replacement is not None:
            self.seen.add(func.__name__)
        return (replacement or func)(*args, **(kwargs or {}))


class Watched(Carried):
    """A :class:`Carried` that also records functions that still draw from PyTorch's generators.

    Parameters
    ----------
    states : callable
        Returns the states of the generators.

    Attributes
    ----------
    drawing : list of str
        The names of those functions.
    """

    def __init__(self, states: Callable[[], list[Tensor]]) -> None:
        super().__init__()
        self.states = states
        self.drawing: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and compare the states before and after it."""
        before = self.states()
        made = super().__torch_function__(func, types, args, kwargs)
        if any(not torch.equal(*pair) for pair in zip(before, self.states(), strict=True)):
            self.drawing.append(resolve_name(func) or getattr(func, "__name__", str(func)))
        return made


def advice(drawing: Sequence[str]) -> str:
    """Return advice for a model that draws from PyTorch's random generators.

    Parameters
    ----------
    drawing : sequence of str
        The names of the functions that draw.

    Examples
    --------
    >>> advice(["torch.nn.functional.dropout"])
    'write F.dropout(x, p, self.training), so that nothing is dropped in evaluation'
    """
    name = drawing[0] if drawing else ""
    called = name.rpartition(".")[2]
    if "dropout" in called:
        return f"write F.{called}(x, p, self.training), so that nothing is dropped in evaluation"
    if "attention" in called:
        return (
            "write dropout_p=p if self.training else 0.0, so that nothing is dropped in evaluation"
        )
    if called in (
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "bernoulli",
        "bernoulli_",
        "uniform_",
        "normal_",
    ):
        return f"call {name} only if self.training"
    return (
        "use nn.Dropout, torch.nn.functional.dropout, torch.rand or torch.randn, whose numbers can "
        "be drawn again"
    )


# ---- dropout -------------------------------------------------------------------------------------


def _key_in_training() -> Tensor | None:
    """Return the key of the next draw, or ``None`` outside of training.

    Without a key PyTorch's function is called, and its draw is detected and refused.
    """
    forward = current_pass()
    return next_key(None, 0) if forward is not None and forward.train else None


def _dropout(
    original: Callable[..., Tensor], *, channels: bool = False, alpha: bool = False
) -> Callable[..., Tensor]:
    """Return the replacement of a dropout function of ``torch.nn.functional``."""

    def replacement(
        input: Tensor, p: float = 0.5, training: bool = not alpha, inplace: bool = False
    ) -> Tensor:
        key = _key_in_training() if training and p > 0 else None
        if key is None or not 0 < p <= 1:
            return original(input, p, training, inplace)
        made = (
            _alpha_dropped(input, p, key, channels) if alpha else dropped(input, p, key, channels)
        )
        return input.copy_(made) if inplace else made

    return replacement


def _alpha_dropped(x: Tensor, p: float, key: Tensor, channels: bool) -> Tensor:
    """Set dropped units to SELU's lowest value; keep mean and variance of a normal input."""
    kept, share = kept_units(x, p, key, channels)
    if share == 0:
        return torch.zeros_like(x)
    scale = (share * (1 + (1 - share) * _ALPHA**2)) ** -0.5
    return scale * (torch.where(kept, x, _ALPHA) - _ALPHA * (1 - share))


def _low_level(replacement: Callable[..., Tensor], *, inplace: bool) -> Callable[..., Tensor]:
    """Return the replacement of a function of ``torch`` with the arguments input, p and train."""
    return lambda input, p, train: replacement(input, p, train, inplace)


# ---- numbers -------------------------------------------------------------------------------------


def _drawn(shape: Sequence[int], draw: Callable[..., Tensor], dtype: torch.dtype) -> Tensor | None:
    """Draw random numbers of a shape, or return ``None`` outside of training."""
    key = _key_in_training()
    if key is None:
        return None
    size = torch.Size(shape)
    return draw(fold_tensor(key, torch.arange(size.numel(), device=key.device)), dtype).view(size)


def _filled(original: Callable[..., Tensor], draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the replacement of ``torch.rand`` or ``torch.randn``."""

    def replacement(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        given = options.pop("size", None) or (
            size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        )
        made = _drawn(given, draw, dtype or torch.get_default_dtype())
        return original(*size, dtype=dtype, **options) if made is None else made

    return replacement


def _like(original: Callable[..., Tensor], draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the replacement of ``torch.rand_like`` or ``torch.randn_like``."""

    def replacement(input: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        made = _drawn(input.shape, draw, dtype or input.dtype)
        return original(input, dtype=dtype, **options) if made is None else made

    return replacement


def _bernoulli(input: Tensor, p: float | None = None, **options: Any) -> Tensor:
    made = _drawn(input.shape, uniform, torch.float64)
    if made is None:
        return (
            torch.bernoulli(input, **options) if p is None else torch.bernoulli(input, p, **options)
        )
    return (made < (input if p is None else p)).to(input.dtype)


def _bernoulli_(input: Tensor, p: float | Tensor = 0.5, **options: Any) -> Tensor:
    made = _drawn(input.shape, uniform, torch.float64)
    return Tensor.bernoulli_(input, p, **options) if made is None else input.copy_(made < p)


def _uniform_(input: Tensor, low: float = 0.0, high: float = 1.0, **options: Any) -> Tensor:
    made = _drawn(input.shape, uniform, input.dtype)
    return (
        Tensor.uniform_(input, low, high, **options)
        if made is None
        else input.copy_(low + (high - low) * made)
    )


def _normal_(input: Tensor, mean: float = 0.0, std: float = 1.0, **options: Any) -> Tensor:
    made = _drawn(input.shape, normal, input.dtype)
    return (
        Tensor.normal_(input, mean, std, **options)
        if made is None
        else input.copy_(mean + std * made)
    )


# ---- attention -----------------------------------------------------------------------------------


def attention_weights(
    scores: Tensor, masks: Sequence[Tensor | None], *, is_causal: bool = False
) -> Tensor:
    """Return the softmax of scores over the last axis, without masked keys.

    If all keys of a query are masked, its weights are zero.

    Parameters
    ----------
    scores : Tensor
        ``[..., queries, keys]``.
    masks : sequence of Tensor or None
        Booleans, true where a key is used, or numbers that are added to the scores. Each of them is
        broadcast.
    is_causal : bool
        Whether query i attends only to keys 0 to i.

    Returns
    -------
    Tensor
        Of the shape of the scores.

    Examples
    --------
    >>> attention_weights(torch.zeros(2, 2), [torch.tensor([[True, False], [False, False]])])
    tensor([[1., 0.],
            [0., 0.]])
    """
    allowed: Tensor | None = None
    lowest = torch.finfo(scores.dtype).min
    given = [mask for mask in masks if mask is not None]
    if is_causal:
        given.append(torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril())
    for mask in given:
        inside = mask
        if mask.dtype != torch.bool:
            inside = mask > float("-inf")
            scores = scores + mask.clamp(min=lowest)
        allowed = inside if allowed is None else allowed & inside
    if allowed is None:
        return scores.softmax(-1)
    # Use the lowest number instead of minus infinity: if all keys are masked, the softmax of minus
    # infinity has no gradient.
    return torch.where(allowed, scores, lowest).softmax(-1) * allowed


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (
            tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3)
            for tensor in (key, value)
        )
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    weights = attention_weights(
        (query * factor) @ key.transpose(-1, -2), [attn_mask], is_causal=is_causal
    )
    # Call the function, so that dropout outside of training is handled as everywhere.
    return _REPLACED[F.dropout](weights, dropout_p, dropout_p > 0) @ value


def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Replace ``F.multi_head_attention_forward``. A causal mask is passed as ``attn_mask``."""
    if query.dim() != 3 or static_k is not None or static_v is not None:
        raise InputError(
            f"attention is called with queries of shape {tuple(query.shape)}; valid: a batch with "
            "three dimensions, and no static keys or values"
        )
    own = (q_proj_weight, k_proj_weight, v_proj_weight)
    factors: Any = (
        own if use_separate_proj_weight or in_proj_weight is None else in_proj_weight.chunk(3)
    )
    biases: Any = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    # Put samples first: random numbers must not depend on the number of samples in a batch.
    batches = (tensor.transpose(0, 1) for tensor in (query, key, value))
    q, k, v = (_linear(*given) for given in zip(batches, factors, biases, strict=True))
    samples, added = len(q), 0
    more: list[tuple[Any, Any]] = [(bias_k, bias_v)] if bias_k is not None else []
    for more_k, more_v in [*more, (0.0, 0.0)] if add_zero_attn else more:
        zeros = k.new_zeros(samples, 1, k.shape[-1])
        k, v = torch.cat([k, zeros + more_k], 1), torch.cat([v, zeros + more_v], 1)
        added += 1
    q, k, v = (tensor.unflatten(-1, (num_heads, -1)).transpose(1, 2) for tensor in (q, k, v))
    masks = [
        None
        if attn_mask is None
        else _taking_part(attn_mask, added).view(-1, *_grid(attn_mask, num_heads, added)),
        None if key_padding_mask is None else _taking_part(key_padding_mask, added)[:, None, None],
    ]
    weights = attention_weights((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2), masks)
    weights = _REPLACED[F.dropout](weights, dropout_p, training)
    made = _linear(
        (weights @ v).transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias
    ).transpose(0, 1)
    return made, (weights.mean(1) if average_attn_weights else weights) if need_weights else None


def _grid(mask: Tensor, heads: int, added: int) -> tuple[int, int, int]:
    """Return the shape of an attention mask of one sample, which may have one mask per head."""
    return (heads if mask.dim() == 3 else 1, mask.shape[-2], mask.shape[-1] + added)


def _taking_part(mask: Tensor, added: int) -> Tensor:
    """Invert a mask of PyTorch's modules, which is true for masked keys. Added keys are used."""
    if mask.dtype == torch.bool:
        return F.pad(~mask, (0, added), value=True)
    return F.pad(mask, (0, added), value=0.0)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Use one matrix product for each client.

    See :class:`equipoise.models.linear_layers.Linear`.
    """
    return cpu_products.linear(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])


# ---- embeddings ----------------------------------------------------------------------------------


def _is_special(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> bool:
    """Return whether ``F.embedding`` is called with options whose gradients cannot be stacked."""
    return max_norm is None and (padding_idx is not None or scale_grad_by_freq or sparse)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Replace ``F.embedding``. Gradients are dense, and that of the padding row is zero.

    Parameters
    ----------
    input : Tensor
        Integers.
    weight : Tensor
        A row for each integer.
    padding_idx : int, optional
        The row without a gradient.
    max_norm : None
        Not used, like ``norm_type`` and ``sparse``.
    scale_grad_by_freq : bool
        Whether the gradient of a row is divided by how often it is looked up. Clients cannot be
        stacked then.

    Examples
    --------
    >>> weight = torch.ones(3, 1, requires_grad=True)
    >>> embedding(torch.tensor([0, 1, 1]), weight, padding_idx=0).sum().backward()
    >>> weight.grad.flatten()
    tensor([0., 2., 0.])
    """
    if scale_grad_by_freq and transforms():
        raise NotImplementedError("scale_grad_by_freq would count the indices of all clients")
    if padding_idx is not None:
        numbers = torch.arange(len(weight), device=weight.device).unsqueeze(1)
        weight = torch.where(numbers.eq(padding_idx % len(weight)), weight.detach(), weight)
    return F.embedding(input, weight, scale_grad_by_freq=scale_grad_by_freq)


_DROPOUTS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout(F.dropout),
    F.dropout1d: _dropout(F.dropout1d, channels=True),
    F.dropout2d: _dropout(F.dropout2d, channels=True),
    F.dropout3d: _dropout(F.dropout3d, channels=True),
    F.alpha_dropout: _dropout(F.alpha_dropout, alpha=True),
    F.feature_alpha_dropout: _dropout(F.feature_alpha_dropout, alpha=True, channels=True),
}
_REPLACED: dict[Any, Callable[..., Any]] = {
    **_DROPOUTS,
    torch.dropout: _low_level(_DROPOUTS[F.dropout], inplace=False),
    torch.dropout_: _low_level(_DROPOUTS[F.dropout], inplace=True),
    torch.feature_dropout: _low_level(_DROPOUTS[F.dropout2d], inplace=False),
    torch.feature_dropout_: _low_level(_DROPOUTS[F.dropout2d], inplace=True),
    torch.alpha_dropout: _low_level(_DROPOUTS[F.alpha_dropout], inplace=False),
    torch.alpha_dropout_: _low_level(_DROPOUTS[F.alpha_dropout], inplace=True),
    torch.rand: _filled(torch.rand, uniform),
    torch.randn: _filled(torch.randn, normal),
    torch.rand_like: _like(torch.rand_like, uniform),
    torch.randn_like: _like(torch.randn_like, normal),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    F.scaled_dot_product_attention: _scaled_dot_product_attention,
    F.multi_head_attention_forward: _multi_head_attention,
    F.embedding: embedding,
}
