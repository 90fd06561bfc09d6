"""The Python environments of peers. Each has its own, because their requirements conflict."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

from equipoise.errors import InputError, RunError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENVIRONMENTS = HERE / ".envs"


@dataclass(frozen=True)
class Peer:
    """A script in ``benchmarks/peers``, its requirements, and the devices it can run on."""

    name: str
    script: str
    requirements: str | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def path(self) -> Path:
        """Locate the script."""
        return HERE / "peers" / self.script


PEERS = {
    peer.name: peer
    for peer in (
        Peer("bare", "bare.py"),
        Peer("pfl", "pfl_research.py", "requirements-pfl.txt"),
        Peer("pfl5", "pfl_five.py", "requirements-pfl.txt", devices=("cuda",)),
        Peer("flower", "flower.py", "requirements-flower.txt", devices=("cpu",)),
        Peer("equipoise", "equipoise_engine.py"),
    )
}


@dataclass(frozen=True)
class Choices:
    """The environments given on the command line, by peer: a directory, or extra import paths."""

    envs: dict[str, Path] = field(default_factory=dict)
    pythonpaths: dict[str, Path] = field(default_factory=dict)


def interpreter(peer: Peer, choices: Choices) -> Path:
    """Return the Python for a peer. Create its environment if there is none.

    Parameters
    ----------
    peer : Peer
        The peer.
    choices : Choices
        A directory given for the peer is preferred. With an import path, this Python is used.

    Returns
    -------
    Path
        The executable.

    Examples
    --------
    >>> interpreter(PEERS["bare"], Choices()) == Path(sys.executable)
    True
    """
    if peer.name in choices.envs:
        python = choices.envs[peer.name] / "bin" / "python"
        if not python.exists():
            raise InputError(
                f"no Python at {str(python)!r}, from --env {peer.name}=…; give a virtual "
                "environment"
            )
        return python
    if peer.requirements is None or peer.name in choices.pythonpaths:
        return Path(sys.executable)
    return _made(peer, HERE / "peers" / peer.requirements)


def variables(peer: Peer, choices: Choices, threads: int) -> dict[str, str]:
    """Return the environment variables of a peer's process: import paths and threads."""
    paths = [ROOT, *([choices.pythonpaths[peer.name]] if peer.name in choices.pythonpaths else [])]
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    # Importing equipoise has set this here, but peers should run with their defaults.
    own = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    return {
        **own,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *inherited]),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }


def _made(peer: Peer, requirements: Path) -> Path:
    directory = ENVIRONMENTS / peer.name
    python = directory / "bin" / "python"
    # Written last, so an interrupted or outdated installation is repeated.
    stamp = directory / "installed"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {peer.name} into {directory} …", file=sys.stderr, flush=True)
    venv.create(directory, with_pip=True, clear=True)
    # Only one retry: if the extra index of CPU builds cannot be reached, pip tries it again for
    # every package.
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--retries",
        "1",
        "-r",
        str(requirements),
    ]
    installation = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if installation.returncode != 0:
        print(installation.stdout, file=sys.stderr)
        raise RunError(
            f"could not install {requirements.name} for peer {peer.name!r}; give --env "
            f"{peer.name}=DIR instead"
        )
    stamp.write_text(wanted)
    return python
