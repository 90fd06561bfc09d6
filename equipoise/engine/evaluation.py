"""Loss and metrics of one model on many clients, or of many clients' own models."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from equipoise.engine.chunking import samples_a_pass
from equipoise.engine.data import DeviceData
from equipoise.engine.network import Network
from equipoise.engine.stack import first_rows, passes, tree_first_rows
from equipoise.federation import Split
from equipoise.models.layers import Forward
from equipoise.tree import Tree

Measured = dict[str, NDArray[np.float64]]


@torch.no_grad()
def evaluate_shared(
    network: Network, data: DeviceData, params: Tree, split: Split, clients: NDArray[np.int64]
) -> Measured:
    """Evaluate one model on every client's own samples.

    Samples of all clients are evaluated in large batches and averaged by client afterwards, in
    float64. A sample that several clients hold is evaluated once. A model whose outputs depend on
    the batch is evaluated on all samples of one client at a time.

    Parameters
    ----------
    network, data
        The model and the samples.
    params : Tree
        Its parameters and buffers.
    split : Split
        Whose samples.
    clients : int array
        Which clients.

    Returns
    -------
    dict of float64 arrays
        One value a client, NaN where a client holds no sample.
    """
    sizes = split.offsets[clients + 1] - split.offsets[clients]
    if network.batchwise:
        together = max(1, samples_a_pass(network, 1) // max(1, sizes.max(initial=0)))
        return evaluate_stacked(network, data, {}, params, split, clients, together)
    positions, where = _gather(split, clients, sizes), None
    if split.repeats:
        positions, where = np.unique(positions, return_inverse=True)
    pieces: dict[str, list[Tensor]] = {}
    for part in torch.from_numpy(positions).split(samples_a_pass(network, 1)):
        x, y = data.fetch(part)
        output = network.apply(params, x, Forward(train=False)).output
        for name, values in network.task.metrics(output, y).items():
            pieces.setdefault(name, []).append(values.double())
    if not pieces:
        return {"loss": np.full(len(clients), np.nan)}
    measured = {name: torch.cat(values).cpu().numpy() for name, values in pieces.items()}
    return {
        name: _mean_by_client(values if where is None else values[where], sizes) for name, values in measured.items()
    }


def _gather(split: Split, clients: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """List the samples of clients, one client after the other."""
    if len(clients) == split.clients and (np.diff(clients) == 1).all():
        return split.indices
    ends = np.cumsum(sizes)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - sizes, sizes)
    return split.indices[np.repeat(split.offsets[clients], sizes) + within]


def _mean_by_client(values: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    means = np.full(len(sizes), np.nan)
    holders = np.flatnonzero(sizes)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    means[holders] = np.add.reduceat(values, starts[holders]) / sizes[holders]
    return means


@torch.no_grad()
def evaluate_stacked(
    network: Network, data: DeviceData, params: Tree, still: Tree, split: Split, clients: NDArray[np.int64], chunk: int
) -> Measured:
    """Evaluate every client's own model on its own samples.

    Parameters
    ----------
    network, data, split, clients
        As in :func:`evaluate_shared`.
    params : Tree
        What differs between clients, stacked in the order of ``clients``.
    still : Tree
        What does not.
    chunk : int
        How many clients to look at together.

    Returns
    -------
    dict of float64 arrays
        One value a client, NaN where a client holds no sample.
    """
    sizes = split.offsets[clients + 1] - split.offsets[clients]
    order = np.argsort(-sizes, kind="stable")
    order = order[sizes[order] > 0]
    result: Measured = {"loss": np.full(len(clients), np.nan)}
    for start in range(0, len(order), chunk):
        members = order[start : start + chunk]
        where = torch.from_numpy(members).to(network.device)
        own = {name: stack[where] for name, stack in params.items()}
        for name, sums in _sums_of_chunk(network, data, own, still, split, clients[members], sizes[members]).items():
            result.setdefault(name, np.full(len(clients), np.nan))[members] = sums.cpu().numpy() / sizes[members]
    return result


def _sums_of_chunk(
    network: Network,
    data: DeviceData,
    params: Tree,
    still: Tree,
    split: Split,
    clients: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> dict[str, Tensor]:
    """Sum the metrics of each client's samples, for clients ordered by falling number of samples."""
    active = len(clients)
    together = active * int(sizes[0]) if network.batchwise else samples_a_pass(network, active)

    def of_one_client(own: Tree, x: Tensor, y: Tensor, kept: Tensor) -> dict[str, Tensor]:
        forward = Forward(train=False, mask=kept, stacked=active > 1)
        output = network.apply({**still, **own}, x, forward).output
        return network.task.metrics(output, y)

    sums: dict[str, Tensor] = {}
    for active, slots, inside in passes(sizes, together):
        positions = split.indices[split.offsets[clients[:active], None] + slots]
        x, y = data.fetch(torch.from_numpy(positions))
        kept = torch.from_numpy(inside).to(network.device)
        of_all = of_one_client if active == 1 else vmap(of_one_client)
        measured = of_all(
            tree_first_rows(params, active), first_rows(x, active), first_rows(y, active), first_rows(kept, active)
        )
        for name, values in measured.items():
            total = sums.setdefault(name, torch.zeros(len(clients), dtype=torch.float64, device=network.device))
            total[:active] += torch.where(kept, values.double().view(active, -1), 0.0).sum(1)
    return sums
