"""Downloads of published files into a data directory.

An archive has an address and a SHA-256. It is downloaded to a temporary file, checked, and then
moved, so that the data directory never contains incomplete files.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from typing import IO
from urllib.request import urlopen

from equipoise.data.progress import progress
from equipoise.errors import RunError

# Timeout in seconds: a connection that sends no byte for this long is given up.
_PATIENCE = 60
_PIECE = 1 << 20


@dataclass(frozen=True)
class Archive:
    """A file that is published at a fixed address.

    Parameters
    ----------
    url : str
        Its address.
    sha256 : str
        Its SHA-256, in hexadecimal digits.
    folder : str
        The folder of its files in the data directory.
    members : tuple of str
        The members to extract from a tar or zip archive. Each is put into ``folder`` under the
        last part of its name. If empty, the file itself is stored.

    Examples
    --------
    >>> Archive("https://example.org/letters.tar.gz", "5f0c...", "letters", ("v1/a", "v1/b")).name
    'letters.tar.gz'
    """

    url: str
    sha256: str
    folder: str
    members: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last part of its address."""
        return self.url.rpartition("/")[2]


def fetch(archive: Archive, home: Path) -> None:
    """Download an archive and put its files into the data directory.

    Parameters
    ----------
    archive : Archive
        The archive to download.
    home : Path
        The data directory. It is created if it does not exist.

    Raises
    ------
    RunError
        If the download fails or the content differs from the published one. The data directory is
        then unchanged.

    Examples
    --------
    >>> import hashlib, tempfile
    >>> published = Path(tempfile.mkdtemp(), "letter.txt")
    >>> _ = published.write_bytes(b"Dear all")
    >>> home = Path(tempfile.mkdtemp())
    >>> fetch(Archive(published.as_uri(), hashlib.sha256(b"Dear all").hexdigest(), "letters"), home)
    >>> Path(home, "letters", "letter.txt").read_bytes()
    b'Dear all'
    """
    folder = home / archive.folder
    # Directories are created when there are files for them; the temporary file is in the nearest
    # existing one.
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with TemporaryDirectory(prefix=f".{archive.name}.", dir=nearest) as beside:
            arrived = Path(beside, archive.name)
            _receive(archive, arrived)
            wanted = (
                _unpack(archive, arrived, Path(beside, "members")) if archive.members else [arrived]
            )
            folder.mkdir(parents=True, exist_ok=True)
            for path in wanted:
                os.replace(path, folder / path.name)
    except (
        OSError,
        EOFError,
        HTTPException,
        KeyError,
        tarfile.TarError,
        zipfile.BadZipFile,
    ) as error:
        raise RunError(f"cannot get {archive.url}: {type(error).__name__}: {error}") from error


def _receive(archive: Archive, path: Path) -> None:
    """Download to a file; refuse incomplete or different content."""
    digest, size = hashlib.sha256(), 0
    with urlopen(archive.url, timeout=_PATIENCE) as answer, path.open("wb") as file:
        promised = int(answer.headers.get("Content-Length") or 0)
        with progress(archive.name, promised or None, in_bytes=True) as advance:
            while piece := answer.read(_PIECE):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
                advance(len(piece))
        file.flush()
        os.fsync(file.fileno())
    if promised and size != promised:
        raise RunError(f"{archive.url} broke off after {size:,} of {promised:,} bytes; try again")
    if digest.hexdigest() != archive.sha256:
        raise RunError(
            f"{archive.url} is not what was published: its SHA-256 is {digest.hexdigest()} and "
            f"should be {archive.sha256}; nothing was kept"
        )


def _unpack(archive: Archive, path: Path, into: Path) -> list[Path]:
    """Extract the members one by one, under fixed names that do not depend on the archive."""
    into.mkdir()
    made = []
    with _opened(path) as open_member:
        for member in archive.members:
            made.append(into / member.rpartition("/")[2])
            with open_member(member) as content, made[-1].open("wb") as file:
                copyfileobj(content, file, _PIECE)
                file.flush()
                os.fsync(file.fileno())
    return made


@contextmanager
def _opened(path: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    """Return the function that opens a member of a tar or zip archive."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as bundle:
            yield bundle.open
        return
    with tarfile.open(path) as tape:

        def open_member(name: str) -> IO[bytes]:
            content = tape.extractfile(name)
            if content is None:
                raise KeyError(f"{name!r} in {path.name} is not a file")
            return content

        yield open_member
