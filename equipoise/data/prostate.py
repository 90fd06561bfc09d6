"""Fed-Prostate (Liu et al., 2021): T2-weighted MR images of the prostate from several sites.

The root has one folder per site, such as ``RUNMC``, ``BMC``, ``I2CVB``, ``UCL``, ``BIDMC`` and
``HK``. A site has one volume in NIfTI format for each patient, ``Case00.nii.gz``, and its mask
beside it, ``Case00_segmentation.nii.gz``. Each site is a group, and by default also a client.
Slices are prepared once and kept in the cache directory (see `equipoise.data.cache`). As for image
folders, an entry is identified by a list of files with their sizes and modification times.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from equipoise.checks import count, flag, real
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

ENDINGS = (".nii.gz", ".nii")
"""File endings of volumes, in lower or upper case. Other files are ignored."""

MASK = "_segmentation"
"""Suffix of a mask's name after that of its volume, in lower or upper case."""

# Part of every cache key. Increase it when the preparation changes.
_VERSION = 1
_VOLUMES_A_BLOCK = 8


class _Volume(NamedTuple):
    image: Path
    mask: Path
    site: int


def prostate(
    *,
    root: str = "prostate",
    size: int = 384,
    sites: Sequence[str] | None = None,
    channels: int = 1,
    quantile: float = 1.0,
    empty: bool = False,
    mapped: bool | None = None,
) -> Source:
    """Read the axial slices of NIfTI volumes and their masks.

    The intensities of each volume are scaled to [−1, 1]. Slices are resized to ``size`` by ``size``
    pixels if they have another size: images with antialiased bilinear interpolation, masks with
    nearest-neighbour interpolation. Every label above 0 is the prostate. Only slices that show it
    are kept, as in HarmoFL's public code; the FFT-GP paper does not specify this. All slices of a
    volume are in the same split of a client.

    Parameters
    ----------
    root : str
        The folder that holds one folder per site. A relative path is searched for in the working
        directory, then in the data directory (see `equipoise.data.files`).
    size : int
        Height and width of the slices.
    sites : sequence of str, optional
        Which sites to read, in the order of groups; by default all of them, in alphabetical order.
    channels : int
        An odd number. With 3, a sample has the slices before and after as further channels, as in
        HarmoFL's public code. At the ends of a volume the outermost slice is repeated.
    quantile : float
        Intensities above this quantile of their volume are clipped to it. HarmoFL's public code
        uses 0.99.
    empty : bool
        Whether to keep slices that do not show the prostate.
    mapped : bool, optional
        Whether slices stay on disk and are read batch by batch. By default they do if they take 2
        GiB or more.

    Returns
    -------
    Source
        float32 of shape [N, channels, size, size] and masks [N, size, size] of 0 and 1: site after
        site, volumes in alphabetical order, slices in the order of the volume's last axis. Rows are
        the volume's second axis, columns its first.

    Examples
    --------
    >>> import tempfile
    >>> import nibabel
    >>> root, os.environ["EQUIPOISE_CACHE"] = tempfile.mkdtemp(), tempfile.mkdtemp()
    >>> Path(root, "HK").mkdir()
    >>> for name in ("Case00", "Case00_segmentation"):
    ...     volume = np.zeros((8, 8, 3), np.float32)
    ...     volume[2:5, 2:5, 1:] = 1
    ...     nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), Path(root, "HK", f"{name}.nii.gz"))
    >>> source = prostate(root=root, size=16)
    >>> source.x.shape, source.y.sum((1, 2)).tolist(), source.group_names
    (torch.Size([2, 1, 16, 16]), [36, 36], ('HK',))
    >>> del os.environ["EQUIPOISE_CACHE"]
    """
    if find_spec("nibabel") is None:
        raise InputError("data 'prostate' needs nibabel: pip install 'equipoise[medical]'")
    size, channels = (
        count(size, "size of data 'prostate'"),
        count(channels, "channels of data 'prostate'"),
    )
    if channels % 2 == 0:
        raise InputError(
            f"channels of data 'prostate' must be odd, got {channels}: a sample has equally many "
            "slices before and after"
        )
    if real(quantile, "quantile of data 'prostate'") > 1:
        raise InputError(f"quantile of data 'prostate' must be at most 1, got {quantile!r}")
    flag(empty, "empty of data 'prostate'")
    if mapped is not None:
        flag(mapped, "mapped of data 'prostate'")
    folder = find_folder(root, "prostate")
    names, volumes = _listed(folder, sites)
    key = partial(_key, folder, volumes)
    name = f"reading {folder.name}"
    # The number of slices is known only after all masks have been read.
    sizes = cached(
        key("sizes", empty),
        (len(volumes),),
        torch.int64,
        lambda: _prepared(volumes, partial(_kept, empty=empty), name),
        f"numbers of slices of the volumes in {folder}",
    )[:]
    total = int(sizes.sum())
    if not total:
        raise InputError(f"no slice in {folder} shows the prostate: all masks are empty")
    masks = cached(
        key("masks", empty, size),
        (total, size, size),
        torch.uint8,
        lambda: _prepared(volumes, partial(_masks, size=size, empty=empty), name),
        f"masks of the volumes in {folder}, {size} x {size} pixels",
    )
    shape = (total, channels, size, size)
    stored = cached(
        key("slices", empty, size, channels, quantile),
        shape,
        torch.float32,
        lambda: _prepared(
            volumes,
            partial(_slices, size=size, empty=empty, channels=channels, quantile=quantile),
            name,
        ),
        f"slices of the volumes in {folder}, {size} x {size} pixels",
    )
    stays_on_disk = 4 * prod(shape) >= LARGEST_IN_MEMORY if mapped is None else mapped
    x: Tensor | MappedArray = stored if stays_on_disk else stored[:]
    groups = np.repeat([volume.site for volume in volumes], sizes)
    return Source(
        x=x,
        y=masks[:],
        task="segmentation",
        classes=2,
        name=folder.name,
        groups=groups,
        group_names=names,
        ids=np.array(names)[groups],
        units=np.repeat(np.arange(len(volumes)), sizes),
    )


def recipe(
    *,
    seed: int,
    root: str = "prostate",
    size: int = 384,
    sites: tuple[str, ...] | None = None,
    channels: int = 1,
    quantile: float = 1.0,
    empty: bool = False,
    mapped: bool | None = None,
) -> tuple[Source, Natural]:
    """Return the slices and their usual partition, one client per site.

    Parameters
    ----------
    seed : int
        Not used: every volume is read.
    root, size, sites, channels, quantile, empty, mapped
        See `prostate`.

    Returns
    -------
    tuple of Source and Natural
        The source and its partition.

    Examples
    --------
    >>> recipe(seed=0, root="nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: root='nowhere' of data 'prostate' is not a folder; looked for
    .../nowhere and ...
    """
    source = prostate(
        root=root,
        size=size,
        sites=sites,
        channels=channels,
        quantile=quantile,
        empty=empty,
        mapped=mapped,
    )
    return source, Natural()


def _listed(folder: Path, sites: Sequence[str] | None) -> tuple[tuple[str, ...], list[_Volume]]:
    """Return the sites and their volumes. Each volume must have a mask."""
    found = subfolders(folder)
    if not found:
        raise InputError(
            f"{folder} has no folders; data 'prostate' needs one per site with its NIfTI volumes"
        )
    chosen = choose(sites, "prostate", found, option="sites", kind="site", where=folder)
    volumes: list[_Volume] = []
    empty, alone = [], []
    for site, name in enumerate(chosen):
        files = {_stem(file): file for file in files_in(folder / name, ENDINGS)}
        masks = {
            stem[: -len(MASK)]: file for stem, file in files.items() if stem.lower().endswith(MASK)
        }
        images = {stem: file for stem, file in files.items() if not stem.lower().endswith(MASK)}
        alone += [
            f"{name}/{file} has no mask" for stem, file in images.items() if stem not in masks
        ]
        alone += [
            f"{name}/{file} has no volume" for stem, file in masks.items() if stem not in images
        ]
        empty += [] if files else [name]
        both = [stem for stem in sorted(images) if stem in masks]
        volumes += [
            _Volume(folder / name / images[stem], folder / name / masks[stem], site)
            for stem in both
        ]
    refuse(
        empty, f"no volumes (files that end in {', '.join(ENDINGS)}) in these folders of {folder}: "
    )
    refuse(alone, f"in {folder} each volume NAME.nii.gz needs a mask NAME{MASK}.nii.gz: ")
    return chosen, volumes


def _stem(file: str) -> str:
    """Return a file's name without its ending."""
    return file[: -next(len(ending) for ending in ENDINGS if file.lower().endswith(ending))]


def _key(folder: Path, volumes: Sequence[_Volume], *what: object) -> str:
    """Return a hash of what prepared arrays depend on; see the module's docstring."""
    import nibabel

    key = hashlib.sha256(
        repr(("prostate", _VERSION, nibabel.__version__, torch.__version__, what)).encode()
    )
    for volume in volumes:
        for path in (volume.image, volume.mask):
            status = os.stat(path)
            named = path.relative_to(folder).as_posix()
            key.update(repr((named, status.st_size, status.st_mtime_ns)).encode())
    return key.hexdigest()


def _prepared(
    volumes: Sequence[_Volume], prepare: Callable[[_Volume], Tensor], name: str
) -> Iterator[Tensor]:
    """Prepare all volumes in parallel; at the end, raise an error that lists unreadable ones."""
    broken: list[str] = []

    def prepared(volume: _Volume) -> Tensor | None:
        try:
            return prepare(volume)
        except Exception as error:  # readers raise all kinds of errors when a file is broken
            broken.append(
                f"{volume.image.parent.name}/{volume.image.name} ({error or type(error).__name__})"
            )
            return None

    with ThreadPoolExecutor(cores()) as pool, progress(name, len(volumes)) as advance:
        for first in range(0, len(volumes), _VOLUMES_A_BLOCK):
            for rows in pool.map(prepared, volumes[first : first + _VOLUMES_A_BLOCK]):
                advance(1)
                if rows is not None and len(rows):
                    yield rows
    refuse(sorted(broken), f"{len(broken)} of the {len(volumes)} volumes cannot be read: ")


def _read(path: Path) -> NDArray[np.float32]:
    """Return a volume as ``[slices, rows, columns]``."""
    import nibabel

    # The declared return type lacks the attributes of volumes.
    image: Any = nibabel.load(path)
    values = np.asarray(image.dataobj, np.float32)
    if values.ndim != 3 or not values.size:
        raise InputError(f"{path.name} has shape {values.shape}; a volume has three dimensions")
    if not np.isfinite(values).all():
        raise InputError(f"{path.name} has NaN or infinity")
    return values.transpose(2, 1, 0)


def _read_mask(volume: _Volume, empty: bool) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return a mask, and which of its slices are kept."""
    mask = _read(volume.mask) > 0
    kept = np.arange(len(mask)) if empty else np.flatnonzero(mask.any((1, 2)))
    return mask, kept


def _kept(volume: _Volume, *, empty: bool) -> Tensor:
    """Return the number of kept slices of a volume, as an array of one row."""
    return torch.tensor([len(_read_mask(volume, empty)[1])])


def _masks(volume: _Volume, *, size: int, empty: bool) -> Tensor:
    mask, kept = _read_mask(volume, empty)
    slices = torch.from_numpy(mask[kept].astype(np.uint8))
    return (
        slices
        if slices.shape[1:] == (size, size)
        else _resized(slices.unsqueeze(1), size, "nearest-exact").squeeze(1)
    )


def _slices(volume: _Volume, *, size: int, empty: bool, channels: int, quantile: float) -> Tensor:
    mask, kept = _read_mask(volume, empty)
    values = _read(volume.image)
    if values.shape != mask.shape:
        raise InputError(
            f"its shape is {values.shape[::-1]}, but that of its mask {mask.shape[::-1]}"
        )
    lowest, highest = values.min(), np.quantile(values, quantile)
    scaled = (np.minimum(values, highest) - lowest) / max(
        highest - lowest, np.finfo(np.float32).tiny
    ) * 2 - 1
    reach = channels // 2
    around = (kept[:, None] + np.arange(-reach, reach + 1)).clip(0, len(values) - 1)
    slices = torch.from_numpy(scaled.astype(np.float32)[around])
    return slices if slices.shape[2:] == (size, size) else _resized(slices, size, "bilinear")


def _resized(slices: Tensor, size: int, mode: str) -> Tensor:
    """Resize slices ``[slices, channels, rows, columns]``."""
    if not len(slices):
        return slices.new_zeros((0, slices.shape[1], size, size))
    return F.interpolate(slices, (size, size), mode=mode, antialias=mode == "bilinear")
