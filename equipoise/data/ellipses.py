"""Ellipses: small synthetic images for segmentation, whose intensities depend on the site."""

from __future__ import annotations

import numpy as np
import torch

from equipoise.checks import count, real
from equipoise.data.draws import generator
from equipoise.data.partition import Natural
from equipoise.data.source import Source
from equipoise.errors import InputError


def ellipses(
    *, sites: int = 4, images: int = 60, size: int = 32, empty: float = 0.0, seed: int = 0
) -> Source:
    """Draw images of one ellipse each, which is to be segmented.

    An ellipse has a random position, a random angle and half axes of an eighth to a third of the
    image's size. Pixels are 1 inside and 0 outside, plus normal noise of standard deviation 0.3.
    Sites differ as scanners do: each adds a shade that grows linearly from left to right (by −0.5
    at the first site to 0.5 at the last), multiplies its images by a gain (0.5 to 2), and adds a
    level (−1 to 1, in another order of sites).

    Parameters
    ----------
    sites : int
        How many sites; each is a group and a client.
    images : int
        How many images a site has.
    size : int
        Height and width of the images.
    empty : float
        Share of images without an ellipse.
    seed : int
        Seed of all random draws.

    Returns
    -------
    Source
        Images of shape [1, size, size] and masks of shape [size, size], site after site.

    Examples
    --------
    >>> source = ellipses(sites=2, images=3, size=16)
    >>> source.x.shape, source.y.shape, source.classes
    (torch.Size([6, 1, 16, 16]), torch.Size([6, 16, 16]), 2)
    """
    sites, images = (
        count(sites, "sites of data 'ellipses'"),
        count(images, "images of data 'ellipses'"),
    )
    size = count(size, "size of data 'ellipses'", least=8)
    if real(empty, "empty of data 'ellipses'", least=0) > 1:
        raise InputError(f"empty of data 'ellipses' must be a share from 0 to 1, got {empty!r}")
    draws = generator(seed, "ellipses")
    total = sites * images
    down, across = np.indices((size, size)) / size
    # One number per image, to be combined with every pixel.
    ranges = ((0.3, 0.7), (0.3, 0.7), (0, np.pi), (1 / 8, 1 / 3), (1 / 8, 1 / 3), (0, 1))
    top, left, angle, long, short, chance = (
        draws.uniform(low, high, (total, 1, 1)) for low, high in ranges
    )
    along = (down - top) * np.cos(angle) + (across - left) * np.sin(angle)
    beside = (across - left) * np.cos(angle) - (down - top) * np.sin(angle)
    masks = ((along / long) ** 2 + (beside / short) ** 2 <= 1) & (chance >= empty)
    site_of = np.repeat(np.arange(sites), images)
    place = np.linspace(-1, 1, sites)[site_of][:, None, None]
    pixels = masks + 0.3 * draws.normal(size=masks.shape)
    pixels = 2.0**place * (pixels + 0.5 * place * across) + np.roll(place, images, axis=0)
    names = tuple(f"site {site}" for site in range(sites))
    return Source(
        x=torch.tensor(pixels[:, None], dtype=torch.float32),
        y=torch.tensor(masks, dtype=torch.uint8),
        task="segmentation",
        classes=2,
        name="ellipses",
        groups=site_of,
        group_names=names,
        ids=np.array(names)[site_of],
    )


def recipe(
    *, seed: int, sites: int = 4, images: int = 60, size: int = 32, empty: float = 0.0
) -> tuple[Source, Natural]:
    """Return the ellipses and their usual partition, one client per site.

    Parameters
    ----------
    seed : int
        Seed of all random draws.
    sites, images, size, empty
        See `ellipses`.

    Returns
    -------
    tuple of Source and Natural
        The source and its partition.

    Examples
    --------
    >>> source, partition = recipe(seed=0, sites=3, images=10)
    >>> partition.assign(source, seed=0).names
    ('site 0', 'site 1', 'site 2')
    """
    return ellipses(sites=sites, images=images, size=size, empty=empty, seed=seed), Natural()
