"""Client indices: two vectors that describe the data of each client, and their file."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise import checks
from equipoise.errors import InputError, RunError, few, unknown
from equipoise.federation import Federation
from equipoise.models.dsaign import LabelCosines
from equipoise.run.directory import INDEX
from equipoise.run.files import load_tensors, save_tensors
from equipoise.tree import digest

if TYPE_CHECKING:
    from equipoise.method import Cohort

log = logging.getLogger("equipoise")

COMPARED = ("both", "features", "labels")
"""What similarities compare: β_f and β_l, or one of them."""
_KIND = "client index"
# How many samples are processed at a time.
_TOGETHER = 1024


@dataclass(frozen=True, eq=False)
class ClientIndex:
    """β = [β_f; β_l] of every client.

    Parameters
    ----------
    ids : int array
        The clients' numbers, distinct. Rows are sorted by them.
    features : Tensor
        β_f, ``[clients, width]``, which describes the inputs of a client.
    labels : Tensor
        β_l, ``[clients, width]``, which describes its labels. The widths may differ.
    made_by : str
        A hash of the model and the data from which the index was made.
    epsilon : float, optional
        The ε of the noise that clients have added to their rows, if any.
    names : tuple of str, optional
        The clients' names, distinct, in the order of ``ids``. Runs find their clients by these
        names. Without them they go by number.
    clients : int, optional
        The number of all clients of the federation from which the index was made, including those
        without a row.

    Examples
    --------
    >>> index = ClientIndex(np.array([4, 1]), torch.eye(2), torch.ones(2, 3))
    >>> index.ids, index.of(np.array([4])).features
    (array([1, 4]), tensor([[1., 0.]]))
    """

    ids: NDArray[np.int64]
    features: Tensor
    labels: Tensor
    made_by: str = ""
    epsilon: float | None = None
    names: tuple[str, ...] | None = None
    clients: int | None = None

    def __post_init__(self) -> None:
        """Check the shapes and values, and sort the rows."""
        ids = np.asarray(self.ids)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not len(ids):
            raise InputError(
                f"ids of a client index must be a list of whole numbers, got {self.ids!r}"
            )
        order = np.argsort(ids, kind="stable")
        if (repeated := np.flatnonzero(np.diff(ids[order]) == 0)).size:
            raise InputError(
                f"client {int(ids[order][repeated[0]])} occurs more than once in the client index"
            )
        object.__setattr__(self, "ids", ids[order].astype(np.int64))
        for name in ("features", "labels"):
            rows = getattr(self, name)
            if rows.dim() != 2 or len(rows) != len(ids) or not rows.shape[1]:
                raise InputError(
                    f"{name} of a client index must have a row for each of {len(ids)} clients, got "
                    f"shape {tuple(rows.shape)}"
                )
            if not rows.is_floating_point() or not bool(torch.isfinite(rows).all()):
                raise InputError(f"{name} of a client index must be finite numbers")
            object.__setattr__(self, name, rows[torch.from_numpy(order)])
        self._check_names(order)
        if self.clients is not None:
            checks.count(self.clients, "clients of a client index", least=int(self.ids[-1]) + 1)

    def _check_names(self, order: NDArray[np.int64]) -> None:
        """Check the names, and sort them like the rows."""
        if self.names is None:
            return
        if not isinstance(self.names, list | tuple) or len(self.names) != len(order):
            raise InputError(
                f"names of a client index must be a list of {len(order)} names, one for each "
                f"client, got {self.names!r}"
            )
        for name in self.names:
            checks.name(name, "a name in a client index")
        if (repeated := first_repeated(self.names)) is not None:
            raise InputError(f"two clients of the client index are called {repeated!r}")
        object.__setattr__(self, "names", tuple(self.names[row] for row in order))

    @property
    def width(self) -> int:
        """The length of β_f."""
        return int(self.features.shape[1])

    def of(self, ids: NDArray[np.int64]) -> ClientIndex:
        """Return the rows of some clients.

        Raises
        ------
        InputError
            If a client is not in the index.
        """
        rows = np.searchsorted(self.ids, ids) % len(self.ids)
        missing = np.asarray(ids)[self.ids[rows] != ids]
        if len(missing):
            raise InputError(
                f"the client index has no rows for {len(missing)} of {len(ids)} clients, such as "
                f"client {int(missing[0])}; it has {len(self.ids)} clients, from "
                f"{int(self.ids[0])} to {int(self.ids[-1])}"
            )
        names = None if self.names is None else tuple(self.names[row] for row in rows)
        return self._rows(rows, ids, names, self.clients)

    def matched(
        self, ids: NDArray[np.int64], names: Sequence[str], clients: int | None = None
    ) -> ClientIndex:
        """Return the rows of the clients of a federation, under their numbers in it.

        Clients are found by name. If the index has no names, they are found by number, and the
        federation must have as many clients as that from which the index was made. If the index
        does not record this number, no client of the index may have a number that the federation
        does not have.

        Parameters
        ----------
        ids : int array
            The clients' numbers in the federation.
        names : sequence of str
            Their names, as :meth:`~equipoise.federation.Federation.client_name` returns them.
        clients : int, optional
            The number of all clients of the federation. Without it this number is not compared, as
            on Flower, where clients may join and each one has a number of its own.

        Raises
        ------
        InputError
            If a client is not in the index, two clients have the same name, or clients without
            names are not as many as those of the index.

        Examples
        --------
        >>> index = ClientIndex(np.arange(2), torch.eye(2), torch.ones(2, 3), names=("ann", "bob"))
        >>> index.matched(np.array([0, 4]), ["bob", "ann"]).features
        tensor([[0., 1.],
                [1., 0.]])
        """
        if self.names is None:
            self._check_number(clients)
            return self.of(ids)
        own = {name: row for row, name in enumerate(self.names)}
        missing = [name for name in names if name not in own]
        if missing and unnamed_in(ids, names):
            raise InputError(
                f"the client index goes by the names of clients ({few(self.names)}), but the "
                "federation has no names of clients; valid: a federation with client_names, or an "
                "index without names"
            )
        if (repeated := first_repeated(names)) is not None:
            raise InputError(
                f"the client index goes by the names of clients, but two are called {repeated!r}; "
                "valid: names that all differ"
            )
        if missing:
            raise InputError(
                f"the client index has no rows for {len(missing)} of {len(names)} clients: "
                f"{few(missing)}; it has {few(self.names)}; valid: an index that has a row for "
                "each client, by the same name"
            )
        return self._rows(np.array([own[name] for name in names]), ids, tuple(names), clients)

    def _check_number(self, clients: int | None) -> None:
        """Refuse a federation that has another number of clients, as far as both are known."""
        if clients is None or clients == self.clients:
            return
        known = str(self.clients)
        if self.clients is None:
            # Older versions did not record it.
            least = int(self.ids[-1]) + 1
            if least <= clients:
                return
            known = f"{least} or more"
        raise InputError(
            f"the client index is of {known} clients and has no names, so clients are found by "
            f"number, but the federation has {clients}; valid: an index of as many clients, or "
            "with their names, which it gets if you make it again"
        )

    def _rows(
        self,
        rows: NDArray[np.int64],
        ids: NDArray[np.int64],
        names: tuple[str, ...] | None,
        clients: int | None,
    ) -> ClientIndex:
        where = torch.from_numpy(rows)
        return ClientIndex(
            np.asarray(ids),
            self.features[where],
            self.labels[where],
            self.made_by,
            self.epsilon,
            names,
            clients,
        )

    def digest(self) -> str:
        """Return a hash of ids, names, vectors and what made them."""
        about = [f"made_by {self.made_by}"]
        if self.names is not None:
            about.append(f"names {json.dumps(self.names)}")
        return digest(self._tensors() | {text: torch.empty(0) for text in about})

    def similarity(self, compare: str = "both") -> Tensor:
        """Return the similarity of all pairs of clients.

        It is the mean of the cosines of β_f and of β_l, or one of them.

        Examples
        --------
        >>> index = ClientIndex(np.arange(2), torch.eye(2), torch.ones(2, 3))
        >>> index.similarity()
        tensor([[1.0000, 0.5000],
                [0.5000, 1.0000]])
        """
        return torch.stack(
            [rows @ rows.T for rows in directions(self.features, self.labels, compare)]
        ).mean(0)

    def write(self, path: str | Path) -> None:
        """Write the index to a file.

        Examples
        --------
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "index.safetensors"
        >>> ClientIndex(np.arange(2), torch.eye(2), torch.ones(2, 3), made_by="abc").write(path)
        >>> ClientIndex.read(path).made_by
        'abc'
        """
        note: dict[str, Any] = {"kind": _KIND, "made_by": self.made_by}
        for name in ("epsilon", "names", "clients"):
            if (value := getattr(self, name)) is not None:
                note[name] = value
        save_tensors(Path(path), self._tensors(), note)

    @classmethod
    def read(cls, path: str | Path) -> ClientIndex:
        """Read a file that :meth:`write` wrote. Those of older versions have no names."""
        if Path(path).is_dir():
            inside = Path(path) / INDEX
            there = inside if inside.is_file() else f"the {INDEX} of a run that makes an index"
            raise InputError(f"{path} is a directory, not a client index; valid: {there}")
        try:
            tensors, note = load_tensors(Path(path))
        except RunError as error:
            raise InputError(f"{path} is not a client index: {error}") from error
        if note.get("kind") != _KIND or set(tensors) != {"ids", "features", "labels"}:
            raise InputError(f"{path} is not a client index: it has {', '.join(sorted(tensors))}")
        try:
            return cls(
                tensors["ids"].numpy(),
                tensors["features"],
                tensors["labels"],
                note["made_by"],
                note.get("epsilon"),
                note.get("names"),
                note.get("clients"),
            )
        except InputError as error:
            raise InputError(f"{path}: {error}") from error

    def _tensors(self) -> dict[str, Tensor]:
        return {"ids": torch.from_numpy(self.ids), "features": self.features, "labels": self.labels}


def first_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that occurs again, if any does.

    Examples
    --------
    >>> first_repeated(["ann", "bob", "ann"]), first_repeated(["ann", "bob"])
    ('ann', None)
    """
    return next((name for name, times in Counter(names).items() if times > 1), None)


def unnamed_in(ids: NDArray[np.int64], names: Sequence[str]) -> bool:
    """Return whether clients have no names, but only numbers.

    Parameters
    ----------
    ids : int array
        The clients' numbers.
    names : sequence of str
        Their names, as :meth:`~equipoise.federation.Federation.client_name` returns them.

    Examples
    --------
    >>> unnamed_in(np.arange(2), ["client 0", "client 1"]), unnamed_in(np.arange(1), ["ann"])
    (True, False)
    """
    return all(name == f"client {id_}" for id_, name in zip(ids.tolist(), names, strict=True))


def names_in(federation: Federation, ids: NDArray[np.int64]) -> tuple[str, ...] | None:
    """Return the names of clients for an index, or ``None`` if they do not identify the clients.

    Clients may have no names. On Flower, several clients may have the same name.

    Parameters
    ----------
    federation : Federation
        The clients.
    ids : int array
        The numbers of those that are in the index.

    Examples
    --------
    >>> x, y = np.zeros((6, 1)), np.arange(6) % 2
    >>> names_in(Federation.from_arrays(x, y, clients=["ann", "bob"] * 3), np.array([1]))
    ('bob',)
    """
    names = tuple(map(federation.client_name, ids.tolist()))
    return None if unnamed_in(ids, names) or first_repeated(names) is not None else names


def index_for(path: str | Path, everyone: Cohort) -> ClientIndex:
    """Read the file of an index, and return the rows of the clients of a run.

    Parameters
    ----------
    path : str or Path
        The file.
    everyone : Cohort
        The clients.

    Returns
    -------
    ClientIndex
        In the order of ``everyone.ids``.

    Raises
    ------
    InputError
        If the index does not fit the clients; see :meth:`ClientIndex.matched`.

    Examples
    --------
    >>> import tempfile
    >>> from types import SimpleNamespace
    >>> path = Path(tempfile.mkdtemp()) / "index.safetensors"
    >>> ClientIndex(np.arange(2), torch.eye(2), torch.ones(2, 3), names=("ann", "bob")).write(path)
    >>> index_for(path, SimpleNamespace(ids=np.array([0]), names=("bob",), clients=1)).features
    tensor([[0., 1.]])
    """
    index = ClientIndex.read(path)
    try:
        found = index.matched(everyone.ids, everyone.names, everyone.clients)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    # On Flower a client's number is its own, and does not depend on the order of the data.
    by_order = index.names is None and everyone.clients is not None
    if by_order and not unnamed_in(everyone.ids, everyone.names):
        log.warning(
            "%s has no names of clients, so it is assumed that they have the same order as in the "
            "data from which it was made. An index that is made again has their names.",
            path,
        )
    return found


def directions(features: Tensor, labels: Tensor, compare: str = "both") -> list[Tensor]:
    """Return the rows of β_f and β_l, or of one of them, scaled to length 1.

    Examples
    --------
    >>> directions(torch.tensor([[3.0, 4.0]]), torch.ones(1, 2), "features")
    [tensor([[0.6000, 0.8000]])]
    """
    if compare not in COMPARED:
        raise unknown("part of a client index", compare, COMPARED)
    chosen = {"both": (features, labels), "features": (features,), "labels": (labels,)}[compare]
    return [torch.nn.functional.normalize(rows, dim=1) for rows in chosen]


def similarity_to(
    features: Tensor, labels: Tensor, sizes: Tensor, members: Tensor, compare: str = "both"
) -> Tensor:
    """Return S(β_i, C), the similarity of all clients i to some clients C.

    S(β_i, C) = Σ_{j ∈ C} N_j (cos(β_f,i, β_f,j) + cos(β_l,i, β_l,j)) / (2 Σ_{j ∈ C} N_j)

    Parameters
    ----------
    features, labels : Tensor
        β_f and β_l, one row per client.
    sizes : Tensor
        N, the clients' numbers of samples.
    members : Tensor
        The positions of the clients in C.
    compare : {"both", "features", "labels"}
        Which cosines are averaged.

    Returns
    -------
    Tensor
        ``[clients]``, in [−1, 1].

    Examples
    --------
    >>> members = torch.tensor([0, 1])
    >>> similarity_to(torch.eye(3), torch.ones(3, 2), torch.tensor([1.0, 3.0, 5.0]), members)
    tensor([0.6250, 0.8750, 0.5000])
    """
    share = sizes[members] / sizes[members].sum()
    return torch.stack(
        [
            rows @ (share.to(rows.dtype) @ rows[members])
            for rows in directions(features, labels, compare)
        ]
    ).mean(0)


def similarity_by_group(
    index: ClientIndex, groups: NDArray[np.int64], compare: str = "both"
) -> dict[str, Any]:
    """Compare the similarity of clients of the same group with that of clients of different groups.

    Parameters
    ----------
    index : ClientIndex
        Of some clients.
    groups : int array
        The group of each of them, in the order of ``index.ids``.
    compare : {"both", "features", "labels"}
        What is compared.

    Returns
    -------
    dict
        ``within`` and ``between``: mean similarity of pairs of clients. ``nearest``: the share of
        clients whose nearest neighbour is in their own group. ``groups``: the mean similarity of
        each pair of groups. NaN where there are no pairs.

    Examples
    --------
    >>> features = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
    >>> index = ClientIndex(np.arange(3), features, torch.ones(3, 1))
    >>> found = similarity_by_group(index, np.array([0, 0, 1]), "features")
    >>> found["within"], found["between"], round(found["nearest"], 2)
    (1.0, 0.0, 0.67)
    """
    similarity = index.similarity(compare).double().numpy()
    pairs = ~np.eye(len(groups), dtype=bool)
    same = groups[:, None] == groups[None]
    nearest = np.where(pairs, similarity, -np.inf).argmax(1)
    kinds = np.unique(groups)
    blocks = [
        [pairs & (groups[:, None] == one) & (groups[None] == other) for other in kinds]
        for one in kinds
    ]
    return {
        "within": _mean(similarity[pairs & same]),
        "between": _mean(similarity[~same]),
        "nearest": float((groups[nearest] == groups).mean()) if len(groups) > 1 else float("nan"),
        "groups": [[_mean(similarity[block]) for block in row] for row in blocks],
    }


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else float("nan")


@torch.no_grad()
def make_index(
    federation: Federation,
    of_samples: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    *,
    made_by: str = "",
) -> ClientIndex:
    """Average the indices of samples over the training samples of each client.

    Parameters
    ----------
    federation : Federation
        The clients. Those without training samples get no index.
    of_samples : callable
        Takes x and y of some samples, and returns their feature and label indices, one row per
        sample.
    made_by : str
        A hash of the model and the data.

    Returns
    -------
    ClientIndex
        Of all clients, including those held out as unseen.

    Examples
    --------
    >>> x, y = np.array([[1.0], [3.0], [5.0]]), np.array([0, 1, 1])
    >>> federation = Federation.from_arrays(x, y, clients=[0, 0, 1], splits=(1, 0, 0))
    >>> index = make_index(federation, lambda x, y: (x, torch.eye(2)[y]))
    >>> index.features.tolist(), index.labels.tolist()
    ([[2.0], [5.0]], [[0.5, 0.5], [0.0, 1.0]])
    """
    ids = np.flatnonzero(federation.train.sizes > 0)
    means: list[list[Tensor]] = []
    for client in ids:
        rows = torch.from_numpy(federation.train.of(int(client)))
        parts = [
            of_samples(federation.x[some], federation.y[some]) for some in rows.split(_TOGETHER)
        ]
        means.append([torch.cat(part).double().mean(0) for part in zip(*parts, strict=True)])
    features, labels = (torch.stack(rows).float() for rows in zip(*means, strict=True))
    names = names_in(federation, ids)
    return ClientIndex(ids, features, labels, made_by, names=names, clients=federation.clients)


def index_of(model: nn.Module, federation: Federation) -> ClientIndex:
    """Return the client index that a trained DSA-IGN makes.

    β_f is the mean of u, and β_l the mean of the label vectors.

    Parameters
    ----------
    model : nn.Module
        A model ``dsaign``, such as one from :func:`equipoise.load`.
    federation : Federation
        The clients, whose samples are embeddings.

    Returns
    -------
    ClientIndex
        With a hash of the model and the federation.

    Examples
    --------
    >>> from equipoise.data import load
    >>> from equipoise.models import build
    >>> model = build("dsaign", shape=(1, 8, 8), classes=10, feedforward=16)
    >>> index_of(model, load("digits")).features.shape
    torch.Size([22, 64])
    """
    features, head = getattr(model, "features", None), getattr(model, "head", None)
    if not isinstance(features, nn.Module) or not isinstance(head, LabelCosines):
        raise InputError(
            f"only model 'dsaign' makes a client index, got {type(model).__name__} with another "
            "head"
        )
    made_by = digest(
        {
            **model.state_dict(),
            "vectors": head.vectors,
            f"of {federation.fingerprint()}": torch.empty(0),
        }
    )
    training = model.training
    model.eval()

    def of_samples(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        split = features(x.to(head.vectors.dtype))
        return split[:, split.shape[1] // 2 :], head.vectors[y]

    made = make_index(federation, of_samples, made_by=made_by)
    model.train(training)
    return made
