"""The Flower client, in a separate module that Ray's worker processes can import."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from benchmarks.peers.plain import sample_orders, train_client
from benchmarks.protocol import Job, Pass, Work

THREADS_PER_ACTOR = 1

app = ClientApp()


@lru_cache(maxsize=1)
def prepared(directory: str, stage_name: str) -> tuple[Job, Pass, nn.Module, tuple[Tensor, Tensor]]:
    """Load model and data once per worker process and not for every message."""
    torch.set_num_threads(THREADS_PER_ACTOR)
    job = Job.read(Path(directory))
    stage: Pass = getattr(job, stage_name)
    work = Work(job, Path(directory), torch.device("cpu"))
    return job, stage, work.model(stage), work.data()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the global model on the client in the message, and send back the result."""
    config = message.content["config"]
    job, stage, model, (x, y) = prepared(config["job"], config["stage"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = config["client"]
    orders = sample_orders(job, stage, 1, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr)
    train_client(job, model, optimizer, x[client], y[client], None if orders is None else orders[0])
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y[client])}),
    }
    return Message(RecordDict(content), reply_to=message)
