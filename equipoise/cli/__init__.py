"""The command line.

Slow modules are imported only when a command needs them, so that help is fast.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from equipoise.cli.commands.advise import advise
from equipoise.cli.commands.cache import cache
from equipoise.cli.commands.compare import compare
from equipoise.cli.commands.data import data
from equipoise.cli.commands.explain import explain
from equipoise.cli.commands.flower import flower
from equipoise.cli.commands.methods import methods
from equipoise.cli.commands.report import report
from equipoise.cli.commands.run import run
from equipoise.cli.help import Command

app = typer.Typer(
    name="equipoise",
    help="Federated learning that works for every client, and shows which clients are left behind.",
    epilog="Example: equipoise run --method fedavg --data digits --rounds 20",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
command = partial(app.command, cls=Command)
command(
    epilog="Example: equipoise run --method fedprox --data digits --rounds 20 --set method.mu=0.5 "
    "--seed 1 --out runs/mine"
)(run)
command(epilog="Example: equipoise methods --json")(methods)
command(epilog="Example: equipoise explain training.schedule")(explain)
command(
    epilog="Example: equipoise data digits --set partition.name=dirichlet "
    "--set partition.clients=20 --set partition.beta=0.3 --picture digits.png"
)(data)
command(epilog="Example: equipoise cache --prune 30")(cache)
command(epilog="Example: equipoise compare demo --markdown table.md --csv table.csv")(compare)
command(epilog="Example: equipoise report runs/demo --out demo.html --figures figures")(report)
command(epilog="Example: equipoise advise digits --set data.imbalance=5")(advise)
app.add_typer(flower, name="flower")


def main() -> None:
    """Run the command line."""
    app(prog_name="equipoise")


def _version(wanted: bool) -> None:
    if wanted:
        from equipoise import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
