"""Callbacks: code that is called during a run, gets its models and rows, and may stop it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from equipoise.errors import InputError
from equipoise.run.records import Row, summarize_rows
from equipoise.run.trained import filled
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.run.trainer import Trainer

__all__ = ["Callback", "Snapshot"]


class Snapshot:
    """The current state of a run, for callbacks.

    Attributes
    ----------
    config : dict
        Everything that the run depends on, as in ``config.yaml``.
    directory : Path or None
        The run directory.
    record : dict
        This round's row of ``rounds.jsonl``: cohort, training loss, bytes. Empty before round 1.
    rows : list of dict
        This round's rows of ``metrics.jsonl``: one for each client, model and split. Empty if the
        round is not evaluated.
    summary : dict or None
        The content of ``summary.json``, at the end of a run.
    error : BaseException or None
        The reason, at the end of a run that has failed.
    """

    def __init__(self, trainer: Trainer, config: dict[str, Any], directory: Path | None) -> None:
        self._trainer, self.config, self.directory = trainer, config, directory
        self.record: Row = {}
        self.rows: list[Row] = []
        self.summary: dict[str, Any] | None = None
        self.error: BaseException | None = None

    @property
    def round(self) -> int:
        """The number of finished rounds."""
        return self._trainer.state.round

    @property
    def rounds(self) -> int:
        """The largest number of rounds of the run."""
        return self._trainer.training.rounds

    @property
    def method(self) -> str:
        """The name of the method."""
        return self._trainer.method.name

    @property
    def global_model(self) -> Tree | None:
        """A copy of the tensors of the evaluated global model by name; None if there is none."""
        if not self._trainer.has_global:
            return None
        return {
            name: tensor.detach().clone() for name, tensor in self._trainer.global_model.items()
        }

    def model(self) -> nn.Module | None:
        """Return the global model as a module in evaluation mode on the CPU, or None."""
        tensors = self.global_model
        if tensors is None:
            return None
        return filled(self._trainer.engine.network.blank(), tensors)

    def results(self, split: str = "test") -> dict[str, Any]:
        """Summarise this round's rows, as ``results`` in ``summary.json``.

        Parameters
        ----------
        split : {"test", "val"}
            The split.

        Returns
        -------
        dict
            By model, then ``seen`` and ``unseen``: means and spreads over clients, ``groups``, the
            metrics of ``evaluation.metrics``, and figures by ``attributes``.
        """
        task, metrics = self._trainer.engine.network.task, self._trainer.evaluator.metrics
        return summarize_rows(self.rows, task, split=split, metrics=metrics)

    def groups(self, split: str = "test") -> dict[str, dict[str, float]]:
        """Return the mean score of each group of seen clients in this round, by model.

        Parameters
        ----------
        split : {"test", "val"}
            The split.

        Returns
        -------
        dict
            Such as ``{"global": {"north": 0.8, "south": 0.7}}``.
        """
        found = self.results(split)
        return {
            model: dict(whose["seen"]["groups"])
            for model, whose in found.items()
            if "seen" in whose
        }

    def stop(self, reason: str) -> None:
        """End the run after this round, as if it had been the last.

        A round that ends a run is evaluated. ``summary.json`` has the reason in ``stopped``.

        Parameters
        ----------
        reason : str
            The reason, in a few words.
        """
        if not isinstance(reason, str) or not reason:
            raise InputError(f"stop() needs a reason in words, got {reason!r}")
        # If several callbacks stop the run, the first reason is kept.
        self._trainer.stopped = self._trainer.stopped or reason


class Callback:
    """Base class of callbacks. Override the methods that you need.

    The methods are called in this order: ``begin`` once, then for each round ``evaluated``, if the
    round is evaluated, and ``round``, and ``end`` once. A resumed run continues at the round of its
    checkpoint, so callbacks may get later rounds a second time. A callback must not change models
    or rows. Results are the same with and without it, unless it stops the run.

    Examples
    --------
    >>> import equipoise
    >>> from equipoise.data import load
    >>> class StopWhenGood(equipoise.Callback):
    ...     def evaluated(self, run):
    ...         if run.results("val")["global"]["seen"]["mean"] > 0.2:
    ...             run.stop("the mean accuracy is above 0.2")
    >>> run = equipoise.train(load("digits"), rounds=20, callbacks=[StopWhenGood()])
    >>> run.summary["rounds"] < 20, run.summary["stopped"]
    (True, 'the mean accuracy is above 0.2')
    """

    def begin(self, run: Snapshot) -> None:
        """Handle the start of a run, which may be resumed; ``run.round`` rounds are finished."""

    def evaluated(self, run: Snapshot) -> None:
        """Handle the evaluation of the models of a round; ``run.rows`` has the values."""

    def round(self, run: Snapshot) -> None:
        """Handle the end of a round; ``run.record`` describes it."""

    def end(self, run: Snapshot) -> None:
        """Handle the end of the run, also if it failed; see ``run.summary`` and ``run.error``."""


class Listeners:
    """The callbacks of a run.

    Parameters
    ----------
    callbacks : iterable of Callback
        The callbacks, which are called in this order.
    config : dict
        Everything that the run depends on.
    directory : Path, optional
        The run directory.
    """

    def __init__(
        self,
        callbacks: Iterable[Callback] = (),
        config: dict[str, Any] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._callbacks, self._config, self._directory = checked(callbacks), config or {}, directory
        self._begun: list[Callback] = []
        self._seen: Snapshot | None = None

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def begin(self, trainer: Trainer) -> None:
        """Call ``begin`` of all callbacks."""
        self._seen = Snapshot(trainer, self._config, self._directory)
        for callback in self._callbacks:
            callback.begin(self._seen)
            # A callback whose begin has failed is not ended.
            self._begun.append(callback)

    def evaluated(self, rows: list[Row]) -> None:
        """Call ``evaluated`` of all callbacks."""
        if self._seen:
            self._seen.rows = rows
            self._tell("evaluated")

    def round(self, record: Row, *, evaluated: bool) -> None:
        """Call ``round`` of all callbacks."""
        if self._seen:
            self._seen.record = record
            self._seen.rows = self._seen.rows if evaluated else []
            self._tell("round")

    def end(
        self, summary: dict[str, Any] | None = None, error: BaseException | None = None
    ) -> None:
        """Call ``end`` of all callbacks that have begun."""
        if self._seen:
            self._seen.summary, self._seen.error = summary, error
            self._tell("end")

    def _tell(self, event: str) -> None:
        for callback in self._begun:
            getattr(callback, event)(self._seen)


def checked(callbacks: Any) -> Sequence[Callback]:
    """Return callbacks as a list. Other objects are refused.

    Examples
    --------
    >>> checked([Callback])
    Traceback (most recent call last):
    equipoise.errors.InputError: callbacks has the class Callback; pass an object: Callback()
    """
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise InputError(f"callbacks must be a list of callbacks, got {callbacks!r}")
    listed = list(callbacks)
    for callback in listed:
        if isinstance(callback, type):
            raise InputError(
                f"callbacks has the class {callback.__name__}; pass an object: "
                f"{callback.__name__}()"
            )
        if not isinstance(callback, Callback):
            raise InputError(
                f"callbacks has {callback!r}; valid: objects of classes derived from "
                "equipoise.Callback"
            )
    return listed
