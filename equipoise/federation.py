"""The federation: clients, their groups and samples, and clients held out as unseen."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from equipoise import checks, tasks
from equipoise.arrays import refuse_missing_ids, tensor_of
from equipoise.attributes import Attribute, Given, attributes_from
from equipoise.checks import count
from equipoise.errors import InputError, unknown
from equipoise.samples import Samples, blocks, kind_of

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SPLITS = ("train", "val", "test")
SERVER_SPLITS = ("val", "test")


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of each client, in compressed rows: two arrays for any number of clients.

    Parameters
    ----------
    indices : int array of shape [M]
        Positions in ``Federation.x``, client after client.
    offsets : int array of shape [K + 1]
        Client ``k`` holds ``indices[offsets[k]:offsets[k + 1]]``.

    Examples
    --------
    >>> split = Split.from_lists([[4, 2], [], [7]])
    >>> split.sizes.tolist(), split.of(0).tolist()
    ([2, 0, 1], [4, 2])
    """

    indices: Ints
    offsets: Ints

    def __post_init__(self) -> None:
        """Refuse invalid arrays."""
        for part in ("indices", "offsets"):
            object.__setattr__(self, part, _whole_numbers(getattr(self, part), f"Split.{part}"))
        if not len(self.offsets) or self.offsets[0] != 0 or self.offsets[-1] != len(self.indices):
            raise InputError(
                f"Split.offsets must start at 0 and end at {len(self.indices)}, the number of "
                f"indices; got {_few(self.offsets.tolist())}"
            )
        if (falls := np.flatnonzero(np.diff(self.offsets) < 0)).size:
            raise InputError(f"Split.offsets must not decrease, but do at client {falls[0]}")

    @classmethod
    def from_lists(cls, lists: Iterable[ArrayLike]) -> Split:
        """Build a split from one list of sample positions per client.

        Parameters
        ----------
        lists : iterable of int array-likes
            The positions of the samples of client 0, of client 1, and so on.

        Returns
        -------
        Split
            The split.

        Examples
        --------
        >>> Split.from_lists([[1], [0, 2]]).offsets.tolist()
        [0, 1, 3]
        """
        rows = [
            _whole_numbers(row, f"samples of client {client}") for client, row in enumerate(lists)
        ]
        return cls(
            np.concatenate([np.empty(0, np.int64), *rows]), _offsets([len(row) for row in rows])
        )

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Ints:
        """Number of samples of every client, [K]."""
        return np.diff(self.offsets)

    @cached_property
    def repeats(self) -> bool:
        """Whether a sample occurs more than once."""
        return bool(len(self.indices)) and int(np.bincount(self.indices).max()) > 1

    @cached_property
    def alike(self) -> Ints:
        """The first client that holds the same samples in the same order as each client, [K].

        Examples
        --------
        >>> Split.from_lists([[4, 2], [2, 4], [4, 2]]).alike.tolist()
        [0, 1, 0]
        """
        if not self.repeats:
            return np.arange(self.clients)
        first: dict[bytes, int] = {}
        return np.array(
            [first.setdefault(self.of(k).tobytes(), k) for k in range(self.clients)], np.int64
        )

    @property
    def holders(self) -> Ints:
        """The client that holds each of ``indices``, [M]."""
        return np.repeat(np.arange(self.clients), self.sizes)

    def of(self, client: int) -> Ints:
        """Return the positions of the samples of one client.

        Parameters
        ----------
        client : int
            The client's number, from 0.

        Returns
        -------
        int array
            Positions in ``Federation.x`` (a view, not a copy).

        Examples
        --------
        >>> Split.from_lists([[1], [0, 2]]).of(1).tolist()
        [0, 2]
        """
        if not 0 <= client < self.clients:
            raise InputError(f"client {client} does not exist; valid: 0 to {self.clients - 1}")
        return self.indices[self.offsets[client] : self.offsets[client + 1]]


@dataclass(frozen=True, eq=False)
class Federation:
    """The data: clients, their groups, their train/val/test splits, and unseen clients.

    Everything is checked on construction, so a federation is always valid: values are finite,
    labels are in range, every seen client has training samples, and no sample is in two of train,
    val and test, not even of different clients. Several clients may share a sample within the same
    split.

    Parameters
    ----------
    x : Tensor or Samples of shape [N, ...]
        All samples of all clients: a tensor, or an object that reads them from disk when they are
        needed (:class:`~equipoise.samples.Samples`).
    y : Tensor
        What the task needs: int64 labels [N] for classification, floating point targets [N] or [N,
        d] for regression, masks [N, height, width] for segmentation.
    train, val, test : Split
        Which client holds which samples.
    groups : int array of shape [K]
        Every client's group, as a position in ``group_names``.
    group_names : tuple of str
        Names of the groups.
    unseen : bool array of shape [K]
        Clients that are held out of training and only evaluated.
    task : str
        The task: a name from :func:`equipoise.tasks.names`.
    classes : int, optional
        Number of classes; one more than the largest label by default. None for tasks without
        classes.
    name : str
        The name of the federation in tables and messages.
    client_names : tuple of str, optional
        Names of the clients.
    class_names : tuple of str, optional
        Names of the classes, for models that read them.
    attributes : mapping of str to Attribute or array of shape [N], optional
        Properties of samples, such as the sex of a person: the value of every sample, by the name
        of the attribute. Results are reported by value; see :mod:`equipoise.parity`. Training does
        not use them.
    server : mapping of str to int array
        The samples of the server, as positions in ``x``: ``val``, ``test`` or both. They are never
        used for training. The server evaluates the global model on them; see
        :class:`~equipoise.run.evaluation.Evaluation`.

    Examples
    --------
    >>> x, y = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> federation = Federation.from_arrays(x, y, clients=["ann"] * 3 + ["bob"] * 3)
    >>> federation.clients, federation.train.sizes.tolist(), federation.client_name(1)
    (2, [1, 1], 'bob')
    >>> federation
    <Federation 'custom': classification with 2 classes; 2 clients in 1 group (all);
    6 samples of shape (2,): 2 train, 2 val, 2 test>
    """

    x: Tensor | Samples
    y: Tensor
    train: Split
    val: Split
    test: Split
    groups: Ints
    group_names: tuple[str, ...]
    unseen: Bools
    task: str = "classification"
    classes: int | None = None
    name: str = "custom"
    client_names: tuple[str, ...] | None = None
    class_names: tuple[str, ...] | None = None
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    server: Mapping[str, Ints] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check all values."""
        object.__setattr__(self, "groups", _whole_numbers(self.groups, "Federation.groups"))
        object.__setattr__(self, "unseen", np.asarray(self.unseen, dtype=bool))
        object.__setattr__(self, "group_names", tuple(self.group_names))
        self._check_samples()
        self._check_targets()
        self._check_class_names()
        self._check_clients()
        self._check_splits()
        where = f"federation {self.name!r}"
        object.__setattr__(self, "attributes", attributes_from(self.attributes, len(self.y), where))
        self._check_server()

    @classmethod
    def from_arrays(
        cls,
        x: ArrayLike | Tensor | Samples,
        y: ArrayLike | Tensor,
        *,
        clients: Sequence[Hashable] | NDArray[Any] | Tensor,
        groups: Mapping[Any, str] | None = None,
        splits: tuple[float, float, float] = (0.7, 0.1, 0.2),
        unseen: Iterable[Hashable] = (),
        classes: int | None = None,
        task: str = "classification",
        seed: int = 0,
        name: str = "custom",
        class_names: Sequence[str] | None = None,
        attributes: Given | None = None,
        server: Mapping[str, tuple[ArrayLike | Tensor, ArrayLike | Tensor]] | None = None,
    ) -> Federation:
        """Build a federation from samples and the client of each sample.

        Clients are numbered in the order in which they first appear. The shuffle of a client's
        samples depends on the seed and the client's id only, so adding a client does not change the
        others.

        Parameters
        ----------
        x, y : array-like or Tensor
            Samples and labels (or targets), one row per sample. Tensors keep their type; other
            floating point arrays take torch's default type. ``x`` may also be
            :class:`~equipoise.samples.Samples`.
        clients : sequence of hashables of length N
            The id of the client of each sample. The ids as text are the names of clients, so the
            texts must differ, too.
        groups : mapping of client to str, optional
            The group of each client, without other clients; one group named ``"all"`` by default.
        splits : tuple of three floats
            Shares of train, val and test, summing to 1. Every client has at least one training
            sample, and with three samples or more at least one in each split with a positive share.
        unseen : iterable of clients
            Clients to hold out of training. A string is one client.
        classes : int, optional
            Number of classes; one more than the largest label by default.
        task : str
            What ``y`` means: a name from :func:`equipoise.tasks.names`.
        seed : int
            Seed of the division into splits.
        name : str
            The name of the federation.
        class_names : sequence of str, optional
            Names of the classes.
        attributes : mapping of str to sequence of length N, optional
            Properties of samples, such as ``{"sex": ["Female", "Male", ...]}``. Results are
            reported by value.
        server : mapping of str to (x, y), optional
            Samples of the server: ``val``, ``test`` or both.

        Returns
        -------
        Federation
            Ready for training.

        Examples
        --------
        >>> x, y = np.zeros((10, 3)), np.zeros(10, int)
        >>> federation = Federation.from_arrays(x, y, clients=[7] * 10, splits=(0.6, 0.2, 0.2))
        >>> [federation.split(name).sizes.tolist() for name in ("train", "val", "test")]
        [[6], [2], [2]]
        """
        samples: Tensor | Samples = x if isinstance(x, Samples) else tensor_of(x, "x")
        targets = tasks.build(task).targets(tensor_of(y, "y"))
        if classes is None and tasks.build(task).labels:
            _warn_of_skipped_labels(targets, name)
        refuse_missing_ids(clients)
        ids, holders = _number(clients)
        _warn_of_missing_names("clients", ids, name)
        if len(holders) != len(samples):
            raise InputError(
                f"clients must name one client per sample: {len(samples)} samples, {len(holders)} "
                "names"
            )
        names = _names(ids)
        if groups is not None and (strays := [client for client in ids if client not in groups]):
            raise InputError(
                f"groups names no group for client {strays[0]!r}; it must name one for every client"
            )
        held_out = _held_out(unseen)
        for what, named in (("groups: ", groups or ()), ("unseen ", held_out)):
            if strays := sorted(set(named) - set(ids), key=str):
                raise InputError(
                    f"{what}client {strays[0]!r} has no sample; the clients are {_few(ids)}"
                )
        _warn_of_missing_names("groups", (groups or {}).values(), name)
        group_names, group_of = _number(
            ["all"] * len(ids) if groups is None else [groups[client] for client in ids]
        )
        held = Split(
            np.argsort(holders, kind="stable"), _offsets(np.bincount(holders, minlength=len(ids)))
        )
        described = attributes_from(attributes, len(samples), f"federation {name!r}")
        samples, targets, of_server = _with_server(samples, targets, server or {}, task)
        return cls(
            samples,
            targets,
            *split_samples(held, names, splits, seed),
            groups=group_of,
            group_names=tuple(str(group) for group in group_names),
            unseen=np.array([client in held_out for client in ids], bool),
            task=task,
            classes=classes,
            name=name,
            client_names=names,
            class_names=class_names,  # type: ignore[arg-type]
            # The samples of the server come last.
            attributes={
                name: attribute.padded(len(targets)) for name, attribute in described.items()
            },
            server=of_server,
        )

    @classmethod
    def from_dataset(
        cls, dataset: Any, *, clients: Sequence[Hashable] | NDArray[Any], **options: Any
    ) -> Federation:
        """Build a federation from a torch dataset whose items are ``(x, y)``.

        Parameters
        ----------
        dataset : torch.utils.data.Dataset
            A dataset with a length. Every item is a tuple or list of two, and is read once. All
            samples have the same shape.
        clients : sequence of hashables of length N
            The client of each item.
        **options
            The other options of `Federation.from_arrays`.

        Returns
        -------
        Federation
            Ready for training.

        Examples
        --------
        >>> items = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
        >>> Federation.from_dataset(items, clients=[0, 0, 0, 0]).shape
        (2,)
        """
        if not hasattr(dataset, "__len__"):
            raise InputError(
                f"dataset {type(dataset).__name__} has no length; valid: a dataset with __len__ "
                "and __getitem__"
            )
        if not len(dataset):
            raise InputError(
                f"dataset {type(dataset).__name__} is empty; a federation needs samples"
            )
        items = [dataset[position] for position in range(len(dataset))]
        for position, item in enumerate(items):
            if not isinstance(item, tuple | list) or len(item) != 2:
                length = f" of {len(item)}" if isinstance(item, tuple | list) else ""
                raise InputError(
                    f"item {position} of the dataset must be a pair (x, y), got "
                    f"{type(item).__name__}{length}"
                )
        samples, targets = (
            [tensor_of(item[part], "xy"[part]) for item in items] for part in (0, 1)
        )
        for position, sample in enumerate(samples):
            if sample.shape != samples[0].shape:
                raise InputError(
                    f"sample {position} of the dataset has shape {tuple(sample.shape)}, sample 0 "
                    f"has {tuple(samples[0].shape)}; all must have the same shape"
                )
        return cls.from_arrays(
            torch.stack(samples), torch.stack(targets), clients=clients, **options
        )

    @property
    def clients(self) -> int:
        """Number of clients, seen and unseen."""
        return len(self.groups)

    @property
    def seen(self) -> Ints:
        """Numbers of the clients that train."""
        return np.flatnonzero(~self.unseen)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def outputs(self) -> int:
        """The number of outputs of a model per sample or pixel: the classes or the targets."""
        return tasks.build(self.task).outputs(self.y, self.classes)

    @property
    def labelled(self) -> bool:
        """Whether each sample has one class."""
        return tasks.build(self.task).labels

    def split(self, name: str) -> Split:
        """Return a split by name.

        Parameters
        ----------
        name : {"train", "val", "test"}
            The name.

        Returns
        -------
        Split
            The samples of each client.

        Examples
        --------
        >>> federation = Federation.from_arrays(np.zeros((5, 1)), np.zeros(5, int), clients=[0] * 5)
        >>> federation.split("train").sizes.tolist()
        [3]
        """
        if name not in SPLITS:
            raise unknown("split", name, SPLITS)
        chosen: Split = getattr(self, name)
        return chosen

    def client_name(self, client: int) -> str:
        """Return the name of a client, or ``"client 12"`` if clients have no names.

        Parameters
        ----------
        client : int
            The client's number, from 0.

        Returns
        -------
        str
            A name for tables and messages.

        Examples
        --------
        >>> x, y = np.zeros((3, 1)), np.zeros(3, int)
        >>> Federation.from_arrays(x, y, clients=["ann"] * 3).client_name(0)
        'ann'
        """
        if not 0 <= client < self.clients:
            raise InputError(f"client {client} does not exist; valid: 0 to {self.clients - 1}")
        return f"client {client}" if self.client_names is None else self.client_names[client]

    def label_counts(self, *splits: str) -> Ints:
        """Return how many samples of each label each client has.

        Parameters
        ----------
        *splits : str
            The splits to count in; all three by default.

        Returns
        -------
        int array of shape [K, classes]
            Number of samples.

        Examples
        --------
        >>> federation = Federation.from_arrays(np.zeros((4, 1)), [0, 1, 1, 1], clients=[0] * 4)
        >>> federation.label_counts().tolist()
        [[1, 3]]
        """
        if self.classes is None or not self.labelled:
            raise InputError(
                f"federation {self.name!r} is a {self.task} and has no labels to count"
            )
        labels = self.y.cpu().numpy()
        cells = self.clients * self.classes
        counts = np.zeros(cells, np.int64)
        for split in map(self.split, splits or SPLITS):
            counts += np.bincount(
                split.holders * self.classes + labels[split.indices], minlength=cells
            )
        return counts.reshape(self.clients, self.classes)

    def pooled(self) -> Federation:
        """Return a federation with one client that has the data of all seen clients.

        Returns
        -------
        Federation
            One client in one group named ``"all"``, which has every sample once.

        Examples
        --------
        >>> x, y = np.zeros((10, 1)), np.zeros(10, int)
        >>> federation = Federation.from_arrays(x, y, clients=[0] * 5 + [1] * 5)
        >>> federation.pooled().train.sizes.tolist()
        [6]
        """
        train, val, test = (
            Split.from_lists([np.unique(self._seen_indices(name))]) for name in SPLITS
        )
        return replace(
            self,
            train=train,
            val=val,
            test=test,
            groups=np.zeros(1, np.int64),
            group_names=("all",),
            unseen=np.zeros(1, bool),
            client_names=("all",),
        )

    def fingerprint(self) -> str:
        """Return a hash of everything that training and evaluation depend on.

        It is used to refuse to resume a run with another federation.

        Returns
        -------
        str
            16 hexadecimal digits, from data, attributes, splits, groups, unseen clients and task,
            but not from names of clients. The hash of samples on disk is their stored digest, so it
            differs from that of the same samples in a tensor.

        Examples
        --------
        >>> one = Federation.from_arrays(np.zeros((5, 1)), np.zeros(5, int), clients=[0] * 5)
        >>> other = Federation.from_arrays(np.ones((5, 1)), np.zeros(5, int), clients=[0] * 5)
        >>> one.fingerprint() == one.fingerprint(), one.fingerprint() == other.fingerprint()
        (True, False)
        """
        splits = [
            part for name in SPLITS for part in (self.split(name).indices, self.split(name).offsets)
        ]
        digest = hashlib.sha256(repr((self.task, self.classes, self.group_names)).encode())
        of_server = [
            part
            for name in sorted(self.server)
            for part in (np.array([SPLITS.index(name)]), self.server[name])
        ]
        for part in (self.x, self.y, *splits, self.groups, self.unseen, *of_server):
            if isinstance(part, Samples):
                digest.update(repr((part.dtype, tuple(part.shape), part.digest)).encode())
                continue
            tensor = (
                (part if isinstance(part, Tensor) else torch.tensor(part))
                .detach()
                .cpu()
                .contiguous()
            )
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            if tensor.numel():  # torch cannot view an empty tensor as bytes
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        for name, attribute in self.attributes.items():
            digest.update(repr((name, attribute.names)).encode() + attribute.codes.tobytes())
        return digest.hexdigest()[:16]

    def describe(self) -> list[dict[str, Any]]:
        """Return a description of each client, for tables or JSON.

        Returns
        -------
        list of dict
            For each client: id, name, group, unseen, the sizes train, val and test, and for
            classification labels (the number of its samples per class).

        Examples
        --------
        >>> federation = Federation.from_arrays(np.zeros((4, 1)), [0, 1, 1, 1], clients=["ann"] * 4)
        >>> federation.describe()[0]["labels"]
        [1, 3]
        """
        sizes = {name: self.split(name).sizes.tolist() for name in SPLITS}
        rows: list[dict[str, Any]] = [
            {
                "id": client,
                "name": self.client_name(client),
                "group": self.group_names[self.groups[client]],
                "unseen": bool(self.unseen[client]),
                **{name: sizes[name][client] for name in SPLITS},
            }
            for client in range(self.clients)
        ]
        if self.labelled:
            for row, counts in zip(rows, self.label_counts().tolist(), strict=True):
                row["labels"] = counts
        return rows

    def __repr__(self) -> str:
        unseen = int(self.unseen.sum())
        groups = ", ".join(self.group_names[:8]) + (", …" if len(self.group_names) > 8 else "")
        clients = [
            f"{_counted(self.clients, 'client')} in {_counted(len(self.group_names), 'group')} "
            f"({groups})",
            *([f"{unseen} of them unseen"] if unseen else []),
        ]
        held = ", ".join(f"{len(self.split(name).indices)} {name}" for name in SPLITS)
        held += "".join(f", {len(own)} {name} of the server" for name, own in self.server.items())
        classes = f" with {self.classes} classes" if self.classes is not None else ""
        samples = f"{_counted(len(self.y), 'sample')} of shape {self.shape}: {held}"
        described = f"; attributes {', '.join(self.attributes)}" if self.attributes else ""
        return (
            f"<Federation {self.name!r}: {self.task}{classes}; {', '.join(clients)}; "
            f"{samples}{described}>"
        )

    def _seen_indices(self, name: str) -> Ints:
        split = self.split(name)
        return split.indices[~np.repeat(self.unseen, split.sizes)]

    def _check_samples(self) -> None:
        if not isinstance(self.x, Tensor | Samples) or len(self.x.shape) == 0:
            raise InputError(
                "Federation.x must be a tensor (or equipoise.samples.Samples) with one row per "
                f"sample, not {kind_of(self.x)}"
            )
        if not isinstance(self.y, Tensor) or self.y.ndim == 0:
            raise InputError(
                f"Federation.y must be a tensor with one row per sample, not {kind_of(self.y)}"
            )
        if len(self.x) != len(self.y):
            raise InputError(
                f"x and y must have one row per sample; x has {len(self.x)} rows, y has "
                f"{len(self.y)}"
            )
        self._check_finite()

    def _check_targets(self) -> None:
        task = tasks.build(self.task)
        task.check(self.y, self.shape)
        object.__setattr__(self, "classes", task.number_of_classes(self.y, self.classes))
        if fault := task.fault(self.y, self.classes):
            sample, reason = fault
            raise InputError(f"{self._whose(sample)} {reason}")

    def _check_class_names(self) -> None:
        names = self.class_names
        if names is None:
            return
        if self.classes is None:
            raise InputError(
                f"class_names of federation {self.name!r} are not valid for a {self.task}; leave "
                "them out"
            )
        if (
            isinstance(names, str)
            or len(names) != self.classes
            or not all(isinstance(name, str) for name in names)
        ):
            raise InputError(
                f"class_names must be {self.classes} names, one per class, not {names!r}"
            )
        object.__setattr__(self, "class_names", tuple(names))

    def _check_finite(self) -> None:
        if not self.x.dtype.is_floating_point:
            return
        for first, block in blocks(self.x):
            finite = torch.isfinite(block)
            if not bool(finite.all()):
                sample = first + int((~finite).nonzero()[0, 0])
                raise InputError(
                    f"{self._whose(sample)} has NaN or infinity in x; all values must be finite"
                )

    def _check_clients(self) -> None:
        clients = {name: self.split(name).clients for name in SPLITS} | {"unseen": len(self.unseen)}
        if self.client_names is not None:
            clients["client_names"] = len(self.client_names)
        for part, found in clients.items():
            if found != self.clients:
                raise InputError(
                    f"{part} has {found} clients, groups has {self.clients}; they must agree"
                )
        for what, names in (
            ("the name of a client", self.client_names),
            ("the name of a group", self.group_names),
        ):
            for name in names or ():
                checks.name(name, what)
        if len(set(self.group_names)) != len(self.group_names):
            raise InputError(f"group_names must all differ, not {_few(self.group_names)}")
        lost = np.flatnonzero((self.groups < 0) | (self.groups >= len(self.group_names)))
        if lost.size:
            raise InputError(
                f"{self._who(lost[0])} has group {self.groups[lost[0]]}; valid: 0 to "
                f"{len(self.group_names) - 1}, positions in group_names"
            )
        if not self.seen.size:
            raise InputError(f"all {self.clients} clients are unseen; at least one must be seen")

    def _check_splits(self) -> None:
        used = {}
        for name in SPLITS:
            split = self.split(name)
            outside = np.flatnonzero((split.indices < 0) | (split.indices >= len(self.x)))
            if outside.size:
                client = np.searchsorted(split.offsets, outside[0], side="right") - 1
                raise InputError(
                    f"{name} split of {self._who(client)} has sample "
                    f"{split.indices[outside[0]]}; valid: 0 to {len(self.x) - 1}"
                )
            used[name] = np.zeros(len(self.x), bool)
            used[name][split.indices] = True
        for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
            shared = np.flatnonzero(used[one] & used[other])
            if shared.size:
                first, second = (
                    self._who(_holder(self.split(name), shared[0])) for name in (one, other)
                )
                raise InputError(
                    f"sample {shared[0]} is in the {one} split of {first} and in the {other} split "
                    f"of {second}; a sample may be in only one of train, val and test"
                )
        idle = np.flatnonzero((self.train.sizes == 0) & ~self.unseen)
        if idle.size:
            raise InputError(
                f"{self._who(idle[0])} has no training samples; add one or make the client unseen"
            )

    def _check_server(self) -> None:
        if not self.server:
            return
        used = {name: np.unique(self.split(name).indices) for name in SPLITS}
        checked: dict[str, Ints] = {}
        for name, positions in self.server.items():
            if name not in SERVER_SPLITS:
                raise unknown("split", name, SERVER_SPLITS, where="Federation.server")
            own = _whole_numbers(positions, f"Federation.server[{name!r}]")
            if not own.size or own.min() < 0 or own.max() >= len(self.x):
                raise InputError(
                    f"Federation.server[{name!r}] must have samples from 0 to {len(self.x) - 1}"
                )
            # Test samples of clients may also be test samples of the server.
            for split in SPLITS if name == "val" else ("train", "val"):
                if (shared := np.intersect1d(own, used[split])).size:
                    raise InputError(
                        f"sample {shared[0]} is in the {split} split of "
                        f"{self._who(_holder(self.split(split), shared[0]))} and a {name} sample "
                        "of the server; it may be only one of them"
                    )
            checked[name] = own
        if len(checked) == 2 and (both := np.intersect1d(checked["val"], checked["test"])).size:
            raise InputError(
                f"sample {both[0]} is a val and a test sample of the server; it may be only one of "
                "them"
            )
        object.__setattr__(self, "server", checked)

    def _who(self, client: int | np.integer[Any]) -> str:
        named = self.client_names is not None and client < len(self.client_names)
        return (
            f"client {client} ({self.client_name(int(client))!r})" if named else f"client {client}"
        )

    def _whose(self, sample: int) -> str:
        for split in map(self.split, SPLITS):
            if sample in split.indices:
                return f"sample {sample} of {self._who(_holder(split, sample))}"
        return f"sample {sample}"


def _with_server(
    x: Tensor | Samples, y: Tensor, server: Mapping[str, tuple[Any, Any]], task: str
) -> tuple[Tensor | Samples, Tensor, dict[str, Ints]]:
    """Add the samples of the server, and return their positions."""
    positions: dict[str, Ints] = {}
    for name, (own_x, own_y) in server.items():
        if not isinstance(x, Tensor):
            raise InputError(
                "server: samples cannot be added to samples on disk; use Federation(..., server=) "
                "with positions in x"
            )
        more, targets = (
            tensor_of(own_x, f"server[{name!r}][0]"),
            tasks.build(task).targets(tensor_of(own_y, f"server[{name!r}][1]")),
        )
        if (
            more.shape[1:] != x.shape[1:]
            or len(more) != len(targets)
            or targets.shape[1:] != y.shape[1:]
        ):
            raise InputError(
                f"server[{name!r}] has samples of shape {tuple(more.shape)} and targets of shape "
                f"{tuple(targets.shape)}; those of the clients are of shape {tuple(x.shape)} and "
                f"{tuple(y.shape)}, one row per sample"
            )
        positions[name] = np.arange(len(x), len(x) + len(more))
        x, y = torch.cat([x, more.to(x.dtype)]), torch.cat([y, targets.to(y.dtype)])
    return x, y, positions


class ThreeSplits(NamedTuple):
    """Train, val and test, in the order of the arguments of `Federation`."""

    train: Split
    val: Split
    test: Split


def split_samples(
    held: Split,
    keys: Sequence[str],
    fractions: Sequence[float],
    seed: int,
    units: NDArray[Any] | None = None,
) -> ThreeSplits:
    """Divide the samples of every client into train, val and test.

    Shares are rounded by largest remainder. Then an empty split with a positive share gets one
    sample of the client's largest split, if that has more than one: first train, then test, then
    val. Train gets even a client's only sample. The shuffle depends only on the seed and the
    client's key.

    Parameters
    ----------
    held : Split
        All samples of every client.
    keys : sequence of str
        A permanent key of each client, such as its name.
    fractions : sequence of three floats
        Shares of train, val and test, summing to 1.
    seed : int
        Seed of the shuffle.
    units : array of shape [N], optional
        The unit of each sample, such as a patient. The samples of a unit are in the same split, and
        shares are shares of a client's units.

    Returns
    -------
    ThreeSplits
        Train, val and test.

    Examples
    --------
    >>> splits = split_samples(Split.from_lists([range(10)]), ["ann"], (0.7, 0.1, 0.2), 0)
    >>> [split.sizes.tolist() for split in splits]
    [[7], [1], [2]]
    >>> held, patients = Split.from_lists([range(6)]), np.array(["a", "a", "b", "b", "b", "c"])
    >>> splits = split_samples(held, ["ann"], (0.4, 0.3, 0.3), 0, patients)
    >>> [split.of(0).tolist() for split in splits]
    [[2, 3, 4], [0, 1], [5]]
    """
    if units is not None:
        return _split_units(
            held, keys, fractions, seed, np.unique(units, return_inverse=True)[1].reshape(-1)
        )
    seed = count(seed, "seed", least=0)
    counts = _split_sizes(held.sizes, fractions)
    holders = held.holders
    place = np.arange(len(held.indices)) - held.offsets[holders]
    shuffled = held.indices[np.lexsort((_shuffle_keys(keys, holders, place, seed), holders))]
    ends = np.cumsum(counts, axis=1)
    part = (place >= ends[holders, 0]).astype(np.int8) + (place >= ends[holders, 1])
    return ThreeSplits(*(Split(shuffled[part == i], _offsets(counts[:, i])) for i in range(3)))


def _split_units(
    held: Split, keys: Sequence[str], fractions: Sequence[float], seed: int, units: Ints
) -> ThreeSplits:
    mine = [held.of(client) for client in range(held.clients)]
    by_unit = split_samples(
        Split.from_lists([np.unique(units[samples]) for samples in mine]), keys, fractions, seed
    )

    def samples_of(split: Split) -> Split:
        return Split.from_lists(
            [own[np.isin(units[own], split.of(client))] for client, own in enumerate(mine)]
        )

    return ThreeSplits(*map(samples_of, by_unit))


def _split_sizes(sizes: Ints, fractions: Sequence[float]) -> Ints:
    try:
        shares = np.asarray(fractions, float)
    except (ValueError, TypeError):
        shares = np.empty(0)
    if (
        shares.shape != (3,)
        or not (shares >= 0).all()
        or abs(shares.sum() - 1) > 1e-6
        or shares[0] == 0
    ):
        raise InputError(
            f"splits={fractions!r} must be three shares (train, val, test), none negative, train "
            "above 0, summing to 1"
        )
    ideal = sizes[:, None] * shares
    counts: Ints = np.floor(ideal + 1e-9).astype(np.int64)  # 0.7 * 10 may fall just below 7
    ranks = np.argsort(np.argsort(counts - ideal, axis=1, kind="stable"), axis=1)
    counts += ranks < (sizes - counts.sum(axis=1))[:, None]
    for part in (0, 2, 1):
        largest = counts.argmax(axis=1)
        spare = counts.max(axis=1) - (part != 0)  # train gets even a client's only sample
        needy = np.flatnonzero((counts[:, part] == 0) & (shares[part] > 0) & (spare > 0))
        counts[needy, largest[needy]] -= 1
        counts[needy, part] += 1
    return counts


def _shuffle_keys(keys: Sequence[str], holders: Ints, place: Ints, seed: int) -> NDArray[np.uint64]:
    """Return a hash of seed, client's key and position for every sample.

    It is SplitMix64, started from a digest of seed and key.
    """
    digests = [hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest() for key in keys]
    mixed = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)[holders]
    mixed += (place.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


# The names of missing values, also after conversion to text.
_MISSING = ("None", "nan", "NaN", "<NA>", "NaT")


def _warn_of_missing_names(what: str, names: Iterable[Any], federation: str) -> None:
    """Warn of clients or groups that are probably missing values."""
    missing = [name for name in names if str(name) in _MISSING]
    if missing:
        warnings.warn(
            f"{what} of {federation!r} has {len(missing)} named {missing[0]!r}, which is usually a "
            f"missing value; drop these samples, or use another name for their {what}",
            stacklevel=3,
        )


def _warn_of_skipped_labels(labels: Tensor, federation: str) -> None:
    """Warn of labels that start above 0, because the model has outputs for the classes below."""
    if labels.dim() == 1 and len(labels) and (first := int(labels.min())) > 0:
        warnings.warn(
            f"labels of {federation!r} go from {first} to {int(labels.max())}, so there are no "
            f"samples of class 0; subtract {first} from them, or pass the number of classes if "
            "this is intended",
            stacklevel=3,
        )


def _number(values: Sequence[Hashable] | NDArray[Any] | Tensor) -> tuple[list[Any], Ints]:
    """Return the distinct values in order of first appearance, and the position of each entry."""
    if isinstance(values, np.ndarray | Tensor):
        found, first, entries = np.unique(
            np.asarray(values), return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        return found[order].tolist(), np.argsort(order)[entries.reshape(-1)]
    numbers: dict[Hashable, int] = {}
    places = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), np.array(places, np.int64)


def _names(ids: Sequence[Hashable]) -> tuple[str, ...]:
    """Return clients' ids as text. Ids with the same text, such as 1 and "1", are refused."""
    holders: dict[str, Hashable] = {}
    for client in ids:
        if (other := holders.setdefault(str(client), client)) is not client:
            raise InputError(
                f"clients {other!r} and {client!r} would both be called {str(client)!r}; "
                "use ids that differ as text"
            )
    return tuple(holders)


def _held_out(unseen: Iterable[Hashable]) -> set[Hashable]:
    if isinstance(unseen, str):
        return {unseen}
    if not isinstance(unseen, Iterable):
        raise InputError(f"unseen={unseen!r} must be a list of clients, such as [{unseen!r}]")
    return set(_number(unseen if isinstance(unseen, np.ndarray | Tensor) else list(unseen))[0])


def _whole_numbers(values: ArrayLike, what: str) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InputError(
            f"{what} must be a flat array of whole numbers, not {array.dtype} of shape "
            f"{array.shape}"
        )
    return array.astype(np.int64, copy=False)


def _offsets(sizes: ArrayLike) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(sizes, np.int64))])


def _holder(split: Split, sample: int | np.integer[Any]) -> int:
    position = np.flatnonzero(split.indices == sample)[0]
    return int(np.searchsorted(split.offsets, position, side="right")) - 1


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _few(values: Sequence[Any]) -> str:
    shown = ", ".join(repr(value) for value in values[:8])
    return f"{shown}, ..." if len(values) > 8 else shown
