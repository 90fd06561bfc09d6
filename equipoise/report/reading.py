"""Reading run directories for a report: results, history, cohorts, notes and costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from equipoise import tasks
from equipoise.documents import read_json
from equipoise.errors import InputError, RunError
from equipoise.imports import import_of_run
from equipoise.run.checksums import verify
from equipoise.run.directory import CONFIG, SUMMARY, read_config, read_names
from equipoise.run.files import Journal
from equipoise.run.left_out import updates_left_out, without_result
from equipoise.run.records import MODELS, Row, average_rows, name_in, summarize_rows, task_of
from equipoise.run.round_rows import seconds_of
from equipoise.task import Task

WHO = ("seen", "unseen")
# The final models of clients are their personal models or, without them, the global one.
LEADING = ("personal", "global", "local")


class Part(NamedTuple):
    """What results are about: a model, on the data of some clients.

    Examples
    --------
    >>> Part("global", "unseen", "test").words
    'global model, unseen clients, test data'
    """

    model: str
    who: str
    split: str

    @property
    def data(self) -> str:
        """The split in words."""
        return "validation" if self.split == "val" else "test"

    @property
    def words(self) -> str:
        """The part in words."""
        model = "global model" if self.model == "global" else f"{self.model} models"
        return f"{model}, {self.who} clients, {self.data} data"


@dataclass(frozen=True)
class Weighed:
    """The weights of the clients of a round, and their losses if they were evaluated.

    Attributes
    ----------
    round : int
        The round.
    weights : dict
        Weight by client.
    losses : dict
        Loss by client: that of the global model, or of the personal models if there is no global
        one.
    """

    round: int
    weights: Mapping[int, float]
    losses: Mapping[int, float]


@dataclass(frozen=True)
class RunRecord:
    """Everything that a report shows about one run.

    Attributes
    ----------
    directory : Path
        The run directory.
    config : dict
        Its configuration.
    summary : dict
        The content of ``summary.json``. For an unfinished run, it is computed from its journals.
    finished : bool
        Whether the run has a summary.
    history : dict
        The summary of every evaluated round, by part and round.
    rows : list of dict
        The rows of ``metrics.jsonl`` of the selected round; with ``evaluation.last``, those of the
        last rounds, averaged for each client.
    losses : dict
        Mean loss of the clients of each group, by round, on the data of :attr:`loss_part`.
    loss_part : Part or None
        The model and data of ``losses``.
    weighed : list of Weighed
        The rounds whose notes contain weights.
    clusters : dict
        The cluster of each client in the last round in which it has one.
    sampled : dict or None
        How often each client took part; None if this is not recorded.
    groups : dict
        The group of each evaluated client.
    rounds, timings : list of dict
        The rows of ``rounds.jsonl`` without cohorts and notes, and those of ``timings.jsonl``.
    """

    directory: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    finished: bool
    task: Task
    history: dict[Part, dict[int, dict[str, Any]]]
    rows: list[Row]
    losses: dict[int, dict[str, float]]
    loss_part: Part | None
    weighed: list[Weighed]
    clusters: dict[int, int]
    sampled: dict[int, int] | None
    groups: dict[int, str]
    unseen: frozenset[int]
    rounds: list[Row]
    timings: list[Row]
    names: list[str] | None

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.summary["method"])

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.summary["seed"])

    @property
    def score(self) -> str:
        """The main metric, such as ``accuracy``."""
        return self.task.score

    @property
    def compared_by(self) -> str:
        """The score, and of which loss it is if it is a loss. Only runs with the same compare."""
        if self.score != "loss":
            return self.score
        given = self.config.get("training", {}).get("loss") or self.task.name
        return f"loss ({given['name'] if isinstance(given, Mapping) else given})"

    @cached_property
    def parts(self) -> dict[Part, dict[str, Any]]:
        """Results by part, on test data, or on validation data if clients have no test data."""
        found: dict[Part, dict[str, Any]] = {}
        for who in WHO:
            for split, key in (("test", "results"), ("val", "validation")):
                of_split = self.summary.get(key, {})
                here = {
                    Part(model, who, split): of_split[model][who]
                    for model in MODELS
                    if who in of_split.get(model, {})
                }
                found |= here
                if here:
                    break
        return found

    def leading(self, who: str) -> Part | None:
        """Return the part of the final models of seen or unseen clients."""
        mine = [part for part in self.parts if part.who == who]
        return min(mine, key=lambda part: LEADING.index(part.model), default=None)

    def values(self, part: Part) -> dict[int, float]:
        """Return the score of each client in the selected round."""
        return {client: row[self.score] for client, row in self.rows_of(part).items()}

    def rows_of(self, part: Part) -> dict[int, Row]:
        """Return the row of each client in the selected round."""
        return {
            row["client"]: row
            for row in self.rows
            if (row["model"], row["split"], row["unseen"])
            == (part.model, part.split, part.who == "unseen")
        }

    def client_name(self, client: int) -> str:
        """Return the name of a client."""
        return name_in(self.names, client)

    @property
    def group_names(self) -> list[str]:
        """All groups with an evaluated client, in the order in which they appear."""
        return list(dict.fromkeys(self.groups.values()))

    @property
    def seconds(self) -> float | None:
        """Seconds of all rounds, including evaluation; None if they are not recorded."""
        return seconds_of(self.timings) if self.timings else None


def is_run(directory: Path) -> bool:
    """Return whether a directory holds a run.

    Examples
    --------
    >>> is_run(Path("no/such/run"))
    False
    """
    return (directory / CONFIG).is_file()


def read_run(run: str | Path, *, trust: bool = False) -> RunRecord:
    """Read a run directory, finished or not.

    Parameters
    ----------
    run : path
        The run directory.
    trust : bool
        Whether to execute the code that the run imports, if its task is defined there.

    Returns
    -------
    RunRecord
        Everything that a report shows about it.

    Raises
    ------
    InputError
        If there is no run, or one without an evaluated round.
    RunError
        If one of its files cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> from equipoise import train
    >>> from equipoise.data import load
    >>> out = tempfile.mkdtemp() + "/run"
    >>> run = train(load("digits"), rounds=2, out=out)
    >>> seen = run.summary["results"]["global"]["seen"]
    >>> read_run(out).parts[Part("global", "seen", "test")]["mean"] == seen["mean"]
    True
    """
    directory = Path(run)
    config = read_config(directory)
    finished = (directory / SUMMARY).exists()
    if finished:
        journals = (f"{name}.jsonl" for name in ("metrics", "rounds", "timings"))
        verify(directory, SUMMARY, *(name for name in journals if (directory / name).exists()))
    try:
        summary = read_json(directory / SUMMARY) if finished else _begun(config)
        task = _task_of(summary, config, directory, trust=trust)
        last = config.get("evaluation", {}).get("last")
        made = _Journals(directory, task, summary.get("round"), last).read()
        clients, names = int(config["resolved"].get("clients", 0)), read_names(directory)
        sampled = made.sampled(clients)
        if "updates_left_out" not in summary:
            # The run is unfinished or of an earlier release, or no update was left out.
            summary |= made.updates_left_out(clients, names)
        if "without_result" not in summary:
            summary |= made.without_result(names)
        timings = list(Journal(directory / "timings.jsonl").complete())
    except InputError:
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        RecursionError,
    ) as error:
        raise RunError(
            f"cannot read the run in {directory}: {type(error).__name__}: {error}; a file of the "
            "run is damaged"
        ) from error
    if not finished:
        if not made.history:
            raise InputError(
                f"the run in {directory} has no evaluated round yet, so there is nothing to report"
            )
        summary |= made.so_far()
    elif "validation" not in summary:
        # Written by a release whose summaries have only test data.
        summary["validation"] = summarize_rows(made.rows, task, split="val")
    return RunRecord(
        directory=directory,
        config=config,
        summary=summary,
        finished=finished,
        task=task,
        history=made.history,
        rows=made.rows,
        losses=made.losses,
        loss_part=made.loss_part,
        weighed=made.weighed,
        clusters=made.clusters,
        sampled=sampled,
        groups=made.groups,
        unseen=frozenset(made.unseen),
        rounds=made.rounds,
        timings=timings,
        names=names,
    )


def _begun(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a summary that the configuration of an unfinished run contains."""
    return {
        "method": config["method"]["name"],
        "data": config["data"]["name"],
        "seed": config["seed"],
        "select": "last",
        "score": "accuracy",
    }


def _task_of(
    summary: dict[str, Any], config: Mapping[str, Any], directory: Path, *, trust: bool
) -> Task:
    imports = config.get("imports", [])
    if "task" not in summary and "rounds" not in summary:
        # The task of an unfinished run is found by the metrics in its rows.
        first = next(Journal(directory / "metrics.jsonl").complete(), {})
        named = _task_with(first)
        if named is None:
            import_of_run(imports, directory, trust=trust)
            named = _task_with(first) or "regression"
        summary |= {"task": named, "score": tasks.build(named).score}
    try:
        return task_of(summary)
    except InputError:
        import_of_run(imports, directory, trust=trust)
        return task_of(summary)


def _task_with(row: Mapping[str, Any]) -> str | None:
    """Return the name of the task whose score is in a row, unless the score is the loss."""
    scores = {
        tasks.build(name).score: name for name in tasks.names() if tasks.build(name).score != "loss"
    }
    return next((scores[metric] for metric in row if metric in scores), None)


class _Journals:
    """Read the journals of a run row by row, because large ones do not fit into memory."""

    def __init__(self, directory: Path, task: Task, selected: int | None, last: int | None) -> None:
        self._directory, self._task, self._selected, self._last = directory, task, selected, last
        self._tail: dict[int, list[Row]] = {}
        self.history: dict[Part, dict[int, dict[str, Any]]] = {}
        self.rows: list[Row] = []
        self.losses: dict[int, dict[str, float]] = {}
        self.loss_part: Part | None = None
        self.weighed: list[Weighed] = []
        self.clusters: dict[int, int] = {}
        self.groups: dict[int, str] = {}
        self.unseen: set[int] = set()
        self._evaluated_on: dict[str, set[int]] = {"test": set(), "val": set()}
        self.rounds: list[Row] = []
        self._taken_part: Counter[int] = Counter()
        self._unlisted: list[int] = []

    def read(self) -> _Journals:
        weights = self._read_rounds()
        for number, rows in self._evaluated():
            self._note_summaries(number, rows)
            self.groups |= {row["client"]: row["group"] for row in rows}
            self.unseen |= {row["client"] for row in rows if row["unseen"]}
            for row in rows:
                self._evaluated_on[row["split"]].add(row["client"])
            losses = self._note_losses(number, rows)
            if number in weights:
                self.weighed.append(Weighed(number, weights.pop(number), losses))
            if self._selected in (None, number):
                self.rows = rows
            if self._last:
                self._tail[number] = rows
                if len(self._tail) > self._last:
                    del self._tail[next(iter(self._tail))]
        if self._tail:
            self.rows = average_rows(row for rows in self._tail.values() for row in rows)
        self.weighed += [Weighed(number, of_round, {}) for number, of_round in weights.items()]
        self.weighed.sort(key=lambda weighed: weighed.round)
        return self

    def _note_summaries(self, number: int, rows: list[Row]) -> None:
        """Summarise a round on test data, and on validation data for clients without test data."""
        tested = {row["unseen"] for row in rows if row["split"] == "test"}
        # Generalization gaps belong to all splits.
        of_split = {
            "test": [row for row in rows if row["split"] == "test" or "gap" in row],
            "val": [row for row in rows if row["split"] == "val" and row["unseen"] not in tested],
        }
        for split, mine in of_split.items():
            for model, whose in summarize_rows(mine, self._task, split=split).items():
                for who, summary in whose.items():
                    self.history.setdefault(Part(model, who, split), {})[number] = summary

    def _evaluated(self) -> Iterator[tuple[int, list[Row]]]:
        rows = Journal(self._directory / "metrics.jsonl").complete()
        for number, of_round in groupby(rows, key=lambda row: row["round"]):
            yield int(number), list(of_round)

    def _read_rounds(self) -> dict[int, dict[int, float]]:
        """Read ``rounds.jsonl``, and return the weights of clients by round."""
        weights = {}
        for row in Journal(self._directory / "rounds.jsonl").complete():
            clients, notes = row.pop("clients", None), row.pop("notes", {})
            self.rounds.append(row)
            if clients is None:
                self._unlisted.append(int(row["cohort"]))
                continue
            self._taken_part.update(clients)
            if len(of_round := _by_client(clients, notes.get("weights"))):
                weights[int(row["round"])] = of_round
            for client, cluster in _by_client(clients, notes.get("clusters")).items():
                # A negative number means that the client has no cluster yet.
                if cluster >= 0:
                    self.clusters[client] = int(cluster)
        return weights

    def _note_losses(self, number: int, rows: list[Row]) -> dict[int, float]:
        """Record the mean loss of each group of seen clients, and return the losses of clients."""
        if self.loss_part is None:
            there = {(row["model"], row["split"]) for row in rows if not row["unseen"]}
            wanted = (
                (model, split) for model in ("global", "personal") for split in ("val", "test")
            )
            found = next((which for which in wanted if which in there), None)
            if found is None:
                return {}
            self.loss_part = Part(found[0], "seen", found[1])
        part = self.loss_part
        mine = [
            row
            for row in rows
            if (row["model"], row["split"], row["unseen"]) == (part.model, part.split, False)
        ]
        by_group: dict[str, list[float]] = defaultdict(list)
        for row in mine:
            by_group[row["group"]].append(row["loss"])
        self.losses[number] = {group: fmean(losses) for group, losses in by_group.items()}
        return {row["client"]: row["loss"] for row in mine}

    def sampled(self, clients: int) -> dict[int, int] | None:
        """Return how often each client that trains took part."""
        # A cohort of all clients is not recorded. Earlier releases recorded cohorts only with
        # notes.
        if not self.rounds or any(size != clients - len(self.unseen) for size in self._unlisted):
            return None
        always = len(self._unlisted)
        # If everyone took part, these are all clients, with or without a result.
        trained = {*(range(clients) if always else self.groups)} - self.unseen
        return {
            client: always + self._taken_part.get(client, 0)
            for client in sorted(trained | {*self._taken_part})
        }

    def updates_left_out(self, clients: int, names: Sequence[str] | None) -> dict[str, Any]:
        """Return the entry of a summary on updates that were left out; empty without any."""
        if not any("left_out" in row for row in self.rounds):
            return {}
        journal = Journal(self._directory / "rounds.jsonl")
        seen, name_of = clients - len(self.unseen), partial(name_in, names)
        return {"updates_left_out": updates_left_out(journal.complete, seen, name_of)}

    def without_result(self, names: Sequence[str] | None) -> dict[str, Any]:
        """Return the entry of a summary on clients without a result; empty without any.

        The journals do not say what a client without any row is.
        """
        rounds = set(self._tail) or {row["round"] for row in self.rows}
        reasons = {
            int(client): why
            for row in self.rounds
            if row["round"] in rounds
            for client, why in row.get("not_evaluated", {}).items()
        }
        # On Flower, a number without a client has no other name than its number.
        unknown = {
            client: "no row in metrics.jsonl"
            for client, name in enumerate(names or ())
            if client not in self.groups and name != f"client {client}"
        }
        absent = unknown | reasons
        found = without_result(
            self.rows,
            {"seen": sorted({*self.groups, *absent} - self.unseen), "unseen": sorted(self.unseen)},
            self._evaluated_on,
            absent,
            group_of=lambda client: self.groups.get(client, ""),
            name_of=partial(name_in, names),
        )
        return {"without_result": found} if found else {}

    def so_far(self) -> dict[str, Any]:
        """Return the results of the last evaluated round of an unfinished run."""
        last = max(number for of_part in self.history.values() for number in of_part)
        results: dict[str, dict[str, Any]] = {"test": {}, "val": {}}
        for part, of_part in self.history.items():
            if last in of_part:
                results[part.split].setdefault(part.model, {})[part.who] = of_part[last]
        tail = {}
        if self._tail:
            results = {
                split: summarize_rows(self.rows, self._task, split=split) for split in results
            }
            tail = {"tail": {"rounds": list(self._tail)}}
        done = len(self.rounds)
        totals = {
            name: sum(row.get(name, 0) for row in self.rounds)
            for name in ("bytes_up", "bytes_down")
        }
        return {
            "rounds": done,
            "round": last,
            "results": results["test"],
            "validation": results["val"],
            **tail,
            **totals,
        }


def _by_client(clients: list[int], noted: Any) -> dict[int, float]:
    """Return a note by client, if it has one number per client."""
    if not isinstance(noted, list) or len(noted) != len(clients):
        return {}
    numbers = (isinstance(value, (int, float)) for value in noted)
    return {
        client: value for client, value, fine in zip(clients, noted, numbers, strict=True) if fine
    }
