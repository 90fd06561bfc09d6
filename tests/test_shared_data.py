"""Real images, if available: MNIST in ``EQUIPOISE_DATA/mnist`` or beside the repository."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise import Federation, Training, train
from equipoise.optimizers import Sgd

HOME = (
    Path(os.environ.get("EQUIPOISE_DATA", Path(__file__).parents[2] / "shared" / "data")) / "mnist"
)
IMAGES, LABELS = HOME / "t10k-images-idx3-ubyte.gz", HOME / "t10k-labels-idx1-ubyte.gz"

pytestmark = pytest.mark.skipif(
    not (IMAGES.exists() and LABELS.exists()),
    reason=f"MNIST is not here: {IMAGES} and {LABELS.name} are needed",
)


def idx(path):
    """Read an idx file: two zero bytes, the type, the number of axes, their lengths, the values."""
    content = gzip.decompress(path.read_bytes())
    axes = content[3]
    shape = np.frombuffer(content, ">u4", count=axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


@pytest.fixture(scope="module")
def digits():
    """Forty clients with fifty images each; those of the second group are pale."""
    images, labels = (
        idx(IMAGES)[:2000].astype(np.float32) / 255,
        idx(LABELS)[:2000].astype(np.int64),
    )
    clients = np.arange(2000) % 40
    images[clients % 2 == 1] *= 0.5
    groups = {client: ("plain", "pale")[client % 2] for client in range(40)}
    return Federation.from_arrays(
        torch.from_numpy(images)[:, None], labels, clients=clients, groups=groups, classes=10
    )


def test_federated_averaging_learns_mnist_and_beats_clients_on_their_own(digits):
    settings = Training(rounds=12, epochs=2, batch_size=10, optimizer=Sgd(lr=0.1))
    shared = train(digits, method="fedavg", training=settings, seed=0).summary["results"]["global"][
        "seen"
    ]
    alone = train(digits, method="local", training=settings, seed=0).summary["results"]["personal"][
        "seen"
    ]
    assert shared["mean"] > 0.7
    assert shared["mean"] > alone["mean"] > 0.3
    assert set(shared["groups"]) == {"plain", "pale"}
