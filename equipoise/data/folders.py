"""Helpers for sources that read folders of files: finding and choosing folders, and errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from equipoise.checks import several
from equipoise.data.files import data_directory
from equipoise.errors import InputError, unknown

LARGEST_IN_MEMORY = 2 << 30
"""By default, samples that take fewer bytes than this are held in memory."""

_NAMED_AT_MOST = 8


def find_folder(root: str, source: str) -> Path:
    """Find a folder in the working directory, then in the data directory.

    Parameters
    ----------
    root : str
        A path. A relative one is searched for in both places.
    source : str
        The name of the source, for the message.

    Returns
    -------
    Path
        The folder.

    Examples
    --------
    >>> find_folder("nowhere", "imagefolder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: root='nowhere' of data 'imagefolder' is not a folder; looked for
    .../nowhere and ...
    """
    places = [Path(root).expanduser().absolute(), data_directory()[0] / root]
    for place in places:
        if place.is_dir():
            return place
    looked = " and ".join(str(place) for place in dict.fromkeys(places))
    raise InputError(f"root={str(root)!r} of data {source!r} is not a folder; looked for {looked}")


def choose(
    wanted: Sequence[str] | None,
    what: str,
    found: Sequence[str],
    *,
    option: str,
    kind: str,
    where: Path,
) -> tuple[str, ...]:
    """Return the wanted names, each of which must exist, or all names by default.

    Parameters
    ----------
    wanted : sequence of str, optional
        The wanted names.
    what : str
        The name of the source, for messages.
    found : sequence of str
        The names that exist.
    option, kind : str
        The option that holds the names, and what one of them is called.
    where : Path
        Where the names were found.

    Returns
    -------
    tuple of str
        Distinct names, at least one.

    Examples
    --------
    >>> choose(["b"], "prostate", ["a", "b"], option="sites", kind="site", where=Path("scans"))
    ('b',)
    """
    if wanted is None:
        return tuple(found)
    names = several(wanted, f"{option} of data {what!r}", _text)
    for name in names:
        if name not in found:
            raise unknown(kind, name, found, where=f"{option} of data {what!r}, read from {where}")
    if not names or len(set(names)) < len(names):
        raise InputError(
            f"{option} of data {what!r} must be distinct names, at least one, got {list(names)}"
        )
    return names


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{what} must be a name, got {value!r}")
    return value


def refuse(wrong: Sequence[str], message: str) -> None:
    """Raise an error that lists what is wrong, unless the list is empty.

    Examples
    --------
    >>> refuse(["a.png", "b.png"], "cannot be read: ")
    Traceback (most recent call last):
    equipoise.errors.InputError: cannot be read: a.png, b.png
    """
    if wrong:
        more = f" and {len(wrong) - _NAMED_AT_MOST} more" if len(wrong) > _NAMED_AT_MOST else ""
        raise InputError(message + ", ".join(wrong[:_NAMED_AT_MOST]) + more)


def subfolders(folder: Path) -> list[str]:
    """List the names of the folders in a folder, without hidden ones.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "photo").mkdir()
    >>> subfolders(folder)
    ['photo']
    """
    with os.scandir(folder) as entries:
        return sorted(
            entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
        )


def files_in(folder: Path, endings: tuple[str, ...]) -> list[str]:
    """List the names of the files in a folder with one of these endings, ignoring case.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "1.PNG").touch()
    >>> files_in(folder, (".png",))
    ['1.PNG']
    """
    with os.scandir(folder) as entries:
        names = [
            entry.name for entry in entries if entry.is_file() and not entry.name.startswith(".")
        ]
    return sorted(name for name in names if name.lower().endswith(endings))


def cores() -> int:
    """Return the number of processors that this process may use.

    Examples
    --------
    >>> cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
