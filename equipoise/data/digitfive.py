"""Digit-Five: digits in five domains, from black handwriting to photographs of house numbers.

========  =============================  ======================================================
domain    images                         files in the data directory
========  =============================  ======================================================
mnist     MNIST                          ``mnist/`` as for the source ``mnist``
usps      USPS                           ``usps/usps.h5``; or ``usps/usps.bz2`` and
                                         ``usps/usps.t.bz2`` in LIBSVM's format
synth     SynthDigits                    ``synth/synth_train_32x32.mat`` and
                                         ``synth/synth_test_32x32.mat``
mnistm    MNIST-M                        ``mnist_m/mnist_m_train.npz`` and
                                         ``mnist_m/mnist_m_test.npz``, with the arrays ``x``
                                         [N, 32, 32, 3] of bytes and ``y``
svhn      Street View House Numbers,     ``svhn/train_32x32.mat`` and ``svhn/test_32x32.mat``
          cropped digits
fonts     digits drawn with fonts,       none; see `equipoise.data.fonts`
          a substitute for synth
inverted  digits of EMNIST with          ``emnist/`` as for the source ``emnist``
          inverted colours,
          a substitute for svhn
========  =============================  ======================================================

The two substitutes have names of their own, so that results cannot be mistaken for those of the
original domains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from equipoise.arrays import read_npz
from equipoise.checks import count, real
from equipoise.data import emnist as emnist_files
from equipoise.data import mnist as mnist_files
from equipoise.data.draws import generator
from equipoise.data.files import data_files, read_idx_images
from equipoise.data.fonts import font_digits
from equipoise.data.partition import ByGroup
from equipoise.data.source import Source
from equipoise.errors import InputError, unknown

DOMAINS = ("mnist", "usps", "synth", "mnistm", "svhn")
"""The five domains, in FedGCR's order."""

RATIOS = {(5, 5): 1.5, (5, 10): 1.8}
"""FedGCR's rho by number of domains and imbalance factor; others are computed from the factor."""

# The images of a domain that has no published test set are divided four to one.
_TEST_SHARE = 0.2
_IMAGES_A_BLOCK = 1024


class _Portion(NamedTuple):
    """Images [N, height, width] or [N, height, width, 3] of bytes, and labels [N]."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


def digitfive(
    *,
    root: str | None = None,
    domains: Sequence[str] = DOMAINS,
    size: int = 28,
    train_images: int | None = 7438,
    test_images: int | None = 1860,
    seed: int = 0,
) -> Source:
    """Read digits of several domains. The domains are the groups.

    Parameters
    ----------
    root : str, optional
        The data directory; see `equipoise.data.files`.
    domains : sequence of str
        Which domains to read, in the order of groups.
    size : int
        Height and width of the images, to which all are resized (bilinear).
    train_images, test_images : int, optional
        Maximum number of images of a domain's training and test set, drawn at random; None keeps
        all. The defaults are those of FedBN's and FedGCR's Digit-Five.
    seed : int
        Seed for the choice of images and for drawing those of fonts.

    Returns
    -------
    Source
        Bytes of shape [N, 3, size, size] from 0 to 255, domain after domain, each with its training
        images first. By default all clients of a domain are tested on its test images
        (``test_of``).

    Examples
    --------
    >>> digitfive(domains=["mnist", "svnh"])
    Traceback (most recent call last):
    equipoise.errors.InputError: unknown domain 'svnh' in domains of data 'digitfive'; did you
    mean 'svhn'? Valid: fonts, inverted, mnist, mnistm, svhn, synth, usps
    """
    size = count(size, "size of data 'digitfive'")
    limits = [
        None if limit is None else count(limit, f"{name} of data 'digitfive'")
        for name, limit in (("train_images", train_images), ("test_images", test_images))
    ]
    chosen = _chosen(domains)
    x: list[Tensor] = []
    y: list[NDArray[np.int64]] = []
    group: list[int] = []
    test: list[bool] = []
    for number, domain in enumerate(chosen):
        draws = generator(seed, f"digitfive {domain}")
        portions = _READERS[domain](_Wanted(root, seed, *limits))
        for portion, limit, is_test in zip(portions, limits, (False, True), strict=True):
            kept = np.sort(draws.permutation(len(portion.labels))[:limit])
            x.append(_resized(portion.images[kept], size))
            y.append(portion.labels[kept])
            group += [number] * len(kept)
            test += [is_test] * len(kept)
    return Source(
        x=torch.cat(x),
        y=torch.from_numpy(np.concatenate(y)),
        classes=10,
        name="digitfive",
        groups=np.array(group, np.int64),
        group_names=chosen,
        test=np.array(test),
        test_of="group",
    )


def recipe(
    *,
    seed: int,
    root: str | None = None,
    domains: tuple[str, ...] = DOMAINS,
    size: int = 28,
    train_images: int | None = 7438,
    test_images: int | None = 1860,
    dif: float = 10.0,
    largest: int = 2975,
) -> tuple[Source, ByGroup]:
    """Return the digits and their usual partition, FedGCR's domain imbalance factor.

    With five domains and a factor of 1, 5 or 10 there are 10, 13 or 22 clients. With ``splits=(1,
    0, 0)`` their training sets have the sizes of FedGCR's runs; other splits take validation
    samples from them.

    Parameters
    ----------
    seed : int
        Seed for the choice of images.
    root, domains, size, train_images, test_images
        See `digitfive`.
    dif : float
        How many times more clients and images the first domain has than the last; 1 means equal
        domains of two clients.
    largest : int
        Total number of training images of the clients of the first domain; with ``dif=1`` the
        clients of each domain hold half as many.

    Returns
    -------
    tuple of Source and ByGroup
        The source and its partition.

    Examples
    --------
    >>> recipe(seed=0, root="nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: no files of data 'digitfive mnist' in ...
    """
    if real(dif, "dif of data 'digitfive'", least=1) == 1:
        usual = ByGroup(1, largest=count(largest, "largest of data 'digitfive'", least=2) // 2)
    else:
        usual = ByGroup(dif, ratio=RATIOS.get((len(domains), int(dif))), largest=largest)
    images = {"train_images": train_images, "test_images": test_images}
    return digitfive(root=root, domains=domains, size=size, seed=seed, **images), usual


class _Wanted(NamedTuple):
    """Arguments of the readers: data directory, seed, and maximum number of images per portion."""

    root: str | None
    seed: int
    train: int | None
    test: int | None


def _read_mnist(wanted: _Wanted) -> tuple[_Portion, _Portion]:
    names = mnist_files.FILES["train"] + mnist_files.FILES["test"]
    paths = data_files("digitfive mnist", names, folders=mnist_files.FOLDERS, root=wanted.root)
    return _Portion(*read_idx_images(*paths[:2], classes=10)), _Portion(
        *read_idx_images(*paths[2:], classes=10)
    )


def _read_usps(wanted: _Wanted) -> tuple[_Portion, _Portion]:
    text = ("usps.bz2", "usps.t.bz2")
    paths = data_files(
        "digitfive usps", ["usps.h5"], text, folders=("usps", "USPS", "."), root=wanted.root
    )
    if len(paths) == 1:
        return _usps_hdf5(paths[0], "train"), _usps_hdf5(paths[0], "test")
    return _usps_text(paths[0]), _usps_text(paths[1])


def _usps_hdf5(path: Path, portion: str) -> _Portion:
    """Read USPS as numbers from 0 to 1 in an HDF5 file."""
    if find_spec("h5py") is None:
        raise InputError(
            f"reading {path} needs h5py: pip install 'equipoise[digitfive]'; or use the files "
            "usps.bz2 and usps.t.bz2"
        )
    import h5py

    try:
        with h5py.File(path) as file:
            values, labels = file[f"{portion}/data"][:], file[f"{portion}/target"][:]
    except (OSError, KeyError, TypeError) as error:
        raise InputError(
            f"cannot read {path}: {error}; it must hold data and target in the groups train and "
            "test"
        ) from error
    return _checked(_bytes(values.reshape(len(values), 16, 16)), labels, path)


def _usps_text(path: Path) -> _Portion:
    """Read USPS as numbers from -1 to 1 in LIBSVM's format, with labels from 1 to 10."""
    from sklearn.datasets import load_svmlight_file

    try:
        values, labels = load_svmlight_file(str(path), n_features=256)
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {path}: {error}; it must be a file in LIBSVM's format"
        ) from error
    return _checked(_bytes((values.toarray().reshape(-1, 16, 16) + 1) / 2), labels - 1, path)


def _read_synth(wanted: _Wanted) -> tuple[_Portion, _Portion]:
    names = ("synth_train_32x32.mat", "synth_test_32x32.mat")
    folders = ("synth", "synth_digits", "SynthDigits", ".")
    train, test = data_files("digitfive synth", names, folders=folders, root=wanted.root)
    return _matlab(train), _matlab(test)


def _read_svhn(wanted: _Wanted) -> tuple[_Portion, _Portion]:
    names = ("train_32x32.mat", "test_32x32.mat")
    train, test = data_files(
        "digitfive svhn", names, folders=("svhn", "SVHN", "."), root=wanted.root
    )
    return _matlab(train), _matlab(test)


def _matlab(path: Path) -> _Portion:
    """Read images X [32, 32, 3, N] and labels y [N, 1] from a MATLAB file.

    The label of the digit 0 is 10 in SVHN.
    """
    from scipy.io import loadmat

    try:
        arrays: dict[str, Any] = loadmat(path, variable_names=("X", "y"))
        images, labels = arrays["X"], arrays["y"].reshape(-1)
    except (OSError, KeyError, ValueError, NotImplementedError, TypeError) as error:
        raise InputError(
            f"cannot read {path}: {error}; it must hold X [32, 32, 3, N] and y"
        ) from error
    if images.ndim != 4:
        raise InputError(f"{path} holds X of shape {images.shape}; it must be [32, 32, 3, N]")
    return _checked(np.moveaxis(images, 3, 0), np.where(labels == 10, 0, labels), path)


def _read_mnistm(wanted: _Wanted) -> tuple[_Portion, _Portion]:
    names = ("mnist_m_train.npz", "mnist_m_test.npz")
    folders = ("mnist_m", "mnistm", "MNIST-M", ".")
    train, test = data_files("digitfive mnistm", names, folders=folders, root=wanted.root)
    return _arrays(train), _arrays(test)


def _arrays(path: Path) -> _Portion:
    images, labels = read_npz(path, ["x", "y"])
    return _checked(images, labels, path)


def _read_fonts(wanted: _Wanted) -> tuple[_Portion, _Portion]:
    if wanted.train is None or wanted.test is None:
        raise InputError(
            "domain 'fonts' of data 'digitfive' has no fixed size; set train_images and test_images"
        )
    images, labels = font_digits(wanted.train + wanted.test, seed=wanted.seed)
    return _Portion(images[: wanted.train], labels[: wanted.train]), _Portion(
        images[wanted.train :], labels[wanted.train :]
    )


def _read_inverted(wanted: _Wanted) -> tuple[_Portion, _Portion]:
    source = emnist_files.emnist(root=wanted.root, characters="0123456789")
    images = _bytes(1 - source.x[:].numpy()[:, 0])
    order = generator(wanted.seed, "digitfive tests of inverted").permutation(len(images))
    test, train = np.split(order, [round(_TEST_SHARE * len(order))])
    labels = source.y.numpy()
    return _Portion(images[train], labels[train]), _Portion(images[test], labels[test])


_READERS: dict[str, Callable[[_Wanted], tuple[_Portion, _Portion]]] = {
    "mnist": _read_mnist,
    "usps": _read_usps,
    "synth": _read_synth,
    "mnistm": _read_mnistm,
    "svhn": _read_svhn,
    "fonts": _read_fonts,
    "inverted": _read_inverted,
}


def _chosen(domains: Sequence[str]) -> tuple[str, ...]:
    if isinstance(domains, str) or not domains or len(set(domains)) < len(domains):
        raise InputError(
            f"domains of data 'digitfive' must be a list of different names, got {domains!r}"
        )
    for domain in domains:
        if domain not in _READERS:
            raise unknown("domain", domain, _READERS, where="domains of data 'digitfive'")
    return tuple(domains)


def _bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Turn numbers from 0 to 1 into bytes."""
    return (values * 255).round().clip(0, 255).astype(np.uint8)


def _checked(images: NDArray[Any], labels: NDArray[Any], path: Path) -> _Portion:
    """Return images and labels; refuse those that are not digits."""
    if images.dtype != np.uint8 or not (
        images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
    ):
        raise InputError(
            f"{path} holds images of {images.dtype} and shape {images.shape}; they must be bytes "
            "of RGB"
        )
    if labels.shape != images.shape[:1] or not np.isin(labels, range(10)).all():
        raise InputError(
            f"{path} must hold a label from 0 to 9 for each of its {len(images)} images"
        )
    return _Portion(images, labels.astype(np.int64))


def _resized(images: NDArray[np.uint8], size: int) -> Tensor:
    """Return RGB images [N, 3, size, size]; grey images get three equal channels."""
    whole = torch.from_numpy(np.ascontiguousarray(images))
    whole = whole.unsqueeze(1) if whole.dim() == 3 else whole.permute(0, 3, 1, 2)
    if whole.shape[-2:] != (size, size):
        blocks = [
            F.interpolate(block.float(), (size, size), mode="bilinear", antialias=True)
            .round()
            .clamp(0, 255)
            for block in whole.split(_IMAGES_A_BLOCK)
        ]
        whole = torch.cat([block.to(torch.uint8) for block in blocks])
    return whole.expand(-1, 3, -1, -1).contiguous()
