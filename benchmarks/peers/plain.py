"""One client's local training in plain PyTorch, for the peers that do not provide it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.protocol import Job, Pass


def sample_orders(job: Job, stage: Pass, count: int, device: torch.device) -> Tensor | None:
    """Draw the order of samples for ``count`` clients and all epochs; ``None`` for stored order."""
    if not stage.shuffle:
        return None
    return torch.rand(count, job.epochs, job.samples, device=device).argsort(dim=-1)


def train_client(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    order: Tensor | None,
) -> None:
    """Train the model in place on one client's samples; ``order`` has one row per epoch."""
    for epoch in range(job.epochs):
        epoch_x, epoch_y = (x, y) if order is None else (x[order[epoch]], y[order[epoch]])
        for batch_x, batch_y in zip(
            epoch_x.split(job.batch), epoch_y.split(job.batch), strict=True
        ):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch_x), batch_y).backward()
            optimizer.step()
