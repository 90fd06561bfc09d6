"""Augmentation of image batches on the device.

Random numbers depend on the client, the step and the sample only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.checks import count, name_and_options
from equipoise.errors import InputError, unknown
from equipoise.random import fold_tensor, uniform
from equipoise.task import Task


class Augmentation(Protocol):
    """A random transformation of training images."""

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Transform images ``[N, channels, height, width]``, given one random key per image."""


def moves_pixels(augmentation: Augmentation) -> bool | None:
    """Return whether an augmentation moves pixels, so that a mask must be changed with its image.

    An augmentation declares this with its attribute ``moves_pixels``. If it is true, the
    augmentation changes integer masks ``[N, 1, height, width]`` in the same way as images with the
    same keys.

    Parameters
    ----------
    augmentation : Augmentation
        The augmentation.

    Returns
    -------
    bool or None
        ``None`` if the attribute is missing.

    Examples
    --------
    >>> moves_pixels(Flip())
    True
    """
    says: bool | None = getattr(augmentation, "moves_pixels", None)
    return says


@dataclass(frozen=True)
class Flip:
    """Mirror an image left to right with probability one half.

    Examples
    --------
    >>> x = torch.arange(4.0).view(1, 1, 2, 2)
    >>> sorted({tuple(Flip()(x, torch.tensor([key])).flatten().tolist()) for key in range(20)})
    [(0.0, 1.0, 2.0, 3.0), (1.0, 0.0, 3.0, 2.0)]
    """

    moves_pixels = True

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Mirror some of the images."""
        mirrored = uniform(fold_tensor(keys, 0)) < 0.5
        return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)


@dataclass(frozen=True)
class Crop:
    """Pad an image with zeros on all sides and crop it to its original size at a random position.

    In a mask, 0 is the background.

    Parameters
    ----------
    padding : int
        Number of zeros added on each side.

    Examples
    --------
    >>> Crop(padding=1)(torch.ones(3, 1, 4, 4), torch.arange(3)).shape
    torch.Size([3, 1, 4, 4])
    """

    padding: int = 4
    moves_pixels = True

    def __post_init__(self) -> None:
        """Refuse a padding below 1."""
        object.__setattr__(self, "padding", count(self.padding, "crop.padding"))

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Shift the images."""
        height, width = x.shape[-2:]
        padded = F.pad(x, [self.padding] * 4)
        places = 2 * self.padding + 1
        top, left = ((uniform(fold_tensor(keys, axis)) * places).long() for axis in (1, 2))
        rows = (top.view(-1, 1) + torch.arange(height, device=x.device)).view(-1, 1, height, 1)
        columns = (left.view(-1, 1) + torch.arange(width, device=x.device)).view(-1, 1, 1, width)
        images = torch.arange(len(x), device=x.device).view(-1, 1, 1, 1)
        channels = torch.arange(x.shape[1], device=x.device).view(1, -1, 1, 1)
        return padded[images, channels, rows, columns]


AUGMENTATIONS: dict[str, type[Any]] = {"flip": Flip, "crop": Crop}
"""The augmentations that configuration files can name."""


def augmentation_to_plain(augmentation: Any) -> dict[str, Any]:
    """Return an augmentation as plain values for a configuration file.

    Parameters
    ----------
    augmentation : Augmentation
        Of one of the kinds in `AUGMENTATIONS`.

    Returns
    -------
    dict
        Its name and options.

    Examples
    --------
    >>> augmentation_to_plain(Crop(padding=2))
    {'name': 'crop', 'padding': 2}
    """
    names = {kind: name for name, kind in AUGMENTATIONS.items()}
    return {"name": names[type(augmentation)], **asdict(augmentation)}


def augmentation_from(plain: str | Mapping[str, Any]) -> Augmentation:
    """Create an augmentation from its plain form.

    Parameters
    ----------
    plain : str or mapping
        Its name, or a mapping with ``name`` and options.

    Returns
    -------
    Augmentation
        Of one of the kinds in `AUGMENTATIONS`.

    Examples
    --------
    >>> augmentation_from({"name": "crop", "padding": 2})
    Crop(padding=2)
    """
    name, options = name_and_options(plain, "training.augment")
    if name not in AUGMENTATIONS:
        raise unknown("augmentation", name, AUGMENTATIONS, where="training.augment")
    kind = AUGMENTATIONS[name]
    valid = [field.name for field in fields(kind)]
    for key in options:
        if key not in valid:
            raise unknown(f"option of {name}", key, valid, where="training.augment")
    made: Augmentation = kind(**options)
    return made


def check_augmentations(
    augment: Iterable[Augmentation], shape: tuple[int, ...], task: Task
) -> None:
    """Refuse samples that are not images, and augmentations without the ``moves_pixels`` they need.

    Parameters
    ----------
    augment : iterable of Augmentation
        What is applied to training batches; user-defined augmentations are not checked.
    shape : tuple of int
        The shape of one sample.
    task : Task
        What is learned.

    Examples
    --------
    >>> check_augmentations((Flip(),), (3, 32, 32), Task())
    >>> check_augmentations((Flip(),), (64,), Task())
    Traceback (most recent call last):
    equipoise.errors.InputError: training.augment: Flip needs images (channels, height, width), got
    samples of shape (64,)
    """
    for augmentation in augment:
        if isinstance(augmentation, (Flip, Crop)) and len(shape) != 3:
            raise InputError(
                f"training.augment: {type(augmentation).__name__} needs images (channels, height, "
                f"width), got samples of shape {tuple(shape)}"
            )
        if task.spatial and moves_pixels(augmentation) is None:
            raise InputError(
                f"training.augment: {type(augmentation).__name__} does not declare whether it "
                f"moves pixels, so that the targets of a {task.name} must change too; valid: a "
                "class attribute moves_pixels = True or False"
            )
