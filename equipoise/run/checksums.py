"""Checksums of the text files of a run directory, in the format of ``sha256sum``.

Files of tensors contain their own checksums (:func:`equipoise.run.files.save_tensors`).
``SHA256SUMS`` is written before the files that it lists. When a run begins, it lists the
configuration, the code that the run imports and the names of clients, and when the run ends, also
the journals and the summary. Until then the checkpoint contains the checksums of the journals. Runs
of older versions have no such file and cannot be checked. ``sha256sum -c SHA256SUMS`` checks a
finished run without Equipoise.

A file that is about to be replaced has two lines, one for its old and one for its new content, so
that the directory is valid before and after.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from equipoise.errors import RunError
from equipoise.run.files import write_atomically

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)")


def sha256(content: bytes) -> str:
    """Return the SHA-256 of some bytes in hexadecimal digits.

    Examples
    --------
    >>> sha256(b"seed: 3")[:8]
    'e5990c7a'
    """
    return hashlib.sha256(content).hexdigest()


def write_sums(
    directory: Path, digests: Mapping[str, str], before: Mapping[str, str] | None = None
) -> None:
    """Write the checksums of some files. They replace earlier ones.

    Parameters
    ----------
    directory : Path
        The run directory.
    digests : mapping
        The SHA-256 of each file in hexadecimal digits, by its name.
    before : mapping, optional
        The SHA-256 of files that are about to be replaced. It is valid as well.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.yaml").write_text("seed: 3")
    >>> write_sums(folder, {"config.yaml": sha256(b"seed: 3")})
    >>> verify(folder, "config.yaml")
    """
    lines = sorted(
        {(name, digest) for given in (digests, before or {}) for name, digest in given.items()}
    )
    text = "".join(f"{digest}  {name}\n" for name, digest in lines)
    write_atomically(directory / SUMS, text.encode())


def read_sums(directory: Path) -> dict[str, str] | None:
    """Read the checksums of a run directory; ``None`` if it has none.

    Of two checksums of a file, that of its content is returned.

    Raises
    ------
    RunError
        If the file is damaged.

    Examples
    --------
    >>> import tempfile
    >>> read_sums(Path(tempfile.mkdtemp())) is None
    True
    """
    if (found := _read(directory)) is None:
        return None
    sums = {name: digests[0] for name, digests in found.items()}
    for name, digests in found.items():
        if len(digests) > 1 and (current := _digest(directory / name)) in digests:
            sums[name] = current
    return sums


def _read(directory: Path) -> dict[str, list[str]] | None:
    """Return all checksums of each file."""
    path = directory / SUMS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
    found = [_LINE.fullmatch(line) for line in lines]
    if not lines or not all(found):
        raise RunError(f"{path} is damaged: each line must have a SHA-256 and the name of a file")
    sums: dict[str, list[str]] = {}
    for match in filter(None, found):
        sums.setdefault(match[2], []).append(match[1])
    return sums


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"cannot read {path}, which {SUMS} lists: {error.strerror}") from error


def verify(directory: Path, *names: str) -> None:
    """Compare files with their checksums. A run directory without checksums passes.

    Parameters
    ----------
    directory : Path
        The run directory.
    *names : str
        The files; by default all that have a checksum.

    Raises
    ------
    RunError
        If a file differs from what the run wrote, is missing, or has no checksum although others
        have one.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_sums(folder, {"config.yaml": sha256(b"seed: 3")})
    >>> _ = (folder / "config.yaml").write_text("seed: 4")
    >>> verify(folder)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.RunError: .../config.yaml differs from what the run wrote: ...
    """
    sums = _read(directory)
    if sums is None:
        return
    for name in names or sums:
        path = directory / name
        if name not in sums:
            raise RunError(
                f"{directory / SUMS} has no checksum of {name}; one of the two files was changed"
            )
        if _digest(path) not in sums[name]:
            raise RunError(
                f"{path} differs from what the run wrote: its SHA-256 is not that in {SUMS}; "
                f"restore the file, or remove {SUMS} if the change is intended"
            )
