"""What layers that replace others share: they take over parameters, buffers, hooks and more."""

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


def take_additions(new: nn.Module, old: nn.Module) -> None:
    """Give a layer what users have added to the one that it replaces.

    These are attributes, parameters, buffers and layers.
    """
    for name, value in vars(old).items():
        # Other names are those of PyTorch itself.
        if not name.startswith("_"):
            vars(new).setdefault(name, value)
    for held in ("_parameters", "_buffers", "_modules"):
        for name, value in getattr(old, held).items():
            getattr(new, held).setdefault(name, value)
    new._non_persistent_buffers_set |= old._non_persistent_buffers_set


def adopt(new: nn.Module, old: nn.Module) -> None:
    """Make one layer use the parameters, buffers and hooks of another."""
    new._parameters.update(old._parameters)
    new._buffers.update(old._buffers)
    take_hooks(new, old)
