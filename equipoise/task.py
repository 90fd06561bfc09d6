"""The interface of tasks: the loss and the metrics of each sample, and which targets are valid."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.checks import count
from equipoise.errors import InputError

# Larger numbers of classes must be passed explicitly. Otherwise labels that are ids by mistake
# would make a model of gigabytes.
MOST_IMPLIED = 10_000


class Task:
    """What is learned.

    A task is a class without state, registered with :func:`equipoise.tasks.register`. It defines
    :meth:`loss`. A task whose score is not the loss also defines :meth:`metrics`. The other methods
    have defaults for targets that are numbers.

    ``loss`` and ``metrics`` are called for one client's batch, and for many clients at once under
    ``torch.func.vmap``. They must not branch on values. They also get the rows of padding, for
    which the results are ignored.

    Attributes
    ----------
    name : str
        The name it is registered under.
    score : str
        The main metric of tables, one of those that :meth:`metrics` returns.
    higher_is_better : bool
        Whether a larger score is a better one.
    labels : bool
        Whether each sample has one class, as partitions by label and label counts require.
    floating : bool
        Whether targets are floating point numbers.
    spatial : bool
        Whether the target of an image is an image of the same height and width. Augmentations that
        move pixels are then applied to both.
    ranges : mapping
        The metrics that :meth:`metrics` returns besides the loss, each with its smallest and its
        largest valid value. On Flower the server ignores metrics that are not declared here, except
        the score.

    Examples
    --------
    >>> class Absolute(Task):
    ...     def loss(self, output, y):
    ...         return (output.squeeze(1) - y).abs()
    >>> Absolute().metrics(torch.tensor([[2.0]]), torch.tensor([0.5]))
    {'loss': tensor([1.5000])}
    """

    name: ClassVar[str] = ""
    score: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    labels: ClassVar[bool] = False
    floating: ClassVar[bool] = True
    spatial: ClassVar[bool] = False
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, ``[samples]``.

        Parameters
        ----------
        output : Tensor
            The model's outputs, samples first.
        y : Tensor
            The targets.
        """
        raise NotImplementedError(f"the task {type(self).__name__} defines no loss")

    def metrics(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss and all other metrics of each sample by name, ``[samples]`` each."""
        return {"loss": self.loss(output, y)}

    def with_loss(self, loss: Callable[[Tensor, Tensor], Tensor] | None) -> Task:
        """Return the task with another loss, which also replaces its metric ``loss``.

        Parameters
        ----------
        loss : callable or None
            A function of outputs and targets that returns one value per sample; ``None`` for the
            task's own.

        Returns
        -------
        Task
            A copy, or the task itself.

        Examples
        --------
        >>> from equipoise import tasks
        >>> zero = tasks.build("classification").with_loss(lambda output, y: 0 * output[:, 0])
        >>> zero.metrics(torch.tensor([[2.0, 1.0]]), torch.tensor([0]))
        {'loss': tensor([0.]), 'accuracy': tensor([1.])}
        """
        if loss is None:
            return self
        made = copy.copy(self)
        made.loss = loss  # type: ignore[method-assign, assignment]
        made.metrics = lambda output, y: {  # type: ignore[method-assign]
            **self.metrics(output, y),
            "loss": loss(output, y),
        }
        return made

    def targets(self, y: Tensor) -> Tensor:
        """Convert given targets to the type in which a federation holds them."""
        return y

    def classes_in(self, y: Tensor) -> int | None:
        """Return the number of classes in targets, or ``None`` if the task has no classes."""
        return None

    def number_of_classes(self, y: Tensor, given: int | None) -> int | None:
        """Return the number of classes: the given one, or that in the targets.

        Parameters
        ----------
        y : Tensor
            The targets of all samples.
        given : int, optional
            The number that the user passes.

        Returns
        -------
        int or None
            ``None`` if the task has no classes.

        Raises
        ------
        InputError
            If the given number is invalid, or if targets have so many classes that they are
            probably not labels.
        """
        if given is not None:
            if self.classes_in(y) is None:
                raise InputError(f"classes={given} is not valid for a {self.name}; leave it out")
            return count(given, "classes")
        implied = self.classes_in(y)
        if implied is not None and implied > MOST_IMPLIED:
            raise InputError(
                f"the largest label in y is {implied - 1}, which would make {implied} classes; "
                f"check that y holds labels, and if it does, pass classes={implied}"
            )
        return implied

    def check(self, y: Tensor, shape: Sequence[int]) -> None:
        """Refuse targets of the wrong type or shape.

        Parameters
        ----------
        y : Tensor
            The targets of all samples.
        shape : sequence of int
            The shape of one sample.

        Raises
        ------
        InputError
            If they do not fit the task.
        """

    def fault(self, y: Tensor, classes: int | None) -> tuple[int, str] | None:
        """Find the first sample with an invalid target.

        Parameters
        ----------
        y : Tensor
            The targets of all samples, already accepted by :meth:`check`.
        classes : int or None
            The number of classes.

        Returns
        -------
        tuple of int and str, or None
            Its position, and what is wrong with it.
        """
        if not y.is_floating_point():
            return None
        finite = torch.isfinite(y)
        if bool(finite.all()):
            return None
        return int((~finite).nonzero()[0, 0]), "has NaN or infinity in y; all values must be finite"

    def outputs(self, y: Tensor, classes: int | None) -> int:
        """Return the number of outputs of a model per sample, or per pixel for spatial tasks."""
        if classes is not None:
            return classes
        return y.shape[1] if y.ndim == 2 else 1

    def misfit(self, output: Tensor, y: Tensor, outputs: int) -> str | None:
        """Return what the federation needs, if a model's outputs do not fit it.

        Parameters
        ----------
        output, y : Tensor
            The model's outputs for a few samples, and their targets.
        outputs : int
            What :meth:`outputs` returned.

        Returns
        -------
        str or None
            Such as ``"10 classes"``; ``None`` if the outputs fit.
        """
        return None if output.numel() == y.numel() else f"{outputs} targets per sample"

    def require_labels(self, why: str) -> None:
        """Refuse a task without one class for each sample.

        Parameters
        ----------
        why : str
            What needs labels, such as ``"fedcrc compares class probabilities"``.

        Raises
        ------
        InputError
            If samples have no labels.

        Examples
        --------
        >>> Task().require_labels("counts need labels")
        Traceback (most recent call last):
        equipoise.errors.InputError: counts need labels, but the task of this federation is Task
        """
        if not self.labels:
            raise InputError(
                f"{why}, but the task of this federation is {self.name or type(self).__name__}"
            )


def whole_numbers(y: Tensor) -> Tensor:
    """Convert labels to int64. Labels that are not whole numbers are refused.

    Parameters
    ----------
    y : Tensor
        One row per sample.

    Returns
    -------
    Tensor
        The same numbers.

    Examples
    --------
    >>> whole_numbers(torch.tensor([0.0, 2.0]))
    tensor([0, 2])
    >>> whole_numbers(torch.tensor([0.0, 2.5]))
    Traceback (most recent call last):
    equipoise.errors.InputError: sample 1 has label 2.5 in y; labels must be whole numbers
    """
    if y.is_complex():
        raise InputError("y holds complex numbers; labels must be whole numbers")
    labels = y.long()
    # Integers need no check, and PyTorch cannot compare unsigned integers of more than 8 bits.
    if y.is_floating_point() and bool((labels != y).any()):
        place = tuple((labels != y).nonzero()[0].tolist())
        raise InputError(
            f"sample {place[0]} has label {y[place].item()} in y; labels must be whole numbers"
        )
    return labels
