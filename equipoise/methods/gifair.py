"""GIFAIR-FL (Yue, Nouiehed and Al Kontar, 2022): larger steps for groups with higher losses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.checks import count, one_of
from equipoise.client import Finished
from equipoise.client_index import COMPARED
from equipoise.clustering import CHOICES, CLUSTERINGS, cluster_points
from equipoise.errors import InputError
from equipoise.index_clusters import index_digest, index_points
from equipoise.method import (
    Aggregation,
    Cohort,
    LocalRule,
    Phase,
    Sees,
    State,
    Updates,
    locate,
    personal_loss,
    shift,
)
from equipoise.methods import register
from equipoise.tree import PERSONAL, Parts, Tree

log = logging.getLogger("equipoise")
# A factor that differs from one by less than _LITTLE changes little. Clients with a smaller share
# of all samples than _FEW are ignored.
_LITTLE, _FEW = 0.01, 0.01


@register("gifair", paper="Yue et al., INFORMS Journal on Data Science 2022", sees=Sees.SCALARS)
@dataclass(frozen=True)
class Gifair(LocalRule, Aggregation):
    """Minimise Σ p_k F_k(θ) + λ Σ_{i<j} |L_i(θ) − L_j(θ)|.

    L_i is the mean loss of the clients A_i of group i. By Lemma 1, client k then minimises
    (1 + λ r_k/(p_k |A_{s_k}|)) F_k, where s_k is its group, p_k its share of all training samples
    and r_k = Σ_j sign(L_{s_k} − L_j). Groups of equal loss thus have the same r. The factor scales
    the client's steps, whatever its optimizer, and is all that is sent besides θ (Remark 3). With d
    groups it is positive for λ < λ_max = min_k p_k |A_{s_k}|/(d − 1). The weight Σ p_k of a group
    changes by λ r, which is less than the smallest p_k |A_{s_k}|. With one very small group the
    weights therefore change little; a warning is logged before round 1.

    The server updates θ by (K/|S|) Σ_k p_k (θ_k − θ) over the cohort S, which is unbiased for
    uniform sampling (Remark 2). With ``weights: uniform`` and ``sampling: size`` it is the plain
    mean of clients drawn by p_k (Algorithm 2). For clients that have not yet taken part, the loss
    of the first model is used, which all clients report before round 1.

    Parameters
    ----------
    lam : float
        λ, as a fraction of λ_max in [0, 1) or absolute; 0 is FedAvg.
    relative : bool
        Whether ``lam`` is a fraction of λ_max.
    fairness : {"group", "individual"}
        Fairness between the federation's groups, or between clients, with each client as its own
        group. With ``index``, groups are clusters of clients.
    exact : bool
        Whether the cohort evaluates the new θ in a second message (section 3.3), instead of
        reporting the losses of its own θ_k.
    personal : bool
        GIFAIR-FL-Per (Algorithm 3): clients keep their θ_k as personal models.
    index : str, optional
        The file of a client index (:class:`~equipoise.client_index.ClientIndex`), for data without
        groups: the groups are clusters of the index. Only the server reads the file. The notes of a
        round contain the group of each client.
    compare : {"both", "features", "labels"}
        Which part of the index is clustered.
    clusters : int
        Number of clusters of the index, or the largest number to choose from.
    clustering, choice : str
        How to cluster; see :func:`equipoise.clustering.cluster_points`.
    digest : str, optional
        The hash of the index in the file. It is filled in automatically, so that a run cannot be
        resumed with another index.
    """

    lam: float = 0.5
    relative: bool = True
    fairness: str = "group"
    exact: bool = False
    personal: bool = False
    index: str | None = None
    compare: str = "both"
    clusters: int = 5
    clustering: str = "gmm"
    choice: str = "bic"
    digest: str | None = None
    lasting = ("loss",)
    ignores_prior = "GIFAIR uses the clients' shares of all samples, whichever clients take part"
    needs_everyone = True

    def __post_init__(self) -> None:
        """Refuse values outside the paper's range."""
        one_of(self.fairness, ("group", "individual"), "gifair.fairness")
        if not 0 <= self.lam < (1 if self.relative else float("inf")):
            valid = (
                "a fraction of λ_max in [0, 1), or absolute with relative=False"
                if self.relative
                else "at least 0"
            )
            raise InputError(f"gifair.lam must be {valid}, got {self.lam!r}")
        if self.exact and self.personal:
            raise InputError(
                "gifair.exact uses losses of the global model, but gifair.personal uses those of "
                "personal models; set one of them"
            )

        if self.index is not None and self.fairness != "group":
            raise InputError(
                "gifair.index makes groups of clients, but gifair.fairness='individual' has no "
                "groups; valid: fairness='group'"
            )
        one_of(self.compare, COMPARED, "gifair.compare")
        count(self.clusters, "gifair.clusters")
        one_of(self.clustering, CLUSTERINGS, "gifair.clustering")
        one_of(self.choice, CHOICES, "gifair.choice")
        object.__setattr__(self, "digest", index_digest(self.index, self.digest, "gifair"))

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the losses of the θ_k, unless ``exact`` is set."""
        return () if self.exact else ("loss_after",)

    @property
    def keeps(self) -> Parts:  # type: ignore[override]
        """Return the θ_k, if they are personal models."""
        return "personal" if self.personal else ()

    def finish(self, client: Finished) -> tuple[dict[str, Tree], dict[str, Tree]]:
        """Keep a copy of the trained model."""
        return (
            {"kept": {PERSONAL + n: client.params[n] for n in client.received}}
            if self.personal
            else {}
        ), {}

    def adapt(self) -> Sequence[Phase]:
        """Train a new client's θ_k from θ, as in a round."""
        return (Phase(move="personal", loss=personal_loss),) if self.personal else ()

    def begin(self, state: State, everyone: Cohort) -> State:
        """Ask all clients for the loss of the first model, and compute λ/(p_k |A|)."""
        groups = self._groups(everyone)
        _, group, members = np.unique(groups, return_inverse=True, return_counts=True)
        share = torch.from_numpy(everyone.sizes / everyone.sizes.sum() * members[group])
        largest = float(share.min()) / (len(members) - 1) if len(members) > 1 else float("inf")
        if not self.relative and self.lam >= largest:
            raise InputError(
                f"gifair.lam must be below λ_max = {largest:.6g} for this federation, so that the "
                f"factors of all clients are positive; got {self.lam!r}"
            )
        # With a single group r is 0, so any λ is valid.
        strength = self.lam * largest if self.relative and len(members) > 1 else self.lam
        if self.lam and len(members) > 1 and not state.round:
            _say_if_little_changes(everyone, share, strength, largest, len(members))
        clients = {
            "ids": torch.from_numpy(everyone.ids),
            "group": torch.from_numpy(group),
            "prior": everyone.prior,
            "scale": strength / share,
            "loss": everyone.evaluate(state.model, "train")["loss"],
        }
        return state.with_server(clients=clients)

    def _groups(self, everyone: Cohort) -> NDArray[np.int64]:
        """Return the group of each client: its cluster, its group in the data, or itself."""
        if self.index is None:
            return everyone.groups if self.fairness == "group" else everyone.ids
        points = index_points(self.index, everyone, self.compare)
        return cluster_points(
            points, self.clusters, kind=self.clustering, choice=self.choice, key=everyone.key
        )

    def send(self, state: State, cohort: Cohort) -> tuple[dict[str, Tree], dict[str, Tensor]]:
        """Send θ, and to each client the factor of its steps."""
        clients, here = state.server["clients"], locate(state.server["clients"], cohort)
        group = clients["group"]
        order = ordering(torch.bincount(group, weights=clients["loss"]) / torch.bincount(group))
        return {"model": state.model}, {
            "step_factor": 1 + clients["scale"][here] * order[group[here]]
        }

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Update θ, and store the cohort's losses."""
        clients, here = state.server["clients"], locate(state.server["clients"], cohort)
        weights = clients["prior"][here] * len(clients["ids"]) / len(here)
        new = state.with_global(shift(state, updates, weights, cohort.prior))
        loss = (
            cohort.evaluate(new.model, "train")["loss"]
            if self.exact
            else updates.reports["loss_after"]
        )
        new = new.with_server(clients={**clients, "loss": clients["loss"].index_put((here,), loss)})
        return new if self.index is None else new.with_notes(clusters=clients["group"][here])


def _say_if_little_changes(
    everyone: Cohort, share: Tensor, strength: float, largest: float, groups: int
) -> None:
    """Log a warning if clients with 99 % of all samples always have factors within 1 % of one."""
    reach = strength * (groups - 1) / share
    affected = float(everyone.sizes[(reach > _LITTLE).numpy()].sum() / everyone.sizes.sum())
    if affected <= _FEW:
        smallest = int(everyone.ids[int(share.argmin())])
        log.warning(
            "gifair: lambda_max = %.3g, because of client %d; clients with %.1f %% of all samples "
            "have factors within 1 %% of one, so this is nearly FedAvg. Groups of more equal size "
            "leave more to redistribute.",
            largest,
            smallest,
            100 * (1 - affected),
        )


def ordering(losses: Tensor) -> Tensor:
    """Return r_i = Σ_j sign(L_i − L_j): the number of lower losses minus that of higher losses.

    Parameters
    ----------
    losses : Tensor
        One loss per group.

    Returns
    -------
    Tensor
        One integer per group, as float64; groups of equal loss have the same.

    Examples
    --------
    >>> ordering(torch.tensor([0.5, 2.0, 0.5, 1.0]))
    tensor([-2.,  3., -2.,  1.], dtype=torch.float64)
    """
    rising = losses.sort().values
    lower, not_higher = (torch.searchsorted(rising, losses, right=right) for right in (False, True))
    return (lower - (len(losses) - not_higher)).double()
