"""The bare loop and Equipoise in turns, round by round, so that load affects both alike.

``python -m benchmarks.paired --job pfl --rounds 6``. Both peers train in one process, one thread
each; after every round a peer hands over to the other, so that both see the same neighbours, clocks
and caches. Reported is the median over rounds of the bare loop's seconds over Equipoise's, and
beside the seconds of a round the share of the machine's limit (``benchmarks.machine``).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import jobs
from benchmarks.machine import measured_apart, percent
from benchmarks.peers import bare, equipoise_engine
from benchmarks.protocol import Train, Work
from benchmarks.speed import limit_of


class Turns:
    """Lets two threads work alternately, and notes how long each turn took."""

    def __init__(self) -> None:
        self._free = [threading.Semaphore(1), threading.Semaphore(0)]
        self.seconds: list[list[float]] = [[], []]

    def play(self, player: int, train: Train, work: Work) -> None:
        """Train to the end, handing over after every round."""
        self._free[player].acquire()
        torch.set_num_threads(work.job.threads)
        began = time.perf_counter()

        def round_done() -> None:
            nonlocal began
            self.seconds[player].append(time.perf_counter() - began)
            self._free[1 - player].release()
            self._free[player].acquire()
            began = time.perf_counter()

        train(work, work.job.timed, round_done)
        self._free[1 - player].release()


def in_words(job: str, pairs: Sequence[tuple[float, float]], limit: float) -> str:
    """Describe the pairs, one a line, and their ratio.

    Parameters
    ----------
    job : str
        Its name.
    pairs : sequence of (float, float)
        Seconds of a round by the bare loop and by Equipoise.
    limit : float
        The seconds that the machine needs at least for a round.

    Returns
    -------
    str
        Several lines.

    Examples
    --------
    >>> print(in_words("small", [(0.4, 0.1), (0.5, 0.25)], 0.05))
    bare 0.400 s (12.5 % of the limit), equipoise 0.100 s (50.0 %): 4.00
    bare 0.500 s (10.0 % of the limit), equipoise 0.250 s (20.0 %): 2.00
    small: equipoise is 3.00 times as fast (median of 2 pairs); at the limit a round takes 0.05 s
    """
    lines = [
        f"bare {plain:.3f} s ({percent(limit / plain)} of the limit), equipoise {ours:.3f} s "
        f"({percent(limit / ours)}): {plain / ours:.2f}"
        for plain, ours in pairs
    ]
    ratio = statistics.median(plain / ours for plain, ours in pairs)
    lines.append(
        f"{job}: equipoise is {ratio:.2f} times as fast (median of {len(pairs)} pairs); at the "
        f"limit a round takes {limit:.3g} s"
    )
    return "\n".join(lines)


def main() -> None:
    """Run the pairs and print their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=jobs.NAMES, default="pfl")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1, help="of Equipoise (default 1)")
    arguments = parser.parse_args()
    job = jobs.make(
        arguments.job,
        device="cpu",
        threads=arguments.threads,
        rounds=arguments.rounds,
        processes=arguments.processes,
    )
    limit = limit_of(job, measured_apart("cpu", threads=arguments.threads))
    with tempfile.TemporaryDirectory() as directory:
        jobs.materialize(job, Path(directory))
        work, turns = Work(job, Path(directory), torch.device("cpu")), Turns()
        players = [
            threading.Thread(target=turns.play, args=(player, train, work))
            for player, train in enumerate((bare.train, equipoise_engine.train))
        ]
        for thread in players:
            thread.start()
        for thread in players:
            thread.join()
    pairs = list(zip(*(seconds[job.timed.warmup :] for seconds in turns.seconds), strict=True))
    print(in_words(job.name, pairs, job.steps_per_round / limit["client_steps_per_second"]))


if __name__ == "__main__":
    main()
