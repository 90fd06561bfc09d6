"""What layers that replace others share: they take over parameters, buffers and hooks."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

L = TypeVar("L", bound=nn.Module)

_HOOKS = [name for name in vars(nn.Identity()) if name.startswith(("_forward", "_backward"))]


def has_hooks(layer: nn.Module) -> bool:
    """Return whether a layer has hooks, which may change its output."""
    return any(getattr(layer, hooks) for hooks in _HOOKS)


def take_hooks(new: L, old: nn.Module) -> L:
    """Make one layer call the hooks of another."""
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(old, hooks))
    return new


def adopt(new: nn.Module, old: nn.Module) -> None:
    """Make one layer use the parameters, buffers and hooks of another."""
    new._parameters.update(old._parameters)
    new._buffers.update(old._buffers)
    take_hooks(new, old)
