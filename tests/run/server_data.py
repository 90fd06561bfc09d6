"""A federation whose server holds validation and test data."""

from __future__ import annotations

import numpy as np

from equipoise import Federation

RNG = np.random.default_rng(4)


def clouds(count, shift=0.0):
    y = RNG.integers(0, 3, count)
    return np.eye(5)[y] * 2 + RNG.normal(size=(count, 5)) + shift, y


CLIENTS = clouds(120)
HELD = {"val": clouds(30), "test": clouds(40)}


def federation(**more):
    return Federation.from_arrays(
        *CLIENTS, clients=np.arange(120) % 6, classes=3, server=HELD, **more
    )
