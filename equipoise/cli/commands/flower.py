"""``equipoise flower``: runs across machines."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from equipoise.cli.errors import errors_as_lines
from equipoise.cli.help import Command
from equipoise.cli.options import Debug, refuse_study
from equipoise.cli.paths import check_directory
from equipoise.errors import InputError

flower = typer.Typer(
    help="Run across machines, on Flower.",
    epilog="Example: equipoise flower new my-app --experiment experiment.yaml",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@flower.command(
    cls=Command,
    epilog="Example: equipoise flower new my-app --experiment experiment.yaml && cd my-app",
)
def new(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the app.")],
    experiment: Annotated[Path, typer.Option(help="The YAML file of the experiment.")],
    debug: Debug = False,
) -> None:
    """Write a Flower app for an experiment."""
    with errors_as_lines(debug):
        check_directory(directory, "choose another DIR")
        from equipoise.config import read_yaml
        from equipoise.flower.new import new_app

        refuse_study(read_yaml(experiment), experiment)
        for path in new_app(directory, experiment):
            typer.echo(path)


@flower.command(cls=Command, context_settings=_PASSED_ON)
def run(context: typer.Context) -> None:
    """Start a run: Flower's `flwr run`, without telemetry and update check."""
    _become("flwr", "run", *context.args)


@flower.command(cls=Command, context_settings=_PASSED_ON)
def superlink(context: typer.Context) -> None:
    """Start the server: Flower's `flower-superlink`.

    It starts without telemetry, update check and installation of packages.
    """
    _become("flower-superlink", *context.args)


@flower.command(cls=Command, context_settings=_PASSED_ON)
def supernode(context: typer.Context) -> None:
    """Start a client's node: Flower's `flower-supernode`, without telemetry and update check."""
    _become("flower-supernode", *context.args)


@flower.command(cls=Command, epilog="Example: equipoise flower release 3 /srv/runs/first")
def release(
    client: Annotated[int, typer.Argument(metavar="N", help="The number of the client.")],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The run directory, on the server.")
    ],
    debug: Debug = False,
) -> None:
    """Free a client's number, so that another node may register it."""
    with errors_as_lines(debug):
        from equipoise.flower import identity

        before = identity.release(directory, client)
        typer.echo(
            f"client {client} no longer belongs to {before.key}; the next node that registers it "
            "becomes its owner"
        )


def _become(command: str, *arguments: str) -> NoReturn:
    """Replace this process by a command of Flower, so that signals and exit codes are its own."""
    from equipoise.flower import QUIET, UNASKED

    with errors_as_lines(debug=False):
        # Flower starts further commands by name, so their directory must be in PATH.
        folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        found = shutil.which(command, path=folders)
        if found is None:
            raise InputError(f"{command} is not installed; pip install 'equipoise[flower]'")
        os.execve(found, [command, *arguments], {**QUIET, **UNASKED, **os.environ, "PATH": folders})
