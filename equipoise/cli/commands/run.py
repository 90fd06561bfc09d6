"""``equipoise run``: one experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli.errors import errors_as_lines, say_import
from equipoise.cli.options import (
    RUNS,
    Debug,
    Device,
    Import,
    Json,
    NoReport,
    Set,
    Trust,
    overrides_from,
    refuse_study,
)
from equipoise.cli.output import name_of, print_json, report_on
from equipoise.cli.paths import check_directory
from equipoise.errors import InputError


def run(
    experiment: Annotated[
        Path | None,
        typer.Argument(
            help="A YAML file, or the directory of a run to resume or, with more --rounds, to make "
            "longer. By default the defaults and the options below are used."
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Method; `equipoise methods` lists them.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Source of the data; digits without a file.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model, such as mlp or cnn2.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run directory.", show_default="a new one, runs/DATA-METHOD-seedN"),
    ] = None,
    set_: Set = None,
    import_: Import = None,
    device: Device = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in the directory.")
    ] = False,
    trust: Trust = False,
    no_report: NoReport = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Run one experiment, and show which clients are left behind."""
    with errors_as_lines(debug):
        flags = {
            "imports": ("--import", import_ or None),
            "method": ("--method", method),
            "data": ("--data", data),
            "model": ("--model", model),
            "training.rounds": ("--rounds", rounds),
            "seed": ("--seed", seed),
            "machine.device": ("--device", device),
        }
        if experiment and experiment.is_dir():
            if out is not None and out != experiment:
                raise InputError(
                    f"{experiment} is a run directory, in which the run is resumed; leave out --out"
                )
            if not (experiment / "config.yaml").exists():
                raise InputError(
                    f"{experiment} is a directory without a run (it has no config.yaml); valid: a "
                    "run directory or an experiment file"
                )
            experiment, out, resume = experiment / "config.yaml", experiment, True
        if resume and out is None:
            out = _directory_of(experiment)
        from equipoise.cli.show.progress import progress_of_run
        from equipoise.cli.show.report import show_report
        from equipoise.cli.show.run import run_document, show_run
        from equipoise.config import experiment_from, read_yaml
        from equipoise.engine.link import ProcessLost
        from equipoise.imports import import_of_run
        from equipoise.run.processes import rank_of_torchrun

        overrides = overrides_from(flags, set_)
        content: dict[str, Any] = (
            {"data": "digits"} if experiment is None else read_yaml(experiment)
        )
        if experiment:
            refuse_study(content, experiment)
        if experiment and "resolved" in content and not import_:
            # Anyone may have put code into a run directory. An experiment file is the user's own.
            import_of_run(content.get("imports", []), experiment.parent, trust=trust)
        where = "" if experiment is None else str(experiment)
        made = experiment_from(content, where, overrides, on_import=say_import)
        if rank_of_torchrun():
            # Process 0 writes the directory, and says what there is to say.
            try:
                made.run()
            except ProcessLost:
                raise typer.Exit(1) from None
            return
        directory = out or _fresh(RUNS / f"{made.data['name']}-{made.method.name}-seed{made.seed}")
        if not resume:
            check_directory(directory, "choose another with --out")
        elif not directory.exists():
            raise InputError(
                f"--resume: {directory} does not exist, so there is no run to resume; start it "
                "without --resume"
            )
        try:
            with progress_of_run(made.method.name) as on_round:
                finished = made.run(directory, resume=resume, on_round=on_round)
        except KeyboardInterrupt:
            trusted = " --trust" if made.imports else ""
            raise KeyboardInterrupt(f"resume with: equipoise run {directory}{trusted}") from None
        report_ = None if no_report else report_on(directory)
        if json_:
            print_json({**run_document(finished), "report": name_of(report_)})
        else:
            show_run(finished)
            if report_:
                show_report(report_)


def _directory_of(experiment: Path | None) -> Path:
    """Return the run directory to resume without --out: that of the given configuration."""
    if experiment is None or experiment.name != "config.yaml":
        raise InputError(
            "--resume needs the run to resume: --out DIR, or DIR/config.yaml as the experiment"
        )
    return experiment.parent


def _fresh(directory: Path) -> Path:
    """Return a directory that does not exist yet."""
    candidate, number = directory, 2
    while candidate.exists():
        candidate, number = directory.with_name(f"{directory.name}-{number}"), number + 1
    return candidate
