"""Models that users bring, against a plain PyTorch loop, round by round in turns.

    python -m benchmarks.own_models --threads 1

Every model is made of PyTorch's own layers. The loop trains one client after the other,
Equipoise as many at a time as the engine decides. Both take turns in one process, so that load
affects both alike. Reported are the client-steps per second of both, their shares of the machine's
limit (``benchmarks.machine``), and the median over rounds of the loop's seconds over Equipoise's.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.machine import Rates, cost_of_step, in_words, measured_apart, percent, rounded
from benchmarks.million import one_round
from equipoise import Evaluation, Federation, Machine, Training
from equipoise.methods import build as build_method
from equipoise.optimizers import Sgd
from equipoise.run.trainer import Trainer

CLIENTS, STEPS, CLASSES, RATE, WARM_UP = 10, 4, 10, 1e-3, 5
_VECTOR, _IMAGE, _TEXT, _SIGNAL = (64,), (3, 32, 32), (80,), (6, 128)
_CHARACTERS = 80


class Last(nn.Module):
    """A recurrent layer over embedded characters, and its last output."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_CHARACTERS, layer.input_size)
        self.layer = layer
        self.head = nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(self.embedding(x))[0]
        return self.head(outputs[:, -1])  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """PyTorch's transformer encoder over embedded characters, and the mean of its outputs."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_CHARACTERS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(1))  # type: ignore[no-any-return]


def _dense(*widths: int, norm: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in zip((64, *widths), widths, strict=False):
        layers += [nn.Linear(before, after), *([nn.BatchNorm1d(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))


def _convolved(*widths: int, norm: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in zip((3, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1)]
        layers += [*([nn.BatchNorm2d(after)] if norm else []), nn.ReLU(), nn.MaxPool2d(2)]
    side = 32 >> len(widths)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * side * side, CLASSES))


def _signal(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in zip((6, *widths), widths, strict=False):
        layers += [nn.Conv1d(before, after, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2)]
    length = 128 >> len(widths)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * length, CLASSES))


class Case(NamedTuple):
    """A model, the shape of its samples, and how many samples a step has."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int = 10


MODELS: dict[str, Case] = {
    "linear": Case(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)), _VECTOR),
    "dense 64": Case(lambda: _dense(64), _VECTOR),
    "dense 2 x 512": Case(lambda: _dense(512, 512), _VECTOR, 32),
    "dense 3 x 256, BatchNorm": Case(lambda: _dense(256, 256, 256, norm=True), _VECTOR, 32),
    "dense 2 x 2048": Case(lambda: _dense(2048, 2048), _VECTOR, 32),
    "conv 16-32": Case(lambda: _convolved(16, 32), _IMAGE),
    "conv 32-64-128, BatchNorm": Case(lambda: _convolved(32, 64, 128, norm=True), _IMAGE, 32),
    "conv1d 32-64": Case(lambda: _signal(32, 64), _SIGNAL, 32),
    "LSTM 1 x 32": Case(lambda: Last(nn.LSTM(8, 32, batch_first=True)), _TEXT),
    "LSTM 2 x 128": Case(lambda: Last(nn.LSTM(8, 128, 2, batch_first=True)), _TEXT),
    "LSTM 2 x 128, dropout": Case(
        lambda: Last(nn.LSTM(8, 128, 2, batch_first=True, dropout=0.2)), _TEXT
    ),
    "LSTM 1 x 128, both ways": Case(
        lambda: Last(nn.LSTM(8, 128, batch_first=True, bidirectional=True)), _TEXT
    ),
    "GRU 1 x 128": Case(lambda: Last(nn.GRU(8, 128, batch_first=True)), _TEXT),
    "GRU 2 x 256": Case(lambda: Last(nn.GRU(8, 256, 2, batch_first=True)), _TEXT),
    "transformer 64 x 2": Case(lambda: Tokens(64, 2), _TEXT),
    "transformer 256 x 4": Case(lambda: Tokens(256, 4), _TEXT),
}


def samples(case: Case) -> tuple[Tensor, Tensor, list[int]]:
    """Draw as many samples for each client as its steps need."""
    count = CLIENTS * STEPS * case.batch
    draw = torch.Generator().manual_seed(0)
    if case.shape == _TEXT:
        x = torch.randint(0, _CHARACTERS, (count, *_TEXT), generator=draw)
    else:
        x = torch.randn(count, *case.shape, generator=draw)
    y = torch.randint(0, CLASSES, (count,), generator=draw)
    return x, y, [client for client in range(CLIENTS) for _ in range(STEPS * case.batch)]


def plain_round(model: nn.Module, x: Tensor, y: Tensor, batch: int) -> float:
    """Train all clients one after the other, average them, and return the seconds."""
    began = time.perf_counter()
    local = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    shared, average = [tensor.clone() for tensor in local], [torch.zeros_like(t) for t in local]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    for own_x, own_y in zip(x.chunk(CLIENTS), y.chunk(CLIENTS), strict=True):
        torch._foreach_copy_(local, shared)
        order = torch.randperm(len(own_y))
        for rows in order.split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(own_x[rows]), own_y[rows]).backward()
            optimizer.step()
        torch._foreach_add_(average, local, alpha=1 / CLIENTS)
    torch._foreach_copy_(local, average)
    return time.perf_counter() - began


def measure(name: str, *, seconds: float, machine: dict[str, Any], rates: Rates) -> dict[str, Any]:
    """Time rounds of both sides in turns.

    Parameters
    ----------
    name : str
        One of ``MODELS``.
    seconds : float
        About how long rounds are timed, after warm-up. At least three pairs are.
    machine : dict
        Further machine settings of Equipoise, such as ``{"chunk": 1}``.
    rates : Rates
        What the machine can do.

    Returns
    -------
    dict
        Client-steps per second of both, and at most (``limit``); their ratio, and the chunk of the
        engine.
    """
    case = MODELS[name]
    torch.manual_seed(0)
    model = case.make()
    x, y, clients = samples(case)
    plain = copy.deepcopy(model)
    limit = cost_of_step(model, x[: case.batch]).limit(rates)
    federation = Federation.from_arrays(
        x, y, clients=clients, splits=(1.0, 0.0, 0.0), classes=CLASSES
    )
    trainer = Trainer(
        federation,
        build_method("fedavg"),
        model,
        Training(rounds=10**9, batch_size=case.batch, optimizer=Sgd(lr=RATE)),
        Machine(device="cpu", **machine),
        Evaluation(every=0),
        seed=0,
    )
    pairs: list[tuple[float, float]] = []
    while len(pairs) < WARM_UP + 3 or sum(map(sum, pairs[WARM_UP:])) < seconds:
        pairs.append((plain_round(plain, x, y, case.batch), one_round(trainer)))
    timed = pairs[WARM_UP:]
    loop, ours = (statistics.median(side) for side in zip(*timed, strict=True))
    return {
        "model": name,
        "loop": CLIENTS * STEPS / loop,
        "equipoise": CLIENTS * STEPS / ours,
        "limit": limit["client_steps_per_second"],
        "ratio": statistics.median(one / two for one, two in timed),
        "chunk": trainer.engine.chunk,
        "pairs": len(timed),
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Write the table."""
    sides = "plain loop | of limit | Equipoise | of limit"
    lines = [f"| model | limit | {sides} | ratio | stacked clients |", "|---" + "|---:" * 7 + "|"]
    for row in rows:
        cells = [row["model"], rounded(row["limit"])]
        for side in ("loop", "equipoise"):
            cells += [rounded(row[side]), percent(row[side] / row["limit"])]
        cells += [f"{row['ratio']:.2f} ×", str(min(row["chunk"], CLIENTS))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.own_models", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="about how long a model is timed"
    )
    parser.add_argument("--chunk", type=int, help="stacked clients, in place of the engine's rule")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine = {} if arguments.chunk is None else {"chunk": arguments.chunk}
    rates = measured_apart("cpu", threads=arguments.threads)
    rows = []
    for name in arguments.models:
        rows.append(measure(name, seconds=arguments.seconds, machine=machine, rates=rates))
        print(f"{name}: {rows[-1]['ratio']:.2f} times the plain loop", flush=True)
    print(f"\nClient-steps per second, {arguments.threads} threads.\n\n{markdown(rows)}")
    print(f"\nMeasured rates of the machine: {in_words(rates)}.")


if __name__ == "__main__":
    main()
