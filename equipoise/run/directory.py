"""The files of a run directory: their names, and how its text files are written and read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from equipoise.data.columns import COLUMNS, Columns, read_columns
from equipoise.documents import read_json, yaml_from
from equipoise.errors import InputError, RunError
from equipoise.federation import Federation
from equipoise.run.checksums import SUMS, read_sums, sha256, verify, write_sums
from equipoise.run.files import write_atomically

CONFIG, SUMMARY, NAMES = "config.yaml", "summary.json", "names.json"
GLOBAL, PERSONAL, INDEX = "model.safetensors", "personal.safetensors", "client_index.safetensors"


def write_first_files(directory: Path, config: bytes, attached: Mapping[str, bytes]) -> None:
    """Write the first files of a run.

    The configuration is written last: a directory with this file contains a run.
    """
    for name, content in attached.items():
        write_atomically(directory / name, content)
    write_sums(
        directory,
        {name: sha256(content) for name, content in {**attached, CONFIG: config}.items()},
    )
    write_atomically(directory / CONFIG, config)


def files_of(federation: Federation) -> dict[str, bytes]:
    """Return the files about its data that a run keeps, by name: how inputs are made of columns."""
    columns = _columns_of(federation)
    return {} if columns is None else {COLUMNS: columns.content()}


def other_columns(directory: Path, federation: Federation, **compared: bool) -> str | None:
    """Return the first difference between the columns of a run and of a federation, or ``None``.

    Only one of them may have columns: runs of older versions and on Flower do not store them.
    """
    columns = _columns_of(federation)
    if columns is None or not (directory / COLUMNS).exists():
        return None
    return read_columns(directory).difference(columns, **compared)


def _columns_of(federation: Federation) -> Columns | None:
    # On Flower the federation is a roster, which has no data.
    return getattr(federation, "columns", None)


def write_other_config(directory: Path, config: bytes, attached: Mapping[str, bytes]) -> None:
    """Write the configuration of a run that goes on with more rounds or with other checkpoints.

    The order matters: a run with a summary is complete, and a configuration that differs from its
    checksum is damaged. So both configurations have a checksum until the old one is replaced.
    """
    (directory / SUMMARY).unlink(missing_ok=True)
    # Runs of older versions may lack a copy.
    kept = {name: file for name, file in attached.items() if (directory / name).exists()}
    sums = {name: sha256(content) for name, content in {**kept, CONFIG: config}.items()}
    has_sums = read_sums(directory) is not None
    if has_sums:
        write_sums(directory, sums, {CONFIG: sha256((directory / CONFIG).read_bytes())})
    write_atomically(directory / CONFIG, config)
    if has_sums:
        write_sums(directory, sums)


def read_names(directory: Path) -> list[str] | None:
    """Read the names of a run's clients by number; ``None`` if they have no names."""
    if not (directory / NAMES).exists():
        return None
    # Unfinished runs of older versions have no checksum of their names.
    if (directory / SUMMARY).exists() or NAMES in (read_sums(directory) or ()):
        verify(directory, NAMES)
    names = read_json(directory / NAMES)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RunError(f"{directory / NAMES} must contain a list of names")
    return names


def read_config(directory: Path) -> dict[str, Any]:
    """Read a run's configuration. A missing or a changed one is refused."""
    path = directory / CONFIG
    if path.exists():
        verify(directory, CONFIG)
    try:
        config = yaml_from(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise InputError(f"{directory} holds no run: cannot read {path.name} ({said})") from error
    if not isinstance(config, dict) or not isinstance(config.get("resolved"), dict):
        raise InputError(f"{directory} holds no run: {path.name} is not a run's configuration")
    return config


def left_over(path: Path, attached: Mapping[str, bytes]) -> bool:
    """Return whether a file may be from a process that was killed before its run began."""
    first = (*attached, SUMS, CONFIG)
    if path.name == SUMS or path.name in {f"{name}.tmp" for name in first}:
        return True
    return path.is_file() and path.read_bytes() == attached.get(path.name)


def refuse_a_run_in(directory: Path) -> None:
    """Refuse to start a run in a directory that has one."""
    if (directory / CONFIG).exists():
        raise InputError(
            f"{directory} already holds a run; resume it (--resume, in Python resume=True) or "
            "choose another directory"
        )


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """Return the content of a run's ``config.yaml``."""
    return yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False).encode()
