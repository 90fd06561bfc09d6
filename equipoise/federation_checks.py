"""The checks of a federation when it is created, and the values that they complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from equipoise import checks, tasks
from equipoise.arrays import Ints, whole_numbers
from equipoise.errors import InputError, few, unknown
from equipoise.samples import Samples, blocks, kind_of
from equipoise.splits import SPLITS, first_holder

if TYPE_CHECKING:
    from equipoise.federation import Federation

SERVER_SPLITS = ("val", "test")


def check_samples(federation: Federation) -> None:
    """Refuse samples and targets that are no tensors, differ in number or are not finite."""
    if not isinstance(federation.x, Tensor | Samples) or len(federation.x.shape) == 0:
        raise InputError(
            "Federation.x must be a tensor (or equipoise.samples.Samples) with one row per "
            f"sample, not {kind_of(federation.x)}"
        )
    if not isinstance(federation.y, Tensor) or federation.y.ndim == 0:
        raise InputError(
            f"Federation.y must be a tensor with one row per sample, not {kind_of(federation.y)}"
        )
    if len(federation.x) != len(federation.y):
        raise InputError(
            f"x and y must have one row per sample; x has {len(federation.x)} rows, y has "
            f"{len(federation.y)}"
        )
    _check_finite(federation)


def _check_finite(federation: Federation) -> None:
    if not federation.x.dtype.is_floating_point:
        return
    for first, block in blocks(federation.x):
        finite = torch.isfinite(block)
        if not bool(finite.all()):
            sample = first + int((~finite).nonzero()[0, 0])
            raise InputError(
                f"{whose(federation, sample)} has NaN or infinity in x; all values must be finite"
            )


def checked_classes(federation: Federation) -> int | None:
    """Return the number of classes, and refuse targets that the task does not allow."""
    task = tasks.build(federation.task)
    task.check(federation.y, federation.shape)
    classes = task.number_of_classes(federation.y, federation.classes)
    if fault := task.fault(federation.y, classes):
        sample, reason = fault
        raise InputError(f"{whose(federation, sample)} {reason}")
    return classes


def odd_labels(labels: Tensor) -> tuple[str, str] | None:
    """Return what is odd about labels that are probably a mistake, and what to do instead.

    The model has an output for every class from 0 to the largest label. With a single class there
    is nothing to learn.

    Examples
    --------
    >>> odd_labels(torch.tensor([1, 2, 3]))
    ('labels from 1 to 3, and labels count from 0', 'subtract 1 from them')
    >>> odd_labels(torch.tensor([0, 0]))
    ('the label 0 only, and one class leaves nothing to learn', 'use labels of two classes or more')
    """
    if labels.dim() != 1 or not len(labels):
        return None
    found = labels.unique()
    first, last = int(found[0]), int(found[-1])
    if first == last:
        return (
            f"the label {first} only, and one class leaves nothing to learn",
            "use labels of two classes or more",
        )
    if 2 * len(found) < last - first + 1:
        return (
            f"{len(found)} different labels from {first} to {last}, and labels count from 0",
            "use numpy.unique(y, return_inverse=True)[1]",
        )
    if first > 0:
        return (
            f"labels from {first} to {last}, and labels count from 0",
            f"subtract {first} from them",
        )
    return None


def checked_class_names(federation: Federation) -> tuple[str, ...] | None:
    """Return the names of the classes, if there are any. There must be one per class."""
    names = federation.class_names
    if names is None:
        return None
    if federation.classes is None:
        raise InputError(
            f"class_names of federation {federation.name!r} are not valid for a "
            f"{federation.task}; leave them out"
        )
    if (
        isinstance(names, str)
        or len(names) != federation.classes
        or not all(isinstance(name, str) for name in names)
    ):
        raise InputError(
            f"class_names must be {federation.classes} names, one per class, not {names!r}"
        )
    return tuple(names)


def check_clients(federation: Federation) -> None:
    """Refuse invalid names and groups, and parts that differ in their number of clients."""
    clients = {name: federation.split(name).clients for name in SPLITS} | {
        "unseen": len(federation.unseen)
    }
    if federation.client_names is not None:
        clients["client_names"] = len(federation.client_names)
    for part, found in clients.items():
        if found != federation.clients:
            raise InputError(
                f"{part} has {found} clients, groups has {federation.clients}; they must agree"
            )
    for what, names in (
        ("the name of a client", federation.client_names),
        ("the name of a group", federation.group_names),
    ):
        for name in names or ():
            checks.name(name, what)
    if len(set(federation.group_names)) != len(federation.group_names):
        raise InputError(f"group_names must all differ, not {few(federation.group_names)}")
    lost = np.flatnonzero(
        (federation.groups < 0) | (federation.groups >= len(federation.group_names))
    )
    if lost.size:
        raise InputError(
            f"{_who(federation, lost[0])} has group {federation.groups[lost[0]]}; valid: 0 to "
            f"{len(federation.group_names) - 1}, positions in group_names"
        )
    if not federation.clients:
        raise InputError("the federation has no clients; valid: at least one client with samples")
    if not federation.seen.size:
        raise InputError(f"all {federation.clients} clients are unseen; at least one must be seen")


def check_splits(federation: Federation) -> None:
    """Refuse samples that do not exist or are in two splits, and clients without training data."""
    used = {}
    for name in SPLITS:
        split = federation.split(name)
        outside = np.flatnonzero((split.indices < 0) | (split.indices >= len(federation.x)))
        if outside.size:
            client = np.searchsorted(split.offsets, outside[0], side="right") - 1
            raise InputError(
                f"{name} split of {_who(federation, client)} has sample "
                f"{split.indices[outside[0]]}; valid: 0 to {len(federation.x) - 1}"
            )
        used[name] = np.zeros(len(federation.x), bool)
        used[name][split.indices] = True
    for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
        shared = np.flatnonzero(used[one] & used[other])
        if shared.size:
            first, second = (
                _who(federation, first_holder(federation.split(name), shared[0]))
                for name in (one, other)
            )
            raise InputError(
                f"sample {shared[0]} is in the {one} split of {first} and in the {other} split "
                f"of {second}; a sample may be in only one of train, val and test"
            )
    idle = np.flatnonzero((federation.train.sizes == 0) & ~federation.unseen)
    if idle.size:
        raise InputError(
            f"{_who(federation, idle[0])} has no training samples; add one or make the client "
            "unseen"
        )


def checked_server(federation: Federation) -> Mapping[str, Ints]:
    """Return the samples of the server. They must not be used for training or in two splits."""
    if not federation.server:
        return federation.server
    used = {name: np.unique(federation.split(name).indices) for name in SPLITS}
    checked: dict[str, Ints] = {}
    for name, positions in federation.server.items():
        if name not in SERVER_SPLITS:
            raise unknown("split", name, SERVER_SPLITS, where="Federation.server")
        own = whole_numbers(positions, f"Federation.server[{name!r}]")
        if not own.size or own.min() < 0 or own.max() >= len(federation.x):
            raise InputError(
                f"Federation.server[{name!r}] must have samples from 0 to {len(federation.x) - 1}"
            )
        # Test samples of clients may also be test samples of the server.
        for split in SPLITS if name == "val" else ("train", "val"):
            if (shared := np.intersect1d(own, used[split])).size:
                holder = first_holder(federation.split(split), shared[0])
                raise InputError(
                    f"sample {shared[0]} is in the {split} split of {_who(federation, holder)} and "
                    f"a {name} sample of the server; it may be only one of them"
                )
        checked[name] = own
    if len(checked) == 2 and (both := np.intersect1d(checked["val"], checked["test"])).size:
        raise InputError(
            f"sample {both[0]} is a val and a test sample of the server; it may be only one of them"
        )
    return checked


def _who(federation: Federation, client: int | np.integer[Any]) -> str:
    named = federation.client_names is not None and client < len(federation.client_names)
    return f"client {client}" + (f" ({federation.client_name(int(client))!r})" if named else "")


def whose(federation: Federation, sample: int) -> str:
    """Describe a sample by its position in x, and by the client that holds it."""
    for split in map(federation.split, SPLITS):
        if sample in split.indices:
            return f"sample {sample} of {_who(federation, first_holder(split, sample))}"
    return f"sample {sample}"
