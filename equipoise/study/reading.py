"""Reading studies from files and mappings, with all checks before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from equipoise.checks import one_of
from equipoise.config import SECTIONS, Override, read_yaml
from equipoise.errors import InputError, unknown
from equipoise.metrics import several_from
from equipoise.study.checks import checked_list, for_all_runs, with_labels
from equipoise.study.choice import Choices, read_choices
from equipoise.study.jobs import Experiments
from equipoise.study.methods import (
    methods_from,
    methods_to_tune,
    unused_grids,
    used_choices,
)
from equipoise.study.metrics import check_metric
from equipoise.study.plan import Job, Study, Tuning
from equipoise.study.runs import flat
from equipoise.study.selection import RULES
from equipoise.study.settings import folds_of, kept_settings, pairs_of, settings_from
from equipoise.text import printable

KEYS = ("base", "methods", "settings", "seeds", "metrics", "split", "baseline", "tuning")
SPLITS = ("test", "val")
COLUMNS = ("mean", "mean_groups", "sigma_clients", "sigma_groups", "worst10", "worst_group")
# The columns of each metric in evaluation.metrics.
OWN_COLUMNS = ("mean", "worst_group")


def load_study(
    path: str | Path,
    *,
    metrics: Sequence[str] | None = None,
    tune: bool = False,
    settings: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    baseline: str | None = None,
    overrides: Sequence[str | Override] = (),
    chosen: str | Path | None = None,
) -> Study:
    """Read a study file.

    Parameters
    ----------
    path : path
        A YAML file.
    metrics : sequence of str, optional
        The metrics to show instead of those in the file.
    tune : bool
        Whether to try the grids of its methods instead of running the study.
    settings, methods, seeds, overrides
        To run a part of the study; as in :func:`study_from`.
    baseline : str, optional
        The method with which the others are compared, instead of that in the file.
    chosen : path, optional
        The directory of tuning, or its ``chosen.yaml``. Methods run with the values chosen there.

    Returns
    -------
    Study
        With all its experiments checked.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "study.yaml"
    >>> _ = file.write_text("{base: {data: digits}, methods: [fedavg, local], seeds: [0, 1, 2]}")
    >>> len(load_study(file).jobs)
    6
    """
    return study_from(
        read_study(path),
        str(path),
        metrics=metrics,
        tune=tune,
        settings=settings,
        methods=methods,
        seeds=seeds,
        baseline=baseline,
        overrides=overrides,
        chosen=read_choices(Path(chosen)) if chosen else None,
    )


def read_study(path: str | Path) -> dict[str, Any]:
    """Read a study file without checks.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "study.yaml"
    >>> _ = file.write_text("{base: {data: digits}, methods: [fedavg]}")
    >>> read_study(file)["methods"]
    ['fedavg']
    """
    try:
        return read_yaml(path)
    except InputError as error:
        # Files that cannot be read or are not YAML have another error.
        if error.__cause__:
            raise
        raise InputError(
            f"{path} is not a study; it needs base and methods, "
            "such as 'base: {data: digits}' and 'methods: [fedavg, local]'"
        ) from error


def study_from(
    mapping: Mapping[str, Any],
    where: str = "the study",
    *,
    metrics: Sequence[str] | None = None,
    tune: bool = False,
    settings: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    baseline: str | None = None,
    overrides: Sequence[str | Override] = (),
    chosen: Choices | None = None,
    on_import: Callable[[str], None] | None = None,
) -> Study:
    """Make a study from plain values.

    Parameters
    ----------
    mapping : mapping
        The content of a study file: ``base`` and ``methods``, and optionally ``settings``,
        ``seeds``, ``metrics``, ``split`` (``test`` or ``val``), ``baseline`` (the method with which
        all others are compared, pair by pair) and ``tuning`` (the fields of :class:`Tuning`, and
        further changes under ``set``). A method is a name, or a mapping with its name and
        hyper-parameters, and optionally ``label``, ``grid`` (values to try; for its keys see
        :mod:`equipoise.study`) and ``set`` (settings that are different for this method).

        If ``data.leave_out`` is a list, each of its groups is left out once. These settings are
        called folds. The label of a fold is the name of the group, after the label of the setting
        and a hyphen if there are settings. The baseline is then by default the first method. A
        metric with ``val.`` before its name is always on validation data.
    where : str
        Where the mapping came from, for errors.
    metrics : sequence of str, optional
        The metrics to show instead of those in the mapping: a name of ``fairness.METRICS``,
        ``loss``, ``groups.NAME``, ``bytes_up`` or ``bytes_down``. The first and the third may be
        those of one of ``evaluation.metrics`` (``auroc.worst_group``, ``auroc.groups.NAME``;
        ``auroc`` alone is its mean). All except ``bytes_up`` and ``bytes_down`` may begin with
        ``global.``, ``personal.`` or ``local.`` (by default the final model of clients; see
        :func:`equipoise.study.model_of`) and ``seen.`` or ``unseen.`` (by default seen). With
        ``evaluation.last``, a name that begins with ``selected.`` is that of the selected round,
        and one that begins with ``each.`` the mean over rounds of the metric in each round.
    tune : bool
        Whether to return the study that tries the grids of its methods on validation data.
    settings, methods : sequence of str, optional
        The labels of those to keep; by default all. The label of a setting selects all its folds.
        For tuning the first method is always kept, with all values of its grid.
    seeds : sequence of int, optional
        Seeds to use instead of those in the mapping; a single one for tuning.
    baseline : str, optional
        The label of the method with which the others are compared, instead of that in the mapping.
        It must be one of ``methods``. Runs do not depend on it. Not for tuning.
    overrides : sequence of str
        ``key=value`` as in :func:`equipoise.config.load_experiment`, for every run of the study.
    chosen : dict, optional
        The choices of tuning, by setting and method
        (:func:`equipoise.study.choice.read_choices`). Methods with a grid run with these values. If
        they differ from those in the mapping, the run directory is named after the values.
    on_import : callable, optional
        As in :func:`equipoise.config.experiment_from`.

    Returns
    -------
    Study
        With all its experiments checked.

    Examples
    --------
    >>> base, strong = {"data": "digits"}, {"name": "fedprox", "mu": 1, "label": "strong"}
    >>> changes = {"even": {"data.imbalance": 1}, "uneven": {"data": {"imbalance": 20}}}
    >>> mapping = {"base": base, "methods": [strong], "settings": changes}
    >>> [str(job.path) for job in study_from(mapping).jobs]
    ['even/strong/seed0', 'uneven/strong/seed0']
    >>> part = study_from(mapping, settings=["even"], seeds=[7], overrides=["training.rounds=2"])
    >>> [str(job.path) for job in part.jobs]
    ['even/strong/seed7']
    >>> left_out = {"data": {"name": "digits", "leave_out": ["plain", "rotated"]}}
    >>> folds = study_from({"base": left_out, "methods": ["fedavg", "ga"]})
    >>> folds.folds, folds.baseline
    ({'base': ('plain', 'rotated')}, 'fedavg')
    >>> study_from({"base": left_out, "methods": ["fedavg", "ga"]}, baseline="ga").others
    ('fedavg',)
    >>> methods = ["fedavg", {"name": "fedprox", "grid": {"mu": [0.1, 1]}}]
    >>> tried = study_from({"base": base, "methods": methods}, tune=True)
    >>> tried.methods, tried.split
    (('fedavg', 'fedprox mu=0.1', 'fedprox mu=1'), 'val')
    """
    base = _base(mapping, where)
    described = methods_from(mapping.get("methods"), where)
    changed = settings_from(mapping.get("settings"), where)
    tuning, changes = _tuning(mapping.get("tuning", {}), where)
    split = mapping.get("split", "test")
    if split not in SPLITS:
        raise unknown("split", split, SPLITS, where=where)
    columns = metrics or mapping.get("metrics")
    shown = checked_list(
        COLUMNS if columns is None else columns,
        "--metrics" if metrics else f"{where}: metrics",
        str,
    )
    drawn = checked_list(
        seeds or mapping.get("seeds", [0]), "--seed" if seeds else f"{where}: seeds", int
    )
    if tune:
        tuning, split = _with_seed(tuning, drawn) if seeds else tuning, "val"
        drawn = [tuning.seed]
    for_all = for_all_runs(overrides)
    later = [*(changes if tune else ()), *for_all]
    named = mapping.get("settings") is not None
    divided = {
        label: folds_of(base, label, own, later, where, named=named)
        for label, own in changed.items()
    }
    kept = with_labels(described, methods, "method")
    if baseline is not None:
        _check_baseline(baseline, described, kept, tune=tune)
    part = kept_settings(divided, settings, where)
    folds = {
        label: tuple(fold for fold in own if fold in part)
        for label, own in divided.items()
        if label not in own
    }
    made, tried, first = methods_to_tune(described, kept, where) if tune else (kept, {}, ())
    drawn_by = "--seed" if seeds else f"tuning of {where}" if tune else f"seeds of {where}"
    experiments = Experiments(base, where, changes, for_all, drawn_by, on_import)
    settings_of = {fold: label for label, own in divided.items() for fold in own}
    used = {} if tune else used_choices(chosen or {}, made, where)
    # Seed by seed, so a study that is stopped early has all methods and settings of some seeds.
    jobs = [
        experiments.job(
            setting,
            method,
            seed,
            tuned=tune,
            choice=used.get(settings_of[setting[0]], {}).get(method[0]),
        )
        for seed in drawn
        for setting in part.items()
        for method in made.items()
    ]
    if tune and "leave-one-domain-out" in tuning.selection:
        jobs += [
            experiments.job(pair, method, tuning.seed, tuned=True)
            for whole, own in folds.items()
            for pair in pairs_of(whole, own, part, where).items()
            for method in made.items()
        ]
    if not tune:
        # To find errors in a grid now and not when the study is tuned.
        for method in kept.values():
            for values in method.variants.values():
                setting = next(iter(part.values()))
                experiments.make(method.with_values(values), setting, drawn[0], tuned=True)
    if split == "val":
        _check_validation(jobs, "tuning" if tune else f"{where}: split: val")
    evaluated = _evaluated(jobs)
    if columns is None:
        shown += [f"{name}.{kind}" for name in evaluated for kind in OWN_COLUMNS]
    origins = dict.fromkeys(shown, "--metrics" if metrics else f"metrics of {where}")
    for metric, origin in {**origins, tuning.by: f"tuning of {where}"}.items():
        check_metric(metric, origin, evaluated)
    if len(part) < sum(map(len, divided.values())) and not metrics:
        # A column may be of a group that only the other settings have.
        origins = {}
    if tune:
        origins[tuning.by] = f"tuning of {where}"
    if baseline is None and not tune:
        baseline = _baseline(mapping.get("baseline"), described, made, where, divided=bool(folds))
    return Study(
        settings=tuple(part),
        methods=tuple(made),
        seeds=tuple(drawn),
        metrics=tuple(shown),
        jobs=tuple(jobs),
        split=split,
        tuning=tuning,
        tried=tried,
        reference=first,
        origins=origins,
        folds={label: own for label, own in folds.items() if own},
        baseline=baseline,
        chosen={
            label: {method: choice for method, choice in of.items() if method in made}
            for label, of in used.items()
            if label in settings_of.values()
        },
        metrics_by_default=columns is None,
        warnings=() if tune else unused_grids(jobs, made),
    )


def _base(mapping: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the base of a study. Unknown keys, and those that runs differ in, are refused."""
    if not isinstance(mapping, Mapping):
        raise InputError(f"{where} must have base and methods, got {printable(repr(mapping), 500)}")
    for key in mapping:
        if key in SECTIONS and key not in ("method", "seed"):
            raise InputError(f"{where}: {key} is a key of experiments; in a study it is below base")
        if key not in KEYS:
            raise unknown("key", key, KEYS, where=where)
    base = mapping.get("base")
    if not isinstance(base, Mapping):
        raise InputError(
            f"{where}: base must be an experiment, such as 'data: digits', got {base!r}"
        )
    for key in ("method", "seed"):
        if key in base:
            raise InputError(f"{where}: base.{key} is not valid in a study; use {key}s")
    return base


def _evaluated(jobs: Sequence[Job]) -> dict[str, None]:
    """Return the names of ``evaluation.metrics`` in any run.

    The code that experiments import may register metrics, so experiments are made before.
    """
    return dict.fromkeys(
        metric.name
        for job in jobs
        for metric in several_from(job.experiment.evaluation.metrics, "evaluation.metrics")
    )


def _check_baseline(
    label: str, described: Mapping[str, Any], kept: Mapping[str, Any], *, tune: bool
) -> None:
    """Refuse a baseline of the command line with which nothing can be compared."""
    if tune:
        raise InputError("--baseline cannot be used together with --tune")
    if label not in described:
        raise unknown("method", label, described, where="--baseline")
    if label not in kept:
        raise InputError(
            f"--baseline {label} is not among the methods of --method ({', '.join(kept)}); add "
            f"--method {label}"
        )
    if len(kept) == 1:
        raise InputError(f"--baseline {label} needs another method to compare with")


def _baseline(
    given: Any, described: Mapping[str, Any], made: Mapping[str, Any], where: str, *, divided: bool
) -> str | None:
    """Return the baseline: the given method, or the first one if groups are left out in turn."""
    if given is not None and str(given) not in described:
        raise unknown("method", str(given), described, where=f"baseline of {where}")
    usual = next(iter(described)) if divided else None
    baseline = usual if given is None else str(given)
    # If the baseline does not run, there are no comparisons.
    return baseline if baseline in made else None


def _check_validation(jobs: Sequence[Job], what: str) -> None:
    """Refuse tuning if clients have no validation data."""
    for experiment in (job.experiment for job in jobs):
        if not experiment.data["splits"][1]:
            raise InputError(
                f"{what} needs validation data; data.splits of "
                f"{experiment.origins.of('data.splits')} has none, got "
                f"{list(experiment.data['splits'])}"
            )


def _tuning(given: Any, where: str) -> tuple[Tuning, list[Override]]:
    origin = f"tuning of {where}"
    if not isinstance(given, Mapping) or not isinstance(given.get("set", {}), Mapping):
        raise InputError(f"{origin} must hold keys with values, got {given!r}")
    kinds = {
        "seed": (int, "a whole number"),
        "by": (str, "a metric"),
        "tolerance": (int | float, "a number"),
    }
    fields = {key: value for key, value in given.items() if key != "set"}
    if "selection" in fields:
        fields["selection"] = tuple(checked_list(fields["selection"], f"{origin}: selection", str))
        for rule in fields["selection"]:
            one_of(rule, tuple(RULES), f"{origin}: selection")
    for key, value in fields.items():
        if key == "selection":
            continue
        if key not in kinds:
            raise unknown("key", key, [*kinds, "selection", "set"], where=origin)
        kind, words = kinds[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f"{origin}: {key} must be {words}, got {value!r}")
    return Tuning(**fields), [
        Override(key, value, f"{origin}, set") for key, value in flat(given.get("set", {}))
    ]


def _with_seed(tuning: Tuning, seeds: Sequence[int]) -> Tuning:
    if len(seeds) > 1:
        raise InputError(f"--seed: tuning takes one seed, got {', '.join(map(str, seeds))}")
    return replace(tuning, seed=seeds[0])
