"""HarmoFL (Jiang, Wang and Dou, 2022): images with equal amplitudes, and flat minima."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from equipoise.checks import count, real
from equipoise.client import Client
from equipoise.errors import NAME_THE_HEAD, InputError
from equipoise.method import (
    Aggregation,
    Cohort,
    LocalRule,
    Phase,
    Sees,
    State,
    Updates,
    mix,
    mix_tree,
)
from equipoise.methods import register
from equipoise.methods.fedsam import SharpnessGradient
from equipoise.models.base import Model, pixels
from equipoise.models.fourier import AmplitudeNorm, amplitudes
from equipoise.models.headed import Headed
from equipoise.tree import Tree

_AMPLITUDE = "inputs.amplitude"


@register("harmofl", paper="Jiang et al., AAAI 2022", sees=Sees.SUMS)
@dataclass(frozen=True)
class HarmoFL(LocalRule, Aggregation):
    """Replace the amplitudes of all images with their mean Ã, and train at perturbed weights.

    The method adds a layer before the model that replaces the amplitudes of each image with Ã and
    keeps its phases (:class:`~equipoise.models.fourier.AmplitudeNorm`). Local steps use the
    gradient at w + δ with δ = α g/‖g‖, as in FedSAM.

    Ã is the average over clients of the mean amplitude of their training images, with the weights
    of clients, which are equal by default. It is computed once, before round 1, and does not
    change. (In the paper, clients use a running mean of their own batches during round 1, and Ã is
    the average of these.) It is part of the model and is sent with it.

    Parameters
    ----------
    alpha : float
        α, at least 0.
    low : int, optional
        Replace only the amplitudes of the frequencies from -low to low. By default all are
        replaced, as in the paper's equation. The public code uses 0, which is the mean brightness
        of each channel.
    """

    alpha: float = 0.05
    low: int | None = None
    usual_weights: ClassVar[str] = "uniform"
    needs_everyone: ClassVar[bool] = True
    needs_images: ClassVar[bool] = True
    # With another aggregation the amplitude would stay zero. The tree itself is empty, because Ã is
    # sent with the model.
    receives = sends = ("amplitude",)

    def __post_init__(self) -> None:
        """Refuse negative values."""
        real(self.alpha, "harmofl.alpha", least=0)
        if self.low is not None:
            count(self.low, "harmofl.low", least=0)

    def extend(self, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        """Add the layer before the model."""
        if not isinstance(model, Model) or type(model).forward not in (
            Model.forward,
            Headed.forward,
        ):
            raise InputError(
                "harmofl adds a layer before the model, which is not possible for "
                f"{type(model).__name__} with its own forward; "
                f"valid: equipoise.models.base.Model(features, head), or {NAME_THE_HEAD}"
            )
        dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
        model.inputs = AmplitudeNorm(shape, self.low).to(dtype)
        return model

    def begin(self, state: State, everyone: Cohort) -> State:
        """Average the mean amplitudes of all clients."""
        sums, _ = everyone.ask("amplitude_sums")
        # Use the registered sizes, which are checked. A count in an answer could be 0.
        means = sums / torch.from_numpy(everyone.sizes).to(sums).view(-1, *(1,) * (sums.dim() - 1))
        mixed = mix_tree({_AMPLITUDE: means}, everyone.prior)
        return state.with_global({_AMPLITUDE: mixed[_AMPLITUDE].to(state.model[_AMPLITUDE])})

    def admit(self, state: State, everyone: Cohort) -> State:
        """Keep Ã when clients join."""
        return state

    def amplitude_sums(self, client: Client) -> tuple[Tensor, Tensor]:
        """Return the sum of the amplitudes of a batch of images, and their number; a question."""
        x = pixels(client.x, client.network.dtype)
        return client.sum(amplitudes(x, self.low)), client.sum(torch.ones_like(x[:, 0, 0, 0]))

    def phases(self) -> Sequence[Phase]:
        """Return one phase with the gradient at w + δ. The layer is not trained."""
        return (Phase(move=("features", "head"), gradient=SharpnessGradient(self.alpha)),)

    def send(self, state: State, cohort: Cohort) -> tuple[dict[str, Tree], dict[str, Tensor]]:
        """Send the model, which contains Ã."""
        return {"model": state.model, "amplitude": {}}, {}

    def combine(self, state: State, updates: Updates, cohort: Cohort) -> State:
        """Average the models."""
        return state.with_global(mix(updates, cohort.prior))
