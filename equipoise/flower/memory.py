"""A client's memory on its own disk, one file per round."""

from __future__ import annotations

import hmac
import os
import re
import uuid
from pathlib import Path

from equipoise.errors import RunError
from equipoise.flower.limits import Refusal, shown
from equipoise.run.files import load_tensors, save_tensors
from equipoise.tree import Tree, digest

_HOME = "EQUIPOISE_MEMORY"
_SUFFIX = ".safetensors"
# Names of files that a message may contain: no separators, and no leading dot.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


def memory_root(given: str | None = None) -> Path:
    """Return the directory of memories.

    It is the configured one, else that of ``EQUIPOISE_MEMORY``, else ``~/.equipoise``.

    Examples
    --------
    >>> memory_root("/srv/memory").name
    'memory'
    """
    return Path(given or os.environ.get(_HOME) or Path.home() / ".equipoise").expanduser()


def home_of(root: Path) -> str:
    """Return the secret of a memory directory. Create it if it does not exist.

    Examples
    --------
    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> home_of(root) == home_of(root)
    True
    """
    path = root / "home"
    try:
        if not path.exists():
            root.mkdir(parents=True, exist_ok=True)
            _write_secret(path)
        return path.read_text()
    except OSError as error:
        raise RunError(
            f"the memory directory {root} cannot be used: {error.strerror}; it must be one that "
            "the SuperNode may write to: --node-config 'memory=\"/srv/equipoise\"'"
        ) from error


def _write_secret(path: Path) -> None:
    """Write a new secret, unless another process has just done so."""
    own = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    own.touch(mode=0o600)
    try:
        with own.open("w") as file:
            file.write(uuid.uuid4().hex)
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link never replaces a secret that another process may have used.
        os.link(own, path)
    except FileExistsError:
        pass
    except OSError:
        # A file system without links.
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)


def proof_of_home(root: Path, run: str) -> str:
    """Return a proof for the server of a run that a client has the same memory directory as before.

    It is computed from a secret in that directory and the name of the run, so the server of one run
    cannot use it in another.

    Examples
    --------
    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> proof_of_home(root, "a") == proof_of_home(root, "a") != proof_of_home(root, "b")
    True
    """
    return hmac.digest(home_of(root).encode(), run.encode(), "sha256").hex()


def check_name(name: str, what: str) -> str:
    """Return the name of a file or directory from a message; refuse names that contain a path.

    Examples
    --------
    >>> check_name("digits-fedavg-seed0-1f", "run"), check_name("..", "run")
    Traceback (most recent call last):
    equipoise.flower.limits.Refusal: '..' is not a name for a run: it must have letters, digits, _,
    - and . only, and no . in front
    """
    if not _NAME.fullmatch(name):
        raise Refusal(
            f"{shown(name)} is not a name for a {what}: it must have letters, digits, _, - and . "
            "only, and no . in front"
        )
    return name


class Versions:
    """The versions of one client's memory in one run.

    A version is the number of the round that wrote it; 0 is the memory of a client that has not
    taken part. The server decides which version is valid, so a late answer, a repeated round or a
    resumed run never applies an update twice.

    Parameters
    ----------
    root : Path
        The directory of memories.
    run : str
        The name of the run.
    client : int
        The number of the client.

    Examples
    --------
    >>> import tempfile, torch
    >>> memory = Versions(Path(tempfile.mkdtemp()), "digits-1", 3)
    >>> memory.write(1, {"kept/head": torch.ones(1)})
    >>> memory.read(1), memory.read(0), memory.versions
    ({'kept/head': tensor([1.])}, {}, [1])
    """

    def __init__(self, root: Path, run: str, client: int) -> None:
        self.folder = root / "runs" / check_name(run, "run") / f"client-{client}"

    @property
    def versions(self) -> list[int]:
        """The existing versions, in ascending order."""
        names = (path.name.removesuffix(_SUFFIX) for path in self.folder.glob(f"round-*{_SUFFIX}"))
        return sorted(int(name.removeprefix("round-")) for name in names)

    def read(self, version: int) -> Tree:
        """Read one version; empty for version 0.

        Raises
        ------
        RunError
            If the version does not exist.
        """
        if version == 0:
            return {}
        path = self._path(version)
        if not path.exists():
            held = ", ".join(map(str, self.versions)) or "none"
            raise RunError(
                f"the memory of round {version} is not in {self.folder} (versions there: {held})"
            )
        return load_tensors(path)[0]

    def write(self, version: int, memory: Tree) -> None:
        """Write one version."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_tensors(self._path(version), memory, {"round": version})

    def hold(self, name: str, tree: Tree) -> None:
        """Store a tree that the server sends only once, under its hash."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_tensors(self._held(name), tree)

    def held(self, name: str) -> Tree | None:
        """Return a tree that was sent before, or ``None`` if it is missing.

        Examples
        --------
        >>> import tempfile, torch
        >>> memory = Versions(Path(tempfile.mkdtemp()), "digits-1", 3)
        >>> memory.hold(digest({"index": torch.ones(1)}), {"index": torch.ones(1)})
        >>> memory.held(digest({"index": torch.ones(1)})), memory.held("ab")
        ({'index': tensor([1.])}, None)
        """
        path = self._held(name)
        try:
            tree = load_tensors(path)[0] if path.exists() else {}
        except RunError:
            # A damaged file counts as missing: the server sends the tree again.
            return None
        return tree if digest(tree) == name else None

    def _held(self, name: str) -> Path:
        return self.folder / f"held-{check_name(name, 'tree')}{_SUFFIX}"

    def prune(self, oldest: int, newest: int) -> None:
        """Remove versions that are no longer needed or that a resumed run will write again."""
        for version in self.versions:
            if version < oldest or version > newest:
                self._path(version).unlink(missing_ok=True)

    def adopt(self, model: Tree, round_: int) -> Path:
        """Save the client's final model, and return the path of the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"model{_SUFFIX}"
        save_tensors(path, model, {"round": round_})
        return path

    def _path(self, version: int) -> Path:
        return self.folder / f"round-{version}{_SUFFIX}"
