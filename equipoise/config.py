"""Experiments as YAML files or mappings, checked and completed before training.

A file uses the same names as the Python API. Keys, types and defaults are read from the dataclasses
and functions that they belong to, so a new method, model or source needs no change here. Every
error names the key, where its value came from, and what is valid. This is the only module that uses
pydantic.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter

from equipoise import data, methods, models, tracking
from equipoise.data.augment import AUGMENTATIONS, augmentation_from
from equipoise.data.keys import below, naming
from equipoise.documents import yaml_from
from equipoise.engine.settings import FineTune, Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, near_files, unknown
from equipoise.federation import Federation
from equipoise.flower.settings import FlowerSettings, Privacy
from equipoise.imports import file_of, import_own
from equipoise.losses import LOSSES, loss_from
from equipoise.method import Method
from equipoise.metrics import Metric, several_from
from equipoise.optimizers import OPTIMIZER_OPTIONS, Adam, Schedule, Sgd
from equipoise.run.api import Run, train
from equipoise.run.callbacks import Callback
from equipoise.run.evaluation import Evaluation
from equipoise.run.plain import optimizer_from, schedule_from, to_plain
from equipoise.run.start import Start, start_from
from equipoise.run.trainer import MakeEngine, Progress
from equipoise.text import printable

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
# Options of data that configurations leave out if they have their defaults, so that the
# configurations of older runs stay the same.
UNLESS_GIVEN = ("server_val",)
_OPTIMIZERS: dict[str, type[Any]] = {"sgd": Sgd, "adam": Adam, "adamw": Adam}
_SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
S = TypeVar("S")
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


@dataclass(frozen=True)
class Override:
    """One value that overrides a file.

    Attributes
    ----------
    key : str
        Dotted, such as ``training.optimizer.lr``.
    value : object
        The new value.
    origin : str
        Where it came from, for error messages.

    Examples
    --------
    >>> Override.parse("method.q=2").value
    2
    """

    key: str
    value: Any
    origin: str

    @classmethod
    def parse(cls, text: str, *, below: str = "") -> Override:
        """Parse ``key=value``, with the value in YAML. ``below`` is the section of the key."""
        key, equals, value = text.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise InputError(
                f"--set {text!r} is not of the form key=value, such as training.rounds=20"
            )
        try:
            parsed = yaml_from(value)
        except yaml.YAMLError as error:
            raise InputError(
                f"--set {text}: {value!r} is not valid YAML ({_line(error)})"
            ) from error
        return cls(f"{below}.{key.strip()}" if below else key.strip(), parsed, f"--set {text}")


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
    checkpoint_every : int
        Rounds between checkpoints.
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
    checkpoint_every: int = 1
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
            f"{where} must hold keys with values, such as 'data: digits', got {_shown(mapping)}"
        )
    content: dict[str, Any] = dict(mapping)
    for override in given:
        _override(content, override)
    for key in content:
        if key not in (*SECTIONS, *IGNORED):
            raise unknown("key", key, SECTIONS, where=origins.of(str(key)))
    content = {key: value for key, value in content.items() if value is not None}
    if "data" not in content:
        raise InputError(f"{where} names no data; valid: {', '.join(data.SOURCES)}")
    return _Reader(origins, on_import).experiment(content)


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
    reader = _Reader(Origins(where))
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
        raise InputError(f"{path} is not valid YAML: {_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(
            f"{path} must hold keys with values, such as 'data: digits', got {_shown(content)}"
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


@dataclass(frozen=True)
class Origins:
    """Where values came from: a file and its overrides.

    Examples
    --------
    >>> Origins("a.yaml", (Override("seed", 3, "--seed"),)).of("seed")
    '--seed'
    """

    where: str
    overrides: tuple[Override, ...] = ()

    def of(self, key: str) -> str:
        """Return where the value of a dotted key came from.

        It is the last override at, above or below the key, or the file.
        """
        at = f"{key}."
        related = [
            item
            for item in self.overrides
            if at.startswith(f"{item.key}.") or item.key.startswith(at)
        ]
        return related[-1].origin if related else self.where

    @contextmanager
    def named(self, section: str | None = None) -> Iterator[None]:
        """Prefix errors raised inside with where the values of a section came from.

        Without a section, the overrides that the message mentions are used, or else the file.
        """
        try:
            yield
        except InputError as error:
            if section:
                places = [
                    self.where,
                    *(
                        item.origin
                        for item in self.overrides
                        if item.key.partition(".")[0] == section
                    ),
                ]
            else:
                words = set(re.findall(r"\w+", str(error)))
                set_for_it = [
                    item.origin for item in self.overrides if item.key.rpartition(".")[2] in words
                ]
                places = set_for_it or [self.where]
            named = ", ".join(filter(None, dict.fromkeys(places)))
            raise InputError(f"{named}: {error}" if named else str(error)) from error


@contextmanager
def _keyed(path: str, options: Iterable[str]) -> Iterator[None]:
    """Put the whole key before messages that begin with an option, or with the end of its path."""
    try:
        yield
    except InputError as error:
        above, _, last = path.rpartition(".")
        said = re.match(rf"(?:({re.escape(last)})\.)?(\w+) ", str(error))
        if said is None or said[2] not in options:
            raise
        raise InputError(f"{above if said[1] else path}.{error}") from error


class _Reader:
    """Check values against the annotations of the code that uses them."""

    def __init__(self, origins: Origins, on_import: Callable[[str], None] | None = None) -> None:
        self.origins, self.on_import = origins, on_import

    def experiment(self, content: Mapping[str, Any]) -> Experiment:
        seed = self.value(content.get("seed", 0), int, "seed")
        if not 0 <= seed < 2**63:
            raise InputError(
                f"{self.origins.of('seed')}: seed must be from 0 to 2**63 - 1, got {seed}"
            )
        machine = self.settings(Machine, content, "machine")
        flower = self.settings(FlowerSettings, content, "flower", privacy=self.privacy)
        checkpoint_every = self.value(content.get("checkpoint_every", 1), int, "checkpoint_every")
        self.training(content, without=("loss", "schedule"))
        # After everything that can be checked without these modules. They may register names that
        # are used below.
        imports = self.imports(content.get("imports", []))
        training = self.training(content)
        method = self.method(content.get("method", "fedavg"))
        return Experiment(
            method=method,
            data=self.data(content["data"], seed),
            model=self.model(content.get("model", {}), method.usual_model),
            training=training,
            machine=machine,
            evaluation=self.settings(
                Evaluation, content, "evaluation", fine_tune=self.fine_tune, metrics=self.metrics
            ),
            seed=seed,
            checkpoint_every=checkpoint_every,
            start=self.start(content.get("start")),
            flower=flower,
            imports=imports,
            tracking=self.tracking(content.get("tracking", [])),
            origins=self.origins,
        )

    def imports(self, given: Any) -> tuple[str, ...]:
        listed = tuple(
            self.value([given] if isinstance(given, str) else given, list[str], "imports")
        )
        with self.origins.named("imports"):
            import_own(listed, on_import=self.on_import)
        return listed

    def method(self, given: Any) -> Method:
        checked = self.method_options(given, "method")
        with self.origins.named("method"):
            return methods.build(**checked)

    def method_options(self, given: Any, path: str) -> dict[str, Any]:
        """Check the options of a method and of the methods and parts in its options."""
        name, options = self.named(given, path, "method", methods.names(), default="fedavg")
        types, special = self.options_of_part(name)
        for slot in ("sampling", "local", "aggregation", "view"):
            types[slot], special[slot] = Any, self.part
        types["guard"], special["guard"] = Any, self.guard
        return {"name": name, **self.fields(options, types | {"weights": str}, path, special)}

    def part(self, given: Any, path: str, slot: str | None = None) -> dict[str, Any]:
        slot = slot or path.rpartition(".")[2]
        name, options = self.named(given, path, default={"sampling": "uniform"}.get(slot))
        valid = methods.fitting("sampler" if slot == "sampling" else slot)
        if name not in valid:
            raise unknown(path, name, valid, where=self.origins.of(path))
        types, special = self.options_of_part(name)
        return {"name": name, **self.fields(options, types, path, special)}

    def options_of_part(
        self, name: str
    ) -> tuple[dict[str, Any], dict[str, Callable[[Any, str], Any]]]:
        """Return the types of a part's options, and checks for those that are methods or parts."""
        kind = methods.part_class(name)
        special: dict[str, Callable[[Any, str], Any]] = {
            option: partial(self.part, slot=inner)
            if isinstance(inner, str)
            else self.method_options
            for option, inner in methods.nested_in(kind).items()
        }
        return _types(kind), special

    def guard(self, given: Any, path: str) -> dict[str, Any] | None:
        return None if given is None else self.part(given, path)

    def data(self, given: Any, seed: int) -> dict[str, Any]:
        name, options = self.named(given, "data", "data", data.SOURCES)
        recipe = data.recipe_of(name)
        checked = self.fields(
            options, _types(data.load) | _types(recipe), "data", {"partition": self.partition}
        )
        defaults = _defaults(data.load) | _defaults(recipe) | {"seed": seed}
        for option in UNLESS_GIVEN:
            defaults.pop(option)
        return {"name": name, **defaults, **checked}

    def partition(self, given: Any, path: str) -> dict[str, Any] | None:
        if given is None:
            return None
        name, options = self.named(given, path, "partition", data.PARTITIONS)
        checked = self.fields(options, _types(data.PARTITIONS[name]), path)
        with self.origins.named("data"), naming(below(path, checked)):
            made: Any = data.make_partition(name, **checked)
        return {"name": name, **dataclasses.asdict(made)}

    def model(self, given: Any, usual: str) -> dict[str, Any]:
        name, options = self.named(given, "model", "model", models.MODELS, default=usual)
        types = _types(models.maker_of(name))
        return {"name": name, **models.defaults(name), **self.fields(options, types, "model")}

    def training(self, content: Mapping[str, Any], without: Sequence[str] = ()) -> Training:
        given = content.get("training", {})
        if without and isinstance(given, Mapping):
            given = {key: value for key, value in given.items() if key not in without}
        made: Training = self.settings(
            Training,
            {"training": given},
            "training",
            optimizer=self.optimizer,
            schedule=self.schedule,
            augment=self.augmentations,
            loss=self.loss,
        )
        return made

    def settings(
        self,
        kind: type[Any],
        content: Mapping[str, Any],
        section: str,
        **special: Callable[[Any, str], Any],
    ) -> Any:
        checked = self.fields(content.get(section, {}), _types(kind), section, special)
        with self.origins.named(section):
            return kind(**checked)

    def optimizer(self, given: Any, path: str) -> Any:
        name, options = self.named(given, path, default="sgd")
        if name in _OPTIMIZERS:
            types = _types(_OPTIMIZERS[name])
            types.pop("decoupled", None)
            options = self.fields(options, types, path)
        with self.origins.named("training"), _keyed(path, options):
            return optimizer_from({"name": name, **_read_scientific(options)})

    def loss(self, given: Any, path: str) -> Any:
        if given is None:
            return None
        name, options = self.named(given, path, "loss", LOSSES)
        make: Any = LOSSES[name].make
        checked = self.fields(options, _types(make) if isinstance(make, type) else {}, path)
        with self.origins.named("training"):
            return loss_from({"name": name, **checked})

    def privacy(self, given: Any, path: str) -> Any:
        if given is None:
            return None
        checked = self.fields(given, _types(Privacy), path)
        if "clip" not in checked:
            raise InputError(
                f"{self.origins.of(path)}: {path} needs clip, the largest norm of an update"
            )
        with self.origins.named("flower"):
            return Privacy(**checked)

    def start(self, given: Any) -> Start | None:
        if given is None:
            return None
        types = {"path": str, "parts": str | list[str]}
        checked = self.fields({"path": given} if isinstance(given, str) else given, types, "start")
        with self.origins.named("start"):
            return start_from(checked)

    def schedule(self, given: Any, path: str) -> Any:
        fields = {"kind": given} if isinstance(given, str) else given
        checked = self.fields(fields, _types(Schedule), path)
        with self.origins.named("training"):
            return schedule_from(checked)

    def fine_tune(self, given: Any, path: str) -> FineTune | None:
        if given is None:
            return None
        checked = self.fields(given, _types(FineTune), path)
        with self.origins.named("evaluation"):
            return FineTune(**checked)

    def metrics(self, given: Any, path: str) -> tuple[Metric, ...]:
        with self.origins.named("evaluation"):
            return several_from(self.value(given, list[str], path), path)

    def tracking(self, given: Any) -> tuple[dict[str, Any], ...]:
        made = []
        for item in given if isinstance(given, list) else [given]:
            name, options = self.named(item, "tracking", "tracker", tracking.TRACKERS)
            made.append(
                {
                    "name": name,
                    **self.fields(options, _types(tracking.tracker_of(name)), "tracking"),
                }
            )
        return tuple(made)

    def augmentations(self, given: Any, path: str) -> Any:
        made = []
        for item in self.value(given, list[Any], path):
            name, options = self.named(item, path, "augmentation", AUGMENTATIONS)
            checked = self.fields(options, _types(AUGMENTATIONS[name]), path)
            with self.origins.named("training"):
                made.append(augmentation_from({"name": name, **checked}))
        return tuple(made)

    def named(
        self,
        given: Any,
        path: str,
        kind: str = "",
        valid: Sequence[str] | Mapping[str, Any] | None = None,
        *,
        default: str | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Split a name, or a mapping with a name, into name and options."""
        options = {"name": given} if isinstance(given, str) else given
        if isinstance(options, Mapping) and default is not None:
            options = {"name": default, **options}
        if not isinstance(options, Mapping) or not isinstance(options.get("name"), str):
            hint = f"; valid names: {', '.join(valid)}" if valid else ""
            raise InputError(
                f"{self.origins.of(path)}: {path} must be a name or a mapping with a name, got "
                f"{_shown(given)}{hint}"
            )
        options = dict(options)
        name = options.pop("name")
        if valid is not None and name not in valid:
            origin = self.origins.of(f"{path}.name")
            raise unknown(
                kind, name, valid, where=origin if kind == path else f"{path} of {origin}"
            )
        return name, options

    def fields(
        self,
        given: Any,
        types: Mapping[str, Any],
        path: str,
        special: Mapping[str, Callable[[Any, str], Any]] | None = None,
    ) -> dict[str, Any]:
        """Check the values of a mapping one by one."""
        if not isinstance(given, Mapping):
            raise InputError(
                f"{self.origins.of(path)}: {path} must hold keys with values, got {_shown(given)}"
            )
        special = special or {}
        checked = {}
        for key, value in given.items():
            inner = f"{path}.{key}"
            if key not in types:
                if not types:
                    raise InputError(
                        f"unknown key {inner!r} in {self.origins.of(inner)}; there are no options "
                        "here"
                    )
                valid = [f"{path}.{name}" for name in types]
                if path == "training" and key in OPTIMIZER_OPTIONS:
                    meant = f"{path}.optimizer.{key}"
                    raise InputError(
                        f"unknown key {inner!r} in {self.origins.of(inner)}; did you mean "
                        f"{meant!r}? Valid: {', '.join(sorted([*valid, meant]))}"
                    )
                raise unknown("key", inner, valid, where=self.origins.of(inner))
            checked[key] = (
                special[key](value, inner)
                if key in special
                else self.value(value, types[key], inner)
            )
        return checked

    def value(self, given: Any, kind: Any, path: str) -> Any:
        """Check one value strictly, but accept whole numbers as floats, and text such as 1e-3.

        YAML reads 1e-3 as text.
        """
        adapter = TypeAdapter(kind, config=ConfigDict(strict=True))
        for candidate in (given, _read_scientific(given)):
            try:
                # As JSON, because there a list is accepted as a tuple even with strict types.
                return adapter.validate_json(json.dumps(candidate))
            except (ValueError, TypeError, RecursionError):
                # A ValidationError is a ValueError. Numbers with too many digits raise one as well.
                continue
        note = (
            " (YAML reads yes, no, on and off as true and false)" if isinstance(given, bool) else ""
        )
        raise InputError(
            f"{self.origins.of(path)}: {path} must be {_words(kind)}, got {_shown(given)}{note}"
        )


def _override(content: dict[str, Any], override: Override) -> None:
    """Set the value of a dotted key, and copy the mappings that contain it.

    A name that contains the key becomes a mapping with this name.
    """
    *way, last = override.key.split(".")
    for depth, key in enumerate(way):
        inner = content.get(key)
        if isinstance(inner, str):
            inner = {"kind" if key == "schedule" else "name": inner}
        if not isinstance(inner, Mapping | NoneType):
            raise InputError(
                f"{override.origin}: {'.'.join(way[: depth + 1])} is {inner!r} and has no keys of "
                "its own"
            )
        content[key] = dict(inner or {})
        content = content[key]
    content[last] = override.value


def _types(made_from: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a dataclass or the keyword-only ones of a function, with types."""
    hints = get_type_hints(made_from)
    if dataclasses.is_dataclass(made_from):
        return {item.name: hints[item.name] for item in dataclasses.fields(made_from) if item.init}
    return {name: hints[name] for name in _keyword_only(made_from)}


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {
        name: option.default
        for name, option in _keyword_only(function).items()
        if option.default is not option.empty
    }


def _keyword_only(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {
        name: option for name, option in parameters.items() if option.kind is option.KEYWORD_ONLY
    }


def _read_scientific(value: Any) -> Any:
    """Convert text such as ``1e-3`` to a number, also inside lists and mappings.

    YAML does not read it as a number.
    """
    if isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
        return float(value)
    if isinstance(value, list):
        return [_read_scientific(item) for item in value]
    if isinstance(value, dict):
        return {key: _read_scientific(item) for key, item in value.items()}
    return value


def _words(kind: Any) -> str:
    """Describe a type in words."""
    arguments = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        # "a number" includes whole numbers.
        return " or ".join(
            _words(option) for option in arguments if not (option is int and float in arguments)
        )
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if get_origin(kind) in (dict, Mapping):
        return "keys with values"
    if arguments:
        inner = [option for option in arguments if option is not ...]
        length = f"{len(inner)} " if get_origin(kind) is tuple and ... not in arguments else ""
        return (
            f"a list of {length}{_words(inner[-1]).removeprefix('a ')}s"
            if inner[-1] in (int, float)
            else "a list"
        )
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def _shown(value: Any) -> str:
    """Return a value as text for a message, shortened if it is long."""
    try:
        return printable(repr(value), 500)
    except ValueError:
        # Python refuses to convert numbers with thousands of digits to text.
        return f"a value of {type(value).__name__} that is too long to show"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
