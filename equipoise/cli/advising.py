"""Output of ``equipoise advise``: the measurements, the advice and the trial."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from equipoise.advise import (
    FAMILIES,
    Advice,
    Measured,
    Trial,
    Verdict,
    measure,
    plan_trial,
    recommend,
)
from equipoise.advise.families import (
    CLEAR_FEATURES,
    CLEAR_LABELS,
    CLEAR_SIZES,
    STRONG_FEATURES,
    STRONG_LABELS,
)
from equipoise.cli.show.console import new_console, new_table, number
from equipoise.cli.show.progress import progress_of_study
from equipoise.config import Experiment, Override, experiment_from, read_yaml
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.models import build, with_class_names
from equipoise.run.directory import CONFIG, SUMMARY
from equipoise.run.files import Journal
from equipoise.run.records import several_groups
from equipoise.study import Results


@dataclass(frozen=True)
class Request:
    """The arguments of the command line."""

    data: str
    overrides: tuple[Override, ...]
    rounds: int | None
    seeds: int
    by: str
    jobs: int | None
    trial: bool


def advise(request: Request, directory: Path, *, quiet: bool) -> dict[str, Any]:
    """Measure, advise and run the trial, unless it is skipped. Print and return the results."""
    experiment, run = _experiment(request)
    federation = experiment.federation()
    measured = measure(federation, experiment.training)
    advice = recommend(measured, batchnorm=_has_batchnorm(experiment, federation))
    console = new_console()

    def say(*lines: Any) -> None:
        if not quiet:
            for line in lines:
                console.print(line, soft_wrap=isinstance(line, str))

    say(*_about(federation, measured), *_about_run(run), *_advised(advice))
    document: dict[str, Any] = {
        "data": federation.name,
        "measured": measured.as_dict(),
        "family": advice.family,
        "title": FAMILIES[advice.family].title,
        "methods": list(FAMILIES[advice.family].labels),
        "reasons": list(advice.reasons),
        "notes": list(advice.notes),
    }
    if not request.trial:
        return document
    trial = plan_trial(
        experiment,
        federation,
        rounds=request.rounds,
        seeds=request.seeds,
        by=request.by,
        seconds_a_round=_seconds_a_round(run),
    )
    say(f"\ntrial: {trial.cost}; --no-trial skips it")
    with progress_of_study(len(trial.study.jobs)) as watch:
        results = trial.study.run(directory, jobs=request.jobs, watch=watch)
    verdict = trial.judge(advice, results, directory)
    say(_table(trial, results), *_judged(trial, verdict), f"\nfiles: {directory}")
    ran = {
        "cost": trial.cost,
        "seconds": trial.seconds,
        "directory": str(directory),
        **asdict(verdict),
    }
    return {
        **document,
        "trial": {**ran, "results": results.plain()["results"]},
        "pick": verdict.pick,
    }


def _experiment(request: Request) -> tuple[Experiment, Path | None]:
    """Return the experiment of the data, and the run directory if one was given."""
    path = Path(request.data)
    if (path / CONFIG).is_file():
        return experiment_from(
            read_yaml(path / CONFIG), str(path / CONFIG), request.overrides
        ), path
    if path.is_file():
        return experiment_from(read_yaml(path), str(path), request.overrides), None
    if path.is_dir():
        raise InputError(
            f"{path} is a directory without a run; valid: a run directory, an experiment file or a "
            "source"
        )
    imports = [override for override in request.overrides if override.key == "imports"]
    # The source is set before its settings, such as data.imbalance.
    others = [
        Override("data", request.data, "DATA"),
        *(o for o in request.overrides if o.key != "imports"),
    ]
    return experiment_from({}, "", [*imports, *others]), None


def _has_batchnorm(experiment: Experiment, federation: Federation) -> bool:
    options = with_class_names(experiment.model, federation.class_names)
    model = build(shape=federation.shape, classes=federation.outputs, seed=0, **options)
    return any(name.endswith("running_mean") for name, _ in model.named_buffers())


def _about(federation: Federation, measured: Measured) -> list[Any]:
    groups = f" in {measured.groups} groups" if measured.groups > 1 else ""
    title = (
        f"{federation.name}: {measured.clients} clients{groups}, {measured.samples:,} training "
        "samples"
    )
    table = new_table(title, "what", "value", "in words", numbers=0)
    sizes = f"{measured.smallest:,} to {measured.largest:,}, median {measured.median:,.0f}"
    uneven = f"the largest is {measured.size_skew:.1f} times the median"
    table.add_row("sizes", sizes, uneven if measured.size_skew >= CLEAR_SIZES else "similar")
    words = _words(measured.label_skew, CLEAR_LABELS, STRONG_LABELS)
    held = (
        ""
        if measured.labels_held is None
        else f"; {measured.labels_held:.0f} labels in the median client"
    )
    table.add_row("label skew", number(measured.label_skew), f"{words}{held}")
    words = _words(measured.feature_shift, CLEAR_FEATURES, STRONG_FEATURES)
    between = (
        ""
        if measured.between_groups is None
        else f"; {measured.between_groups:.0%} of it between groups"
    )
    table.add_row("feature shift", number(measured.feature_shift), f"{words}{between}")
    table.add_row("take part", f"{measured.participation:.0%}", "share of clients in a round")
    return [table]


def _words(value: float | None, clear: float, strong: float) -> str:
    if value is None:
        return "not measured for this kind of data"
    return "strong" if value >= strong else "clear" if value >= clear else "within chance"


def _about_run(run: Path | None) -> list[str]:
    """Describe the results of the run."""
    if run is None or not (run / SUMMARY).exists():
        return []
    summary = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
    parts = [summary["results"].get(model, {}).get("seen") for model in ("personal", "global")]
    part = next((part for part in parts if part), None)
    if part is None:
        return []
    numbers = (
        f"mean {part['mean']:.3f}, worst tenth {part['worst10']:.3f}, "
        f"σ over clients {part['sigma_clients']:.3f}"
    )
    worst = f"; group {part['worst_group_name']} is served worst ({part['worst_group']:.3f})"
    return [f"\nthe run, {summary['method']}: {numbers}{worst if several_groups(part) else ''}"]


def _seconds_a_round(run: Path | None) -> float | None:
    """Return the seconds per round of a run; None if they are not recorded."""
    rows = list(Journal(run / "timings.jsonl").complete()) if run else []
    laps = [row.get("train", 0.0) + row.get("combine", 0.0) for row in rows]
    return sum(laps) / len(laps) if laps else None


def _advised(advice: Advice) -> list[str]:
    family = FAMILIES[advice.family]
    lines = [f"\nadvice: {family.title} ({', '.join(family.labels)})"]
    lines += [f"- {reason}" for reason in advice.reasons]
    return lines + [f"- note: {note}" for note in advice.notes]


def _table(trial: Trial, results: Results) -> Any:
    data = (
        "validation data"
        if trial.study.split == "val"
        else "test data, because there are no validation data"
    )
    metrics = trial.study.metrics
    table = new_table(
        f"\n{data}: mean over seeds", "method", *metrics, numbers=len(metrics), last="family"
    )
    for family in FAMILIES.values():
        for label in family.labels:
            table.add_row(
                label, *(results.cell("base", label, metric) for metric in metrics), family.title
            )
    return table


def _judged(trial: Trial, verdict: Verdict) -> list[str]:
    margin = f"by {verdict.difference:.3f} (standard error {verdict.standard_error:.3f})"
    if verdict.pick == verdict.advised:
        said = f"The trial supports the advice: {verdict.pick} has the best {trial.by}."
    elif verdict.supported:
        said = (
            f"The trial does not contradict the advice: {verdict.pick} "
            f"({FAMILIES[verdict.family].title}) has a better {trial.by} than {verdict.advised} "
            f"{margin}, which may be chance."
        )
    else:
        said = (
            f"The trial contradicts the advice: {verdict.pick} ({FAMILIES[verdict.family].title}) "
            f"has a better {trial.by} than {verdict.advised} {margin}."
        )
    alone = (
        " Federated training does not help here: local training is as good."
        if verdict.family == "alone"
        else ""
    )
    short = (
        " A short trial favours methods that learn fast; compare the best ones over all rounds "
        "before you decide."
    )
    return [f"\n{said}{alone}{short}", f"use: {verdict.pick}"]
