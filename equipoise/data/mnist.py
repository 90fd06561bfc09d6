"""MNIST: 70,000 handwritten digits of 28 by 28 pixels, from the usual four idx files."""

from __future__ import annotations

import numpy as np
import torch

from equipoise.data.files import as_pixels, data_files, read_idx_images
from equipoise.data.partition import Dirichlet
from equipoise.data.source import Source
from equipoise.errors import unknown

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
FOLDERS = ("mnist", "MNIST/raw", ".")


def mnist(*, root: str | None = None, portion: str = "all") -> Source:
    """Read MNIST.

    Parameters
    ----------
    root : str, optional
        The data directory, with the files in ``mnist``, in ``MNIST/raw`` or directly in it; see `equipoise.data.files`.
    portion : {"all", "train", "test"}
        Which of the two published portions to read. Clients make their own splits, so the two are put together unless
        asked otherwise, the 60,000 for training first.

    Returns
    -------
    Source
        Images of shape [1, 28, 28] with pixels from 0 (paper) to 1 (ink).

    Examples
    --------
    >>> mnist(portion="tset")
    Traceback (most recent call last):
    equipoise.errors.InputError: unknown portion 'tset' in data 'mnist'; did you mean 'test'? Valid: all, test, train
    """
    if portion not in ("all", *FILES):
        raise unknown("portion", portion, ("all", *FILES), where="data 'mnist'")
    pairs = list(FILES.values()) if portion == "all" else [FILES[portion]]
    paths = data_files("mnist", [name for pair in pairs for name in pair], folders=FOLDERS, root=root)
    read = [read_idx_images(*paths[i : i + 2], classes=10) for i in range(0, len(paths), 2)]
    images, labels = (np.concatenate(parts) for parts in zip(*read, strict=True))
    return Source(x=torch.from_numpy(as_pixels(images)[:, None]), y=torch.from_numpy(labels), classes=10, name="mnist")


def recipe(*, seed: int, root: str | None = None, portion: str = "all") -> tuple[Source, Dirichlet]:
    """Give MNIST and its usual partition: 100 clients with label skew, Dirichlet with concentration 0.1.

    ``partition="skewed"`` gives GIFAIR's Skewed partition instead.

    Parameters
    ----------
    seed : int
        Not used: every image is read.
    root, portion
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
    return mnist(root=root, portion=portion), Dirichlet(100, beta=0.1)
