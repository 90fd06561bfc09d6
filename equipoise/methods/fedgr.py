"""FedGR, the half of FedGCR on the server (Cheng et al., AAAI 2024): weights by losses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.checks import one_of, real
from equipoise.client import Client
from equipoise.errors import InputError
from equipoise.grouping import Grouping
from equipoise.index_clusters import index_points
from equipoise.method import Cohort, Sees, State, Updates, mix
from equipoise.methods import register
from equipoise.models.fedgc import Customized
from equipoise.models.vit import Prompted


@register("fedgr", paper="Cheng et al., AAAI 2024", sees=Sees.REPRESENTATIONS)
@dataclass(frozen=True)
class FedGR(Grouping):
    """Weight client j of group i by ω_ij (L_ij^(1−β) L̃_i^β)^(q+1) (eq. 3).

    L_ij is the mean loss of the received model on the client's training samples. (The sum in eq. 2
    would count sizes twice.) L̃_i is the mean of L_ij over the clients of group i. In round r,
    β = δ (1 − γ^(r−1)) (eq. 5). Weights are normalised to sum to one, which the paper omits.

    Parameters
    ----------
    clusters, clustering, choice, soft, index, compare, digest
        The clusters; see :class:`~equipoise.grouping.Grouping`.
    groups : {"classtoken", "representation", "index", "given"}
        Clusters of the clients' mean frozen class tokens, which each client sends once; clusters of
        h̃, which the local rule must send (``fedgc``); clusters of a client index, for any model; or
        the federation's own groups.
    q : float
        The larger q, the larger the weights of clients with high losses; −1 gives data weights.
    delta : float
        δ, the value that β approaches.
    gamma : float
        γ, the rate at which β approaches δ. The public code uses 0.9 and starts at β = 0.05.
    """

    groups: str = "classtoken"
    q: float = 1.0
    delta: float = 0.5
    gamma: float = 0.5
    usual_model = "vitprompts"
    needs = ("loss_before",)

    def __post_init__(self) -> None:
        """Refuse values outside the paper's range."""
        super().__post_init__()
        one_of(
            self.groups, ("classtoken", "representation", "index", "given"), f"{self.name}.groups"
        )
        if self.groups == "index" and self.index is None:
            raise InputError(
                f"{self.name}.groups='index' needs {self.name}.index, the file of a client index"
            )
        if self.index is not None and self.groups in ("classtoken", "given") and not self.sends:
            raise InputError(
                f"{self.name}.index is not used with {self.name}.groups={self.groups!r}; valid: "
                "groups='index'"
            )
        real(self.q, f"{self.name}.q", least=-1)
        for name in ("delta", "gamma"):
            if not real(getattr(self, name), f"{self.name}.{name}", least=0) <= 1:
                raise InputError(
                    f"{self.name}.{name} must be a number from 0 to 1, got {getattr(self, name)!r}"
                )

    @property
    def sends(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the name of the centres H, if they are computed from h̃."""
        return ("centres",) if self.groups == "representation" else ()

    @property
    def collects(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the name of h̃, if groups are computed from it."""
        return ("representation",) if self.groups == "representation" else ()

    def extend(self, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """Refuse a model without a frozen class token, if groups are computed from it."""
        if self.groups == "classtoken" and not isinstance(
            getattr(model, "features", None), Customized | Prompted
        ):
            raise InputError(
                f"{self.name}.groups='classtoken' needs a model with a frozen transformer, such as "
                "vitprompts or fedgc; valid for other models: groups='given' or groups='index'"
            )
        return model

    def begin(self, state: State, everyone: Cohort) -> State:
        """Cluster all clients by their index, and ask for representations if centres are needed."""
        if self.groups != "index":
            return super().begin(state, everyone)
        points = torch.from_numpy(index_points(str(self.index), everyone, self.compare))
        return self.grouped(state, points, everyone)

    def admit(self, state: State, everyone: Cohort) -> State:
        """Cluster new clients together with the others, if clusters are those of the index."""
        return (
            self.begin(state, everyone)
            if self.groups == "index"
            else super().admit(state, everyone)
        )

    def prepare(self, state: State, cohort: Cohort) -> State:
        """Ask the cohort for class tokens if some of its clients have not sent theirs."""
        asked = (
            "clients" in state.server and np.isin(cohort.ids, state.server["clients"]["ids"]).all()
        )
        if asked or self.groups != "classtoken":
            return state
        sums = cohort.ask("class_tokens")
        return self.grouped(
            state, sums / torch.from_numpy(cohort.sizes).to(sums).unsqueeze(1), cohort
        )

    def class_tokens(self, client: Client) -> Tensor:
        """Sum the class tokens of the frozen transformer without prompts over a batch."""
        encoded = client.encoded()
        features = client.network.module.features
        return client.sum(
            encoded[:, 0]
            if isinstance(features, Customized)
            else client.part("features.encoder", encoded)
        )

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Weight clients by their losses and those of their groups."""
        if self.collects:
            state = self.grouped(state, updates.uploads["representation"]["h"], cohort)
        elif self.groups in ("classtoken", "index"):
            state = self.noted(state, cohort)
        if self.groups == "given":
            group = torch.from_numpy(np.unique(cohort.groups, return_inverse=True)[1].reshape(-1))
            shares = F.one_hot(group)
        else:
            shares = self.memberships(state, cohort)
        beta = self.beta(state.round)
        weights = group_weights(cohort.prior, updates.reports["loss_before"], shares, self.q, beta)
        return state.with_global(mix(updates, weights)).with_notes(weights=weights, beta=beta)

    def beta(self, finished: int) -> float:
        """Return β of a round (eq. 5).

        Examples
        --------
        >>> [FedGR().beta(finished) for finished in range(3)]
        [0.0, 0.25, 0.375]
        """
        return self.delta * (1 - self.gamma**finished)


def group_weights(prior: Tensor, losses: Tensor, shares: Tensor, q: float, beta: float) -> Tensor:
    """Return the weights of eq. 3, normalised.

    Parameters
    ----------
    prior : Tensor
        ω, one number per client.
    losses : Tensor
        L, none negative.
    shares : Tensor
        ``[clients, groups]``: the membership of each client in each group, ones and zeros if groups
        are disjoint.
    q, beta : float
        The exponents.

    Returns
    -------
    Tensor
        The weights in float64, summing to one; ω if all losses are zero.

    Examples
    --------
    >>> pairs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> prior, losses = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1.0, 2.0, 100 / 33, 4.0])
    >>> group_weights(prior, losses, pairs, q=1.0, beta=0.5)
    tensor([0.0157, 0.0627, 0.3339, 0.5877], dtype=torch.float64)
    """
    prior, losses, shares = (tensor.double().cpu() for tensor in (prior, losses, shares))
    means = shares.T @ losses / shares.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
    # Logarithms avoid overflow for large losses and exponents. With xlogy, 0 to the power 0 is 1.
    mixed = torch.xlogy(1 - beta, losses) + torch.xlogy(beta, shares @ means)
    scores = prior.log() + (q + 1) * mixed if q > -1 else prior.log()
    return scores.softmax(0) if scores.isfinite().any() else prior / prior.sum()
