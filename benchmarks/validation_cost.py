"""The cost of validating the updates of a round on Flower.

The time to read and check an update is compared with the time to read it without checks. The
difference for all clients is divided by the time of a whole round without training (see
``benchmarks.flower_cost``), the shortest possible round. Seconds are CPU time of one core, so other
processes on the machine do not matter.

    python -m benchmarks.validation_cost
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from benchmarks import flower_cost
from equipoise import tasks
from equipoise.flower.reports import Declared
from equipoise.flower.schema import NOTE, REPORTS, UPDATE, Schema
from equipoise.flower.wire import from_record, to_record
from equipoise.models import build as build_model


def seconds_of(function: Callable[[], Any], repeats: int) -> float:
    taken = []
    for _ in range(repeats + 1):
        begin = time.process_time()
        function()
        taken.append(time.process_time() - begin)
    # The first one is the warm-up.
    return median(taken[1:])


def measure(hidden: list[int], repeats: int) -> dict[str, Any]:
    """Return the seconds of reading an update with and without checks, and the share of a round."""
    model = build_model("mlp", shape=(1, 28, 28), classes=10, hidden=hidden)
    sent = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    sizes = {"train": 100, "val": 10, "test": 20}
    reports = Declared(tasks.build("classification")).of_training((), sizes)
    schema = Schema(client=0, round=0, trees={UPDATE: sent}, numbers={REPORTS: reports})
    content = RecordDict(
        {
            UPDATE: to_record(sent),
            REPORTS: MetricRecord({"train_loss": 1.0, "steps": 1.0}),
            NOTE: ConfigRecord({"client": 0, "round": 0}),
        }
    )
    plain = seconds_of(lambda: from_record(content.array_records[UPDATE]), repeats)
    checked = seconds_of(lambda: schema.read(content), repeats)
    whole = flower_cost.measure(hidden, max(1, repeats // 3))
    parts = whole["seconds"]
    round_ = (
        parts["serialise"] + parts["combine"] + parts["flower"] + whole["clients"] * parts["client"]
    )
    return {
        "parameters": sum(tensor.numel() for tensor in sent.values()),
        "clients": whole["clients"],
        "seconds": {
            "read": round(plain, 5),
            "read and checked": round(checked, 5),
            "round": round(round_, 4),
        },
        "percent_of_a_round": round(100 * whole["clients"] * (checked - plain) / round_, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="Where to write the numbers.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    measured = {name: measure(hidden, given.repeats) for name, hidden in flower_cost.MODELS.items()}
    text = json.dumps(measured, indent=2)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
