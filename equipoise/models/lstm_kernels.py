"""Steps of LSTM layers of stacked clients, as Triton kernels for a GPU.

A step is one kernel. A program makes some units of a layer for some samples of one client: it
multiplies the output of the step before by the recurrent weights of the four gates, adds the
input's part, and applies the gates. So a step reads the weights once and nothing but the results
is written. The gradient goes backwards in the same way, one kernel a step; that of the weights is
one product over all steps at its end.

There are no atomic operations, and tiles depend on neither the number of clients nor their data:
the same input gives the same bits, independent of the other clients of the stack. The gradients of
the weights and of the first output are products of PyTorch, which depend on the number of clients
up to rounding, as those of linear layers do. Only imported where Triton is installed: see
``equipoise.models.kernel_modules``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.models.kernel_tools import FUSED
from equipoise.models.products import pay_on, stages
from equipoise.models.recurrent import recurrence

# Units of a program, how many products are summed at a time, and how a program is run: by how
# products are computed, measured on an H200. They do not depend on data or clients.
_IN_FLOAT32 = {"UNITS": 64, "INNER": 32, "num_warps": 4, "num_stages": 3}
_FORWARD: dict[str, dict[str, Any]] = {
    "ieee": _IN_FLOAT32,
    "tf32x3": {"UNITS": 32, "INNER": 32, "num_warps": 4, "num_stages": 3},
    "tf32": {"UNITS": 32, "INNER": 32, "num_warps": 4, "num_stages": 3},
}
_BACKWARD: dict[str, dict[str, Any]] = {
    "ieee": _IN_FLOAT32,
    # Backward, one product in float32 is faster than three in TF32.
    "tf32x3": {"PRECISION": "ieee", **_IN_FLOAT32},
    "tf32": {"UNITS": 16, "INNER": 64, "num_warps": 2, "num_stages": 3},
}
# Samples of a program. Tensor cores multiply 16 rows at least.
_FEWEST_ROWS, _MOST_ROWS = 16, 64


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Return the hyperbolic tangent with a small relative error, near zero too."""
    size = tl.abs(x)
    shrunk = tl.exp(-2.0 * size)
    far = (1.0 - shrunk) / (1.0 + shrunk)
    square = x * x
    # The Taylor series up to x⁹. Near zero the formula above would lose digits.
    near = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return tl.where(size < 0.3, x * near, tl.where(x < 0, -far, far))


@triton.jit
def _tile(
    samples: tl.tensor, HIDDEN: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return client, samples and units of a program, and which of its places exist."""
    across = tl.cdiv(HIDDEN, UNITS)
    client, tile = (tl.program_id(0) // across).to(tl.int64), tl.program_id(0) % across
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    unit = tile * UNITS + tl.arange(0, UNITS)
    return client, row, unit, (row < samples)[:, None] & (unit < HIDDEN)[None, :]


@triton.jit(do_not_specialize=["step", "steps", "samples"])
def _step(
    driven: tl.tensor,
    weight: tl.tensor,
    before: tl.tensor,
    cell_before: tl.tensor,
    outputs: tl.tensor,
    cells: tl.tensor,
    gates: tl.tensor,
    step: tl.tensor,
    steps: tl.tensor,
    samples: tl.tensor,
    driven_client: tl.tensor,
    driven_step: tl.tensor,
    driven_sample: tl.tensor,
    weight_client: tl.tensor,
    before_client: tl.tensor,
    before_step: tl.tensor,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """Make one step: write its output and cell and, for the gradient, its gates.

    The output and the cell before are those of ``step - 1``: ``before`` and ``cell_before`` point
    at where step -1 would be.
    """
    client, row, unit, inside = _tile(samples, HIDDEN, ROWS, UNITS)
    by_row = row.to(tl.int64)[:, None]
    along = tl.arange(0, INNER)
    left = before + client * before_client + (step - 1).to(tl.int64) * before_step
    left += by_row * HIDDEN + along[None, :]
    right = weight + client * weight_client + unit[None, :] * HIDDEN + along[:, None]
    gate = HIDDEN * HIDDEN
    rows_inside, units_inside = (row < samples)[:, None], (unit < HIDDEN)[None, :]
    enter = tl.zeros((ROWS, UNITS), dtype=tl.float32)
    keep = tl.zeros((ROWS, UNITS), dtype=tl.float32)
    new = tl.zeros((ROWS, UNITS), dtype=tl.float32)
    leave = tl.zeros((ROWS, UNITS), dtype=tl.float32)
    for done in range(0, HIDDEN, INNER):
        ahead = along < HIDDEN - done
        h = tl.load(left + done, mask=rows_inside & ahead[None, :], other=0.0)
        here = ahead[:, None] & units_inside
        w = tl.load(right + done, mask=here, other=0.0)
        enter = tl.dot(h, w, enter, input_precision=PRECISION)
        w = tl.load(right + gate + done, mask=here, other=0.0)
        keep = tl.dot(h, w, keep, input_precision=PRECISION)
        w = tl.load(right + 2 * gate + done, mask=here, other=0.0)
        new = tl.dot(h, w, new, input_precision=PRECISION)
        w = tl.load(right + 3 * gate + done, mask=here, other=0.0)
        leave = tl.dot(h, w, leave, input_precision=PRECISION)
    of_step = step.to(tl.int64)
    drive = driven + client * driven_client + of_step * driven_step
    drive += by_row * driven_sample + unit[None, :]
    enter += tl.load(drive, mask=inside, other=0.0).to(tl.float32)
    keep += tl.load(drive + HIDDEN, mask=inside, other=0.0).to(tl.float32)
    new += tl.load(drive + 2 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
    leave += tl.load(drive + 3 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
    enter, keep, leave = tl.sigmoid(enter), tl.sigmoid(keep), tl.sigmoid(leave)
    new = _tanh(new)
    place = by_row * HIDDEN + unit[None, :]
    old = tl.load(
        cell_before + client * before_client + (of_step - 1) * before_step + place,
        mask=inside,
        other=0.0,
    )
    cell = keep * old.to(tl.float32) + enter * new
    first = (client * steps + of_step) * samples
    tl.store(cells + first * HIDDEN + place, cell, mask=inside)
    tl.store(outputs + first * HIDDEN + place, leave * _tanh(cell), mask=inside)
    if KEEP:
        to = gates + first * 4 * HIDDEN + by_row * 4 * HIDDEN + unit[None, :]
        tl.store(to, enter, mask=inside)
        tl.store(to + HIDDEN, keep, mask=inside)
        tl.store(to + 2 * HIDDEN, new, mask=inside)
        tl.store(to + 3 * HIDDEN, leave, mask=inside)


@triton.jit(do_not_specialize=["step", "steps", "samples"])
def _step_gradient(
    upper: tl.tensor,
    weight: tl.tensor,
    cells: tl.tensor,
    cell_before: tl.tensor,
    gates: tl.tensor,
    changes: tl.tensor,
    of_cell: tl.tensor,
    step: tl.tensor,
    steps: tl.tensor,
    samples: tl.tensor,
    upper_client: tl.tensor,
    upper_step: tl.tensor,
    upper_sample: tl.tensor,
    weight_client: tl.tensor,
    before_client: tl.tensor,
    before_step: tl.tensor,
    LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    """Write the gradient by what a step's gates get, and by the cell before it.

    ``changes`` holds the former for all steps; that of the step after is read. ``of_cell`` holds
    the gradient by this step's cell that comes from the steps after, and then that by the cell
    before.
    """
    client, row, unit, inside = _tile(samples, HIDDEN, ROWS, UNITS)
    by_row = row.to(tl.int64)[:, None]
    of_step = step.to(tl.int64)
    total = tl.zeros((ROWS, UNITS), dtype=tl.float32)
    first = (client * steps + of_step) * samples
    if not LAST:
        along = tl.arange(0, INNER)
        left = changes + (first + samples) * 4 * HIDDEN + by_row * 4 * HIDDEN + along[None, :]
        right = weight + client * weight_client + along[:, None] * HIDDEN + unit[None, :]
        rows_inside, units_inside = (row < samples)[:, None], (unit < HIDDEN)[None, :]
        for done in range(0, 4 * HIDDEN, INNER):
            ahead = along < 4 * HIDDEN - done
            change = tl.load(left + done, mask=rows_inside & ahead[None, :], other=0.0)
            w = tl.load(right + done * HIDDEN, mask=ahead[:, None] & units_inside, other=0.0)
            total = tl.dot(change, w, total, input_precision=PRECISION)
    total += tl.load(
        upper
        + client * upper_client
        + of_step * upper_step
        + by_row * upper_sample
        + unit[None, :],
        mask=inside,
        other=0.0,
    ).to(tl.float32)
    place = by_row * HIDDEN + unit[None, :]
    wide = by_row * 4 * HIDDEN + unit[None, :]
    kept = gates + first * 4 * HIDDEN + wide
    enter = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
    keep = tl.load(kept + HIDDEN, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(kept + 2 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
    leave = tl.load(kept + 3 * HIDDEN, mask=inside, other=0.0).to(tl.float32)
    seen = _tanh(tl.load(cells + first * HIDDEN + place, mask=inside, other=0.0))
    old = tl.load(
        cell_before + client * before_client + (of_step - 1) * before_step + place,
        mask=inside,
        other=0.0,
    ).to(tl.float32)
    later = of_cell + client * samples * HIDDEN + place
    through = tl.load(later, mask=inside, other=0.0) + total * leave * (1.0 - seen * seen)
    to = changes + first * 4 * HIDDEN + wide
    tl.store(to, through * new * enter * (1.0 - enter), mask=inside)
    tl.store(to + HIDDEN, through * old * keep * (1.0 - keep), mask=inside)
    tl.store(to + 2 * HIDDEN, through * enter * (1.0 - new * new), mask=inside)
    tl.store(to + 3 * HIDDEN, total * seen * leave * (1.0 - leave), mask=inside)
    tl.store(later, through * keep, mask=inside)


def _precision(device: torch.device) -> str:
    """Return how products of float32 numbers are computed, by PyTorch's own setting.

    Three products of TF32 parts are as accurate as one in float32, and faster where a GPU has the
    rate: see ``equipoise.models.products``.
    """
    if device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "tf32x3" if device.type == "cuda" and pay_on(device) else "ieee"


def _options(
    like: Tensor, hidden: int, tiles: dict[str, dict[str, Any]], factors: int
) -> dict[str, Any]:
    """Return the compile-time values of a kernel that multiplies by so many tiles at a time."""
    samples, precision = like.shape[2], _precision(like.device)
    rows = min(_MOST_ROWS, max(_FEWEST_ROWS, triton.next_power_of_2(samples)))
    tile = tiles[precision]
    stage = 4 * tile["INNER"] * (rows + factors * tile["UNITS"])
    fitting = {"num_stages": stages(like.device, stage, tile["num_stages"])}
    return {"PRECISION": precision, "HIDDEN": hidden, "ROWS": rows, **tile, **fitting}


def _grid(clients: int, samples: int, options: dict[str, Any]) -> tuple[int, int]:
    units = triton.cdiv(options["HIDDEN"], options["UNITS"])
    return clients * units, triton.cdiv(samples, options["ROWS"])


class StackedRecurrence(torch.autograd.Function):
    """The steps of an LSTM layer of stacked clients, as :func:`recurrence` goes through them.

    Takes what the inputs add to the four gates, ``[clients, steps, samples, 4 * hidden]``, the
    recurrent weights ``[clients, 4 * hidden, hidden]``, the output and the cell before the first
    step, ``[clients, samples, hidden]``, and whether a gradient will be taken. Returns the outputs
    ``[clients, steps, samples, hidden]`` and the last cell, and for the gradient the cells and the
    open gates of all steps.
    """

    @staticmethod
    def forward(
        driven: Tensor, weight: Tensor, output: Tensor, cell: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Go through the steps."""
        driven, weight = _with_rows(driven), _with_matrices(weight)
        output, cell = output.contiguous(), cell.contiguous()
        clients, steps, samples, _ = driven.shape
        hidden = weight.shape[-1]
        outputs = driven.new_empty(clients, steps, samples, hidden)
        # In float32 where outputs are not: cells are sums over many steps.
        cells = torch.empty_like(outputs, dtype=torch.float32)
        gates = driven.new_empty((*outputs.shape[:3], 4 * hidden) if keep else 0)
        options = _options(driven, hidden, _FORWARD, 4)
        grid = _grid(clients, samples, options)
        with torch.cuda.device_of(driven):
            for step in range(steps):
                later = step > 0
                _step[grid](
                    driven,
                    weight,
                    outputs if later else output,
                    cells if later else cell,
                    outputs,
                    cells,
                    gates,
                    step,
                    steps,
                    samples,
                    *driven.stride()[:3],
                    weight.stride(0),
                    *(outputs.stride()[:2] if later else (samples * hidden, 0)),
                    KEEP=keep,
                    **options,
                    **FUSED,
                )
        return outputs, cells[:, -1].to(driven.dtype, copy=True), cells, gates

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the gradient needs."""
        outputs, _, cells, gates = output
        ctx.mark_non_differentiable(cells, gates)
        # Otherwise zeros would be written as the gradients by cells and gates, which are large.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:4], outputs, cells, gates)

    @staticmethod
    def backward(
        ctx: Any, upper: Tensor | None, of_last: Tensor | None, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Go through the steps from the last to the first."""
        driven, weight, output, cell, outputs, cells, gates = ctx.saved_tensors
        upper = torch.zeros_like(outputs) if upper is None else upper
        of_last = torch.zeros_like(cell) if of_last is None else of_last
        if torch.is_grad_enabled():
            # This gradient will be differentiated in turn, which the kernels cannot be.
            given = (driven, weight, output, cell)
            return (*torch.func.vjp(plain_recurrence, *given)[1]((upper, of_last)), None)
        upper, dense = _with_rows(upper), _with_matrices(weight)
        clients, steps, samples, hidden = outputs.shape
        changes = torch.empty_like(gates)
        of_cell = of_last.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        options = _options(upper, hidden, _BACKWARD, 1)
        grid = _grid(clients, samples, options)
        first = cell.contiguous()
        with torch.cuda.device_of(upper):
            for step in reversed(range(steps)):
                later = step > 0
                _step_gradient[grid](
                    upper,
                    dense,
                    cells,
                    cells if later else first,
                    gates,
                    changes,
                    of_cell,
                    step,
                    steps,
                    samples,
                    *upper.stride()[:3],
                    dense.stride(0),
                    *(outputs.stride()[:2] if later else (samples * hidden, 0)),
                    LAST=step == steps - 1,
                    **options,
                    **FUSED,
                )
        of_weight = changes[:, 0].transpose(1, 2) @ output
        if steps > 1:
            rest = changes[:, 1:].flatten(1, 2).transpose(1, 2)
            of_weight = of_weight.baddbmm_(rest, outputs[:, :-1].flatten(1, 2))
        of_output = changes[:, 0] @ weight if ctx.needs_input_grad[2] else None
        return changes, of_weight, of_output, of_cell.to(cell.dtype), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *given: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Stack clients that are stacked already, along one axis."""
        *tensors, keep = given
        merged = []
        for tensor, dim in zip(tensors, in_dims, strict=False):
            copies = (
                tensor.expand(info.batch_size, *tensor.shape)
                if dim is None
                else tensor.movedim(dim, 0)
            )
            merged.append(copies.flatten(0, 1))
        made = StackedRecurrence.apply(*merged, keep)
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in made), (0,) * len(made)


def plain_recurrence(
    driven: Tensor, weight: Tensor, output: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Do what the kernels do, in plain operations that can be differentiated twice."""
    outputs, last = recurrence(driven.transpose(0, 1), weight, output, cell)
    return outputs.transpose(0, 1), last


def _with_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _with_matrices(weight: Tensor) -> Tensor:
    """Return weights of which each client's are contiguous; clients may share them."""
    return weight if weight[0].is_contiguous() else weight.contiguous()
