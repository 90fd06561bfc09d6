"""CIFAR-10 and CIFAR-100: 60,000 colour images of 32 by 32 pixels.

They are read from the "python version" of the release, whose files are pickles. A pickle can run
any code when it is loaded, so these are read by `equipoise.data.pickles`, which supports arrays,
text, numbers, lists and dictionaries and calls no functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.data import pickles
from equipoise.data.download import Archive
from equipoise.data.files import as_pixels, data_files, read
from equipoise.data.partition import Dirichlet
from equipoise.data.source import Source
from equipoise.errors import InputError, unknown

FILES: dict[int, dict[str, tuple[str, ...]]] = {
    10: {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    100: {"train": ("train",), "test": ("test",)},
}
FOLDERS = {
    10: ("cifar-10-batches-py", "cifar10/cifar-10-batches-py", "cifar10"),
    100: ("cifar-100-python", "cifar100/cifar-100-python", "cifar100"),
}
ARCHIVES = {
    classes: Archive(
        f"https://www.cs.toronto.edu/~kriz/{name}.tar.gz",
        sha256,
        FOLDERS[classes][0],
        tuple(
            f"{FOLDERS[classes][0]}/{file}" for files in FILES[classes].values() for file in files
        ),
    )
    for classes, name, sha256 in (
        (10, "cifar-10-python", "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
        (
            100,
            "cifar-100-python",
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
    )
}
LABELS = {10: b"labels", 100: b"fine_labels"}

# Mean and standard deviation of red, green and blue over the 50,000 training images.
COLOURS = {
    10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    100: ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}

CIFAR10_NAMES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
"""The classes of CIFAR-10, in the order of its labels."""


def cifar(
    *,
    classes: int = 10,
    root: str | None = None,
    portion: str = "all",
    standardize: bool = True,
    download: bool = False,
) -> Source:
    """Read CIFAR-10 or CIFAR-100.

    Parameters
    ----------
    classes : {10, 100}
        Which of the two datasets to read. CIFAR-100 has its fine labels.
    root : str, optional
        The data directory, with the release's folder ``cifar-10-batches-py`` or
        ``cifar-100-python`` in it or inside ``cifar10`` or ``cifar100``; see
        `equipoise.data.files`.
    portion : {"all", "train", "test"}
        Which published portion to read. Clients make their own splits, so by default the two
        portions are concatenated, the 50,000 training images first.
    standardize : bool
        Subtract the mean of each colour and divide by its standard deviation (`COLOURS`), as is
        usual. Otherwise pixels range from 0 to 1.
    download : bool
        Download the files (170 MB) if they are missing.

    Returns
    -------
    Source
        Images of shape [3, 32, 32].

    Examples
    --------
    >>> cifar(classes=20)
    Traceback (most recent call last):
    equipoise.errors.InputError: classes=20 of data 'cifar' must be 10 or 100
    """
    if classes not in FILES or isinstance(classes, bool):
        raise InputError(f"classes={classes!r} of data 'cifar' must be 10 or 100")
    portions = FILES[classes]
    if portion not in ("all", *portions):
        raise unknown("portion", portion, ("all", *portions), where="data 'cifar'")
    names = portions["train"] + portions["test"] if portion == "all" else portions[portion]
    archives = [ARCHIVES[classes]]
    paths = data_files(
        "cifar", names, folders=FOLDERS[classes], root=root, archives=archives, download=download
    )
    batches = [_batch(path, classes) for path in paths]
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    trained_on = sum(len(batch[1]) for batch in batches[: len(portions["train"])])
    x = as_pixels(images)
    if standardize:
        mean, deviation = (
            np.array(colour, np.float32).reshape(3, 1, 1) for colour in COLOURS[classes]
        )
        x -= mean
        x /= deviation
    return Source(
        x=torch.from_numpy(x),
        y=torch.from_numpy(labels),
        classes=classes,
        name=f"cifar{classes}",
        class_names=CIFAR10_NAMES if classes == 10 else None,
        official_test=np.arange(len(labels)) >= trained_on if portion == "all" else None,
    )


def recipe(
    *,
    seed: int,
    classes: int = 10,
    root: str | None = None,
    portion: str = "all",
    standardize: bool = True,
    download: bool = False,
) -> tuple[Source, Dirichlet]:
    """Return CIFAR and its usual partition: 100 clients, Dirichlet with concentration 0.1.

    Parameters
    ----------
    seed : int
        Not used: every image is read.
    classes, root, portion, standardize, download
        See `cifar`.

    Returns
    -------
    tuple of Source and Dirichlet
        The source and its partition.

    Examples
    --------
    >>> recipe(seed=0, root="nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: no files of data 'cifar' in .../cifar-10-batches-py or ...
    """
    source = cifar(
        classes=classes, root=root, portion=portion, standardize=standardize, download=download
    )
    return source, Dirichlet(100, beta=0.1)


def read_pickle(path: Path) -> Any:
    """Read a pickle of arrays, text, numbers, lists and dictionaries; refuse anything else.

    Parameters
    ----------
    path : Path
        The file. Text written by Python 2 comes back as bytes.

    Returns
    -------
    object
        What was stored.

    Examples
    --------
    >>> import pickle
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "batch")
    ...     _ = path.write_bytes(pickle.dumps({b"labels": [6, 9]}))
    ...     read_pickle(path)
    {b'labels': [6, 9]}
    """
    content = read(path)
    try:
        return pickles.loads(content)
    except InputError as error:
        raise InputError(f"{path} is refused: {error}") from error
    except ValueError as error:
        raise InputError(
            f"{path} is not a pickle or is damaged ({type(error).__name__}: {error})"
        ) from error


def _batch(path: Path, classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read the images [N, 3, 32, 32] and labels [N] of one file."""
    batch = read_pickle(path)
    if not isinstance(batch, dict) or not {b"data", LABELS[classes]} <= batch.keys():
        raise InputError(
            f"{path} is not a file of CIFAR-{classes}: it must hold data and "
            f"{LABELS[classes].decode()}"
        )
    images, labels = batch[b"data"], batch[LABELS[classes]]
    # First check that the list holds numbers: nested lists may expand to more values than fit into
    # memory.
    if isinstance(labels, list) and all(type(label) is int for label in labels):
        labels = np.array(labels, np.int64)
    if (
        not isinstance(images, np.ndarray)
        or images.dtype != np.uint8
        or images.shape[1:] != (3072,)
    ):
        raise InputError(
            f"data of {path} must be bytes of shape [N, 3072], three colours of 32 by 32 pixels"
        )
    if (
        not isinstance(labels, np.ndarray)
        or labels.shape != images.shape[:1]
        or labels.dtype.kind not in "iu"
    ):
        given = f"{labels.size} labels" if isinstance(labels, np.ndarray) else "labels that are not"
        raise InputError(
            f"{path} must hold one whole number per label: {len(images)} images, {given}"
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise InputError(
            f"labels of {path} run from {labels.min()} to {labels.max()}; valid: 0 to {classes - 1}"
        )
    return images.reshape(-1, 3, 32, 32), labels.astype(np.int64)
