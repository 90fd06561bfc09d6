"""A plain PyTorch loop: one model, one optimizer, one client after another.

The results of other peers are compared with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.peers.plain import sample_orders, train_client
from benchmarks.protocol import Pass, Work, run_peer, wait_for


def train(work: Work, stage: Pass, round_done: Callable[[], None]) -> dict[str, Tensor]:
    """Train as ``benchmarks.protocol.Train`` asks."""
    job = work.job
    x, y = work.data()
    model = work.model(stage)
    local = [
        tensor for tensor in model.state_dict(keep_vars=True).values() if tensor.is_floating_point()
    ]
    shared = [tensor.detach().clone() for tensor in local]
    # Plain SGD has no state, so one optimizer is used for all clients.
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr)
    for round_ in range(stage.warmup + stage.rounds):
        cohort = job.cohort_of(round_)
        orders = sample_orders(job, stage, len(cohort), work.device)
        samples = sum(len(y[client]) for client in cohort)
        average = [torch.zeros_like(tensor) for tensor in shared]
        for place, client in enumerate(cohort):
            with torch.no_grad():
                torch._foreach_copy_(local, shared)
            train_client(
                job,
                model,
                optimizer,
                x[client],
                y[client],
                None if orders is None else orders[place],
            )
            with torch.no_grad():
                torch._foreach_add_(average, local, alpha=len(y[client]) / samples)
        shared = average
        wait_for(work.device)
        round_done()
    with torch.no_grad():
        torch._foreach_copy_(local, shared)
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    run_peer(train)
