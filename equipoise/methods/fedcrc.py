"""FedCRC (Wang et al., 2023): features learned under one slow head, and a personal head beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from equipoise.checks import count
from equipoise.client import Client
from equipoise.errors import InputError
from equipoise.method import (
    Aggregation,
    Cohort,
    LocalRule,
    Phase,
    Sees,
    State,
    Updates,
    mix,
    personal_loss,
)
from equipoise.methods import register
from equipoise.tree import select


@register("slowhead", paper="Wang et al., 2023", sees=Sees.SUMS, method=False)
@dataclass(frozen=True)
class SlowHead(Aggregation):
    """FedCRC's server: the head moves slowly, h ← τ h + (1 − τ) Σ a_k h_k, and all else is averaged (eqs. 3, 8, 9).

    Parameters
    ----------
    tau : float
        τ in [0, 1]; 0 is FedAvg, 1 keeps the head the model began with.
    """

    tau: float = 0.99

    def __post_init__(self) -> None:
        """Refuse what is no moving average."""
        if not 0 <= self.tau <= 1:
            raise InputError(f"{self.name}.tau must be in [0, 1], got {self.tau!r}")

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Average, and move the head slowly; a head that clients keep is not sent."""
        averaged = mix(updates, cohort.prior)
        head = set(select(state.model, "head")) & set(averaged)
        slow = {
            name: self.tau * state.model[name] + (1 - self.tau) * averaged[name] for name in head
        }
        return state.with_global(averaged | slow)


@register("fedcrc", paper="Wang et al., 2023", sees=Sees.SUMS)
@dataclass(frozen=True)
class FedCRC(LocalRule, Aggregation):
    """Train features under the received head, a personal head on them, then the head with the personal one as teacher.

    Client i minimises, one after the other, L_i(f, h_g) over f (eq. 4), L_i(f, h_i) over its
    personal head h_i (eq. 5) and L_i(f, h_g) + λ KL(h_i(z) ‖ h_g(z)) over h_g (eqs. 6, 7), with L_i
    the cross-entropy and z = f(x). The server's half is :class:`SlowHead`. The global model (f,
    h_g) and every personal model (f, h_i) come from one run.

    The paper leaves open: how long each step lasts (here as long as the training settings say,
    each), which way KL points (here h_i teaches, as the text says), and what frozen parts do (here
    what they do in evaluation: BatchNorm statistics change with the features only). h_i begins as a
    copy of the head its client first receives; a client that has never taken part makes one by the
    second step alone.

    Eq. 5 names f without saying whether it has moved. The paper's order says so, and is followed;
    but features that have just been fitted to the client leave h_i little to learn, and are
    averaged away afterwards.

    Parameters
    ----------
    tau : float
        τ in [0, 1], how slowly the head follows; 1 is FedBABU's global model.
    kl : float
        λ, at least 0; 1 in the paper.
    personal_first : bool
        Whether h_i is trained before the features move, on f as received.
    features_epochs, personal_epochs, head_epochs : int, optional
        Epochs of the three steps; by default what the training settings say.
    """

    tau: float = 0.99
    kl: float = 1.0
    personal_first: bool = False
    features_epochs: int | None = None
    personal_epochs: int | None = None
    head_epochs: int | None = None
    keeps = "personal.head"

    def __post_init__(self) -> None:
        """Refuse values that cannot be carried out."""
        if not 0 <= self.tau <= 1:
            raise InputError(f"fedcrc.tau must be in [0, 1], got {self.tau!r}")
        if not 0 <= self.kl < float("inf"):
            raise InputError(f"fedcrc.kl must be at least 0 and finite, got {self.kl!r}")
        for name in ("features_epochs", "personal_epochs", "head_epochs"):
            if getattr(self, name) is not None:
                count(getattr(self, name), f"fedcrc.{name}")

    def phases(self) -> Sequence[Phase]:
        """Move the features and the personal head, then the head."""
        features, personal = Phase(move="features", epochs=self.features_epochs), *self.adapt()
        head = Phase(move="head", loss=self.taught_loss, epochs=self.head_epochs)
        return (personal, features, head) if self.personal_first else (features, personal, head)

    def adapt(self) -> Sequence[Phase]:
        """Train a personal head on the received features."""
        return (Phase(move="personal.head", loss=personal_loss, epochs=self.personal_epochs),)

    def taught_loss(self, client: Client) -> Tensor:
        """Add the divergence from what the personal head says to the head's loss."""
        task = client.network.task
        task.require_labels("fedcrc compares class probabilities")
        z = client.features()
        scores = client.head(z)
        teacher, student = (F.log_softmax(s, 1) for s in (client.personal().head(z), scores))
        return task.loss(scores, client.y) + self.kl * (teacher.exp() * (teacher - student)).sum(1)

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Average the features, and move the head slowly."""
        return SlowHead(self.tau).combine(state, updates, cohort)
