"""Digits drawn with fonts, in colour: a substitute for SynthDigits if its files are missing.

The fonts are those that come with Matplotlib and Pillow, so nothing is downloaded. The same seed
gives the same images as long as the versions of both stay the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.checks import count
from equipoise.data.cache import cached
from equipoise.data.draws import generator
from equipoise.data.progress import progress
from equipoise.errors import InputError

FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "cmr10",
    "cmb10",
    "cmss10",
    "cmtt10",
)
"""The fonts used from Matplotlib; Pillow's own font is added last."""

SIDE = 32
"""Height and width of the images."""

# Images are drawn at twice their size.
_CANVAS = 2 * SIDE
_SIZES = (38, 60)
_TURN, _SHIFT, _CONTRAST, _BLUR, _NOISE = 30.0, 6.0, 70.0, 1.5, 8.0
_IMAGES_A_BLOCK = 256
# Part of every cache key. Increase it when drawing changes.
_VERSION = 1


def font_digits(number: int, *, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw digits in many fonts, sizes, angles and colours.

    Some have parts of other digits beside them.

    Parameters
    ----------
    number : int
        Number of images.
    seed : int
        Seed of the random draws.

    Returns
    -------
    tuple of arrays
        Images [number, 32, 32, 3] of bytes, and labels [number], which repeat 0 to 9 in order.

    Examples
    --------
    >>> import os, tempfile
    >>> os.environ["EQUIPOISE_CACHE"] = tempfile.mkdtemp()
    >>> images, labels = font_digits(12)
    >>> images.shape, labels.tolist()
    ((12, 32, 32, 3), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1])
    >>> del os.environ["EQUIPOISE_CACHE"]
    """
    for package in ("PIL", "matplotlib"):
        if find_spec(package) is None:
            raise InputError(
                "digits of fonts need Pillow and Matplotlib: pip install 'equipoise[digitfive]'"
            )
    shape = (count(number, "number of digits"), SIDE, SIDE, 3)
    about = f"{number} digits drawn with fonts, seed {seed}"
    stored = cached(_key(number, seed), shape, torch.uint8, lambda: _drawn(number, seed), about)
    return stored[:].numpy(), np.arange(number) % 10


def _key(number: int, seed: int) -> str:
    import matplotlib
    import PIL
    from PIL import features

    versions = PIL.__version__, features.version("freetype2"), matplotlib.__version__
    return hashlib.sha256(
        repr(("font digits", _VERSION, versions, number, seed)).encode()
    ).hexdigest()


def _drawn(number: int, seed: int) -> Iterator[Tensor]:
    draws = generator(seed, "font digits")
    fonts = _fonts()
    with progress("drawing digits", number) as advance:
        for first in range(0, number, _IMAGES_A_BLOCK):
            labels = np.arange(first, min(first + _IMAGES_A_BLOCK, number)) % 10
            block = np.stack([_draw(int(label), fonts, draws) for label in labels])
            advance(len(block))
            yield torch.from_numpy(block)


def _fonts() -> list[list[Any]]:
    """Return every font in all sizes."""
    import matplotlib
    from PIL import ImageFont

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    sizes = range(_SIZES[0], _SIZES[1] + 1, 2)
    try:
        fonts: list[list[Any]] = [
            [ImageFont.truetype(folder / f"{n}.ttf", size) for size in sizes] for n in FONTS
        ]
        return [*fonts, [ImageFont.load_default(size) for size in sizes]]
    except (ImportError, OSError) as error:
        raise InputError(
            f"cannot read the fonts of Matplotlib in {folder} and of Pillow: {error}"
        ) from error


def _draw(label: int, fonts: list[list[Any]], draws: np.random.Generator) -> NDArray[np.uint8]:
    """Draw one digit: a mask of its shape between two colours, blurred and with noise."""
    from PIL import Image, ImageFilter

    font = fonts[draws.integers(len(fonts))][draws.integers(len(fonts[0]))]
    centre = _CANVAS / 2 + draws.uniform(-_SHIFT, _SHIFT, 2)
    mask = _glyph(label, font, centre, float(draws.uniform(-_TURN, _TURN)))
    paper, ink = _colours(draws)
    slope = draws.uniform(-40, 40, (2, 3))
    # The others are so far to the left and right that only parts of them are visible.
    for side in (-1, 1):
        other, shown = int(draws.integers(10)), draws.random() < 0.4
        if shown:
            away = np.array([side * draws.uniform(0.6, 0.8) * _CANVAS, 0.0])
            mask = np.maximum(mask, _glyph(other, font, centre + away, 0.0))
    rows, columns = (np.linspace(-0.5, 0.5, _CANVAS),) * 2
    ground = paper + rows[:, None, None] * slope[0] + columns[None, :, None] * slope[1]
    painted = ground + mask[..., None] / 255 * (ink - ground)
    whole = Image.fromarray(painted.clip(0, 255).astype(np.uint8))
    blurred = whole.filter(ImageFilter.GaussianBlur(float(draws.uniform(0, _BLUR))))
    small = np.asarray(blurred.resize((SIDE, SIDE), Image.Resampling.BOX), np.float64)
    noisy = small + draws.normal(0, draws.uniform(0, _NOISE), small.shape)
    return noisy.round().clip(0, 255).astype(np.uint8)


def _glyph(label: int, font: Any, centre: NDArray[np.float64], angle: float) -> NDArray[np.float64]:
    """Return how much of each pixel a digit covers, from 0 to 255."""
    from PIL import Image, ImageDraw

    canvas = Image.new("L", (_CANVAS, _CANVAS))
    ImageDraw.Draw(canvas).text(
        tuple(centre.tolist()), str(label), fill=255, font=font, anchor="mm"
    )
    turned = canvas.rotate(angle, Image.Resampling.BILINEAR, center=tuple(centre.tolist()))
    return np.asarray(turned, np.float64)


def _colours(draws: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw two colours that differ enough in brightness."""
    while True:
        paper, ink = draws.uniform(0, 255, (2, 3))
        if abs(float((paper - ink) @ (0.299, 0.587, 0.114))) >= _CONTRAST:
            return paper, ink
