"""q-FFL (Li et al., 2020): clients are weighted by their losses to the power q."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.method import Aggregation, Cohort, Sees, State, Updates, shift
from equipoise.methods import register
from equipoise.tree import flat_rows

# Added to every loss, as in the authors' code: negative powers of 0 are not defined.
_TINY = 1e-10


@register("qffl", paper="Li et al., ICLR 2020", sees=Sees.SCALARS)
@dataclass(frozen=True)
class QFedAvg(Aggregation):
    """q-FedAvg, which minimises Σ F_k^{q+1}/(q+1): w ← w − Σ Δ_k / Σ h_k over the cohort.

    With F_k the client's training loss at the received w and w_k its trained parameters, Δ_k =
    F_k^q L (w − w_k) and h_k = q F_k^{q−1} ‖L (w − w_k)‖² + L F_k^q. Sizes are not used here: the
    paper samples clients in proportion to them (``sampling: size``). With q = 0 this is the plain
    mean.

    Parameters
    ----------
    q : float
        At least 0. The larger q, the more uniform the losses.
    lipschitz : float, optional
        L; by default 1/η, with η the clients' learning rate of the round.
    """

    q: float = 1.0
    lipschitz: float | None = None
    needs = ("loss_before", "lr")
    ignores_prior = "q-FFL weights clients by powers of their losses"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        if not 0 <= self.q < float("inf"):
            raise InputError(f"qffl.q must be at least 0 and finite, got {self.q!r}")
        if self.lipschitz is not None and not 0 < self.lipschitz < float("inf"):
            raise InputError(
                "qffl.lipschitz must be above 0 and finite, or None for 1/lr, got "
                f"{self.lipschitz!r}"
            )

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Step along the reweighted differences, divided by the bound on the curvature."""
        loss = updates.reports["loss_before"] + _TINY
        lr = updates.reports["lr"]
        # With a learning rate of 0 clients have not moved, and L does not matter.
        constant = (
            torch.full_like(loss, self.lipschitz)
            if self.lipschitz
            else torch.where(lr > 0, 1 / lr, 0.0)
        )
        # Divide every power by that of the largest loss, so that large q do not overflow. This does
        # not change the ratio.
        power = (loss / loss.max()) ** self.q
        curvature = power + self.q * power / loss * constant * squared_differences(state, updates)
        return state.with_global(
            shift(state, updates, power / curvature.sum(), power / power.sum())
        )


def squared_differences(state: State, updates: Updates) -> Tensor:
    """Return ‖w − w_k‖² of every client, over all shared parameters.

    Examples
    --------
    >>> two = Updates({"w": torch.tensor([[1.0], [4.0]])}, {}, {}, {})
    >>> squared_differences(State(0, {"w": torch.tensor([2.0])}), two)
    tensor([1., 4.], dtype=torch.float64)
    """
    differences = (flat_rows(rows - state.model[name]) for name, rows in updates.params.items())
    return torch.stack([rows.double().square().sum(1) for rows in differences]).sum(0).cpu()
