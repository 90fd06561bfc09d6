"""One client's local training written in plain PyTorch, for the peers that leave it to their user."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.protocol import Job, Pass


def sample_orders(job: Job, stage: Pass, count: int, device: torch.device) -> Tensor | None:
    """Draw the order of samples for ``count`` clients and every epoch at once; ``None`` keeps the stored order."""
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
    """Train the model in place on one client's samples; row ``e`` of ``order`` is the order of epoch ``e``."""
    for epoch in range(job.epochs):
        epoch_x, epoch_y = (x, y) if order is None else (x[order[epoch]], y[order[epoch]])
        for batch_x, batch_y in zip(
            epoch_x.split(job.batch), epoch_y.split(job.batch), strict=True
        ):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch_x), batch_y).backward()
            optimizer.step()
