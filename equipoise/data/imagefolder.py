"""Image folders: pictures in ``root/domain/class/``, such as PACS, Office-Home or DomainNet.

Each domain is a group, and by default also a client. Images are decoded once, resized, and kept as
bytes in the cache directory (see `equipoise.data.cache`); later runs read them from there. An entry
of the cache is identified by a list of files with their sizes and modification times, an image size
and a version of Pillow. File contents are not compared, because that would read all files on every
start. A file that is replaced by one of the same size and modification time is therefore not
noticed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.checks import count, flag
from equipoise.data.cache import MappedArray, cached
from equipoise.data.folders import (
    LARGEST_IN_MEMORY,
    choose,
    cores,
    files_in,
    find_folder,
    refuse,
    subfolders,
)
from equipoise.data.partition import Natural
from equipoise.data.progress import progress
from equipoise.data.source import Source
from equipoise.errors import InputError
from equipoise.models.base import pixels

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""File endings of images, in lower or upper case. Other files are ignored."""

# Part of every cache key. Increase it when decoding changes.
_VERSION = 1
_IMAGES_A_BLOCK = 256


class _Image(NamedTuple):
    name: str  # relative to the root, with "/" between folders
    domain: int
    label: int


def imagefolder(
    *,
    root: str,
    size: int = 224,
    classes: Sequence[str] | None = None,
    domains: Sequence[str] | None = None,
    mapped: bool | None = None,
    scaled: bool = False,
) -> Source:
    """Read a folder of images.

    Images are converted to RGB and resized to ``size`` by ``size`` pixels (bilinear, regardless of
    their aspect ratio), unless they already have that size. The orientation stored in a file (EXIF)
    is not applied.

    Parameters
    ----------
    root : str
        The folder that holds one folder per domain, each with one folder per class. A relative path
        is searched for in the working directory, then in the data directory (see
        `equipoise.data.files`).
    size : int
        Height and width of the images.
    classes : sequence of str, optional
        Which classes to read; their labels are 0, 1, ... in this order. By default all of them, in
        alphabetical order. Each domain must have images of each class.
    domains : sequence of str, optional
        Which domains to read, in the order of groups; by default all of them, in alphabetical
        order.
    mapped : bool, optional
        Whether images stay on disk and are read batch by batch. By default they do if they take 2
        GiB or more.
    scaled : bool
        Whether pixels are numbers from 0 to 1 in float32 instead of bytes. Then any model for
        images can be trained, and images take four times the memory. They cannot stay on disk.

    Returns
    -------
    Source
        Images of shape [N, 3, size, size]: domain after domain, class after class, files in
        alphabetical order. Pixels are bytes from 0 to 255, unless they are ``scaled``.

    Examples
    --------
    >>> import tempfile
    >>> from PIL import Image
    >>> root, os.environ["EQUIPOISE_CACHE"] = tempfile.mkdtemp(), tempfile.mkdtemp()
    >>> for name in ("photo/cat/1.png", "photo/dog/1.png", "sketch/cat/1.png", "sketch/dog/1.png"):
    ...     Path(root, name).parent.mkdir(parents=True)
    ...     Image.new("RGB", (40, 30), "red").save(Path(root, name))
    >>> source = imagefolder(root=root, size=8)
    >>> source.x.shape, source.y.tolist(), source.group_names
    (torch.Size([4, 3, 8, 8]), [0, 1, 0, 1], ('photo', 'sketch'))
    >>> source.x[0, :, 0, 0].tolist()
    [255, 0, 0]
    >>> del os.environ["EQUIPOISE_CACHE"]
    """
    _require_pillow()
    size = count(size, "size of data 'imagefolder'")
    if mapped is not None:
        flag(mapped, "mapped of data 'imagefolder'")
    if flag(scaled, "scaled of data 'imagefolder'") and mapped:
        raise InputError(
            "mapped of data 'imagefolder' is true, but scaled images are kept in memory; leave out "
            "mapped or scaled"
        )
    folder = find_folder(root, "imagefolder")
    group_names, class_names, images = _listed(folder, domains, classes)
    shape = (len(images), 3, size, size)
    stored = cached(
        _key(folder, images, size),
        shape,
        torch.uint8,
        lambda: _decoded(folder, images, size),
        f"images in {folder}, {size} x {size} pixels",
    )
    stays_on_disk = prod(shape) >= LARGEST_IN_MEMORY if mapped is None else mapped
    x: Tensor | MappedArray = stored if stays_on_disk and not scaled else stored[:]
    if scaled:
        x = pixels(x[:], torch.float32)
    groups = np.array([image.domain for image in images], np.int64)
    return Source(
        x=x,
        y=torch.tensor([image.label for image in images]),
        classes=len(class_names),
        name=folder.name,
        groups=groups,
        group_names=group_names,
        ids=np.array(group_names)[groups],
        class_names=class_names,
    )


def recipe(
    *,
    seed: int,
    root: str,
    size: int = 224,
    classes: tuple[str, ...] | None = None,
    domains: tuple[str, ...] | None = None,
    mapped: bool | None = None,
    scaled: bool = False,
) -> tuple[Source, Natural]:
    """Return a folder of images and its usual partition, one client per domain.

    Parameters
    ----------
    seed : int
        Not used: every image is read.
    root, size, classes, domains, mapped, scaled
        See `imagefolder`.

    Returns
    -------
    tuple of Source and Natural
        The source and its partition.

    Examples
    --------
    >>> recipe(seed=0, root="nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: root='nowhere' of data 'imagefolder' is not a folder; looked for
    .../nowhere and ...
    """
    return imagefolder(
        root=root, size=size, classes=classes, domains=domains, mapped=mapped, scaled=scaled
    ), Natural()


def _listed(
    folder: Path, domains: Sequence[str] | None, classes: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...], list[_Image]]:
    """Return the domains, the classes and the images.

    Every domain must have images of every class.
    """
    found_domains = subfolders(folder)
    if not found_domains:
        raise InputError(
            f"{folder} has no folders; data 'imagefolder' needs one per domain, each with one per "
            "class"
        )
    chosen_domains = choose(
        domains, "imagefolder", found_domains, option="domains", kind="domain", where=folder
    )
    classes_of = {domain: subfolders(folder / domain) for domain in chosen_domains}
    refuse(
        [f"domain {domain!r}" for domain, found in classes_of.items() if not found],
        f"in {folder} each domain needs one folder per class; there is none in ",
    )
    every_class = sorted(set().union(*classes_of.values()))
    chosen_classes = choose(
        classes, "imagefolder", every_class, option="classes", kind="class", where=folder
    )
    if len(chosen_classes) < 2:
        raise InputError(
            f"data 'imagefolder' reads one class only from {folder}, {chosen_classes[0]!r}; valid: "
            "two classes or more"
        )
    refuse(
        [
            f"{name!r} is missing in {d!r}"
            for name in chosen_classes
            for d in chosen_domains
            if name not in classes_of[d]
        ],
        f"the domains of {folder} must have the same classes, chosen by the options classes and "
        "domains: ",
    )
    images: list[_Image] = []
    empty = []
    for domain, domain_name in enumerate(chosen_domains):
        for label, class_name in enumerate(chosen_classes):
            names = files_in(folder / domain_name / class_name, ENDINGS)
            images += [
                _Image(f"{domain_name}/{class_name}/{name}", domain, label) for name in names
            ]
            empty += [] if names else [f"{domain_name}/{class_name}"]
    refuse(
        empty, f"no images (files that end in {', '.join(ENDINGS)}) in these folders of {folder}: "
    )
    return chosen_domains, chosen_classes, images


def _key(folder: Path, images: Sequence[_Image], size: int) -> str:
    """Return a hash of what the decoded images depend on; see the module's docstring."""
    import PIL
    from PIL import features

    decoders = (
        PIL.__version__,
        *(features.version(codec) for codec in ("jpg", "zlib", "libtiff", "webp")),
    )
    key = hashlib.sha256(repr(("imagefolder", _VERSION, decoders, size)).encode())
    for image in images:
        status = os.stat(folder / image.name)
        key.update(repr((image.name, status.st_size, status.st_mtime_ns)).encode())
    return key.hexdigest()


def _decoded(folder: Path, images: Sequence[_Image], size: int) -> Iterator[Tensor]:
    """Decode all images, block by block; at the end, raise an error that lists unreadable ones."""
    from PIL import UnidentifiedImageError

    broken: list[str] = []

    def decode(image: _Image) -> NDArray[np.uint8]:
        try:
            return _decode(folder / image.name, size)
        except Exception as error:  # decoders raise all kinds of errors when a file is broken
            reason = (
                "not an image"
                if isinstance(error, UnidentifiedImageError)
                else str(error) or type(error).__name__
            )
            broken.append(f"{image.name} ({reason})")
            return np.zeros((3, size, size), np.uint8)

    with (
        ThreadPoolExecutor(cores()) as pool,
        progress(f"decoding {folder.name}", len(images)) as advance,
    ):
        for first in range(0, len(images), _IMAGES_A_BLOCK):
            block = np.stack(list(pool.map(decode, images[first : first + _IMAGES_A_BLOCK])))
            advance(len(block))
            yield torch.from_numpy(block)
    refuse(
        sorted(broken), f"{len(broken)} of the {len(images)} images in {folder} cannot be read: "
    )


def _decode(path: Path, size: int) -> NDArray[np.uint8]:
    """Return an image as bytes [3, size, size]."""
    from PIL import Image

    with Image.open(path) as image:
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            raise InputError(f"its pixels are of mode {image.mode}, not of 8 bits a colour")
        # Convert a palette with transparent colours to RGBA first.
        whole = (image.convert("RGBA") if image.mode == "P" else image).convert("RGB")
    if whole.size != (size, size):
        whole = whole.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(whole).transpose(2, 0, 1)


def _require_pillow() -> None:
    if find_spec("PIL") is None:
        raise InputError("data 'imagefolder' needs Pillow: pip install 'equipoise[images]'")
