"""The cost of a round on Flower without training and waiting: packing, combining, and bytes.

The server is the real one, with a grid in this process whose clients send back what they receive.
Messages are converted to Flower's objects and back, as on a network. This time, and that of the
clients, is counted as Flower's. The rest of a round is the time of Equipoise. Seconds are CPU time
of one core, so other processes on the machine do not matter.

    python -m benchmarks.flower_cost --json docs/results/flower_cost.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from equipoise.engine.settings import Machine
from equipoise.flower.engine import FlowerEngine
from equipoise.flower.nodes import Nodes
from equipoise.flower.roster import Description, Roster
from equipoise.flower.settings import FlowerSettings
from equipoise.flower.wire import from_record, settings_of, to_record
from equipoise.method import State
from equipoise.methods import build as build_method
from equipoise.models import build as build_model
from equipoise.tree import size_in_bytes

MODELS = {"1 M": [1258], "25 M": [4096, 5290]}
CLIENTS = 4


class Echo(Grid):
    """Clients that send back what they receive. It counts the seconds outside the server's code."""

    run = property(lambda self: None)  # type: ignore[assignment]

    def __init__(self) -> None:
        self.seconds = self.client_seconds = 0.0
        self.bytes = 0
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return range(1, CLIENTS + 1)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        begin = time.process_time()
        ids = []
        for message in messages:
            arrived = self._across(message)
            self._replies[message.metadata.message_id] = self._across(self._answer(arrived))
            ids.append(message.metadata.message_id)
        self.seconds += time.process_time() - begin
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(id_) for id_ in list(message_ids) if id_ in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError

    def _across(self, message: Message) -> Message:
        message.metadata.__dict__["_message_id"] = message.object_id
        contents = {id_: thing.deflate() for id_, thing in get_all_nested_objects(message).items()}
        self.bytes += sum(map(len, contents.values()))
        arrived: Any = inflate_object_from_contents(message.object_id, contents)
        arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
        return arrived

    def _answer(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - 1
        note = ConfigRecord(
            {"client": client, "round": settings_of(message.content).get("round", 0)}
        )
        if message.metadata.message_type == "query.describe":
            about = ConfigRecord({"text": described(client).text()})
            return Message(RecordDict({"about": about, "note": note}), reply_to=message)
        begin = time.process_time()
        update = to_record(from_record(message.content.array_records["model"]))
        self.client_seconds += time.process_time() - begin
        reports = MetricRecord({"train_loss": 1.0, "steps": 1.0})
        return Message(
            RecordDict({"update": update, "reports": reports, "note": note}), reply_to=message
        )


def described(client: int) -> Description:
    return Description(
        client=client,
        name=f"client {client}",
        group="all",
        group_names=("all",),
        unseen=False,
        sizes={"train": 100, "val": 10, "test": 20},
        task="classification",
        shape=(1, 28, 28),
        outputs=10,
    )


def measure(hidden: list[int], rounds: int) -> dict[str, Any]:
    """Run rounds of federated averaging. Return the median seconds and the bytes of a round."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    grid, roster, settings = Echo(), Roster("echo"), FlowerSettings(clients=CLIENTS)
    nodes = Nodes(grid, roster, settings)
    nodes.gather()
    method = build_method("fedavg")
    module = build_model("mlp", shape=(1, 28, 28), classes=10, hidden=hidden)
    engine = FlowerEngine(nodes, lambda: "cost", method, roster, module, Machine(device="cpu"))
    state = State(0, engine.network.initial())
    seconds: dict[str, list[float]] = {"serialise": [], "combine": [], "client": [], "flower": []}
    for round_ in range(rounds + 1):
        grid.seconds = grid.client_seconds = grid.bytes = 0
        cohort = engine.cohort(method, roster.seen, round_)
        begin = time.process_time()
        updates = cohort.train(*method.aggregation.send(state, cohort), method.local)
        trained = time.process_time()
        state = method.aggregation.combine(state, updates, cohort)
        ended = time.process_time()
        if round_:  # the first one is the warm-up
            seconds["serialise"].append(trained - begin - grid.seconds)
            seconds["combine"].append(ended - trained)
            seconds["client"].append(grid.client_seconds / CLIENTS)
            seconds["flower"].append(grid.seconds - grid.client_seconds)
    own = CLIENTS * size_in_bytes(state.model)
    return {
        "parameters": sum(tensor.numel() for tensor in state.model.values()),
        "clients": CLIENTS,
        "seconds": {name: round(median(values), 4) for name, values in seconds.items()},
        "bytes_of_parameters": own,
        "bytes_down": cohort.bytes_down,
        "bytes_up": cohort.bytes_up,
        "bytes_on_the_wire": grid.bytes,
        "overhead_percent": round(100 * (grid.bytes / (2 * own) - 1), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="Where to write the numbers.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    measured = {name: measure(hidden, given.rounds) for name, hidden in MODELS.items()}
    text = json.dumps(measured, indent=2)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
