"""The federation: clients, their groups and samples, and clients held out as unseen."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from equipoise import tasks
from equipoise.arrays import Ints, refuse_missing_ids, tensor_of, whole_numbers
from equipoise.attributes import Attribute, Given, attributes_from
from equipoise.client_ids import held_out, names_of, number, warn_of_missing_names
from equipoise.errors import InputError, few, unknown
from equipoise.federation_checks import (
    check_clients,
    check_samples,
    check_splits,
    checked_class_names,
    checked_classes,
    checked_server,
    odd_labels,
)
from equipoise.samples import Samples
from equipoise.splits import SPLITS, Split, offsets_of, split_samples

if TYPE_CHECKING:
    from equipoise.data.columns import Columns

__all__ = ["SPLITS", "Federation", "Split"]

Bools = NDArray[np.bool_]


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
    columns : Columns, optional
        How ``x`` was made of the columns of a table. Runs store it, so that their models can be
        used on other rows; see :func:`equipoise.data.columns.read_columns`.

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
    columns: Columns | None = None

    def __post_init__(self) -> None:
        """Check all values."""
        self._set("groups", whole_numbers(self.groups, "Federation.groups"))
        self._set("unseen", np.asarray(self.unseen, dtype=bool))
        self._set("group_names", tuple(self.group_names))
        check_samples(self)
        self._set("classes", checked_classes(self))
        self._set("class_names", checked_class_names(self))
        check_clients(self)
        check_splits(self)
        where = f"federation {self.name!r}"
        self._set("attributes", attributes_from(self.attributes, len(self.y), where))
        self._set("server", checked_server(self))

    def _set(self, name: str, value: object) -> None:
        """Replace a given value by its checked form. Afterwards a federation never changes."""
        object.__setattr__(self, name, value)

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
        >>> x, y = np.zeros((10, 3)), np.arange(10) % 2
        >>> federation = Federation.from_arrays(x, y, clients=[7] * 10, splits=(0.6, 0.2, 0.2))
        >>> [federation.split(name).sizes.tolist() for name in ("train", "val", "test")]
        [[6], [2], [2]]
        """
        samples: Tensor | Samples = x if isinstance(x, Samples) else tensor_of(x, "x")
        targets = tasks.build(task).targets(tensor_of(y, "y"))
        if isinstance(clients, str) or not isinstance(clients, Iterable):
            raise InputError(
                f"clients must have the client of each sample, such as {['A', 'B', 'A']}, got "
                f"{clients!r}"
            )
        refuse_missing_ids(clients)
        ids, holders = number(clients)
        warn_of_missing_names("clients", ids, name)
        if len(holders) != len(samples):
            raise InputError(
                f"clients must name one client per sample: {len(samples)} samples, {len(holders)} "
                "names"
            )
        names = names_of(ids)
        if groups is not None and not isinstance(groups, Mapping):
            raise InputError(
                f"groups must be a mapping from clients to groups, such as {{{ids[0]!r}: 'urban'}},"
                f" got {type(groups).__name__}"
            )
        if groups is not None and (strays := [client for client in ids if client not in groups]):
            raise InputError(
                f"groups names no group for client {strays[0]!r}; it must name one for every client"
            )
        unseen_ids = held_out(unseen)
        for what, named in (("groups: ", groups or ()), ("unseen ", unseen_ids)):
            if strays := sorted(set(named) - set(ids), key=str):
                raise InputError(
                    f"{what}client {strays[0]!r} has no sample; the clients are {few(ids)}"
                )
        warn_of_missing_names("groups", (groups or {}).values(), name)
        group_names, group_of = number(
            ["all"] * len(ids) if groups is None else [groups[client] for client in ids]
        )
        held = Split(
            np.argsort(holders, kind="stable"), offsets_of(np.bincount(holders, minlength=len(ids)))
        )
        described = attributes_from(attributes, len(samples), f"federation {name!r}")
        samples, targets, of_server = _with_server(samples, targets, server or {}, task)
        made = cls(
            samples,
            targets,
            *split_samples(held, names, splits, seed),
            groups=group_of,
            group_names=tuple(str(group) for group in group_names),
            unseen=np.array([client in unseen_ids for client in ids], bool),
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
        if classes is None and tasks.build(task).labels:
            _warn_of_odd_labels(targets, name)
        return made

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
        >>> federation = Federation.from_arrays(np.zeros((5, 1)), [0, 1, 0, 1, 0], clients=[0] * 5)
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
        >>> x, y = np.zeros((3, 1)), np.array([0, 1, 0])
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
        >>> x, y = np.zeros((10, 1)), np.arange(10) % 2
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
        >>> one = Federation.from_arrays(np.zeros((5, 1)), [0, 1, 0, 1, 0], clients=[0] * 5)
        >>> other = Federation.from_arrays(np.ones((5, 1)), [0, 1, 0, 1, 0], clients=[0] * 5)
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


def _warn_of_odd_labels(labels: Tensor, federation: str) -> None:
    """Warn of labels that leave out classes for which the model has outputs, or of one class."""
    if odd := odd_labels(labels):
        found, remedy = odd
        warnings.warn(
            f"{federation!r} has {found}; {remedy}, or pass the number of classes if this is "
            "intended",
            stacklevel=3,
        )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
