"""FedCRC (Wang et al., 2023): a slowly changing global head, and a personal head per client."""

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
    """FedCRC's server: h ← τ h + (1 − τ) Σ a_k h_k for the head h (eqs. 3, 8, 9).

    All other parts are averaged.

    Parameters
    ----------
    tau : float
        τ in [0, 1]; 0 is FedAvg, 1 keeps the initial head.
    """

    tau: float = 0.99

    def __post_init__(self) -> None:
        """Check τ."""
        if not 0 <= self.tau <= 1:
            raise InputError(f"{self.name}.tau must be in [0, 1], got {self.tau!r}")

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Average the models, and update the head slowly unless clients keep it."""
        averaged = mix(updates, cohort.prior)
        head = set(select(state.model, "head")) & set(averaged)
        slow = {
            name: self.tau * state.model[name] + (1 - self.tau) * averaged[name] for name in head
        }
        return state.with_global(averaged | slow)


@register("fedcrc", paper="Wang et al., 2023", sees=Sees.SUMS)
@dataclass(frozen=True)
class FedCRC(LocalRule, Aggregation):
    """Train the features, then a personal head, then the global head with the personal as teacher.

    Client i minimises, one after the other, L_i(f, h_g) over f (eq. 4), L_i(f, h_i) over its
    personal head h_i (eq. 5) and L_i(f, h_g) + λ KL(h_i(z) ‖ h_g(z)) over h_g (eqs. 6, 7), with L_i
    the cross-entropy and z = f(x). The server's part is :class:`SlowHead`. One run gives the global
    model (f, h_g) and every personal model (f, h_i).

    Choices that the paper leaves open: each step lasts as long as the training settings specify.
    h_i is the teacher in KL, as in the paper's text. Parts that a step does not train behave as in
    evaluation, so BatchNorm statistics change with the features only. h_i starts as a copy of the
    head that its client first receives. A client that has never taken part gets its h_i by the
    second step alone.

    Eq. 5 does not say whether f has been updated before. Here it has, which follows the order in
    the paper. Features that have just been fitted to the client leave h_i little to learn, and the
    fit is lost when features are averaged.

    Parameters
    ----------
    tau : float
        τ in [0, 1], the share of the old head; 1 is FedBABU's global model.
    kl : float
        λ, at least 0; 1 in the paper.
    personal_first : bool
        Whether h_i is trained before the features, on f as received.
    features_epochs, personal_epochs, head_epochs : int, optional
        Numbers of epochs of the three steps; by default that of the training settings.
    """

    tau: float = 0.99
    kl: float = 1.0
    personal_first: bool = False
    features_epochs: int | None = None
    personal_epochs: int | None = None
    head_epochs: int | None = None
    keeps = "personal.head"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        if not 0 <= self.tau <= 1:
            raise InputError(f"fedcrc.tau must be in [0, 1], got {self.tau!r}")
        if not 0 <= self.kl < float("inf"):
            raise InputError(f"fedcrc.kl must be at least 0 and finite, got {self.kl!r}")
        for name in ("features_epochs", "personal_epochs", "head_epochs"):
            if getattr(self, name) is not None:
                count(getattr(self, name), f"fedcrc.{name}")

    def phases(self) -> Sequence[Phase]:
        """Train the features and the personal head, then the global head."""
        features, personal = Phase(move="features", epochs=self.features_epochs), *self.adapt()
        head = Phase(move="head", loss=self.taught_loss, epochs=self.head_epochs)
        return (personal, features, head) if self.personal_first else (features, personal, head)

    def adapt(self) -> Sequence[Phase]:
        """Train a personal head on the received features."""
        return (Phase(move="personal.head", loss=personal_loss, epochs=self.personal_epochs),)

    def taught_loss(self, client: Client) -> Tensor:
        """Add the divergence from the personal head's predictions to the global head's loss."""
        task = client.network.task
        task.require_labels("fedcrc compares class probabilities")
        z = client.features()
        scores = client.head(z)
        teacher, student = (F.log_softmax(s, 1) for s in (client.personal().head(z), scores))
        return task.loss(scores, client.y) + self.kl * (teacher.exp() * (teacher - student)).sum(1)

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Average the features, and update the head slowly."""
        return SlowHead(self.tau).combine(state, updates, cohort)
