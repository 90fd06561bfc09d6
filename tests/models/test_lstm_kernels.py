"""The GPU kernels of LSTM layers against plain operations in float64 and against ``nn.LSTM``.

They run on a GPU, or slowly on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from equipoise.engine.settings import Machine, Training
from equipoise.federation import Federation
from equipoise.methods import build as method_named
from equipoise.models import build, recurrent
from equipoise.models.layers import convert
from equipoise.models.recurrent import recurrence, steps_of_layer
from equipoise.optimizers import Sgd
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from tests.engine.comparison import distance
from tests.engine.gpu import needs_gpu
from tests.models.stacks import operations

pytest.importorskip("triton", reason="needs Triton, which only PyTorch's GPU builds bring")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU that PyTorch can use, or TRITON_INTERPRET=1", allow_module_level=True)

from equipoise.models import lstm_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIENTS, STEPS = 2, 3
# Samples and hidden units: fewer and more than tiles hold, whole tiles, and single ones.
SIZES = pytest.mark.parametrize(
    ("samples", "hidden"), [(5, 32), (1, 1), (17, 20), (70, 3)], ids=str
)


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float().to(DEVICE)


def given(samples, hidden, clients=CLIENTS, steps=STEPS):
    """What the inputs add, the weights, the first output and the first cell."""
    return (
        normal(clients, steps, samples, 4 * hidden),
        normal(clients, 4 * hidden, hidden, seed=1) / hidden**0.5,
        normal(clients, samples, hidden, seed=2),
        normal(clients, samples, hidden, seed=3),
    )


def plain(driven, weight, output, cell):
    """The recurrence of one client after another, in plain operations."""
    made = [recurrence(*one) for one in zip(driven, weight, output, cell, strict=True)]
    return tuple(torch.stack(parts) for parts in zip(*made, strict=True))


def fused(driven, weight, output, cell):
    return lstm_kernels.StackedRecurrence.apply(
        driven, weight, output, cell, torch.is_grad_enabled()
    )[:2]


def with_gradients(function, tensors, uppers, **options):
    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    made = function(*tensors)
    return *made, *torch.autograd.grad(made, tensors, uppers, **options)


def close(found, wanted, tolerance=1e-5):
    for own, other in zip(found, wanted, strict=True):
        scale = max(float(other.detach().abs().max()), 1e-3)
        torch.testing.assert_close(
            own.double() / scale, other.double() / scale, rtol=tolerance, atol=tolerance
        )


@SIZES
def test_outputs_and_gradients_are_those_of_plain_operations_in_float64(samples, hidden):
    tensors = given(samples, hidden)
    uppers = normal(CLIENTS, STEPS, samples, hidden, seed=4), normal(*tensors[3].shape, seed=5)
    found = with_gradients(fused, tensors, uppers)
    wanted = with_gradients(
        plain, [t.double() for t in tensors], [upper.double() for upper in uppers]
    )
    close(found, wanted)


@pytest.mark.parametrize("used", [0, 1], ids=["outputs", "last cell"])
def test_a_loss_may_use_outputs_or_the_last_cell_alone(used):
    tensors = given(5, 8)
    upper = normal(*(tensors[3].shape if used else (CLIENTS, STEPS, 5, 8)), seed=4)
    found, wanted = (
        with_gradients(lambda *given, use=use: [use(*given)[used]], own, [upper.to(own[0].dtype)])
        for use, own in ((fused, tensors), (plain, [tensor.double() for tensor in tensors]))
    )
    close(found, wanted)


def test_no_gradients_by_cells_and_gates_are_written():
    tensors = [tensor.requires_grad_() for tensor in given(5, 8)]
    made = fused(*tensors)
    called = operations(lambda: torch.autograd.grad(made, tensors, made))
    assert "aten::bmm" in called
    assert "aten::zeros" not in called


def test_large_and_small_arguments_of_tanh():
    """One unit whose gates are open: the cell is the tangent of what drives it."""
    driven = torch.full((1, 1, 7, 4), 40.0, device=DEVICE)
    values = [1e-6, -0.01, 0.29, -0.31, 3.0, -50.0, 200.0]
    driven[0, 0, :, 2] = torch.tensor(values, device=DEVICE)
    nothing = torch.zeros(1, 7, 1, device=DEVICE)
    _, cell = fused(driven, torch.zeros(1, 4, 1, device=DEVICE), nothing, nothing)
    wanted = torch.tensor(values, dtype=torch.float64).tanh()
    torch.testing.assert_close(cell.flatten().cpu().double(), wanted, rtol=5e-7, atol=0)


def test_what_is_not_a_number_stays_so():
    driven, *others = given(3, 2)
    driven[1, 1, 0, 3] = float("nan")
    outputs, _ = fused(driven, *others)
    assert outputs[1, 1:, 0].isnan().any()
    assert not outputs[1, :, 1:].isnan().any()
    assert not outputs[0].isnan().any()


def test_the_same_bits_twice_and_whoever_shares_the_stack():
    tensors = given(5, 32)
    uppers = normal(CLIENTS, STEPS, 5, 32, seed=4), normal(CLIENTS, 5, 32, seed=5)
    found, again = (with_gradients(fused, tensors, uppers) for _ in range(2))
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one, other)
    alone = with_gradients(fused, [t[1:2] for t in tensors], [upper[1:2] for upper in uppers])
    outputs, last, of_driven, of_weight, of_output, of_cell = zip(alone, found, strict=True)
    for own, stacked in (outputs, last, of_driven, of_cell):
        assert torch.equal(own[0], stacked[1])
    # Products of PyTorch, which may add in another order for another number of clients.
    for own, stacked in (of_weight, of_output):
        torch.testing.assert_close(own[0], stacked[1], rtol=1e-6, atol=1e-6)


def test_inputs_may_lie_in_memory_in_any_order():
    tensors = given(5, 8)
    uppers = normal(CLIENTS, STEPS, 5, 8, seed=4), normal(CLIENTS, 5, 8, seed=5)
    wanted = with_gradients(fused, tensors, uppers)

    def strange(driven, weight, output, cell):
        steps_first = driven.transpose(0, 1).contiguous().transpose(0, 1)
        others = (
            t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (weight, output, cell)
        )
        outputs, last = fused(steps_first, *others)
        return outputs.transpose(2, 3).contiguous().transpose(2, 3), last

    close(with_gradients(strange, tensors, uppers), wanted, 1e-6)


@pytest.mark.parametrize("shared", ["nothing", "weights", "states"])
def test_clients_stacked_by_vmap(shared):
    driven, weight, output, cell = given(5, 8)
    dims = {"nothing": (0, 0, 0, 0), "weights": (0, None, 0, 0), "states": (0, 0, None, None)}[
        shared
    ]
    tensors = [
        t if dim == 0 else t[0] for t, dim in zip((driven, weight, output, cell), dims, strict=True)
    ]

    def of_one(*one):
        return tuple(made[0] for made in fused(*(tensor.unsqueeze(0) for tensor in one)))

    def one_by_one(*stacked):
        return plain(
            *(
                t if dim == 0 else t.expand(CLIENTS, *t.shape)
                for t, dim in zip(stacked, dims, strict=True)
            )
        )

    uppers = normal(CLIENTS, STEPS, 5, 8, seed=4), normal(CLIENTS, 5, 8, seed=5)
    close(
        with_gradients(vmap(of_one, in_dims=dims), tensors, uppers),
        with_gradients(one_by_one, tensors, uppers),
    )
    with torch.no_grad():
        close(vmap(of_one, in_dims=dims)(*tensors), one_by_one(*tensors))


def test_second_derivatives_go_through_plain_operations():
    tensors = [t.double() for t in given(2, 3, clients=2, steps=3)]

    def seconds(function, dtype):
        own = [t.to(dtype).requires_grad_() for t in tensors]
        outputs, cell = function(*own)
        firsts = torch.autograd.grad(outputs.pow(3).sum() + cell.sum(), own, create_graph=True)
        return torch.autograd.grad(sum(first.square().sum() for first in firsts), own)

    close(seconds(fused, torch.float32), seconds(plain, torch.float64), 1e-4)


def test_a_gradient_inside_vmap():
    tensors = given(3, 4)

    def loss(function):
        return lambda *one: sum(
            made.square().sum() for made in function(*(tensor.unsqueeze(0) for tensor in one))
        )

    found = vmap(grad(loss(fused), argnums=(0, 1, 2, 3)))(*tensors)
    wanted = [
        torch.func.grad(loss(plain), argnums=(0, 1, 2, 3))(*one)
        for one in zip(*tensors, strict=True)
    ]
    close(found, [torch.stack(parts) for parts in zip(*wanted, strict=True)])


@needs_gpu
def test_bfloat16_keeps_cells_in_float32():
    tensors = given(5, 32)
    uppers = normal(CLIENTS, STEPS, 5, 32, seed=4), normal(CLIENTS, 5, 32, seed=5)
    lowered = [t.bfloat16() for t in tensors]
    found = with_gradients(fused, lowered, [upper.bfloat16() for upper in uppers])
    assert {part.dtype for part in found} == {torch.bfloat16}
    wanted = with_gradients(plain, [t.double() for t in lowered], [u.double() for u in uppers])
    close(found, wanted, 0.05)
    assert lstm_kernels.StackedRecurrence.apply(*lowered, True)[2].dtype == torch.float32


# ---- in models -----------------------------------------------------------------------------------


@pytest.fixture
def everywhere(monkeypatch):
    """Let LSTM layers use the kernels on this device, and count how often they did."""
    calls = []

    def chosen(driven):
        if driven.dtype == torch.float64:
            return None
        calls.append(driven.shape)
        return lstm_kernels

    monkeypatch.setattr(recurrent, "lstm_kernels", chosen)
    return calls


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), pytest.param(torch.bfloat16, 0.05, marks=needs_gpu)],
    ids=str,
)
def test_one_client_of_any_precision(dtype, tolerance, everywhere):
    """As under autocast: what the inputs add is lowered, and the parameters are not."""
    driven, weight, output, cell = (tensor[0] for tensor in given(5, 8))
    made = steps_of_layer(driven.to(dtype), weight, output, cell)
    assert made[0].dtype == dtype
    close(made, recurrence(*(t.double() for t in (driven, weight, output, cell))), tolerance)
    assert len(everywhere) == 1


@pytest.mark.parametrize(
    "options", [{"num_layers": 2}, {"bidirectional": True}, {"bias": False}], ids=str
)
def test_stacked_layers_are_nn_lstm(options, everywhere):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = nn.LSTM(3, 32, batch_first=True, **options)
    clients = [copy.deepcopy(theirs).to(DEVICE) for _ in range(CLIENTS)]
    with torch.no_grad():
        for number, client in enumerate(clients):
            for weight in client.parameters():
                weight.mul_(1 + 0.2 * number)
    stacked = {
        name: torch.stack([dict(client.named_parameters())[name].detach() for client in clients])
        for name, _ in theirs.named_parameters()
    }
    stacked = {name: tensor.requires_grad_() for name, tensor in stacked.items()}
    x, module = normal(CLIENTS, 5, STEPS, 3), convert(copy.deepcopy(theirs)).to(DEVICE)

    def flat(outcome):
        return outcome[0], *outcome[1]

    found = vmap(lambda own, x: flat(functional_call(module, own, (x,))))(stacked, x)
    assert len(everywhere) == (2 if options != {"bias": False} else 1)
    doubles = [client.double() for client in clients]
    made = [flat(client(own.double())) for client, own in zip(doubles, x, strict=True)]
    wanted = [torch.stack(parts) for parts in zip(*made, strict=True)]
    close(found, wanted)
    gradients = torch.autograd.grad(sum(part.sin().sum() for part in found), list(stacked.values()))
    sum(part.sin().sum() for part in wanted).backward()
    close(
        gradients,
        [torch.stack([dict(c.named_parameters())[name].grad for c in doubles]) for name in stacked],
    )


def text():
    """Two clients of unequal size whose samples are three characters."""
    draws = np.random.default_rng(0)
    clients = np.repeat(np.arange(2), [5, 3])
    x, y = (torch.from_numpy(draws.integers(0, 9, shape)) for shape in ((8, 3), (8,)))
    return Federation.from_arrays(x, y, clients=clients, splits=(1.0, 0.0, 0.0), classes=9)


def trained(device, *, rounds=1, **machine):
    trainer = Trainer(
        text(),
        method_named("fedavg"),
        build("charlstm", shape=(3,), classes=9, embedding=3, hidden=4).double(),
        Training(rounds=rounds, batch_size=4, epochs=1, optimizer=Sgd(lr=0.5)),
        Machine(device=device, **machine),
        Evaluation(every=0),
        seed=0,
    )
    trainer.run()
    return {name: tensor.cpu() for name, tensor in trainer.state.model.items()}


def test_a_round_of_unequal_clients_is_that_in_float64(everywhere):
    wanted = trained("cpu", precision="float64", chunk=1)
    assert not everywhere
    assert distance(trained(DEVICE, precision="float32", chunk=2), wanted) <= 1e-5
    assert everywhere


@needs_gpu
@pytest.mark.parametrize("replay", [True, False])
def test_a_gpu_gives_the_cpus_numbers(replay):
    wanted = trained("cpu", rounds=4, precision="float64", chunk=1)
    options = {"rounds": 4, "precision": "float32", "chunk": 2, "replay": replay, "tf32": False}
    found, again = trained("cuda", **options), trained("cuda", **options)
    assert distance(found, wanted) <= 1e-4
    assert all(torch.equal(found[name], again[name]) for name in found)
