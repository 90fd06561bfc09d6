"""Training of DSA-IGN, the network that makes client indices (Guo et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.checks import count, flag
from equipoise.client import Client
from equipoise.errors import InputError
from equipoise.method import Cohort, LocalRule, Phase, Sees, View, finished_by
from equipoise.methods import register
from equipoise.privacy import check_release, index_epsilon, noise_sums, released_index
from equipoise.random import Purpose, choose, fold
from equipoise.tree import Tree


@register("dsaign", paper="Guo et al., 2024", sees=Sees.REPRESENTATIONS, method=False)
@dataclass(frozen=True)
class DsaIgn(LocalRule):
    """Minimise L_div + L_sim + L_orth + L_recon, where features split an embedding D into [z, u].

    For sample j of a batch of B: L_sim = 1 − cos(z_j, L_y), with L_y the vector of its label.
    L_orth is the mean of |⟨z_j, u_k⟩| over the samples k of the batch. L_recon is the mean squared
    error of the reconstruction of D. L_div is log Σ_{k ≠ j} exp(cos(u_j, u_k)), and 0 for a single
    sample.

    FEDERATED is this rule with FedAvg: ``{name: fedavg, local: dsaign}``. GLOBAL is this rule on
    128 samples that each client sends to the server: ``{name: fedavg, local: dsaign, view:
    gathered}``. After the last round the server asks all clients for their index: the mean of u and
    the mean of the label vectors over their training samples.

    The paper leaves open whether ‖Z Uᵀ‖₁ is a sum or a mean; here it is a mean over all B² pairs.
    L_recon is a mean over the components of an embedding. All losses have weight 1, as in the
    paper. The cosine of a zero vector is 0.

    Parameters
    ----------
    div, sim, orth, recon : bool
        Which of the four losses to use (table 2; figure 7 for ``div``).
    clip : float, optional
        C, the norm to which β_f and β_l of a client are clipped before it sends them.
    noise : float
        The standard deviation of Gaussian noise on both, as a multiple of C. The file of the index
        contains the ε of this release; see :func:`equipoise.privacy.gaussian_epsilon`. It does not
        protect the parameters that clients send while DSA-IGN is trained, or the embeddings of
        GLOBAL. Noise is drawn from the run's seed, so those who see the index must not know the
        seed.
    privacy_delta : float
        The δ that belongs to this ε.
    """

    div: bool = True
    sim: bool = True
    orth: bool = True
    recon: bool = True
    clip: float | None = None
    noise: float = 0.0
    privacy_delta: float = 1e-5
    usual_model = "dsaign"
    makes_index: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse a rule without losses."""
        losses = [
            flag(getattr(self, name), f"dsaign.{name}") for name in ("div", "sim", "orth", "recon")
        ]
        if not any(losses):
            raise InputError("dsaign needs at least one of the losses div, sim, orth and recon")
        check_release("dsaign", self.clip, self.noise, self.privacy_delta)

    def extend(self, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """Refuse a model without label vectors, or without the projection that ``recon`` trains."""
        has_vectors = isinstance(getattr(getattr(model, "head", None), "vectors", None), Tensor)
        has_projection = isinstance(getattr(model, "reconstruction", None), nn.Module)
        if not has_vectors or (self.recon and not has_projection):
            raise InputError(
                "local rule 'dsaign' trains a network with label vectors and a part "
                f"'reconstruction', which {type(model).__name__} lacks; valid: model 'dsaign'"
            )
        return model

    def phases(self) -> Sequence[Phase]:
        """Return one phase with all losses."""
        return (Phase(loss=self.loss),)

    def loss(self, client: Client) -> Tensor:
        """Return the sum of the losses of each sample."""
        split = client.features()
        z, u = split.chunk(2, dim=1)
        kept = torch.ones_like(z[:, 0]) if client.mask is None else client.mask.to(z.dtype)
        total = torch.zeros_like(kept)
        if self.sim:
            own = torch.arange(client.output().shape[1], device=z.device) == client.y.unsqueeze(1)
            total = total + 1 - torch.where(own, client.output(), 0.0).sum(1)
        if self.orth:
            total = total + (z @ u.T).abs() @ kept / kept.sum()
        if self.recon:
            total = total + (
                client.part("reconstruction", split) - client.x.flatten(1)
            ).square().mean(1)
        return total + diversity(u, kept) if self.div else total

    @finished_by("released_index")
    def own_index(self, client: Client) -> Tree:
        """Return the sums of u and of label vectors, and the number of samples; a question."""
        _, u = client.features().chunk(2, dim=1)
        head: Any = client.network.module.head
        labels = client.sum(head.vectors[client.y])
        sums = {
            "features": client.sum(u),
            "labels": labels,
            "count": client.sum(torch.ones_like(u[:, 0])),
        }
        width = u.shape[1] + len(labels)
        return sums | (noise_sums(client, width, Purpose.NOISE_OF_INDEX) if self.noise else {})

    def released_index(self, sums: Tree) -> Tree:
        """Compute the index from the sums, with clipping and noise if they are set."""
        return released_index(sums, self.clip, self.noise)

    def index_epsilon(self) -> float | None:
        """Return the ε of the index, or None without noise."""
        return index_epsilon(self.noise, self.privacy_delta)

    def chosen_samples(self, client: Client) -> tuple[Tensor, Tensor]:
        """Return samples and targets at the positions ``client.each["chosen"]``; a question."""
        if client.positions is None:
            raise InputError("chosen_samples is a question, not a loss")
        found = client.each["chosen"].unsqueeze(1) == client.positions
        if client.mask is not None:
            found = found & (client.mask > 0)
        # Each position is in one batch only, so the sum over batches is the sample itself. Samples
        # are selected by index, because products may round.
        here, row = found.any(1), found.long().argmax(1)
        x, y = client.x.flatten(1)[row], client.y[row]
        return torch.where(here.unsqueeze(1), x, 0), torch.where(here, y, 0)


@register("gathered", paper="Guo et al., 2024", sees=Sees.REPRESENTATIONS, method=False)
@dataclass(frozen=True)
class Gathered(View):
    """The server trains alone, on some samples of each client (Client2Vec's GLOBAL).

    Before round 1 the server asks all registered clients for embeddings (``data.encode``) and
    labels. Then it trains on these samples like a single client. Samples that are not vectors are
    refused. The paper leaves open which samples of a client form its batch of 128; here they are
    drawn at random, without replacement.

    Parameters
    ----------
    samples : int
        Number of samples that each client sends; all of them if it has fewer.
    """

    samples: int = 128
    gathers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse a number of samples below 1."""
        count(self.samples, "gathered.samples")

    def extend(self, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """Refuse samples that are not embeddings, and return the model unchanged."""
        if len(shape) != 1:
            raise InputError(
                "view 'gathered' sends embeddings to the server, but a sample has shape "
                f"{tuple(shape)}; valid: vectors, as data.encode makes them"
            )
        return model

    def gather(self, everyone: Cohort) -> tuple[Tensor, Tensor]:
        """Ask for the samples at positions that the server draws. It knows the clients' sizes."""
        chosen = np.full((len(everyone.ids), self.samples), -1, np.int64)
        for row, (client, size) in enumerate(zip(everyone.ids, everyone.sizes, strict=True)):
            drawn = choose(fold(everyone.key, int(client)), int(size), min(self.samples, int(size)))
            chosen[row, : len(drawn)] = np.sort(drawn)
        x, y = everyone.ask("chosen_samples", each={"chosen": torch.from_numpy(chosen)})
        there = torch.from_numpy(chosen >= 0)
        return x.cpu()[there], y.cpu()[there]


def diversity(u: Tensor, kept: Tensor) -> Tensor:
    """Return log Σ_{k ≠ j} exp(cos(u_j, u_k)) for each sample j, or 0 without other samples.

    Parameters
    ----------
    u : Tensor
        ``[samples, width]``.
    kept : Tensor
        Which rows are samples (one) and which padding (zero).

    Returns
    -------
    Tensor
        ``[samples]``.

    Examples
    --------
    >>> u, kept = torch.tensor([[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]]), torch.tensor([1.0, 1.0, 0.0])
    >>> diversity(u, kept)[:2]
    tensor([0., 0.])
    """
    directions = F.normalize(u, dim=1)
    others = kept * (1 - torch.eye(len(u), dtype=u.dtype, device=u.device))
    total = ((directions @ directions.T).exp() * others).sum(1)
    # Cosines are at most 1, so the exponentials cannot overflow. log 1 = 0 without other samples.
    return torch.where(others.sum(1) > 0, total, 1.0).log()
