"""MNIST: 70,000 handwritten digits of 28 by 28 pixels, from the usual four idx files."""

from __future__ import annotations

import numpy as np
import torch

from equipoise.data.download import Archive
from equipoise.data.files import as_pixels, data_files, read_idx_images
from equipoise.data.partition import Dirichlet
from equipoise.data.source import Source
from equipoise.errors import unknown

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
FOLDERS = ("mnist", "MNIST/raw", ".")
SHA256 = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
ARCHIVES = {
    name: Archive(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz", sha256, "mnist")
    for name, sha256 in SHA256.items()
}


def mnist(*, root: str | None = None, portion: str = "all", download: bool = False) -> Source:
    """Read MNIST.

    Parameters
    ----------
    root : str, optional
        The data directory, with the files in ``mnist``, in ``MNIST/raw`` or directly in it; see
        `equipoise.data.files`.
    portion : {"all", "train", "test"}
        Which published portion to read. Clients make their own splits, so by default the two
        portions are concatenated, the 60,000 training images first.
    download : bool
        Download the files (12 MB) if they are missing.

    Returns
    -------
    Source
        Images of shape [1, 28, 28] with pixels from 0 (paper) to 1 (ink).

    Examples
    --------
    >>> mnist(portion="tset")
    Traceback (most recent call last):
    equipoise.errors.InputError: unknown portion 'tset' in data 'mnist'; did you mean 'test'? Valid:
    all, test, train
    """
    if portion not in ("all", *FILES):
        raise unknown("portion", portion, ("all", *FILES), where="data 'mnist'")
    names = FILES["train"] + FILES["test"] if portion == "all" else FILES[portion]
    archives = [ARCHIVES[name] for name in names]
    paths = data_files(
        "mnist", names, folders=FOLDERS, root=root, archives=archives, download=download
    )
    read = [read_idx_images(*paths[i : i + 2], classes=10) for i in range(0, len(paths), 2)]
    images, labels = (np.concatenate(parts) for parts in zip(*read, strict=True))
    return Source(
        x=torch.from_numpy(as_pixels(images)[:, None]),
        y=torch.from_numpy(labels),
        classes=10,
        name="mnist",
        official_test=np.arange(len(labels)) >= len(read[0][1]) if portion == "all" else None,
    )


def recipe(
    *, seed: int, root: str | None = None, portion: str = "all", download: bool = False
) -> tuple[Source, Dirichlet]:
    """Return MNIST and its usual partition: 100 clients, Dirichlet with concentration 0.1.

    ``partition="skewed"`` selects GIFAIR's Skewed partition instead.

    Parameters
    ----------
    seed : int
        Not used: every image is read.
    root, portion, download
        See `mnist`.

    Returns
    -------
    tuple of Source and Dirichlet
        The source and its partition.

    Examples
    --------
    >>> recipe(seed=0, root="nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: no files of data 'mnist' in ...
    """
    return mnist(root=root, portion=portion, download=download), Dirichlet(100, beta=0.1)
