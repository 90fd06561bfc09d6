"""The weights of gradients in the updates of clients, for FedNova."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equipoise.optimizers.base import Optimizer
from equipoise.optimizers.stacked import Sgd


def gradient_weights(
    optimizer: Optimizer, steps: NDArray[np.int64], pull: float | NDArray[np.float64] = 0.0
) -> NDArray[np.float64]:
    """Return FedNova's ‖a‖₁, the sum of the weights of gradients in the updates of clients.

    The update of SGD is a weighted sum of its gradients, w − w₀ = −η Σ a_t g_t. Without momentum
    all a_t are 1, and the sum is the number of steps τ. With momentum ρ it is
    (τ − ρ (1 − ρ^τ)/(1 − ρ))/(1 − ρ). With a proximal term it is (1 − (1 − α)^τ)/α, with α = ημ. It
    is the distance in units of η after τ steps with gradients of 1.

    Parameters
    ----------
    optimizer : Optimizer
        The clients' optimizer. For optimizers other than SGD the number of steps is returned.
    steps : int array
        τ, the number of steps of each client.
    pull : float or array
        α, the learning rate times the factor μ of a term μ/2 ‖w − w₀‖² in the loss.

    Returns
    -------
    float array
        One number per client.

    Examples
    --------
    >>> gradient_weights(Sgd(lr=0.1), np.array([3, 1])).tolist()
    [3.0, 1.0]
    >>> gradient_weights(Sgd(lr=0.1, momentum=0.5), np.array([3, 1])).tolist()
    [4.25, 1.0]
    """
    if not isinstance(optimizer, Sgd):
        return steps.astype(np.float64)
    moved, velocity = np.zeros(len(steps)), np.zeros(len(steps))
    for step in range(int(steps.max(initial=0))):
        gradient = direction = 1 - pull * moved
        if optimizer.momentum:
            velocity = (
                optimizer.momentum * velocity
                + (1 - (optimizer.dampening if step else 0.0)) * gradient
            )
            direction = gradient + optimizer.momentum * velocity if optimizer.nesterov else velocity
        moved = np.where(step < steps, moved + direction, moved)
    return moved
