"""How many clients are stacked, and how many samples a pass without gradient has.

Both follow a fixed rule from device and model, so that a run is reproducible. With ``machine.chunk:
measure`` the number of stacked clients is measured instead, and the result is written to the run's
configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from equipoise.engine.network import Network

# On a CPU stacking saves Python's time, not arithmetic: it pays while all stacked parameters stay
# in its caches.
_CPU_STACKED_PARAMETERS = 2_000_000
# A step keeps its activations for the gradient. A gigabyte of them in float32 fits on any machine.
_CPU_STACKED_ACTIVATIONS = 1 << 28
# On a GPU stacking fills the chip, and what limits it is memory. Parameters are held about eight
# times over (weights, gradient, optimizer state, update, recorded steps), activations about twelve
# times (a 3x3 convolution's patches are nine times its input).
_GPU_SHARE = 0.5
_PARAMETER_COPIES, _ACTIVATION_COPIES = 8, 12
# A chip that is full gains nothing from more clients. So this is how many numbers (parameters, and
# activations of a batch) all clients of a step have at most, by arithmetic. With the two-layer CNN
# of job pfl these are about 300 clients: from 100 to 200 a step gains 5 to 10 % on one H200, in
# every arithmetic (``benchmarks/scaling.py``).
_GPU_FULL = {"float32": 1 << 30, "tf32": 1 << 30, "bfloat16": 1 << 30, "float64": 1 << 30}
# Samples of a pass without gradient: enough to keep a device busy. Large models look at fewer, so
# that the activations of all layers together stay bounded. On a CPU, convolutions of one model do
# best within its caches. On a GPU a pass is so many times as large: launching the kernels of a pass
# takes the host about a millisecond, which is longer than a small model needs for 4096 samples.
_PASS, _CPU_CONVOLVED_PASS, _GPU_TIMES = 4096, 64, 4
_PASS_ACTIVATIONS = {"cpu": 1 << 27, "cuda": 1 << 32}
# The share of a GPU's memory that the activations of a pass may take beside training.
_BESIDE_SHARE = 1 / 8
# The share of a GPU's memory that the updates of a cohort may take while those of the cohort before
# are still there.
_TWICE_SHARE = 1 / 16


def chunk_by_rule(network: Network, batch_size: int, *, tf32: bool = False) -> int:
    """Return the largest chunk for a device, a model and an arithmetic, by a fixed rule.

    Parameters
    ----------
    network : Network
        The model, tried out. Its frozen tensors do not count: one copy serves all clients.
    batch_size : int
        Samples per step.
    tf32 : bool
        Whether matrix units may round factors to TF32.

    Returns
    -------
    int
        At least 1.

    Examples
    --------
    >>> from equipoise import tasks
    >>> from equipoise.models import build
    >>> mlp = Network(build("mlp", shape=(64,), classes=10), tasks.build("classification"))
    >>> chunk_by_rule(mlp, 10)
    415
    """
    parameters = max(1, sum(tensor.numel() for tensor in network.initial().values()))
    activations = max(1, batch_size * network.activations + network.fixed_activations)
    if network.unstackable:
        return 1
    if network.device.type == "cpu":
        # One client's convolution already fills a CPU, and the grouped form that stacking needs is
        # slower there.
        most = min(_CPU_STACKED_PARAMETERS // parameters, _CPU_STACKED_ACTIVATIONS // activations)
        return 1 if _convolves(network) or _has_fast_lstm(network) else max(1, most)
    memory = torch.cuda.get_device_properties(network.device).total_memory
    return chunk_on_gpu(
        parameters, activations, memory, _arithmetic(network, tf32), network.dtype.itemsize
    )


def chunk_on_gpu(
    parameters: int, activations: int, memory: int, arithmetic: str, itemsize: int = 4
) -> int:
    """Return the largest chunk for a GPU.

    Parameters
    ----------
    parameters, activations : int
        Numbers of one client in a step.
    memory : int
        Memory of the GPU in bytes.
    arithmetic : {"float32", "tf32", "bfloat16", "float64"}
        The arithmetic of steps.
    itemsize : int
        Bytes per parameter.

    Returns
    -------
    int
        As many clients as fill the chip, and no more than fit into its memory; at least 1.

    Examples
    --------
    >>> chunk_on_gpu(1_000_000, 1_000_000, 16 << 30, "float32")
    107
    >>> chunk_on_gpu(1_000_000, 1_000_000, 141 << 30, "tf32")
    536
    """
    held = _PARAMETER_COPIES * parameters + _ACTIVATION_COPIES * activations
    fitting = int(_GPU_SHARE * memory / (held * itemsize))
    return max(1, min(fitting, _GPU_FULL[arithmetic] // (parameters + activations)))


def _arithmetic(network: Network, tf32: bool) -> str:
    lowered = network.autocast or network.dtype
    name = str(lowered).removeprefix("torch.")
    return "tf32" if tf32 and name == "float32" else name


def even_chunks(clients: int, most: int) -> int:
    """Return the size of chunks that divides a cohort into chunks of nearly equal size.

    Parameters
    ----------
    clients : int
        Number of clients in the cohort.
    most : int
        The largest chunk.

    Returns
    -------
    int
        The smallest size with which there are no more chunks than with ``most``. Chunks of the
        same size share recorded steps, and a small last chunk would not fill the device.

    Examples
    --------
    >>> even_chunks(200, 60), even_chunks(50, 60), even_chunks(10, 3)
    (50, 50, 3)
    """
    return -(-clients // -(-clients // most))


def samples_a_pass(network: Network, models: int) -> int:
    """Return the number of samples of a pass without gradient, over all models together.

    Parameters
    ----------
    network : Network
        The model.
    models : int
        Number of models that process different samples; 1 if all clients share one.

    Returns
    -------
    int
        At least 1.

    Examples
    --------
    >>> from equipoise import tasks
    >>> from equipoise.models import build
    >>> cnn = Network(build("cnn2", shape=(1, 8, 8), classes=10), tasks.build("classification"))
    >>> samples_a_pass(cnn, 1), samples_a_pass(cnn, 10)
    (64, 4096)
    """
    on_cpu = network.device.type == "cpu"
    most = _PASS if on_cpu else _GPU_TIMES * _PASS
    if on_cpu and models == 1 and _convolves(network):
        most = _CPU_CONVOLVED_PASS
    return min(most, _within_memory(network, network.activations))


def fits_beside(network: Network, samples: int) -> bool:
    """Return whether a GPU has the memory to evaluate so many samples beside training.

    The memory of both is then in use at the same time.

    Examples
    --------
    >>> from equipoise import tasks
    >>> from equipoise.models import build
    >>> mlp = build("mlp", shape=(64,), classes=10)
    >>> fits_beside(Network(mlp, tasks.build("classification")), 10_000)
    True
    """
    if network.device.type == "cpu":
        return True
    numbers = min(samples, samples_a_pass(network, 1)) * network.activations
    numbers += network.fixed_activations
    memory = torch.cuda.get_device_properties(network.device).total_memory
    return numbers * network.dtype.itemsize <= _BESIDE_SHARE * memory


def fits_twice(nbytes: int, device: torch.device) -> bool:
    """Return whether a GPU can hold the updates of two cohorts, each of ``nbytes`` bytes.

    Examples
    --------
    >>> fits_twice(1 << 30, torch.device("cpu"))
    True
    """
    if device.type == "cpu":
        return True
    return nbytes <= _TWICE_SHARE * torch.cuda.get_device_properties(device).total_memory


def samples_an_encoding(network: Network) -> int:
    """Return the number of samples that the stem encodes at a time.

    Examples
    --------
    >>> from equipoise import tasks
    >>> from equipoise.models import build
    >>> mlp = build("mlp", shape=(64,), classes=10)
    >>> samples_an_encoding(Network(mlp, tasks.build("classification")))
    4096
    """
    return min(_PASS, _within_memory(network, network.stem_activations))


def _within_memory(network: Network, activations: int) -> int:
    return max(1, _PASS_ACTIVATIONS[network.device.type] // max(1, activations))


def _convolves(network: Network) -> bool:
    return any(isinstance(layer, nn.modules.conv._ConvNd) for layer in network.module.modules())


def _has_fast_lstm(network: Network) -> bool:
    """Return whether a CPU trains recurrent layers faster one client at a time."""
    in_float32 = network.dtype == torch.float32 and network.autocast is None
    layers = network.module.modules()
    return in_float32 and any(getattr(layer, "faster_alone", False) for layer in layers)


def fastest(candidates: Sequence[int], seconds_of: Callable[[int], float]) -> int:
    """Time each candidate twice, after a warm-up, and return the fastest.

    Examples
    --------
    >>> fastest([1, 2, 4], lambda chunk: abs(chunk - 2))
    2
    """
    best: dict[int, float] = {}
    for candidate in candidates:
        seconds_of(candidate)
        best[candidate] = min(seconds_of(candidate) for _ in range(2))
    return min(best, key=lambda candidate: best[candidate])
