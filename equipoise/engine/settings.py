"""Settings of training and of the machine, shared by all methods."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from equipoise import schedules
from equipoise.checks import UNLESS_DEFAULT, count, real, several
from equipoise.data.augment import Augmentation
from equipoise.errors import InputError, unknown
from equipoise.losses import TaskLoss, loss_from
from equipoise.method import Method, Phase
from equipoise.optimizers import Optimizer, Schedule, Sgd, check_optimizer


def _check_counts(settings: object, section: str, names: tuple[str, ...]) -> None:
    """Check that settings are whole numbers of at least 1, or None where that is the default."""
    for name in names:
        value = getattr(settings, name)
        if value is not None or name not in ("steps", "report_samples"):
            object.__setattr__(settings, name, count(value, f"{section}.{name}"))


def _count_or_range(value: Any, what: str) -> int | tuple[int, int]:
    """Check an integer of at least 1, or a range of two such integers."""
    if not isinstance(value, (list, tuple)):
        return count(value, what)
    low, high = several(value, what, count, length=2)
    if low > high:
        raise InputError(
            f"{what} must be a range from a smaller to a larger number, got {list(value)}"
        )
    return low, high


PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of local training, for all methods.

    Parameters
    ----------
    rounds : int
        Number of rounds. With 0 the initial model is evaluated and nothing is trained.
    cohort : int or float
        How many clients take part in a round: a number of clients, or a fraction of those
        registered.
    epochs : int or tuple of int
        Passes over a client's training split in a round. Two numbers are a range: every client
        draws its own number in every round, all of them equally likely.
    steps : int or tuple of int, optional
        Steps in a round instead of epochs, the same for every client, or a range as for ``epochs``.
    stragglers : float
        The probability that a client stops early in a round and sends what it has: after a share of
        its steps that is uniform in (0, 1], and at least one step.
    batch_size : int
        Samples per step; the last batch of an epoch may be smaller.
    optimizer : Optimizer
        The clients' optimizer. Its state is reset in each round.
    schedule : Schedule or callable
        Its learning rate over rounds. A function of the round is registered under its name; see
        :func:`equipoise.schedules.register`.
    clip : float, optional
        Largest L2 norm of a client's gradient.
    shuffle : bool
        Whether batches are drawn in a new order each epoch.
    augment : tuple of Augmentation
        Applied to every training batch.
    loss : str, mapping or callable, optional
        A loss for the whole task instead of the task's own: a name of :mod:`equipoise.losses` such
        as ``"focal"``, a mapping with ``name`` and options, or a function of outputs and targets
        that returns one value per sample. Losses in reports and in evaluation are of the same
        function.
    report_samples : int, optional
        How many of a client's training samples its loss reports use, drawn again each round; all by
        default. Reports on whole splits cost large clients more than a few steps of training do.
        Reports on validation data, from which generalization gaps are computed, always use all.

    Examples
    --------
    >>> Training(rounds=10, cohort=0.1).cohort_size(50)
    5
    """

    rounds: int = 50
    cohort: int | float = 1.0
    epochs: int | tuple[int, int] = 1
    steps: int | tuple[int, int] | None = None
    batch_size: int = 10
    optimizer: Optimizer = field(default_factory=Sgd)
    schedule: Schedule = field(default_factory=Schedule)
    clip: float | None = None
    shuffle: bool = True
    augment: tuple[Augmentation, ...] = ()
    report_samples: int | None = None
    loss: TaskLoss | None = field(default=None, metadata={UNLESS_DEFAULT: True})
    stragglers: float = field(default=0.0, metadata={UNLESS_DEFAULT: True})

    def __post_init__(self) -> None:
        """Check the settings."""
        object.__setattr__(self, "rounds", count(self.rounds, "training.rounds", least=0))
        object.__setattr__(self, "loss", loss_from(self.loss))
        check_optimizer(self.optimizer, "training.optimizer")
        if not isinstance(self.schedule, Schedule):
            if not callable(self.schedule):
                raise InputError(
                    "training.schedule must be a Schedule or a function of the round, got "
                    f"{self.schedule!r}"
                )
            object.__setattr__(
                self, "schedule", Schedule(kind=schedules.register(self.schedule).__name__)
            )
        _check_counts(self, "training", ("batch_size", "report_samples"))
        object.__setattr__(self, "epochs", _count_or_range(self.epochs, "training.epochs"))
        if self.steps is not None:
            object.__setattr__(self, "steps", _count_or_range(self.steps, "training.steps"))
        if not 0 <= real(self.stragglers, "training.stragglers", least=0) <= 1:
            raise InputError(
                f"training.stragglers must be a probability from 0 to 1, got {self.stragglers!r}"
            )
        if self.clip is not None:
            real(self.clip, "training.clip")
        if (
            isinstance(self.cohort, bool)
            or not self.cohort > 0
            or (isinstance(self.cohort, float) and self.cohort > 1)
        ):
            raise InputError(
                f"training.cohort must be a number of clients (a whole number of at least 1) "
                f"or a fraction of them (above 0, at most 1.0), got {self.cohort!r}"
            )

    def cohort_size(self, registered: int) -> int:
        """Turn ``cohort`` into a number of clients."""
        if isinstance(self.cohort, float):
            return max(1, round(self.cohort * registered))
        if self.cohort > registered:
            raise InputError(
                f"training.cohort asks for {self.cohort} clients, but only {registered} are "
                "registered for training"
            )
        return self.cohort


@dataclass(frozen=True, kw_only=True)
class FineTune:
    """Local steps at evaluation, after any method.

    Parameters
    ----------
    epochs : int
        Passes over a client's training split.
    steps : int, optional
        Steps instead of epochs.
    move : str
        The part of the model that is trained.
    lr : float, optional
        Learning rate; by default that of training. The schedule of training applies to both.

    Examples
    --------
    >>> FineTune(epochs=2, move="head").phase(Sgd(lr=0.1)).move
    'head'
    """

    epochs: int = 1
    steps: int | None = None
    move: str = "all"
    lr: float | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        _check_counts(self, "evaluation.fine_tune", ("epochs", "steps"))
        if self.lr is not None:
            real(self.lr, "evaluation.fine_tune.lr")

    def phase(self, optimizer: Optimizer) -> Phase:
        """Return the phase, with the optimizer of training."""
        if self.lr is not None:
            optimizer = replace(optimizer, lr=self.lr)  # type: ignore[type-var]
        return Phase(move=self.move, epochs=self.epochs, steps=self.steps, optimizer=optimizer)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Device and precision of a run.

    Parameters
    ----------
    device : str
        ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
    precision : {"float32", "float64", "bfloat16"}
        ``bfloat16`` keeps parameters in float32 and lowers the arithmetic by autocast.
    chunk : int or "auto" or "measure"
        How many clients are stacked at most: a number, a fixed rule from device, model and
        precision, or the fastest of a few, measured before round 1 and then written into the run's
        configuration. A larger cohort is divided into chunks of equal size.
    tf32 : bool
        Whether matrix units may round float32 factors to 19 bits.
    replay : bool
        Whether local steps are recorded once and repeated from the recording, which saves the time
        Python needs for them: on a GPU as CUDA graphs, on a CPU by
        :mod:`equipoise.engine.tape`.
    frozen : {"bfloat16"}, optional
        The type in which frozen modules (:class:`equipoise.models.frozen.Frozen`) are held and
        computed; by default that of everything else.
    encode : bool
        Whether samples are encoded once by the model's stem, if it has one, instead of in every
        step. They are not if the method works on images.
    processes : int
        How many processes share the work of a run on this machine: its GPUs in turn, or the cores
        of the CPU. Each process trains and evaluates some of the clients. Processes that
        ``torchrun`` has started are used without this setting.

    Examples
    --------
    >>> Machine(device="cpu", precision="float64").dtype
    torch.float64
    """

    device: str = "auto"
    precision: str = "float32"
    chunk: int | str = "auto"
    tf32: bool = False
    replay: bool = True
    frozen: str | None = None
    encode: bool = True
    processes: int = field(default=1, metadata={UNLESS_DEFAULT: True})

    def __post_init__(self) -> None:
        """Refuse a device or precision that is not there."""
        object.__setattr__(self, "processes", count(self.processes, "machine.processes"))
        if self.frozen not in (None, "bfloat16"):
            raise unknown("value", self.frozen, ("bfloat16",), where="machine.frozen")
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS, where="machine.precision")
        counts = (
            isinstance(self.chunk, int) and not isinstance(self.chunk, bool) and self.chunk >= 1
        )
        if self.chunk not in ("auto", "measure") and not counts:
            raise InputError(
                "machine.chunk must be 'auto', 'measure' or a number of clients, got "
                f"{self.chunk!r}"
            )
        kind, colon, number = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (
            colon and (kind != "cuda" or not re.fullmatch("[0-9]{1,4}", number))
        ):
            raise unknown(
                "device", self.device, ("auto", "cpu", "cuda", "cuda:N"), where="machine.device"
            )
        if kind == "cuda" and not torch.cuda.is_available():
            raise InputError(
                "machine.device is 'cuda', but PyTorch sees no GPU here; valid: 'cpu' or 'auto'"
            )
        if number and int(number) >= (there := torch.cuda.device_count()):
            raise InputError(
                f"machine.device is {self.device!r}, but there are {there} GPUs, numbered from 0"
            )

    def carrying_out(self, method: Method) -> Machine:
        """Return the settings for a method: samples are not encoded if it works on images.

        Examples
        --------
        >>> from equipoise.methods import build
        >>> Machine(device="cpu").carrying_out(build("harmofl")).encode
        False
        """
        return replace(self, encode=False) if method.needs_images else self

    @property
    def dtype(self) -> torch.dtype:
        """Type of parameters and data."""
        return PRECISIONS[self.precision]

    @property
    def autocast(self) -> torch.dtype | None:
        """Type of autocast, or ``None`` if it is not used."""
        return torch.bfloat16 if self.precision == "bfloat16" else None

    @property
    def frozen_dtype(self) -> torch.dtype | None:
        """Type of frozen modules, if it differs from that of all others."""
        return torch.bfloat16 if self.frozen else None

    @property
    def torch_device(self) -> torch.device:
        """The device of ``auto``, or the named device."""
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
