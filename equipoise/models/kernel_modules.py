"""Modules of GPU kernels, imported when they are first needed and only if Triton works."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


@cache
def module_with_triton(name: str, device: torch.device) -> Any:
    """Import a module of GPU kernels when it is first needed; ``None`` if Triton does not work.

    Triton takes long to import, and builds of PyTorch for CPUs do not have it.
    """
    if find_spec("triton") is None or not import_module("equipoise.models.kernels").work_on(device):
        return None
    return import_module(f"equipoise.models.{name}")
