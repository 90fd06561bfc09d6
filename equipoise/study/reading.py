"""Reading studies from files and mappings, with all checks before anything runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from equipoise.checks import one_of
from equipoise.config import Experiment, Override, experiment_from, read_yaml
from equipoise.errors import InputError, unknown
from equipoise.metrics import several_from
from equipoise.study.choice import Choices, read_choices
from equipoise.study.metrics import check_metric
from equipoise.study.plan import Job, Study, Tuning
from equipoise.study.runs import flat
from equipoise.study.selection import RULES, pair_label
from equipoise.text import printable

KEYS = ("base", "methods", "settings", "seeds", "metrics", "split", "baseline", "tuning")
SPLITS = ("test", "val")
# The longest name of a file or directory on the usual file systems, in bytes.
LONGEST_NAME = 255
COLUMNS = ("mean", "mean_groups", "sigma_clients", "sigma_groups", "worst10", "worst_group")
# The columns of each metric in evaluation.metrics.
OWN_COLUMNS = ("mean", "worst_group")
LEAVE_OUT = "data.leave_out"
# Keys that cannot be set for all runs of a study, and what to use instead.
INSTEAD = {
    **dict.fromkeys(
        ("method", "methods"), "change the methods in the study, or choose among them with --method"
    ),
    **dict.fromkeys(("seed", "seeds"), "use --seed"),
    "settings": "choose among them with --setting",
    "metrics": "use --metrics",
}

T = TypeVar("T")
Tried = dict[str, dict[str, dict[str, Any]]]


def load_study(
    path: str | Path,
    *,
    metrics: Sequence[str] | None = None,
    tune: bool = False,
    settings: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
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
        hyper-parameters, and optionally ``label``, ``grid`` and ``set`` (settings that are
        different for this method).

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
        For tuning the first method is always kept.
    seeds : sequence of int, optional
        Seeds to use instead of those in the mapping; a single one for tuning.
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
    >>> methods = ["fedavg", {"name": "fedprox", "grid": {"mu": [0.1, 1]}}]
    >>> tried = study_from({"base": base, "methods": methods}, tune=True)
    >>> tried.methods, tried.split
    (('fedavg', 'fedprox mu=0.1', 'fedprox mu=1'), 'val')
    """
    if not isinstance(mapping, Mapping):
        raise InputError(f"{where} must have base and methods, got {printable(repr(mapping), 500)}")
    for key in mapping:
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
    described, changed = (
        _methods(mapping.get("methods"), where),
        _settings(mapping.get("settings"), where),
    )
    tuning, changes = _tuning(mapping.get("tuning", {}), where)
    split = mapping.get("split", "test")
    if split not in SPLITS:
        raise unknown("split", split, SPLITS, where=where)
    columns = metrics or mapping.get("metrics")
    shown = _list(
        COLUMNS if columns is None else columns,
        "--metrics" if metrics else f"{where}: metrics",
        str,
    )
    drawn = _list(seeds or mapping.get("seeds", [0]), "--seed" if seeds else f"{where}: seeds", int)
    if tune:
        tuning, split = _with_seed(tuning, drawn) if seeds else tuning, "val"
        drawn = [tuning.seed]
    for_all = _for_all(overrides)
    divided = {
        label: _folds(
            base,
            label,
            own,
            [*(changes if tune else ()), *for_all],
            where,
            named=mapping.get("settings") is not None,
        )
        for label, own in changed.items()
    }
    kept, part = _kept(described, methods, "method"), _kept_settings(divided, settings, where)
    folds = {
        label: tuple(fold for fold in own if fold in part)
        for label, own in divided.items()
        if label not in own
    }
    made, tried = _to_tune(described, kept, where) if tune else (kept, {})
    drawn_by = "--seed" if seeds else f"tuning of {where}" if tune else f"seeds of {where}"

    def experiment(
        method: _Method, setting: str, seed: int, *, tuned: bool, also: _Setting | None = None
    ) -> Experiment:
        named = Override("method", method.options, f"methods of {where}")
        tuned_with, differing = changes if tuned else [], also or part[setting]
        between = [
            *differing.changes,
            *method.changes,
            *tuned_with,
            Override("seed", seed, drawn_by),
        ]
        overrides = [named, *between, *for_all, *differing.left_out]
        return experiment_from(base, f"base of {where}", overrides, on_import=on_import)

    settings_of = {fold: label for label, own in divided.items() for fold in own}
    used = {} if tune else _choices(chosen or {}, made, where)

    def job(setting: str, label: str, method: _Method, seed: int) -> Job:
        untuned = experiment(method, setting, seed, tuned=tune)
        choice = used.get(settings_of[setting], {}).get(label)
        if choice is None:
            return Job(setting, label, seed, untuned)
        tuned, variant = (
            experiment(method.with_values(choice.values), setting, seed, tuned=False),
            _variant(label, choice.values),
        )
        folder = variant if tuned.plain() != untuned.plain() else None
        return Job(setting, label, seed, tuned, folder, variant)

    # Seed by seed, so a study that is stopped early has all methods and settings of some seeds.
    jobs = [
        job(setting, label, method, seed)
        for seed in drawn
        for setting in part
        for label, method in made.items()
    ]
    if tune and "leave-one-domain-out" in tuning.selection:
        jobs += [
            Job(
                label,
                named,
                tuning.seed,
                experiment(method, label, tuning.seed, tuned=True, also=pair),
            )
            for whole, own in folds.items()
            for label, pair in _pairs(whole, own, part, where).items()
            for named, method in made.items()
        ]
    if not tune:
        # To find errors in a grid now and not when the study is tuned.
        for described_as in kept.values():
            for values in described_as.variants.values():
                experiment(described_as.with_values(values), next(iter(part)), drawn[0], tuned=True)
    if split == "val":
        _check_validation(jobs, "tuning" if tune else f"{where}: split: val")
    # Not earlier, because the code that experiments import may register metrics.
    evaluated = dict.fromkeys(
        metric.name
        for job in jobs
        for metric in several_from(job.experiment.evaluation.metrics, "evaluation.metrics")
    )
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
    baseline = (
        None
        if tune
        else _baseline(mapping.get("baseline"), described, made, where, divided=bool(folds))
    )
    return Study(
        settings=tuple(part),
        methods=tuple(made),
        seeds=tuple(drawn),
        metrics=tuple(shown),
        jobs=tuple(jobs),
        split=split,
        tuning=tuning,
        tried=tried,
        origins=origins,
        folds={label: own for label, own in folds.items() if own},
        baseline=baseline,
        chosen={
            label: {method: choice for method, choice in of.items() if method in made}
            for label, of in used.items()
            if label in settings_of.values()
        },
    )


def _choices(chosen: Choices, methods: Mapping[str, _Method], where: str) -> Choices:
    """Return the choices for methods with a grid. Values that are not in the grid are refused."""
    used: Choices = {}
    for setting, of in chosen.items():
        for label, choice in of.items():
            if label not in methods:
                continue
            if dict(choice.values) not in methods[label].variants.values():
                raise InputError(
                    f"{where}: tuning has chosen {_variant(label, choice.values)!r} for {setting}, "
                    "which is no longer in the grid of the method; tune the study again "
                    "(--tune), or ignore the choice (--untuned)"
                )
            used.setdefault(setting, {})[label] = choice
    return used


@dataclass(frozen=True)
class _Method:
    """The description of a method in a study.

    Attributes
    ----------
    options : dict
        Its name and hyper-parameters.
    variants : dict
        The values of its grid, by the labels of its variants.
    changes : list of Override
        Other settings that are different for this method, such as the number of epochs.
    """

    options: dict[str, Any]
    variants: dict[str, dict[str, Any]]
    changes: list[Override]

    def with_values(self, values: Mapping[str, Any]) -> _Method:
        """Return a variant."""
        return replace(self, options=self.options | dict(values))


def _methods(given: Any, where: str) -> dict[str, _Method]:
    """Return the methods by their labels."""
    if not isinstance(given, list) or not given:
        raise InputError(
            f"{where}: methods must be a list of names or mappings with a name, got {given!r}"
        )
    methods: dict[str, _Method] = {}
    for item in given:
        options = dict(item) if isinstance(item, Mapping) else {"name": item}
        label = _label(options.pop("label", options.get("name")), "methods", where)
        if label in methods:
            raise _called_alike(label, where)
        variants, changes = _variants(options.pop("grid", {}), label, where), options.pop("set", {})
        origin = f"set of method {label!r} of {where}"
        if not isinstance(changes, Mapping):
            raise InputError(f"{origin} must hold keys with values, got {changes!r}")
        overrides = [Override(key, value, origin) for key, value in flat(changes)]
        if strays := [
            override.key for override in overrides if override.key.partition(".")[0] in INSTEAD
        ]:
            raise InputError(f"{origin}: {strays[0]} is not valid there")
        methods[label] = _Method(options, variants, overrides)
    return methods


def _called_alike(label: str, where: str) -> InputError:
    return InputError(f"{where}: two methods are called {label!r}; give them different labels")


def _to_tune(
    described: Mapping[str, _Method], kept: Mapping[str, _Method], where: str
) -> tuple[dict[str, _Method], Tried]:
    """Return the methods that tuning runs, and the values of their variants.

    These are the study's first method and all variants of the methods that are kept.
    """
    tried = {label: method.variants for label, method in kept.items() if method.variants}
    if not tried:
        raise InputError(
            f"{where}: no method has a grid of values to try, such as grid: {{q: [0.1, 1]}}"
        )
    first, method = next(iter(described.items()))
    reference = dict(itertools.islice(method.variants.items(), 1)) or {first: {}}
    made: dict[str, _Method] = {}
    for label, variants in ({first: reference} | tried).items():
        for variant, values in variants.items():
            if variant in made:
                raise _called_alike(variant, where)
            made[variant] = described[label].with_values(values)
    return made, tried


def _variants(grid: Any, label: str, where: str) -> dict[str, dict[str, Any]]:
    """Return every combination of a grid's values by its label."""
    if not isinstance(grid, Mapping) or not all(
        isinstance(values, list) and values for values in grid.values()
    ):
        raise InputError(
            f"{where}: grid of method {label!r} must have hyper-parameters with lists of values, "
            f"got {grid!r}"
        )
    variants: dict[str, dict[str, Any]] = {}
    for combination in itertools.product(*grid.values()) if grid else ():
        values = dict(zip(grid, combination, strict=True))
        variant = _label(_variant(label, values), "methods", where)
        if variant in variants:
            raise InputError(
                f"{where}: grid of method {label!r} has {variant.removeprefix(f'{label} ')} twice"
            )
        variants[variant] = values
    return variants


def _kept(there: Mapping[str, T], chosen: Sequence[str] | None, kind: str) -> dict[str, T]:
    """Return those with the given labels, in the study's order; all without labels."""
    for label in chosen or ():
        if label not in there:
            raise unknown(kind, label, there, where=f"--{kind}")
    return {label: value for label, value in there.items() if not chosen or label in chosen}


@dataclass(frozen=True)
class _Setting:
    """What a setting changes, and for folds the group that is left out."""

    changes: list[Override]
    left_out: tuple[Override, ...] = ()


def _folds(
    base: Mapping[str, Any],
    label: str,
    changes: list[Override],
    later: list[Override],
    where: str,
    *,
    named: bool,
) -> dict[str, _Setting]:
    """Return one setting for each group that is left out, by its label.

    If ``leave_out`` is not a list, return the setting itself.
    """
    data = base.get("data")
    given, origin = (
        (data.get("leave_out") if isinstance(data, Mapping) else None),
        f"base of {where}",
    )
    for override in (*changes, *later):
        if override.key in ("data", LEAVE_OUT):
            given, origin = (override.value if override.key == LEAVE_OUT else None), override.origin
    if not isinstance(given, list):
        return {label: _Setting(changes)}
    groups = _list(given, f"{origin}: {LEAVE_OUT}", str)
    return {
        _label(f"{label}-{group}" if named else group, LEAVE_OUT, where): _Setting(
            changes, (Override(LEAVE_OUT, group, origin),)
        )
        for group in groups
    }


def _pairs(
    whole: str, folds: Sequence[str], part: Mapping[str, _Setting], where: str
) -> dict[str, _Setting]:
    """Return one setting for each pair of groups that are left out together, by its label."""
    if len(folds) < 3:
        raise InputError(
            f"tuning of {where}: leave-one-domain-out needs three left-out groups or more in "
            f"setting {whole!r}, got {', '.join(folds) or 'none'}"
        )
    found = {}
    for one, other in itertools.combinations(folds, 2):
        (first,), (second,) = part[one].left_out, part[other].left_out
        label = _label(pair_label(one, other), LEAVE_OUT, where)
        found[label] = _Setting(
            part[one].changes, (replace(first, value=[first.value, second.value]),)
        )
    return found


def _kept_settings(
    divided: Mapping[str, Mapping[str, _Setting]], chosen: Sequence[str] | None, where: str
) -> dict[str, _Setting]:
    """Return the settings and folds with the given labels, which may be those of settings."""
    every: dict[str, _Setting] = {}
    for label, own in divided.items():
        for fold, setting in own.items():
            if fold in every or (fold != label and fold in divided):
                raise InputError(
                    f"{where}: two settings are called {fold!r}; one of them is named after a "
                    "left-out group"
                )
            every[fold] = setting
    folds = {label: list(own) for label, own in divided.items()} | {fold: [fold] for fold in every}
    wanted = {fold for own in _kept(folds, chosen, "setting").values() for fold in own}
    return {label: setting for label, setting in every.items() if label in wanted}


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


def _for_all(given: Sequence[str | Override]) -> list[Override]:
    """Return the overrides for every run. Keys in which the runs of a study differ are refused."""
    overrides = [item if isinstance(item, Override) else Override.parse(item) for item in given]
    for override in overrides:
        key = override.key.partition(".")[0]
        if key in INSTEAD:
            raise InputError(
                f"{override.origin}: {key} cannot be set for all runs of a study; {INSTEAD[key]}"
            )
    return overrides


def _with_seed(tuning: Tuning, seeds: Sequence[int]) -> Tuning:
    if len(seeds) > 1:
        raise InputError(f"--seed: tuning takes one seed, got {', '.join(map(str, seeds))}")
    return replace(tuning, seed=seeds[0])


def _check_validation(jobs: Sequence[Job], what: str) -> None:
    """Refuse tuning if clients have no validation data."""
    for experiment in (job.experiment for job in jobs):
        if not experiment.data["splits"][1]:
            raise InputError(
                f"{what} needs validation data; data.splits of "
                f"{experiment.origins.of('data.splits')} has none, got "
                f"{list(experiment.data['splits'])}"
            )


def _variant(label: str, values: Mapping[str, Any]) -> str:
    return " ".join([label, *(f"{name}={_written(value)}" for name, value in values.items())])


def _written(value: Any) -> str:
    """Return a value as part of a label, such as ``qffl,q=1`` for ``{name: qffl, q: 1}``."""
    if isinstance(value, Mapping):
        named = [_written(value["name"])] if "name" in value else []
        return ",".join(
            named + [f"{key}={_written(inner)}" for key, inner in value.items() if key != "name"]
        )
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return str(value)


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
        fields["selection"] = tuple(_list(fields["selection"], f"{origin}: selection", str))
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
        overrides = [Override(key, value, origin) for key, value in flat(changes or {})]
        if any(override.key == "seed" for override in overrides):
            raise InputError(f"{origin}: seed is not valid in a setting; use seeds")
        settings[_label(label, "settings", where)] = overrides
    return settings


def _label(given: Any, key: str, where: str) -> str:
    label = (
        str(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else ""
    )
    if (
        not label
        or label.startswith(".")
        or not label.isprintable()
        or set(label) & set('/\\:|"<>*?')
    ):
        raise InputError(f"{where}: {key} has the label {given!r}, which cannot name a directory")
    if len(label.encode()) > LONGEST_NAME:
        raise InputError(
            f"{where}: {key} has the label {given!r}, which is too long to name a directory"
        )
    return label


def _list(given: Any, what: str, kind: type[Any]) -> list[Any]:
    """Return a list of different values of one type, checked."""
    right = isinstance(given, list | tuple) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in given
    )
    if not right or not given or len(set(given)) < len(given):
        kinds = "whole numbers" if kind is int else "names"
        raise InputError(f"{what} must be a list of different {kinds}, got {given!r}")
    return list(given)
