"""EMNIST ByClass: handwritten digits, capital and lowercase letters in 62 classes.

Labels follow `CHARACTERS`: 0 to 9, then A to Z, then a to z. The files of the original release hold
transposed images; here all images are upright.
"""

from __future__ import annotations

import string

import numpy as np
import torch

from equipoise.data.download import Archive
from equipoise.data.files import as_pixels, data_files, read_idx_images
from equipoise.data.partition import Skewed, ThreeGroups
from equipoise.data.source import Source
from equipoise.errors import InputError

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
FOLDERS = ("emnist", "emnist/gzip", "EMNIST/raw", ".")
RELEASE = (
    "emnist-byclass-train-images-idx3-ubyte",
    "emnist-byclass-train-labels-idx1-ubyte",
    "emnist-byclass-test-images-idx3-ubyte",
    "emnist-byclass-test-labels-idx1-ubyte",
)
ARCHIVE = Archive(
    "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
    "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
    "emnist",
    tuple(f"gzip/{name}.gz" for name in RELEASE),
)
UPRIGHT = ("emnist-byclass-images-idx3-ubyte", "emnist-byclass-labels-idx1-ubyte")


def emnist(
    *,
    root: str | None = None,
    characters: str | None = None,
    transposed: bool | None = None,
    download: bool = False,
) -> Source:
    """Read EMNIST ByClass.

    Parameters
    ----------
    root : str, optional
        The data directory, with the files in ``emnist``, ``emnist/gzip``, ``EMNIST/raw`` or
        directly in it: the four files of the release (`RELEASE`) or one pair with upright images
        (`UPRIGHT`).
    characters : str, optional
        Which classes to keep, such as ``"abcdefghij"``; their labels become 0, 1, ... in this
        order.
    transposed : bool, optional
        Whether the images in the files are transposed. By default those of the release are.
    download : bool
        Download the files of the release (562 MB) if they are missing.

    Returns
    -------
    Source
        Upright images of shape [1, 28, 28] with pixels from 0 (paper) to 1 (ink).

    Examples
    --------
    >>> emnist(characters="ab!")
    Traceback (most recent call last):
    equipoise.errors.InputError: characters='ab!' of data 'emnist' must be distinct, from 0-9A-Za-z
    """
    kept = _classes(characters)
    paths = data_files(
        "emnist",
        RELEASE,
        UPRIGHT,
        folders=FOLDERS,
        root=root,
        archives=[ARCHIVE],
        download=download,
    )
    read = [
        read_idx_images(*paths[i : i + 2], classes=len(CHARACTERS)) for i in range(0, len(paths), 2)
    ]
    images, labels = (np.concatenate(parts) for parts in zip(*read, strict=True))
    chosen = np.isin(labels, kept)
    images, labels = images[chosen], labels[chosen]
    if len(paths) == len(RELEASE) if transposed is None else transposed:
        images = images.swapaxes(1, 2)
    new_label = np.zeros(len(CHARACTERS), np.int64)
    new_label[kept] = np.arange(len(kept))
    return Source(
        x=torch.from_numpy(as_pixels(np.ascontiguousarray(images))[:, None]),
        y=torch.from_numpy(new_label[labels]),
        classes=len(kept),
        name="emnist",
    )


def recipe(
    *,
    seed: int,
    root: str | None = None,
    characters: str | None = None,
    transposed: bool | None = None,
    scale: float = 1.0,
    download: bool = False,
) -> tuple[Source, Skewed | ThreeGroups]:
    """Return EMNIST and its usual partition.

    It is `ThreeGroups` for all characters and `Skewed` for a subset.

    Parameters
    ----------
    seed : int
        Not used: every image is read.
    root, characters, transposed, download
        See `emnist`. GIFAIR's Skewed keeps ``"abcdefghij"``.
    scale : float
        Images per client, as a factor of the paper's.

    Returns
    -------
    tuple of Source and partition
        The source and its partition.

    Examples
    --------
    >>> recipe(seed=0, root="nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: no files of data 'emnist' in ...
    """
    usual = ThreeGroups(scale) if characters is None else Skewed(scale)
    source = emnist(root=root, characters=characters, transposed=transposed, download=download)
    return source, usual


def _classes(characters: str | None) -> list[int]:
    kept = [
        CHARACTERS.find(character)
        for character in (CHARACTERS if characters is None else characters)
    ]
    if not kept or -1 in kept or len(set(kept)) < len(kept):
        raise InputError(
            f"characters={characters!r} of data 'emnist' must be distinct, from 0-9A-Za-z"
        )
    return kept
