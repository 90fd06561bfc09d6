"""BGP, local training of FFT-GP (FITEE 2024): task steps alternate with alignment steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from equipoise.checks import one_of, real
from equipoise.client import Client
from equipoise.errors import InputError
from equipoise.masked import CORAL_FORMS, coral
from equipoise.method import LocalRule, Phase, task_loss
from equipoise.methods import register
from equipoise.methods.perfedavg import MetaGradient


@register("bgp", paper="FFT-GP, FITEE 2024")
@dataclass(frozen=True)
class BalancedTraining(LocalRule):
    """Alternate steps on the task loss with steps that also align features with the received model.

    With w the client's model, η the learning rate and two different batches, a pair of steps is
    (algorithm 2)

    - w′ = w − η ∇L_task(w), on the first batch (eq. 12),
    - w ← w′ − η ∇L_meta(w′), on the second, with L_meta = L_task + λ L_align (eq. 13).

    L_align is the CORAL distance, on the second batch, between the features of the received model
    and of the local one, or other outputs that the model defines
    (:meth:`equipoise.models.base.Model.aligned`). No second derivatives are taken. Both steps use
    the optimizer of the training settings, which keeps one state for both (momentum, Adam's
    moments). Without alignment, BGP is therefore plain training on twice as many batches: an epoch
    has b pairs of batches and 2b steps, where other rules have b.

    The paper does not specify the mode of the received model. By default it is training mode: both
    models use the BatchNorm statistics of the batch, and without dropout L_align is zero where the
    round begins. In evaluation mode the received model has its own statistics and no dropout.
    L_align then also measures how far these statistics are from those of the batch. With the
    paper's schedule, a run on PACS diverged in this mode and did not in training mode.

    With ``restore`` a pair of steps is one step, as in the authors' code of GRACE: each batch is
    divided into halves, the gradient of L_meta is taken at w′ on the second half, and the optimizer
    applies it to w. The step to w′ is a plain gradient step with the current learning rate. An
    epoch then has b steps. BatchNorm statistics are updated on the first half.

    The ablations of tables 13 and 14: "only DA" is ``meta: false``, with all steps on L_meta and b
    steps per epoch; "only ML" is ``align: 0`` with ``restore``, which is first-order Per-FedAvg on
    the halves of batches with α = η. (The paper's rows for "only ML" equal those for Per-FedAvg.)

    Parameters
    ----------
    align : float
        λ, at least 0; 1 in the paper.
    alignment : {"domainbed", "deepcoral"}
        The form of L_align; see :func:`equipoise.masked.coral`. The paper cites Sun and Saenko
        ("deepcoral") for the best method of DomainBed, whose own form also compares means.
    restore : bool
        Whether the second step starts from w instead of w′.
    meta : bool
        Whether there are two kinds of steps, or only those on L_meta.
    received : {"training", "evaluation"}
        The mode of the received model in L_align.
    """

    align: float = 1.0
    alignment: str = "domainbed"
    restore: bool = False
    meta: bool = True
    received: str = "training"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        real(self.align, f"{self.name}.align", least=0)
        one_of(self.alignment, CORAL_FORMS, f"{self.name}.alignment")
        one_of(self.received, ("training", "evaluation"), f"{self.name}.received")
        if self.restore and not self.meta:
            raise InputError(
                f"{self.name}.restore needs pairs of steps, but {self.name}.meta=False has none"
            )

    def phases(self) -> Sequence[Phase]:
        """Return one phase with two alternating losses."""
        if not self.meta:
            return (Phase(loss=self.meta_loss),)
        losses = (task_loss, self.meta_loss)
        return (
            Phase(loss=losses, gradient=MetaGradient(), batch="split")
            if self.restore
            else Phase(loss=losses),
        )

    def meta_loss(self, client: Client) -> Tensor:
        """Add the alignment with the received model to the task's loss."""
        if self.align == 0:
            return client.task_loss()
        training = self.received == "training"
        received, mask = client.at(client.received, train=training).aligned()
        local, _ = client.aligned()
        return client.task_loss() + self.align * coral(
            local, received, mask, mask, form=self.alignment
        )
