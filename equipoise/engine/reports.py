"""What clients report of their models and steps, beside the losses of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.engine.chunk import Chunk, Pace
from equipoise.engine.evaluation import Measured, launch_stacked
from equipoise.federation import Split
from equipoise.method import Reports
from equipoise.optimizers import gradient_weights
from equipoise.random import Purpose, choose, fold
from equipoise.tree import PERSONAL

if TYPE_CHECKING:
    from equipoise.engine.stacked import StackedEngine


@dataclass(frozen=True)
class Reporter:
    """The reports of the clients of one round.

    Attributes
    ----------
    engine : StackedEngine
        The engine.
    round : int
        The round (counted from 0).
    wanted : set of str
        The reports that are wanted. Only these are computed.
    """

    engine: StackedEngine
    round: int
    wanted: Set[str]

    def launch(
        self,
        when: str,
        chunk: Chunk,
        clients: NDArray[np.int64],
        known: Mapping[str, Measured] | None = None,
    ) -> Callable[[], Reports]:
        """Evaluate the models before or after local training on what reports look at.

        Parameters
        ----------
        when : {"before", "after"}
            How the names of the reports end.
        chunk : Chunk
            The clients with their models.
        clients : int array
            Their ids.
        known : mapping, optional
            What evaluation has measured of these models, by split.

        Returns
        -------
        callable
            Waits for a GPU, and returns loss and score.
        """
        launched: list[tuple[dict[str, str], Callable[[], Measured]]] = []
        score = self.engine.network.task.score
        for split, prefix in (("train", ""), ("val", "val_")):
            metrics = {f"{prefix}loss_{when}": "loss", f"{prefix}score_{when}": score}
            wanted = {name: metric for name, metric in metrics.items() if name in self.wanted}
            if not wanted:
                continue
            if measured := (known or {}).get(split):
                launched.append((wanted, partial(dict, measured)))
            else:
                launched.append((wanted, self._launch(chunk, *self._reported(split, clients))))
        nothing = np.full(len(clients), np.nan)

        def reports() -> Reports:
            found: Reports = {}
            for wanted, read in launched:
                measured = read()
                for name, metric in wanted.items():
                    found[name] = torch.from_numpy(measured.get(metric, nothing))
            return found

        return reports

    def of_steps(
        self, paces: Sequence[Pace], work: Sequence[NDArray[np.int64]], proximal: float
    ) -> Reports:
        """Return the learning rate of the first phase, and the weight of gradients.

        Parameters
        ----------
        paces : sequence of Pace
            The pace of each phase.
        work : sequence of int arrays
            The steps of each client, one array a phase.
        proximal : float
            The proximal term of the local rule.
        """
        reports: Reports = {}
        if "lr" in self.wanted:
            reports["lr"] = _rates(paces[0], len(work[0])).clone()
        if "gradient_weight" in self.wanted:
            reports["gradient_weight"] = _gradient_weight(paces, work, proximal)
        return reports

    def evaluate(self, chunk: Chunk, clients: NDArray[np.int64]) -> dict[str, Measured]:
        """Return loss and metrics of clients' models on ``val`` and ``test``, for evaluation."""
        return {
            split: self._launch(chunk, self.engine.view.split(split), clients, evaluation=True)()
            for split in ("val", "test")
        }

    def _launch(
        self, chunk: Chunk, samples: Split, clients: NDArray[np.int64], *, evaluation: bool = False
    ) -> Callable[[], Measured]:
        """Evaluate each client's model as it is now.

        It has the parts that the client keeps, but no second copies (``personal.``). Only for
        ``evaluation`` there is more than the loss and the task's own metrics.
        """
        own = {name: stack for name, stack in chunk.params.items() if not name.startswith(PERSONAL)}
        network, data = self.engine.network, self.engine.data
        more = (self.engine.metrics, self.engine.counting) if evaluation else ((), None)
        return launch_stacked(
            network, data, own, chunk.still, samples, clients, len(clients), *more
        )

    def _reported(self, split: str, clients: NDArray[np.int64]) -> tuple[Split, NDArray[np.int64]]:
        """Return the samples that clients' reports look at, and the clients' numbers in it.

        Reports on validation data always use all samples. Generalization gaps compare them with
        another model, which is evaluated on all samples or in another round.
        """
        samples, limit = self.engine.view.split(split), self.engine.training.report_samples
        if limit is None or split == "val":
            return samples, clients
        own = [samples.of(int(client)) for client in clients]
        keys = [
            fold(self.engine.seed, self.round, int(client), Purpose.REPORT) for client in clients
        ]
        drawn = [
            held[choose(key, len(held), min(limit, len(held)))]
            for key, held in zip(keys, own, strict=True)
        ]
        return Split.from_lists(drawn), np.arange(len(clients))


def _rates(pace: Pace, clients: int) -> Tensor:
    """Return the learning rate of each client."""
    return torch.as_tensor(pace.lr, dtype=torch.float64).cpu().expand(clients)


def _gradient_weight(
    paces: Sequence[Pace], work: Sequence[NDArray[np.int64]], proximal: float
) -> Tensor:
    """Return the sum of the weights with which gradients enter each client's update."""
    weights = [
        gradient_weights(pace.optimizer, steps, proximal * _rates(pace, len(steps)).numpy())
        for pace, steps in zip(paces, work, strict=True)
    ]
    return torch.from_numpy(np.sum(weights, axis=0))
