"""What all tests and doctests share."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

_WITH_TRITON = ("kernels", "lstm_kernels", "products")
collect_ignore = (
    [] if find_spec("triton") else [f"equipoise/models/{name}.py" for name in _WITH_TRITON]
)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests out of the user's cache directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EQUIPOISE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
