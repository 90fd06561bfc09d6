"""A small Flower app for an experiment."""

from __future__ import annotations

import math
import re
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

import yaml

from equipoise.checks import name_and_options
from equipoise.config import Experiment, experiment_from, read_yaml
from equipoise.documents import yaml_from
from equipoise.errors import InputError
from equipoise.imports import file_of
from equipoise.method import Sees

EXPERIMENT, APP, PROJECT, README = "experiment.yaml", "app.py", "pyproject.toml", "README.md"

# Added below an experiment that has no guard. It is off by default, because the right bound depends
# on the task.
_GUARD = Template(
    """
# One client that sends wrong updates can spoil the model. To bound every update by twice the median
# norm of all of them, and to drop those beyond five times the median, replace the method by the
# same with a guard (docs/security.md of Equipoise says what it stops, what not, and what it costs):
#   $by_median
# or with a fixed bound on the norm, a little above those that honest clients reach (guard_norms in
# rounds.jsonl):
#   $by_bound
"""
)

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")

_APP = '''"""The server app and the client app of experiment.yaml."""

from pathlib import Path

from equipoise.flower import client_app, server_app

EXPERIMENT = Path(__file__).with_name("experiment.yaml")

server = server_app(EXPERIMENT)

# If the data of a silo are neither in a directory of arrays nor in a source of Equipoise, use
# client_app(EXPERIMENT, data=my_federation), where my_federation(node_config) returns a federation
# of one client.
client = client_app(EXPERIMENT)
'''

# What the configuration of a node contains, and how nodes differ, if not by the client's number.
_NODES = {
    "silos": (
        'data="/srv/clinic-0"',
        "the directory of its own data, whose name ends in the client's number",
    )
}

_PROJECT = Template(
    """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "$name"
version = "1.0.0"
description = "$method on $data, with Equipoise"
license = "Apache-2.0"
dependencies = ["equipoise[flower]>=$version"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "equipoise"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

[tool.flwr.app.config]
# The run directory, on the machine of the SuperLink. If it contains this run, the run is resumed.
out = "~/.equipoise/results/$name"
# Changes to the experiment: flwr run . --run-config 'set="training.rounds=5; seed=1"'
set = ""
"""
)

_README = Template(
    """# $name

`$method` on `$data`, as described in `experiment.yaml`. All machines need
`pip install 'equipoise[flower]'`.

    # simulated on this machine, which needs pip install 'equipoise[simulation]'
    equipoise flower run . --stream \\
        --federation-config 'num-supernodes=$clients client-resources-num-cpus=1'

    # on a SuperLink named in ~/.flwr/config.toml
    equipoise flower run . my-superlink --stream

Start the SuperLink and the SuperNodes with

    equipoise flower superlink --host 0.0.0.0 --ssl-ca-certfile ca.crt \\
        --ssl-certfile server.pem --ssl-keyfile server.key
    equipoise flower supernode --superlink HOST:8000 --root-certificates ca.crt \\
        --node-config '$node'

Start one SuperNode for each client, each with
$differing.

These are Flower's own commands (`flwr run`, `flower-superlink`, `flower-supernode`), with
telemetry, update check and installation of dependencies turned off. Equipoise's `docs/flower.md`
describes a deployment step by step.
"""
)


def new_app(directory: Path, experiment: Path) -> list[Path]:
    r"""Write a Flower app that ``flwr run`` accepts without changes.

    Parameters
    ----------
    directory : Path
        The directory of the app, which must be empty or not exist. Its name is that of the app, so
        Flower's rules for names apply.
    experiment : Path
        The experiment's file. The app gets a copy with the number of clients to wait for, and
        copies of the files that it imports.

    Returns
    -------
    list of Path
        The files.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "experiment.yaml").write_text("method: ditto\ndata: digits\n")
    >>> [path.name for path in new_app(folder / "app", folder / "experiment.yaml")]
    ['app.py', 'experiment.yaml', 'pyproject.toml', 'README.md']
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(
            f"{directory} exists and is not empty; choose another directory for the app"
        )
    name = directory.resolve().name
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} is not a valid name for a Flower app; it must begin with a letter and have "
            "up to 32 letters, digits and hyphens"
        )
    content = read_yaml(experiment)
    read = experiment_from(content, str(experiment))
    if read.method.sees is Sees.DATA:
        raise InputError(
            f"{experiment}: method {read.method.name!r} pools all data, "
            "but on Flower they stay with the clients; choose another method"
        )
    if read.flower.privacy:
        with read.origins.named():
            read.flower.privacy.check(read.method.local)
    text, clients = experiment.read_text(encoding="utf-8"), read.flower.clients
    if "clients" not in (content.get("flower") or {}):
        clients = _count_clients(read)
        text = _with_clients(text, yaml_from(text), clients)
        imports = {"imports": content["imports"]} if "imports" in content else {}
        experiment_from({**yaml_from(text), **imports}, str(experiment))
    node, differing = _NODES.get(read.data["name"], ("client=0", "a different number"))
    facts = {
        "name": name,
        "method": read.method.name,
        "data": read.data["name"],
        "version": version("equipoise"),
        "clients": clients,
        "node": node,
        "differing": differing,
    }
    if read.method.guard is None and read.method.local.keeps != "all":
        text = text.rstrip("\n") + "\n" + _guard_hint(content.get("method", read.method.name))
    contents = {
        APP: _APP,
        EXPERIMENT: text,
        PROJECT: _PROJECT.substitute(facts),
        README: _README.substitute(facts),
    }
    # A Flower app can import modules from its own directory.
    for own in filter(None, map(file_of, read.imports)):
        if own.name in contents:
            raise InputError(
                f"{experiment}: imports {own.name!r}, a name that the app uses itself; rename the "
                "file"
            )
        contents[own.name] = own.read_text(encoding="utf-8")
    directory.mkdir(parents=True, exist_ok=True)
    for file, written in contents.items():
        (directory / file).write_text(written, encoding="utf-8")
    return [directory / file for file in contents]


def _guard_hint(method: Any) -> str:
    """Return the hint about guards, with all options that the method has in the experiment."""
    name, options = name_and_options(method, "method")
    guards = {
        "by_median": {"name": "norm", "multiple": 2.0, "drop": 5.0},
        "by_bound": {"name": "norm", "bound": 2.0},
    }
    lines = {
        key: yaml.safe_dump(
            {"name": name, **options, "guard": guard},
            default_flow_style=True,
            sort_keys=False,
            allow_unicode=True,
            width=math.inf,
        ).strip()
        for key, guard in guards.items()
    }
    return _GUARD.substitute({key: f"method: {line}" for key, line in lines.items()})


def _with_clients(text: str, content: dict[str, Any], clients: int) -> str:
    """Add the number of clients to an experiment, keeping the text of its file if possible."""
    line = f"clients: {clients}  # that must have registered before round 1\n"
    if "flower" in content:
        words = re.sub(
            r"^flower:[ \t]*\n([ \t]+)", rf"flower:\n\g<1>{line}\g<1>", text, flags=re.MULTILINE
        )
    else:
        words = f"{text}\nflower:\n  {line}"
    wanted = {**content, "flower": {"clients": clients, **(content.get("flower") or {})}}
    try:
        added = yaml_from(words) == wanted
    except yaml.YAMLError:
        added = False
    return words if added else yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True)


def _count_clients(experiment: Experiment) -> int:
    """Return the number of clients, if their data can be read here."""
    try:
        return experiment.federation().clients
    except InputError:
        return experiment.flower.clients
