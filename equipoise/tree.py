"""Trees: the parameters and buffers of a model as a flat dictionary from dotted names to tensors.

A *part* is named by a prefix: ``features``, ``head``, ``personal.head``. ``all`` means every part
of the shared model, ``batchnorm`` the parameters and statistics of its BatchNorm layers, wherever
they are. Parts below ``personal`` are a client's own copies of the part of the same name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from equipoise.errors import NAME_THE_HEAD, InputError, unknown
from equipoise.host_copy import HostCopy

Tree = dict[str, Tensor]
Parts = str | tuple[str, ...]

PERSONAL = "personal."
BATCHNORM = "batchnorm"
_STATISTIC = ".running_mean"


def in_parts(name: str, parts: Parts) -> bool:
    """Return whether the name of a tensor is in one of the parts.

    The part ``batchnorm`` cannot be tested here: it depends on the names of other tensors.

    Examples
    --------
    >>> in_parts("head.weight", "head"), in_parts("header.weight", "head")
    (True, False)
    >>> in_parts("personal.head.weight", "all")
    False
    """
    if not isinstance(parts, str):
        return any(in_parts(name, part) for part in parts)
    if parts == "all":
        return not name.startswith(PERSONAL)
    return name == parts or name.startswith(parts + ".")


def select(names: Iterable[str], parts: Parts) -> list[str]:
    """Return the names that are in the parts, in their order. Empty parts are refused.

    Examples
    --------
    >>> select(["features.weight", "head.weight", "head.bias"], "head")
    ['head.weight', 'head.bias']
    >>> select(["features.0.weight", "features.1.weight", "features.1.running_mean"], "batchnorm")
    ['features.1.weight', 'features.1.running_mean']
    """
    names = list(names)
    chosen: set[str] = set()
    for part in (parts,) if isinstance(parts, str) else parts:
        if part.removeprefix(PERSONAL) == BATCHNORM:
            found = _batchnorm(names, part)
        else:
            found = [name for name in names if in_parts(name, part)]
        if not found and part in ("features", "head"):
            raise InputError(
                f"the method uses the part {part!r}, but the model has no trainable tensors there; "
                "valid: a model that has, such as mlp or cnn2, or, for a model of your own, "
                f"{NAME_THE_HEAD}"
            )
        if not found and part != "all":
            roots = {
                ".".join(name.split(".")[: 2 if name.startswith(PERSONAL) else 1]) for name in names
            }
            raise unknown("part", part, {"all", *roots}, where="the method")
        chosen.update(found)
    return [name for name in names if name in chosen]


def _batchnorm(names: list[str], part: str) -> list[str]:
    """Return the names of the tensors of every BatchNorm layer."""
    layers = {name.removesuffix(_STATISTIC) for name in names if name.endswith(_STATISTIC)}
    within = [name for name in names if name.startswith(PERSONAL) == part.startswith(PERSONAL)]
    found = [name for name in within if name.rpartition(".")[0] in layers]
    if not found:
        raise InputError(
            f"the method uses the part {part!r}, but the model has no BatchNorm layer with "
            "running statistics; valid: a model that has, such as bncnn or resnet18"
        )
    return found


def tree_map(
    function: Callable[..., Tensor], first: Mapping[str, Tensor], *others: Mapping[str, Tensor]
) -> Tree:
    """Apply a function to the tensors of each name.

    Examples
    --------
    >>> tree_map(torch.add, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([2., 2.])}
    """
    return {
        name: function(tensor, *(other[name] for other in others)) for name, tensor in first.items()
    }


def flat_rows(stack: Tensor) -> Tensor:
    """View a stacked tensor as a matrix with one row per client.

    Examples
    --------
    >>> flat_rows(torch.zeros(3, 2, 4)).shape, flat_rows(torch.zeros(3)).shape
    (torch.Size([3, 8]), torch.Size([3, 1]))
    """
    return stack.reshape(len(stack), math.prod(stack.shape[1:]))


# How many numbers of all clients are processed at a time: few enough for the cache of a CPU, or
# enough to use all of a GPU.
_PIECE = {"cpu": 1 << 18, "cuda": 1 << 27}


def pieces(rows: Tensor, clients: int | None = None) -> Sequence[Tensor]:
    """Divide a matrix with a row per client into blocks of columns.

    The blocks are so small that a copy in float64 fits into the cache.

    Parameters
    ----------
    rows : Tensor
        The matrix.
    clients : int, optional
        How many of its rows are copied. By default all of them.

    Examples
    --------
    >>> [piece.shape for piece in pieces(torch.zeros(2, 1 << 18))]
    [torch.Size([2, 131072]), torch.Size([2, 131072])]
    >>> [piece.shape for piece in pieces(torch.zeros(2, 1 << 18), clients=1)]
    [torch.Size([2, 262144])]
    >>> [piece.shape for piece in pieces(torch.zeros(3, 0))]
    [torch.Size([3, 0])]
    """
    copied = max(1, len(rows) if clients is None else clients)
    columns = max(1, _PIECE[rows.device.type] // copied)
    return (rows,) if rows.shape[1] <= columns else rows.split(columns, dim=1)


def norms(tensors: Sequence[Tensor], *, stacked: bool) -> Tensor:
    """Return the L2 norm of all tensors together, or of each client if they are stacked.

    Examples
    --------
    >>> norms([torch.tensor([3.0]), torch.tensor(4.0)], stacked=False)
    tensor(5.)
    >>> norms([torch.tensor([[3.0], [0.0]]), torch.tensor([4.0, 2.0])], stacked=True)
    tensor([5., 2.])
    """
    squares = [
        t.square().flatten(1).sum(1) if stacked and t.dim() > 1 else t.square() for t in tensors
    ]
    return torch.stack([square if stacked else square.sum() for square in squares]).sum(0).sqrt()


def scaled(tensors: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Multiply tensors by a number, or stacked tensors by one number per client.

    Examples
    --------
    >>> scaled([torch.ones(2, 2)], torch.tensor([2.0, 3.0]))
    [tensor([[2., 2.],
            [3., 3.]])]
    """
    return [t * factor.view(factor.shape + (1,) * (t.dim() - factor.dim())) for t in tensors]


# No parameter, statistic or upload of a working model is larger. A single larger update would make
# the models of all clients overflow in the next round.
LARGEST = 1e12


def unusable_rows(stack: Tensor) -> Tensor:
    """Return which rows of a stacked tensor have NaN, infinity or a number beyond :data:`LARGEST`.

    Examples
    --------
    >>> unusable_rows(torch.tensor([[1.0, 2.0], [1e30, 0.0], [0.0, torch.nan]]))
    tensor([False,  True,  True])
    """
    rows = flat_rows(stack)
    if not rows.numel() or not rows.is_floating_point():
        return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    if rows.element_size() == 1:
        rows = rows.float()
    return ~((rows.amin(dim=1) >= -LARGEST) & (rows.amax(dim=1) <= LARGEST))


class Magnitudes:
    """The L2 norms of tensors, launched now and read later.

    There are few operations, and one transfer for all tensors of a type. A norm is finite only if
    all numbers of the tensor are, because no square is negative. It may be infinite although all
    numbers are finite, if their squares overflow. Tensors of integers and booleans have norm 0.

    Parameters
    ----------
    tensors : iterable of Tensor
        Of any types, on any devices.

    Examples
    --------
    >>> norms = Magnitudes([torch.tensor([3.0, 4.0]), torch.tensor([1.0, torch.nan])])
    >>> norms.read()
    [5.0, nan]
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self._count = len(tensors)
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.is_floating_point() or tensor.is_complex():
                alike.setdefault((tensor.device, tensor.dtype), []).append(index)
        self._launched: list[tuple[list[int], HostCopy]] = []
        for (_, dtype), where in alike.items():
            chosen = [tensors[index].detach() for index in where]
            if dtype.itemsize == 1:
                chosen = [tensor.float() for tensor in chosen]
            norms = torch.stack(torch._foreach_norm(chosen))
            self._launched.append((where, HostCopy(norms)))

    def read(self) -> list[float]:
        """Wait for the norms, and return them in the order of the tensors."""
        found = [0.0] * self._count
        for where, norms in self._launched:
            for index, norm in zip(where, norms.read().tolist(), strict=True):
                found[index] = norm
        return found


def unusable(
    trees: Iterable[Mapping[str, Tensor]],
    received: Mapping[str, Tensor],
    norms: Magnitudes | None = None,
) -> dict[int, str]:
    """Return the clients whose tensors cannot be used, with the reason.

    Parameters
    ----------
    trees : iterable of Tree
        What clients sent, stacked.
    received : Tree
        What they received. A tensor that already contained such numbers, such as a mask of −∞, may
        contain them again.
    norms : Magnitudes, optional
        The norms of all tensors of ``trees`` in their order, if they have been launched already.

    Returns
    -------
    dict of int to str
        The reason, by the client's position in the stack.

    Examples
    --------
    >>> sent = {"w": torch.tensor([[1.0], [1e30], [torch.inf]])}
    >>> unusable([sent], {"w": torch.zeros(1)})
    {1: 'answered with a number beyond 1e+12 in w', 2: 'answered with NaN or infinity in w'}
    """
    found: dict[int, str] = {}
    stacks = [pair for tree in trees for pair in tree.items()]
    norms = norms or Magnitudes(stack for _, stack in stacks)
    for (name, stack), norm in zip(stacks, norms.read(), strict=True):
        # No number is larger than the norm, except for rounding. The norm may be NaN.
        if norm <= LARGEST / 2:
            continue
        rows = unusable_rows(stack)
        if not bool(rows.any()) or (
            name in received and bool(unusable_rows(received[name].unsqueeze(0)).any())
        ):
            continue
        for client in rows.nonzero().flatten().tolist():
            finite = bool(torch.isfinite(stack[client]).all())
            what = f"a number beyond {LARGEST:g}" if finite else "NaN or infinity"
            found.setdefault(client, f"answered with {what} in {name}")
    return dict(sorted(found.items()))


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Sum the squared differences over the names of ``a``.

    Examples
    --------
    >>> squared_distance({"w": torch.tensor([1.0, 2.0])}, {"w": torch.zeros(2)})
    tensor(5.)
    """
    return torch.stack([(value - b[name]).square().sum() for name, value in a.items()]).sum()


def inner_product(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Sum the products over the names of ``a``.

    Examples
    --------
    >>> inner_product({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 1.0])})
    tensor(5.)
    """
    return torch.stack([(value * b[name]).sum() for name, value in a.items()]).sum()


def size_in_bytes(tree: object) -> int:
    """Count the bytes of all tensors in a nested structure of dictionaries, lists and tuples.

    Examples
    --------
    >>> size_in_bytes({"model": {"w": torch.zeros(3)}, "ids": [torch.zeros(2)]})
    20
    """
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(size_in_bytes(value) for value in tree.values())
    if isinstance(tree, (list, tuple)):
        return sum(size_in_bytes(value) for value in tree)
    return 0


def digest(tree: Mapping[str, Tensor]) -> str:
    """Hash tensors, their names and their types.

    Examples
    --------
    >>> one = {"w": torch.zeros(1)}
    >>> digest(one) == digest({"w": torch.zeros(1)}), digest(one) == digest({})
    (True, False)
    """
    hashed = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tree.items()):
        hashed.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        if tensor.numel():
            hashed.update(
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
    return hashed.hexdigest()
