"""Precomputed features: z of every sample of a chunk, for phases that do not train the features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from equipoise.client import Precomputed
from equipoise.engine.batches import Batches
from equipoise.engine.chunk import Chunk
from equipoise.engine.chunking import samples_a_pass
from equipoise.engine.data import DeviceData, at
from equipoise.engine.stack import first_rows, passes, tree_first_rows
from equipoise.tree import PERSONAL, Tree, in_parts

# Maximum size of z in bytes. This is enough for CIFAR-10 with 4096 features, and little memory on
# any machine that trains such a model. It is a constant, so that a run takes the same path on every
# machine.
_LARGEST = 1 << 30


def features_rest(chunk: Chunk, moving: frozenset[str]) -> bool:
    """Return whether z of a sample is constant while some of the chunk's parameters are trained.

    With personal features a sample has two z, and augmented samples change in every step.
    """
    touched = (
        name.removeprefix(PERSONAL)
        for name in chunk.params
        if name in moving or name.startswith(PERSONAL)
    )
    return (
        chunk.network.separable
        and not chunk.augment
        and not any(in_parts(name, "features") for name in touched)
    )


class FrozenFeatures:
    """z and targets of the samples of one chunk at a time, fetched like samples.

    Their memory is reused until more is needed; ``moves`` counts the reallocations.
    """

    _data: DeviceData
    _held: Tensor
    _y: Tensor
    _z: Tensor
    _type: torch.dtype

    def __init__(self) -> None:
        self.moves = 0
        self._room = 0
        self._like: Tensor | None = None

    def serves(self, chunk: Chunk, batches: Sequence[Batches]) -> bool:
        """Return whether computing z once saves work in these phases, and z is not too large."""
        if (np.diff(batches[0].sizes) > 0).any():
            # Clients are ordered by steps, which may differ from the order of their sizes.
            return False
        samples = int(batches[0].sizes.sum())
        looks = sum(int(own.samples().sum()) for own in batches)
        return (
            looks > samples
            and _room(samples) * self._z_of_one(chunk, batches[0]).nbytes <= _LARGEST
        )

    @torch.no_grad()
    def _z_of_one(self, chunk: Chunk, batches: Batches) -> Tensor:
        """Return z of one sample, to get its shape and type."""
        if self._like is None:
            network, x = chunk.network, chunk.data.inputs(batches.held[:1])
            self._like = network.resting_features(network.initial(), x)[0].to(network.dtype)
        return self._like

    @torch.no_grad()
    def fill(self, chunk: Chunk, batches: Batches) -> None:
        """Compute z of all samples of the clients, with their current features."""
        network, held, sizes = chunk.network, batches.held, batches.sizes
        self._make_room(chunk, batches)
        self._data = chunk.data
        self._held[: len(held)] = held
        self._y[: len(held)] = chunk.data.targets(held)
        params = {
            name: tensor for name, tensor in chunk.params.items() if not name.startswith(PERSONAL)
        }
        if not any(in_parts(name, "features") for name in params):
            # All clients have the same features, so their samples form one batch.
            sizes = sizes.sum(keepdims=True)
        first = np.cumsum(sizes) - sizes
        active = len(sizes)

        def of_one_client(own: Tree, x: Tensor) -> Tensor:
            return network.resting_features({**chunk.still, **own}, x, stacked=active > 1)

        for active, slots, inside in passes(sizes, samples_a_pass(network, len(sizes))):
            index = torch.from_numpy(first[:active, None] + slots).to(network.device)
            of_all = of_one_client if active == 1 else vmap(of_one_client)
            z = of_all(
                tree_first_rows(params, active), first_rows(chunk.data.inputs(held[index]), active)
            )
            if active == len(sizes):
                self._type = z.dtype
            real = torch.from_numpy(np.flatnonzero(inside)).to(network.device)
            self._z[index.flatten()[real]] = z.reshape(-1, *self._z.shape[1:])[real].to(
                self._z.dtype
            )

    def _make_room(self, chunk: Chunk, batches: Batches) -> None:
        samples = len(batches.held)
        if samples > self._room:
            self._room = _room(samples)
            self.moves += 1
            held, y, z = batches.held, chunk.data.y, self._z_of_one(chunk, batches)
            self._held = held.new_empty(self._room)
            self._y = torch.empty(self._room, *y.shape[1:], dtype=y.dtype, device=held.device)
            self._z = z.new_empty(self._room, *z.shape)

    def fetch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return z and the targets of samples by their index; see `equipoise.engine.batches`."""
        # The head must get z in the type that features return. Autocast lowers it only for a single
        # client.
        return at(self._z, index).to(self._type), at(self._y, index)

    def batch(self, z: Tensor, index: Tensor) -> Precomputed:
        """Return the batch of one client. Its samples are fetched if the loss reads them."""
        return Precomputed(z, lambda: self._data.inputs(at(self._held, index)))


def _room(samples: int) -> int:
    """Round up to a power of two, because every reallocation invalidates recorded steps."""
    return 1 << (samples - 1).bit_length()
