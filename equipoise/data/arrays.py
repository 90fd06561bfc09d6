"""NumPy files: samples, labels and optionally the client of each sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise import tasks
from equipoise.data.partition import Dirichlet, Natural
from equipoise.data.source import Source
from equipoise.errors import InputError


def arrays(
    *,
    x: str,
    y: str,
    clients: str | None = None,
    groups: str | None = None,
    classes: int | None = None,
    task: str = "classification",
) -> Source:
    """Read samples from ``.npy`` files with one row per sample.

    Parameters
    ----------
    x, y : str
        Files with samples and labels (or targets).
    clients : str, optional
        File with the client of each sample: names or numbers.
    groups : str, optional
        File with the group of each sample. All samples of a client have one group.
    classes : int, optional
        Number of classes; one more than the largest label by default.
    task : str
        What ``y`` means: a name from :func:`equipoise.tasks.names`.

    Returns
    -------
    Source
        The samples.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> np.save(folder / "x.npy", np.zeros((6, 2)))
    >>> np.save(folder / "y.npy", np.arange(6) % 2)
    >>> np.save(folder / "clinic.npy", ["north"] * 3 + ["south"] * 3)
    >>> files = {"x": f"{folder}/x.npy", "y": f"{folder}/y.npy", "clients": f"{folder}/clinic.npy"}
    >>> arrays(**files).ids[[0, 5]].tolist()
    ['north', 'south']
    """
    files = {"x": x, "y": y, "clients": clients, "groups": groups}
    read = {option: _read(path, option) for option, path in files.items() if path is not None}
    samples, labels = read["x"], read["y"]
    for option, array in read.items():
        if len(array) != len(samples):
            raise InputError(
                f"{files[option]} (data.{option}) has {len(array)} rows and {x} (data.x) has "
                f"{len(samples)}; valid: a row for each sample"
            )
    for option in ("clients", "groups"):
        if option in read and read[option].ndim != 1:
            raise InputError(
                f"{files[option]} (data.{option}) has shape {read[option].shape}; valid: one value "
                "for each sample"
            )
    names: list[str] = []
    number = None
    if "groups" in read:
        found, number = np.unique(read["groups"], return_inverse=True)
        names = [str(name) for name in found]
    return Source(
        x=_floating(samples),
        y=tasks.build(task).targets(_floating(labels)),
        task=task,
        classes=classes,
        name=Path(x).stem,
        groups=number,
        group_names=tuple(names),
        ids=read.get("clients"),
    )


def recipe(
    *,
    seed: int,
    x: str,
    y: str,
    clients: str | None = None,
    groups: str | None = None,
    classes: int | None = None,
    task: str = "classification",
) -> tuple[Source, Natural | Dirichlet]:
    """Return the samples and their partition.

    Parameters
    ----------
    seed : int
        Not used: every sample is read.
    x, y, clients, groups, classes, task
        See `arrays`.

    Returns
    -------
    tuple of Source and Partition
        Without ``clients``, samples are divided among ten clients by ``Dirichlet(beta=0.5)``.

    Examples
    --------
    >>> recipe(seed=0, x="nowhere.npy", y="y.npy")
    Traceback (most recent call last):
    equipoise.errors.InputError: cannot read nowhere.npy (data.x): [Errno 2] No such file or
    directory: 'nowhere.npy'; valid: a file of numpy.save, without Python objects
    """
    source = arrays(x=x, y=y, clients=clients, groups=groups, classes=classes, task=task)
    return source, Natural(1) if clients is not None else Dirichlet(clients=10, beta=0.5)


def _read(path: str, option: str) -> NDArray[Any]:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"cannot read {path} (data.{option}): {error}; valid: a file of numpy.save, without "
            "Python objects"
        ) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise InputError(
            f"{path} (data.{option}) holds several arrays; valid: a file of numpy.save"
        )
    if not array.ndim:
        raise InputError(
            f"{path} (data.{option}) holds a single value; valid: a row for each sample"
        )
    return array


def _floating(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor; floating point numbers are converted to single precision."""
    if array.dtype.kind not in "biuf":
        raise InputError(f"samples and labels must be numbers, got an array of {array.dtype}")
    kind = np.float32 if array.dtype.kind == "f" else array.dtype.newbyteorder("=")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=kind))
