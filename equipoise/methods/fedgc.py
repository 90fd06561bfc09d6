"""FedGC, the half of FedGCR on clients (Cheng et al., AAAI 2024): prompts for types of clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from equipoise.checks import one_of, real
from equipoise.client import Client, Finished
from equipoise.errors import InputError
from equipoise.grouping import Grouping
from equipoise.masked import label_sums
from equipoise.method import Cohort, Fact, LocalRule, Phase, Sees, State, Updates, finished_by, mix
from equipoise.methods import register
from equipoise.models.fedgc import Customized
from equipoise.privacy import check_release, gaussian_epsilon, noise_sums, released
from equipoise.random import Purpose
from equipoise.tree import Tree, select

_GCNET = "features.gcnet"


@dataclass(frozen=True)
class Customization(LocalRule):
    """Train with ℓ_CE + λ₁ ℓ_GC + λ₂ ℓ_RA (eq. 6), and send the client representation h̃ (eq. 4).

    ℓ_GC (eq. 7) pulls an image's h towards the centre of its client's cluster, and away from the
    other centres and from the client's own h̃ of the previous round. ℓ_RA (eq. 8) pulls z towards
    that of the received model, and away from that of the client's own model of the previous round.
    Until the server has centres, the loss is the cross-entropy (algorithm 1, line 9). For a client
    without a cluster or without a memory, the terms that need them are left out. The anchors, which
    hold prompts and GC-Net only, are in evaluation mode. The public code leaves their dropout on,
    and uses a received model that is one round old.

    Parameters
    ----------
    lam1, lam2 : float
        λ₁ and λ₂.
    tau : float
        τ, in both losses; the public code has none in ℓ_RA.
    similarity : {"dot", "cosine"}
        The dot product, as in eqs. 7 and 8, or the cosine, as in the public code. For a pretrained
        transformer, dot products of z are large, and so is ℓ_RA.
    representation : {"trained", "received"}
        The model that h̃ is computed with: the client's own after training (algorithm 1, line 15),
        or the received one, as in the public code.
    clip : float, optional
        C, the norm to which h̃ is clipped.
    noise : float
        The standard deviation of Gaussian noise on h̃, as a multiple of C. The notes of a round
        contain the ε spent on h̃ by clients that have taken part in all rounds; see
        :func:`equipoise.privacy.gaussian_epsilon`. It does not protect the parameters that clients
        send. Noise is drawn from the run's seed, so those who see h̃ must not know the seed.
    privacy_delta : float
        The δ that belongs to this ε.
    """

    lam1: float = 0.5
    lam2: float = 0.1
    tau: float = 0.5
    similarity: str = "dot"
    representation: str = "trained"
    clip: float | None = None
    noise: float = 0.0
    privacy_delta: float = 1e-5
    usual_model = "fedgc"
    receives = ("centres",)
    uploads = ("representation",)

    def __post_init__(self) -> None:
        """Refuse values outside the paper's range."""
        for name in ("lam1", "lam2"):
            real(getattr(self, name), f"{self.name}.{name}", least=0)
        real(self.tau, f"{self.name}.tau")
        one_of(self.similarity, ("dot", "cosine"), f"{self.name}.similarity")
        one_of(self.representation, ("trained", "received"), f"{self.name}.representation")
        check_release(self.name, self.clip, self.noise, self.privacy_delta)

    def extend(self, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """Refuse a model without GC-Net."""
        if not isinstance(getattr(model, "features", None), Customized):
            raise InputError(
                f"method {self.name!r} trains prompts and GC-Net, which the model lacks; valid: "
                "model 'fedgc'"
            )
        return model

    def phases(self) -> tuple[Phase, ...]:
        """Train prompts, GC-Net and head together."""
        return (Phase(loss=self.loss),)

    def loss(self, client: Client) -> Tensor:
        """Add both terms to the cross-entropy, once there are centres (eq. 6)."""
        if "centres" not in client.sent:
            return client.task_loss()
        # Compute h first, so that images that are not encoded pass through the stem only once.
        customization = self.customization(client)
        return client.task_loss() + self.lam1 * customization + self.lam2 * self.alignment(client)

    def customization(self, client: Client) -> Tensor:
        """Return ℓ_GC of each sample (eq. 7).

        For a client with shares in several clusters it is the mean weighted by these shares.
        """
        h = _shift_of(client)
        toward = self._similarity(h, client.sent["centres"]["h"])
        own = self._similarity(h, self._own_before(client).unsqueeze(0))
        own = torch.where(client.seen, own, -torch.inf)
        denominator = torch.cat([own, toward], 1).logsumexp(1)
        return (_membership(client, toward) * (denominator.unsqueeze(1) - toward)).sum(1)

    def alignment(self, client: Client) -> Tensor:
        """Return ℓ_RA of each sample (eq. 8), which is log(1 + exp((z·z_prev − z·z₀)/τ))."""
        z, own = client.features(), client.memory["previous"]
        received = {name: client.received[name] for name in own}
        previous, first = (
            self._similarity(z, client.at(anchor).features(), paired=True)
            for anchor in (own, received)
        )
        return client.seen * F.softplus(previous - first)

    def _similarity(self, a: Tensor, b: Tensor, *, paired: bool = False) -> Tensor:
        """Return similarities of rows of a to all rows of b, or to the same row, divided by τ."""
        if self.similarity == "cosine":
            a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
        return ((a * b).sum(1) if paired else a @ b.T) / self.tau

    def facts(self) -> dict[str, Fact]:
        """Compute h̃ every round."""
        return {
            "representation": Fact(
                sums=self.sums_of_h, then=self.released, model=self.representation
            )
        }

    @finished_by("released")
    def first_representation(self, client: Client) -> Tree:
        """Return h̃ of the initial model, with clipping and noise as in later rounds; a question."""
        return self.sums_of_h(client, Purpose.NOISE_OF_FIRST)

    def sums_of_h(self, client: Client, purpose: Purpose = Purpose.NOISE) -> Tree:
        """Sum h over the samples of each class, and count them."""
        h, labels = _shift_of(client), client.y
        classes = len(client.network.initial()["head.bias"])
        if not client.network.task.labels:
            # Without classes there is nothing to balance: treat all samples as one class.
            labels, classes = torch.zeros_like(h[:, 0], dtype=torch.int64), 1
        sums = {
            "h": label_sums(h, labels, classes, client.mask),
            "count": label_sums(torch.ones_like(h[:, 0]), labels, classes, client.mask),
        }
        return sums | (noise_sums(client, h.shape[1], purpose) if self.noise else {})

    def released(self, sums: Tree) -> Tree:
        """Compute h̃ from the sums, with clipping and noise if they are set."""
        draws = sums["noise"] / sums["passes"] if self.noise else None
        return {"h": released(balanced_mean(sums)["h"], self.clip, self.noise, draws)}

    def spent(self, state: State, before: int) -> dict[str, float]:
        """Return a note of the ε spent up to this round, or nothing without noise."""
        releases = before + state.round + 1
        return (
            {"epsilon": gaussian_epsilon(self.noise, releases, self.privacy_delta)}
            if self.noise
            else {}
        )

    def first_memory(self, model: Tree) -> dict[str, Tree]:
        """Return the received prompts and GC-Net. Losses do not use them while ``seen`` is 0."""
        memory = {"previous": {name: model[name] for name in select(model, "features")}}
        if self.representation == "received":
            memory["before"] = {"h": torch.zeros_like(model["features.prompts"][0])}
        return memory

    def finish(self, client: Finished) -> tuple[dict[str, Tree], dict[str, Tree]]:
        """Store the trained prompts and GC-Net, and h̃ if the next round overwrites it."""
        memory = {"previous": {name: client.params[name] for name in client.memory["previous"]}}
        if self.representation == "received":
            memory["before"] = dict(client.memory["representation"])
        return memory, {}

    def _own_before(self, client: Client) -> Tensor:
        """Return h̃ of the client's previous round."""
        return client.memory["before" if self.representation == "received" else "representation"][
            "h"
        ]


def _shift_of(client: Client) -> Tensor:
    """Return h of each image: the output of GC-Net for the class token of the first pass."""
    return client.part(_GCNET, client.encoded()[:, 0].to(client.network.dtype))


def balanced_mean(sums: Tree) -> Tree:
    """Return h̃, the mean over classes of the means of h (eq. 4).

    The mean is over the classes that the client has. The paper sums over all C classes, which is
    not defined for classes without samples.

    Examples
    --------
    >>> h, count = torch.tensor([[6.0, 0.0], [0.0, 0.0], [1.0, 2.0]]), torch.tensor([3.0, 0.0, 1.0])
    >>> balanced_mean({"h": h, "count": count})
    {'h': tensor([1.5000, 1.0000])}
    """
    counts = sums["count"].unsqueeze(1)
    means = sums["h"] / counts.clamp(min=1)
    return {"h": means.sum(0) / (counts > 0).sum().clamp(min=1)}


def _membership(client: Client, toward: Tensor) -> Tensor:
    """Return the client's share in each of the received centres; zeros without a cluster."""
    if "membership" in client.each:
        return client.each["membership"].to(toward.dtype)
    return (torch.arange(toward.shape[1], device=toward.device) == client.each["cluster"]).to(
        toward.dtype
    )


@register("fedgc", paper="Cheng et al., AAAI 2024", sees=Sees.REPRESENTATIONS)
@dataclass(frozen=True)
class FedGC(Customization, Grouping):
    """Customize prompts for clusters of clients, and weight clients by their data.

    This is FedGCR without FedGR.

    Parameters
    ----------
    lam1, lam2, tau, similarity
        The losses; see :class:`Customization`.
    representation, clip, noise, privacy_delta
        The client representations; see :class:`Customization`.
    clusters, clustering, choice, soft, index, compare, digest
        The clusters; see :class:`~equipoise.grouping.Grouping`.
    """

    sends = ("centres",)
    collects = ("representation",)

    def __post_init__(self) -> None:
        """Refuse values outside the paper's range."""
        Customization.__post_init__(self)
        Grouping.__post_init__(self)

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Average the models, and cluster the clients."""
        state = self.grouped(state, updates.uploads["representation"]["h"], cohort)
        return state.with_global(mix(updates, cohort.prior)).with_notes(
            **self.spent(state, int(self.needs_everyone))
        )


def representations_of(state: State, cohort: Cohort) -> Tensor:
    """Ask clients, which may be new or held out, for their h̃ of the global model, without noise.

    Parameters
    ----------
    state : State
        Holds the model.
    cohort : Cohort
        The clients. Their local rule must be ``fedgc`` or ``fedgcr``.

    Returns
    -------
    Tensor
        One row per client.

    Examples
    --------
    >>> import numpy as np
    >>> from equipoise import train
    >>> from equipoise.data import load
    >>> from equipoise.grouping import place
    >>> federation = load("digits", unseen=[3, 20])
    >>> model = {"name": "fedgc", "width": 8, "heads": 2, "patch": 4}
    >>> trainer = train(federation, method="fedgc", model=model, rounds=1).trainer
    >>> new = trainer.engine.cohort(trainer.method, np.flatnonzero(federation.unseen), 1)
    >>> place(trainer.state, representations_of(trainer.state, new)).shape
    torch.Size([2])
    """
    return vmap(balanced_mean)(cohort.ask("sums_of_h", model=state.model))["h"]
