"""pfl-research (PyPI ``pfl``): its FederatedAveraging, simulated backend and in-memory datasets."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.protocol import Pass, Work, run_peer, wait_for


class WithLoss(nn.Module):
    """The model with the two methods that pfl requires of a PyTorch module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy of one batch."""
        return nn.functional.cross_entropy(self.model(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return a trivial metric. pfl always evaluates its first round, but the job does not."""
        return {"samples": Weighted(len(y), 1)}


class RoundDone(TrainingProcessCallback):
    """Call the clock at the end of each round."""

    def __init__(self, round_done: Callable[[], None], device: torch.device) -> None:
        self._round_done, self._device = round_done, device

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Mark the end of the round, and continue training."""
        wait_for(self._device)
        self._round_done()
        return False, Metrics()


def average(
    module: WithLoss,
    dataset: FederatedDataset,
    callback: TrainingProcessCallback,
    *,
    rounds: int,
    cohort: int,
    batch: int,
    epochs: int,
    lr: float,
) -> None:
    """Train a module by pfl's federated averaging, weighted by numbers of samples."""
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,
            train_cohort_size=cohort,
            val_cohort_size=None,
        ),
        SimulatedBackend(
            training_data=dataset, val_data=dataset, postprocessors=[WeightByDatapoints()]
        ),
        PyTorchModel(
            model=module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        ),
        NNTrainHyperParams(local_batch_size=batch, local_num_epochs=epochs, local_learning_rate=lr),
        callbacks=[callback],
        send_metrics_to_platform=False,
    )


def train(work: Work, stage: Pass, round_done: Callable[[], None]) -> dict[str, Tensor]:
    """Train as ``benchmarks.protocol.Train`` asks. pfl always uses the stored order of samples."""
    os.environ["PFL_PYTORCH_DEVICE"] = str(work.device)
    job = work.job
    x, y = work.data()
    module = WithLoss(work.model(stage))
    # pfl's own sampler visits users in order, which gives exactly the cohorts of
    # ``job.cohort_of``.
    users = {client: (x[client], y[client]) for client in range(job.clients)}
    average(
        module,
        FederatedDataset.from_slices(users, MinimizeReuseUserSampler(list(users))),
        RoundDone(round_done, work.device),
        rounds=stage.warmup + stage.rounds,
        cohort=job.cohort,
        batch=job.batch,
        epochs=job.epochs,
        lr=job.lr,
    )
    return {name: parameter.detach().cpu() for name, parameter in module.model.named_parameters()}


if __name__ == "__main__":
    run_peer(train, package="pfl")
