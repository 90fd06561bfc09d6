"""What a machine can do, and what a job needs at least: ``python -m benchmarks.machine --help``.

The limit of a job on a machine is the larger of two times: its operations over the rate of large
matrix products, and its bytes over the rate at which memory is copied. Both rates are measured, in
the precision that is used, with the threads that are used. What a client-step needs is counted:

operations
    Multiplications and additions of the matrix products and convolutions of the forward and the
    backward pass, as PyTorch's ``FlopCounterMode`` counts them. Other operations are left out.
bytes
    Of every layer with parameters: the forward pass reads its input and writes its output, and the
    backward pass reads its input and its output's gradient and writes its input's gradient.
    Parameters are read by both passes and written once by the optimizer. So layers without
    parameters, gradients of parameters and what a layer does inside cost nothing: a program that
    computes them together with their neighbours needs no memory traffic for them.

Small tensors may stay in a processor's cache, whose rate is higher. Then a job can be faster than
its limit by bytes.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from equipoise.errors import InputError, RunError
from equipoise.models import cpu_products

# Rows of the square matrices, and bytes of the copied tensor: far more than caches hold.
_SIZES = {"cpu": (2048, 2**28), "cuda": (8192, 2**32)}


@dataclass(frozen=True)
class Rates:
    """What a machine can do.

    Attributes
    ----------
    operations : float
        Multiplications and additions a second in large matrix products.
    bytes : float
        Bytes a second that a copy reads and writes.
    device : str
        What was measured.
    precision : str
        ``"float32"`` or ``"tf32"``.
    """

    operations: float
    bytes: float
    device: str
    precision: str


@dataclass(frozen=True)
class Cost:
    """What a client-step needs: operations of matrix products, and bytes to and from memory."""

    operations: int
    bytes: int

    def seconds(self, rates: Rates) -> float:
        """Return the shortest time a machine needs for it.

        Examples
        --------
        >>> Cost(operations=8, bytes=3).seconds(Rates(4.0, 1.0, "here", "float32"))
        3.0
        """
        return max(self.operations / rates.operations, self.bytes / rates.bytes)

    def bound(self, rates: Rates) -> str:
        """Say which of the two takes longer: ``"operations"`` or ``"bytes"``."""
        by_operations = self.operations / rates.operations >= self.bytes / rates.bytes
        return "operations" if by_operations else "bytes"


def measure(
    device: torch.device,
    *,
    tf32: bool = False,
    rows: int | None = None,
    copied: int | None = None,
    repeats: int = 5,
) -> Rates:
    """Measure the rates of a device: the best of several tries.

    Parameters
    ----------
    device : torch.device
        What to measure.
    tf32 : bool
        Whether products may use TF32 on a GPU.
    rows : int, optional
        Rows and columns of the matrices.
    copied : int, optional
        Bytes of the tensor that is copied.
    repeats : int
        How often to try.

    Returns
    -------
    Rates
        Of this machine, now.

    Examples
    --------
    >>> measure(torch.device("cpu"), rows=64, copied=4096, repeats=1).precision
    'float32'
    """
    usual_rows, usual_bytes = _SIZES[device.type]
    rows, copied = rows or usual_rows, copied or usual_bytes
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        a, b = (torch.rand(rows, rows, device=device) for _ in range(2))
        # On a CPU with the library that is faster there.
        product = _best(lambda: cpu_products.linear(a, b), device, repeats)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    source = torch.zeros(copied // 4, device=device)
    target = torch.empty_like(source)
    copy = _best(lambda: target.copy_(source), device, repeats)
    return Rates(
        operations=2 * rows**3 / product,
        bytes=2 * copied / copy,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        precision="tf32" if tf32 and device.type == "cuda" else "float32",
    )


def _best(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the seconds of the fastest try, after one that does not count."""
    seconds = []
    for _ in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cost_of_step(
    model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] | None = None
) -> Cost:
    """Count what one step of one client needs: forward, backward and plain SGD.

    Parameters
    ----------
    model : nn.Module
        The model, not yet converted for stacked clients. It is copied to the device *meta*, where
        nothing is computed.
    x : Tensor
        A batch.
    loss : callable, optional
        The loss of the model's output; its sum by default. It matters where it has matrix products.

    Returns
    -------
    Cost
        Of one step.

    Examples
    --------
    A layer of 3 × 2 weights with a bias, and 5 samples. Two products, because the first layer needs
    no gradient of its input.

    >>> cost_of_step(nn.Linear(3, 2), torch.zeros(5, 3))
    Cost(operations=120, bytes=296)
    """
    # ``to`` changes a module in place.
    away = copy.deepcopy(model).to("meta").train()
    moved = 0

    def count(layer: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        nonlocal moved
        for tensor in given:
            # Read by both passes, and its gradient written, if it has one.
            moved += _bytes(tensor) * (3 if tensor.requires_grad else 2)
        # Written, and its gradient read. Recurrent layers also return their last states, which are
        # part of their outputs.
        moved += 2 * _bytes(output[0] if isinstance(output, tuple) else output)

    hooks = [
        layer.register_forward_hook(count)
        for layer in away.modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    with FlopCounterMode(display=False) as counter:
        output = away(x.to("meta"))
        (output.sum() if loss is None else loss(output)).backward()
    for hook in hooks:
        hook.remove()
    parameters = sum(_bytes(p) for p in away.parameters() if p.requires_grad)
    still = sum(_bytes(p) for p in away.parameters() if not p.requires_grad)
    return Cost(int(counter.get_total_flops()), moved + 3 * parameters + 2 * still)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def measured_apart(device: str, *, tf32: bool, threads: int) -> Rates:
    """Measure in a process of its own, which leaves nothing on the device."""
    command = [sys.executable, "-m", "benchmarks.machine", "--device", device, "--json"]
    command += ["--threads", str(threads), *(["--tf32"] if tf32 else [])]
    variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        command, capture_output=True, text=True, env=variables, cwd=root, check=False
    )
    if done.returncode:
        raise RunError(f"the machine's rates could not be measured:\n{done.stderr}")
    return Rates(**json.loads(done.stdout))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.machine",
        description="Measure the rate of matrix products and of copies on this machine.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--tf32", action="store_true", help="let products use TF32 on a GPU")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rows", type=int, help="rows of the matrices")
    parser.add_argument("--copied", type=int, help="bytes of the copied tensor")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is 'cuda', but PyTorch finds no GPU here; valid: cpu")
    torch.set_num_threads(arguments.threads)
    rates = measure(
        torch.device(arguments.device),
        tf32=arguments.tf32,
        rows=arguments.rows,
        copied=arguments.copied,
    )
    print(json.dumps(asdict(rates)) if arguments.json else in_words(rates))
    return 0


def in_words(rates: Rates) -> str:
    """Describe a machine in one line.

    Examples
    --------
    >>> in_words(Rates(51e12, 4.1e12, "H200", "float32"))
    'H200: 51 TFLOP/s in float32, 4.1 TB/s'
    """
    return (
        f"{rates.device}: {scaled(rates.operations)}FLOP/s in {rates.precision}, "
        f"{scaled(rates.bytes)}B/s"
    )


def scaled(value: float) -> str:
    """Write a number with two digits and a decimal prefix.

    Examples
    --------
    >>> scaled(1_234_567), scaled(42.0)
    ('1.2 M', '42 ')
    """
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return (
                f"{value / size:.3g} {prefix}"
                if value >= 100 * size
                else f"{value / size:.2g} {prefix}"
            )
    return f"{value:.2g} "


if __name__ == "__main__":
    sys.exit(main())
