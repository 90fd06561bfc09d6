"""The embedded data: 1,797 handwritten digits of 8 by 8 pixels, in five styles.

The styles are ordered by difficulty. Every image has exactly one style, so no image is used for
training in one style and for testing in another.

========  =====================================================================
style     transformation of an image with pixels x from 0 to 1
========  =====================================================================
plain     nothing
blurred   averaged with its neighbours (weights 1 2 1 in each direction)
inverted  dark on bright: 1 - x
rotated   turned by a quarter, counter-clockwise
textured  woven background: every other pixel, as on a chequerboard, becomes
          abs(x - w), with a thread w drawn uniformly from [0.5, 1)
========  =====================================================================
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.checks import real
from equipoise.data.draws import generator
from equipoise.data.partition import ByGroup
from equipoise.data.source import Source

Images = NDArray[np.float64]


def _blurred(images: Images, draws: np.random.Generator) -> Images:
    framed = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    rows = framed[:, :-2] + 2 * framed[:, 1:-1] + framed[:, 2:]
    return (rows[:, :, :-2] + 2 * rows[:, :, 1:-1] + rows[:, :, 2:]) / 16


def _textured(images: Images, draws: np.random.Generator) -> Images:
    chequered = np.indices(images.shape[1:]).sum(axis=0) % 2
    woven: Images = np.abs(images - chequered * draws.uniform(0.5, 1, images.shape))
    return woven


STYLES: dict[str, Callable[[Images, np.random.Generator], Images]] = {
    "plain": lambda images, draws: images,
    "blurred": _blurred,
    "inverted": lambda images, draws: 1 - images,
    "rotated": lambda images, draws: np.rot90(images, axes=(1, 2)),
    "textured": _textured,
}


def digits(*, imbalance: float | None = None, seed: int = 0) -> Source:
    """Return the embedded digits in five styles. The styles are the groups.

    Parameters
    ----------
    imbalance : float, optional
        Ratio of the number of images of the first style to that of the last. The numbers fall by
        the same ratio from style to style. By default all styles have equally many images. All
        images are used in any case.
    seed : int
        Seed for assigning images to styles.

    Returns
    -------
    Source
        Images of shape [1, 8, 8] with pixels from 0 to 1, the easiest and commonest style first.

    Examples
    --------
    >>> source = digits(imbalance=10)
    >>> dict(zip(source.group_names, np.bincount(source.groups).tolist()))
    {'plain': 833, 'blurred': 469, 'inverted': 263, 'rotated': 149, 'textured': 83}
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    draws = generator(seed, "digits")
    shares = (1.0 if imbalance is None else real(imbalance, "imbalance", least=1)) ** -np.linspace(
        0, 1, len(STYLES)
    )
    ends = np.round(np.cumsum(shares / shares.sum()) * len(raw.images)).astype(np.int64)
    style_of = np.searchsorted(ends, np.arange(len(raw.images)), side="right")[
        draws.permutation(len(raw.images))
    ]
    images = raw.images / 16
    for style, change in enumerate(STYLES.values()):
        images[style_of == style] = change(images[style_of == style], draws)
    return Source(
        x=torch.tensor(images[:, None], dtype=torch.float32),
        y=torch.tensor(raw.target, dtype=torch.int64),
        classes=10,
        name="digits",
        groups=style_of,
        group_names=tuple(STYLES),
    )


def recipe(*, seed: int, imbalance: float | None = 10.0) -> tuple[Source, ByGroup]:
    """Return the digits and their usual partition: by style, with fewer clients for rare styles.

    Parameters
    ----------
    seed : int
        Seed for assigning images to styles.
    imbalance : float, optional
        Ratio of the numbers of images and of clients of the first style to those of the last; None
        is the same as 1.

    Returns
    -------
    tuple of Source and ByGroup
        Every client holds at least 20 images, four of them to test on.

    Examples
    --------
    >>> source, partition = recipe(seed=0)
    >>> len(partition.assign(source, seed=0).clients)
    22
    """
    usual = ByGroup(1.0 if imbalance is None else imbalance, truncate=False, min_samples=20)
    return digits(imbalance=imbalance, seed=seed), usual
