"""Every key of experiments and studies with its type, default, meaning and an example.

They are read from the code: types and defaults from the dataclasses and functions that use the
values, meanings from their docstrings. ``equipoise explain training.schedule`` prints them, and
``docs/settings.md`` is made from them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import yaml

from equipoise import config, data
from equipoise.config import Experiment
from equipoise.config.options import defaults_of, in_words, types_of
from equipoise.config.origins import Origins
from equipoise.data.augment import AUGMENTATIONS
from equipoise.data.encode import encode_federation
from equipoise.data.federate import federate
from equipoise.errors import unknown
from equipoise.method import Method
from equipoise.metrics import Metric
from equipoise.optimizers import Adam, Sgd
from equipoise.run.plain import to_plain
from equipoise.study.plan import Tuning
from equipoise.study.reading import KEYS

__all__ = ["Setting", "explain", "lacking", "page", "settings"]

# Examples of keys whose default is no good example: the value, or the whole text if the key is used
# together with others. After @, what the key belongs to.
EXAMPLES: dict[str, Any] = {
    "imports": "equipoise",
    "method": "{name: fedprox, mu: 0.1}",
    "model": "{name: mlp, hidden: [64]}",
    "start": "{path: runs/first, parts: features}",
    "start.path": "runs/first",
    "start.parts": "start: {path: runs/first, parts: features}",
    "training": "{rounds: 100, optimizer: {name: sgd, lr: 0.1}}",
    "machine": "{device: cpu}",
    "evaluation": "{every: 5, select: best}",
    "flower": "{clients: 4}",
    "data": "{name: digits, imbalance: 5}",
    "seed": 3,
    "tracking": "{name: tensorboard}",
    "checkpoint_every": 10,
    "training.rounds": 100,
    "training.batch_size": 32,
    "training.optimizer": "{name: sgd, lr: 0.1, momentum: 0.9}",
    "training.optimizer.momentum": 0.9,
    "training.optimizer.dampening": (
        "training: {optimizer: {name: sgd, momentum: 0.9, dampening: 0.1}}"
    ),
    "training.optimizer.weight_decay": 0.0001,
    "training.schedule": "{kind: cosine, warmup: 5}",
    "training.epochs": [2, 5],
    "training.steps": 20,
    "training.cohort": 0.1,
    "training.clip": 1.0,
    "training.augment": "[flip, {name: crop, padding: 2}]",
    "training.report_samples": 500,
    "training.stragglers": 0.3,
    "training.loss": "{name: focal, gamma: 2.0}",
    "training.optimizer.nesterov": (
        "training: {optimizer: {name: sgd, momentum: 0.9, nesterov: true}}"
    ),
    "training.schedule.kind": "cosine",
    "training.schedule.decay": "training: {schedule: {kind: exponential, decay: 0.99}}",
    "training.schedule.at": (
        "training: {schedule: {kind: steps, at: [50, 75], factors: [0.2, 0.02]}}"
    ),
    "training.schedule.factors": (
        "training: {schedule: {kind: steps, at: [50, 75], factors: [0.2, 0.02]}}"
    ),
    "training.schedule.floor": "training: {schedule: {kind: cosine, floor: 0.01}}",
    "training.schedule.warmup": 5,
    "training.schedule.over": "training: {schedule: {kind: cosine, over: 100}}",
    "evaluation.select": "best",
    "evaluation.select_by": "evaluation: {select: best, select_by: accuracy}",
    "evaluation.select_on": "evaluation: {select: best, select_on: server}",
    "evaluation.patience": 10,
    "evaluation.last": 8,
    "evaluation.positive": 1,
    "evaluation.metrics": "[auroc, ece]",
    "evaluation.fine_tune": "{epochs: 1, move: head}",
    "evaluation.fine_tune.steps": 5,
    "evaluation.fine_tune.lr": 0.01,
    "machine.device": "cpu",
    "machine.precision": "float64",
    "machine.chunk": 8,
    "machine.frozen": "bfloat16",
    "machine.processes": 2,
    "data.partition": "{name: dirichlet, clients: 20, beta: 0.3}",
    "data.unseen": 3,
    "data.leave_out": "rotated",
    "data.test": "group",
    "data.server_val": 0.1,
    "data.encode": "data: {name: cifar, encode: google/vit-base-patch16-224}",
    "data.encode_size": (
        "data: {name: cifar, encode: google/vit-base-patch16-224, encode_size: 224}"
    ),
    "data.seed": 1,
    "data.root": "data",
    "data.classes@silos": 10,
    "data.classes@arrays": 10,
    "data.x": "x.npy",
    "data.y": "y.npy",
    "data.groups": "groups.npy",
    "data.attributes@arrays": "{sex: sex.npy}",
    "data.clients@arrays": "hospital.npy",
    "data.clients@adult": "[sex, occupation]",
    "data.classes@cifar": 100,
    "data.classes@imagefolder": "[dog, elephant]",
    "data.clients": 50,
    "data.sites@prostate": "[BIDMC, HK]",
    "data.dif": 2.0,
    "data.domains@digitfive": "[mnist, usps]",
    "data.domains@imagefolder": "[photo, sketch]",
    "data.characters": "abcdefghij",
    "data.partition.clients": 20,
    "data.partition.beta": 0.3,
    "data.partition.classes": 2,
    "data.partition.imbalance": 4.0,
    "data.partition.clients_per_group": "[4, 2, 1, 1, 1]",
    "data.partition.ratio": 1.5,
    "data.partition.largest": 100,
    "data.transposed": True,
    "data.mapped": True,
    "evaluation.every": 5,
    "tuning.seed": 7,
    "tuning.by": "worst_group",
    "flower.clients": 4,
    "flower.max_client": 20,
    "flower.max_share": 0.5,
    "flower.roster": "roster.yaml",
    "data.partition.within": "imbalance",
    "data.partition.order": "[plain, rotated]",
    "flower.privacy": "{clip: 1.0, epsilon: 8.0}",
    "flower.privacy.clip": 1.0,
    "flower.privacy.epsilon": 8.0,
    "flower.privacy.sensitivity": 1.0,
    "tuning.set": "tuning: {set: {training.rounds: 10}}",
}
_STUDY = {
    "base": (
        "an experiment without method and seed",
        "The settings that all runs have in common.",
        "{data: digits}",
    ),
    "methods": (
        "a list",
        "Names, or mappings with a name and hyper-parameters. A mapping may also have label (the "
        "name of the method in tables), grid (lists of values to tune) and set (settings that are "
        "different for this method).",
        "[fedavg, {name: fedprox, mu: 0.1, grid: {mu: [0.01, 0.1, 1]}}]",
    ),
    "settings": (
        "labels with what they change",
        "Variants of the experiment. Every method runs in every setting.",
        "{even: {data.imbalance: 1}, uneven: {data.imbalance: 20}}",
    ),
    "seeds": ("a list of whole numbers", "The seeds of the runs; [0] by default.", "[0, 1, 2]"),
    "metrics": (
        "a list of names",
        "The columns of tables; docs/metrics.md lists them.",
        "[mean, worst10]",
    ),
    "split": ("'test' or 'val'", "The split on which tables are computed.", "val"),
    "baseline": (
        "the label of a method",
        "The method with which the others are compared, pair by pair.",
        "fedavg",
    ),
    "tuning": (
        "keys; see below",
        "How values are chosen with --tune.",
        "{by: sigma_clients, tolerance: 0.01}",
    ),
}
_SET = (
    "Settings that are different in the runs of tuning, such as fewer rounds, by their dotted "
    "keys. The comparison that follows does not use them."
)


@dataclass(frozen=True)
class Setting:
    """A key of an experiment or study.

    Attributes
    ----------
    key : str
        Dotted, such as ``training.schedule.warmup``.
    kind : str
        Which values are valid, in words.
    default : str or None
        The default in YAML; None if a value is required.
    meaning : str
        What it does.
    example : str
        A line of YAML.
    of : str
        What the key belongs to, if not to all experiments: the name of a source, partition,
        optimizer or augmentation.
    """

    key: str
    kind: str
    default: str | None
    meaning: str
    example: str
    of: str = ""


def settings() -> list[Setting]:
    """Return every key with its type, default, meaning and example.

    Returns
    -------
    list of Setting
        In the order of the documentation.

    Examples
    --------
    >>> [setting.default for setting in settings() if setting.key == "training.rounds"]
    ['50']
    """
    return list(_all())


# Kind, default and meaning of the keys of the first level, if they are not in the code.
_FIRST = {
    "imports": ("a file, a module or a list of them", "", ""),
    "method": (
        "a name, or a mapping with a name",
        "fedavg",
        "What is federated; `equipoise methods` lists the names.",
    ),
    "data": (
        "a name, or a mapping with a name",
        None,
        "The source of the data, and how they are divided.",
    ),
    "model": (
        "a name, or a mapping with a name",
        "",
        "By default that of the method, for most methods `mlp`.",
    ),
    "training": ("keys; see below", "{}", "How clients train."),
    "machine": ("keys; see below", "{}", "Device and precision."),
    "evaluation": (
        "keys; see below",
        "{}",
        "When clients are evaluated, and which round is reported.",
    ),
    "seed": ("a whole number", "0", ""),
    "checkpoint_every": ("a whole number", "1", ""),
    "start": ("a path, or keys; see below", "", ""),
}


def _all() -> Iterator[Setting]:
    documented, types = _documented(Experiment), get_type_hints(Experiment)
    for key in config.SECTIONS:
        kind, default, meaning = _FIRST.get(key, ("keys; see below", "{}", ""))
        example = f"{key}: {_flow(EXAMPLES[key])}" if key in EXAMPLES else ""
        yield Setting(key, kind, default, meaning or documented.get(key, ""), example)
    for key in config.SECTIONS:
        if key == "data":
            yield from _data()
        elif (settings_class := _settings_in(types[key])) is not None:
            yield from _of(settings_class, key)
    for key in KEYS:
        kind, meaning, example = _STUDY[key]
        yield Setting(
            key,
            kind,
            None if key in ("base", "methods") else "",
            meaning,
            f"{key}: {example}",
            of="studies",
        )
    yield from _of(Tuning, "tuning", of="studies")
    yield Setting(
        "tuning.set", "keys with values", "{}", _SET, EXAMPLES["tuning.set"], of="studies"
    )


def _data() -> Iterator[Setting]:
    shared = _documented(data.load) | _documented(encode_federation) | _documented(federate)
    shared["encode"], shared["encode_size"] = (
        _documented(data.load)[name] for name in ("encode", "encode_size")
    )
    shared["seed"] = (
        "Determines the partition, the splits and everything else that is drawn when the data are "
        "read. By default the seed of the experiment."
    )
    yield from _of(data.load, "data", meanings=shared, fixed={"name": "digits"})
    for name in data.SOURCES:
        recipe = data.recipe_of(name)
        if _ours(recipe):
            yield from _of(recipe, "data", of=name, fixed={"name": name}, without=("seed",))
    for name, partition in data.PARTITIONS.items():
        if _ours(partition):
            yield from _of(
                partition,
                "data.partition",
                of=name,
                fixed={"name": name},
                around={"data": {"name": "digits"}},
            )


def _ours(made_from: Any) -> bool:
    """Return whether something belongs to the library and was not registered by a user."""
    return str(made_from.__module__).startswith("equipoise.")


def _of(
    made_from: Callable[..., Any],
    section: str,
    *,
    of: str = "",
    fixed: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    meanings: Mapping[str, str] | None = None,
    around: Mapping[str, Any] | None = None,
    listed: bool = False,
) -> Iterator[Setting]:
    """Yield the fields of a dataclass or the keyword options of a function."""
    documented, defaults, choices = (
        meanings or _documented(made_from),
        _defaults(made_from),
        _choices(made_from),
    )
    types = {name: kind for name, kind in types_of(made_from).items() if name not in without}
    needed = {
        name: _value(_given_example(f"{section}.{name}", of))
        for name in types
        if name not in defaults
    }
    for name, kind in types.items():
        key = f"{section}.{name}"
        default = (
            "null" if key == "data.seed" else _plain(defaults[name]) if name in defaults else None
        )
        inner = {**(fixed or {}), **needed}
        example = _example(
            key, _given_example(key, of), default, inner, listed=listed, around=around
        )
        words = _kind(key, kind)
        if name in choices:
            words = f"one of {choices[name]}{' or null' if words.endswith(' or null') else ''}"
        yield Setting(key, words, default, documented.get(name, ""), example, of)
    for name, kind in types.items():
        key = f"{section}.{name}"
        if key == "training.optimizer":
            yield from _of(Sgd, key, of="sgd", fixed={"name": "sgd"})
            yield from _of(
                Adam, key, of="adam, adamw", fixed={"name": "adam"}, without=("decoupled",)
            )
        elif key == "training.augment":
            for own, augmentation in AUGMENTATIONS.items():
                if _ours(augmentation):
                    yield from _of(augmentation, key, of=own, fixed={"name": own}, listed=True)
        elif (inner_class := _settings_in(kind)) is not None:
            yield from _of(inner_class, key, of=of)


def _settings_in(kind: Any) -> type[Any] | None:
    """Return the dataclass of settings in a type annotation; None if there is none."""
    found = [option for option in (kind, *get_args(kind)) if dataclasses.is_dataclass(option)]
    own = [
        option
        for option in found
        if isinstance(option, type) and option not in (Method, Metric, Origins)
    ]
    return own[0] if own else None


def lacking(found: list[Setting]) -> list[str]:
    """List the settings without a meaning or an example, and what to do about it.

    Examples
    --------
    >>> lacking([Setting("training.colour", "text", "red", "Its colour.", "")])
    ['training.colour has no example: give it one in EXAMPLES of equipoise/explain.py']
    """
    hints = {
        "meaning": "describe it in the docstring of its class, under 'Parameters'",
        "example": "give it one in EXAMPLES of equipoise/explain.py",
    }
    return [
        f"{setting.key} has no {what}: {hint}"
        for setting in found
        for what, hint in hints.items()
        if not getattr(setting, what).strip()
    ]


def _given_example(key: str, of: str) -> Any:
    return EXAMPLES.get(f"{key}@{of}", EXAMPLES.get(key))


def _example(
    key: str,
    value: Any,
    default: str | None,
    inner: dict[str, Any],
    *,
    listed: bool,
    around: Mapping[str, Any] | None,
) -> str:
    """Return a line of YAML that sets a key; empty without an example and a default."""
    if isinstance(value, str) and value.startswith(f"{key.partition('.')[0]}:"):
        return value
    if value is None:
        value = yaml.safe_load(default) if default is not None else None
        if value in (None, [], {}, ""):
            return ""
        value = not value if isinstance(value, bool) else value
    *way, last, name = key.split(".")
    options: Any = {**inner, name: _value(value)}
    nested: Any = {last: [options] if listed else options}
    for step in reversed(way):
        nested = {step: {**((around or {}).get(step, {})), **nested}}
    return _flow(nested)[1:-1]


def _value(example: Any) -> Any:
    """Parse an example that is written in YAML."""
    return yaml.safe_load(example) if isinstance(example, str) else example


def _flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    text = (
        value
        if isinstance(value, str)
        else yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    )
    return str(text).removesuffix("...\n").strip()


def _plain(default: Any) -> str:
    return (
        _flow(json.loads(json.dumps(to_plain(default))))
        if not isinstance(default, str)
        else default
    )


def _defaults(made_from: Callable[..., Any]) -> dict[str, Any]:
    if not dataclasses.is_dataclass(made_from):
        return defaults_of(made_from)
    found = {}
    for item in dataclasses.fields(made_from):
        if item.default is not dataclasses.MISSING:
            found[item.name] = item.default
        elif item.default_factory is not dataclasses.MISSING:
            found[item.name] = item.default_factory()
    return found


_KINDS = {
    "training.optimizer": "a name, or a mapping with a name; see below",
    "training.schedule": "a kind, or keys; see below",
    "training.augment": "a list of names, or of mappings with a name",
    "evaluation.metrics": "a list of names",
    "evaluation.fine_tune": "keys, see below, or null",
    "flower.privacy": "keys, see below, or null",
    "data.partition": "a name, or a mapping with a name; see below",
    "start.parts": "text or a list",
}


def _kind(key: str, kind: Any) -> str:
    if key in _KINDS:
        return _KINDS[key]
    return "keys; see below" if _settings_in(kind) else in_words(kind)


def _documented(made_from: Any) -> dict[str, str]:
    """Return the descriptions of parameters and attributes in a docstring.

    ``See `name`.`` is replaced by the description of that name in the same module.
    """
    found = _sections(inspect.getdoc(made_from) or "")
    for name, text in found.items():
        if seen := re.match(r"See `(\w+)`\.", text):
            there = getattr(sys.modules[made_from.__module__], seen[1], None)
            if there is not None and there is not made_from:
                found[name] = _documented(there).get(name, text)
    return found


def _choices(made_from: Any) -> dict[str, str]:
    """Return the valid values that a docstring lists, such as ``kind : {"a", "b"}``."""
    found = re.findall(r"^(\w+) : \{(.+)\}", inspect.getdoc(made_from) or "", re.MULTILINE)
    return {name: values.replace('"', "'") for name, values in found}


def _sections(text: str) -> dict[str, str]:
    lines, section = text.splitlines(), ""
    names: list[str] = []
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines):
        under = lines[number + 1] if number + 1 < len(lines) else ""
        if line and under and set(under) == {"-"}:
            section, names = line, []
        elif section in ("Parameters", "Attributes") and line and set(line) != {"-"}:
            if not line.startswith(" "):
                names = [name.strip() for name in line.partition(" : ")[0].split(",")]
            for name in names if line.startswith(" ") else ():
                found.setdefault(name, []).append(line.strip())
    return {name: _prose(" ".join(said)) for name, said in found.items()}


def _prose(text: str) -> str:
    """Convert the markup of docstrings to Markdown."""
    text = re.sub(r":(?:class:`|\w+:`~)(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return re.sub(r":\w+:`", "`", text).replace("``", "`")


def explain(key: str = "") -> list[Setting]:
    """Return a key and all keys below it. The end of a key suffices if it is unique.

    Parameters
    ----------
    key : str
        Such as ``training.schedule``, or its end, ``schedule``; without one, all keys of the first
        level.

    Returns
    -------
    list of Setting
        With the key itself first, or all keys with this end.

    Examples
    --------
    >>> [setting.key for setting in explain("schedule")][:3]
    ['training.schedule', 'training.schedule.kind', 'training.schedule.decay']
    """
    every = settings()
    if not key:
        return [setting for setting in every if "." not in setting.key]
    ends = {setting.key for setting in every if setting.key.endswith(f".{key}")}
    if not any(setting.key == key for setting in every):
        if len(ends) > 1:
            return [setting for setting in every if setting.key in ends]
        key = ends.pop() if ends else key
    found = [
        setting for setting in every if setting.key == key or setting.key.startswith(f"{key}.")
    ]
    if not found:
        raise unknown(
            "key",
            key,
            {setting.key for setting in every},
            where="experiments and studies",
            listed="equipoise explain --markdown",
        )
    return found


_PAGES = {
    "": (
        "Keys of an experiment",
        "An experiment is a YAML file with these keys, or a mapping in Python.",
    ),
    "training": (
        "`training`",
        "How clients train, for all methods. In Python: `equipoise.Training`.",
    ),
    "training.optimizer": (
        "`training.optimizer`",
        "Other optimizers of `torch.optim` take their own options.",
    ),
    "training.schedule": ("`training.schedule`", "A single name is the kind: `schedule: cosine`."),
    "training.augment": ("`training.augment`", "`flip` mirrors images and has no options."),
    "evaluation": (
        "`evaluation`",
        "When clients are evaluated, and which round is reported. In Python: "
        "`equipoise.Evaluation`.",
    ),
    "evaluation.fine_tune": ("`evaluation.fine_tune`", ""),
    "machine": ("`machine`", "Device and precision. In Python: `equipoise.Machine`."),
    "data": (
        "`data`",
        "The source of the data, and which client has which samples. In Python: "
        "`equipoise.data.load`.",
    ),
    "data.partition": (
        "`data.partition`",
        "How the samples of a source are divided among clients.",
    ),
    "start": ("`start`", "A single value is the path: `start: runs/first`."),
    "flower": ("`flower`", "For runs on Flower. In one process these keys have no effect."),
    "flower.privacy": ("`flower.privacy`", ""),
    "study": ("Keys of a study", "A study is a YAML file for `equipoise compare`."),
    "tuning": ("`tuning`", "How `equipoise compare --tune` chooses between the values of grids."),
}


def page() -> str:
    """Return ``docs/settings.md``.

    Examples
    --------
    >>> page().splitlines()[0]
    '# Settings'
    """
    lines = [
        "# Settings",
        "",
        *_wrapped(
            "Every key of experiments and studies, with the values that are valid, the default, "
            "and an example. `equipoise explain training.schedule` prints the same in a terminal. "
            "The options of methods are in their docstrings, those of models in "
            "[models.md](models.md). This page is made from the code: `equipoise explain "
            "--markdown > docs/settings.md`."
        ),
    ]
    shown: dict[str, dict[str, list[Setting]]] = {}
    for setting in settings():
        section = setting.key.rpartition(".")[0] or ("study" if setting.of == "studies" else "")
        shown.setdefault(section, {}).setdefault(
            "" if setting.of == "studies" else setting.of, []
        ).append(setting)
    # A section without a title is shown under its name.
    for section in [
        *(name for name in _PAGES if name in shown),
        *(name for name in shown if name not in _PAGES),
    ]:
        title, about = _PAGES.get(section, (f"`{section}`", ""))
        lines += ["", f"## {title}", *(["", *_wrapped(about)] if about else [])]
        for of, group in shown[section].items():
            names = ", ".join(f"`{name}`" for name in of.split(", "))
            lines += ["", *([f"### With {names}", ""] if of else [])]
            for setting in group:
                lines += _wrapped(f"- {_words(setting)}", "  ")
    return "\n".join(lines) + "\n"


def _words(setting: Setting) -> str:
    default = (
        "needed"
        if setting.default is None
        else f"default `{setting.default}`"
        if setting.default
        else "no default"
    )
    return (
        f"**`{setting.key}`**: {setting.kind}; {default}. {setting.meaning} "
        f"Example: `{setting.example}`"
    )


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
