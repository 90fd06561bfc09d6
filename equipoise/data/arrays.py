"""NumPy files: samples, labels and optionally the client and attributes of each sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise import tasks
from equipoise.arrays import names_in, read_npz, refuse_missing_ids
from equipoise.attributes import Attribute
from equipoise.checks import count
from equipoise.data.files import working_directory
from equipoise.data.partition import Dirichlet, Iid, Natural
from equipoise.data.source import Source
from equipoise.errors import InputError
from equipoise.federation_checks import odd_labels
from equipoise.text import printable


def arrays(
    *,
    x: str,
    y: str,
    clients: str | None = None,
    groups: str | None = None,
    attributes: dict[str, str] | None = None,
    classes: int | None = None,
    task: str = "classification",
) -> Source:
    """Read samples from ``.npy`` and ``.npz`` files with one row per sample.

    Of an ``.npz`` file with several arrays, an option reads the array with its own name: ``x``,
    ``y``, ``clients``, ``groups`` or the name of the attribute. So one file may hold all of them.

    Parameters
    ----------
    x, y : str
        Files with samples and labels (or targets).
    clients : str, optional
        File with the client of each sample: names or numbers.
    groups : str, optional
        File with the group of each sample. All samples of a client have one group.
    attributes : mapping of str to str, optional
        Files with attributes of samples, such as ``{"sex": "sex.npy"}``.
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
    >>> files = {"x": f"{folder}/x.npy", "y": f"{folder}/y.npy"}
    >>> arrays(**files, clients=f"{folder}/clinic.npy").ids[[0, 5]].tolist()
    ['north', 'south']
    """
    made = tasks.build(task)
    if classes is not None:
        count(classes, "classes of data 'arrays'")
    given = {f"attributes.{name}": path for name, path in (attributes or {}).items()}
    files = {"x": x, "y": y, "clients": clients, "groups": groups, **given}
    read = {option: _read(path, option) for option, path in files.items() if path is not None}
    samples, labels = read["x"], read["y"]
    for option, array in read.items():
        if len(array) != len(samples):
            raise InputError(
                f"{files[option]} (data.{option}) has {len(array)} rows and {x} (data.x) has "
                f"{len(samples)}; valid: a row for each sample"
            )
    if samples.ndim == 1:
        raise InputError(
            f"{x} (data.x) has shape {samples.shape}; valid: a row of one or more values for each "
            f"sample, such as {(len(samples), 1)}"
        )
    for option in ("clients", "groups", *given):
        if option in read and read[option].ndim != 1:
            raise InputError(
                f"{files[option]} (data.{option}) has shape {read[option].shape}; valid: one value "
                "for each sample"
            )
    if "clients" in read:
        refuse_missing_ids(read["clients"], f"{clients} (data.clients)")
    names: list[str] = []
    number = None
    if "groups" in read:
        refuse_missing_ids(read["groups"], f"{groups} (data.groups)", "group")
        found, number = np.unique(read["groups"], return_inverse=True)
        names = [str(name) for name in found]
    targets = made.targets(_floating(labels, f"{y} (data.y)"))
    if made.labels:
        _check_labels(targets, classes, f"{y} (data.y)")
    return Source(
        x=_floating(samples, f"{x} (data.x)"),
        y=targets,
        task=task,
        classes=classes,
        name=Path(x).stem,
        groups=number,
        group_names=tuple(names),
        ids=read.get("clients"),
        attributes={
            name: Attribute.of(read[f"attributes.{name}"], name) for name in attributes or {}
        },
    )


def recipe(
    *,
    seed: int,
    x: str,
    y: str,
    clients: str | None = None,
    groups: str | None = None,
    attributes: dict[str, str] | None = None,
    classes: int | None = None,
    task: str = "classification",
) -> tuple[Source, Natural | Dirichlet | Iid]:
    """Return the samples and their partition.

    Parameters
    ----------
    seed : int
        Not used: every sample is read.
    x, y, clients, groups, attributes, classes, task
        See `arrays`.

    Returns
    -------
    tuple of Source and Partition
        Without ``clients``, see `usual_partition`.

    Examples
    --------
    >>> recipe(seed=0, x="nowhere.npy", y="y.npy")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: cannot read nowhere.npy (data.x): No such file or directory; valid:
    a file of numpy.save or numpy.savez, without Python objects; relative paths start in the working
    directory, ...
    """
    source = arrays(
        x=x,
        y=y,
        clients=clients,
        groups=groups,
        attributes=attributes,
        classes=classes,
        task=task,
    )
    return source, usual_partition(source)


def usual_partition(source: Source) -> Natural | Dirichlet | Iid:
    """Return the partition of a source that may know its clients.

    Parameters
    ----------
    source : Source
        The samples.

    Returns
    -------
    Natural, Dirichlet or Iid
        By client, if the clients are known. Otherwise samples are divided among ten clients:
        labels by ``Dirichlet(beta=0.5)``, other targets at random.

    Examples
    --------
    >>> usual_partition(Source(x=torch.zeros(40, 1), y=torch.arange(40) % 2))
    Dirichlet(clients=10, beta=0.5, equal=False, min_samples=3)
    """
    if source.ids is not None:
        return Natural(1)
    return Dirichlet(10, beta=0.5) if tasks.build(source.task).labels else Iid(10)


def _read(path: str, option: str) -> NDArray[Any]:
    try:
        with open(path, "rb") as file:
            start = file.read(2)
        if start not in (b"\x93N", b"PK"):
            # NumPy takes such a file for a pickle, and suggests to load it as one.
            is_table = path.endswith((".csv", ".csv.gz"))
            advice = "; data 'table' reads CSV files" if is_table else ""
            raise EOFError(f"it is not a NumPy file{advice}")
        array = _member(path, option) if start == b"PK" else np.load(path, allow_pickle=False)
    except InputError:
        raise
    except (OSError, ValueError, EOFError) as error:
        where = working_directory(path) if isinstance(error, FileNotFoundError) else ""
        raise InputError(
            f"cannot read {path} (data.{option}): {getattr(error, 'strerror', None) or error}; "
            f"valid: a file of numpy.save or numpy.savez, without Python objects{where}"
        ) from error
    if not array.ndim:
        raise InputError(
            f"{path} (data.{option}) holds a single value; valid: a row for each sample"
        )
    return array


def _member(path: str, option: str) -> NDArray[Any]:
    """Read the array of an ``.npz`` file that has the name of the option, or the only one."""
    name = option.removeprefix("attributes.")
    try:
        found = names_in(Path(path))
        if name in found or len(found) == 1:
            return read_npz(Path(path), [], [name if name in found else found[0]])[0]
    except InputError as error:
        raise InputError(f"data.{option}: {error}") from error
    names = ", ".join(map(printable, found[:10])) or "none"
    raise InputError(
        f"{path} (data.{option}) has no array {name!r}; its arrays: {names}. Valid: a file with "
        "this array, or with one array only"
    )


def _check_labels(labels: torch.Tensor, classes: int | None, where: str) -> None:
    """Refuse labels of several values a sample, and labels that are probably a mistake."""
    if labels.dim() != 1:
        raise InputError(
            f"{where} has shape {tuple(labels.shape)}; valid: one label for each sample, shape "
            f"{(len(labels),)}. Use numpy.ravel for a column, numpy.argmax(y, 1) for one-hot rows"
        )
    if classes is None and (odd := odd_labels(labels)):
        found, remedy = odd
        raise InputError(
            f"{where} has {found}; {remedy}, or give data.classes: "
            f"{max(2, int(labels.max()) + 1)} if there are classes without samples"
        )


def _floating(array: NDArray[Any], where: str) -> torch.Tensor:
    """Make a tensor, with floating point numbers in single precision."""
    if array.dtype.kind not in "biuf":
        hint = (
            "; numpy.unique(y, return_inverse=True)[1] numbers names of classes"
            if array.dtype.kind in "US"
            else ""
        )
        raise InputError(f"{where} must hold numbers, got an array of {array.dtype}{hint}")
    kind = np.float32 if array.dtype.kind == "f" else array.dtype.newbyteorder("=")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=kind))
