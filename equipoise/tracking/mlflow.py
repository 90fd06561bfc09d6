"""Values of a run for MLflow."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from equipoise.errors import InputError
from equipoise.run.callbacks import Callback, Snapshot
from equipoise.run.files import write_atomically
from equipoise.study.runs import flat
from equipoise.tracking import round_values, scores

RUN_ID = "mlflow.txt"
"""The file in the run directory with the id of the MLflow run, which a resumed run continues."""

# The limits of MLflow for one request, and for the length of a parameter's value.
_PARAMETERS, _METRICS, _LONGEST = 100, 1000, 500


@dataclass
class MLflow(Callback):
    """Write parameters and values of a run to MLflow's tracking store.

    All settings are parameters. The step of a value is the number of the round. ``summary.json`` is
    an artifact. A resumed run continues the same MLflow run, and repeated rounds are written once.

    Parameters
    ----------
    uri : str, optional
        The tracking store: a server's address, ``sqlite:///mlflow.db`` or a directory; by default
        that of MLflow, such as the variable ``MLFLOW_TRACKING_URI``.
    experiment : str
        The name of the MLflow experiment. It is created if it does not exist.
    name : str, optional
        The name of the run; by default that of the run directory, or the method and the seed.

    Examples
    --------
    >>> MLflow(uri="sqlite:///mlflow.db", experiment="adult").experiment
    'adult'
    """

    uri: str | None = None
    experiment: str = "equipoise"
    name: str | None = None
    packages: ClassVar[tuple[str, ...]] = ("mlflow",)
    _client: Any = field(default=None, init=False, repr=False, compare=False)
    _run: str = field(default="", init=False, repr=False, compare=False)
    _written: int = field(default=0, init=False, repr=False, compare=False)

    def begin(self, run: Snapshot) -> None:
        """Create the MLflow run, or continue an existing one."""
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        try:
            self._client = MlflowClient(tracking_uri=self.uri)
            self._open(run)
        except MlflowException as error:
            raise InputError(
                f"tracking: mlflow cannot write to {self.uri or 'its store'}: {error}"
            ) from error

    def _open(self, run: Snapshot) -> None:
        from mlflow.entities import Param

        noted = run.directory / RUN_ID if run.directory else None
        self._written = 0
        if noted and noted.exists():
            self._run = noted.read_text(encoding="utf-8").strip()
            before = self._client.get_metric_history(self._run, "round/train_loss")
            self._written = max((value.step for value in before), default=0)
            self._client.update_run(self._run, status="RUNNING")
            return
        name = self.name or (
            run.directory.name if run.directory else f"{run.method}-seed{run.config['seed']}"
        )
        tags = {
            "method": run.method,
            "data": str(run.config["data"]["name"]),
            "seed": str(run.config["seed"]),
        }
        made = self._client.create_run(self._experiment_id(), run_name=name, tags=tags)
        self._run = made.info.run_id
        if noted:
            write_atomically(noted, self._run.encode() + b"\n")
        parameters = [Param(_tidy(key), str(value)[:_LONGEST]) for key, value in flat(run.config)]
        for some in _divided(parameters, _PARAMETERS):
            self._client.log_batch(self._run, params=some)

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.create_experiment(self.experiment))
        except MlflowException:
            # It exists, perhaps because another run of a study has just created it.
            found = self._client.get_experiment_by_name(self.experiment)
            if found is None:
                raise
            return str(found.experiment_id)

    def evaluated(self, run: Snapshot) -> None:
        """Write the results of a round."""
        self._write(scores(run), run.round)

    def round(self, run: Snapshot) -> None:
        """Write loss and bytes of a round."""
        self._write(round_values(run), run.round)

    def end(self, run: Snapshot) -> None:
        """Mark the run as finished or failed."""
        if not self._run:
            return
        if run.summary is not None:
            self._client.log_dict(self._run, run.summary, "summary.json")
        killed = isinstance(run.error, KeyboardInterrupt)
        self._client.set_terminated(
            self._run, "KILLED" if killed else "FAILED" if run.error else "FINISHED"
        )

    def _write(self, values: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        if step <= self._written and self._written:
            return
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        for some in _divided(metrics, _METRICS):
            self._client.log_batch(self._run, metrics=some)


def _tidy(key: str) -> str:
    """Return a key with the characters that MLflow accepts."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in key)


def _divided(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
