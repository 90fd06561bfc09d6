"""The losses of DSA-IGN, the network that makes client indices (Guo et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.checks import flag
from equipoise.client import Client
from equipoise.errors import InputError
from equipoise.method import LocalRule, Phase
from equipoise.methods import register


@register("dsaign", paper="Guo et al., 2024", method=False)
@dataclass(frozen=True)
class DsaIgn(LocalRule):
    """Minimise L_div + L_sim + L_orth + L_recon, where features split an embedding D into [z, u].

    For sample j of a batch of B: L_sim = 1 − cos(z_j, L_y), with L_y the vector of its label.
    L_orth is the mean of |⟨z_j, u_k⟩| over the samples k of the batch. L_recon is the mean squared
    error of the reconstruction of D. L_div is log Σ_{k ≠ j} exp(cos(u_j, u_k)), and 0 for a sample
    alone.

    FEDERATED is this rule under FedAvg: ``{name: fedavg, local: dsaign}``. GLOBAL is this rule on
    128 samples of each client in one place: ``{name: central, samples: 128, local: dsaign}``.

    The paper leaves open whether ‖Z Uᵀ‖₁ is a sum or a mean; here it is a mean over all B² pairs.

    Parameters
    ----------
    div, sim, orth, recon : bool
        Which of the four losses there are (table 2).
    """

    div: bool = True
    sim: bool = True
    orth: bool = True
    recon: bool = True
    usual_model = "dsaign"

    def __post_init__(self) -> None:
        """Refuse to minimise nothing."""
        losses = [flag(getattr(self, name), f"dsaign.{name}") for name in ("div", "sim", "orth", "recon")]
        if not any(losses):
            raise InputError("dsaign needs at least one of the losses div, sim, orth and recon")

    def phases(self) -> Sequence[Phase]:
        """One phase with all losses."""
        return (Phase(loss=self.loss),)

    def loss(self, client: Client) -> Tensor:
        """Sum the losses, sample by sample."""
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
            total = total + (client.part("reconstruction", split) - client.x.flatten(1)).square().mean(1)
        return total + diversity(u, kept) if self.div else total


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
    >>> diversity(torch.tensor([[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]]), torch.tensor([1.0, 1.0, 0.0]))[:2]
    tensor([0., 0.])
    """
    directions = F.normalize(u, dim=1)
    others = kept * (1 - torch.eye(len(u), dtype=u.dtype, device=u.device))
    total = ((directions @ directions.T).exp() * others).sum(1)
    # Cosines are at most 1, so the sum needs no scaling; log 1 = 0 where there is nothing to sum.
    return torch.where(others.sum(1) > 0, total, 1.0).log()
