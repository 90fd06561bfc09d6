"""A grid in one process: real apps and real messages as bytes, without a network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from equipoise.data import load
from equipoise.flower.client import client_app
from equipoise.flower.server import serve
from equipoise.flower.silo import read_experiment
from equipoise.flower.wire import settings_of

# Messages can be created only inside a task.
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

FIRST_NODE = 7_000_000_000_000_000_001


def through_bytes(message):
    """Serialize a message into the objects that Flower sends, and read it again."""
    # As Flower does when it sends: otherwise every object hashes all that it contains again.
    with no_object_id_recompute():
        message.metadata.__dict__["_message_id"] = message.object_id
        contents = {id_: thing.deflate() for id_, thing in get_all_nested_objects(message).items()}
        size = sum(map(len, contents.values()))
        arrived = inflate_object_from_contents(message.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived, size


class LoopGrid(Grid):
    """Passes pushed messages to a ``ClientApp``, and returns its answers when they are pulled."""

    def __init__(self, app, nodes, run_config=None, tamper=None):
        self.app, self.run_config, self.tamper = app, run_config or {}, tamper
        self.nodes = {FIRST_NODE + 7 * place: dict(config) for place, config in enumerate(nodes)}
        self.replies, self.kinds, self.bytes = {}, [], []

    def set_run(self, run):
        raise NotImplementedError

    run = property(lambda self: None)

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            arrived, size = through_bytes(message)
            self.kinds.append(arrived.metadata.message_type)
            self.bytes.append(size)
            ids.append(message.metadata.message_id)
            reply = self._answer(arrived)
            if reply is not None:
                self.replies[message.metadata.message_id] = through_bytes(reply)[0]
        return ids

    def _answer(self, message):
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return None
        context = Context(1, node, self.nodes[node], RecordDict(), self.run_config)
        try:
            reply = self.app(message, context)
        except Exception as error:  # as Flower does
            reply = Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)
        return self.tamper(self.nodes[node], message, reply) if self.tamper else reply

    def pull_messages(self, message_ids):
        return [self.replies.pop(id_) for id_ in list(message_ids) if id_ in self.replies]

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


def run_on_loop(path, nodes, out=None, *, settings="", data=None, tamper=None):
    """Run an experiment with both apps in this process; return the run and the grid."""
    run_config = {"set": settings, "out": str(out) if out else ""}
    grid = LoopGrid(client_app(path, data=data), nodes, run_config, tamper)
    return serve(grid, read_experiment(Path(path), run_config), out), grid


# Four clients of the digits, each in its own group.
CHOSEN = (6, 13, 17, 19)


def write_silos(root):
    """Write four clients of the digits to separate directories."""
    digits = load("digits")
    for number, client in enumerate(CHOSEN):
        folder = Path(root) / f"client-{number}"
        folder.mkdir(parents=True)
        rows = np.concatenate(
            [digits.split(split).of(client) for split in ("train", "val", "test")]
        )
        np.savez(folder / "data.npz", x=digits.x[rows].numpy(), y=digits.y[rows].numpy())
        (folder / "client.yaml").write_text(f"group: {digits.group_names[digits.groups[client]]}\n")
    return Path(root)


def write_experiment(folder, **sections):
    """Write an experiment with these four clients; return its file."""
    content = {
        "data": {"name": "silos", "root": str(folder / "silos"), "classes": 10},
        "training": {"rounds": 3, "batch_size": 16},
        "machine": {"device": "cpu", "precision": "float64", "chunk": 1},
        "flower": {"clients": 4, "timeout": 60},
    }
    for name, section in sections.items():
        content[name] = (
            {**content.get(name, {}), **section} if isinstance(section, dict) else section
        )
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def own_nodes(folder, clients=range(4)):
    """Return the configurations of nodes that each have their own data and memory."""
    return [
        {"data": str(folder / "silos" / f"client-{c}"), "memory": str(folder / "memory" / str(c))}
        for c in clients
    ]


def number_of(node):
    """Return the client of a node."""
    return int(node["data"][-1])


def misbehaving(client, kind, round_, wrong):
    """Make one client answer one kind of message wrongly in one round, with ``wrong``."""

    def tamper(node, message, reply):
        hit = (number_of(node), message.metadata.message_type) == (client, kind)
        return (
            wrong(message, reply)
            if hit and settings_of(message.content)["round"] == round_
            else reply
        )

    return tamper


def error(message, reply):
    """Raise an error because memory has run out."""
    return Message(
        Error(code=2, reason="<class 'MemoryError'>:<'out of memory'>"), reply_to=message
    )
