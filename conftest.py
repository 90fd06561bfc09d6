"""What all tests and doctests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

_WITH_TRITON = (
    "convolution_kernels",
    "convolutions",
    "factored",
    "hash_kernels",
    "index_kernels",
    "kernel_tools",
    "kernels",
    "lstm_kernels",
    "norm_kernels",
    "norms",
    "products",
    "row_kernels",
    "stack_kernels",
    "update_kernels",
)
collect_ignore = (
    [] if find_spec("triton") else [f"equipoise/models/{name}.py" for name in _WITH_TRITON]
)
# Each peer runs in an environment of its own.
collect_ignore.append("benchmarks/peers")
if not torch.cuda.is_available():
    # The kernels run in Triton's interpreter then. It must be known before they are defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from looking at a million objects of modules and tests.

    They live until the end. Looking through them takes half a second, and happens hundreds of
    times.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Let Python clean up at its end; Triton's library complains otherwise."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests out of the user's cache directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EQUIPOISE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
