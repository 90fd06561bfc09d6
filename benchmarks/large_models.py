"""Measure the cost of frozen models, questions and repeated uses of z.

Run ``python -m benchmarks.large_models --help``. Every measurement runs in its own process, which
reports its peak memory and its time. Ratios compare measurements of the same call. Beside each
figure stands its share of the machine's limit (``benchmarks.machine``), for which the model's own
passes are counted: other terms of a loss are left out, and tokens that can be encoded before
training count as given. Where only the backbone is in bfloat16, the limit is that of products in
bfloat16. Measurements:

``step``
    One local step of stacked clients on a frozen ViT with prompts, against the same clients one by
    one and against one ordinary batch of a plain PyTorch loop (CPU; memory and CPU time).
``prompts``
    Images per second of the whole engine with a frozen ViT and prompts, with tokens encoded before
    training, against a plain loop that runs the transformer twice per image, as FedGCR does without
    a cache (GPU; float32, TF32, backbone in bfloat16).
``fedgcr``
    Images per second of a whole run of FedGCR with 22 clients and 50 rounds, including recording of
    graphs and all reports, against a plain loop over clients that encodes nothing before training
    (GPU; float32, TF32, backbone in bfloat16).
``question``
    Peak memory of a question about clients of 100 to 4,000 images (ResNet-18, 64 px).
``looks``
    The time of a loss that uses z three times, against FedAvg's, in alternating rounds (cnn2).
``resnet``
    Images per second of the whole engine with a ResNet-50 of which all parameters are trained, with
    three clients, in bfloat16, against a plain loop over the clients (GPU).
``padding``
    The time of clients with 8 samples and batch size 32, against batch size 8.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.machine import (
    Cost,
    Rates,
    cost_of_step,
    in_words,
    measured_apart,
    precision_of,
)
from equipoise import Evaluation
from equipoise.client import Client
from equipoise.engine.arithmetic import exact_arithmetic
from equipoise.engine.settings import Machine, Training
from equipoise.engine.stacked import StackedEngine
from equipoise.federation import Federation
from equipoise.method import LocalRule, Phase, State
from equipoise.methods import build as build_method
from equipoise.models import build as build_model
from equipoise.optimizers import Sgd, optimizer_named
from equipoise.run.trainer import Trainer

CLASSES = 7


def images(clients: int, each: int, pixels: int, *, in_bytes: bool = True) -> Federation:
    """Return clients with ``each`` random training images, in bytes or numbers from 0 to 1."""
    draws = np.random.default_rng(0)
    count = clients * each
    x = torch.from_numpy(draws.integers(0, 256, (count, 3, pixels, pixels), dtype=np.uint8))
    x = x if in_bytes else x.float() / 255
    y = torch.from_numpy(draws.integers(0, CLASSES, count))
    holders = np.repeat(np.arange(clients), each)
    return Federation.from_arrays(
        x, y, clients=holders.tolist(), splits=(1.0, 0.0, 0.0), classes=CLASSES
    )


def prompted(source: str, pixels: int) -> nn.Module:
    """Build the frozen ViT with prompts."""
    return build_model("vitprompts", shape=(3, pixels, pixels), classes=CLASSES, source=source)


class Rounds:
    """Run rounds of federated averaging with all clients, outside the round loop."""

    def __init__(self, engine: StackedEngine, rule: LocalRule | None = None) -> None:
        self.engine = engine
        self.method = build_method("fedavg", **({"local": rule} if rule else {}))
        self.state = State(0, engine.network.initial())

    def play(self) -> None:
        """Run one round."""
        with exact_arithmetic(self.engine.machine):
            cohort = self.engine.cohort(self.method, self.engine.view.seen, self.state.round)
            updates = cohort.train({"model": self.state.model}, {}, self.method.local)
            state = self.method.aggregation.combine(self.state, updates, cohort)
        self.state = State(self.state.round + 1, state.model)
        if self.engine.network.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Needs:
    """What the figures of a measurement stand for: steps of a model on a batch.

    Clients that share a frozen backbone are counted as one batch, for which it is read once.

    Attributes
    ----------
    module : Module
        The model.
    x : Tensor
        A batch.
    steps : int
        How many of them.
    machine : Machine
        Where, and in which arithmetic. On a CPU there is one thread.
    training : bool
        False for a forward pass alone.
    encoded : bool
        Whether the stem's tokens are given.
    """

    module: nn.Module
    x: Tensor
    steps: int
    machine: Machine
    training: bool = True
    encoded: bool = False

    def counted(self) -> dict[str, Any]:
        """Count operations and bytes of a step, in numbers that another process can read."""
        module, x, precision = self.module, self.x, precision_of(self.machine)
        if self.encoded:
            with torch.no_grad():
                one = module.stem(x[:1].to(next(module.parameters()).device))
            module = nn.Sequential(module.features, module.head)
            x = one.expand(len(x), *one[0].shape)
        cost = cost_of_step(module, x, precision=precision, training=self.training)
        return asdict(cost) | {
            "steps": self.steps,
            "images": self.steps * len(self.x),
            "device": self.machine.torch_device.type,
            "precision": precision,
        }


def beside_the_limit(
    measured: dict[str, Any], needs: dict[str, Any], rates: Rates
) -> dict[str, Any]:
    """Add the machine's limit to a measurement, and the share of it that each figure is.

    Parameters
    ----------
    measured : dict
        Figures: those named ``…seconds`` and ``images_a_second`` have a limit.
    needs : dict
        What they need, as ``Needs.counted`` returns it.
    rates : Rates
        What the machine can do.

    Returns
    -------
    dict
        With ``limit`` and ``share_of_limit``.

    Examples
    --------
    >>> needs = {"operations": 8, "bytes": 3, "steps": 5, "images": 30}
    >>> figures = {"cpu_seconds": 50.0, "images_a_second": 0.6}
    >>> beside_the_limit(figures, needs, Rates(4.0, 1.0, "here", "float32"))["share_of_limit"]
    {'cpu_seconds': 0.3, 'images_a_second': 0.3}
    """
    cost = Cost(needs["operations"], needs["bytes"])
    seconds = needs["steps"] * cost.seconds(rates)
    highest = needs["images"] / seconds
    shares = {
        name: value / highest if name == "images_a_second" else seconds / value
        for name, value in measured.items()
        if name == "images_a_second" or name.endswith("seconds")
    }
    limit = {
        "seconds": seconds,
        "images_a_second": highest,
        "bound": cost.bound(rates),
        "rates": in_words(rates),
    }
    return measured | {"limit": limit, "share_of_limit": shares}


def median_seconds(play: Callable[[], None], rounds: int, warmup: int) -> float:
    """Run rounds, and return the median seconds of those after the warm-up."""
    seconds = []
    for _ in range(warmup + rounds):
        began = time.perf_counter()
        play()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[warmup:])


def in_turns(players: Sequence[Rounds], rounds: int, warmup: int = 3) -> list[float]:
    """Run rounds of the players alternately, and return the median seconds of each."""
    seconds: list[list[float]] = [[] for _ in players]
    for number in range(warmup + rounds):
        for player, taken in zip(players, seconds, strict=True):
            began = time.perf_counter()
            player.play()
            if number >= warmup:
                taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in seconds]


# ---- measurements, each in a process of its own --------------------------------------------------


def step(
    how: str, source: str, clients: int = 16, each: int = 8, pixels: int = 112, rounds: int = 3
) -> dict[str, Any]:
    """Make local steps of 16 clients with 8 images each."""
    torch.set_num_threads(1)
    federation, module = images(clients, each, pixels), prompted(source, pixels)
    if how == "batch":
        batch, labels = federation.x, federation.y
        with torch.no_grad():
            tokens = module.stem(batch)
        moving = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(moving, lr=0.1)

        def play() -> None:
            optimizer.zero_grad()
            F.cross_entropy(module.head(module.features(tokens)), labels).backward()
            optimizer.step()
    else:
        chunk = clients if how == "stacked" else 1
        training = Training(batch_size=each, epochs=1, optimizer=Sgd(lr=0.1))
        play = Rounds(
            StackedEngine(federation, module, training, Machine(device="cpu", chunk=chunk))
        ).play
    play()
    began = time.process_time()
    for _ in range(rounds):
        play()
    return {
        "cpu_seconds": (time.process_time() - began) / rounds,
        "needs": Needs(module, federation.x, 1, Machine(device="cpu"), encoded=True),
    }


def prompts(
    how: str, source: str, clients: int = 22, each: int = 320, pixels: int = 112, rounds: int = 8
) -> dict[str, Any]:
    """Train prompts of 22 clients, with 32 images per step, on a GPU."""
    federation, module = images(clients, each, pixels), prompted(source, pixels)
    machine = Machine(
        device="cuda",
        chunk=clients,
        tf32=how in ("tf32", "loop tf32"),
        frozen="bfloat16" if how == "bfloat16" else None,
    )
    if how.startswith("loop"):
        play = _plain_loop(federation, module.cuda(), tf32=machine.tf32)
        rounds = 1
    else:
        training = Training(batch_size=32, epochs=1, optimizer=Sgd(lr=0.1))
        play = Rounds(StackedEngine(federation, module, training, machine)).play
    seconds = median_seconds(play, rounds, warmup=1 if how.startswith("loop") else 3)
    return {
        "images_a_second": clients * each / seconds,
        "rounds": rounds,
        "needs": Needs(module, federation.x[: clients * 32], each // 32, machine, encoded=True),
    }


def _plain_loop(federation: Federation, module: nn.Module, *, tf32: bool) -> Callable[[], None]:
    """Train clients one by one, with two passes per image: without prompts, then with them."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    x, y = federation.x.cuda(), federation.y.cuda()
    begun = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}

    def play() -> None:
        for client in range(federation.clients):
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    if name in begun:
                        parameter.copy_(begun[name])
            optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
            held = torch.from_numpy(federation.train.of(client)).cuda()
            for batch in held[torch.randperm(len(held), device="cuda")].split(32):
                with torch.no_grad():
                    tokens = module.stem(x[batch])
                    module.features.encoder(tokens)
                optimizer.zero_grad()
                F.cross_entropy(module.head(module.features(tokens)), y[batch]).backward()
                optimizer.step()
        torch.cuda.synchronize()

    return play


def fedgcr(
    how: str, source: str, clients: int = 22, each: int = 320, pixels: int = 112, rounds: int = 50
) -> dict[str, Any]:
    """Train FedGCR's prompts, GC-Net and head on 22 clients, with 32 images per step, on a GPU."""
    if how.startswith("loop"):
        # All clients are equal, so a few are enough to measure the loop. Round 1 is the warm-up.
        clients, rounds = 6, 1
    federation = images(clients, each, pixels)
    module = build_model("fedgc", shape=(3, pixels, pixels), classes=CLASSES, source=source)
    machine = Machine(
        device="cuda",
        tf32=how not in ("loop", "float32"),
        frozen="bfloat16" if how == "bfloat16" else None,
    )
    steps = rounds * each // 32
    needs = Needs(module, federation.x[: clients * 32], steps, machine, encoded=True)
    if how.startswith("loop"):
        play = _fedgcr_loop(federation, module.cuda(), tf32=machine.tf32)
        return {
            "images_a_second": clients * each / median_seconds(play, rounds, warmup=1),
            "rounds": rounds,
            "needs": needs,
        }
    training = Training(
        rounds=rounds, batch_size=32, epochs=1, optimizer=optimizer_named("adamw", lr=1e-3)
    )
    began = time.perf_counter()
    trainer = Trainer(
        federation,
        build_method("fedgcr", clusters=5),
        module,
        training,
        machine,
        Evaluation(every=0),
        seed=0,
    )
    trainer.run()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {
        "images_a_second": rounds * clients * each / seconds,
        "rounds": rounds,
        "seconds": seconds,
        "needs": needs,
    }


def _fedgcr_loop(federation: Federation, module: nn.Module, *, tf32: bool) -> Callable[[], None]:
    """Train clients one by one with the losses of FedGCR. Every pass starts from the images.

    The server's part, clustering and weights, is left out, which favours the loop.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    x, y = federation.x.cuda(), federation.y.cuda()
    moving = {n: p for n, p in module.named_parameters() if p.requires_grad}
    begun = {name: p.detach().clone() for name, p in moving.items()}
    received, previous = copy.deepcopy(module.features), copy.deepcopy(module.features)
    centres, own = torch.randn(2, 5, module.head.in_features, device="cuda").unbind()
    lam1, lam2, tau = 0.5, 0.1, 0.5

    def loss_of(batch: Tensor) -> Tensor:
        with torch.no_grad():
            encoded = module.stem(x[batch])
            first, before = received(encoded), previous(encoded)
        z, h = module.features(encoded), module.features.gcnet(encoded[:, 0])
        toward = h @ torch.cat([centres, own[:1]]).T / tau
        customization = toward.logsumexp(1) - toward[:, 0]
        alignment = F.softplus(((z * before).sum(1) - (z * first).sum(1)) / tau)
        task = F.cross_entropy(module.head(z), y[batch], reduction="none")
        return (task + lam1 * customization + lam2 * alignment).mean()

    def play() -> None:
        for client in range(federation.clients):
            held = torch.from_numpy(federation.train.of(client)).cuda()
            with torch.no_grad():
                for name, parameter in moving.items():
                    parameter.copy_(begun[name])
                for batch in held.split(256):
                    F.cross_entropy(module.head(module.features(module.stem(x[batch]))), y[batch])
            optimizer = torch.optim.AdamW(list(moving.values()), lr=1e-3)
            for batch in held[torch.randperm(len(held), device="cuda")].split(32):
                optimizer.zero_grad()
                loss_of(batch).backward()
                optimizer.step()
            with torch.no_grad():
                for batch in held.split(256):
                    module.features.gcnet(module.stem(x[batch])[:, 0])
        torch.cuda.synchronize()

    return play


def resnet(
    how: str, source: str, each: int = 640, pixels: int = 112, rounds: int = 5
) -> dict[str, Any]:
    """Train a ResNet-50 on three clients of 640 images, with 16 images per step, on a GPU.

    Speed does not depend on the weights, so they are random.
    """
    batch, clients = 16, 3
    federation = images(clients, each, pixels)
    optimizer = Sgd(lr=1e-3, momentum=0.9, weight_decay=5e-4)
    with tempfile.TemporaryDirectory() as folder:
        transformers.ResNetForImageClassification(transformers.ResNetConfig()).save_pretrained(
            folder
        )
        Path(folder, "preprocessor_config.json").write_text(
            '{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}'
        )
        module = build_model(
            "pretrained", shape=(3, pixels, pixels), classes=CLASSES, source=folder
        )
    method, _, chunk = how.partition(" chunk ")
    machine = Machine(device="cuda", precision="bfloat16", chunk=int(chunk) if chunk else "auto")
    if how == "loop":
        play = _plain_training(federation, module.cuda(), optimizer, batch)
    else:
        engine = StackedEngine(
            federation, module, Training(batch_size=batch, optimizer=optimizer), machine
        )
        play = Rounds(engine, build_method(method).local).play
    seconds = median_seconds(play, rounds, warmup=2)
    return {
        "seconds": seconds,
        "images_a_second": clients * each / seconds,
        "needs": Needs(module, federation.x[:batch], clients * each // batch, machine),
    }


def _plain_training(
    federation: Federation, module: nn.Module, optimizer: Sgd, batch: int
) -> Callable[[], None]:
    """Train all parameters, one client after the other, from the same initial model."""
    x, y = federation.x.cuda(), federation.y.cuda()
    begun = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.train()

    def play() -> None:
        for client in range(federation.clients):
            module.load_state_dict(begun)
            steps = torch.optim.SGD(
                module.parameters(),
                optimizer.lr,
                momentum=optimizer.momentum,
                weight_decay=optimizer.weight_decay,
            )
            held = torch.from_numpy(federation.train.of(client)).cuda()
            for chosen in held[torch.randperm(len(held), device="cuda")].split(batch):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = F.cross_entropy(module(x[chosen]), y[chosen])
                steps.zero_grad()
                loss.backward()
                steps.step()
        torch.cuda.synchronize()

    return play


@dataclass(frozen=True)
class AsksForLosses(LocalRule):
    """Answers with the sum of losses."""

    def loss_sum(self, client: Client) -> dict[str, Tensor]:
        """Sum losses."""
        return {"loss": client.sum(client.task_loss())}


def question(how: str, source: str, pixels: int = 64) -> dict[str, Any]:
    """Ask two clients for the loss of a ResNet-18."""
    torch.set_num_threads(1)
    floating = images(2, int(how), pixels, in_bytes=False)
    module = build_model("resnet18", shape=(3, pixels, pixels), classes=CLASSES)
    engine = StackedEngine(floating, module, Training(batch_size=8), Machine(device="cpu"))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    method = build_method("fedavg", local=AsksForLosses())
    cohort = engine.cohort(method, floating.seen, 0)
    began = time.process_time()
    cohort.ask("loss_sum", model=engine.network.initial())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "cpu_seconds": time.process_time() - began,
        "question_mib": (peak - held) / 1024,
        "needs": Needs(module, floating.x, 1, Machine(device="cpu"), training=False),
    }


@dataclass(frozen=True)
class ThreeLooks(LocalRule):
    """A loss that uses z three times."""

    def phases(self) -> tuple[Phase, ...]:
        """One phase."""
        return (Phase(loss=self.loss),)

    def loss(self, client: Client) -> Tensor:
        """Add two terms of z to the task's loss."""
        spread = client.features().square().mean(1) + client.features().abs().mean(1)
        return client.task_loss() + 1e-3 * spread


def looks(how: str, source: str, rounds: int = 12) -> dict[str, Any]:
    """Time the two losses alternately, on 28-pixel images with cnn2."""
    device = how
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    x = torch.rand(20 * 60, 1, 28, 28, generator=draws)
    y = torch.randint(0, 10, (len(x),), generator=draws)
    federation = Federation.from_arrays(
        x, y, clients=np.repeat(np.arange(20), 60), splits=(1.0, 0.0, 0.0), classes=10
    )
    module = build_model("cnn2", shape=(1, 28, 28), classes=10)
    players = []
    for rule in (None, ThreeLooks()):
        engine = StackedEngine(federation, module, Training(batch_size=10), Machine(device=device))
        players.append(Rounds(engine, rule))
    plain, three = in_turns(players, rounds)
    return {
        "fedavg_seconds": plain,
        "three_looks_seconds": three,
        "ratio": three / plain,
        "needs": Needs(module, x[:10], len(x) // 10, Machine(device=device)),
    }


def padding(how: str, source: str, rounds: int = 10) -> dict[str, Any]:
    """Time clients of 8 samples with batch sizes 32 and 8 alternately."""
    torch.set_num_threads(1)
    floating = images(50, 8, 16, in_bytes=False)
    module = build_model("mlp", shape=(3, 16, 16), classes=CLASSES)
    players = [
        Rounds(
            StackedEngine(
                floating,
                module,
                Training(batch_size=size, epochs=5),
                Machine(device="cpu", chunk=50),
            )
        )
        for size in (8, 32)
    ]
    narrow, wide = in_turns(players, rounds)
    return {
        "batch_8_seconds": narrow,
        "batch_32_seconds": wide,
        "ratio": wide / narrow,
        "needs": Needs(module, floating.x[:8], 5 * floating.clients, Machine(device="cpu")),
    }


MEASUREMENTS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[str, ...]]] = {
    "step": (step, ("batch", "one by one", "stacked")),
    "prompts": (prompts, ("loop", "loop tf32", "float32", "tf32", "bfloat16")),
    "fedgcr": (fedgcr, ("loop", "loop tf32", "float32", "tf32", "bfloat16")),
    "resnet": (resnet, ("loop", "fedavg", "bgp", "fedavg chunk 1")),
    "question": (question, ("100", "400", "1000", "4000")),
    "looks": (looks, ("cpu",)),
    "padding": (padding, ("cpu",)),
}


def in_a_process(name: str, how: str, source: str) -> dict[str, Any]:
    """Run one measurement in its own process, and add its peak memory and the limit."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.large_models",
        "--source",
        source,
        "--only",
        name,
        how,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    needs = measured.pop("needs")
    rates = measured_apart(needs["device"], precision=needs["precision"], threads=1)
    return beside_the_limit(measured, needs, rates)


def main() -> None:
    """Run the given measurements, and print them as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "measurements", nargs="*", choices=[*MEASUREMENTS, []], help="What to measure."
    )
    parser.add_argument(
        "--source", default="../shared/weights/vit-small-14", help="Directory of a pretrained ViT."
    )
    parser.add_argument(
        "--device", default="cpu", choices=["cpu", "cuda"], help="Where to measure 'looks'."
    )
    parser.add_argument("--json", type=Path, help="Where to write the numbers.")
    parser.add_argument("--only", nargs=2, metavar=("NAME", "HOW"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        name, how = given.only
        measured = MEASUREMENTS[name][0](how, given.source)
        needs: Needs = measured.pop("needs")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if torch.cuda.is_available():
            measured["gpu_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        # Counting takes memory, too.
        print(json.dumps(measured | {"peak_gib": peak, "needs": needs.counted()}))
        return
    report: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    for name in given.measurements:
        variants = (given.device,) if name == "looks" else MEASUREMENTS[name][1]
        report[name] = {how: in_a_process(name, how, given.source) for how in variants}
        print(json.dumps({name: report[name]}, indent=2), flush=True)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
