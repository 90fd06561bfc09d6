"""Small files with known contents, in the formats of MNIST, EMNIST and CIFAR."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def idx_bytes(values, kind=0x08, code="B"):
    """Write an array in idx format with the struct module only."""
    head = bytes([0, 0, kind, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + struct.pack(f">{values.size}{code}", *values.flatten().tolist())


def write_idx_pair(images, labels, folder: Path, names, compress=True):
    """Write images and labels under two names, optionally compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    for values, name in zip((images, labels), names, strict=True):
        content = idx_bytes(np.asarray(values))
        if compress:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


# The key of the labels, by number of classes.
LABELS = {10: b"labels", 100: b"fine_labels"}


def cifar_batch(classes, first, count=4):
    """Images whose byte at each colour, row and column is known, and increasing labels."""
    colour, row, column = np.indices((3, 32, 32))
    images = (first + np.arange(count))[:, None, None, None] + 40 * colour + 3 * row + column
    return {
        b"batch_label": b"some batch",
        LABELS[classes]: [(first + i) % classes for i in range(count)],
        b"data": images.astype(np.uint8).reshape(count, 3072),
    }
