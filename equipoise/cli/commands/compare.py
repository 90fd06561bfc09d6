"""``equipoise compare``: a study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.errors import errors_as_lines, say_import
from equipoise.cli.options import (
    RUNS,
    Debug,
    Device,
    Json,
    NoReport,
    Set,
    leaning_to_study,
    overrides_from,
    runs_at_a_time,
)
from equipoise.cli.output import name_of, print_json, report_on
from equipoise.cli.paths import check_directory, check_file
from equipoise.errors import InputError, unknown

if TYPE_CHECKING:
    from equipoise.study import Results, Study


def compare(
    study: Annotated[
        Path,
        typer.Argument(
            help="A YAML file with base, methods, settings, seeds and metrics; or demo, an example."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory of all its runs; those of --tune are in OUT-tuning.",
            show_default="runs/ and the file's name",
        ),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the tables as CSV; seeds and differences beside it.")
    ] = None,
    latex: Annotated[
        Path | None, typer.Option(help="Write the tables as LaTeX, for the package booktabs.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Columns, such as mean,worst10,global.unseen.mean.", show_default="the file's"
        ),
    ] = None,
    jobs: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Number of runs at a time; auto: chosen to fill the cores or the GPU.",
        ),
    ] = "1",
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="Choose values of its grids on validation data, with runs in OUT-tuning."
        ),
    ] = False,
    chosen: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The choices of tuning: chosen.yaml, or its directory.",
            show_default="chosen.yaml in OUT-tuning or OUT",
        ),
    ] = None,
    untuned: Annotated[
        bool,
        typer.Option("--untuned", help="Use the values of the file, not those of tuning."),
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL", help="Only this setting; may be repeated.", show_default="all of them"
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL", help="Only this method; may be repeated.", show_default="all of them"
        ),
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="A seed; may be repeated.", show_default="the file's")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL",
            help="Show paired differences from this method; finished runs are not repeated.",
            show_default="the file's",
        ),
    ] = None,
    set_: Set = None,
    device: Device = None,
    no_report: NoReport = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Run all methods, settings and seeds of a study, and show the tables.

    Finished runs are not repeated, interrupted ones are resumed. Every cell is the mean ± the
    sample standard deviation over seeds. The best value is bold, the second underlined. With five
    seeds or more, † marks values that are significantly worse than the best (paired t-test,
    corrected). If data.leave_out is a list, each of its groups is left out once, and tables of the
    mean over groups and of paired differences from the baseline follow. After --tune, the same
    command without it uses the chosen values. Runs of tuning have a directory of their own, with
    "-tuning" after its name. To try a part of a study, use --setting, --method, --seed and, with
    another --out, --set.
    """
    with errors_as_lines(debug):
        from equipoise.cli.show.progress import progress_of_study, rounds_in_log
        from equipoise.cli.show.report import show_report
        from equipoise.cli.show.study import show_results
        from equipoise.study.choice import read_choices
        from equipoise.study.reading import read_study, study_from

        shown = [metric.strip() for metric in metrics.split(",")] if metrics else None
        if study == Path("demo") and not study.exists():
            study = Path(__file__).parents[2] / "demo.yaml"
        elif not study.suffix and not study.exists():
            raise unknown("study", str(study), ["demo", "a YAML file"])
        if study.is_dir():
            raise InputError(
                f"{study} is a directory; valid: the file of a study. The same command as before "
                "resumes a study"
            )
        content = read_study(study)
        if leaning_to_study(content) < 0:
            raise InputError(
                f"{study} is an experiment, not a study; run it with: equipoise run {study}"
            )
        given = out or RUNS / study.stem
        choice = _choice(given, chosen, tune=tune, untuned=untuned)
        planned = study_from(
            content,
            str(study),
            metrics=shown,
            tune=tune,
            settings=setting,
            methods=method,
            seeds=seed,
            baseline=baseline,
            overrides=overrides_from({"machine.device": ("--device", device)}, set_),
            chosen=read_choices(choice) if choice else None,
            on_import=say_import,
        )
        directory = _directory_of_tuning(given, planned) if tune else given
        check_directory(directory, "choose another with --out")
        if holding := [path for path in (given, directory) if (path / "config.yaml").exists()]:
            raise InputError(
                f"{holding[0]} holds a run, so it cannot be the directory of a study; choose "
                "another with --out"
            )
        at_a_time = runs_at_a_time(jobs)
        _check_files(markdown, latex, csv)
        try:
            with progress_of_study(len(planned.jobs)) as watch:
                reuse = choice.parent if choice and choice.is_file() else choice
                results = planned.run(
                    directory, jobs=at_a_time, watch=watch, rounds=rounds_in_log, reuse=reuse
                )
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command resumes the study") from None
        report_ = report_on(directory) if results.summaries and not no_report else None
        try:
            if json_:
                print_json(
                    {"directory": str(directory), "report": name_of(report_), **results.plain()}
                )
            else:
                show_results(results, directory)
                if report_:
                    show_report(report_)
        finally:
            # Also if the program that reads the tables, such as `head`, has ended.
            _write_tables(results, markdown, latex, csv)
        if results.failures or results.undecided:
            raise typer.Exit(1)


def _choice(directory: Path, chosen: Path | None, *, tune: bool, untuned: bool) -> Path | None:
    """Return the file of the choices of tuning for the study with runs in a directory."""
    from equipoise.study.choice import CHOSEN, tuning_directory

    if chosen and (tune or untuned):
        raise InputError(
            f"--chosen cannot be used together with {'--tune' if tune else '--untuned'}"
        )
    if tune or untuned:
        return None
    # The second has the choices with which this study ran before.
    usual = (folder / CHOSEN for folder in (tuning_directory(directory), directory))
    return chosen or next((path for path in usual if path.exists()), None)


def _directory_of_tuning(out: Path, planned: Study) -> Path:
    """Return where the runs of tuning are, given the directory of the study's runs.

    Reports on the study's directory would show them like all others, so they have one of their own.
    """
    from equipoise.study.choice import tuning_directory

    tried = {label for variants in planned.tried.values() for label in variants}
    runs = (out / job.path / "config.yaml" for job in planned.jobs if job.method in tried)
    beside = tuning_directory(out)
    # Earlier versions tuned in the directory that was given. What was begun there goes on there.
    return out if not beside.exists() and any(run.exists() for run in runs) else beside


def _check_files(markdown: Path | None, latex: Path | None, csv: Path | None) -> None:
    """Refuse files for tables that cannot be written."""
    if markdown:
        check_file(markdown, "choose another with --markdown")
    if latex:
        check_file(latex, "choose another with --latex")
    if csv:
        for path in (csv, _beside(csv, "seeds"), _beside(csv, "differences")):
            check_file(path, "choose another with --csv")


def _write_tables(
    results: Results, markdown: Path | None, latex: Path | None, csv: Path | None
) -> None:
    if markdown:
        _write(markdown, results.markdown())
    if latex:
        _write(latex, results.latex())
    if csv:
        _write(csv, results.csv())
        _write(_beside(csv, "seeds"), results.csv_seeds())
        if results.compared:
            _write(_beside(csv, "differences"), results.csv_differences())


def _beside(csv: Path, what: str) -> Path:
    """Return the path of a further file of a table, such as that of each seed's values."""
    return csv.with_name(f"{csv.stem}-{what}{csv.suffix}")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
