"""The server's description of the clients, without their data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import InputError, unknown
from equipoise.federation import SPLITS, Federation
from equipoise.run.files import write_atomically


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a client sends when it registers. All of it is public.

    Attributes
    ----------
    client : int
        Its stable number.
    name, group : str
        Its name and that of its group.
    group_names : tuple of str
        All groups that it knows, in order.
    unseen : bool
        Whether it is held out of training.
    sizes : dict
        Number of samples of each of its splits.
    task, shape, outputs, class_names
        The properties of its data that determine the model; the same for all clients.
    home : str
        Identifies the disk of its memory, to distinguish a restarted SuperNode from another one
        with the same number.
    """

    client: int
    name: str
    group: str
    group_names: tuple[str, ...]
    unseen: bool
    sizes: dict[str, int]
    task: str
    shape: tuple[int, ...]
    outputs: int
    home: str = ""
    class_names: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls, federation: Federation, client: int, *, unseen: bool = False, home: str = ""
    ) -> Description:
        """Describe one client of a federation.

        Examples
        --------
        >>> from equipoise.data import load
        >>> Description.of(load("digits"), 20).group
        'rotated'
        """
        return cls(
            client=client,
            name=federation.client_name(client),
            group=federation.group_names[federation.groups[client]],
            group_names=federation.group_names,
            unseen=unseen or bool(federation.unseen[client]),
            sizes={split: len(federation.split(split).of(client)) for split in SPLITS},
            task=federation.task,
            shape=federation.shape,
            outputs=federation.outputs,
            home=home,
            class_names=federation.class_names,
        )

    def text(self) -> str:
        """Write it as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Description:
        """Read what :meth:`text` wrote.

        Examples
        --------
        >>> from equipoise.data import load
        >>> said = Description.of(load("digits"), 0)
        >>> Description.read(said.text()) == said
        True
        """
        plain: dict[str, Any] = json.loads(text)
        sequences = {name: tuple(value) for name, value in plain.items() if isinstance(value, list)}
        return cls(**{**plain, **sequences})


@dataclass(frozen=True)
class Sizes:
    """The number of samples of every client in a split."""

    sizes: NDArray[np.int64]


@dataclass
class Roster:
    """The registered clients, with the part of a federation's interface that the round loop needs.

    Clients keep their numbers. A number without a registered client has no samples and is neither
    seen nor unseen.

    Parameters
    ----------
    name : str
        Name of the federation in tables and messages.
    known : dict
        The description of each registered client, by number.

    Examples
    --------
    >>> from equipoise.data import load
    >>> digits = load("digits")
    >>> roster = Roster("digits", {c: Description.of(digits, c) for c in (0, 3)})
    >>> roster.clients, roster.seen.tolist(), roster.split("train").sizes.tolist()
    (4, [0, 3], [14, 0, 0, 14])
    """

    name: str
    known: dict[int, Description] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that all clients are compatible."""
        self.group_names: tuple[str, ...] = ()
        known, self.known = self.known, {}
        self.admit(known.values())

    def admit(self, newcomers: Iterable[Description]) -> None:
        """Add clients. Their new groups come after the known ones.

        Raises
        ------
        InputError
            If a new client's data need another model than those of the others. The message names
            both clients.
        """
        for said in sorted(newcomers, key=lambda said: said.client):
            first = next(iter(self.known.values()), said)
            facts = {
                "task": "",
                "shape": "",
                "outputs": "; set data.classes in the experiment",
                "class_names": "",
            }
            for fact, hint in facts.items():
                mine, theirs = getattr(said, fact), getattr(first, fact)
                if mine != theirs:
                    raise InputError(
                        f"client {said.client} ({said.name}) has {fact} {mine!r}, "
                        f"client {first.client} ({first.name}) {theirs!r}; they must agree{hint}"
                    )
            self.known[said.client] = said
            groups = set(self.group_names)
            self.group_names += tuple(name for name in said.group_names if name not in groups)

    @property
    def clients(self) -> int:
        """One more than the highest number."""
        return max(self.known, default=-1) + 1

    @property
    def groups(self) -> NDArray[np.int64]:
        """Every client's group, as a position in ``group_names``."""
        groups = np.zeros(self.clients, np.int64)
        places = {name: place for place, name in enumerate(self.group_names)}
        for client, said in self.known.items():
            groups[client] = places[said.group]
        return groups

    @property
    def unseen(self) -> NDArray[np.bool_]:
        """Which clients are held out of training."""
        return np.array(
            [client in self.known and self.known[client].unseen for client in range(self.clients)],
            bool,
        )

    @property
    def seen(self) -> NDArray[np.int64]:
        """Numbers of the clients that train."""
        return np.array(
            sorted(client for client, said in self.known.items() if not said.unseen), np.int64
        )

    @property
    def everyone(self) -> NDArray[np.int64]:
        """Numbers of all registered clients."""
        return np.array(sorted(self.known), np.int64)

    @property
    def task(self) -> str:
        """What is learned."""
        return self._any.task

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self._any.shape

    @property
    def outputs(self) -> int:
        """Number of outputs of a model for one sample."""
        return self._any.outputs

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes, if clients have them."""
        return self._any.class_names

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Always empty: attributes of samples stay with the clients, which send counts."""
        return {}

    @property
    def _any(self) -> Description:
        return self.known[min(self.known)]

    def split(self, name: str) -> Sizes:
        """Return the number of samples of every client in one of the three splits."""
        if name not in SPLITS:
            raise unknown("split", name, SPLITS)
        sizes = np.zeros(self.clients, np.int64)
        for client, said in self.known.items():
            sizes[client] = said.sizes[name]
        return Sizes(sizes)

    @property
    def client_names(self) -> tuple[str, ...]:
        """Names of all clients, by number."""
        return tuple(self.client_name(client) for client in range(self.clients))

    def client_name(self, client: int) -> str:
        """Return a client's name."""
        return self.known[client].name if client in self.known else f"client {client}"

    def pooled(self) -> Federation:
        """Refuse to pool the data."""
        raise InputError(
            "method 'central' pools all data, but on Flower they stay with the clients; choose "
            "another method, or train in one process with `equipoise run`"
        )

    def fingerprint(self) -> str:
        """Return a hash of what the data require of a model, without the registered clients."""
        return hashlib.sha256(repr((self.task, self.shape, self.outputs)).encode()).hexdigest()[:16]

    def save(self, path: Path, **more: Any) -> None:
        """Write the registered clients, and further values, to a file.

        Examples
        --------
        >>> import tempfile
        >>> from equipoise.data import load
        >>> path = Path(tempfile.mkdtemp()) / "clients.json"
        >>> Roster("digits", {3: Description.of(load("digits"), 3)}).save(path, run="r1")
        >>> read_roster(path)[0].seen.tolist(), read_roster(path)[1]
        ([3], {'run': 'r1'})
        """
        clients = [dataclasses.asdict(said) for said in self.known.values()]
        content = {**more, "name": self.name, "clients": clients}
        write_atomically(path, json.dumps(content, indent=2).encode() + b"\n")


def read_roster(path: Path) -> tuple[Roster, Mapping[str, Any]]:
    """Read what :meth:`Roster.save` wrote, in the order of registration."""
    content = json.loads(path.read_text(encoding="utf-8"))
    roster = Roster(content.pop("name"))
    for plain in content.pop("clients"):
        roster.admit([Description.read(json.dumps(plain))])
    return roster, content
