"""The command line.

Slow modules are imported only when a command needs them, so that help is fast.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from equipoise.cli.flower import flower
from equipoise.cli.paths import check_directory, check_file
from equipoise.errors import InputError, RunError, unknown
from equipoise.text import LONGEST_MESSAGE, printable

if TYPE_CHECKING:
    from equipoise.config import Override

RUNS = Path("runs")

app = typer.Typer(
    name="equipoise",
    help="Federated learning that works for every client, and shows which clients are left behind.",
    epilog="Example: equipoise run --method fedavg --data digits --rounds 20",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

app.add_typer(flower, name="flower")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a key, such as training.epochs=2; may be repeated."
    ),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
NoReport = Annotated[bool, typer.Option("--no-report", help="Do not write a report.")]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Execute the code that a run directory imports; read it first."),
]
Import = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE",
        help="Your Python file or module that registers methods, models, data, tasks or metrics.",
    ),
]


def main() -> None:
    """Run the command line."""
    app(prog_name="equipoise")


def _version(wanted: bool) -> None:
    if wanted:
        from equipoise import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Example: equipoise run --method fedprox --data digits --rounds 20 --set method.mu=0.5 "
    "--seed 1 --out runs/mine"
)
def run(
    experiment: Annotated[
        Path | None,
        typer.Argument(
            help="A YAML file, or the directory of a run to resume or, with more --rounds, to make "
            "longer. By default the defaults and the options below are used."
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Method; `equipoise methods` lists them.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Source of the data; digits without a file.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model, such as mlp or cnn2.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run directory.", show_default="a new one, runs/DATA-METHOD-seedN"),
    ] = None,
    set_: Set = None,
    import_: Import = None,
    device: Device = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in the directory.")
    ] = False,
    trust: Trust = False,
    no_report: NoReport = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Run one experiment, and show which clients are left behind."""
    with _errors(debug):
        flags = {
            "imports": ("--import", import_ or None),
            "method": ("--method", method),
            "data": ("--data", data),
            "model": ("--model", model),
            "training.rounds": ("--rounds", rounds),
            "seed": ("--seed", seed),
            "machine.device": ("--device", device),
        }
        if experiment and experiment.is_dir():
            if out is not None and out != experiment:
                raise InputError(
                    f"{experiment} is a run directory, in which the run is resumed; leave out --out"
                )
            experiment, out, resume = experiment / "config.yaml", experiment, True
        if resume and out is None:
            out = _directory_of(experiment)
        from equipoise.cli import show
        from equipoise.config import experiment_from, read_yaml
        from equipoise.engine.link import ProcessLost
        from equipoise.imports import import_of_run
        from equipoise.run.processes import rank_of_torchrun

        overrides = _overrides(flags, set_)
        content: dict[str, Any] = (
            {"data": "digits"} if experiment is None else read_yaml(experiment)
        )
        if experiment and _leaning(content) > 0:
            raise InputError(
                f"{experiment} is a study, not an experiment; run it with: equipoise compare "
                f"{experiment}"
            )
        if experiment and "resolved" in content and not import_:
            # Anyone may have put code into a run directory. An experiment file is the user's own.
            import_of_run(content.get("imports", []), experiment.parent, trust=trust)
        where = "" if experiment is None else str(experiment)
        made = experiment_from(content, where, overrides, on_import=_say_import)
        if rank_of_torchrun():
            # Process 0 writes the directory, and says what there is to say.
            try:
                made.run()
            except ProcessLost:
                raise typer.Exit(1) from None
            return
        directory = out or _fresh(RUNS / f"{made.data['name']}-{made.method.name}-seed{made.seed}")
        if not resume:
            check_directory(directory, "choose another with --out")
        elif not directory.exists():
            raise InputError(
                f"--resume: {directory} does not exist, so there is no run to resume; start it "
                "without --resume"
            )
        try:
            with show.rounds(made.method.name) as on_round:
                finished = made.run(directory, resume=resume, on_round=on_round)
        except KeyboardInterrupt:
            trusted = " --trust" if made.imports else ""
            raise KeyboardInterrupt(f"resume with: equipoise run {directory}{trusted}") from None
        report_ = None if no_report else _report(directory)
        if json_:
            _print_json({**show.run_document(finished), "report": _name(report_)})
        else:
            show.run(finished)
            if report_:
                show.report(report_)


@app.command(epilog="Example: equipoise methods --json")
def methods(import_: Import = None, json_: Json = False, debug: Debug = False) -> None:
    """List the methods and what the server sees of clients."""
    with _errors(debug):
        from equipoise.cli import show
        from equipoise.imports import import_own

        import_own(import_ or ())
        if json_:
            _print_json(show.method_documents())
        else:
            show.methods()


@app.command(epilog="Example: equipoise explain training.schedule")
def explain(
    key: Annotated[
        str,
        typer.Argument(
            help="A key, such as training.schedule or data; by default the keys of the first level."
        ),
    ] = "",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/settings.md, which has all keys.")
    ] = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Explain the keys of experiments and studies.

    Shows the valid values, the default, the meaning and an example.
    """
    with _errors(debug):
        from dataclasses import asdict

        from equipoise.cli import show
        from equipoise.explain import explain as keys_of
        from equipoise.explain import page

        if markdown:
            typer.echo(page(), nl=False)
        elif json_:
            _print_json([asdict(setting) for setting in keys_of(key)])
        else:
            show.settings(keys_of(key))


@app.command(
    epilog="Example: equipoise data digits --set partition.name=dirichlet "
    "--set partition.clients=20 --set partition.beta=0.3 --picture digits.png"
)
def data(
    name: Annotated[str, typer.Argument(help="Source of the data, such as digits.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of the data, such as imbalance=5; may be repeated.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the partition and the splits.", show_default="0")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Where to draw the federation (.png, .svg or .pdf).", show_default="runs/NAME.png"
        ),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option(
            help="A client index: draw and show how similar clients are, within and between groups."
        ),
    ] = None,
    download: Annotated[
        bool,
        typer.Option(
            "--download", help="Download the files of mnist, emnist or cifar if they are missing."
        ),
    ] = False,
    import_: Import = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Show a federation: its clients, groups, samples and labels."""
    with _errors(debug):
        from equipoise.cli import show
        from equipoise.config import Override, experiment_from

        overrides = [Override("imports", import_, "--import")] if import_ else []
        overrides += [Override("data", name, "NAME")]
        overrides += [Override("data.seed", seed, "--seed")] if seed is not None else []
        overrides += [Override.parse(text, below="data") for text in set_ or ()]
        overrides += [Override("data.download", True, "--download")] if download else []
        made = experiment_from({}, "", overrides)
        # With --json nothing is drawn unless a picture is requested.
        where = picture or (None if json_ else RUNS / f"{name}{'-index' if index else ''}.png")
        if where:
            check_file(where, "choose another with --picture")
        federation = made.federation()
        found = show.read_index(index, federation) if index else None
        drawn = (
            show.draw(federation, where, asked=picture is not None, index=found) if where else None
        )
        if found is not None and json_:
            _print_json(show.index_document(found, federation, drawn))
        elif found is not None:
            show.index(found, federation, drawn)
        elif json_:
            _print_json(show.federation_document(federation, drawn))
        else:
            show.federation(federation, drawn)


@app.command(epilog="Example: equipoise cache --prune 30")
def cache(
    prune: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            help="Remove entries that were not used for so many days, and damaged ones.",
        ),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all entries.")] = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """List or remove what is stored in the cache directory: decoded images, encoded samples.

    Everything in it can be computed again. EQUIPOISE_CACHE sets the directory.
    """
    with _errors(debug):
        from equipoise.cli import caching

        document = caching.cache(prune, clear)
        if json_:
            _print_json(document)
        else:
            caching.print_cache(document)


@app.command(epilog="Example: equipoise compare demo --markdown table.md --csv table.csv")
def compare(
    study: Annotated[
        Path,
        typer.Argument(
            help="A YAML file with base, methods, settings, seeds and metrics; or demo, an example."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of all its runs.", show_default="runs/ and the file's name"),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the tables as CSV; seeds and differences beside it.")
    ] = None,
    latex: Annotated[Path | None, typer.Option(help="Write the tables as LaTeX.")] = None,
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
        typer.Option("--tune", help="Choose values of its grids on validation data."),
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
    command without it uses the chosen values. To try a part of a study, use --setting, --method,
    --seed and, with another --out, --set.
    """
    with _errors(debug):
        from equipoise.cli import show
        from equipoise.study.choice import read_choices
        from equipoise.study.reading import read_study, study_from

        shown = [metric.strip() for metric in metrics.split(",")] if metrics else None
        if study == Path("demo") and not study.exists():
            study = Path(__file__).parents[1] / "demo.yaml"
        elif not study.suffix and not study.exists():
            raise unknown("study", str(study), ["demo", "a YAML file"])
        content = read_study(study)
        if _leaning(content) < 0:
            raise InputError(
                f"{study} is an experiment, not a study; run it with: equipoise run {study}"
            )
        directory = out or RUNS / (f"{study.stem}-tuning" if tune else study.stem)
        choice = _choice(directory, chosen, tune=tune, untuned=untuned)
        planned = study_from(
            content,
            str(study),
            metrics=shown,
            tune=tune,
            settings=setting,
            methods=method,
            seeds=seed,
            overrides=_overrides({"machine.device": ("--device", device)}, set_),
            chosen=read_choices(choice) if choice else None,
            on_import=_say_import,
        )
        check_directory(directory, "choose another with --out")
        at_a_time = _jobs(jobs)
        if markdown:
            check_file(markdown, "choose another with --markdown")
        if latex:
            check_file(latex, "choose another with --latex")
        if csv:
            check_file(csv, "choose another with --csv")
            for what in ("seeds", "differences"):
                check_file(_beside(csv, what), "choose another with --csv")
        try:
            with show.runs(len(planned.jobs)) as watch:
                reuse = choice.parent if choice and choice.is_file() else choice
                results = planned.run(directory, jobs=at_a_time, watch=watch, reuse=reuse)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command resumes the study") from None
        report_ = _report(directory) if results.summaries and not no_report else None
        try:
            if json_:
                _print_json(
                    {"directory": str(directory), "report": _name(report_), **results.plain()}
                )
            else:
                show.results(results, directory)
                if report_:
                    show.report(report_)
        finally:
            # Also if the program that reads the tables, such as `head`, has ended.
            if markdown:
                _write(markdown, results.markdown())
            if latex:
                _write(latex, results.latex())
            if csv:
                _write(csv, results.csv())
                _write(_beside(csv, "seeds"), results.csv_seeds())
                if results.compared:
                    _write(_beside(csv, "differences"), results.csv_differences())
        if results.failures or results.undecided:
            raise typer.Exit(1)


@app.command(epilog="Example: equipoise report runs/demo --out demo.html --figures figures")
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories, or the directory of a study.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write it.", show_default="report.html in the directory"),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write all figures as PNG, PDF and SVG.")
    ] = None,
    trust: Trust = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Write one HTML file about a run, several runs or a study.

    It is made only from the files of runs, so it also works for runs of earlier releases and
    unfinished runs. Several runs are compared side by side.
    """
    with _errors(debug):
        if out:
            check_file(out, "choose another with --out")
        if figures:
            check_directory(figures, "choose another with --figures")
        from equipoise.cli import show
        from equipoise.report import write_report

        written = write_report(runs, out, figures=figures, trust=trust)
        if json_:
            _print_json({"report": str(written), "figures": _name(figures)})
        else:
            show.report(written, figures)


@app.command(epilog="Example: equipoise advise digits --set data.imbalance=5")
def advise(
    data_: Annotated[
        str,
        typer.Argument(
            metavar="DATA|RUN", help="A source of data, an experiment file, or a run directory."
        ),
    ],
    set_: Set = None,
    import_: Import = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the data and of the trial.", show_default="0")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds of the trial.", show_default="a third of training.rounds"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the trial.")] = 2,
    by: Annotated[
        str, typer.Option(help="The metric for the choice, such as mean or worst10.")
    ] = "mean",
    no_trial: Annotated[
        bool, typer.Option("--no-trial", help="Only measure and advise, without training.")
    ] = False,
    jobs: Annotated[str, typer.Option(metavar="N|auto", help="Runs of the trial at a time.")] = "1",
    out: Annotated[
        Path | None, typer.Option(help="Directory of the trial.", show_default="runs/advise-NAME")
    ] = None,
    device: Device = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Recommend a family of methods for a federation, and try it.

    Measures how clients differ in labels, inputs and sizes, and how many take part. Explains which
    methods fit and why, and compares one or two methods of each family on validation data. The
    cost of the comparison is shown before it starts.
    """
    with _errors(debug):
        at_a_time = _jobs(jobs)
        from equipoise.cli import advising

        flags = {
            "imports": ("--import", import_ or None),
            "seed": ("--seed", seed),
            "machine.device": ("--device", device),
        }
        request = advising.Request(
            data_,
            tuple(_overrides(flags, set_)),
            rounds=rounds,
            seeds=seeds,
            by=by,
            jobs=at_a_time,
            trial=not no_trial,
        )
        directory = out or RUNS / f"advise-{Path(data_).stem}"
        if not no_trial:
            check_directory(directory, "choose another with --out")
        document = advising.advise(request, directory, quiet=json_)
        if json_:
            _print_json(document)


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


def _report(directory: Path) -> Path | None:
    """Write the report of a finished run or study. If this fails, only print the reason."""
    from equipoise.report import write_report

    try:
        return write_report([directory])
    except Exception as error:
        said = _one_line(f"{type(error).__name__}: {error}")
        print(
            f"no report: {said} (equipoise report {directory} --debug shows where)", file=sys.stderr
        )
        return None


def _name(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _overrides(flags: dict[str, tuple[str, Any]], assignments: list[str] | None) -> list[Override]:
    from equipoise.config import Override

    given = [
        Override(key, value, flag) for key, (flag, value) in flags.items() if value is not None
    ]
    return given + [Override.parse(text) for text in assignments or ()]


def _leaning(content: dict[str, Any]) -> int:
    """Return the number of a study's keys in a file minus that of an experiment's."""
    from equipoise.config import SECTIONS
    from equipoise.study.reading import KEYS

    return sum((key in KEYS) - (key in SECTIONS) for key in content)


def _jobs(given: str) -> int | None:
    """Parse the number of runs at a time; None for ``auto``."""
    if given == "auto":
        return None
    if not given.isdecimal() or int(given) < 1:
        raise InputError(f"--jobs must be a whole number from 1, or auto, got {given!r}")
    return int(given)


def _directory_of(experiment: Path | None) -> Path:
    """Return the run directory to resume without --out: that of the given configuration."""
    if experiment is None or experiment.name != "config.yaml":
        raise InputError(
            "--resume needs the run to resume: --out DIR, or DIR/config.yaml as the experiment"
        )
    return experiment.parent


def _fresh(directory: Path) -> Path:
    """Return a directory that does not exist yet."""
    candidate, number = directory, 2
    while candidate.exists():
        candidate, number = directory.with_name(f"{directory.name}-{number}"), number + 1
    return candidate


def _beside(csv: Path, what: str) -> Path:
    """Return the path of a further file of a table, such as that of each seed's values."""
    return csv.with_name(f"{csv.stem}-{what}{csv.suffix}")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))


@contextmanager
def _errors(debug: bool) -> Iterator[None]:
    """End a command that fails with one line and the right exit code."""
    try:
        yield
    except typer.Exit:
        raise
    except InputError as error:
        _end(f"error: {error}", 2, debug)
    except RunError as error:
        _end(f"error: {error}", 1, debug)
    except KeyboardInterrupt as error:
        _end(f"interrupted; {error}" if str(error) else "interrupted", 130, debug)
    except Exception as error:
        _end(
            f"error: {type(error).__name__}: {error} (run again with --debug to see where)",
            1,
            debug,
        )


def _say_import(what: str) -> None:
    print(_one_line(f"importing {what}"), file=sys.stderr)


def _one_line(message: str) -> str:
    """Make a message safe for a terminal. It may contain names and values from files."""
    return printable(" ".join(message.split()), LONGEST_MESSAGE)


def _end(message: str, code: int, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    print(_one_line(message), file=sys.stderr)
    raise typer.Exit(code) from None
