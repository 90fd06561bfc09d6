"""A next-character model of PyTorch's own layers, and a task in which all characters count.

Importing this module registers the model ``textlstm`` and the task ``next_characters``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.errors import InputError
from equipoise.models import register as register_model
from equipoise.models.base import Model
from equipoise.task import Task
from equipoise.tasks import register as register_task

# The target of a position behind the end of a text.
PADDING = 0


class Read(nn.Module):
    """An embedding and LSTM layers, in PyTorch's own form."""

    def __init__(
        self, characters: int, embedding: int, hidden: int, layers: int, *, everywhere: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)
        self.everywhere = everywhere

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's outputs at all characters, or at the last one."""
        outputs: Tensor = self.lstm(self.embedding(x))[0]
        return outputs if self.everywhere else outputs[:, -1]


@register_model
def textlstm(
    shape: tuple[int, ...],
    classes: int,
    *,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
    everywhere: bool = False,
) -> Model:
    """Build ``nn.Embedding``, ``nn.LSTM`` and ``nn.Linear``: what a plain loop would use.

    Parameters
    ----------
    shape : tuple of int
        The number of characters in a sample, such as ``(80,)``.
    classes : int
        How many characters there are.
    embedding, hidden, layers : int
        Sizes of the embedding and of the LSTM layers, and their number.
    everywhere : bool
        Whether to predict the next character at every position, and not at the last one only.

    Returns
    -------
    Model
        Its outputs are ``[samples, classes]``, or ``[samples, characters, classes]``.

    Examples
    --------
    >>> textlstm((5,), 7, hidden=3, everywhere=True)(torch.zeros(2, 5, dtype=torch.int64)).shape
    torch.Size([2, 5, 7])
    """
    read = Read(classes, embedding, hidden, layers, everywhere=everywhere)
    return Model(read, nn.Linear(hidden, classes))


@register_task("next_characters")
class NextCharacters(Task):
    """Cross-entropy of every next character of a text; targets ``[N, characters]``, 0 for padding.

    The loss of a text is the mean over its characters.

    Examples
    --------
    >>> NextCharacters().loss(torch.zeros(1, 3, 4), torch.tensor([[2, 1, 0]]))
    tensor([1.3863])
    """

    score = "accuracy"
    higher_is_better = True
    ranges = {"accuracy": (0.0, 1.0)}
    floating = False

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy of each text."""
        values = F.cross_entropy(output.transpose(1, 2), y, reduction="none", ignore_index=PADDING)
        return values.sum(1) / _characters(y)

    def metrics(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss, and the share of characters with the highest score."""
        right = (output.argmax(2) == y) & (y != PADDING)
        return {"loss": self.loss(output, y), "accuracy": right.sum(1) / _characters(y)}

    def classes_in(self, y: Tensor) -> int:
        """Return one more than the largest character."""
        return int(y.max()) + 1

    def check(self, y: Tensor, shape: Sequence[int]) -> None:
        """Refuse anything but one whole number for each character of a sample."""
        if y.is_floating_point() or tuple(y.shape[1:]) != tuple(shape):
            raise InputError(
                f"y of next characters must be whole numbers of shape [N, {shape}], not "
                f"{tuple(y.shape)}"
            )

    def fault(self, y: Tensor, classes: int | None) -> tuple[int, str] | None:
        """Find no fault: data are drawn."""
        return None

    def misfit(self, output: Tensor, y: Tensor, outputs: int) -> str | None:
        """Ask for one number for each character and class."""
        fits = output.shape == (*y.shape, outputs)
        return None if fits else f"{outputs} classes for each of {y.shape[1]} characters"


def _characters(y: Tensor) -> Tensor:
    return (y != PADDING).sum(1).clamp(min=1)


def draw_text(generator: torch.Generator, texts: int, length: int, characters: int) -> Tensor:
    """Draw texts that can be learnt: after most characters comes the next one in a fixed order.

    Character 0 is padding, and is not drawn.

    Examples
    --------
    >>> draw_text(torch.Generator().manual_seed(0), 2, 5, 9).shape
    torch.Size([2, 5])
    """
    start = torch.randint(0, characters - 1, (texts, 1), generator=generator)
    # One character in eight is followed by any other.
    jumps = torch.randint(0, characters - 1, (texts, length), generator=generator)
    jumps *= torch.rand(texts, length, generator=generator) < 0.125
    return 1 + (start + torch.arange(length) + jumps.cumsum(1)) % (characters - 1)
