"""Silos: data that are already divided, with one directory per client.

A client's directory holds ``data.npz`` with the arrays ``x`` and ``y``, one row per sample. The
file may also have attributes of samples, such as an array ``attribute.sex`` of text. The directory
may hold ``test.npz`` with the client's test samples, which are otherwise drawn from ``data.npz``,
and ``client.yaml`` with its ``group``. Clients of a group that share a test set each have a copy of
it. This source reads all directories. On Flower each client reads only its own. A client has the
same splits in both cases.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from equipoise import checks, tasks
from equipoise.arrays import names_in, read_npz
from equipoise.attributes import Attribute
from equipoise.data.federate import federate
from equipoise.data.files import VARIABLE
from equipoise.data.partition import Natural
from equipoise.data.source import Source
from equipoise.documents import yaml_from
from equipoise.errors import InputError, unknown
from equipoise.federation import Federation

ARRAYS, TESTS, ABOUT = "data.npz", "test.npz", "client.yaml"
ATTRIBUTE = "attribute."


def silos(
    *, root: str | None = None, classes: int | None = None, task: str = "classification"
) -> Source:
    """Read all clients' directories.

    Parameters
    ----------
    root : str, optional
        The folder of the directories; ``silos`` in the data directory by default.
    classes : int, optional
        Number of classes; one more than the largest label by default. It is required on Flower,
        where no client sees the labels of others.
    task : str
        What ``y`` means: a name from :func:`equipoise.tasks.names`.

    Returns
    -------
    Source
        The samples with their clients, in the order of the numbers in the directories' names.

    Examples
    --------
    >>> silos(root="/nowhere")
    Traceback (most recent call last):
    equipoise.errors.InputError: no client's directory with data.npz in /nowhere (root='/nowhere')
    """
    tasks.build(task)
    if classes is not None:
        checks.count(classes, "classes of data 'silos'")
    folder = Path(root) if root else Path(os.environ.get(VARIABLE, "data")) / "silos"
    found = [path.parent for path in folder.glob(f"*/{ARRAYS}")]
    if not found:
        origin = f" (root={root!r})" if root else ""
        start = "" if folder.is_absolute() else f"; relative paths start in {Path.cwd()}"
        raise InputError(f"no client's directory with {ARRAYS} in {folder}{origin}{start}")
    return _source(sorted(found, key=_in_order), classes, task)


def silo_federation(
    directory: Path, *, splits: Sequence[float], classes: int | None, task: str, seed: int
) -> Federation:
    """Read one client's directory as a federation of one client.

    Parameters
    ----------
    directory : Path
        The client's directory.
    splits, classes, task, seed
        See `silos` and `federate`.

    Returns
    -------
    Federation
        With the same splits as the client has in the whole federation.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> np.savez(folder / "data.npz", x=np.zeros((10, 2)), y=np.arange(10) % 2)
    >>> options = {"classes": 2, "task": "classification", "seed": 0}
    >>> silo_federation(folder, splits=(0.7, 0.1, 0.2), **options).train.sizes
    array([7])
    """
    first, second, third = splits
    return federate(
        _source([directory], classes, task), Natural(1), splits=(first, second, third), seed=seed
    )


def recipe(
    *, seed: int, root: str | None = None, classes: int | None = None, task: str = "classification"
) -> tuple[Source, Natural]:
    """Return the silos and their natural partition.

    Parameters
    ----------
    seed : int
        Not used: every sample is read.
    root, classes, task
        See `silos`.

    Returns
    -------
    tuple of Source and Natural
        The source and its partition.

    Examples
    --------
    >>> recipe(seed=0, root="/nowhere")
    Traceback (most recent call last):
    equipoise.errors.InputError: no client's directory with data.npz in /nowhere (root='/nowhere')
    """
    return silos(root=root, classes=classes, task=task), Natural(1)


def _in_order(directory: Path) -> tuple[int, str]:
    number = re.search(r"(\d+)$", directory.name)
    return int(number[1]) if number else -1, directory.name


def _source(directories: Sequence[Path], classes: int | None, task: str) -> Source:
    files = [
        (d, name)
        for d in directories
        for name in (ARRAYS, TESTS)
        if name == ARRAYS or (d / name).exists()
    ]
    if 0 < (tested := len(files) - len(directories)) < len(directories):
        raise InputError(
            f"{tested} of {len(directories)} silos have {TESTS}; either all of them must have it, "
            "or none"
        )
    read = [_read(directory / name, task) for directory, name in files]
    groups = [_group(directory) for directory, _ in files]
    names = tuple(dict.fromkeys(groups))
    number = {name: position for position, name in enumerate(names)}
    sizes = [len(x) for x, _, _ in read]
    if len({x.shape[1:] for x, _, _ in read}) > 1:
        shapes = ", ".join(
            f"{x.shape[1:]} in {path}"
            for (x, _, _), (path, _) in zip(read[:8], files, strict=False)
        )
        raise InputError(f"samples of all silos must have one shape, got {shapes}")
    return Source(
        x=torch.from_numpy(np.concatenate([x for x, _, _ in read])),
        y=torch.from_numpy(np.concatenate([y for _, y, _ in read])),
        task=task,
        classes=classes,
        name="silos",
        groups=np.repeat([number[group] for group in groups], sizes),
        group_names=names,
        ids=np.repeat([directory.resolve().name for directory, _ in files], sizes),
        test=np.repeat([name == TESTS for _, name in files], sizes) if tested else None,
        attributes=_attributes([attributes for _, _, attributes in read], files),
    )


def _attributes(
    read: Sequence[dict[str, NDArray[Any]]], files: Sequence[tuple[Path, str]]
) -> dict[str, Attribute]:
    """Concatenate the attributes of all files. Each file must have the same ones."""
    for found, (directory, name) in zip(read, files, strict=True):
        if set(found) != set(read[0]):
            here, there = (", ".join(sorted(names)) or "none" for names in (found, read[0]))
            raise InputError(
                f"{directory / name} has the attributes {here}, {files[0][0] / files[0][1]} has "
                f"{there}; all silos must have the same"
            )
    together = {
        name: np.concatenate([found[name].astype(str) for found in read])
        for name in sorted(read[0])
    }
    return {name: Attribute.of(values, name) for name, values in together.items()}


def _read(path: Path, task: str) -> tuple[NDArray[Any], NDArray[Any], dict[str, NDArray[Any]]]:
    of = tasks.build(task)
    described = [name for name in names_in(path) if name.startswith(ATTRIBUTE)]
    x, y, *values_of = read_npz(path, ["x", "y"], described)
    attributes = {
        name.removeprefix(ATTRIBUTE): own for name, own in zip(described, values_of, strict=True)
    }
    if not x.ndim or not y.ndim:
        raise InputError(
            f"{path} has a single number for {'y' if x.ndim else 'x'}; x and y need one row a "
            "sample"
        )
    if len(x) != len(y) or not len(x):
        raise InputError(
            f"{path} has {len(x)} rows in x and {len(y)} in y; both need one per sample, and at "
            "least one"
        )
    for name, values in attributes.items():
        if values.shape != (len(x),):
            raise InputError(
                f"{path} has {ATTRIBUTE}{name} of shape {values.shape}; an attribute needs one "
                f"value per sample: ({len(x)},)"
            )
    x = x.astype(np.float32) if x.dtype.kind == "f" else x
    if of.floating:
        return x, y.astype(np.float32), attributes
    labels = y if y.dtype == np.uint8 else y.astype(np.float64 if y.dtype.kind == "f" else np.int64)
    try:
        return x, of.targets(torch.from_numpy(labels)).numpy(), attributes
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _group(directory: Path) -> str:
    path = directory / ABOUT
    if not path.exists():
        return "all"
    try:
        about = yaml_from(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not isinstance(about, dict):
        raise InputError(
            f"{path} must hold keys with values, such as 'group: rural', got {about!r}"
        )
    for key in about:
        if key != "group":
            raise unknown("key", key, ["group"], where=str(path))
    return checks.name(str(about.get("group", "all")), f"group in {path}")
