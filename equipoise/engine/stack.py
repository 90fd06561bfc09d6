"""Clients on a leading axis, ordered so that the active ones are always the first rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from equipoise.errors import InputError
from equipoise.tree import Tree


def first_rows(tensor: Tensor, count: int) -> Tensor:
    """View the first rows of a stack; a single row loses the leading axis.

    Then it needs no ``vmap``.

    Examples
    --------
    >>> import torch
    >>> first_rows(torch.zeros(3, 2), 2).shape, first_rows(torch.zeros(3, 2), 1).shape
    (torch.Size([2, 2]), torch.Size([2]))
    """
    return tensor[0] if count == 1 else tensor[:count]


def tree_first_rows(tree: Mapping[str, Tensor], count: int) -> Tree:
    """Apply :func:`first_rows` to every tensor of a tree."""
    return {name: first_rows(tensor, count) for name, tensor in tree.items()}


def repeated(tensor: Tensor, count: int) -> Tensor:
    """Repeat a tensor for every client.

    Examples
    --------
    >>> import torch
    >>> repeated(torch.zeros(3), 2).shape
    torch.Size([2, 3])
    """
    return tensor.expand(count, *tensor.shape).clone()


def passes(
    sizes: NDArray[np.int64], together: int
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.bool_]]]:
    """Iterate over the samples of all clients, about ``together`` samples at a time.

    Parameters
    ----------
    sizes : int array
        Number of samples of each client, in non-increasing order.
    together : int
        Number of samples per pass; with fewer clients left, more samples of each.

    Yields
    ------
    tuple
        The number of clients with samples left, the positions of each client's samples, ``[active,
        width]``, and which of them are not padding. Padding repeats a client's first sample.

    Examples
    --------
    >>> for active, slots, inside in passes(np.array([3, 1]), together=4):
    ...     print(active, slots.tolist(), inside.tolist())
    2 [[0, 1], [0, 0]] [[True, True], [True, False]]
    1 [[2]] [[True]]
    """
    longest = int(sizes[0])
    begin = 0
    while begin < longest:
        active = int(np.searchsorted(-sizes, -begin, side="left"))
        slots = begin + np.arange(min(max(1, together // active), longest - begin))
        inside = slots < sizes[:active, None]
        yield active, np.where(inside, slots, 0), inside
        begin += len(slots)


def why_not_stacked(error: Exception) -> str:
    """Return an explanation why code cannot be called for many clients at once.

    Parameters
    ----------
    error : Exception
        The exception of PyTorch inside ``torch.func.vmap``.

    Examples
    --------
    >>> why_not_stacked(RuntimeError("vmap: It looks like you're calling .item() on a Tensor."))
    'it calls .item(), float() or similar, but every client has a different value'
    """
    said = " ".join(str(error).split())
    for sign, reason in _REASONS.items():
        if sign in said:
            return reason
    return f"{type(error).__name__}: {said[:300]}"


_REASONS = {
    "data-dependent control flow": "it has an if or a loop that depends on values, but every "
    "client has different values",
    ".item()": "it calls .item(), float() or similar, but every client has a different value",
    "vmap: inplace": "it changes a tensor in place that all clients share",
    "randomness error mode": "it draws random numbers, which would not be those of one client",
}


@contextmanager
def in_plain_words(what: str) -> Iterator[None]:
    """Explain PyTorch's errors about code that is called for many clients at once.

    Parameters
    ----------
    what : str
        Name of the code that is called in the context, for the message.

    Examples
    --------
    >>> with in_plain_words("the loss mine"):
    ...     raise RuntimeError("vmap: It looks like you're calling .item() on a Tensor.")
    Traceback (most recent call last):
    equipoise.errors.InputError: the loss mine cannot be called for many clients at once: it calls
    .item(), float() or similar, but every client has a different value; valid: operations on
    tensors, such as torch.where(condition, a, b) or client.seen as a factor, or machine.chunk: 1
    """
    try:
        yield
    except RuntimeError as error:
        reason = why_not_stacked(error)
        if reason not in _REASONS.values():
            raise
        raise InputError(
            f"{what} cannot be called for many clients at once: {reason}; valid: operations on "
            "tensors, such as torch.where(condition, a, b) or client.seen as a factor, or "
            "machine.chunk: 1"
        ) from error


def over_clients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function of one client for stacked clients.

    This is :func:`torch.func.vmap` over the first axis of all tensors. Arguments and results are
    tensors, None, and dictionaries, lists and tuples of these. They are taken apart here, because
    PyTorch's code for any kind of structure takes longer than the arithmetic of a small model.

    Parameters
    ----------
    function : callable
        Of one client.

    Returns
    -------
    callable
        Of stacked clients.

    Examples
    --------
    >>> import torch
    >>> scaled = over_clients(lambda params, x, mask: {"y": (params["w"] * x).sum()})
    >>> scaled({"w": torch.tensor([1.0, 2.0])}, torch.ones(2, 3), None)
    {'y': tensor([3., 6.])}
    """

    def of_all(*given: Any) -> Any:
        tensors: list[Tensor] = []
        form, answered = taken_apart(given, tensors), None

        def of_one(*own: Tensor) -> tuple[Tensor, ...]:
            nonlocal answered
            found: list[Tensor] = []
            answered = taken_apart(function(*put_together(form, iter(own))), found)
            return tuple(found)

        stacks = vmap(of_one)(*tensors)
        return put_together(answered, iter(stacks))

    return of_all


# In place of a tensor in the form of a structure.
_TENSOR = object()


def taken_apart(given: Any, tensors: list[Tensor]) -> Any:
    """Append the tensors of dictionaries, lists and tuples to a list, and return the rest.

    Examples
    --------
    >>> import torch
    >>> tensors = []
    >>> form = taken_apart({"a": torch.tensor(1), "b": (2, None)}, tensors)
    >>> tensors, put_together(form, iter([torch.tensor(3)]))
    ([tensor(1)], {'a': tensor(3), 'b': (2, None)})
    """
    if isinstance(given, Tensor):
        tensors.append(given)
        return _TENSOR
    if isinstance(given, dict):
        return {name: taken_apart(value, tensors) for name, value in given.items()}
    if isinstance(given, (list, tuple)):
        return _like(given, [taken_apart(value, tensors) for value in given])
    return given


def put_together(form: Any, tensors: Iterator[Tensor]) -> Any:
    """Return what :func:`taken_apart` took apart, with other tensors."""
    if form is _TENSOR:
        return next(tensors)
    if isinstance(form, dict):
        return {name: put_together(value, tensors) for name, value in form.items()}
    if isinstance(form, (list, tuple)):
        return _like(form, [put_together(value, tensors) for value in form])
    return form


def _like(given: list[Any] | tuple[Any, ...], values: list[Any]) -> Any:
    """Return values in the kind of sequence that was given."""
    return getattr(type(given), "_make", type(given))(values)
