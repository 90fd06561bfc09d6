"""Flower (PyPI ``flwr[simulation]``): its own FedAvg strategy on its Ray simulation, CPU only."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable

# Read by both libraries when they are imported.
os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor

from benchmarks.peers.flower_client import THREADS_PER_ACTOR, app
from benchmarks.protocol import Pass, Work, run_peer

logging.getLogger("flwr").setLevel(logging.WARNING)


class FedAvgInTurn(FedAvg):
    """Flower's FedAvg with the job's cohorts, and a call after each round."""

    def __init__(self, work: Work, stage: Pass, round_done: Callable[[], None]) -> None:
        super().__init__(fraction_evaluate=0.0)
        self._work, self._stage, self._round_done = work, stage, round_done

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask each client of this round's cohort to train the global model."""
        job = self._work.job
        while len(nodes := sorted(grid.get_node_ids())) < job.clients:
            time.sleep(0.05)
        for client in job.cohort_of(server_round - 1):
            order = ConfigRecord(
                {"job": str(self._work.directory), "stage": self._stage.name, "client": client}
            )
            content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: order})
            yield Message(
                content=content, message_type=MessageType.TRAIN, dst_node_id=nodes[client]
            )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average as Flower does, after checking that every client answered."""
        received = list(replies)
        failed = [message.error.reason for message in received if message.has_error()]
        if failed or len(received) != self._work.job.cohort:
            raise RuntimeError(
                f"{len(received)} clients answered, {len(failed)} with an error: {failed[:1]}"
            )
        averaged = super().aggregate_train(server_round, received)
        self._round_done()
        return averaged


def train(work: Work, stage: Pass, round_done: Callable[[], None]) -> dict[str, Tensor]:
    """Train as ``benchmarks.protocol.Train`` asks."""
    final: dict[str, Tensor] = {}
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvgInTurn(work, stage, round_done)
        initial = ArrayRecord(work.model(stage).state_dict())
        result = strategy.start(grid, initial, num_rounds=stage.warmup + stage.rounds)
        final.update(result.arrays.to_torch_state_dict())

    actors = max(1, work.job.threads // THREADS_PER_ACTOR)
    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=work.job.clients,
        backend_config={
            "init_args": {"num_cpus": actors * THREADS_PER_ACTOR},
            "client_resources": {"num_cpus": THREADS_PER_ACTOR, "num_gpus": 0.0},
        },
    )
    return {name: final[name] for name, _ in work.model(stage).named_parameters()}


if __name__ == "__main__":
    run_peer(
        train,
        package="flwr",
        processes=lambda job: f"as Ray actors of {THREADS_PER_ACTOR} thread each",
    )
