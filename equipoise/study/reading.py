"""Studies read from files and mappings, checked before anything runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from equipoise.config import Override, experiment_from, read_yaml
from equipoise.errors import InputError, unknown
from equipoise.study.metrics import check_metric
from equipoise.study.plan import Job, Study, Tuning

KEYS = ("base", "methods", "settings", "seeds", "metrics", "split", "tuning")
SPLITS = ("test", "val")
# Of a file or directory, in bytes, on the usual file systems.
LONGEST_NAME = 255
COLUMNS = ("mean", "mean_groups", "sigma_clients", "sigma_groups", "worst10", "worst_group")

Tried = dict[str, dict[str, dict[str, Any]]]


def load_study(path: str | Path, *, metrics: Sequence[str] | None = None, tune: bool = False) -> Study:
    """Read a study file.

    Parameters
    ----------
    path : path
        A YAML file.
    metrics : sequence of str, optional
        What to show instead of what the file says.
    tune : bool
        Whether to try the grids of its methods instead of running what it says.

    Returns
    -------
    Study
        With every experiment of it checked.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "study.yaml"
    >>> _ = file.write_text("{base: {data: digits}, methods: [fedavg, local], seeds: [0, 1, 2]}")
    >>> len(load_study(file).jobs)
    6
    """
    return study_from(read_yaml(path), str(path), metrics=metrics, tune=tune)


def study_from(
    mapping: Mapping[str, Any], where: str = "the study", *, metrics: Sequence[str] | None = None, tune: bool = False
) -> Study:
    """Make a study of plain values.

    Parameters
    ----------
    mapping : mapping
        What a study file holds: ``base`` and ``methods``, and if wanted ``settings``, ``seeds``, ``metrics``, ``split``
        (``test`` or ``val``) and ``tuning`` (the fields of :class:`Tuning`, and under ``set`` what else changes).
    where : str
        What errors call the place the mapping came from.
    metrics : sequence of str, optional
        What to show instead of what the mapping says: a name of ``fairness.METRICS``, ``loss``, ``groups.NAME``,
        ``bytes_up`` or ``bytes_down``; all but the last two with ``global.`` or ``personal.`` before them (otherwise
        the model the clients have in the end: see :func:`equipoise.study.model_of`) and ``seen.`` or ``unseen.`` (otherwise seen).
    tune : bool
        Whether to make the study that tries the grids of its methods, judged by validation data.

    Returns
    -------
    Study
        With every experiment of it checked.

    Examples
    --------
    >>> base = {"data": "digits"}
    >>> settings = {"even": {"data.imbalance": 1}, "uneven": {"data": {"imbalance": 20}}}
    >>> study = study_from({"base": base, "methods": [{"name": "fedprox", "mu": 1, "label": "strong"}], "settings": settings})
    >>> [str(job.path) for job in study.jobs]
    ['even/strong/seed0', 'uneven/strong/seed0']
    >>> tried = study_from({"base": base, "methods": ["fedavg", {"name": "fedprox", "grid": {"mu": [0.1, 1]}}]}, tune=True)
    >>> tried.methods, tried.split
    (('fedavg', 'fedprox mu=0.1', 'fedprox mu=1'), 'val')
    """
    for key in mapping:
        if key not in KEYS:
            raise unknown("key", key, KEYS, where=where)
    base = mapping.get("base")
    if not isinstance(base, Mapping):
        raise InputError(f"{where}: base must be an experiment, such as 'data: digits', got {base!r}")
    for key in ("method", "seed"):
        if key in base:
            raise InputError(f"{where}: base.{key} has no meaning in a study; use {key}s")
    methods, tried = _methods(mapping.get("methods"), where, tune=tune)
    settings = _settings(mapping.get("settings"), where)
    tuning, changes = _tuning(mapping.get("tuning", {}), where)
    seeds = _list(mapping.get("seeds", [0]), int, "seeds", "a list of different whole numbers", where)
    split = mapping.get("split", "test")
    if split not in SPLITS:
        raise unknown("split", split, SPLITS, where=where)
    if tune:
        seeds, split = [tuning.seed], "val"
        settings = {label: [*overrides, *changes] for label, overrides in settings.items()}
    shown = _list(list(metrics or mapping.get("metrics", COLUMNS)), str, "metrics", "a list of different names", where)
    origins = dict.fromkeys(shown, "--metrics" if metrics else f"metrics of {where}")
    for metric, origin in origins.items():
        check_metric(metric, origin)
    if tune:
        origins[tuning.by] = f"tuning of {where}"
    jobs = [
        Job(setting, label, seed, experiment_from(base, f"base of {where}", [*method, *changes, _seed(seed, where)]))
        for setting, changes in settings.items()
        for label, method in methods.items()
        for seed in seeds
    ]
    return Study(
        tuple(settings), tuple(methods), tuple(seeds), tuple(shown), tuple(jobs), split, tuning, tried, origins
    )


def _methods(given: Any, where: str, *, tune: bool) -> tuple[dict[str, list[Override]], Tried]:
    """Read the methods; to tune, the first one and every combination of a grid's values, with what they stand for."""
    if not isinstance(given, list) or not given:
        raise InputError(f"{where}: methods must be a list of names or mappings with a name, got {given!r}")
    methods: dict[str, list[Override]] = {}
    tried: Tried = {}
    for item in given:
        options = dict(item) if isinstance(item, Mapping) else {"name": item}
        label = _label(options.pop("label", options.get("name")), "methods", where)
        combinations = _combinations(options.pop("grid", {}), label, where)
        variants: dict[str, dict[str, Any]] = {}
        for values in combinations:
            variant = _label(_variant(label, values), "methods", where)
            if variant in variants:
                raise InputError(f"{where}: grid of method {label!r} holds {variant.removeprefix(f'{label} ')} twice")
            variants[variant] = values
        if tune and len(variants) > 1:
            tried[label] = variants
        elif tune and methods:
            continue
        for variant, values in (variants if tune else {label: {}}).items():
            if variant in methods:
                raise InputError(f"{where}: two methods are called {variant!r}; tell them apart with label")
            methods[variant] = [Override("method", options | values, f"methods of {where}")]
    if tune and not tried:
        raise InputError(f"{where}: no method has a grid of values to try, such as grid: {{q: [0.1, 1]}}")
    return methods, tried


def _combinations(grid: Any, label: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(grid, Mapping) or not all(isinstance(values, list) and values for values in grid.values()):
        raise InputError(
            f"{where}: grid of method {label!r} must hold hyper-parameters with lists of values, got {grid!r}"
        )
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _variant(label: str, values: Mapping[str, Any]) -> str:
    return " ".join([label, *(f"{name}={_written(value)}" for name, value in values.items())])


def _written(value: Any) -> str:
    """Write a value as part of a label; of ``{name: qffl, q: 1}``, that is ``qffl,q=1``."""
    if isinstance(value, Mapping):
        named = [_written(value["name"])] if "name" in value else []
        return ",".join(named + [f"{key}={_written(inner)}" for key, inner in value.items() if key != "name"])
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return str(value)


def _tuning(given: Any, where: str) -> tuple[Tuning, list[Override]]:
    origin = f"tuning of {where}"
    if not isinstance(given, Mapping) or not isinstance(given.get("set", {}), Mapping):
        raise InputError(f"{origin} must hold keys with values, got {given!r}")
    kinds = {"seed": (int, "a whole number"), "by": (str, "a metric"), "tolerance": (int | float, "a number")}
    fields = {key: value for key, value in given.items() if key != "set"}
    for key, value in fields.items():
        if key not in kinds:
            raise unknown("key", key, [*kinds, "set"], where=origin)
        kind, words = kinds[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f"{origin}: {key} must be {words}, got {value!r}")
    made = Tuning(**fields)
    check_metric(made.by, origin)
    return made, [Override(key, value, f"{origin}, set") for key, value in _flat(given.get("set", {}))]


def _settings(given: Any, where: str) -> dict[str, list[Override]]:
    if given is None:
        return {"base": []}
    if not isinstance(given, Mapping) or not given:
        raise InputError(f"{where}: settings must be labels with what they change, got {given!r}")
    settings = {}
    for label, changes in given.items():
        origin = f"settings.{label} of {where}"
        if not isinstance(changes, Mapping | NoneType):
            raise InputError(f"{origin} must hold keys with values, got {changes!r}")
        overrides = [Override(key, value, origin) for key, value in _flat(changes or {})]
        if any(override.key == "seed" for override in overrides):
            raise InputError(f"{origin}: seed has no meaning in a setting; use seeds")
        settings[_label(label, "settings", where)] = overrides
    return settings


def _flat(changes: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in changes.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _label(given: Any, key: str, where: str) -> str:
    label = str(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else ""
    if not label or label.startswith(".") or not label.isprintable() or set(label) & set('/\\:|"<>*?'):
        raise InputError(f"{where}: {key} has the label {given!r}, which cannot name a directory")
    if len(label.encode()) > LONGEST_NAME:
        raise InputError(f"{where}: {key} has the label {given!r}, which is too long to name a directory")
    return label


def _list(given: Any, kind: type[Any], key: str, valid: str, where: str) -> list[Any]:
    right = isinstance(given, list) and all(isinstance(item, kind) and not isinstance(item, bool) for item in given)
    if not right or not given or len(set(given)) < len(given):
        raise InputError(f"{where}: {key} must be {valid}, got {given!r}")
    return list(given)


def _seed(seed: int, where: str) -> Override:
    return Override("seed", seed, f"seeds of {where}")
