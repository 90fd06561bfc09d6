"""Studies: methods by settings by seeds, run as far as they are missing, and their tables.

A study file holds ``base`` (an experiment without method and seed), ``methods``, ``settings`` (labels with what they
change), ``seeds``, ``metrics`` and the ``split`` they are of. Its runs are in ``OUT/<setting>/<method>/seed<k>``; starting
a study again runs what is missing, goes on with what was broken off and leaves alone what is done.

A method may have a ``grid`` beside its hyper-parameters: values to try for some of them. A study ignores it until it is
tuned. Then every combination is a method of its own, runs with the one seed of ``tuning``, and is judged by validation
data, beside the study's first method; see :class:`Tuning`.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import multiprocessing
import os
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from equipoise.config import Experiment, Override, experiment_from, read_yaml
from equipoise.engine.task import Task
from equipoise.errors import InputError, RunError, unknown
from equipoise.fairness import METRICS, Better
from equipoise.run.api import CONFIG, SUMMARY, read_config
from equipoise.run.files import Journal, write_atomically
from equipoise.run.records import summarize_rows

__all__ = ["Job", "Results", "Study", "Tuning", "load_study", "model_of", "study_from", "value_of"]

KEYS = ("base", "methods", "settings", "seeds", "metrics", "split", "tuning")
SPLITS = ("test", "val")
MODELS, WHO = ("global", "personal"), ("seen", "unseen")
TOTALS = ("bytes_up", "bytes_down")
BETTER: dict[str, Better] = {
    **{name: metric.better for name, metric in METRICS.items()},
    "loss": "low",
    "groups.NAME": "as v_k",
    "bytes_up": "low",
    "bytes_down": "low",
}
# Of a file or directory, in bytes, on the usual file systems.
LONGEST_NAME = 255
COLUMNS = ("mean", "mean_groups", "sigma_clients", "sigma_groups", "worst10", "worst_group")

Watch = Callable[["Job", str], None]


@dataclass(frozen=True)
class Job:
    """One run of a study.

    Examples
    --------
    >>> study_from({"base": {"data": "digits"}, "methods": ["fedavg"], "seeds": [3]}).jobs[0].path
    PosixPath('base/fedavg/seed3')
    """

    setting: str
    method: str
    seed: int
    experiment: Experiment

    @property
    def path(self) -> Path:
        """Its run directory inside the study's."""
        return Path(self.setting) / self.method / f"seed{self.seed}"


@dataclass(frozen=True)
class Tuning:
    """How to choose between the values of a grid, by what the q-FFL and GIFAIR-FL papers call best.

    Of the values whose mean is at most ``tolerance`` worse than that of the study's first method, the one with the best
    ``by`` is chosen; if there is none, the one with the best mean. Which way is better is what ``fairness.METRICS`` says.

    Attributes
    ----------
    seed : int
        The one seed to tune with; best one that the study itself does not use.
    by : str
        What should be best, such as ``sigma_clients`` (the lowest) or ``jain`` (the highest).
    tolerance : float
        How much worse the mean may be.

    Examples
    --------
    >>> Tuning(tolerance=0.01).best({"a": (0.90, 0.10), "b": (0.89, 0.05), "c": (0.70, 0.01)}, reference=0.895)
    'b'
    >>> Tuning(by="jain").best({"a": (0.90, 0.97), "b": (0.89, 0.99)}, reference=0.89)
    'b'
    """

    seed: int = 0
    by: str = "sigma_clients"
    tolerance: float = 0.01

    def best(
        self, measured: Mapping[str, tuple[float, float]], reference: float, *, higher_is_better: bool = True
    ) -> str:
        """Choose by the mean and the value of ``by`` of each; say if the means are losses, which should be low."""
        sign = 1 if higher_is_better else -1
        means = {label: sign * mean for label, (mean, _) in measured.items()}
        similar = [label for label, mean in means.items() if mean >= sign * reference - self.tolerance]
        if not similar:
            return max(means, key=means.__getitem__)
        choose = max if _should_be_high(self.by, higher_is_better=higher_is_better) else min
        return choose(similar, key=lambda label: measured[label][1])


@dataclass(frozen=True)
class Study:
    """What to run, checked, and which metrics of which split to show.

    ``tried`` and ``tuning`` belong to a study that is being tuned: what each method's grid stands for, by the labels of
    its variants, and how to choose between them. ``origins`` says where each metric came from.

    Examples
    --------
    >>> study = study_from({"base": {"data": "digits"}, "methods": ["fedavg", "local"], "seeds": [0, 1]})
    >>> len(study.jobs), study.settings
    (4, ('base',))
    """

    settings: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    metrics: tuple[str, ...]
    jobs: tuple[Job, ...]
    split: str = "test"
    tuning: Tuning = Tuning()
    tried: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    def run(self, out: str | Path, *, jobs: int = 1, watch: Watch | None = None) -> Results:
        """Run what is missing; a run that fails does not keep the others from running.

        Parameters
        ----------
        out : path
            Directory of all runs. What came out is also written to its ``results.json``.
        jobs : int
            How many runs at a time, each in a process of its own if more than one.
        watch : callable, optional
            Told of every job when it begins (``"begun"``) and how it ended.

        Returns
        -------
        Results
            Of the runs that succeeded, and why others did not.

        Examples
        --------
        >>> import tempfile
        >>> base = {"data": "digits", "training": {"rounds": 1}}
        >>> results = study_from({"base": base, "methods": ["fedavg"]}).run(tempfile.mkdtemp())
        >>> results.failures
        {}
        """
        out, tell = Path(out), watch or (lambda job, outcome: None)
        summaries: dict[Path, dict[str, Any]] = {}
        failures: dict[Path, str] = {}
        missing = []
        for job in self.jobs:
            if summary := _finished(job, out / job.path):
                summaries[job.path] = _on_split(summary, out / job.path, self.split)
                tell(job, "already there")
            else:
                missing.append(job)
        self._check_groups(Results(self, summaries, failures))
        for job, result in _carry_out(missing, out, jobs, tell):
            if isinstance(result, str):
                failures[job.path] = result
                tell(job, f"failed: {result}")
            else:
                summaries[job.path] = _on_split(result, out / job.path, self.split)
                tell(job, "done")
        results = Results(self, summaries, failures)
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "results.json", json.dumps(results.plain(), indent=2).encode() + b"\n")
        return results

    def _check_groups(self, finished: Results) -> None:
        """Refuse a metric of a group that no setting has."""
        named = {metric: group for metric in self.origins if (group := _group(metric))}
        there = {group for setting in self.settings for group in finished.groups(setting)}
        for setting in self.settings:
            if there.issuperset(named.values()):
                return
            try:
                first = next(job for job in self.jobs if job.setting == setting)
                there.update(first.experiment.federation().group_names)
            except Exception:  # Its own runs will say why, and must not keep those of others from running.
                return
        for metric, group in named.items():
            if group not in there:
                raise unknown("group", group, there, where=self.origins[metric])


@dataclass(frozen=True)
class Results:
    """What came out of a study.

    Attributes
    ----------
    study : Study
        What was run.
    summaries : dict
        The summary of every run that succeeded, by its path.
    failures : dict
        Why a run failed, by its path.
    """

    study: Study
    summaries: Mapping[Path, Mapping[str, Any]]
    failures: Mapping[Path, str]

    @property
    def spread(self) -> str:
        """Say what stands behind ±."""
        count = len(self.study.seeds)
        return f"sample standard deviation (n - 1) over {count} seed{'s' * (count > 1)}"

    def data(self, setting: str) -> str:
        """Say what numbers of a setting were measured on, if it is not the test split."""
        return setting if self.study.split == "test" else f"{setting}, validation data"

    def values(self, setting: str, method: str, metric: str) -> dict[int, float]:
        """Give a metric's value by seed; seeds whose run failed or has no such value are left out."""
        found = {job.seed: value_of(summary, metric) for job, summary in self._runs(setting, method)}
        return {seed: value for seed, value in found.items() if value is not None}

    def cell(self, setting: str, method: str, metric: str) -> str:
        """Write mean ± standard deviation over seeds."""
        mean, spread, count = _statistics(self.values(setting, method, metric))
        if mean is None:
            lost = any(path.parts[:2] == (setting, method) for path in self.failures)
            return "failed" if lost else "–"
        text = _number(mean) if spread is None else f"{_number(mean)} ± {_number(spread)}"
        return text if count == len(self.study.seeds) else f"{text} ({count} of {len(self.study.seeds)})"

    def models(self, setting: str, metrics: Iterable[str]) -> dict[str, str]:
        """Say of each method which model its metrics that name none are of; nothing if that is always the global one."""
        unnamed = [metric for metric in metrics if metric not in TOTALS and _apart(metric)[0] is None]
        found = {method: self._models(setting, method, unnamed) for method in self.study.methods}
        if {model for models in found.values() for model in models.values()} <= {"global"}:
            return {}
        return {method: _said(models) for method, models in found.items()}

    def _models(self, setting: str, method: str, metrics: Iterable[str]) -> dict[str, str]:
        """Give the model behind metrics of seen and of unseen clients, as far as there is one."""
        found = {_apart(metric)[1]: self._model(setting, method, metric) for metric in metrics}
        return {who: model for who, model in found.items() if model}

    def _model(self, setting: str, method: str, metric: str) -> str | None:
        models = (model_of(summary, metric) for _, summary in self._runs(setting, method))
        return next((model for model in models if model), None)

    def _runs(self, setting: str, method: str) -> Iterator[tuple[Job, Mapping[str, Any]]]:
        for job in self.study.jobs:
            if (job.setting, job.method) == (setting, method) and job.path in self.summaries:
                yield job, self.summaries[job.path]

    def groups(self, setting: str) -> list[str]:
        """List the groups of seen clients."""
        names: dict[str, None] = {}
        for job in self.study.jobs:
            if job.setting == setting and job.path in self.summaries:
                for model in self.summaries[job.path]["results"].values():
                    names |= dict.fromkeys(model.get("seen", {}).get("groups", ()))
        return list(names)

    def worst_group(self, setting: str, method: str) -> str | None:
        """Name the group a method serves worst, on average over seeds."""
        means = {
            group: _statistics(self.values(setting, method, f"groups.{group}"))[0] for group in self.groups(setting)
        }
        scores = {group: mean for group, mean in means.items() if mean is not None}
        if not scores:
            return None
        return max(scores, key=scores.__getitem__) if self._of_losses else min(scores, key=scores.__getitem__)

    @property
    def _of_losses(self) -> bool:
        return any(summary["score"] == "loss" for summary in self.summaries.values())

    def chosen(self, setting: str) -> dict[str, Mapping[str, Any]]:
        """Give the best values of every method with a grid, as far as a run of it succeeded."""
        tuning, best = self.study.tuning, {}
        reference = self._tuned(setting, self.study.methods[0], "mean")
        if reference is None:
            reference = math.inf if self._of_losses else -math.inf
        for method, variants in self.study.tried.items():
            measured = {}
            for label in variants:
                mean, by = (self._tuned(setting, label, metric) for metric in ("mean", tuning.by))
                if mean is not None and by is not None:
                    measured[label] = (mean, by)
            if measured:
                best[method] = variants[tuning.best(measured, reference, higher_is_better=not self._of_losses)]
        return best

    def _tuned(self, setting: str, method: str, metric: str) -> float | None:
        return self.values(setting, method, metric).get(self.study.tuning.seed)

    @property
    def warnings(self) -> list[str]:
        """Say what was asked for and is not there, although its runs succeeded."""
        summaries, by = self.summaries.values(), self.study.tuning.by
        empty = [metric for metric in self.study.metrics if all(value_of(run, metric) is None for run in summaries)]
        found = [f"no run has a value of {', '.join(empty)}"] if empty and summaries else []
        for setting in self.study.settings:
            first, chosen = self.study.methods[0], self.chosen(setting)
            if chosen and self._tuned(setting, first, "mean") is None:
                found.append(f"{setting}: chosen whatever the mean, because {first} has none to compare with")
            for method, variants in self.study.tried.items():
                if method not in chosen and any(any(self._runs(setting, label)) for label in variants):
                    found.append(
                        f"{setting}: nothing chosen for {method}, because none of its runs has a value of {by}"
                    )
        return found

    def plain(self) -> dict[str, Any]:
        """Give everything as plain values, ready for JSON."""
        names = ("setting", "method", "model", "metric")
        rows = [
            dict(zip(names, which, strict=True))
            | dict(zip(("mean", "std", "n"), summed, strict=True))
            | {"seeds": {str(seed): value for seed, value in seeds.items()}}
            for *which, summed, seeds in self._rows()
        ]
        failures = {path.as_posix(): message for path, message in self.failures.items()}
        plain = {"metrics": list(self.study.metrics), "split": self.study.split, "std": self.spread, "results": rows}
        chosen = {setting: self.chosen(setting) for setting in self.study.settings} if self.study.tried else None
        return plain | {"failures": failures, "warnings": self.warnings} | ({"chosen": chosen} if chosen else {})

    def markdown(self) -> str:
        """Write the tables as Markdown."""
        lines = []
        for setting in self.study.settings:
            tables = {f"{self.data(setting)}: mean ± {self.spread}": {metric: metric for metric in self.study.metrics}}
            if groups := self.groups(setting):
                tables[f"{setting}: mean over the clients of each group"] = {
                    group: f"groups.{group}" for group in groups
                }
            for title, columns in tables.items():
                models = self.models(setting, columns.values())
                header = ["method", *(["model"] if models else []), *columns]
                lines += [f"**{title}**", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
                for method in self.study.methods:
                    cells = (self.cell(setting, method, metric) for metric in columns.values())
                    lines.append(f"| {' | '.join([method, *([models[method]] if models else []), *cells])} |")
                lines.append("")
        lines += [f"Warning: {message}\n" for message in self.warnings]
        lines += [f"Failed: `{path.as_posix()}`: {message}\n" for path, message in self.failures.items()]
        return "\n".join(lines)

    def csv(self) -> str:
        """Write one row a setting, method and metric, groups included."""
        rows = ([*which, *summed] for *which, summed, _ in self._rows())
        return _csv(["setting", "method", "model", "metric", "mean", "std", "n"], rows)

    def csv_seeds(self) -> str:
        """Write one row a setting, method, metric and seed."""
        rows = ([*which, seed, value] for *which, _, seeds in self._rows() for seed, value in seeds.items())
        return _csv(["setting", "method", "model", "metric", "seed", "value"], rows)

    def _rows(self) -> Iterator[tuple[str, str, str | None, str, _Statistics, dict[int, float]]]:
        for setting in self.study.settings:
            metrics = dict.fromkeys([*self.study.metrics, *(f"groups.{group}" for group in self.groups(setting))])
            for method in self.study.methods:
                for metric in metrics:
                    seeds = self.values(setting, method, metric)
                    yield setting, method, self._model(setting, method, metric), metric, _statistics(seeds), seeds


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
        the model the clients have in the end: see :func:`model_of`) and ``seen.`` or ``unseen.`` (otherwise seen).
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
        _check_metric(metric, origin)
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


def value_of(summary: Mapping[str, Any], metric: str) -> float | None:
    """Look a metric up in a run's summary.

    Parameters
    ----------
    summary : mapping
        The content of ``summary.json``.
    metric : str
        As in :func:`study_from`.

    Returns
    -------
    float or None
        None if the run has no such value, such as that of personal models when there are none.

    Examples
    --------
    >>> value_of({"results": {"global": {"seen": {"mean": 0.5}}}}, "mean")
    0.5
    """
    if metric in TOTALS:
        return float(summary[metric])
    model = model_of(summary, metric)
    if model is None:
        return None
    _, who, name = _apart(metric)
    part, group = summary["results"][model][who], _group(metric)
    found = part["groups"].get(group) if group else part[name]
    return None if found is None else float(found)


def model_of(summary: Mapping[str, Any], metric: str) -> str | None:
    """Say which model a metric is of: the one it names, else the personal one if those clients have one.

    Parameters
    ----------
    summary : mapping
        The content of ``summary.json``.
    metric : str
        As in :func:`study_from`.

    Returns
    -------
    str or None
        ``global`` or ``personal``; None if no such model was evaluated, or for what is of no model, such as ``bytes_up``.

    Examples
    --------
    >>> results = {"global": {"seen": {"mean": 0.5}, "unseen": {"mean": 0.4}}, "personal": {"seen": {"mean": 0.6}}}
    >>> [model_of({"results": results}, metric) for metric in ("mean", "global.mean", "unseen.mean")]
    ['personal', 'global', 'global']
    """
    if metric in TOTALS:
        return None
    model, who, _ = _apart(metric)
    candidates = (model,) if model else ("personal", "global")
    return next((name for name in candidates if summary["results"].get(name, {}).get(who)), None)


# ---- reading a study -------------------------------------------------------------------------------------------------


Tried = dict[str, dict[str, dict[str, Any]]]


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
    _check_metric(made.by, origin)
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


def _apart(metric: str) -> tuple[str | None, str, str]:
    """Take ``[model.][who.]name`` apart."""
    parts = metric.split(".")
    model = parts.pop(0) if parts[0] in MODELS else None
    who = parts.pop(0) if parts and parts[0] in WHO else "seen"
    return model, who, ".".join(parts)


def _group(metric: str) -> str:
    """Give the group a metric is of, if it is of one."""
    before, _, group = _apart(metric)[2].partition(".")
    return group if before == "groups" else ""


def _kind(metric: str) -> str:
    """Give what a metric is called in ``BETTER``, if it is one."""
    return "groups.NAME" if _group(metric) else _apart(metric)[2]


def _check_metric(metric: str, where: str) -> None:
    kind = _kind(metric)
    if kind not in BETTER or (kind in TOTALS and kind != metric):
        raise unknown("metric", metric, BETTER, where=where)


def _should_be_high(metric: str, *, higher_is_better: bool) -> bool:
    better = BETTER[_kind(metric)]
    return higher_is_better if better == "as v_k" else better == "high"


# ---- running it ------------------------------------------------------------------------------------------------------


def _finished(job: Job, directory: Path) -> dict[str, Any] | None:
    """Give the summary if this very experiment is done."""
    if not (directory / SUMMARY).exists() or not (directory / CONFIG).exists():
        return None
    config = read_config(directory)
    del config["resolved"]
    if config != job.experiment.plain():
        return None
    summary: dict[str, Any] = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    return summary


def _on_split(summary: dict[str, Any], directory: Path, split: str) -> dict[str, Any]:
    """Give the summary with the results of another split than the test split, worked out from the run's rows."""
    if split == "test":
        return summary
    rows = (row for row in Journal(directory / "metrics.jsonl") if row["round"] == summary["round"])
    task = Task("regression" if summary["score"] == "loss" else "classification")
    return {**summary, "results": summarize_rows(rows, task, split=split)}


def _carry_out(missing: Sequence[Job], out: Path, jobs: int, tell: Watch) -> Iterator[tuple[Job, dict[str, Any] | str]]:
    if jobs == 1 or len(missing) < 2:
        for job in missing:
            tell(job, "begun")
            yield job, _run(job, out / job.path, torch.get_num_threads())
        return
    threads = max(1, torch.get_num_threads() // jobs)
    # Not forked: PyTorch's threads do not survive that.
    pool = ProcessPoolExecutor(
        min(jobs, len(missing)), multiprocessing.get_context("spawn"), initializer=_end_with_parent
    )
    try:
        futures: dict[Future[dict[str, Any] | str], Job] = {
            pool.submit(_run, job, out / job.path, threads): job for job in missing
        }
        for future in as_completed(futures):
            error = future.exception()
            yield futures[future], f"its process ended: {error}" if error else future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _run(job: Job, directory: Path, threads: int) -> dict[str, Any] | str:
    """Run one job, from the start or from where it was broken off; give its summary, or why there is none."""
    try:
        broken_off = (directory / CONFIG).exists()
        # A run keeps its number of threads: another one would round differently.
        recorded = read_config(directory)["resolved"].get("threads", threads) if broken_off else threads
        with _threads(recorded):
            return job.experiment.run(directory, resume=broken_off).summary
    except (InputError, RunError) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _end_with_parent() -> None:
    """Keep a process whose study was killed from going on writing beside the next one."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# ---- numbers ---------------------------------------------------------------------------------------------------------


_Statistics = tuple[float | None, float | None, int]


def _statistics(values: Mapping[int, float]) -> _Statistics:
    """Give mean, sample standard deviation and number of values, as far as they are defined."""
    numbers = list(values.values())
    mean = statistics.fmean(numbers) if numbers else None
    return mean, statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def _said(models: Mapping[str, str]) -> str:
    """Write the models behind metrics of seen and of unseen clients."""
    if len(set(models.values())) > 1:
        return ", ".join(f"{who} {model}" for who, model in models.items())
    return next(iter(models.values()), "–")


def _csv(header: Sequence[str], rows: Iterator[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
