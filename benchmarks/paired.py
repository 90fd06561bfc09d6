"""The bare loop and Equipoise in turns, round by round, so that load affects both alike.

``python -m benchmarks.paired --job pfl --rounds 6``. Both peers train in one process, one thread
each; after every round a peer hands over to the other, so that both see the same neighbours, clocks
and caches. Reported is the median over rounds of the bare loop's seconds over Equipoise's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from benchmarks import jobs
from benchmarks.peers import bare, equipoise_engine
from benchmarks.protocol import Train, Work


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
    ratios = [plain / ours for plain, ours in pairs]
    for plain, ours in pairs:
        print(f"bare {plain:.3f} s, equipoise {ours:.3f} s: {plain / ours:.2f}")
    print(
        f"{job.name}: equipoise is {statistics.median(ratios):.2f} times as fast (median of "
        f"{len(ratios)} pairs)"
    )


if __name__ == "__main__":
    main()
