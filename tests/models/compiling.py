"""Compile the GPU kernels for a GPU that need not be there.

``python -m tests.models.compiling 90`` does so for compute capability 9.0. A launch compiles its
kernel for the types and sizes of its arguments, down to machine code, and does nothing else.
Results are not computed, so only functions that need no results can be called.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from equipoise.models import (
    convolutions,
    hash_kernels,
    index_kernels,
    kernels,
    lstm_kernels,
    norms,
    products,
    row_kernels,
    stack_kernels,
    update_kernels,
)
from equipoise.models.convolutions import Geometry
from equipoise.models.update_kernels import Factors, Rule
from equipoise.optimizers.penalties import Penalties

# Shared memory that a kernel may use, in bytes, by compute capability: A100, H100 and H200.
SHARED = {80: 163 * 1024, 90: 227 * 1024}
MODULES = ("convolution_kernels", "hash_kernels", "index_kernels", "kernels", "lstm_kernels")
MODULES += ("norm_kernels", "products", "row_kernels", "stack_kernels", "update_kernels")
CLIENTS, SAMPLES = 3, 10
PRECISIONS = ("ieee", "split", "tf32", "bfloat16")
YES_AND_NO = (True, False)


class AbsentDriver:
    """A driver of Triton for a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def name_of(kernel: JITFunction) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def compile_at_launch(made: dict[str, int]) -> None:
    """Let launches compile, and note the most shared memory that each kernel needs, in bytes."""

    def launcher(kernel: JITFunction, grid: Any) -> Any:
        def compiled(*args: Any, **options: Any) -> None:
            shared = kernel.warmup(*args, grid=grid, **options).metadata.shared
            made[name_of(kernel)] = max(made.get(name_of(kernel), 0), shared)

        return compiled

    JITFunction.__getitem__ = launcher


def launched_kernels() -> list[str]:
    """Return the names of all kernels but those that are only called by others."""
    found = {
        each
        for module in MODULES
        for each in vars(import_module(f"equipoise.models.{module}")).values()
        if isinstance(each, JITFunction)
    }

    def is_called(kernel: JITFunction) -> bool:
        call = re.compile(rf"(?<![\w.])(?<!def ){kernel.fn.__name__}\(")
        return any(call.search(other.src) for other in found)

    return sorted(name_of(kernel) for kernel in found if not is_called(kernel))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def with_gradients(function: Any, *tensors: Tensor) -> None:
    """Call a function, and compute the gradients of its first result."""
    own = [tensor.requires_grad_() for tensor in tensors]
    made = function(*own)
    first = made[0] if isinstance(made, tuple) else made
    torch.autograd.grad(first, own, torch.zeros_like(first))


# ---- launches ------------------------------------------------------------------------------------


def compile_convolutions(precision: str) -> None:
    depthwise = {"padding": (1, 1), "depthwise": True}
    # Channels, results, height and width, height and width of the kernel.
    for channels, results, size, kernel, geometry in (
        (3, 32, 32, 3, Geometry()),
        (32, 64, 30, 3, Geometry()),
        (3, 64, 64, 7, Geometry(stride=(2, 2), padding=(3, 3))),
        (512, 512, 4, 3, Geometry(padding=(1, 1))),
        (96, 96, 28, 3, Geometry(**depthwise)),
        (144, 144, 28, 3, Geometry(stride=(2, 2), **depthwise)),
    ):

        def convolve(*given: Tensor, geometry: Geometry = geometry) -> Tensor:
            return convolutions.convolve(*given, geometry, precision=precision, relu=True)

        images = zeros(CLIENTS, SAMPLES, channels, size, size)
        weight = zeros(CLIENTS, results, 1 if geometry.depthwise else channels, kernel, kernel)
        with_gradients(vmap(convolve), images, weight, zeros(CLIENTS, results))
    images, weight, bias = zeros(300, 32, 30, 30), zeros(64, 32, 3, 3), zeros(64)
    for innermost in YES_AND_NO:
        how = {"precision": precision, "channels_innermost": innermost}
        convolutions.convolve_and_pool(images, weight, bias, Geometry(), (2, 2), **how)


def compile_pooling_and_dropout() -> None:
    for relu in YES_AND_NO:
        pool = vmap(lambda x, relu=relu: kernels.max_pool(x, (2, 2), relu))
        with_gradients(pool, zeros(CLIENTS, SAMPLES, 64, 28, 28))
        with_gradients(pool, zeros(CLIENTS, SAMPLES, 28, 28, 64).permute(0, 1, 4, 2, 3))
    keys = torch.zeros(CLIENTS, dtype=torch.int64)
    vmap(lambda key: kernels.dropout_factors(key, torch.Size((SAMPLES, 500)), 1 << 15))(keys)


def compile_norms() -> None:
    # A piece for each client, or several.
    for samples, size, masked in product((SAMPLES, 2000), ((), (28, 28)), YES_AND_NO):
        mask = torch.ones(CLIENTS, samples) if masked else None

        def norm(x: Tensor, weight: Tensor, bias: Tensor, mask: Any = mask) -> Tensor:
            mean, var = zeros(CLIENTS, 16), torch.ones(CLIENTS, 16)

            def of_one(*given: Any) -> Tensor:
                return norms.norm(*given, momentum=0.1, eps=1e-5)[0]

            given = (x, mask, weight, bias, mean, var)
            return vmap(of_one, in_dims=tuple(None if t is None else 0 for t in given))(*given)

        x = zeros(CLIENTS, samples, 16, *size)
        with_gradients(norm, x, torch.ones(CLIENTS, 16), zeros(CLIENTS, 16))


def compile_steps() -> None:
    shapes = [(600, 512), (512,), (70,), (8, 4)]
    rates = torch.ones(CLIENTS, dtype=torch.float64)
    rules = Rule(), Rule(decay=0.1), Rule(momentum=0.9, nesterov=True, decay=0.1)
    for rule, (strength, sloped) in product(rules, ((0.0, False), (0.5, False), (0.5, True))):
        params, gradients, velocities, linear = (
            [zeros(CLIENTS, *shape) for shape in shapes] for _ in range(4)
        )
        anchors = [zeros(*shape) for shape in shapes]
        penalties = Penalties(strength, anchors, linear if sloped else None) if strength else None
        update_kernels.descend(params, gradients, velocities, rates, rule, penalties)
        of_first = penalties and penalties.of([True, False, False, False])
        for samples, precision in product((10, 100), PRECISIONS):
            factors = Factors(zeros(CLIENTS, samples, 600), zeros(CLIENTS, samples, 512), precision)
            update_kernels.descend(params[:1], [factors], velocities[:1], rates, rule, of_first)


def compile_products() -> None:
    weight, bias = zeros(CLIENTS, 600, 12544), zeros(CLIENTS, 600)
    for samples, precision in product((10, 32), row_kernels._ARITHMETIC):
        x, upper = zeros(CLIENTS, samples, 12544), zeros(CLIENTS, samples, 600)
        for added in (bias, None):
            row_kernels.multiply(x, weight, added, precision)
        row_kernels.multiply_back(upper, weight, precision)
    for added in (zeros(1536), None):
        x = zeros(4096, 384).requires_grad_()
        y = products.SplitProduct.apply(x, zeros(1536, 384), added)
        torch.autograd.grad(y, x, torch.zeros_like(y))


def compile_stacks_and_hashes() -> None:
    hash_kernels.Mixed.apply(torch.zeros(50, dtype=torch.int64), 3)
    stacks = [zeros(CLIENTS, 100, 7), zeros(CLIENTS, 8)]
    stack_kernels.weighted_sums(stacks, torch.ones(CLIENTS))
    copies = [torch.empty_like(stack) for stack in stacks]
    stack_kernels.copy_rows(copies, stacks, torch.arange(CLIENTS))


def compile_recurrence(precision: str) -> None:
    lstm_kernels._precision = lambda device: precision

    def recurrence(*given: Tensor) -> Tensor:
        return lstm_kernels.StackedRecurrence.apply(*given, True)[0]

    for samples, hidden in product((4, SAMPLES, 100), (32, 256)):
        gates, state = 4 * hidden, (CLIENTS, samples, hidden)
        driven, weight = zeros(CLIENTS, 20, samples, gates), zeros(CLIENTS, gates, hidden)
        with_gradients(recurrence, driven, weight, zeros(*state), zeros(*state))


def compile_index_terms(precision: str) -> None:
    index_kernels.precision_on = lambda device: precision
    scores = CLIENTS, SAMPLES, 10
    for orthogonal in YES_AND_NO:

        def terms(*given: Any) -> Tensor:
            given = given if len(given) == 4 else (*given, None)
            return index_kernels.add_terms(*given, 1.0)

        products_ = [zeros(CLIENTS, SAMPLES, 100)] if orthogonal else []
        with_gradients(vmap(terms), zeros(*scores[:2]), zeros(*scores), zeros(*scores), *products_)
        index = zeros(100, 384) if orthogonal else None

        def head_terms(*given: Tensor, index: Tensor | None = index) -> Tensor:
            return index_kernels.add_head_terms(*given[:3], given[3:], index, 1.0)

        projected, weight = zeros(CLIENTS, SAMPLES, 384), zeros(CLIENTS, 10, 384)
        given = (zeros(*scores[:2]), zeros(*scores), projected, weight, zeros(CLIENTS, 10))
        with_gradients(vmap(head_terms), *given)


def main(capability: int) -> None:
    driver.set_active(AbsentDriver(capability))
    made: dict[str, int] = {}
    compile_at_launch(made)
    for module in (index_kernels, lstm_kernels, products):
        # As many as on that GPU.
        module.stages = lambda device, stage, most: max(1, min(most, SHARED[capability] // stage))
    for precision in PRECISIONS:
        compile_convolutions(precision)
    for precision in ("ieee", "tf32", "tf32x3"):
        compile_recurrence(precision)
    for precision in index_kernels._ARITHMETIC:
        compile_index_terms(precision)
    compile_pooling_and_dropout()
    compile_norms()
    compile_steps()
    compile_products()
    compile_stacks_and_hashes()
    print(json.dumps({"shared": made, "launched": launched_kernels()}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
