"""Losses that replace the task's own loss in training, reports and evaluation, by name.

A loss is a function of the model's outputs and the targets of a batch, and returns one value for
each sample. ``training.loss`` takes a name, a name with options, or a function. :func:`register`
adds custom losses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise.checks import name_and_options, real
from equipoise.errors import InputError, unknown
from equipoise.task import Task

__all__ = [
    "LOSSES",
    "TaskLoss",
    "build",
    "check_loss",
    "loss_from",
    "options_of",
    "register",
    "to_plain",
]

TaskLoss = Callable[[Tensor, Tensor], Tensor]
L = TypeVar("L", bound=Callable[..., Any])


@dataclass(frozen=True)
class _Entry:
    """A registered loss: a function, or a dataclass whose fields are its options."""

    make: Callable[..., Any]
    tasks: tuple[str, ...] | None


LOSSES: dict[str, _Entry] = {}
"""The registered losses."""


def register(name: str, *, tasks: Sequence[str] | None = None) -> Callable[[L], L]:
    """Register a loss under a name. Use it as a decorator.

    Parameters
    ----------
    name : str
        The name in ``training.loss``.
    tasks : sequence of str, optional
        The tasks it is for; by default all.

    Returns
    -------
    callable
        A decorator of a function of outputs and targets, or of a frozen dataclass with such a
        ``__call__``, whose fields are the options of the loss.

    Raises
    ------
    InputError
        If the name is taken, or if the loss cannot be called.

    Examples
    --------
    >>> @register("cubic", tasks=["regression"])
    ... def cubic(output, y):
    ...     return (output.reshape(y.shape) - y).abs() ** 3
    >>> build("cubic")(torch.tensor([[3.0]]), torch.tensor([1.0]))
    tensor([8.])
    """

    def known(loss: L) -> L:
        if not callable(loss):
            raise InputError(
                f"{loss!r}, registered as the loss {name!r}, is not a function of outputs and "
                "targets"
            )
        before = LOSSES.get(name)
        if before is not None and _place(before.make) != _place(loss):
            raise InputError(
                f"the name {name!r} of a loss is taken by {_place(before.make)}; choose another"
            )
        LOSSES[name] = _Entry(loss, None if tasks is None else tuple(tasks))
        return loss

    return known


def build(name: str, **options: Any) -> TaskLoss:
    """Return a loss by name.

    Parameters
    ----------
    name : str
        A registered name.
    **options
        Its options.

    Returns
    -------
    callable
        A function of outputs and targets.

    Examples
    --------
    >>> build("focal", gamma=1.0)
    Focal(gamma=1.0)
    """
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES, where="training.loss")
    make, valid = LOSSES[name].make, options_of(name)
    for option in options:
        if not valid:
            raise InputError(f"the loss {name!r} takes no options, got {option!r}")
        if option not in valid:
            raise unknown("option", option, valid, where=f"the loss {name!r}")
    made: TaskLoss = make(**options) if isinstance(make, type) else make
    return made


def options_of(name: str) -> list[str]:
    """List the options of a registered loss.

    Examples
    --------
    >>> options_of("focal"), options_of("absolute")
    (['gamma'], [])
    """
    make = LOSSES[name].make
    return (
        [field.name for field in dataclasses.fields(make)] if dataclasses.is_dataclass(make) else []
    )


def loss_from(given: Any) -> TaskLoss | None:
    """Return the loss that ``training.loss`` describes.

    Parameters
    ----------
    given : str, mapping, callable or None
        A name, a mapping with ``name`` and options, a function of outputs and targets, or nothing.

    Returns
    -------
    callable or None
        ``None`` means the task's own loss.

    Examples
    --------
    >>> loss_from({"name": "focal", "gamma": 3.0}), loss_from(None)
    (Focal(gamma=3.0), None)
    """
    if given is None:
        return None
    if isinstance(given, str | Mapping):
        name, options = name_and_options(given, "training.loss")
        return build(name, **options)
    if isinstance(given, type) or not callable(given):
        what = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
        raise InputError(
            "training.loss must be a name such as 'focal', a mapping with a name, or a function "
            f"of outputs and targets that returns one value per sample, got {what}"
        )
    return given


def to_plain(loss: TaskLoss) -> dict[str, Any]:
    """Return a loss as name and options for a configuration.

    A function that is not registered is written as ``custom:`` and its name.

    Examples
    --------
    >>> to_plain(build("focal"))
    {'name': 'focal', 'gamma': 2.0}
    """
    for name, entry in LOSSES.items():
        if entry.make is type(loss):
            # Values of fields are numbers, text and lists of them.
            return {"name": name, **dataclasses.asdict(loss)}  # type: ignore[call-overload]
        if entry.make is loss:
            return {"name": name}
    return {"name": f"custom:{_place(loss)}"}


def check_loss(loss: TaskLoss | None, task: Task) -> None:
    """Refuse a loss that is registered for other tasks.

    Examples
    --------
    >>> from equipoise import tasks
    >>> check_loss(build("huber"), tasks.build("classification"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: the loss 'huber' is for the task regression, but the task of ...
    """
    if loss is None or (name := to_plain(loss)["name"]) not in LOSSES:
        return
    # Imported here, because the modules of tasks import this module.
    from equipoise import tasks

    valid = LOSSES[name].tasks
    if valid is not None and not any(isinstance(task, type(tasks.build(known))) for known in valid):
        raise InputError(
            f"the loss {name!r} is for the task {' or '.join(valid)}, but the task of this "
            f"federation is {task.name}"
        )


def _place(loss: Callable[..., Any]) -> str:
    """Return where a function, or the class of an object, is defined."""
    named: Any = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{named.__module__}.{named.__qualname__}"


_LABELS = ("classification", "segmentation")


@register("cross_entropy", tasks=_LABELS)
@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy with label smoothing and class weights.

    With smoothing s and C classes, the targets are 1 − s + s/C for the class of the sample and s/C
    for all others (Szegedy et al., 2016). The value of a sample is multiplied by the weight of its
    class, without normalization. In segmentation it is the mean over the pixels.

    Parameters
    ----------
    smoothing : float
        s, from 0 to below 1.
    weights : tuple of float, optional
        One for each class; by default 1.

    Examples
    --------
    >>> CrossEntropy(smoothing=0.5)(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor([0.6931])
    """

    smoothing: float = 0.0
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if real(self.smoothing, "training.loss.smoothing", least=0) >= 1:
            raise InputError(f"training.loss.smoothing must be below 1, got {self.smoothing!r}")
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(self.weights))
            for weight in self.weights:
                real(weight, "each of training.loss.weights", least=0)

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample."""
        likelihoods, own = output.log_softmax(1), _own_class(output, y)
        values = -(1 - self.smoothing) * torch.where(own, likelihoods, 0.0).sum(1)
        if self.smoothing:
            values = values - self.smoothing * likelihoods.mean(1)
        if self.weights is not None:
            if len(self.weights) != output.shape[1]:
                raise InputError(
                    f"training.loss.weights has {len(self.weights)} numbers, but the model has "
                    f"{output.shape[1]} classes"
                )
            weights = output.new_tensor(self.weights).view(-1, *(1,) * (output.dim() - 2))
            values = values * torch.where(own, weights, 0.0).sum(1)
        return _by_sample(values)


@register("focal", tasks=(*_LABELS, "multilabel"))
@dataclass(frozen=True)
class Focal:
    """Focal loss (Lin et al., 2017): −(1 − p)^γ log p, with p the probability of the target.

    In classification p is the softmax of the class of the sample, in multi-label classification the
    sigmoid of each label, with the mean over labels, and in segmentation the softmax of each pixel,
    with the mean over pixels.

    Parameters
    ----------
    gamma : float
        γ, at least 0. With 0 it is cross-entropy.

    Examples
    --------
    >>> Focal(gamma=2.0)(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor([0.1733])
    """

    gamma: float = 2.0

    def __post_init__(self) -> None:
        """Refuse an exponent below 0."""
        real(self.gamma, "training.loss.gamma", least=0)

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample."""
        if y.is_floating_point():
            right = torch.nn.functional.logsigmoid(torch.where(y > 0.5, output, -output))
        else:
            right = torch.where(_own_class(output, y), output.log_softmax(1), 0.0).sum(1)
        # 1 − p is 0 if p rounds to 1. There the derivative of a power below 1 would be infinite.
        wrong = -torch.expm1(right.clamp(max=-torch.finfo(output.dtype).tiny))
        return _by_sample(-(wrong**self.gamma) * right)


@register("absolute", tasks=("regression",))
def absolute(output: Tensor, y: Tensor) -> Tensor:
    """Return the absolute error, averaged over the targets of a sample.

    Examples
    --------
    >>> absolute(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 2.0]))
    tensor([1., 2.])
    """
    return _by_sample((output.reshape(y.shape) - y).abs())


@register("huber", tasks=("regression",))
@dataclass(frozen=True)
class Huber:
    """Huber loss: e²/2 for errors up to δ, and δ (|e| − δ/2) for larger ones.

    It is averaged over the targets of a sample.

    Parameters
    ----------
    delta : float
        δ, above 0.

    Examples
    --------
    >>> Huber(delta=1.0)(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 2.0]))
    tensor([0.5000, 1.5000])
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a width of zero."""
        real(self.delta, "training.loss.delta")

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample."""
        error = (output.reshape(y.shape) - y).abs()
        near = error.clamp(max=self.delta)
        return _by_sample(near.square() / 2 + self.delta * (error - near))


def _own_class(output: Tensor, y: Tensor) -> Tensor:
    """Return which of the outputs belong to the class of a sample, or of a pixel."""
    classes = torch.arange(output.shape[1], device=output.device)
    return y.unsqueeze(1) == classes.view(-1, *(1,) * (output.dim() - 2))


def _by_sample(values: Tensor) -> Tensor:
    """Average over everything but the samples."""
    return values.flatten(1).mean(1) if values.dim() > 1 else values
