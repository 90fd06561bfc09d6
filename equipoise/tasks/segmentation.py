"""Segmentation: each pixel of an image has a class, and class 0 is the background."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.errors import InputError
from equipoise.samples import kind_of
from equipoise.task import Task, whole_numbers
from equipoise.tasks import register

# Added to numerator and denominator of the loss. So the loss of a class that is neither in the mask
# nor predicted is 0.
_SMOOTHING = 1.0


@register("segmentation")
class Segmentation(Task):
    """Dice loss and Dice score.

    Targets are masks ``[N, height, width]`` of whole numbers, 0 for the background. A binary mask
    has two classes. The model returns ``[N, classes, height, width]``. p is the softmax of it over
    classes, and t is 1 for pixels whose mask has the class, else 0. For each sample and each class
    except the background:

    - loss: 1 − (2 Σ p t + 1) / (Σ p + Σ t + 1), sums over pixels, averaged over classes. If the
      mask does not have the class, the loss is Σ p / (Σ p + 1).
    - ``dice``: 2 |A ∩ B| / (|A| + |B|) for the pixels A of the mask and B of the class with the
      highest score, averaged over the classes that are in the mask or predicted. Classes that are
      in neither are left out. If all are, the score is 1.

    Examples
    --------
    >>> mask = torch.tensor([[[0, 1], [0, 1]]])
    >>> output = torch.tensor([[[[9.0, 0.0], [0.0, 0.0]], [[0.0, 9.0], [9.0, 9.0]]]])
    >>> Segmentation().metrics(output, mask)["dice"]
    tensor([0.8000])
    """

    score = "dice"
    higher_is_better = True
    ranges = {"dice": (0.0, 1.0)}
    floating = False
    spatial = True

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the Dice loss of each sample."""
        if output.dim() != 4 or output.shape[:1] + output.shape[2:] != y.shape:
            raise InputError(
                f"the output of the model has shape {tuple(output.shape)}, but its masks have "
                f"shape {tuple(y.shape)}; valid: [samples, classes, height, width], with the "
                "masks' height and width"
            )
        p = output.softmax(1)[:, 1:]
        t = _members(y, output).to(output.dtype)
        overlap, size = (p * t).flatten(2).sum(2), (p + t).flatten(2).sum(2)
        return 1 - ((2 * overlap + _SMOOTHING) / (size + _SMOOTHING)).mean(1)

    def metrics(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss and the Dice score of each sample."""
        wanted, found = _members(y, output), _members(output.argmax(1), output)
        overlap, in_mask, predicted = (
            pixels.flatten(2).sum(2).to(output.dtype) for pixels in (wanted & found, wanted, found)
        )
        size = in_mask + predicted
        # A class without pixels has an overlap of 0, so the sum does not change.
        total = (2 * overlap / size.clamp(min=1)).sum(1)
        present = (size > 0).sum(1)
        return {
            "loss": self.loss(output, y),
            "dice": torch.where(present > 0, total / present.clamp(min=1), 1.0),
        }

    def targets(self, y: Tensor) -> Tensor:
        """Convert masks to bytes if all labels fit, to use an eighth of the memory of int64."""
        if y.dtype == torch.uint8:
            return y
        labels = whole_numbers(y)
        fits = not labels.numel() or (int(labels.min()) >= 0 and int(labels.max()) < 256)
        return labels.to(torch.uint8) if fits else labels

    def classes_in(self, y: Tensor) -> int:
        """Return one more than the largest label, at least two."""
        return max(2, int(y.max()) + 1 if y.numel() else 0)

    def check(self, y: Tensor, shape: Sequence[int]) -> None:
        """Refuse targets that are not masks of whole numbers with the images' height and width."""
        whole = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
        if not whole or y.ndim != 3:
            raise InputError(
                "y of a segmentation must be masks of whole numbers of shape [N, height, width], "
                f"not {kind_of(y)}"
            )
        if len(shape) != 3 or tuple(shape[1:]) != tuple(y.shape[1:]):
            raise InputError(
                f"masks of shape {tuple(y.shape[1:])} do not fit samples of shape {tuple(shape)}; "
                "valid: images (channels, height, width) with the masks' height and width"
            )

    def fault(self, y: Tensor, classes: int | None) -> tuple[int, str] | None:
        """Return the first mask with a label out of range."""
        valid = classes or 0
        if not y.numel():
            return None
        lowest, highest = (of(y.flatten(1), 1).long() for of in (torch.amin, torch.amax))
        wrong = ((lowest < 0) | (highest >= valid)).nonzero()
        if not len(wrong):
            return None
        sample = int(wrong[0])
        label = int(highest[sample] if highest[sample] >= valid else lowest[sample])
        return sample, f"has label {label} in its mask y; valid: 0 to {valid - 1}"

    def misfit(self, output: Tensor, y: Tensor, outputs: int) -> str | None:
        """Require one output per class and pixel."""
        fits = output.dim() == 4 and output.shape[1] >= outputs and output.shape[2:] == y.shape[1:]
        return (
            None
            if fits
            else f"{outputs} classes for each pixel of masks of shape {tuple(y.shape[1:])}"
        )


def _members(labels: Tensor, output: Tensor) -> Tensor:
    """Return which pixels have which class: ``[samples, classes - 1, height, width]``.

    The background is left out.
    """
    classes = torch.arange(1, output.shape[1], device=output.device).view(-1, 1, 1)
    return labels.unsqueeze(1) == classes
