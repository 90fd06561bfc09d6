"""What a client does in a round: phases of training with their losses and gradients, and facts.

Import these from :mod:`equipoise.method`, the interface of methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from equipoise.checks import real
from equipoise.client import Client
from equipoise.errors import InputError, unknown
from equipoise.masked import label_sums
from equipoise.optimizers import Column, Optimizer, check_optimizer
from equipoise.tree import Parts, Tree

Loss = Callable[[Client], Tensor]


def task_loss(client: Client) -> Tensor:
    """Return the task's loss of each sample for the client's current parameters."""
    return client.task_loss()


def personal_loss(client: Client) -> Tensor:
    """Return the task's loss of each sample for the client's personal model."""
    return client.personal().task_loss()


PLAIN_LOSSES = (task_loss, personal_loss)
"""Losses that are the task's own, without terms of a method."""


Value = Callable[[list[Tensor]], Tensor]


def plain_gradient(value: Value, params: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient at the current parameters.

    Parameters
    ----------
    value : callable
        Returns every client's loss, ``[K]``, for a list of stacked parameters.
    params : list of Tensor
        The stacked parameters that are trained.

    Returns
    -------
    tuple
        The losses, and one gradient per parameter.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in params]
    losses = value(leaves)
    gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    pairs = zip(gradients, leaves, strict=True)
    return losses.detach(), [
        torch.zeros_like(leaf) if gradient is None else gradient for gradient, leaf in pairs
    ]


class Gradient(Protocol):
    """How the gradient of a step is computed.

    A rule that makes its own steps can use the learning rate of the training settings; see
    :class:`FollowsRate`.
    """

    @property
    def batches(self) -> int:
        """The number of batches per step; see :func:`equipoise.engine.batches.draw_batches`."""

    def __call__(
        self, values: Sequence[Value], params: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradient.

        Parameters
        ----------
        values : sequence of callable
            One per batch. It returns every client's loss on that batch, ``[K]``, for a list of
            stacked parameters. Only the first call of a step updates BatchNorm statistics.
        params : list of Tensor
            The stacked parameters that are trained. With a single client they are not stacked, and
            a loss is a scalar. Use only operations that work in both cases.

        Returns
        -------
        tuple
            The losses to report, and one gradient per parameter.
        """


@runtime_checkable
class FollowsRate(Protocol):
    """A gradient rule that depends on the learning rate of the step."""

    def at_rate(self, lr: Column) -> Gradient:
        """Return the rule for a learning rate: one number, or a column over the stacked clients."""


@dataclass(frozen=True)
class PlainGradient:
    """The gradient at the current parameters, with one batch per step.

    Examples
    --------
    >>> PlainGradient()([lambda params: params[0].square()], [torch.tensor(3.0)])
    (tensor(9.), [tensor(6.)])
    """

    batches = 1

    def __call__(
        self, values: Sequence[Value], params: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradient; see :func:`plain_gradient`."""
        return plain_gradient(values[0], params)


@dataclass(frozen=True)
class Penalty:
    """A term of the loss that depends on the trained parameters w only: s/2 ‖w − wᵗ‖² + ⟨w, v⟩.

    wᵗ are the received parameters; for a personal part, they are the received ones of the same
    name. Buffers take no part. The term is part of the loss: clients report it in ``method_terms``,
    and clipping, weight decay and momentum come after it.

    With :class:`PlainGradient` the engine adds the gradient s (w − wᵗ) + v to that of the loss.
    This takes less time than the same term in the loss. Other gradient rules get losses that
    contain the term.

    Parameters
    ----------
    strength : float
        s, at least 0.
    linear : callable, optional
        Takes a :class:`~equipoise.client.Client` and returns v: a tree with the names that the
        parameters have in the shared model. Other names are ignored. It is called once when a phase
        begins, so v is constant during the phase, and the client has no batch. ``interleaved``
        phases begin together. Without it, v is 0.

    Examples
    --------
    >>> Phase(penalty=Penalty(0.1)).adds_terms
    True
    >>> corrected = Penalty(linear=lambda client: client.memory["control"])
    >>> corrected.strength
    0.0
    """

    strength: float = 0.0
    linear: Callable[[Client], Tree] | None = None

    def __post_init__(self) -> None:
        """Refuse a strength that is negative or not finite, and what cannot be called."""
        real(self.strength, "the strength of a Penalty", least=0)
        if self.linear is not None and not callable(self.linear):
            raise InputError(
                f"linear of a Penalty must be a function of a client, got {self.linear!r}"
            )

    @property
    def vanishes(self) -> bool:
        """Whether it is 0 for all parameters."""
        return not self.strength and self.linear is None


_BATCHES = ("next", "same", "split")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of local training.

    Parameters
    ----------
    move : str or tuple of str
        The parts that are trained. The others do not change.
    loss : callable or tuple of callable
        Returns one value per sample of one client. The engine averages over the samples that are
        not padding. Several losses alternate batch by batch: with two losses, the first is used for
        batches 1, 3, 5, ... and the second for batches 2, 4, 6, ... So a gradient that uses two
        batches per step has a loss for each of them. With a gradient that uses one, the losses
        alternate from step to step, and all steps use the same optimizer.
    gradient : Gradient
        How the gradient is computed, and how many batches a step uses.
    epochs, steps : int, optional
        The length of the phase; by default that of the training settings. If losses alternate from
        step to step, it is the length for each loss.
    optimizer : Optimizer, optional
        By default the one of the training settings.
    batch : {"next", "same", "split"}
        ``next``: the batches of a step are different batches. ``same``, in interleaved phases: the
        phase uses the same batches as the phase before. ``split``: the batches of a step are parts
        of one batch; see :meth:`equipoise.engine.batches.Batches.split`.
    scheduled : bool
        Whether the learning rate follows the schedule of the training settings.
    penalty : Penalty, optional
        A term that is added to every loss and depends on the trained parameters only.

    Examples
    --------
    >>> Phase(loss=(task_loss, personal_loss)).turns
    2
    """

    move: Parts = "all"
    loss: Loss | tuple[Loss, ...] = task_loss
    gradient: Gradient = PlainGradient()
    epochs: int | None = None
    steps: int | None = None
    optimizer: Optimizer | None = None
    batch: str = "next"
    scheduled: bool = True
    penalty: Penalty | None = None

    def __post_init__(self) -> None:
        """Refuse invalid lengths, losses without a batch, and a length with ``batch="same"``."""
        for name in ("epochs", "steps"):
            if (length := getattr(self, name)) is not None and not length >= 1:
                raise InputError(f"a Phase lasts at least 1 of its {name}, got {length!r}")
        if self.batch not in _BATCHES:
            raise unknown("batch", self.batch, _BATCHES, where="Phase")
        for loss in self.losses:
            if not callable(loss):
                raise InputError(
                    f"the loss of a Phase must be a function of a client, got {loss!r}"
                )
        if self.penalty is not None and not isinstance(self.penalty, Penalty):
            raise InputError(
                f"the penalty of a Phase must be a Penalty, such as Penalty(0.1), got "
                f"{self.penalty!r}"
            )
        if self.optimizer is not None:
            check_optimizer(self.optimizer, "the optimizer of a Phase")
        if len(self.losses) != 1 and (not self.losses or len(self.losses) % self.gradient.batches):
            raise InputError(
                f"a Phase has {len(self.losses)} losses for the {self.gradient.batches} batches of "
                "its gradient; valid: one loss, or a multiple of that number"
            )
        if self.batch == "same" and (self.epochs is not None or self.steps is not None):
            raise InputError(
                "a Phase with batch='same' lasts as long as the phase before; it takes no epochs "
                "or steps"
            )

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The losses, which alternate if there are several."""
        return self.loss if isinstance(self.loss, tuple) else (self.loss,)

    @property
    def turns(self) -> int:
        """The number of steps after which the losses repeat."""
        return max(1, len(self.losses) // self.gradient.batches)

    @property
    def adds_terms(self) -> bool:
        """Whether a loss, with the penalty, may differ from the task's own."""
        return self.penalty is not None or any(loss not in PLAIN_LOSSES for loss in self.losses)

    def losses_in(self, step: int) -> tuple[Loss, ...]:
        """Return the loss of each batch of a step; steps are counted from 0."""
        batches, losses = self.gradient.batches, self.losses
        return tuple(losses[(step * batches + batch) % len(losses)] for batch in range(batches))


def class_counts(then: Callable[[Tree], Tree] | None = None) -> Fact:
    """Return a fact: a client's number of training samples per class, ``{"count": [classes]}``.

    In multi-label classification a sample counts for all of its classes.

    Parameters
    ----------
    then : callable, optional
        Computes the fact from the counts, such as
        ``lambda sums: {"log": (sums["count"] + 1).log()}``.

    Returns
    -------
    Fact
        For :meth:`equipoise.method.LocalRule.facts`. It stays on the client unless the rule names
        it in ``uploads``.

    Examples
    --------
    >>> class_counts().model
    'first'
    """
    return Fact(sums=_class_counts, then=then, model="first")


def _class_counts(client: Client) -> Tree:
    if client.y.is_floating_point() and client.classes == client.y.shape[-1]:
        return {"count": client.sum(client.y)}
    client.network.task.require_labels("class counts need labels")
    return {
        "count": label_sums(
            torch.ones_like(client.y, dtype=client.network.dtype),
            client.y,
            client.classes,
            client.mask,
        )
    }


Question = TypeVar("Question", bound=Callable[..., Any])


def finished_by(name: str) -> Callable[[Question], Question]:
    """Compute the answer to a question from its sums on the client, with another method.

    The server receives what that method returns, and not the sums.

    Parameters
    ----------
    name : str
        The name of a method of the same part. It takes the sums over all samples of one client, and
        returns a tensor or a nested structure of tensors.

    Returns
    -------
    callable
        A decorator for questions.

    Examples
    --------
    >>> from equipoise.method import LocalRule
    >>> class Averaging(LocalRule):
    ...     @finished_by("divided")
    ...     def mean_image(self, client):
    ...         return client.sum(client.x), client.sum(torch.ones_like(client.y))
    ...     def divided(self, sums):
    ...         return sums[0] / sums[1]
    >>> Averaging().mean_image.finished_by
    'divided'
    """

    def mark(question: Question) -> Question:
        question.finished_by = name  # type: ignore[attr-defined]
        return question

    return mark


FACT_MODELS = ("first", "received", "trained")


@dataclass(frozen=True, kw_only=True)
class Fact:
    """What a client computes from its training samples without training, such as label counts.

    The engine processes the samples batch by batch, so a fact needs little memory for any number of
    samples. The client keeps the fact in its memory under its name. A fact that the rule names in
    ``uploads`` is also sent with the update.

    Parameters
    ----------
    sums : callable
        Takes a :class:`~equipoise.client.Client` with one batch and returns a tree of sums over its
        samples, without padding; see :meth:`equipoise.client.Client.sum`.
    then : callable, optional
        Computes the fact, a tree, from the sums over all samples. By default the fact is the sums.
    model : {"first", "received", "trained"}
        The model with which the sums are computed. ``first``: the initial model, once, when the
        client first takes part. ``received``: the received model, before training. ``trained``: the
        client's own model after training. Losses find facts of the first two in ``client.memory``
        in the same round, and those of the trained model in the client's next round. Before that,
        they are zero.

    Examples
    --------
    >>> def samples(client):
    ...     return {"samples": client.sum(torch.ones_like(client.y))}
    >>> Fact(sums=samples, model="first").model
    'first'
    """

    sums: Callable[[Client], Tree]
    then: Callable[[Tree], Tree] | None = None
    model: str = "received"

    def __post_init__(self) -> None:
        """Refuse an unknown model."""
        if self.model not in FACT_MODELS:
            raise unknown("model", self.model, FACT_MODELS, where="Fact")
