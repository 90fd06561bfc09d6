"""The server side of a run on Flower: the ordinary round loop, its checkpoints and its metrics."""

from __future__ import annotations

import dataclasses
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from equipoise.config import Experiment
from equipoise.engine.settings import Machine, Training
from equipoise.errors import InputError
from equipoise.flower.engine import FlowerEngine
from equipoise.flower.identity import OWNERS, Owners, read_invited
from equipoise.flower.nodes import Nodes, reasons
from equipoise.flower.roster import Roster, read_roster
from equipoise.flower.silo import engine_over, holds_samples, read_experiment
from equipoise.run.api import Run
from equipoise.run.callbacks import Callback
from equipoise.run.directory import CONFIG
from equipoise.run.left_out import missing_in, missing_words, rounds_left_out
from equipoise.run.trainer import Progress

log = logging.getLogger("flwr.equipoise")

CLIENTS = "clients.json"
# Clients refuse longer names of runs. The limit includes the random part.
_LONGEST_NAME = 150


def server_app(experiment: str | Path, *, callbacks: Sequence[Callback] = ()) -> ServerApp:
    """Create the ``ServerApp`` of an experiment.

    Parameters
    ----------
    experiment : path
        The experiment's file. The run configuration may override values (``set``) and name the run
        directory (``out``). If the directory already contains this run, the run is resumed.
    callbacks : sequence of Callback
        Callbacks on the server, in addition to the trackers of the experiment; see
        :class:`equipoise.Callback`.

    Returns
    -------
    ServerApp
        The counterpart of :func:`equipoise.flower.client.client_app`.

    Examples
    --------
    >>> type(server_app("experiment.yaml")).__name__
    'ServerApp'
    """
    app, path = ServerApp(), Path(experiment)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        given = read_experiment(path, context.run_config)
        serve(grid, given, context.run_config.get("out"), callbacks, beside=path.parent)

    return app


def serve(
    grid: Grid,
    experiment: Experiment,
    out: Any = None,
    callbacks: Sequence[Callback] = (),
    *,
    beside: Path | None = None,
) -> Run:
    """Run an experiment with the clients behind a grid.

    Parameters
    ----------
    grid : Grid
        Flower's connection to the clients.
    experiment : Experiment
        What to train.
    out : path, optional
        The run directory.
    callbacks : sequence of Callback
        Callbacks, in addition to the trackers of the experiment.
    beside : Path, optional
        The base of a relative path ``flower.roster``; by default the working directory.

    Returns
    -------
    Run
        The finished run. The clients' personal models are on their own disks.
    """
    if experiment.flower.privacy is not None and experiment.evaluation.average_kept:
        raise InputError(
            "evaluation.average_kept asks clients for parts of the model without the protection of "
            "flower.privacy; leave out one of them"
        )
    directory = Path(out).expanduser() if out else None
    # Clients are not stacked here, so there is no chunk size to measure.
    experiment = dataclasses.replace(
        experiment, machine=dataclasses.replace(experiment.machine, chunk=1)
    )
    identity = Identity(directory, experiment, beside or Path())
    nodes = Nodes(grid, identity.roster, experiment.flower, identity.owners)
    resume = directory is not None and (directory / CONFIG).exists()
    nodes.gather()
    evaluation, method = experiment.evaluation, experiment.method

    def engine(
        federation: Any,
        model: nn.Module,
        training: Training,
        machine: Machine,
        seed: int,
        view: Any,
    ) -> FlowerEngine:
        return FlowerEngine(
            nodes,
            identity.name,
            method,
            federation,
            model,
            machine,
            seed,
            training.rounds,
            durable=directory is not None,
            both=(method.personal or evaluation.fine_tune is not None)
            and not evaluation.average_kept,
            holding=engine_over(experiment, experiment.federation())
            if holds_samples(experiment)
            else None,
        )

    roster: Any = identity.roster
    run = experiment.run(
        directory,
        resume=resume,
        on_round=_tell,
        callbacks=callbacks,
        federation=roster,
        engine=engine,
    )
    trainer: Any = run.trainer
    chosen = trainer.selected()
    if untold := trainer.engine.hand_out(
        chosen.shared,
        chosen.round,
        personal=method.personal or evaluation.fine_tune is not None,
        best=evaluation.select == "best",
    ):
        log.warning("these clients did not receive their final model: %s", reasons(untold))
    _tell_results(run, directory)
    return run


class Identity:
    """The name of a run, its clients and their nodes, stored in the run directory.

    Parameters
    ----------
    directory : Path, optional
        The run directory.
    experiment : Experiment
        The experiment.
    beside : Path
        The base of a relative path ``flower.roster``.
    """

    def __init__(self, directory: Path | None, experiment: Experiment, beside: Path) -> None:
        self._path = directory / CLIENTS if directory else None
        self._saved = 0
        name = f"{experiment.data['name']}-{experiment.method.name}-seed{experiment.seed}"
        name = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:_LONGEST_NAME]
        more: Mapping[str, Any] = {}
        self.roster = Roster(str(experiment.data["name"]))
        if self._path and self._path.exists():
            self.roster, more = read_roster(self._path)
            self._saved = len(self.roster.known)
        self._name = str(more.get("run", f"{name}-{uuid.uuid4().hex[:12]}"))
        settings = experiment.flower
        self.owners = Owners(
            directory / OWNERS if directory else None,
            settings.identity,
            None
            if settings.roster is None
            else read_invited(beside / Path(settings.roster).expanduser()),
            self._name,
        )

    def name(self) -> str:
        """Return the name under which clients store their memories of this run, and save it."""
        # The directory is created after all checks, so it may not exist while clients register.
        if self._path and self._path.parent.exists() and len(self.roster.known) != self._saved:
            self.roster.save(self._path, run=self._name)
            self._saved = len(self.roster.known)
        self.owners.save()
        return self._name


def _tell(progress: Progress) -> None:
    # Not every round is evaluated.
    scores = (
        ""
        if progress.mean is None
        else f"; latest evaluation: mean {progress.mean:.4f}, worst client {progress.worst:.4f}"
    )
    log.info(
        "round %d of %d: loss %.4f%s", progress.round, progress.rounds, progress.train_loss, scores
    )


def _tell_results(run: Run, directory: Path | None) -> None:
    """Log the results of all kinds of models, who is left behind, and who has no result."""
    for model, parts in run.summary["results"].items():
        for clients, part in parts.items():
            if part.get("mean") is None:
                continue
            of = f"{part['clients']} of {part['clients'] + part['left_out']} "
            log.info(
                "%s of the %s model, %s%s clients: mean %.4f, worst client %.4f (%s), worst group "
                "%.4f (%s)",
                run.summary["score"],
                model,
                of if part["left_out"] else "",
                clients,
                part["mean"],
                part["worst_client"],
                part["worst_client_name"],
                part["worst_group"],
                part["worst_group_name"],
            )
    for clients, entry in missing_in(run.summary).items():
        log.warning("%s", missing_words(clients, entry))
    for entry in run.summary.get("updates_left_out", {"worst": ()})["worst"]:
        log.warning(
            "updates of client %d (%s) were left out of %s rounds: %s",
            entry["client"],
            entry["name"],
            rounds_left_out(entry),
            entry["reason"],
        )
    if directory is not None:
        log.info("files: %s; for a page about the run: equipoise report %s", directory, directory)
