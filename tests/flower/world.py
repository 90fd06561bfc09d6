"""A small federation for real processes: four silos, an experiment, its app and its result."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from flwr.app import Error, Message

from equipoise.flower.new import new_app
from equipoise.flower.wire import settings_of
from equipoise.run.files import load_tensors
from tests.flower.loop import own_nodes, run_on_loop, write_experiment, write_silos
from tests.run.small import rows_of

TOLERANCE = 1e-9
# Far more than an exchange takes on an idle machine (six to ten seconds).
PATIENCE = 600
OWN = Path(__file__).with_name("own_methods.py")
# The generated app, with user-defined methods, and a client that can be made to send NaN.
SABOTAGE = """
import own_methods
from equipoise.flower.wire import from_record, to_record

own_methods.register_all()
_train = client._registered_funcs["train.default"]


def _sabotaged(message, context):
    reply = _train(message, context)
    if context.node_config.get("nan-in-round", 0) == message.content["settings"]["round"] + 1:
        tree = from_record(reply.content["update"])
        next(iter(tree.values())).fill_(float("nan"))
        reply.content["update"] = to_record(tree)
    return reply


client._registered_funcs["train.default"] = _sabotaged
"""


def world(folder, **sections):
    """Four silos, an experiment on them and its app."""
    write_silos(folder / "silos")
    path = write_experiment(
        folder,
        **{
            "flower": {"timeout": PATIENCE},
            "evaluation": {"every": 10},
            "training": {"rounds": 2},
            **sections,
        },
    )
    new_app(folder / "app", path)
    shutil.copy(OWN, folder / "app")
    with (folder / "app" / "app.py").open("a") as file:
        file.write(SABOTAGE)
    return path


def replayed(path, folder, rows):
    """Run in this process without the clients that were left out there."""
    gone = {(row["round"] - 1, int(client)) for row in rows for client in row.get("left_out", {})}

    def tamper(node, message, reply):
        client, kind = int(node["data"][-1]), message.metadata.message_type
        if kind == "train" and (settings_of(message.content)["round"], client) in gone:
            return Message(Error(code=0, reason="gone"), reply_to=message)
        return reply

    nodes = [
        {**node, "memory": str(folder / "replayed" / str(c))}
        for c, node in enumerate(own_nodes(folder))
    ]
    return run_on_loop(path, nodes, tamper=tamper)[0]


def differ(one, other):
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).norm() / one[n].norm().clamp_min(1e-30)) for n in one)


def assert_same_run(out, expected, log=""):
    """Compare a run directory with a run in this process."""
    assert (out / "summary.json").exists(), log[-3000:]
    model, note = load_tensors(out / "model.safetensors")
    chosen = expected.trainer.selected()
    assert note["round"] == chosen.round
    assert differ(chosen.shared, model) <= TOLERANCE
    ours, theirs = rows_of(out), list(expected.trainer.metrics)
    key = ("round", "model", "split", "client")
    absent = {
        (row["round"], int(c))
        for row in rows_of(out, "rounds")
        for c in row.get("not_evaluated", {})
    }
    theirs = [row for row in theirs if (row["round"], row["client"]) not in absent]
    assert [[row[k] for k in key] for row in ours] == [[row[k] for k in key] for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for name in ("loss", "accuracy"):
            assert math.isclose(one[name], other[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
