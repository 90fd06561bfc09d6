"""Which node owns a client's number, and which clients may join."""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from equipoise.config import read_yaml
from equipoise.errors import InputError, unknown
from equipoise.flower.limits import shown

OWNERS = "owners.jsonl"

# Which node may rejoin with a number: see FlowerSettings.identity.
MEMORY, KEY = "memory", "key"

_FINGERPRINT = "SHA256:"
_KEY_TYPES = ("ecdsa-", "ssh-")


def fingerprint(public_key: bytes) -> str:
    """Return the fingerprint of a public key, as ``ssh-keygen -l`` prints it.

    Parameters
    ----------
    public_key : bytes
        In PEM, as Flower has it, or in one line, as in the ``.pub`` file of ``ssh-keygen``.

    Returns
    -------
    str
        A hash of the key, or of the bytes themselves if they are not a key, as in Flower's
        simulation.

    Examples
    --------
    >>> fingerprint(b"no key")
    'SHA256:oZncjM5U2FOML7ng9B5o5agmvi+y6V/OZUzup347MDk'
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_public_key,
        load_ssh_public_key,
    )

    in_one_line = public_key.startswith(tuple(kind.encode() for kind in _KEY_TYPES))
    blob = public_key
    try:
        key = (load_ssh_public_key if in_one_line else load_pem_public_key)(public_key)
        blob = b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    except (ValueError, UnsupportedAlgorithm):
        pass
    return _FINGERPRINT + b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def sealed(secret: str) -> str:
    """Return a hash of a client's secret. The server stores only this hash.

    Examples
    --------
    >>> sealed(""), len(sealed("a secret"))
    ('', 64)
    """
    return hashlib.sha256(secret.encode()).hexdigest() if secret else ""


class Owner(NamedTuple):
    """The node that owns a number.

    Attributes
    ----------
    key : str
        The fingerprint of its public key, or its node id if Flower does not provide keys.
    home : str
        A hash of the secret in its memory directory; see
        :func:`equipoise.flower.memory.proof_of_home`.
    name : str
        The name its client registered with.
    """

    key: str
    home: str
    name: str


@dataclass(frozen=True)
class Invited:
    """The entry of a client in a roster.

    Attributes
    ----------
    key : str, optional
        The fingerprint of the only key that may register it.
    name : str, optional
        The only name it may register with.
    """

    key: str | None = None
    name: str | None = None


def read_invited(path: Path) -> dict[int, Invited]:
    r"""Read a roster: the clients that may join, by number.

    Parameters
    ----------
    path : Path
        A YAML file with a mapping for each number. The mapping may contain ``key`` (a public key in
        one line, the path of a ``.pub`` file, or a fingerprint) and ``name``.

    Returns
    -------
    dict
        The requirements for each client.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "roster.yaml"
    >>> _ = file.write_text("0: {name: north}\n1:\n")
    >>> read_invited(file)
    {0: Invited(key=None, name='north'), 1: Invited(key=None, name=None)}
    """
    invited: dict[int, Invited] = {}
    content: Mapping[Any, Any] = read_yaml(path)
    for number, given in content.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise InputError(f"{path}: {number!r} is no client; valid: whole numbers from 0")
        facts = {} if given is None else given
        if not isinstance(facts, Mapping):
            raise InputError(
                f"{path}: client {number} must have keys with values, such as name: north, got "
                f"{given!r}"
            )
        for name, value in facts.items():
            if name not in ("key", "name"):
                raise unknown("key", name, ("key", "name"), where=f"{path}, client {number}")
            if not isinstance(value, str) or not value:
                raise InputError(f"{path}: {name} of client {number} must be text, got {value!r}")
        key = facts.get("key")
        invited[number] = Invited(
            None if key is None else _fingerprint_of(key, path, number), facts.get("name")
        )
    return invited


def _fingerprint_of(key: str, roster: Path, client: int) -> str:
    """Return the fingerprint of a key in a roster: text, a file or the fingerprint itself."""
    if key.startswith(_FINGERPRINT):
        return key
    if key.startswith(_KEY_TYPES):
        return fingerprint(key.encode())
    file = roster.parent / Path(key).expanduser()
    try:
        text = file.read_bytes().strip()
    except OSError as error:
        raise InputError(
            f"{roster}: cannot read {file}, the key of client {client}: {error.strerror}"
        ) from error
    if not text.startswith(tuple(kind.encode() for kind in _KEY_TYPES)):
        raise InputError(
            f"{roster}: {file}, the key of client {client}, is no public key of ssh-keygen"
        )
    return fingerprint(text)


@dataclass
class Owners:
    """The owners of a run's client numbers: the nodes that registered them first.

    They are stored in a journal in the run directory. It is read when the run is resumed, and when
    the operator has released a number.

    Parameters
    ----------
    path : Path, optional
        The journal. Nothing is written before its directory exists.
    rule : {"memory", "key"}
        Which node may rejoin with a number; see :class:`equipoise.flower.settings.FlowerSettings`.
    invited : dict, optional
        The clients that may join; all by default.
    run : str
        The name of the run.

    Examples
    --------
    >>> owners = Owners()
    >>> north = Owner("SHA256:a", sealed("disk 1"), "north")
    >>> owners.objection(3, north) is None
    True
    >>> owners.claim(3, north)
    >>> owners.objection(3, north._replace(key="SHA256:b")) is None
    True
    >>> print(owners.objection(3, Owner("SHA256:c", sealed("disk 2"), "north")))
    client 3 belongs to the node that registered it first (SHA256:a); if this one is to take its
    place, stop the other and run `equipoise flower release 3 RUN_DIRECTORY`
    """

    path: Path | None = None
    rule: str = MEMORY
    invited: dict[int, Invited] | None = None
    run: str = ""
    _of: dict[int, Owner] = field(default_factory=dict, init=False)
    _unwritten: list[dict[str, Any]] = field(default_factory=list, init=False)
    _read: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Read the journal."""
        self.released()

    def objection(self, client: int, node: Owner) -> str | None:
        """Return why a node may not register a number, or ``None`` if it may."""
        invited = Invited()
        if self.invited is not None:
            if client not in self.invited:
                return f"client {client} is not in the roster"
            invited = self.invited[client]
            if invited.key not in (None, node.key):
                return f"the roster gives client {client} the key {invited.key}, not {node.key}"
            if invited.name not in (None, node.name):
                return f"the roster calls client {client} {invited.name!r}, not {shown(node.name)}"
        mine = [
            number
            for number, owner in self._of.items()
            if owner.key == node.key and number != client
        ]
        # Another SuperLink may reuse node ids, but not keys.
        if mine and node.key.startswith(_FINGERPRINT):
            return f"it registers as client {client}, but has registered as client {mine[0]} before"
        owner = self._of.get(client)
        if owner is None or owner.key == node.key or invited.key is not None:
            return None
        if self.rule == MEMORY and node.home and (owner.home, owner.name) == (node.home, node.name):
            return None
        where = self.path.parent if self.path else "RUN_DIRECTORY"
        return (
            f"client {client} belongs to the node that registered it first ({owner.key}); if this "
            f"one is to take its place, stop the other and run `equipoise flower release {client} "
            f"{where}`"
        )

    def claim(self, client: int, node: Owner) -> None:
        """Record that a number belongs to a node."""
        if self._of.get(client) != node:
            self._of[client] = node
            self._unwritten.append({"client": client, **node._asdict()})

    def disown(self, client: int) -> None:
        """Free a number that was claimed by a client that could not be admitted."""
        # The operator may have freed it in the meantime.
        self._of.pop(client, None)
        self._unwritten.append(_release_of(client))

    def released(self) -> bool:
        """Read new lines of the journal; return whether the operator has released numbers."""
        if self.path is None or not self.path.exists() or self.path.stat().st_size == self._read:
            return False
        with self.path.open("rb") as file:
            file.seek(self._read)
            added = file.read()
        self._read += len(added)
        freed = [_apply(self._of, entry) for entry in _entries(added)]
        for entry in self._unwritten:
            _apply(self._of, entry)
        return any(freed)

    def save(self) -> None:
        """Append new entries to the journal, if its directory exists."""
        if self.path is None or not self._unwritten or not self.path.parent.exists():
            return
        _append(self.path, self._unwritten)
        self._unwritten.clear()
        # The operator may have added a line at the same time, so the file decides.
        self.released()


def release(directory: Path, client: int) -> Owner:
    """Release the number of a client. The next node that registers it becomes its owner.

    Parameters
    ----------
    directory : Path
        The run directory. The run may be running.
    client : int
        The number.

    Returns
    -------
    Owner
        The node that owned it.

    Examples
    --------
    >>> import tempfile
    >>> owners = Owners(Path(tempfile.mkdtemp()) / OWNERS)
    >>> owners.claim(3, Owner("SHA256:a", "", "north"))
    >>> owners.save()
    >>> release(owners.path.parent, 3).name, owners.released()
    ('north', True)
    >>> owners.objection(3, Owner("SHA256:b", "", "south")) is None
    True
    """
    path = directory / OWNERS
    if not path.exists():
        raise InputError(
            f"{directory} holds no {OWNERS}; valid: the directory of a run on Flower that has begun"
        )
    owners = Owners(path)
    owner = owners._of.get(client)
    if owner is None:
        taken = ", ".join(map(str, sorted(owners._of))) or "none"
        raise InputError(
            f"client {client} has no owner in {directory}; clients with an owner: {taken}"
        )
    _append(path, [_release_of(client)])
    return owner


def _release_of(client: int) -> dict[str, Any]:
    return {"client": client, "released": True}


def _apply(owners: dict[int, Owner], entry: Mapping[str, Any]) -> bool:
    """Apply one entry of a journal; return whether it frees a number."""
    client = int(entry["client"])
    if entry.get("released"):
        return owners.pop(client, None) is not None
    owners[client] = Owner(str(entry["key"]), str(entry["home"]), str(entry["name"]))
    return False


def _entries(text: bytes) -> list[dict[str, Any]]:
    entries = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            # Empty, or truncated when the server was killed: that registration was not confirmed.
            continue
        entries.append(entry)
    return entries


def _append(path: Path, entries: list[dict[str, Any]]) -> None:
    """Append lines to a journal in one write."""
    # Start with a new line, in case the last one was truncated.
    text = ("\n" + "".join(json.dumps(entry) + "\n" for entry in entries)).encode()
    with path.open("ab") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
