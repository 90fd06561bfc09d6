"""Multi-label classification: each sample has any number of classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.samples import kind_of
from equipoise.task import Task
from equipoise.tasks import register


@register("multilabel")
class Multilabel(Task):
    """Binary cross-entropy of each label, and the F1 of each sample.

    Targets are 0 or 1, ``[N, classes]``. The model returns one score for each class, before the
    sigmoid. A class is predicted if its score is above 0. The loss of a sample is the mean over
    classes. F1 is 2 |A ∩ B| / (|A| + |B|), where A are the classes of the sample and B the
    predicted classes. It is 1 if both are empty.

    Examples
    --------
    >>> output = torch.tensor([[3.0, -3.0, 3.0]])
    >>> Multilabel().metrics(output, torch.tensor([[1.0, 0.0, 0.0]]))["f1"]
    tensor([0.6667])
    """

    score = "f1"
    higher_is_better = True

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return −y log σ(z) − (1 − y) log(1 − σ(z)), averaged over classes."""
        return (torch.nn.functional.softplus(output) - y * output).mean(1)

    def metrics(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss and the F1 of each sample."""
        predicted = (output > 0).to(output.dtype)
        sizes = (predicted + y).sum(1)
        f1 = torch.where(sizes > 0, 2 * (predicted * y).sum(1) / sizes.clamp(min=1), 1.0)
        return {"loss": self.loss(output, y), "f1": f1}

    def targets(self, y: Tensor) -> Tensor:
        """Convert zeros and ones of any type to float32."""
        return y if y.is_floating_point() or y.is_complex() else y.to(torch.float32)

    def classes_in(self, y: Tensor) -> int:
        """Return the number of columns."""
        return y.shape[1]

    def check(self, y: Tensor, shape: Sequence[int]) -> None:
        """Refuse targets without one column per class."""
        if not y.is_floating_point() or y.ndim != 2 or not y.shape[1]:
            raise InputError(
                "y of a multi-label classification must be zeros and ones of shape [N, classes], "
                f"not {kind_of(y)}"
            )

    def fault(self, y: Tensor, classes: int | None) -> tuple[int, str] | None:
        """Return the first sample with targets other than 0 and 1, or with a wrong number."""
        if len(y) and y.shape[1] != classes:
            return 0, f"has {y.shape[1]} columns in y; valid: one for each of the {classes} classes"
        wrong = ((y != 0) & (y != 1)).nonzero()
        if not len(wrong):
            return None
        sample, column = wrong[0].tolist()
        return sample, f"has {y[sample, column]:g} for class {column} in y; valid: 0 and 1"

    def misfit(self, output: Tensor, y: Tensor, outputs: int) -> str | None:
        """Require one output per class."""
        return None if output.shape == y.shape else f"{outputs} classes"
