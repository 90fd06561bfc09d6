"""Which client belongs to which cluster, from round to round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.checks import count, flag, one_of
from equipoise.client_index import COMPARED
from equipoise.clustering import (
    CHOICES,
    CLUSTERINGS,
    Labels,
    centres_of,
    cluster_points,
    mixture_shares,
    nearest,
    numbered,
)
from equipoise.index_clusters import index_digest, index_points
from equipoise.method import Aggregation, Cohort, State, locate
from equipoise.solvers import Floats
from equipoise.tree import Tree


@dataclass(frozen=True)
class Grouping(Aggregation):
    """Cluster clients by their representations every round (anonymized clustering).

    The server keeps the last representation of every client that has taken part, and fits T'
    clusters to all of them. Clusters are numbered like the nearest ones of the round before.
    Clients that are absent keep their cluster. A centre in H is the mean of its members'
    representations. Clusters without members are not sent. A number without members keeps its last
    centre, so that it can be used again. With fewer clients than T', every client is a cluster of
    its own. A representation that is not finite is ignored, and the client's last one stays.

    With a client index, clusters are known before round 1: those of the index. The server asks all
    clients for their representations under the initial model, to compute the centres of these
    clusters. From round 1 on, clients are clustered by the representations that they send, as
    without an index. Those that have not taken part yet keep the cluster of their index.

    Parameters
    ----------
    clusters : int
        T', or the largest number to choose from.
    clustering : {"gmm", "kmeans", "agglomerative"}
        A Gaussian mixture, as in the paper, k-means or agglomerative clustering; see
        :func:`equipoise.clustering.cluster`.
    choice : {"fixed", "bic", "stability"}
        Whether T' is fixed or chosen in each round; see :func:`equipoise.clustering.choose_number`.
    soft : bool
        Whether clients with data of several types belong to several clusters; see
        :func:`equipoise.clustering.mixture_shares`.
    index : str, optional
        The file of a client index (:class:`~equipoise.client_index.ClientIndex`). Only the server
        reads it.
    compare : {"both", "features", "labels"}
        Which part of the index is clustered.
    digest : str, optional
        The hash of the index in the file. It is filled in, so that a run is not resumed with
        another index.
    """

    clusters: int = 5
    clustering: str = "gmm"
    choice: str = "fixed"
    soft: bool = False
    index: str | None = None
    compare: str = "both"
    digest: str | None = None

    def __post_init__(self) -> None:
        """Refuse unknown values."""
        count(self.clusters, f"{self.name}.clusters")
        one_of(self.clustering, CLUSTERINGS, f"{self.name}.clustering")
        one_of(self.choice, CHOICES, f"{self.name}.choice")
        flag(self.soft, f"{self.name}.soft")
        one_of(self.compare, COMPARED, f"{self.name}.compare")
        object.__setattr__(self, "digest", index_digest(self.index, self.digest, self.name))

    @property
    def needs_everyone(self) -> bool:  # type: ignore[override]
        """Clients have a cluster before round 1 if there is an index."""
        return self.index is not None

    def begin(self, state: State, everyone: Cohort) -> State:
        """Cluster all clients by their index, and ask for representations to compute centres."""
        if self.index is None:
            return state
        representations = everyone.ask("first_representation", model=state.model)["h"]
        return self.grouped(state, representations, everyone, self._by_index(everyone))

    def admit(self, state: State, everyone: Cohort) -> State:
        """Leave clients that join without a cluster until they send a representation."""
        return state

    def _by_index(self, everyone: Cohort) -> Labels:
        """Return the clusters of the client index."""
        points = index_points(str(self.index), everyone, self.compare)
        return cluster_points(
            points, self.clusters, kind=self.clustering, choice=self.choice, key=everyone.key
        )

    def send(self, state: State, cohort: Cohort) -> tuple[dict[str, Tree], dict[str, Tensor]]:
        """Send H to all clients, and to each the position of its cluster in H, or its shares."""
        if "centres" not in self.sends or "clusters" not in state.server:
            return {"model": state.model}, {}
        members = _members(state)
        centres = state.server["clusters"]["h"][members]
        own = self.memberships(state, cohort)[:, members]
        # Clients that have not sent a representation yet have no cluster.
        place = torch.where(own.sum(1) > 0, own.argmax(1), -1)
        like = next(iter(state.model.values()))
        each = {"membership": own.to(like.dtype)} if self.soft else {"cluster": place}
        return {"model": state.model, "centres": {"h": centres.to(like)}}, each

    def grouped(
        self, state: State, points: Tensor, cohort: Cohort, labels: Labels | None = None
    ) -> State:
        """Return the state with the cohort's new representations, clusters and centres, and notes.

        Before round 1 clusters may be given, one label for each client of the cohort.
        """
        ids, vectors, shares = _known(state, cohort, points, self.clusters)
        if not len(ids):
            return self.noted(state, cohort)
        before = state.server.get(
            "clusters", {"h": torch.full((self.clusters, vectors.shape[1]), torch.nan)}
        )
        last = before["h"].double().cpu().numpy()
        if labels is None:
            found = cluster_points(
                vectors, self.clusters, kind=self.clustering, choice=self.choice, key=cohort.key
            )
            labels = numbered(found, vectors, last)
        else:
            labels = labels[np.isin(cohort.ids, ids)]
        here = np.isin(ids, cohort.ids)
        shares[here] = np.eye(self.clusters)[labels[here]]
        centres = centres_of(vectors, shares)
        if self.soft:
            there = ~np.isnan(centres[:, 0])
            shares[np.ix_(here, there)] = [
                mixture_shares(vector, centres[there]) for vector in vectors[here]
            ]
        kept = np.where(np.isnan(centres), last, centres)
        clients = {"ids": ids, "h": vectors, "share": shares}
        made = state.with_server(
            clients={name: torch.from_numpy(values) for name, values in clients.items()},
            clusters={"h": torch.from_numpy(kept)},
        )
        return self.noted(made, cohort)

    def memberships(self, state: State, cohort: Cohort) -> Tensor:
        """Return how much each client belongs to each cluster; zeros for clients without one."""
        shares = torch.zeros(len(cohort.ids), self.clusters, dtype=torch.float64)
        if "clients" in state.server:
            clients = state.server["clients"]
            known = torch.isin(torch.from_numpy(cohort.ids), clients["ids"])
            shares[known] = clients["share"][locate(clients, cohort)[known]]
        return shares

    def noted(self, state: State, cohort: Cohort) -> State:
        """Note the clusters of the cohort."""
        shares = self.memberships(state, cohort)
        numbers = torch.where(shares.sum(1) > 0, shares.argmax(1), -1)
        notes = {"clusters": numbers} | ({"memberships": shares} if self.soft else {})
        return state.with_notes(**notes)


def _members(state: State) -> Tensor:
    """Return the numbers of the clusters that have members."""
    return state.server["clients"]["share"].sum(0).nonzero().flatten()


def _known(
    state: State, cohort: Cohort, points: Tensor, clusters: int
) -> tuple[Labels, Floats, Floats]:
    """Return ids, last representations and memberships of all clients known, by ascending id."""
    finite = points.isfinite().all(1).cpu().numpy()
    present, new = cohort.ids[finite], points.double().cpu().numpy()[finite]
    if "clients" not in state.server:
        return present, new, np.zeros((len(new), clusters))
    before = {name: tensor.numpy() for name, tensor in state.server["clients"].items()}
    absent = ~np.isin(before["ids"], present)
    ids = np.concatenate([before["ids"][absent], present])
    vectors = np.concatenate([before["h"][absent], new])
    shares = np.concatenate([before["share"][absent], np.zeros((len(new), clusters))])
    order = np.argsort(ids)
    return ids[order], vectors[order], shares[order]


def place(state: State, representations: Tensor) -> Tensor:
    """Return the cluster numbers of clients that have not taken part: those of the nearest centres.

    Parameters
    ----------
    state : State
        Of a run with clusters.
    representations : Tensor
        Their h̃ (see :func:`representations_of`), or their mean class tokens if clusters are made
        of those; one row per client.

    Returns
    -------
    Tensor
        One number per client, as in the notes of the rounds.

    Examples
    --------
    >>> centres = torch.tensor([[0.0], [5.0], [7.0]])
    >>> server = {"clients": {"share": torch.eye(3)[:2]}, "clusters": {"h": centres}}
    >>> place(State(1, {}, server), torch.tensor([[6.5], [1.0]]))
    tensor([1, 0])
    """
    members = _members(state)
    centres = state.server["clusters"]["h"][members].double().cpu().numpy()
    return members[torch.from_numpy(nearest(representations.double().cpu().numpy(), centres))]
