"""Copies to the host: read late, and as they were when they were started."""

from __future__ import annotations

import torch

from equipoise.host_copy import HostCopy
from tests.engine.gpu import needs_gpu


def test_a_tensor_of_the_host_is_read_as_it_is():
    values = torch.tensor([1.0, 2.0])
    assert HostCopy(values).read() is values


@needs_gpu
def test_a_copy_has_the_values_that_the_gpu_has_computed_by_then():
    total = torch.zeros(1000, device="cuda")
    copies = []
    for _ in range(50):
        total = total + torch.ones(1000, device="cuda")
        copies.append(HostCopy(total))
    for index, copy in enumerate(copies):
        found = copy.read()
        assert found.device.type == "cpu"
        assert found.tolist() == [index + 1.0] * 1000
