"""Client2Vec (Guo et al., 2024): use an index of each client's data around any other method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipoise.checks import count, one_of, real
from equipoise.client import Client
from equipoise.client_index import COMPARED, ClientIndex, index_for, similarity_to
from equipoise.errors import InputError, unknown
from equipoise.masked import label_sums
from equipoise.method import (
    Candidates,
    Cohort,
    Loss,
    Method,
    Phase,
    Sees,
    State,
    Updates,
    carried_over,
    finished_by,
    locate,
)
from equipoise.methods import build, register
from equipoise.models.base import outputs_of, width_of
from equipoise.models.kernel_modules import module_with_triton
from equipoise.privacy import check_release, index_epsilon, noise_sums, released_index
from equipoise.random import Purpose, choose, choose_by_weight
from equipoise.tree import PERSONAL, Tree, in_parts
from equipoise.wrapping import WithPrior, Wrapper

USES = ("sampling", "aggregation", "training")
# What the server stores for every client: index, size, last round drawn, and the sum of eq. 3.
_KEPT = "client2vec"
_PROJECTION, _CLASSIFIER = "projection", "projection_head"


@register("client2vec", paper="Guo et al., 2024", sees=Sees.REPRESENTATIONS)
@dataclass(frozen=True)
class Client2Vec(Wrapper):
    """Draw, weight and train clients by their indices β = [β_f; β_l], around any host.

    **Sampling**: a client is drawn with probability proportional to exp(S(β_i, C)/τ), where C are
    the clients of the round before and S is :func:`~equipoise.client_index.similarity_to` (eq. 1).
    Clients drawn in the last M/(2|C|) rounds are left out, with M the number of all clients. Round
    1 is uniform. This replaces the host's sampler.

    **Aggregation**: the host's prior q becomes q_i exp(A_i/λ), scaled to sum to one, with A_i = Σ_r
    γ^(t−r) S(β_i, C_r) over all rounds up to the present one (eq. 3).

    **Training**: in phases that train features, ``weight`` times L_orth + L_dist is added to the
    loss (eq. 4). z_P = P z is a learned projection of the features. L_orth is the mean of
    |⟨z_P, β_f,j⟩| over all clients j, and L_dist = KL(h(z) ‖ h_P(z_P)) compares the predictions of
    the head h with those of a second head on the projection.

    The index is read from a file (:class:`~equipoise.client_index.ClientIndex`). Without one, the
    server asks all clients before round 1 for the mean of z under the initial model and for their
    label frequencies.

    Choices that the paper leaves open: if fewer clients remain than are to be drawn, the ban is
    shortened round by round. P and h_P are trained, sent and averaged like the rest of the model.
    L_orth is a mean and not a sum. Gradients flow through both sides of L_dist. A client that joins
    later has A_i = 0. Clients that a guard drops count as drawn in sampling, but not in eq. 3.
    Clients that are left out for another reason do not count.

    Parameters
    ----------
    host : Method
        The wrapped method. ``local`` and ``central`` cannot be wrapped.
    uses : tuple of {"sampling", "aggregation", "training"}
        What the index is used for.
    index : str, optional
        The file of the index. Only the server reads it.
    width : int, optional
        The length of β_f. By default it is read from the file, so it must be set for clients on
        other machines.
    digest : str, optional
        The hash of the index in the file. It is filled in automatically, so that a run cannot be
        resumed with another index.
    compare : {"both", "features", "labels"}
        Which part of the index S compares.
    tau : float
        τ, the temperature of sampling, above 0.
    gamma : float
        γ in [0, 1], the discount of earlier rounds in aggregation.
    lam : float
        λ, the temperature of aggregation, above 0.
    clip : float, optional
        C, the norm to which β_f and β_l are clipped before clients send them. Only for an index
        that is not read from a file.
    noise : float
        The standard deviation of Gaussian noise on both, as a multiple of C. The notes of a round
        contain the ε spent on the index (``index_epsilon``); see
        :func:`equipoise.privacy.gaussian_epsilon`. It does not protect what the host sends.
    privacy_delta : float
        The δ that belongs to this ε.
    weight : float
        The weight of L_orth and L_dist, at least 0.
    orthogonal : bool
        Whether to use L_orth, or L_dist only.
    unit_length : bool
        Whether β_f is scaled to length 1 in L_orth, as in S, or used unchanged (eq. 4). With long
        vectors L_orth is much larger than the other losses, and models can collapse.
    """

    host: Method = field(default_factory=lambda: build("fedavg"))
    uses: tuple[str, ...] = USES
    index: str | None = None
    width: int | None = None
    digest: str | None = None
    compare: str = "both"
    tau: float = 0.5
    gamma: float = 0.5
    lam: float = 1.0
    weight: float = 1.0
    orthogonal: bool = True
    unit_length: bool = False
    clip: float | None = None
    noise: float = 0.0
    privacy_delta: float = 1e-5

    def __post_init__(self) -> None:
        """Check the hyper-parameters and the host."""
        for use in self.uses:
            if use not in USES:
                raise unknown("use", use, USES, where="client2vec.uses")
        if not self.uses or len(set(self.uses)) < len(self.uses):
            raise InputError(
                f"client2vec.uses must name each use once, got {list(self.uses)!r}; valid: "
                f"{', '.join(USES)}"
            )
        one_of(self.compare, COMPARED, "client2vec.compare")
        real(self.tau, "client2vec.tau")
        real(self.lam, "client2vec.lam")
        real(self.weight, "client2vec.weight", least=0)
        if not 0 <= self.gamma <= 1:
            raise InputError(f"client2vec.gamma must be in [0, 1], got {self.gamma!r}")
        if self.width is not None:
            count(self.width, "client2vec.width")
        check_release("client2vec", self.clip, self.noise, self.privacy_delta)
        if self.clip is not None and self.index is not None:
            raise InputError(
                "client2vec.clip is for an index that clients send, but client2vec.index is a "
                "file; valid: an index made with clip and noise of the local rule dsaign"
            )
        self._refuse_host()
        self._read_about_index()

    def _refuse_host(self) -> None:
        host = self.host
        reason = None
        if isinstance(host.local, Client2Vec):
            reason = "it already has an index"
        elif host.sees is Sees.DATA:
            reason = "it pools the data of all clients"
        elif host.view.gathers:
            reason = "its clients do not train"
        elif host.local.keeps == "all":
            reason = "its clients share nothing"
        if reason:
            raise InputError(
                f"client2vec cannot wrap {host.name!r}: {reason}; valid: any other method as host"
            )
        if "aggregation" in self.uses and (reason := host.aggregation.ignores_prior):
            others = [use for use in USES if use != "aggregation"]
            raise InputError(
                f"client2vec.uses: aggregation changes the prior weights of clients, which "
                f"{host.name!r} does not use: {reason}; valid: {', '.join(others)}"
            )

    def _read_about_index(self) -> None:
        """Set width and hash of the index, if its file can be read."""
        if self.index is None:
            if self.width is not None or self.digest is not None:
                raise InputError(
                    "client2vec.width and client2vec.digest need client2vec.index, which is not set"
                )
            return
        if not Path(self.index).exists():
            if self.width is None:
                raise InputError(
                    f"client2vec.index: there is no file {self.index}; valid: a file, or "
                    "client2vec.width on machines that need not read it"
                )
            return
        found = ClientIndex.read(self.index)
        for name, known in (("width", found.width), ("digest", found.digest())):
            given = getattr(self, name)
            if given not in (None, known):
                raise InputError(
                    f"client2vec.{name} is {given!r}, but that of the index in {self.index} is "
                    f"{known!r}"
                )
            object.__setattr__(self, name, known)

    # ---- the index -------------------------------------------------------------------------------

    @property
    def needs_everyone(self) -> bool:  # type: ignore[override]
        """Return True: all clients need an index before round 1."""
        return True

    def begin(self, state: State, everyone: Cohort) -> State:
        """Look up the indices of all clients."""
        return (
            super().begin(state, everyone).with_server(**{_KEPT: self._of_clients(state, everyone)})
        )

    def admit(self, state: State, everyone: Cohort) -> State:
        """Look up the indices of clients that join."""
        before = state.server[_KEPT]
        kept = carried_over(before, self._of_clients(state, everyone, before["ids"].numpy()))
        return super().admit(state, everyone).with_server(**{_KEPT: kept})

    def _of_clients(
        self, state: State, everyone: Cohort, known: Sequence[int] | NDArray[np.int64] = ()
    ) -> Tree:
        """Return what the server stores for clients that have never taken part.

        With noise, clients whose index is known do not send it again.
        """
        ids = torch.from_numpy(everyone.ids)
        if self.index is None:
            each = {"new": torch.from_numpy(~np.isin(everyone.ids, known))} if self.noise else None
            said = everyone.ask("mean_index", model=state.model, each=each)
            features, labels = said["features"], said["labels"]
        else:
            found = index_for(self.index, everyone)
            features, labels = found.features, found.labels
        return {
            "ids": ids,
            "features": features.cpu().double(),
            "labels": labels.cpu().double(),
            "size": torch.from_numpy(everyone.sizes).double(),
            # The round in which a client was drawn last, counted from 1.
            "last": torch.zeros_like(ids),
            "profit": torch.zeros(len(ids), dtype=torch.float64),
        }

    @finished_by("released_mean")
    def mean_index(self, client: Client) -> Tree:
        """Return the sums of z and of one-hot labels; a question to the client."""
        z = client.features().flatten(1)
        ones = torch.ones_like(z[:, 0])
        if client.network.task.labels:
            labels = label_sums(ones, client.y, client.output().shape[1], client.mask)
        else:
            labels = client.sum(
                client.y.flatten(1) if client.y.dim() > 1 else client.y.unsqueeze(1)
            )
        sums = {"features": client.sum(z), "labels": labels.to(z.dtype), "count": client.sum(ones)}
        width = z.shape[1] + labels.shape[0]
        if not self.noise:
            return sums
        sums |= noise_sums(client, width, Purpose.NOISE_OF_INDEX)
        return {
            n: t if n in ("count", "passes") else t * client.each["new"] for n, t in sums.items()
        }

    def released_mean(self, sums: Tree) -> Tree:
        """Compute the index from the sums, with clipping and noise if they are set."""
        return released_index(sums, self.clip, self.noise)

    def _similarity(self, clients: Tree, members: Tensor) -> Tensor:
        return similarity_to(
            clients["features"], clients["labels"], clients["size"], members, self.compare
        )

    # ---- sampling --------------------------------------------------------------------------------

    @property
    def reads_state(self) -> bool:  # type: ignore[override]
        """Whether the choice depends on the state: by the index it does."""
        return "sampling" in self.uses or not self.host.sampler.looks_ahead

    def select(self, state: State, candidates: Candidates, count: int) -> NDArray[np.int64]:
        """Draw clients that are similar to those of the round before."""
        if "sampling" not in self.uses:
            return super().select(state, candidates, count)
        clients = state.server[_KEPT]
        before = (clients["last"] == state.round).nonzero().flatten()
        if not state.round or not len(before):
            return candidates.ids[choose(candidates.key, len(candidates.ids), count)]
        here = torch.searchsorted(clients["ids"], torch.from_numpy(candidates.ids))
        allowed = rested(
            clients["last"][here], state.round + 1, len(clients["ids"]) / (2 * len(before)), count
        )
        similarity = self._similarity(clients, before)[here]
        # A common factor does not matter. This one prevents overflow if τ is small, and the lower
        # bound keeps the probability of every client that may be drawn above 0.
        exponents = (similarity - similarity[allowed].max()) / self.tau
        weights = torch.exp(exponents.clamp(-700, 0)) * allowed
        return candidates.ids[choose_by_weight(candidates.key, weights.numpy(), count)]

    def learn(self, state: State, cohort: Cohort) -> State:
        """Record which clients were drawn.

        Clients that a guard has dropped were drawn, too. Otherwise they would never rest, and
        hostile clients would be drawn more often than others.
        """
        if "sampling" not in self.uses:
            return super().learn(state, cohort)
        clients = state.server[_KEPT]
        drawn = [*cohort.ids.tolist(), *state.notes.get("guard_dropped", ())]
        here = torch.isin(clients["ids"], torch.tensor(drawn))
        last = torch.where(here, state.round + 1, clients["last"])
        return state.with_server(**{_KEPT: {**clients, "last": last}})

    # ---- aggregation -----------------------------------------------------------------------------

    def _profit(self, state: State, cohort: Cohort) -> Tensor:
        """Return A of all clients, including the current cohort."""
        clients = state.server[_KEPT]
        return self.gamma * clients["profit"] + self._similarity(clients, locate(clients, cohort))

    def _weighed(self, state: State, cohort: Cohort) -> Cohort:
        """Return the cohort with the prior of eq. 3."""
        if "aggregation" not in self.uses:
            return cohort
        own = self._profit(state, cohort)[locate(state.server[_KEPT], cohort)]
        return WithPrior(cohort, similar_weights(cohort.prior, own, self.lam))

    def prepare(self, state: State, cohort: Cohort) -> State:
        """Call the host's ``prepare`` with the new prior."""
        return super().prepare(state, self._weighed(state, cohort))

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Call the host's ``combine`` with the new prior."""
        weighed = self._weighed(state, cohort)
        new = super().combine(state, updates, weighed)
        if self.noise:
            new = new.with_notes(index_epsilon=index_epsilon(self.noise, self.privacy_delta))
        if "aggregation" not in self.uses:
            return new
        kept = {**state.server[_KEPT], "profit": self._profit(state, cohort)}
        return new.with_server(**{_KEPT: kept}).with_notes(prior=weighed.prior)

    # ---- training --------------------------------------------------------------------------------

    @property
    def _sends_index(self) -> tuple[str, ...]:
        return ("index",) if "training" in self.uses and self.orthogonal else ()

    @property
    def sends(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the host's names, and that of all clients' β_f."""
        return *super().sends, *self._sends_index

    @property
    def sends_once(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the name of β_f, which changes only when clients join."""
        return *super().sends_once, *self._sends_index

    @property
    def receives(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the host's names, and that of all clients' β_f."""
        return *super().receives, *self._sends_index

    def send(self, state: State, cohort: Cohort) -> tuple[dict[str, Tree], dict[str, Tensor]]:
        """Send β_f of all clients in addition to what the host sends."""
        shared, each = super().send(state, self._weighed(state, cohort))
        if self._sends_index:
            like, features = next(iter(state.model.values())), state.server[_KEPT]["features"]
            features = nn.functional.normalize(features, dim=1) if self.unit_length else features
            shared = {**shared, "index": {"features": features.to(like.device, like.dtype)}}
        return shared, each

    def extend(self, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """Add the projection and its classifier."""
        model = super().extend(model, shape)
        if "training" in self.uses:
            z = width_of(model, shape)
            width = z if self.width is None else self.width
            model.add_module(_PROJECTION, nn.Linear(z, width, bias=False))
            model.add_module(_CLASSIFIER, nn.Linear(width, outputs_of(model, z)))
        return model

    def phases(self) -> Sequence[Phase]:
        """Add the regularizer to the phases that train features."""
        phases = super().phases()
        return [self._regularized(phase) for phase in phases] if "training" in self.uses else phases

    def _regularized(self, phase: Phase) -> Phase:
        parts = (phase.move,) if isinstance(phase.move, str) else phase.move
        shared, personal = (
            any(_moves_features(part, prefix) for part in parts) for prefix in ("", PERSONAL)
        )
        if not shared and not personal:
            return phase
        move = parts if not shared or "all" in parts else (*parts, _PROJECTION, _CLASSIFIER)
        losses = tuple(
            self._with_regularizer(loss, personal and not shared) for loss in phase.losses
        )
        return replace(phase, move=move, loss=losses)

    def _with_regularizer(self, loss: Loss, personal: bool) -> Loss:
        def regularized(client: Client) -> Tensor:
            values = loss(client)
            return self.regularized(values, client.personal() if personal else client)

        return regularized

    def regularized(self, values: Tensor, client: Client) -> Tensor:
        """Add ``weight`` times L_orth + L_dist to the loss of each sample."""
        client.network.task.require_labels("client2vec.uses: training compares class probabilities")
        projected = client.part(_PROJECTION, client.features().flatten(1))
        scores, kernels = client.output(), _kernels_for(projected)
        index = client.sent["index"]["features"] if self.orthogonal else None
        made: Tensor
        if kernels is not None and client.network.autocast is None:
            # The kernels apply the classifier themselves.
            weight, bias = (client.params[f"{_CLASSIFIER}.{name}"] for name in ("weight", "bias"))
            if kernels.fit_head(values, scores, projected, weight, index):
                made = kernels.add_head_terms(
                    values, scores, projected, (weight, bias), index, self.weight
                )
                return made
        others = client.part(_CLASSIFIER, projected)
        products = None if index is None else projected @ index.T
        if kernels is not None and kernels.fit(values, scores, others, products):
            made = kernels.add_terms(values, scores, others, products, self.weight)
            return made
        of_z, of_projected = (each.log_softmax(1) for each in (scores, others))
        terms = (of_z.exp() * (of_z - of_projected)).sum(1)
        if products is not None:
            terms = terms + products.abs().mean(1)
        return values + self.weight * terms


def similar_weights(prior: Tensor, profit: Tensor, lam: float) -> Tensor:
    """Return q_i exp(A_i/λ), scaled to sum to one (eq. 3).

    Parameters
    ----------
    prior : Tensor
        q, one weight per client.
    profit : Tensor
        A, the similarity of each client to the clients of all rounds.
    lam : float
        λ, the temperature. The larger it is, the closer the weights are to q.

    Returns
    -------
    Tensor
        The weights, which maximise Σ p_i A_i + λ Σ p_i log(q_i/p_i) (eq. 2).

    Examples
    --------
    >>> similar_weights(torch.tensor([0.25, 0.75]), torch.tensor([0.0, 0.0]), 1.0)
    tensor([0.2500, 0.7500])
    """
    return torch.softmax(prior.log() + profit / lam, dim=0)


def rested(last: Tensor, round_: int, ban: float, count: int) -> Tensor:
    """Return which clients may be drawn: those not drawn in the last rounds.

    Parameters
    ----------
    last : Tensor
        The round in which each client was drawn last; 0 for never.
    round_ : int
        The round to draw for.
    ban : float
        Number of rounds for which a client is left out. It is shortened if too few clients remain.
    count : int
        Minimum number of clients that must remain.

    Returns
    -------
    Tensor
        Booleans.

    Examples
    --------
    >>> rested(torch.tensor([5, 4, 3, 0]), 6, 2.5, 2)
    tensor([False, False,  True,  True])
    >>> rested(torch.tensor([5, 4, 3, 0]), 6, 2.5, 3)
    tensor([False,  True,  True,  True])
    """
    allowed = (last == 0) | (round_ - last > ban)
    while int(allowed.sum()) < count and ban > 0:
        ban -= 1
        allowed = (last == 0) | (round_ - last > ban)
    return allowed


def _kernels_for(x: Tensor) -> Any:
    """Return the module of kernels for tensors on a GPU, or ``None`` if there is none."""
    return module_with_triton("index_kernels", x.device) if x.is_cuda else None


def _moves_features(part: str, prefix: str) -> bool:
    """Return whether a part contains features, of the shared or of the personal model."""
    whole = part == "personal" if prefix else part == "all"
    return whole or in_parts(part, f"{prefix}features")
