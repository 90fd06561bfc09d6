"""The nodes of Flower's grid, and the exchange of messages with them."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

from equipoise.errors import InputError, RunError
from equipoise.flower.checks import Misfit, shown
from equipoise.flower.identity import Owner, Owners, fingerprint, sealed
from equipoise.flower.registration import read_registration, usual_first
from equipoise.flower.roster import Description, Roster
from equipoise.flower.settings import FlowerSettings
from equipoise.flower.wire import VERSIONS, settings_of, versions_here

log = logging.getLogger("flwr.equipoise")

# Seconds between polls for answers. Flower's own functions poll every three seconds, although a
# poll is only one short request.
_LOOK_FOR_ANSWERS = 0.1
_LOOK_FOR_NODES = 2.0
_LONGEST_REASON = 300

# What Flower raises when it cannot assemble the parts of a message.
_MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    DecodeError,
)

Request = tuple[str, RecordDict]
T = TypeVar("T")


@dataclass
class Answers(Generic[T]):
    """The answers of clients, and the reason for each client that did not answer."""

    answered: dict[int, T] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class Nodes:
    """The nodes of a grid, by the stable numbers of their clients.

    A client's number belongs to the node that registered it first; see
    :class:`equipoise.flower.identity.Owners`. Other nodes with this number are refused, and the
    client is not affected by them.

    Parameters
    ----------
    grid : Grid
        Flower's connection to the nodes.
    roster : Roster
        The registered clients; new ones are added.
    settings : FlowerSettings
        How long to wait.
    owners : Owners, optional
        Which node each number belongs to.
    """

    def __init__(
        self, grid: Grid, roster: Roster, settings: FlowerSettings, owners: Owners | None = None
    ) -> None:
        self.grid, self.roster, self.settings = grid, roster, settings
        self.owners = owners or Owners()
        self.node_of: dict[int, int] = {}
        self.refused: dict[int, str] = {}
        self._client_of: dict[int, int] = {}
        self._asked: dict[str, int] = {}
        self._looked = float("-inf")
        self._key_of: dict[int, str] = {}
        # When each connected node was started, as Flower says.
        self._started: dict[int, str] = {}
        # Nodes refused because of another node with the same number, which may disconnect.
        self._disputed: dict[int, int] = {}
        self._arrived: dict[int, Description] = {}

    def gather(self) -> None:
        """Wait until the number of clients in the settings have registered.

        Raises
        ------
        RunError
            If they do not register in time; the message names the nodes that were refused, with
            reasons.
        """
        wanted, deadline = self.settings.clients, time.monotonic() + self.settings.wait
        while len(self.node_of) < wanted:
            self.look(strict=True)
            # Admit all at once, so that the majority and not the first client determines the model.
            if len(self.node_of) >= wanted:
                self.newcomers()
            if len(self.node_of) >= wanted:
                break
            if time.monotonic() > deadline:
                why = "".join(
                    f"; node {node} was refused: {reason}" for node, reason in self.refused.items()
                )
                raise RunError(
                    f"{len(self.node_of)} of {wanted} clients have registered within "
                    f"{self.settings.wait:g} s (flower.clients, flower.wait; Flower simulates as "
                    f"many as in --federation-config 'num-supernodes=N'){why}"
                )
            time.sleep(_LOOK_FOR_ANSWERS)

    def newcomers(self) -> list[int]:
        """Admit the clients that have registered since the last call, without waiting.

        The roster does not change between calls, so it is constant during a round.
        """
        self.look()
        admitted = []
        for said in usual_first(self._arrived.values()):
            try:
                self.roster.admit([said])
            except InputError as error:
                self.owners.disown(said.client)
                self._refuse(self.node_of.pop(said.client), str(error))
            else:
                admitted.append(said.client)
        self._arrived.clear()
        return admitted

    def look(self, *, strict: bool = False) -> None:
        """Ask newly connected nodes for their descriptions, and read those that have arrived."""
        if time.monotonic() - self._looked > _LOOK_FOR_NODES:
            self._looked = time.monotonic()
            if self.owners.released():
                self._reconsider(set(self._disputed.values()))
            infos = list(self.grid.get_nodes())
            online = {info.node_id: info.public_key for info in infos}
            started = {info.node_id: info.last_activated_at for info in infos}
            # A node with a key of its own has the same id after a restart. It may be back before
            # anyone has seen that it was away, and it has lost the messages that it had.
            same = {node for node in online if self._started.get(node) == started[node]}
            self._started = started
            for node, client in list(self._client_of.items()):
                if node not in same:
                    self._forget(client, node)
            self._asked = {id_: node for id_, node in self._asked.items() if node in same}
            # Ask a refused node again after a restart, because its configuration may have changed.
            self.refused = {node: why for node, why in self.refused.items() if node in same}
            strangers = (
                set(online) - set(self._client_of) - set(self._asked.values()) - set(self.refused)
            )
            self._key_of |= {
                node: fingerprint(online[node]) if online[node] else f"node {node}"
                for node in strangers
            }
            asked = ConfigRecord({"run": self.owners.run})
            contents = {node: RecordDict({"settings": asked}) for node in sorted(strangers)}
            messages = [
                self._message(node, "query.describe", content, 0)
                for node, content in contents.items()
            ]
            self._asked |= {
                id_: node
                for id_, node in zip(self._push(messages), sorted(strangers), strict=True)
                if id_
            }
        if self._asked:
            replies, garbled = self._pull(self._asked)
            for id_, why in garbled.items():
                self._refuse(self._asked.pop(id_), why)
            for reply in sorted(replies, key=lambda m: m.metadata.src_node_id):
                self._register(self._asked.pop(reply.metadata.reply_to_message_id), reply, strict)

    def _register(self, node: int, reply: Message, strict: bool) -> None:
        if reply.has_error():
            # An offline node is asked again when it returns.
            if not _unavailable(reply):
                self._refuse(node, _reason(reply.error.reason))
            return
        try:
            said = read_registration(reply.content, self.settings)
        except Misfit as error:
            self._refuse(node, str(error))
            return
        said = dataclasses.replace(said, home=sealed(said.home))
        owner, other = (
            Owner(self._key_of[node], said.home, said.name),
            self.node_of.get(said.client),
        )
        wrong = self.owners.objection(said.client, owner)
        # Before round 1 both nodes have just answered. Later the other node may be the same client
        # before a restart.
        if wrong is None and other is not None and strict:
            wrong = (
                f"nodes {other} and {node} both registered as client {said.client}; "
                "give each SuperNode a different number: --node-config 'client=N'"
            )
        if wrong:
            self._disputed[node] = said.client
            self._refuse(node, wrong)
            return
        self.owners.claim(said.client, owner)
        self.node_of[said.client], self._client_of[node] = node, said.client
        known = self.roster.known.get(said.client)
        if known is None:
            self._arrived[said.client] = said
        elif known.sizes != said.sizes:
            log.warning("client %d now has other sizes; its registered sizes are kept", said.client)
        log.info("client %d (%s) has registered as node %d", said.client, said.name, node)
        theirs = settings_of(reply.content, VERSIONS)
        for package, here in versions_here().items():
            if (there := theirs.get(package)) != here:
                log.warning(
                    "client %d has %s %s, the server %s; results may differ, so install the same",
                    said.client,
                    package,
                    "of an unknown version" if there is None else shown(there),
                    here,
                )

    def _reached(self, client: int) -> tuple[int, str]:
        """Return the node of a client, and when it was started; no node is -1."""
        node = self.node_of.get(client, -1)
        return node, self._started.get(node, "")

    def _forget(self, client: int, node: int) -> None:
        """Mark a node as unreachable. It is asked for its description when it is back."""
        self._client_of.pop(node, None)
        if self.node_of.get(client) == node:
            log.warning("client %d: its node %d went offline or restarted", client, node)
            del self.node_of[client]
            self._reconsider({client})

    def _reconsider(self, clients: set[int]) -> None:
        """Ask nodes again that were refused because their number was in use."""
        for node in [node for node, client in self._disputed.items() if client in clients]:
            del self._disputed[node]
            self.refused.pop(node, None)

    def _refuse(self, node: int, why: str) -> None:
        self.refused[node] = why
        self._client_of.pop(node, None)
        log.warning("node %d cannot take part: %s", node, why)

    def ask(self, requests: Mapping[int, Request], round_: int) -> Answers[RecordDict]:
        """Send each client its request, and wait for the answers.

        Parameters
        ----------
        requests : mapping
            For each client, the kind of message and its content.
        round_ : int
            The round, counted from 0. SuperNodes log it, counted from 1.

        Returns
        -------
        Answers
            The answers that arrived in time, and the reasons for the other clients.
        """
        answers: Answers[RecordDict] = Answers()
        waiting: dict[str, int] = {}
        sent_to: dict[int, tuple[int, str]] = {}
        out_of_reach: dict[int, str] = {}

        def send(clients: Iterable[int]) -> None:
            reachable = [client for client in clients if client in self.node_of]
            messages = [self._message(self.node_of[c], *requests[c], round_) for c in reachable]
            for client, id_ in zip(reachable, self._push(messages), strict=True):
                sent_to[client] = self._reached(client)
                if id_:
                    waiting[id_] = client
                else:
                    answers.failed[client] = "the message could not be sent"

        self.look()
        out_of_reach |= {
            client: "not connected" for client in requests if client not in self.node_of
        }
        send(sorted(requests))
        deadline = time.monotonic() + self.settings.timeout
        while waiting and time.monotonic() < deadline:
            replies, garbled = self._pull(waiting)
            for id_, why in garbled.items():
                answers.failed[waiting.pop(id_)] = why
            for reply in replies:
                client = waiting.pop(reply.metadata.reply_to_message_id)
                if not reply.has_error():
                    answers.answered[client] = reply.content
                elif _unavailable(reply):
                    self._forget(client, sent_to[client][0])
                    out_of_reach[client] = "its node went offline"
                else:
                    answers.failed[client] = _reason(reply.error.reason)
            if not waiting:
                break
            time.sleep(_LOOK_FOR_ANSWERS)
            self.look()
            for id_, client in [
                (id_, c) for id_, c in waiting.items() if self._reached(c) != sent_to[c]
            ]:
                del waiting[id_]
                out_of_reach[client] = "its node went offline"
            # A restarted SuperNode does not get the messages that were sent before.
            back = [client for client in out_of_reach if client in self.node_of]
            for client in back:
                del out_of_reach[client]
            send(sorted(back))
        answers.failed |= out_of_reach
        answers.failed |= {
            client: f"no answer within {self.settings.timeout:g} s" for client in waiting.values()
        }
        return answers

    def insist(
        self,
        requests: Mapping[int, Request],
        round_: int,
        read: Callable[[int, RecordDict], T],
        enough: int,
    ) -> Answers[T]:
        """Ask until enough clients have sent a valid answer, or the retries are used up.

        Parameters
        ----------
        requests, round_
            As in :meth:`ask`.
        read : callable
            Reads a client's answer, or raises :class:`~equipoise.flower.checks.Misfit`.
        enough : int
            The required number of answers.

        Returns
        -------
        Answers
            Valid answers as they were read, and the latest reasons for the other clients.
        """
        kept: Answers[T] = Answers()
        for attempt in range(self.settings.retries + 1):
            open_ = {
                client: request
                for client, request in requests.items()
                if client not in kept.answered
            }
            if attempt:
                log.warning("round %d: %s; asking again", round_ + 1, reasons(kept.failed))
                self._wait_for(open_, enough - len(kept.answered))
            answers = self.ask(open_, round_)
            kept.failed = dict(answers.failed)
            for client, content in answers.answered.items():
                try:
                    kept.answered[client] = read(client, content)
                except Misfit as error:
                    kept.failed[client] = str(error)
            if len(kept.answered) >= enough:
                break
        return kept

    def _wait_for(self, clients: Iterable[int], count: int) -> None:
        """Wait for clients that are not connected, up to the timeout of an answer."""
        deadline = time.monotonic() + self.settings.timeout
        while (
            sum(client in self.node_of for client in clients) < count
            and time.monotonic() < deadline
        ):
            time.sleep(_LOOK_FOR_ANSWERS)
            self.look()

    def _pull(self, waiting: Mapping[str, int]) -> tuple[list[Message], dict[str, str]]:
        """Return the replies that have arrived, and why Flower cannot assemble others."""
        try:
            replies = self.grid.pull_messages(list(waiting))
            return [reply for reply in replies if reply.metadata.reply_to_message_id in waiting], {}
        except _MALFORMED as error:
            if len(waiting) == 1:
                return [], dict.fromkeys(
                    waiting, f"sent a message that cannot be read: {_reason(str(error))}"
                )
        found = [self._pull({id_: waiting[id_]}) for id_ in waiting]
        return [reply for replies, _ in found for reply in replies], {
            i: why for _, bad in found for i, why in bad.items()
        }

    def _push(self, messages: list[Message]) -> list[str | None]:
        """Send messages, and return ``None`` for those that Flower did not accept."""
        pushed: list[str | None] = list(self.grid.push_messages(messages)) if messages else []
        return pushed or [None] * len(messages)

    def _message(self, node: int, kind: str, content: RecordDict, round_: int) -> Message:
        content.setdefault("settings", ConfigRecord())
        return Message(
            content, node, kind, ttl=self.settings.timeout + 60, group_id=str(round_ + 1)
        )


def reasons(failed: Mapping[int, str]) -> str:
    """Return one line with the reasons why clients are left out.

    Examples
    --------
    >>> reasons({3: "not connected", 1: "answered with NaN in head.bias"})
    'client 1: answered with NaN in head.bias, client 3: not connected'
    """
    return ", ".join(f"client {client}: {reason}" for client, reason in sorted(failed.items()))


def _unavailable(reply: Message) -> bool:
    return reply.error.code == ErrorCode.NODE_UNAVAILABLE


def _reason(text: str | None) -> str:
    # Truncate first: a client's text may be very long.
    words = (text or "an error without a reason")[: 10 * _LONGEST_REASON].split()
    return shown(" ".join(words), _LONGEST_REASON)
