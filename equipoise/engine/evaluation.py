"""Loss and metrics of one model on many clients, or of many clients' own models.

Loss and score are means over a client's samples. Metrics of :mod:`equipoise.metrics` are functions
of all outputs of a client. Outputs are kept until all of a client's, or of a chunk of clients, are
there, and no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from equipoise.attributes import Counting
from equipoise.engine.chunking import samples_a_pass
from equipoise.engine.data import DeviceData
from equipoise.engine.network import Network
from equipoise.engine.stack import first_rows, passes, tree_first_rows
from equipoise.federation import Split
from equipoise.host_copy import HostCopy
from equipoise.metrics import Metric, measure
from equipoise.models.passes import Forward
from equipoise.tree import Tree

Measured = dict[str, NDArray[np.float64]]
_SHARED = Forward(train=False, shared=True)


def evaluate_shared(
    network: Network,
    data: DeviceData,
    params: Tree,
    split: Split,
    clients: NDArray[np.int64],
    metrics: Sequence[Metric] = (),
    counting: Counting | None = None,
) -> Measured:
    """Evaluate one model on every client's own samples.

    Samples of all clients are evaluated in large batches and averaged by client afterwards, in
    float64. A sample that several clients hold is evaluated once, and clients that hold the same
    samples are averaged once. A model whose outputs depend on the batch is evaluated on all samples
    of one client at a time.

    Parameters
    ----------
    network, data
        The model and the samples.
    params : Tree
        Its parameters and buffers.
    split : Split
        The split with the samples.
    clients : int array
        The clients.
    metrics : sequence of Metric
        Metrics of each client's outputs besides the loss and the task's own.
    counting : Counting, optional
        Counts each client's samples by their attributes.

    Returns
    -------
    dict of float64 arrays
        One value per client, NaN where a client holds no sample. Counts by attributes that a client
        withholds are NaN, too.
    """
    return launch_shared(network, data, params, split, clients, metrics, counting)()


@torch.no_grad()
def launch_shared(
    network: Network,
    data: DeviceData,
    params: Tree,
    split: Split,
    clients: NDArray[np.int64],
    metrics: Sequence[Metric] = (),
    counting: Counting | None = None,
) -> Callable[[], Measured]:
    """Do the same as :func:`evaluate_shared`, but do not wait for a GPU.

    Returns
    -------
    callable
        Waits for the values, and returns them. The host waits earlier for metrics and counts, which
        it computes itself.
    """
    if network.batchwise:
        sizes = split.offsets[clients + 1] - split.offsets[clients]
        together = max(1, samples_a_pass(network, 1) // max(1, sizes.max(initial=0)))
        return launch_stacked(
            network, data, {}, params, split, clients, together, metrics, counting
        )
    order = _Order.of(data, split, clients)
    pieces: dict[str, list[Tensor]] = {}
    wanted = _Collected(metrics, counting, split, clients)
    if not len(order.positions):
        # Some models do not accept an empty batch.
        empty = {name: np.full(len(clients), np.nan) for name in network.measures or ("loss",)}
        return lambda: empty | wanted.values
    for part in order.positions.split(samples_a_pass(network, 1)):
        x, y = data.fetch(part)
        output = network.apply(params, x, _SHARED).output
        if wanted.any and order.where is None:
            wanted.add(output, y)
        for name, values in network.task.metrics(output, y).items():
            pieces.setdefault(name, []).append(values.double())
    # One copy to the host for all values.
    names, copied = list(pieces), HostCopy(torch.stack([torch.cat(v) for v in pieces.values()]))
    if wanted.any and order.where is not None:
        _collect_repeated(network, data, params, wanted)
    of_outputs = wanted.values

    def read() -> Measured:
        of_samples = copied.read().numpy()
        means = {n: order.means(values) for n, values in zip(names, of_samples, strict=True)}
        return {**means, **of_outputs}

    return read


@dataclass(frozen=True)
class _Order:
    """The samples that are evaluated for some clients, and whose they are.

    Attributes
    ----------
    positions : Tensor
        The samples, each once. On a GPU if it holds all samples: copying positions for every batch
        would make the host wait for the batch before.
    sizes : int array
        Numbers of samples of clients, each list of samples once.
    where : int array or None
        The place in ``positions`` of each client's samples, if clients share samples.
    same : int array or None
        The place in ``sizes`` of each client, if clients hold the same samples.
    """

    positions: Tensor
    sizes: NDArray[np.int64]
    where: NDArray[np.int64] | None = None
    same: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, data: DeviceData, split: Split, clients: NDArray[np.int64]) -> _Order:
        """Return the order of clients. That of all clients is kept for later evaluations."""
        everyone = len(clients) == split.clients and bool((np.diff(clients) == 1).all())
        if everyone and split in data.orders:
            kept: _Order = data.orders[split]
            return kept
        firsts, same, where = clients, None, None
        if split.repeats:
            firsts, same = np.unique(split.alike[clients], return_inverse=True)
        sizes = split.offsets[firsts + 1] - split.offsets[firsts]
        positions = split.indices if everyone and same is None else _gather(split, firsts, sizes)
        if split.repeats:
            positions, where = np.unique(positions, return_inverse=True)
        placed = torch.from_numpy(positions)
        order = cls(placed.to(data.device) if data.on_gpu else placed, sizes, where, same)
        if everyone:
            data.orders[split] = order
        return order

    def means(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean of each client from the values of samples in ``positions``."""
        of_clients = _mean_by_client(
            values if self.where is None else values[self.where], self.sizes
        )
        return of_clients if self.same is None else of_clients[self.same]


class _Collected:
    """Collects outputs client by client, and computes metrics when a client is complete.

    Parameters
    ----------
    metrics : sequence of Metric
        The metrics.
    counting : Counting or None
        Counts samples by attributes.
    split : Split
        The split with the samples.
    clients : int array
        The clients.

    Attributes
    ----------
    any : bool
        Whether outputs are needed at all.
    sizes : int array
        Number of samples of each client.
    values : dict of float64 arrays
        One value per client, NaN where a client holds no sample or the metric is undefined.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        counting: Counting | None,
        split: Split,
        clients: NDArray[np.int64],
    ) -> None:
        self.metrics, self.counting, self.split, self.clients = metrics, counting, split, clients
        self.any = bool(metrics) or counting is not None
        self.sizes = split.offsets[clients + 1] - split.offsets[clients]
        self.values: Measured = {metric.name: np.full(len(clients), np.nan) for metric in metrics}
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._waiting = iter(np.flatnonzero(self.sizes).tolist() if self.any else ())
        self._next()

    def _next(self) -> None:
        self._outputs.clear()
        self._targets.clear()
        self._client = next(self._waiting, None)
        self._missing = 0 if self._client is None else int(self.sizes[self._client])

    def add(self, output: Tensor, y: Tensor) -> None:
        """Add the outputs and targets of the next samples, which may be of several clients."""
        # Copy once; clients get views of the copy.
        output, y = output.cpu(), y.cpu()
        begin = 0
        while begin < len(output) and self._client is not None:
            end = min(begin + self._missing, len(output))
            self._outputs.append(output[begin:end])
            self._targets.append(y[begin:end])
            self._missing -= end - begin
            begin = end
            if not self._missing:
                self.measure(self._client, self._outputs, self._targets)
                self._next()

    def measure(self, position: int, outputs: list[Tensor], targets: list[Tensor]) -> None:
        """Compute the metrics of the client at a position of ``clients``."""
        output, y, client = torch.cat(outputs), torch.cat(targets), int(self.clients[position])
        found = measure(self.metrics, output, y, client)
        if self.counting is not None:
            found |= self.counting(output, y, self.split.of(client))
        for name, value in found.items():
            self.values.setdefault(name, np.full(len(self.clients), np.nan))[position] = value


def _collect_repeated(network: Network, data: DeviceData, params: Tree, wanted: _Collected) -> None:
    """Compute metrics of clients that share samples with others, one client at a time.

    Clients that hold the same samples in the same order, such as the test samples of a group, are
    measured once.
    """
    first: dict[bytes, int] = {}
    for position in np.flatnonzero(wanted.sizes).tolist():
        held = wanted.split.of(int(wanted.clients[position]))
        same = first.setdefault(held.tobytes(), position)
        if same != position:
            for values in wanted.values.values():
                values[position] = values[same]
            continue
        outputs, targets = [], []
        for part in torch.from_numpy(held).split(samples_a_pass(network, 1)):
            x, y = data.fetch(part)
            outputs.append(network.apply(params, x, _SHARED).output.cpu())
            targets.append(y.cpu())
        wanted.measure(position, outputs, targets)


def _gather(
    split: Split, clients: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the samples of clients, one client after the other."""
    ends = np.cumsum(sizes)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - sizes, sizes)
    return split.indices[np.repeat(split.offsets[clients], sizes) + within]


def _mean_by_client(values: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    means = np.full(len(sizes), np.nan)
    holders = np.flatnonzero(sizes)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    means[holders] = np.add.reduceat(values, starts[holders]) / sizes[holders]
    return means


def evaluate_stacked(
    network: Network,
    data: DeviceData,
    params: Tree,
    still: Tree,
    split: Split,
    clients: NDArray[np.int64],
    chunk: int,
    metrics: Sequence[Metric] = (),
    counting: Counting | None = None,
) -> Measured:
    """Evaluate every client's own model on its own samples.

    Parameters
    ----------
    network, data, split, clients, metrics, counting
        As in :func:`evaluate_shared`.
    params : Tree
        Tensors that differ between clients, stacked in the order of ``clients``.
    still : Tree
        Tensors that are the same for all clients.
    chunk : int
        Number of clients per chunk.

    Returns
    -------
    dict of float64 arrays
        One value per client, NaN where a client holds no sample.
    """
    return launch_stacked(network, data, params, still, split, clients, chunk, metrics, counting)()


@torch.no_grad()
def launch_stacked(
    network: Network,
    data: DeviceData,
    params: Tree,
    still: Tree,
    split: Split,
    clients: NDArray[np.int64],
    chunk: int,
    metrics: Sequence[Metric] = (),
    counting: Counting | None = None,
) -> Callable[[], Measured]:
    """Do the same as :func:`evaluate_stacked`, but do not wait for the last sums of a GPU.

    Returns
    -------
    callable
        As for :func:`launch_shared`.
    """
    sizes = split.offsets[clients + 1] - split.offsets[clients]
    order = np.argsort(-sizes, kind="stable")
    order = order[sizes[order] > 0]
    result: Measured = {"loss": np.full(len(clients), np.nan)}
    of_chunks: list[dict[str, Tensor]] = []
    for start in range(0, len(order), chunk):
        members = order[start : start + chunk]
        where = torch.from_numpy(members).to(network.device, non_blocking=True)
        own = {name: stack[where] for name, stack in params.items()}
        wanted = _Collected(metrics, counting, split, clients[members])
        of_chunks.append(_sums_of_chunk(network, data, own, still, wanted))
        for name in of_chunks[-1]:
            result.setdefault(name, np.full(len(clients), np.nan))
        for name, values in wanted.values.items():
            result.setdefault(name, np.full(len(clients), np.nan))[members] = values
    if not of_chunks:
        return lambda: result
    # Copied to the host at the end, so that it need not wait for every chunk.
    names = list(of_chunks[0])
    copied = HostCopy(torch.stack([torch.cat([own[name] for own in of_chunks]) for name in names]))

    def read() -> Measured:
        for name, values in zip(names, copied.read().numpy(), strict=True):
            result[name][order] = values / sizes[order]
        return result

    return read


def _sums_of_chunk(
    network: Network, data: DeviceData, params: Tree, still: Tree, wanted: _Collected
) -> dict[str, Tensor]:
    """Return sums of the task's metrics over samples, for clients ordered by decreasing size.

    Metrics of all outputs of a client are measured on the way.
    """
    split, clients, sizes = wanted.split, wanted.clients, wanted.sizes
    active = len(clients)
    together = active * int(sizes[0]) if network.batchwise else samples_a_pass(network, active)

    def of_one_client(
        own: Tree, x: Tensor, y: Tensor, kept: Tensor
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        forward = Forward(train=False, mask=kept, stacked=active > 1)
        output = network.apply({**still, **own}, x, forward).output
        return network.task.metrics(output, y), [output] if wanted.any else []

    sums: dict[str, Tensor] = {}
    outputs: list[list[Tensor]] = [[] for _ in clients]
    targets: list[list[Tensor]] = [[] for _ in clients]
    left = sizes.copy()
    for active, slots, inside in passes(sizes, together):
        positions = split.indices[split.offsets[clients[:active], None] + slots]
        x, y = data.fetch(torch.from_numpy(positions))
        kept = torch.from_numpy(inside).to(network.device, non_blocking=True)
        of_all = of_one_client if active == 1 else vmap(of_one_client)
        measured, answered = of_all(
            tree_first_rows(params, active),
            first_rows(x, active),
            first_rows(y, active),
            first_rows(kept, active),
        )
        for name, values in measured.items():
            total = sums.setdefault(
                name, torch.zeros(len(clients), dtype=torch.float64, device=network.device)
            )
            total[:active] += torch.where(kept, values.double().view(active, -1), 0.0).sum(1)
        left[:active] -= inside.sum(1)
        for output in answered:
            found, asked = (output if active > 1 else output.unsqueeze(0)).cpu(), y.cpu()
            for position in range(active):
                # Index instead of slice, to copy and not keep the padding of the pass in memory.
                own = torch.from_numpy(inside[position])
                outputs[position].append(found[position][own])
                targets[position].append(asked[position][own])
                if not left[position]:
                    wanted.measure(position, outputs[position], targets[position])
                    outputs[position].clear()
                    targets[position].clear()
    return sums
