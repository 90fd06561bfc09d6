"""Parts of the trial of a model: checks of single results, and counts."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from equipoise.errors import InputError
from equipoise.metrics import COLUMNS
from equipoise.task import Task

# Layers of these modules of torch.nn can be stacked. Testing this would take seconds for
# convolutions on a CPU.
_STACKABLE = frozenset(
    f"torch.nn.modules.{name}"
    for name in (
        "activation",
        "batchnorm",
        "container",
        "conv",
        "dropout",
        "flatten",
        "instancenorm",
        "linear",
        "normalization",
        "padding",
        "pooling",
    )
)


def refuse_unusual(module: nn.Module) -> None:
    """Refuse tensors that have no shape yet, or complex numbers."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise InputError(
                f"{name} of the model has no shape yet; call the model with a sample once"
            )
        if tensor.is_complex():
            raise InputError(f"{name} of the model holds complex numbers; valid: real ones")


def known_to_stack(layer: nn.Module) -> bool:
    """Return whether clients can be stacked with a layer, without a test."""
    place = type(layer).__module__
    return (
        place in _STACKABLE or place.startswith("equipoise.models.") or type(layer) is nn.Embedding
    )


def check_outputs(task: Task, output: Tensor, y: Tensor, outputs: int) -> None:
    """Refuse outputs whose shape does not fit the federation."""
    if wanted := task.misfit(output, y, outputs):
        raise InputError(
            f"the model's output for a sample has shape {tuple(output.shape[1:])}, "
            f"but the federation has {wanted}"
        )


def checked_metrics(task: Task, output: Tensor, y: Tensor) -> tuple[str, ...]:
    """Return the names of the task's metrics, which must have one value per sample."""
    try:
        measured = task.metrics(output, y)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"the loss or a metric of task {task.name!r} fails for outputs of shape "
            f"{tuple(output.shape)} and targets of shape {tuple(y.shape)}: {error}"
        ) from error
    if missing := {"loss", task.score} - set(measured):
        raise InputError(
            f"the metrics of task {task.name!r} are {', '.join(measured)}, without {missing.pop()}"
        )
    if taken := (set(measured) - {"loss"}) & set(COLUMNS):
        raise InputError(
            f"the task {task.name!r} has a metric called {taken.pop()!r}, which is "
            "already a column of metrics.jsonl; choose another name"
        )
    for name, values in measured.items():
        if not isinstance(values, Tensor) or values.shape != y.shape[:1]:
            what = (
                f"has shape {tuple(values.shape)}"
                if isinstance(values, Tensor)
                else f"is {values!r}"
            )
            raise InputError(
                f"{name} of task {task.name!r} {what} for {len(y)} samples; valid: one "
                f"value per sample, of shape ({len(y)},), so that padding can be left out"
            )
    return tuple(measured)


@contextmanager
def naming(x: Tensor, what: str = "a sample") -> Iterator[None]:
    """Turn errors of a model inside a ``with`` block into errors that describe its samples."""
    try:
        yield
    except InputError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
        taken = f"x holds {str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape[1:])}"
        advised = ""
        if isinstance(error, IndexError) and not x.is_floating_point():
            least, most = int(x.min()), int(x.max())
            advised = (
                f"; has an embedding fewer rows than {most + 1}?"
                if least >= 0
                else f"; an embedding has no row {least}"
            )
        elif not x.is_floating_point():
            advised = (
                "; most models need floating point, such as x / 255 for images (data 'imagefolder' "
                "has the option scaled)"
            )
        raise InputError(f"the model cannot take {what}: {taken}{advised} ({error})") from error


@contextmanager
def counting(module: nn.Module) -> Iterator[list[int]]:
    """Count the output elements of all layers in this context."""
    counted = [0]

    def count(layer: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            counted[0] += output.numel()

    handles = [layer.register_forward_hook(count) for layer in module.modules()]
    try:
        yield counted
    finally:
        for handle in handles:
            handle.remove()


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators of PyTorch, Python and NumPy, from which layers may draw.

    Examples
    --------
    >>> before = random_states(torch.device("cpu"))
    >>> _ = random.random()
    >>> [torch.equal(*pair) for pair in zip(before, random_states(torch.device("cpu")))]
    [True, False, True]
    """
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    others = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002 (models may)
    return [
        torch.get_rng_state(),
        *(torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8) for state in others),
        *on_gpu,
    ]
