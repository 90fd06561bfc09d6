"""Modules of GPU kernels, imported when they are first needed and only if Triton works."""

from __future__ import annotations

import warnings
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
    return None if why_not(device) else import_module(f"equipoise.models.{name}")


@cache
def why_not(device: torch.device) -> str | None:
    """Return why GPU kernels cannot be used on a device; ``None`` if they can.

    The first call warns if they cannot: steps may then take many times as long.
    """
    if find_spec("triton") is None:
        reason = "Triton is not installed"
    elif (reason := import_module("equipoise.models.kernels").failure_on(device)) is None:
        return None
    warnings.warn(f"GPU kernels are not used, and steps will be slower: {reason}", stacklevel=2)
    return reason
