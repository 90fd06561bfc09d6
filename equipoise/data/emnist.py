"""EMNIST ByClass: handwritten digits, capital and lowercase letters in 62 classes, and GIFAIR's two ways to divide them.

Labels follow `CHARACTERS`: 0 to 9, then A to Z, then a to z. The files of the original release hold every image with its
rows and columns exchanged; here all images are upright.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.checks import count, real
from equipoise.data.download import Archive
from equipoise.data.draws import generator
from equipoise.data.files import as_pixels, data_files, read_idx_images
from equipoise.data.partition import Assignment, _labels
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

# Clients, images a client, and which of digits (0), capital (1) and lowercase letters (2) they are: GIFAIR, table 3.
_THREE_GROUPS = {"capital": (60, 800, (0, 1)), "lowercase": (100, 1000, (0, 2)), "mixed": (40, 600, (0, 1, 2))}


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
        The data directory, with the files in ``emnist``, ``emnist/gzip``, ``EMNIST/raw`` or directly in it: the four of
        the release (`RELEASE`) or one pair of upright images (`UPRIGHT`).
    characters : str, optional
        Which classes to keep, such as ``"abcdefghij"``; their labels become 0, 1, ... in this order.
    transposed : bool, optional
        Whether the files hold images with rows and columns exchanged. By default those of the release do.
    download : bool
        Get the files of the release (562 MB) if there are none.

    Returns
    -------
    Source
        Upright images of shape [1, 28, 28] with pixels from 0 (paper) to 1 (ink).

    Examples
    --------
    >>> emnist(characters="ab!")
    Traceback (most recent call last):
    equipoise.errors.InputError: characters='ab!' of data 'emnist' must be different ones of 0-9A-Za-z
    """
    kept = _classes(characters)
    paths = data_files("emnist", RELEASE, UPRIGHT, folders=FOLDERS, root=root, archives=[ARCHIVE], download=download)
    read = [read_idx_images(*paths[i : i + 2], classes=len(CHARACTERS)) for i in range(0, len(paths), 2)]
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
    """Return EMNIST and its usual partition: `ThreeGroups` for all characters, `Skewed` for a choice of them.

    Parameters
    ----------
    seed : int
        Not used: every image is read.
    root, characters, transposed, download
        See `emnist`. GIFAIR's Skewed keeps ``"abcdefghij"``.
    scale : float
        Images a client, as a factor of the paper's.

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
    source = emnist(root=root, characters=characters, transposed=transposed, download=download)
    return source, ThreeGroups(scale) if characters is None else Skewed(scale)


@dataclass(frozen=True)
class Skewed:
    """Label skew of GIFAIR's FEMNIST-Skewed: client k holds classes k, k + 1, ... in a circle, as many of each.

    The paper has 100 clients with 5 of 10 classes and 500 images. Unlike `ClassesPerClient`, which divides all there is,
    every client holds the same number of samples; what is left over belongs to nobody.

    Parameters
    ----------
    scale : float
        Multiplies ``images``, to fit the data at hand.
    clients : int
        How many clients.
    classes : int
        How many classes each client holds.
    images : int
        How many samples of each of its classes a client holds at ``scale=1``.

    Examples
    --------
    >>> source = Source(x=torch.zeros(40, 1), y=torch.arange(40) % 4)
    >>> parts = Skewed(0.03, clients=4, classes=2).assign(source, seed=0).clients
    >>> sorted(source.y[parts[3]].tolist())
    [0, 0, 0, 3, 3, 3]
    """

    scale: float = 1.0
    clients: int = 100
    classes: int = 5
    images: int = 100

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``; the same seed always gives the same answer."""
        labels, total = _labels_without_groups(source, "skewed"), source.classes or 0
        if count(self.classes, "classes") > total:
            raise InputError(f"classes={self.classes} a client is more than the {total} of source {source.name!r}")
        classes_of = (np.arange(count(self.clients, "clients"))[:, None] + np.arange(self.classes)) % total
        holders = np.bincount(classes_of.flatten(), minlength=total)
        available = np.bincount(labels, minlength=total)

        def fits(scale: float) -> bool:
            return bool((holders * round(self.images * scale) <= available).all())

        _check_scale(self.scale, fits, least=1 / count(self.images, "images"), where=f"source {source.name!r}")
        draws, size = generator(seed, "partition"), round(self.images * self.scale)
        mixed = [draws.permutation(np.flatnonzero(labels == label)) for label in range(total)]
        given = np.zeros(total, np.int64)
        held = []
        for mine in classes_of:
            held.append(np.concatenate([mixed[label][given[label] : given[label] + size] for label in mine]))
            given[mine] += size
        return Assignment(held, [0] * len(held), ("all",))


@dataclass(frozen=True)
class ThreeGroups:
    """GIFAIR's FEMNIST-3-Groups: clients who write capital letters, lowercase letters, or both, and digits.

    ==========  =======  ===============  =====================================
    group       clients  images a client  of
    ==========  =======  ===============  =====================================
    capital          60              800  digits, capital letters
    lowercase       100            1,000  digits, lowercase letters
    mixed            40              600  digits, capital and lowercase letters
    ==========  =======  ===============  =====================================

    The paper does not say whether its 800, 1,000 and 600 images are those of a client or of a group; 2,400 images in all
    could not give the accuracy it reports on 62 classes, so they are a client's. Inside a group the kinds of characters
    come in the proportion in which the source has them. No image is used twice.

    Parameters
    ----------
    scale : float
        Multiplies the images a client holds, to fit the data at hand.

    Examples
    --------
    >>> source = Source(x=torch.zeros(2480, 1), y=torch.arange(2480) % 62)
    >>> assignment = ThreeGroups(0.005).assign(source, seed=0)
    >>> np.bincount(assignment.groups).tolist(), [len(assignment.clients[k]) for k in (0, 60, 160)]
    ([60, 100, 40], [4, 5, 3])
    """

    scale: float = 1.0

    def assign(self, source: Source, seed: int) -> Assignment:
        """Divide the samples of ``source``; the same seed always gives the same answer."""
        labels = _labels_without_groups(source, "threegroups")
        if source.classes != len(CHARACTERS):
            raise InputError(
                f"the threegroups partition needs {len(CHARACTERS)} classes in the order 0-9A-Za-z, "
                f"source {source.name!r} has {source.classes}"
            )
        kind_of = np.searchsorted([10, 36], labels, side="right")
        available = np.bincount(kind_of, minlength=3)
        _check_scale(
            self.scale,
            lambda scale: bool((_kinds_wanted(scale, available).sum(axis=0) <= available).all()),
            least=3 / min(images for _, images, _ in _THREE_GROUPS.values()),
            where=f"source {source.name!r}",
        )
        wanted = _kinds_wanted(self.scale, available)
        draws = generator(seed, "partition")
        pools = [
            np.split(draws.permutation(np.flatnonzero(kind_of == kind)), np.cumsum(wanted[:, kind]))
            for kind in range(3)
        ]
        held: list[NDArray[np.int64]] = []
        groups: list[int] = []
        for group, (clients, _, _) in enumerate(_THREE_GROUPS.values()):
            held += np.split(draws.permutation(np.concatenate([pool[group] for pool in pools])), clients)
            groups += [group] * clients
        return Assignment(held, groups, tuple(_THREE_GROUPS))


def _kinds_wanted(scale: float, available: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the digits, capital and lowercase letters (columns) that each group (rows) takes."""
    wanted = np.zeros((len(_THREE_GROUPS), len(available)), np.int64)
    for group, (clients, images, kinds) in enumerate(_THREE_GROUPS.values()):
        there = np.where(np.isin(np.arange(len(available)), kinds), available, 0)
        ends = np.round(np.cumsum(there) / max(1, there.sum()) * clients * round(images * scale))
        wanted[group] = np.diff(ends, prepend=0)
    return wanted


def _check_scale(scale: float, fits: Callable[[float], bool], *, least: float, where: str) -> None:
    if real(scale, "scale") < least:
        raise InputError(f"scale={scale} leaves clients too few images; valid: from {least:g} on")
    if not fits(scale):
        smaller = [candidate / 1000 for candidate in range(1, int(scale * 1000)) if fits(candidate / 1000)]
        usable = [candidate for candidate in smaller if candidate >= least]
        hint = f"the largest that fits is scale={max(usable)}" if usable else "no scale fits"
        raise InputError(f"{where} has too few images for scale={scale}; {hint}")


def _labels_without_groups(source: Source, partition: str) -> NDArray[np.int64]:
    if source.groups is not None:
        raise InputError(
            f"the {partition} partition is for sources without groups, but source {source.name!r} has "
            f"{', '.join(source.group_names)}"
        )
    return _labels(source, partition)


def _classes(characters: str | None) -> list[int]:
    kept = [CHARACTERS.find(character) for character in (CHARACTERS if characters is None else characters)]
    if not kept or -1 in kept or len(set(kept)) < len(kept):
        raise InputError(f"characters={characters!r} of data 'emnist' must be different ones of 0-9A-Za-z")
    return kept
