"""The processes of a run: started on this machine, or by ``torchrun`` on one machine or several.

Process 0 runs the round loop and alone writes the run directory. The others build the same engine
and carry out what it asks for (:mod:`equipoise.engine.spread`).
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from equipoise.engine.arithmetic import exact_arithmetic
from equipoise.engine.link import PATIENCE, Link, ProcessLost
from equipoise.engine.settings import Machine, Training
from equipoise.engine.share import STOP, Share, serve
from equipoise.engine.spread import SpreadEngine
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError, RunError
from equipoise.federation import Federation
from equipoise.imports import import_own
from equipoise.method import Method
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import MakeEngine, Trainer

_SETTING = "machine.processes"
# What torchrun tells every process that it starts.
_RANK, _SIZE, _LOCAL = "RANK", "WORLD_SIZE", "LOCAL_RANK"
_OF_TORCHRUN = (_RANK, _SIZE, "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Work:
    """What every process of a run needs to build its engine.

    Attributes
    ----------
    federation, method, model, training, machine, evaluation, seed
        As :class:`~equipoise.run.trainer.Trainer` takes them.
    imports : sequence of str
        User code that registers what the others refer to by name.
    """

    federation: Federation
    method: Method
    model: nn.Module
    training: Training
    machine: Machine
    evaluation: Evaluation
    seed: int
    imports: Sequence[str] = ()

    def share(self) -> Share:
        """Build the engine, and check the settings as process 0 does."""
        import_own(self.imports)
        return Share(self.trainer().engine, self.method)  # type: ignore[arg-type]

    def use_gpu(self, number: int) -> None:
        """Use one of the machine's GPUs, if the run is on a GPU."""
        if self.machine.torch_device.type == "cuda":
            use_gpu(number)

    def trainer(self, engine: MakeEngine = StackedEngine) -> Trainer:
        """Make a trainer that writes nothing."""
        return Trainer(
            self.federation,
            self.method,
            self.model,
            self.training,
            self.machine,
            self.evaluation,
            self.seed,
            engine=engine,
        )


class Team:
    """The processes of a run, as process 0 sees them.

    Parameters
    ----------
    method : Method
        What is federated.
    link : callable
        Makes the connection to the others.

    Attributes
    ----------
    result : object
        What processes that ``torchrun`` has started are told at the end.
    """

    def __init__(self, method: Method, link: Callable[[], Link]) -> None:
        self._method, self._link = method, link
        self._engine: SpreadEngine | None = None
        self.result: Any = None

    def engine(self, *given: Any) -> SpreadEngine:
        """Make the engine that divides clients among the processes."""
        here = StackedEngine(*given)
        self._engine = SpreadEngine(here, self._link(), self._method)
        return self._engine

    def gather(self) -> None:
        """Let the engine go on alone, with all memories."""
        if self._engine:
            self._engine.gather()


def rank_of_torchrun() -> int:
    """Return the number of this process if ``torchrun`` has started several, and 0 otherwise.

    Examples
    --------
    >>> rank_of_torchrun()
    0
    """
    return int(os.environ[_RANK]) if started_by_torchrun() else 0


def processes_of(machine: Machine) -> int:
    """Return how many processes a run has: those of ``torchrun``, or as the settings say.

    Examples
    --------
    >>> processes_of(Machine(device="cpu", processes=2))
    2
    """
    if not started_by_torchrun():
        return machine.processes
    started = int(os.environ[_SIZE])
    if machine.processes not in (1, started):
        raise InputError(
            f"{_SETTING} is {machine.processes}, but torchrun has started {started} processes; "
            f"valid: {started}, or no {_SETTING}"
        )
    return started


def started_by_torchrun() -> bool:
    """Return whether ``torchrun`` has started this process and others."""
    if not all(name in os.environ for name in _OF_TORCHRUN):
        return False
    numbers = [os.environ[name] for name in (_RANK, _SIZE)]
    if not all(number.isdecimal() for number in numbers) or int(numbers[0]) >= int(numbers[1]):
        raise InputError(
            f"the environment variables {_RANK} and {_SIZE} are {numbers[0]!r} and {numbers[1]!r}; "
            "valid: as torchrun sets them, or neither"
        )
    return int(numbers[1]) > 1


def threads_of_each(processes: int) -> int:
    """Return how many threads each process uses: those started here share those of one process.

    Examples
    --------
    >>> threads_of_each(1) == torch.get_num_threads()
    True
    """
    threads = torch.get_num_threads()
    return threads if started_by_torchrun() else max(1, threads // processes)


def follow(work: Work) -> tuple[Any, Trainer]:
    """Do the work of a process that ``torchrun`` has started besides process 0.

    Returns
    -------
    tuple
        The result that process 0 tells, and a trainer with the settings of the run.
    """
    link = Link(_group_of_torchrun())
    work.use_gpu(int(os.environ.get(_LOCAL, link.rank)))
    trainers: list[Trainer] = []

    def share() -> Share:
        trainers.append(work.trainer())
        return Share(trainers[0].engine, work.method)  # type: ignore[arg-type]

    with exact_arithmetic(work.machine):
        result, failure = serve(link, share)
    if failure is not None:
        raise ProcessLost(0, failure)
    return result, trainers[0]


# ---- started by torchrun -------------------------------------------------------------------------


@contextmanager
def joined(work: Work) -> Iterator[Team]:
    """Work with the processes that ``torchrun`` has started."""
    link = Link(_group_of_torchrun())
    work.use_gpu(int(os.environ.get(_LOCAL, link.rank)))
    team = Team(work.method, lambda: link)
    try:
        yield team
        team.gather()
    except ProcessLost:
        raise
    except BaseException as error:
        with suppress(ProcessLost):
            link.broadcast((STOP, 0, (None, f"{type(error).__name__}: {error}")))
        raise
    link.broadcast((STOP, 0, (team.result, None)))


@cache
def _group_of_torchrun() -> Any:
    """Connect all processes once; later runs of the same processes use the same connections."""
    if distributed.is_initialized():
        return distributed.new_group(backend="gloo", timeout=PATIENCE)
    distributed.init_process_group("gloo", timeout=PATIENCE)
    # Otherwise its threads may still run when Python ends, and abort the process.
    atexit.register(_leave_group_of_torchrun)
    return distributed.group.WORLD


def _leave_group_of_torchrun() -> None:
    _group_of_torchrun.cache_clear()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def use_gpu(number: int) -> None:
    """Use one of the machine's GPUs, in turn, wherever the settings do not name one.

    Examples
    --------
    >>> if torch.cuda.is_available():
    ...     use_gpu(0)
    """
    torch.cuda.set_device(number % torch.cuda.device_count())


# ---- started here --------------------------------------------------------------------------------


@contextmanager
def started(work: Work, processes: int) -> Iterator[Team]:
    """Start the other processes of a run on this machine, and end them with it."""
    threads = torch.get_num_threads()
    folder = Path(tempfile.mkdtemp(prefix="equipoise-"))
    children: list[_Child] = []

    def link() -> Link:
        for child in children:
            child.wait_until_ready()
        return Link(_group_here(folder, 0, processes))

    try:
        _write(work, folder / "work")
        each = threads_of_each(processes)
        children += [_Child(folder, rank, processes, each) for rank in range(1, processes)]
        # All together use as many threads as one process would.
        torch.set_num_threads(each)
        team = Team(work.method, link)
        try:
            yield team
            team.gather()
        except ProcessLost as lost:
            raise _first_ended(children).error() from lost
    finally:
        torch.set_num_threads(threads)
        for child in children:
            child.process.terminate()
            child.process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _write(work: Work, path: Path) -> None:
    try:
        torch.save(work, path)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"{_SETTING}: data, model and method must be picklable to reach other processes "
            f"({error}); valid: classes and functions at the top level of a module, or a program "
            "started by torchrun"
        ) from error


class _Child:
    """A process that this one has started."""

    def __init__(self, folder: Path, rank: int, processes: int, threads: int) -> None:
        # Not forked: neither PyTorch's threads nor CUDA survive that.
        context = multiprocessing.get_context("spawn")
        self._news, told = context.Pipe(duplex=False)
        self._rank, self._processes = rank, processes
        given = (folder, rank, processes, threads, told)
        self.process = context.Process(target=_work_there, args=given, daemon=True)
        self.process.start()
        # Then the pipe is closed when the child ends.
        told.close()

    def wait_until_ready(self) -> None:
        """Wait until it has built its engine."""
        try:
            failure = self._news.recv()
        except EOFError:
            raise self.error(beginning=True) from None
        if failure is not None:
            raise RunError(f"process {self._rank} of {self._processes} cannot begin: {failure}")

    def error(self, *, beginning: bool = False) -> RunError:
        """Say how it has ended."""
        self.process.join(10)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code and code < 0 else f"has ended ({code})"
        hint = (
            '; a script must call train() below `if __name__ == "__main__":`, because every '
            "process imports it"
            if beginning and code == 1
            else ""
        )
        return RunError(f"process {self._rank} of {self._processes} {how}{hint}")


def _first_ended(children: Sequence[_Child]) -> _Child:
    """Find a process that has ended."""
    wait([child.process.sentinel for child in children], timeout=10)
    ended = [child for child in children if not child.process.is_alive()]
    return (ended or list(children))[0]


def _work_there(folder: Path, rank: int, processes: int, threads: int, told: Connection) -> None:
    """Be one of the other processes."""
    end_with_parent()
    # An interrupt reaches all processes of a terminal. Process 0 ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    try:
        # Mapped, so that all processes share one copy of the samples.
        work: Work = torch.load(folder / "work", weights_only=False, mmap=True)
        work.use_gpu(rank)
        share = work.share()
    except Exception as error:
        told.send(f"{type(error).__name__}: {error}")
        return
    told.send(None)
    try:
        with exact_arithmetic(work.machine):
            serve(Link(_group_here(folder, rank, processes)), lambda: share)
    except ProcessLost:
        # Process 0 has ended, and says why.
        os._exit(1)


def _group_here(folder: Path, rank: int, processes: int) -> Any:
    """Connect the processes of this machine, which nobody else can reach."""
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = PATIENCE
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store = distributed.FileStore(str(folder / "store"), processes)  # type: ignore[attr-defined]
    return distributed.ProcessGroupGloo(store, rank, processes, options)


def end_with_parent() -> None:
    """End this process when the one that has started it is killed."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
