"""Parts of a model that are never trained.

There is one copy for all clients. It is called with the samples of all clients in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn.attention import SDPBackend, sdpa_kernel

from equipoise.errors import InputError
from equipoise.tree import digest

Output = Tensor | tuple[Tensor, ...]


@contextmanager
def plain_attention() -> Iterator[None]:
    """Make ``scaled_dot_product_attention`` use plain matrix products inside a ``with`` block.

    Fused attention has no second derivative and no ``vmap`` rule. :class:`Frozen` uses this context
    inside transforms of ``torch.func``. Code that calls ``torch.autograd.grad(...,
    create_graph=True)`` must wrap the forward pass in it.

    Examples
    --------
    >>> q = torch.rand(1, 2, 3, 4, requires_grad=True)
    >>> with plain_attention():
    ...     y = nn.functional.scaled_dot_product_attention(q, q, q)
    >>> (first,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    >>> torch.autograd.grad(first.square().sum(), q)[0].shape
    torch.Size([1, 2, 3, 4])
    """
    with sdpa_kernel(SDPBackend.MATH):
        yield


_depth = 0


@contextmanager
def _entered() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def inside_frozen() -> bool:
    """Return whether a :class:`Frozen` is being called.

    Examples
    --------
    >>> class Asks(nn.Module):
    ...     def forward(self, x):
    ...         return x + inside_frozen()
    >>> Asks()(torch.zeros(1)), Frozen(Asks())(torch.zeros(1))
    (tensor([0.]), tensor([1.]))
    """
    return _depth > 0


class Frozen(nn.Module):
    """A module that is never trained.

    Its parameters require no gradient, and it is always in evaluation mode, whatever the mode of
    its parent. Gradients flow through it to its inputs.

    Stacked clients share it: under one level of ``torch.func.vmap`` their samples form one batch,
    ``[clients, samples, ...]`` becomes ``[clients * samples, ...]``, and autograd records an
    ordinary call. Inside any other combination of transforms, such as a loss that uses
    ``torch.func.grad``, the module is called directly, with plain attention (see
    :func:`plain_attention`).

    Parameters
    ----------
    module : nn.Module
        A function of a batch that treats samples independently. It takes tensors with the samples
        along their first axis, and returns such a tensor or a tuple of them.

    Attributes
    ----------
    dtype : torch.dtype
        The type of the output if no input has a floating point type. It is the original type of the
        module. ``to`` changes it, but :meth:`lower` does not.

    Examples
    --------
    >>> frozen = Frozen(nn.Linear(4, 3))
    >>> any(p.requires_grad for p in frozen.parameters())
    False
    >>> torch.func.vmap(frozen)(torch.zeros(5, 2, 4)).shape
    torch.Size([5, 2, 3])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.requires_grad_(False).eval()
        for layer in module.modules():
            # Some layers are faster with weights that are never trained.
            if hasattr(layer, "constant"):
                layer.constant = True  # type: ignore[assignment]
        self.dtype = self._type_inside() or torch.get_default_dtype()
        self.training = False

    def train(self, mode: bool = True) -> Frozen:
        """Do nothing: a frozen module is always in evaluation mode.

        Examples
        --------
        >>> Frozen(nn.Dropout(0.5)).train().module.training
        False
        """
        return self

    def lower(self, dtype: torch.dtype) -> Frozen:
        """Convert the module to another floating point type, such as ``torch.bfloat16``.

        Floating point inputs are cast to it, and outputs are cast back to the type of the first
        such input. Without one, as for images in bytes, outputs have the type ``self.dtype``.

        Parameters
        ----------
        dtype : torch.dtype
            A floating point type.

        Returns
        -------
        Frozen
            The same object.

        Examples
        --------
        >>> Frozen(nn.Linear(4, 3)).lower(torch.bfloat16)(torch.zeros(2, 4)).dtype
        torch.float32
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(
                f"a frozen module cannot be lowered to {dtype!r}; valid: floating point types such "
                "as torch.bfloat16"
            )
        self.module.to(dtype)
        return self

    def forward(self, *inputs: Tensor, **named: Tensor) -> Output:
        """Call the module.

        Parameters
        ----------
        *inputs, **named : Tensor
            The inputs of the module, samples first.

        Returns
        -------
        Tensor or tuple of Tensor
            The outputs of the module.

        Examples
        --------
        >>> Frozen(nn.Bilinear(2, 2, 1))(torch.zeros(3, 2), input2=torch.zeros(3, 2)).shape
        torch.Size([3, 1])
        """
        stack = transforms()
        if not stack:
            return self._call(*inputs, **named)
        # If the module's own tensors are stacked by client, clients cannot share a batch.
        own = any(_functorch.is_functorch_wrapped_tensor(tensor) for tensor in self._tensors())
        if stack != [_functorch.TransformType.Vmap] or own:
            with plain_attention():
                return self._call(*inputs, **named)
        if not any(_functorch.is_batchedtensor(tensor) for tensor in chain(inputs, named.values())):
            return self._call(*inputs, **named)
        folded: Output = _Fold.apply(self._call, tuple(named), *inputs, *named.values())
        return folded

    def _call(self, *inputs: Tensor, **named: Tensor) -> Output:
        """Call the module with inputs cast to its type, and cast the outputs back."""
        floating = (
            tensor.dtype for tensor in chain(inputs, named.values()) if tensor.is_floating_point()
        )
        given, inside = next(floating, self.dtype), self._type_inside()
        with _entered():
            made = self.module(
                *(_cast(tensor, inside) for tensor in inputs),
                **{name: _cast(tensor, inside) for name, tensor in named.items()},
            )
        return (
            _cast(made, given)
            if isinstance(made, Tensor)
            else tuple(_cast(tensor, given) for tensor in made)
        )

    def _tensors(self) -> Iterator[Tensor]:
        return chain(self.module.parameters(), self.module.buffers())

    def _type_inside(self) -> torch.dtype | None:
        return next(
            (tensor.dtype for tensor in self._tensors() if tensor.is_floating_point()), None
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **options: Any) -> Frozen:
        """Apply ``to``, ``double`` and similar conversions, which all call this method."""
        super()._apply(fn, *args, **options)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self


class _Fold(torch.autograd.Function):
    """A call of a function with the samples of all clients in one batch.

    Only the ``vmap`` rule is used. Inside it, tensors are ordinary, so autograd records the
    operations and no gradient needs to be defined here.
    """

    @staticmethod
    def forward(*_: Any) -> Any:
        raise NotImplementedError("a frozen module is folded under vmap only")

    @staticmethod
    def setup_context(*_: Any) -> None:
        """Do nothing; PyTorch requires this method for a ``vmap`` rule."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        call: Callable[..., Output],
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> tuple[Output, Any]:
        clients = info.batch_size
        stacked = [
            tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[2:], strict=True)
        ]
        samples = stacked[0].shape[1]
        flat = [tensor.flatten(0, 1) for tensor in stacked]
        positional = len(flat) - len(names)
        made = call(*flat[:positional], **dict(zip(names, flat[positional:], strict=True)))
        if isinstance(made, Tensor):
            return made.unflatten(0, (clients, samples)), 0
        return tuple(tensor.unflatten(0, (clients, samples)) for tensor in made), (0,) * len(made)


def transforms() -> list[Any]:
    """List the kinds of the active transforms of ``torch.func``, outermost first.

    PyTorch has no public function for this. Only this place uses its internals for it, which are
    the same from version 2.6 on.

    Examples
    --------
    >>> transforms()
    []
    >>> torch.func.vmap(lambda x: x * len(transforms()))(torch.ones(2))
    tensor([1., 1.])
    """
    return [interpreter.key() for interpreter in _functorch.get_interpreter_stack() or ()]


def transform_level() -> int:
    """Return the number of active transforms of ``torch.func``.

    Examples
    --------
    >>> transform_level()
    0
    """
    return _functorch.maybe_current_level() or 0


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Return the names of all parameters and buffers inside a :class:`Frozen`.

    Parameters
    ----------
    module : nn.Module
        A model.

    Returns
    -------
    frozenset of str
        Dotted names, as in ``named_parameters`` and ``named_buffers``. A tensor that is used in
        several places has a name for each.

    Examples
    --------
    >>> sorted(frozen_names(nn.Sequential(Frozen(nn.Linear(2, 2)), nn.Linear(2, 1))))
    ['0.module.bias', '0.module.weight']
    """
    return frozenset(
        f"{path}.{name}" if path else name
        for path, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, Frozen)
        for name, _ in _named_tensors(part)
    )


def digest_of(module: nn.Module) -> str:
    """Return a hash of the names, types, shapes and values of all parameters and buffers.

    Examples
    --------
    >>> digest_of(nn.Flatten()) == digest_of(nn.Identity())
    True
    """
    return digest(dict(_named_tensors(module)))


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert a floating point tensor to a type, unless it is None."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def lower_frozen(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the :class:`Frozen` modules of a model to a type of lower precision.

    Examples
    --------
    >>> model = nn.Sequential(Frozen(nn.Linear(2, 2)), nn.Linear(2, 2))
    >>> lower_frozen(model, torch.bfloat16)
    >>> [parameter.dtype for parameter in model.parameters()][1:3]
    [torch.bfloat16, torch.float32]
    """
    lowered = [layer for layer in module.modules() if isinstance(layer, Frozen)]
    if not lowered:
        raise InputError(
            "machine.frozen lowers the precision of frozen modules, but the model has none; valid: "
            "a model with a module of the class equipoise.models.frozen.Frozen, such as "
            "vitprompts, or no machine.frozen"
        )
    for layer in lowered:
        layer.lower(dtype)
