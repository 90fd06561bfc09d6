"""What guards and robust aggregations cost in a round, as a share of the same round without them.

Ten clients hold the digits and train an MLP for one epoch of eight steps, which is little work for
so many parameters. What is measured is everything the round does because of the guard, including
what it adds to the aggregation, which leaves out the clients that were dropped. The aggregations
``median`` and ``trimmedmean`` are compared with ``fedavg``. In the case ``norm, one scaled`` one
client sends three times its update, which the guard scales and keeps. Seconds are those of one
core, and the shortest of all rounds, so that neighbours on the machine do not count.

    python -m benchmarks.guard_cost
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equipoise.data import load
from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.methods import build
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd
from equipoise.run.evaluation import Evaluation
from equipoise.run.round_steps import RoundSteps
from equipoise.run.trainer import Trainer
from tests.attacks import longer, lying

METHODS: dict[str, dict[str, Any]] = {
    "norm": {"name": "fedavg", "guard": "norm"},
    "norm, one scaled": {"name": "fedavg", "guard": "norm"},
    "krum": {"name": "fedavg", "guard": "krum"},
    "multikrum": {"name": "fedavg", "guard": "multikrum"},
    "median": {"name": "median"},
    "trimmedmean": {"name": "trimmedmean"},
}
# Engines in which clients do not send what they have trained.
ENGINES: dict[str, type[StackedEngine]] = {"norm, one scaled": lying(longer)}

Seconds = dict[str, list[float]]


def _timed(taken: list[float], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, and note its seconds."""
    begin = time.process_time()
    result = function(*args)
    taken.append(time.process_time() - begin)
    return result


@dataclass(frozen=True)
class _TimedSteps(RoundSteps):
    """Steps that note the seconds of the guard and of the aggregation."""

    seconds: Seconds

    def screen(self, *args: Any) -> Any:
        return _timed(self.seconds["guard"], super().screen, *args)

    def combine(self, *args: Any) -> Any:
        return _timed(self.seconds["combine"], super().combine, *args)


class _Timed(Trainer):
    """A trainer that notes the seconds of its guard, its aggregation and its whole rounds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seconds: Seconds = {"guard": [], "combine": [], "round": []}
        steps_of = self._round_training.steps

        def timed_steps(number: int) -> RoundSteps:
            return _TimedSteps(**vars(steps_of(number)), seconds=self.seconds)

        self._round_training.steps = timed_steps  # type: ignore[method-assign]

    def _round(self) -> Any:
        return _timed(self.seconds["round"], super()._round)


def trained(
    method: dict[str, Any],
    hidden: list[int],
    epochs: int,
    rounds: int,
    engine: type[StackedEngine] = StackedEngine,
) -> _Timed:
    """Train for some rounds, and return the trainer with their seconds."""
    federation = load("digits", partition={"name": "iid", "clients": 10})
    trainer = _Timed(
        federation,
        build(**method),
        build_model("mlp", shape=federation.shape, classes=10, hidden=hidden),
        Training(rounds=rounds, batch_size=16, epochs=epochs, optimizer=Sgd(lr=0.1)),
        Machine(device="cpu"),
        Evaluation(every=0),
        seed=0,
        engine=engine,
    )
    trainer.run()
    return trainer


def _fewest(seconds: Seconds) -> dict[str, float]:
    """Return the seconds of the shortest guard, aggregation and round."""
    return {what: min(taken, default=0.0) for what, taken in seconds.items()}


def measure(hidden: list[int], epochs: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of a round of federated averaging, and what each method adds to it."""
    plain = _fewest(trained({"name": "fedavg"}, hidden, epochs, rounds).seconds)
    more = {}
    for name, method in METHODS.items():
        engine = ENGINES.get(name, StackedEngine)
        taken = _fewest(trained(method, hidden, epochs, rounds, engine).seconds)
        more[name] = taken["combine"] - plain["combine"]
        if taken["guard"]:
            # A guard that drops clients leaves less to combine; that is not counted in its favour.
            more[name] = taken["guard"] + max(0.0, more[name])
    return {
        "hidden": hidden,
        "epochs": epochs,
        "seconds": {"round": plain["round"], **more},
        "percent_of_a_round": {
            name: round(100 * seconds / plain["round"], 1) for name, seconds in more.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="Where to write the numbers.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for hidden, epochs in (([64], 1), ([1024, 1024], 1), ([1024, 1024], 5)):
        found.append(measure(hidden, epochs, given.rounds))
        shares = found[-1]["percent_of_a_round"]
        print(
            f"{hidden}, {epochs} epochs: a round of {found[-1]['seconds']['round']:.3f} s;",
            ", ".join(f"{name} {share} %" for name, share in shares.items()),
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
