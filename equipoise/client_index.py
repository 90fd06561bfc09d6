"""Client indices: two vectors that describe the data of each client, and their file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise.errors import InputError, RunError, unknown
from equipoise.federation import Federation
from equipoise.models.dsaign import LabelCosines
from equipoise.run.files import load_tensors, save_tensors
from equipoise.tree import digest

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
        where = torch.from_numpy(rows)
        return ClientIndex(
            np.asarray(ids), self.features[where], self.labels[where], self.made_by, self.epsilon
        )

    def digest(self) -> str:
        """Return a hash of ids, vectors and what made them."""
        return digest(self._tensors() | {f"made_by {self.made_by}": torch.empty(0)})

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
        if self.epsilon is not None:
            note["epsilon"] = self.epsilon
        save_tensors(Path(path), self._tensors(), note)

    @classmethod
    def read(cls, path: str | Path) -> ClientIndex:
        """Read a file that :meth:`write` wrote."""
        try:
            tensors, note = load_tensors(Path(path))
        except RunError as error:
            raise InputError(f"{path} is not a client index: {error}") from error
        if note.get("kind") != _KIND or set(tensors) != {"ids", "features", "labels"}:
            raise InputError(f"{path} is not a client index: it has {', '.join(sorted(tensors))}")
        return cls(
            tensors["ids"].numpy(),
            tensors["features"],
            tensors["labels"],
            note["made_by"],
            note.get("epsilon"),
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {"ids": torch.from_numpy(self.ids), "features": self.features, "labels": self.labels}


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
    return ClientIndex(ids, features, labels, made_by)


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
