"""The loss and the metrics of a task, sample by sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.errors import InputError, unknown


@dataclass(frozen=True)
class Task:
    """The loss and the metrics of a kind of problem.

    Examples
    --------
    >>> import torch
    >>> task = Task("classification")
    >>> task.metrics(torch.tensor([[2.0, 1.0]]), torch.tensor([0]))["accuracy"]
    tensor([1.])
    """

    kind: str

    def __post_init__(self) -> None:
        """Refuse an unknown task."""
        if self.kind not in ("classification", "regression"):
            raise unknown("task", self.kind, ("classification", "regression"))

    @property
    def score(self) -> str:
        """The main metric of tables; see :attr:`higher_is_better`."""
        return "accuracy" if self.kind == "classification" else "loss"

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger score is a better one."""
        return self.score == "accuracy"

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return cross-entropy, or the squared error averaged over a sample's targets; ``[samples]``."""
        if self.kind == "classification":
            return _cross_entropy(output, y)
        # Only shapes are compared, which works under ``vmap``.
        if output.shape != y.shape and _without_last_ones(output.shape) != _without_last_ones(y.shape):
            raise InputError(
                f"the model answers a batch with numbers of shape {tuple(output.shape)}, but its targets have shape "
                f"{tuple(y.shape)}; valid: the same shape, or one with a last dimension of 1 more or less"
            )
        error = (output.reshape(y.shape) - y).square()
        return error.flatten(1).mean(1) if y.dim() > 1 else error

    def metrics(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss and the other metrics of the task; ``[samples]`` each."""
        measured = {"loss": self.loss(output, y)}
        if self.kind == "classification":
            measured["accuracy"] = (output.argmax(1) == y).to(output.dtype)
        return measured


def _without_last_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Return log Σ exp(z) − z_y; the same as PyTorch's, but cheaper under ``vmap`` and deterministic on a GPU."""
    classes = torch.arange(output.shape[1], device=output.device)
    chosen = torch.where(classes == y.unsqueeze(1), output, 0.0).sum(1)
    return output.logsumexp(1) - chosen
