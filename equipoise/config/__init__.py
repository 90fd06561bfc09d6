"""Experiments as YAML files or mappings, checked and completed before training.

A file uses the same names as the Python API. Keys, types and defaults are read from the dataclasses
and functions that they belong to, so a new method, model or source needs no change here. Every
error names the key, where its value came from, and what is valid.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from equipoise import data, methods, tracking
from equipoise.config.checking import Reader
from equipoise.config.origins import Origins, Override, apply_override
from equipoise.config.suggesting import unknown_key
from equipoise.documents import yaml_from
from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, near_files
from equipoise.federation import Federation
from equipoise.flower.settings import FlowerSettings
from equipoise.imports import file_of, import_own
from equipoise.method import Method
from equipoise.run.api import Run, train
from equipoise.run.callbacks import Callback
from equipoise.run.evaluation import Evaluation
from equipoise.run.plain import to_plain
from equipoise.run.start import Start
from equipoise.run.trainer import MakeEngine, Progress
from equipoise.text import one_line, represented

__all__ = [
    "Experiment",
    "Override",
    "experiment_from",
    "load_experiment",
    "read_yaml",
    "settings_from",
]

SECTIONS = (
    "imports",
    "method",
    "data",
    "model",
    "training",
    "machine",
    "evaluation",
    "seed",
    "checkpoint_every",
    "start",
    "flower",
    "tracking",
)
# The config.yaml of a run is also an experiment file. This section of it is not a setting.
IGNORED = ("resolved",)
S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything a run depends on.

    Attributes
    ----------
    method : Method
        What is federated.
    data, model : dict
        The name and all options, including defaults.
    training, machine, evaluation
        The settings.
    seed : int
        Of the initial model and of all random numbers of training. ``data.seed``, which determines
        the partition and the splits, has the same value by default.
    checkpoint_every : int or None
        Rounds between checkpoints. By default there is one after round 1, and then about every ten
        seconds, or less often if a checkpoint takes more than a second: they take about a tenth of
        the time at most. A killed run that is resumed repeats the rounds after its last checkpoint.
        It may be resumed with another value, and keeps the one it has otherwise.
    start : Start or None
        Where the initial model comes from, if not from the seed.
    flower : FlowerSettings
        Settings of a run on Flower. In one process they have no effect.
    imports : tuple of str
        User code that is imported first; see :func:`equipoise.imports.import_own`.
    tracking : tuple of dict
        The trackers that write the values of runs, each a name and options; see
        :mod:`equipoise.tracking`.

    Examples
    --------
    >>> method = {"name": "fedprox", "mu": 0.5}
    >>> experiment = experiment_from({"method": method, "data": "digits", "seed": 3})
    >>> experiment.method.local, experiment.data["seed"]
    (FedProx(mu=0.5), 3)
    """

    method: Method
    data: dict[str, Any]
    model: dict[str, Any]
    training: Training
    machine: Machine
    evaluation: Evaluation
    seed: int = 0
    checkpoint_every: int | None = None
    start: Start | None = None
    flower: FlowerSettings = field(default_factory=FlowerSettings)
    imports: tuple[str, ...] = ()
    tracking: tuple[dict[str, Any], ...] = ()
    origins: Origins = field(repr=False, compare=False)

    def federation(self) -> Federation:
        """Load the federation.

        Examples
        --------
        >>> experiment_from({"data": "digits"}).federation().clients
        22
        """
        # Imported again, because another process may have read the experiment.
        import_own(self.imports)
        with self.origins.named("data"):
            return data.load(**self.data)

    def run(
        self,
        out: str | Path | None = None,
        *,
        resume: bool = False,
        on_round: Callable[[Progress], None] | None = None,
        callbacks: Sequence[Callback] = (),
        federation: Federation | None = None,
        engine: MakeEngine = StackedEngine,
    ) -> Run:
        """Train; see :func:`equipoise.train`.

        Parameters
        ----------
        out : path, optional
            The run directory. Without it nothing is written.
        resume : bool
            Whether to resume the run in the directory.
        on_round : callable, optional
            Called with the progress after every round.
        callbacks : sequence of Callback
            Callbacks in addition to the trackers of the experiment.
        federation : Federation, optional
            The federation, if it is not that of the experiment's data.
        engine : callable
            Makes the engine that runs the method; by default in this process.

        Returns
        -------
        Run
            With its summary and its models.

        Examples
        --------
        >>> experiment_from({"data": "digits", "training": {"rounds": 1}}).run().summary["rounds"]
        1
        """
        import_own(self.imports)
        sections: dict[str, Any] = {"imports": self._import_names()} if self.imports else {}
        # In one process nothing is sent that needs protection.
        if engine is not StackedEngine:
            protection = {"privacy": self.flower.privacy, "max_share": self.flower.max_share}
            if used := {
                name: to_plain(value) for name, value in protection.items() if value is not None
            }:
                sections["flower"] = used
        if self.tracking:
            sections["tracking"] = [dict(tracker) for tracker in self.tracking]
        with self.origins.named("tracking"):
            trackers = [tracking.build(**tracker) for tracker in self.tracking]
        federation = self.federation() if federation is None else federation
        with self.origins.named():
            return train(
                federation,
                method=self.method,
                model=self.model,
                training=self.training,
                machine=self.machine,
                evaluation=self.evaluation,
                seed=self.seed,
                out=out,
                resume=resume,
                checkpoint_every=self.checkpoint_every,
                start=self.start,
                data=self.data,
                sections=sections,
                attached={
                    file.name: file.read_bytes()
                    for file in filter(None, map(file_of, self.imports))
                },
                on_round=on_round,
                callbacks=[*callbacks, *trackers],
                engine=engine,
            )

    def plain(self) -> dict[str, Any]:
        """Return the experiment as a mapping, as in the ``config.yaml`` of its run.

        The mapping has no ``resolved`` and ``tracking``.

        Returns
        -------
        dict
            Mappings, lists, numbers and text, which :func:`experiment_from` accepts.

        Examples
        --------
        >>> experiment_from({"data": "digits"}).plain()["method"]
        {'name': 'fedavg', 'weights': 'size', 'sampling': {'name': 'uniform'}}
        """
        plain = {
            **({"imports": self._import_names()} if self.imports else {}),
            "method": methods.describe(self.method),
            "data": self.data,
            "model": self.model,
            "training": to_plain(self.training),
            "machine": to_plain(self.machine),
            "evaluation": to_plain(self.evaluation),
            "seed": self.seed,
            "checkpoint_every": self.checkpoint_every,
        }
        if self.start is not None:
            plain["start"] = to_plain(self.start)
        if self.flower != FlowerSettings():
            plain["flower"] = to_plain(self.flower)
        made: dict[str, Any] = json.loads(json.dumps(plain))
        return made

    def _import_names(self) -> list[str]:
        """Return the imports as in a run's configuration, beside which the files are copied."""
        return [Path(given).name if file_of(given) else given for given in self.imports]


def load_experiment(path: str | Path, overrides: Sequence[str | Override] = ()) -> Experiment:
    r"""Read an experiment file.

    Parameters
    ----------
    path : path
        A YAML file, or the ``config.yaml`` of a run.
    overrides : sequence of str
        ``key=value`` with dotted keys and YAML values, applied in order.

    Returns
    -------
    Experiment
        Checked.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "experiment.yaml"
    >>> _ = file.write_text("method: fedprox\ndata: digits")
    >>> load_experiment(file, ["method.mu=1e-3"]).method.local
    FedProx(mu=0.001)
    """
    return experiment_from(read_yaml(path), str(path), overrides)


def experiment_from(
    mapping: Mapping[str, Any],
    where: str = "the experiment",
    overrides: Sequence[str | Override] = (),
    *,
    on_import: Callable[[str], None] | None = None,
) -> Experiment:
    """Make an experiment from plain values.

    Parameters
    ----------
    mapping : mapping
        With ``data`` and, if they differ from the defaults, ``method``, ``model``, ``training``,
        ``machine``, ``evaluation``, ``seed``, ``checkpoint_every`` and ``imports``.
    where : str
        Where the mapping came from, for errors; empty if everything is in the overrides.
    overrides : sequence of str
        As in :func:`load_experiment`.
    on_import : callable, optional
        Called with the path or name of each module in ``imports`` before it is executed.
        Everything that does not depend on this code is checked before.

    Returns
    -------
    Experiment
        Checked.

    Examples
    --------
    >>> experiment_from({"data": "digits", "training": {"rounds": "ten"}}, "a.yaml")
    Traceback (most recent call last):
    equipoise.errors.InputError: a.yaml: training.rounds must be a whole number, got 'ten'
    """
    given = [item if isinstance(item, Override) else Override.parse(item) for item in overrides]
    origins = Origins(where, tuple(given))
    if not isinstance(mapping, Mapping):
        raise InputError(
            f"{where} must hold keys with values, such as 'data: digits', got "
            f"{represented(mapping)}"
        )
    content: dict[str, Any] = dict(mapping)
    for override in given:
        apply_override(content, override)
    for key in content:
        if key not in (*SECTIONS, *IGNORED):
            raise unknown_key(str(key), SECTIONS, where=origins.of(str(key)))
    content = {key: value for key, value in content.items() if value is not None}
    if "data" not in content:
        raise InputError(f"{where} names no data; valid: {', '.join(data.SOURCES)}")
    return Experiment(**Reader(origins, on_import).experiment(content))


def settings_from(kind: type[S], given: Mapping[str, Any], section: str, where: str) -> S:
    """Make the settings of one section from plain values.

    Parameters
    ----------
    kind : type
        The dataclass of the settings.
    given : mapping
        Its values.
    section : str
        The prefix of keys in errors.
    where : str
        Where the values came from, for errors.

    Returns
    -------
    object
        Checked.

    Examples
    --------
    >>> given = {"clients": 3, "privacy": {"clip": 1.0}}
    >>> settings_from(FlowerSettings, given, "flower", "a.yaml").privacy.clip
    1.0
    """
    reader = Reader(Origins(where))
    made: S = reader.settings(kind, {section: given}, section, privacy=reader.privacy)
    return made


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file with a mapping. Duplicate keys are refused.

    Files that it imports may be in the same directory.

    Parameters
    ----------
    path : path
        The file.

    Returns
    -------
    dict
        Its content.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "experiment.yaml"
    >>> _ = file.write_text("seed: 1")
    >>> read_yaml(file)
    {'seed': 1}
    """
    try:
        content = yaml_from(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        hint = near_files(path) if isinstance(error, FileNotFoundError) else ""
        raise InputError(f"cannot read {path}: {error.strerror}{hint}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(
            f"{path} must hold keys with values, such as 'data: digits', got {represented(content)}"
        )
    for section in (content, content.get("base")):
        if isinstance(section, dict) and isinstance(section.get("imports"), str | list):
            section["imports"] = _with_paths(section["imports"], Path(path).parent)
    return content


def _with_paths(imports: Any, folder: Path) -> Any:
    """Return imports with full paths for files in the directory of the YAML file."""
    if isinstance(imports, list):
        return [_with_paths(given, folder) for given in imports]
    there = isinstance(imports, str) and imports.endswith(".py") and (folder / imports).is_file()
    return str((folder / imports).resolve()) if there else imports
