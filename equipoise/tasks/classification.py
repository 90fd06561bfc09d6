"""Classification: each sample has one class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.samples import kind_of
from equipoise.task import Task, whole_numbers
from equipoise.tasks import register


@register("classification")
class Classification(Task):
    """Cross-entropy and accuracy. Targets are int64 labels ``[N]``.

    Examples
    --------
    >>> Classification().metrics(torch.tensor([[2.0, 1.0]]), torch.tensor([0]))["accuracy"]
    tensor([1.])
    """

    score = "accuracy"
    higher_is_better = True
    ranges = {"accuracy": (0.0, 1.0)}
    labels = True
    floating = False

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy log Σ exp(z) − z_y.

        It equals that of PyTorch, but is faster under ``vmap`` and deterministic on a GPU.
        """
        classes = torch.arange(output.shape[1], device=output.device)
        chosen = torch.where(classes == y.unsqueeze(1), output, 0.0).sum(1)
        return output.logsumexp(1) - chosen

    def metrics(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss and whether the class with the highest score is the right one."""
        return {"loss": self.loss(output, y), "accuracy": (output.argmax(1) == y).to(output.dtype)}

    def targets(self, y: Tensor) -> Tensor:
        """Convert labels to int64."""
        return whole_numbers(y)

    def classes_in(self, y: Tensor) -> int:
        """Return one more than the largest label."""
        return int(y.max()) + 1 if len(y) else 0

    def check(self, y: Tensor, shape: Sequence[int]) -> None:
        """Refuse targets that are not int64 labels ``[N]``."""
        if y.dtype != torch.int64 or y.ndim != 1:
            advice = "; y.argmax(1) turns one-hot rows into labels" if y.ndim == 2 else ""
            raise InputError(
                f"y of a classification must be int64 labels of shape [N], not {kind_of(y)}{advice}"
            )

    def fault(self, y: Tensor, classes: int | None) -> tuple[int, str] | None:
        """Return the first sample with a label out of range."""
        valid = classes or 0
        wrong = ((y < 0) | (y >= valid)).nonzero()
        if not len(wrong):
            return None
        return int(wrong[0]), f"has label {int(y[wrong[0]])} in y; valid: 0 to {valid - 1}"

    def misfit(self, output: Tensor, y: Tensor, outputs: int) -> str | None:
        """Require at least one output per class."""
        return None if output.dim() == 2 and output.shape[1] >= outputs else f"{outputs} classes"
