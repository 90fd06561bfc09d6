"""What a machine can do, and what a job needs at least: ``python -m benchmarks.machine --help``.

The limit of a job on a machine is the larger of two times: its operations over the rate of large
matrix products, and its bytes over the rate at which memory is copied. Both rates are measured, in
the precision that is used, with the threads that are used. A CPU knows no TF32 and is measured in
float32 in its place. What a client-step needs is counted:

operations
    Multiplications and additions of the matrix products and convolutions of the forward and the
    backward pass, as PyTorch's ``FlopCounterMode`` counts them. Other operations are left out.
bytes
    Of every layer with parameters: the forward pass reads its input and writes its output, and the
    backward pass reads its input and its output's gradient and writes its input's gradient.
    Parameters are read by both passes and written once by the optimizer. So layers without
    parameters, gradients of parameters and what a layer does inside cost nothing: a program that
    computes them together with their neighbours needs no memory traffic for them. In bfloat16
    inputs and outputs have two bytes a number; parameters stay in float32.

Small tensors may stay in a processor's cache, whose rate is higher. Then a job can be faster than
its limit by bytes.
"""

from __future__ import annotations

import argparse
import copy
import functools
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

from equipoise.engine.settings import Machine
from equipoise.errors import InputError, RunError
from equipoise.models import cpu_products

PRECISIONS = ("float32", "tf32", "bfloat16")

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
        Of the products: one of ``PRECISIONS``.
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

    def limit(self, rates: Rates) -> dict[str, Any]:
        """Return what reports say of the limit.

        Parameters
        ----------
        rates : Rates
            What the machine can do.

        Returns
        -------
        dict
            ``operations`` and ``bytes`` of a client-step, ``client_steps_per_second``, which of the
            two is the limit (``bound``), and the ``precision`` of the measured products.

        Examples
        --------
        >>> Cost(operations=8, bytes=3).limit(Rates(4.0, 1.0, "here", "float32"))["bound"]
        'bytes'
        """
        return {
            "operations": self.operations,
            "bytes": self.bytes,
            "client_steps_per_second": 1 / self.seconds(rates),
            "bound": self.bound(rates),
            "precision": rates.precision,
        }


def measure(
    device: torch.device,
    *,
    precision: str = "float32",
    rows: int | None = None,
    copied: int | None = None,
    repeats: int = 5,
) -> Rates:
    """Measure the rates of a device: the best of several tries.

    Parameters
    ----------
    device : torch.device
        What to measure.
    precision : str
        Of the products: one of ``PRECISIONS``. A CPU is measured in float32 in place of TF32.
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
    precision = _measured(device.type, precision)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        a, b = (torch.rand(rows, rows, dtype=dtype, device=device) for _ in range(2))
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
        precision=precision,
    )


def _measured(device: str, precision: str) -> str:
    """Return the precision in which products are measured."""
    return "float32" if device == "cpu" and precision == "tf32" else precision


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
    model: nn.Module,
    x: Tensor,
    loss: Callable[[Tensor], Tensor] | None = None,
    *,
    precision: str = "float32",
    training: bool = True,
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
    precision : str
        One of ``PRECISIONS``.
    training : bool
        False for a forward pass alone.

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
    >>> cost_of_step(nn.Linear(3, 2), torch.zeros(5, 3), training=False)
    Cost(operations=60, bytes=132)
    """
    # ``to`` changes a module in place.
    away = copy.deepcopy(model).to("meta").train()
    if not training:
        away.requires_grad_(False)
    passes, moved = 1 + training, 0

    def size(tensor: Tensor) -> int:
        lowered = precision == "bfloat16" and tensor.is_floating_point()
        return tensor.numel() * 2 if lowered else _bytes(tensor)

    def count(layer: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        nonlocal moved
        for tensor in given:
            # Read by both passes, and its gradient written, if it has one.
            moved += size(tensor) * (3 if tensor.requires_grad else passes)
        # Written, and its gradient read. Recurrent layers also return their last states, which are
        # part of their outputs.
        moved += passes * size(output[0] if isinstance(output, tuple) else output)

    hooks = [
        layer.register_forward_hook(count)
        for layer in away.modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    with FlopCounterMode(display=False) as counter:
        output = away(x.to("meta"))
        if training:
            (output.sum() if loss is None else loss(output)).backward()
    for hook in hooks:
        hook.remove()
    parameters = sum(_bytes(p) for p in away.parameters() if p.requires_grad)
    still = sum(_bytes(p) for p in away.parameters() if not p.requires_grad)
    return Cost(int(counter.get_total_flops()), moved + 3 * parameters + passes * still)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def measured_apart(device: str, *, precision: str = "float32", threads: int) -> Rates:
    """Measure in a process of its own, which leaves nothing on the device.

    The same rates are measured only once in a process.
    """
    return _measured_apart(device, _measured(device, precision), threads)


@functools.cache
def _measured_apart(device: str, precision: str, threads: int) -> Rates:
    command = [sys.executable, "-m", "benchmarks.machine", "--device", device, "--json"]
    command += ["--threads", str(threads), "--precision", precision]
    variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        command, capture_output=True, text=True, env=variables, cwd=root, check=False
    )
    if done.returncode:
        raise RunError(f"the machine's rates could not be measured:\n{done.stderr}")
    return Rates(**json.loads(done.stdout))


def precision_of(machine: Machine) -> str:
    """Name the fastest arithmetic that machine settings allow to products.

    Examples
    --------
    >>> precision_of(Machine(tf32=True)), precision_of(Machine(tf32=True, frozen="bfloat16"))
    ('tf32', 'bfloat16')
    """
    if "bfloat16" in (machine.precision, machine.frozen):
        return "bfloat16"
    return "tf32" if machine.tf32 else "float32"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.machine",
        description="Measure the rate of matrix products and of copies on this machine.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="of the products (default float32); a CPU has no tf32 and takes float32 in its place",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rows", type=int, help="rows of the matrices")
    parser.add_argument("--copied", type=int, help="bytes of the copied tensor")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is 'cuda', but PyTorch finds no GPU here; valid: cpu")
    torch.set_num_threads(arguments.threads)
    rates = measure(
        torch.device(arguments.device),
        precision=arguments.precision,
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


def rounded(rate: float) -> str:
    """Write client-steps per second.

    Examples
    --------
    >>> rounded(12345.6), rounded(1.2345)
    ('12,346', '1.23')
    """
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def percent(share: float) -> str:
    """Write a share of the limit.

    Examples
    --------
    >>> percent(0.25), percent(0.00041)
    ('25.0 %', '0.041 %')
    """
    return f"{100 * share:.1f} %" if share >= 0.01 else f"{100 * share:.2g} %"


if __name__ == "__main__":
    sys.exit(main())
