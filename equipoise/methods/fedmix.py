"""FedMix (Yoon et al., 2021): mixup with mean images of other clients, in first order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.checks import count
from equipoise.client import Client
from equipoise.errors import InputError
from equipoise.method import Aggregation, Cohort, LocalRule, Phase, Sees, State, Updates, mix
from equipoise.methods import register
from equipoise.models.base import pixels
from equipoise.random import Purpose, fold_tensor
from equipoise.tree import Tree

# A mean of fewer samples would reveal a sample.
_FEWEST = 2


@register("fedmix", paper="Yoon et al., ICLR 2021", sees=Sees.REPRESENTATIONS)
@dataclass(frozen=True)
class FedMix(LocalRule, Aggregation):
    """Minimise the first-order expansion in λ of mixup with the mean images of all clients.

    Before round 1 each client divides its training samples into parts of M_k and sends the mean
    image x̄ and the mean one-hot label ȳ of each part. The server sends all means to all clients,
    once. For each batch a client draws one pair (x̄, ȳ) and minimises

        (1 − λ) ℓ(f(x′), y) + λ ℓ(f(x′), ȳ) + λ ⟨∂/∂x′ (1 − λ) ℓ(f(x′), y), x̄⟩,  x′ = (1 − λ) x,

    for each sample. The derivative is that of the sample's own loss, so the last term has no factor
    1/B (some public code differentiates the mean of a batch). With BatchNorm the losses of other
    samples depend on x′, too, and the derivative is that of their sum. ℓ(f(x′), ȳ) is always the
    cross-entropy, even if ``training.loss`` sets another loss. Images stored as bytes are scaled to
    [0, 1] before they are mixed.

    Clients that join later receive the means but add none.

    Parameters
    ----------
    lam : float
        λ, at least 0 and below 1; 0 is FedAvg.
    means : int
        Number of means that a client sends; M_k is its number of training samples divided by this.
        A client with too few samples sends fewer means, so that each is the mean of two samples or
        more.
    """

    lam: float = 0.05
    means: int = 1
    needs_everyone: ClassVar[bool] = True
    needs_images: ClassVar[bool] = True
    receives = sends = sends_once = ("means",)

    def __post_init__(self) -> None:
        """Refuse values outside the paper's range."""
        if not 0 <= self.lam < 1:
            raise InputError(f"fedmix.lam must be at least 0 and below 1, got {self.lam!r}")
        count(self.means, "fedmix.means")

    def begin(self, state: State, everyone: Cohort) -> State:
        """Collect the means of all clients."""
        parts = np.minimum(self.means, everyone.sizes // _FEWEST)
        if not parts.any():
            raise InputError(
                f"fedmix needs at least one client with {_FEWEST} training samples or more"
            )
        each = {"parts": torch.from_numpy(parts), "size": torch.from_numpy(everyone.sizes)}
        # The model is needed to determine the number of classes.
        sums = everyone.ask("sums_of_parts", model=state.model, each=each)
        # Use the registered sizes, which are checked. A count in an answer could be 0.
        counts = sizes_of_parts(everyone.sizes, parts, self.means).to(sums["samples"])
        there = counts > 0
        samples = counts[there].unsqueeze(1)
        x, y = (sums[name][there] for name in ("x", "y"))
        return state.with_server(means={"x": (x.flatten(1) / samples).view_as(x), "y": y / samples})

    def admit(self, state: State, everyone: Cohort) -> State:
        """Keep the means, which have already been sent."""
        return state

    def sums_of_parts(self, client: Client) -> Tree:
        """Return the sums of images and one-hot labels, and the sizes, of each part; a question."""
        if client.y.is_floating_point() or client.y.dim() != 1:
            kind = str(client.y.dtype).removeprefix("torch.")
            raise InputError(
                f"fedmix mixes labels, one class for each sample, but y holds {kind} of shape "
                f"{tuple(client.y.shape)}"
            )
        images = pixels(client.x, client.network.dtype)
        # In a question, the positions of samples in the split are known.
        part = cast(Tensor, client.positions) * client.each["parts"] // client.each["size"]
        numbers = torch.arange(self.means, device=part.device)
        member = ((part.unsqueeze(1) == numbers) & (numbers < client.each["parts"])).to(
            images.dtype
        )
        labels = client.y.unsqueeze(1) == torch.arange(client.output().shape[1], device=part.device)

        def sums(values: Tensor) -> Tensor:
            return client.sum(member.unsqueeze(2) * values.flatten(1).unsqueeze(1))

        return {
            "x": sums(images).unflatten(1, images.shape[1:]),
            "y": sums(labels.to(images.dtype)),
            "samples": client.sum(member),
        }

    def send(self, state: State, cohort: Cohort) -> tuple[dict[str, Tree], dict[str, Tensor]]:
        """Send the model and the means."""
        return {"model": state.model, "means": state.server["means"]}, {}

    def phases(self) -> Sequence[Phase]:
        """Return one phase with the mixed loss."""
        return (Phase(loss=self.loss),)

    def loss(self, client: Client) -> Tensor:
        """Return the mixed loss of each sample."""
        means = client.sent["means"]
        # The key is always set in training steps.
        drawn = fold_tensor(cast(Tensor, client.forward.key), Purpose.AUGMENT).remainder(
            len(means["x"])
        )
        # Not means["x"][drawn]: that reads the number on the host, so a GPU could not replay it.
        mean_x, mean_y = (
            means[name].index_select(0, drawn.unsqueeze(0)).squeeze(0) for name in ("x", "y")
        )
        shrunk = (1 - self.lam) * pixels(client.x, client.network.dtype)

        def output_of(x: Tensor) -> tuple[Tensor, Tree]:
            statistics: Tree = {}
            return client.at(x=x, train=True).recording(statistics).output(), statistics

        def own_loss(output: Tensor) -> Tensor:
            return (1 - self.lam) * client.sum(client.task_loss(output))

        # One forward pass for both: the loss, and its derivative by the images.
        made: tuple[Any, ...] = torch.func.vjp(output_of, shrunk, has_aux=True)
        output, derivative, statistics = made
        (by_image,) = derivative(torch.func.grad(own_loss)(output))
        if client.recorded is not None:
            client.recorded.update(statistics)
        towards_mean = (by_image * mean_x).flatten(1).sum(1)
        to_mean = output.logsumexp(1) - (output * mean_y).sum(1)
        return (1 - self.lam) * client.task_loss(output) + self.lam * (to_mean + towards_mean)

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Average the models."""
        return state.with_global(mix(updates, cohort.prior))


def sizes_of_parts(sizes: NDArray[np.int64], parts: NDArray[np.int64], most: int) -> Tensor:
    """Return the size of each part of each client. Sample i of n is in part ⌊i · parts / n⌋.

    Parameters
    ----------
    sizes, parts : int array
        Numbers of samples and of parts of each client.
    most : int
        The number of columns.

    Returns
    -------
    Tensor
        ``[clients, most]``, zero where a client has no such part.

    Examples
    --------
    >>> sizes_of_parts(np.array([7, 1]), np.array([3, 0]), most=4)
    tensor([[3, 2, 2, 0],
            [0, 0, 0, 0]])
    """
    edges = np.minimum(np.arange(most + 1), parts[:, None]) * sizes[:, None]
    first = -(-edges // np.maximum(parts, 1)[:, None])
    return torch.from_numpy(np.diff(first, axis=1))
