"""The terms of Client2Vec's loss by kernels, against PyTorch's operations.

They run on a GPU, or slowly on the CPU in Triton's interpreter: ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.engine.settings import Machine, Training
from equipoise.methods import build as method_named
from equipoise.methods import client2vec
from equipoise.models import build
from equipoise.optimizers import optimizer_named
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.gpu import needs_gpu
from tests.models.stacks import CLIENTS, DEVICE, normal
from tests.rounds import play

pytest.importorskip("triton", reason="needs Triton, which only PyTorch's GPU builds bring")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU that PyTorch can use, or TRITON_INTERPRET=1", allow_module_level=True)

from equipoise.models import index_kernels

WEIGHT = 0.7
SMALL = {"channels": (4, 3), "pools": 1, "hidden": (5,)}
# Samples, classes and indices.
SHAPES = [(1, 2, 1), (5, 10, 100), (9, 3, 7), (4, 1, 16), (3, 1000, 33), (2, 17, 1030)]


def plain(values, scores, others, products, weight=WEIGHT):
    own, other = scores.log_softmax(1), others.log_softmax(1)
    terms = (own.exp() * (own - other)).sum(1)
    return values + weight * (terms if products is None else terms + products.abs().mean(1))


def ours(values, scores, others, products, weight=WEIGHT):
    assert index_kernels.fit(values, scores, others, products)
    return index_kernels.add_terms(values, scores, others, products, weight)


def given(samples, classes, indices, clients=CLIENTS):
    """Return losses, the scores of both heads, and products, some of which are zero."""
    shapes = [(samples,), (samples, classes), (samples, classes), (samples, indices)]
    made = [3 * normal(clients, *shape, seed=seed) for seed, shape in enumerate(shapes)]
    made[3][:, :, ::5] = 0.0
    return made


def value_and_gradients(terms, inputs, towards):
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    y = terms(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, towards.to(y.dtype))]


def assert_near(found, wanted):
    for own, other in zip(found, wanted, strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=1e-5)


def without_products(terms):
    return lambda values, scores, others: terms(values, scores, others, None)


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_terms_and_their_gradients(shape, orthogonal):
    inputs, towards = given(*shape), normal(CLIENTS, shape[0], seed=9)
    own, other = ours, plain
    if not orthogonal:
        inputs, own, other = inputs[:3], without_products(ours), without_products(plain)
    found = value_and_gradients(vmap(own), inputs, towards)
    wanted = value_and_gradients(vmap(other), [tensor.double() for tensor in inputs], towards)
    assert_near(found, wanted)
    for client in range(CLIENTS):
        # Copies, because tensors that are aligned in memory have other programs.
        rows = [tensor[client].clone() for tensor in inputs]
        alone = value_and_gradients(own, rows, towards[client])
        assert all(
            torch.equal(one, all_[client]) for one, all_ in zip(alone, found, strict=True)
        ), "a client has the same bits alone"


def test_all_classes_of_a_row_are_used_with_large_scores():
    values, scores, others, products = given(4, 20, 3)
    inputs = [values, 60 * scores, 20 * others - 500, 1e4 * products]
    towards = normal(CLIENTS, 4, seed=9)
    found = value_and_gradients(vmap(ours), inputs, towards)
    wanted = value_and_gradients(vmap(plain), [tensor.double() for tensor in inputs], towards)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=2e-4, atol=1e-4)


def test_clients_along_any_axis_and_rows_apart_in_memory():
    inputs, towards = given(6, 5, 7), normal(CLIENTS, 6, seed=9)
    wanted = value_and_gradients(vmap(ours), inputs, towards)
    odd = [tensor.transpose(1, -1).contiguous().transpose(1, -1) for tensor in inputs]
    odd[0] = inputs[0].t().contiguous()
    odd[1] = torch.stack([odd[1], odd[1]], -1)[..., 0]
    found = value_and_gradients(vmap(ours, in_dims=(1, 0, 0, 0)), odd, towards)
    found[1] = found[1].t()
    assert all(torch.equal(own, other) for own, other in zip(found, wanted, strict=True))


def test_scores_that_all_clients_share():
    values, scores, others, products = given(4, 5, 3)
    dims = (0, 0, None, 0)
    inputs, towards = [values, scores, others[0], products], normal(CLIENTS, 4, seed=9)
    found = value_and_gradients(vmap(ours, in_dims=dims), inputs, towards)
    wanted = value_and_gradients(
        vmap(plain, in_dims=dims), [tensor.double() for tensor in inputs], towards
    )
    assert_near(found, wanted)


@pytest.mark.parametrize("counted", [6, 4])
def test_one_gradient_for_all_samples(counted):
    """The gradient of a sum is a single number in memory, and padding has the gradient zero."""
    inputs, towards = given(6, 5, 7), torch.tensor(2.0, device=DEVICE)

    def total(terms):
        return lambda *leaves: vmap(terms)(*leaves)[:, :counted].sum()

    found = value_and_gradients(total(ours), inputs, towards)
    wanted = value_and_gradients(total(plain), [each.double() for each in inputs], towards)
    assert_near(found, wanted)


def test_padding_does_not_change_other_rows():
    inputs, towards = given(6, 5, 7), normal(CLIENTS, 6, seed=9)
    found = value_and_gradients(vmap(ours), inputs, towards)
    for tensor in inputs:
        tensor[:, 4:] = 1e30
    changed = value_and_gradients(vmap(ours), inputs, towards)
    for own, other in zip(changed, found, strict=True):
        assert torch.equal(own[:, :4], other[:, :4])


def test_no_samples():
    inputs = given(0, 5, 7)
    found = value_and_gradients(vmap(ours), inputs, normal(CLIENTS, 0))
    assert [tensor.shape for tensor in found[1:]] == [tensor.shape for tensor in inputs]


def test_gradients_inside_vmap_and_second_derivatives():
    inputs = given(4, 5, 7)

    def of_gradient(terms):
        def first(values, scores, others, products):
            def value(scores, others, products):
                return terms(values, scores, others, products).square().sum()

            found = grad(value, argnums=(0, 1, 2))(scores, others, products)
            return sum(each.sin().sum() for each in found)

        return vmap(grad(first, argnums=(0, 1, 2, 3)))

    found = of_gradient(ours)(*inputs)
    wanted = of_gradient(plain)(*(tensor.double() for tensor in inputs))
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-3, atol=1e-3)


def test_other_types_and_too_many_classes_do_not_fit(monkeypatch):
    values, scores, others, products = (tensor[0] for tensor in given(4, 5, 7))
    assert index_kernels.fit(values, scores, others, products)
    assert not index_kernels.fit(values.double(), scores, others, products)
    assert not index_kernels.fit(values, scores, others.bfloat16(), products)
    assert not index_kernels.fit(values, scores, others, products[:, :0])
    assert not index_kernels.fit(values, scores, others[:, :4], products)
    assert not index_kernels.fit(values, scores[..., None], others[..., None], products)
    monkeypatch.setattr(index_kernels, "_SCORES", 4)
    assert not index_kernels.fit(values, scores, others, products)


class Counted(TorchDispatchMode):
    """Count the operations that write memory."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        allocates = func.name().startswith(("aten::empty", "aten::new_empty"))
        views = any(result.alias_info is not None for result in func._schema.returns)
        self.count += not allocates and not views and "unsafe_view" not in func.name()
        return made


def test_how_many_operations_the_terms_take(monkeypatch):
    launches = []

    class Listed:
        def __getitem__(self, grid):
            launches.append(grid)
            return lambda *inputs, **options: None

    for name in ("_add_terms", "_term_gradients", "_add_head_terms", "_head_term_gradients"):
        monkeypatch.setattr(index_kernels, name, Listed())
    inputs, (trained, index) = given(4, 5, 7), given_head(4, 5, 7, 6)
    towards, counts = normal(CLIENTS, 4), []
    cases = [(plain, inputs), (ours, inputs)]
    cases += [(with_index(terms, index), trained) for terms in (plain_head, our_head)]
    for terms, tensors in cases:
        launches.clear()
        with Counted() as counted:
            value_and_gradients(vmap(terms), tensors, towards)
        counts.append((counted.count, len(launches)))
    assert counts[1] == counts[3] == (0, 2)
    assert counts[0] >= (20, 0)
    assert counts[2] >= (28, 0)


# ---- with the products ---------------------------------------------------------------------------

# Samples, classes, indices and the width of the projection.
HEADS = [(1, 2, 1, 3), (5, 10, 100, 70), (17, 3, 7, 65), (4, 1, 16, 64), (33, 100, 130, 20)]


def plain_head(values, scores, projected, weight, bias, index=None):
    products = None if index is None else projected @ index.T
    return plain(values, scores, projected @ weight.T + bias, products)


def our_head(values, scores, projected, weight, bias, index=None):
    assert index_kernels.fit_head(values, scores, projected, weight, index)
    return index_kernels.add_head_terms(values, scores, projected, (weight, bias), index, WEIGHT)


def given_head(samples, classes, indices, width):
    """Return what is trained, and the index."""
    shapes = [(samples,), (samples, classes), (samples, width), (classes, width), (classes,)]
    made = [normal(CLIENTS, *shape, seed=seed) for seed, shape in enumerate(shapes)]
    return made, normal(indices, width, seed=8)


def with_index(terms, index):
    return lambda *inputs: terms(*inputs, None if index is None else index.to(inputs[0].dtype))


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch):
    """Otherwise products on a GPU may differ by more than float32 rounds."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_terms_with_products_and_their_gradients(shape, orthogonal):
    inputs, index = given_head(*shape)
    index, towards = index if orthogonal else None, normal(CLIENTS, shape[0], seed=9)
    own = with_index(our_head, index)
    found = value_and_gradients(vmap(own), inputs, towards)
    wanted = value_and_gradients(
        vmap(with_index(plain_head, index)), [tensor.double() for tensor in inputs], towards
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    for client in range(CLIENTS):
        # Copies, because tensors that are aligned in memory have other programs.
        rows = [tensor[client].clone() for tensor in inputs]
        alone = value_and_gradients(own, rows, towards[client])
        assert all(
            torch.equal(one, all_[client]) for one, all_ in zip(alone, found, strict=True)
        ), "a client has the same bits alone"


def test_tensors_with_products_may_lie_anywhere_in_memory():
    inputs, index = given_head(6, 5, 7, 9)
    towards = normal(CLIENTS, 1, seed=9).expand(CLIENTS, 6)
    wanted = value_and_gradients(vmap(with_index(our_head, index)), inputs, towards)
    odd = [tensor.transpose(1, -1).contiguous().transpose(1, -1) for tensor in inputs]
    for strange in (index.t().contiguous().t(), torch.stack([index, index], 1)[:, 0]):
        found = value_and_gradients(vmap(with_index(our_head, strange)), odd, towards)
        assert all(torch.equal(own, other) for own, other in zip(found, wanted, strict=True))


def test_clients_may_have_an_index_of_their_own():
    inputs, index = given_head(6, 5, 7, 9)
    indices = torch.stack([index * (client + 1) for client in range(CLIENTS)])
    leaves = [tensor.requires_grad_() for tensor in inputs]
    results = []
    for terms in (our_head, plain_head):
        y = vmap(terms)(*leaves, indices)
        results.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for own, other in zip(*results, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_gradients_with_products_inside_vmap_and_second_derivatives():
    inputs, index = given_head(4, 5, 7, 6)

    def of_gradient(terms):
        def first(*inputs):
            def value(*inputs):
                return with_index(terms, index)(*inputs).square().sum()

            found = grad(value, argnums=(1, 2, 3, 4))(*inputs)
            return sum(each.sin().sum() for each in found)

        return vmap(grad(first, argnums=(0, 1, 2, 3, 4)))

    found = of_gradient(our_head)(*inputs)
    wanted = of_gradient(plain_head)(*(tensor.double() for tensor in inputs))
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-3, atol=1e-3)


def test_no_samples_with_products():
    inputs, index = given_head(0, 5, 7, 6)
    found = value_and_gradients(vmap(with_index(our_head, index)), inputs, normal(CLIENTS, 0))
    assert [tensor.shape for tensor in found[1:]] == [tensor.shape for tensor in inputs]
    assert all(not tensor.any() for tensor in found[4:])


def test_other_types_and_many_classes_do_not_fit_with_products(monkeypatch):
    inputs, index = given_head(4, 5, 7, 6)
    values, scores, projected, weight, _ = (tensor[0] for tensor in inputs)
    assert index_kernels.fit_head(values, scores, projected, weight, index)
    assert not index_kernels.fit_head(values.double(), scores, projected, weight, index)
    assert not index_kernels.fit_head(values, scores, projected.bfloat16(), weight, index)
    assert not index_kernels.fit_head(values, scores[:, :4], projected, weight, index)
    assert not index_kernels.fit_head(values, scores, projected, weight, index[:0])
    assert not index_kernels.fit_head(values, scores[..., None], projected, weight, index)
    for limit, below in (("_FEW_CLASSES", 4), ("_FEW_SAMPLES", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(index_kernels, limit, below)
            assert not index_kernels.fit_head(values, scores, projected, weight, index)


# ---- in the method -------------------------------------------------------------------------------


def trained(precision, chunk, **options):
    """Two steps of clients with 1, 3 and 5 samples, so that batches are padded."""
    method = method_named("client2vec", uses=["training"], weight=WEIGHT, **options)
    module = method.extend(build("bncnn", shape=(2, 5, 5), classes=4, **SMALL), (2, 5, 5), 0)
    return play(
        method,
        images(sizes=[1, 3, 5]),
        module.double(),
        [np.arange(3)],
        chunk=chunk,
        precision=precision,
        batch_size=4,
        epochs=1,
        optimizer=optimizer_named("sgd", lr=0.05),
    ).model


@pytest.fixture
def calls(monkeypatch):
    """Use the kernels on this device, and list the functions that are called."""
    made = []

    def listed(name, function):
        def call(*inputs):
            made.append(name)
            return function(*inputs)

        return call

    for name in ("add_terms", "add_head_terms"):
        monkeypatch.setattr(index_kernels, name, listed(name, getattr(index_kernels, name)))
    monkeypatch.setattr(client2vec, "_kernels_for", lambda scores: index_kernels)
    return made


on_a_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU the last test carries out more rounds"
)


@on_a_cpu
@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize(
    ("precision", "few", "wanted", "error"),
    [
        ("float32", 128, "add_head_terms", 1e-5),
        ("float32", 3, "add_terms", 1e-5),
        ("bfloat16", 128, "add_terms", 1e-2),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_round_equals_plain_operations(
    chunk, precision, few, wanted, error, orthogonal, calls, monkeypatch
):
    monkeypatch.setattr(index_kernels, "_FEW_CLASSES", few)
    found = trained(precision, chunk, orthogonal=orthogonal)
    assert set(calls) == {wanted}
    calls.clear()
    monkeypatch.setattr(client2vec, "_kernels_for", lambda scores: None)
    assert distance(found, trained(precision, chunk, orthogonal=orthogonal)) <= error
    assert not calls


@on_a_cpu
@pytest.mark.parametrize("host", ["ditto", "fedrep", "perfedavg"])
def test_hosts_with_personal_parts_and_gradients_of_their_own(host, calls, monkeypatch):
    found = trained("float32", 3, host=host)
    assert set(calls) == {"add_head_terms"}
    monkeypatch.setattr(client2vec, "_kernels_for", lambda scores: None)
    assert distance(found, trained("float32", 3, host=host)) <= 1e-5


def test_float64_is_left_to_pytorch(calls):
    trained("float64", 3)
    assert not calls


@needs_gpu
@pytest.mark.parametrize("replay", [True, False])
def test_a_gpu_gives_the_cpus_numbers_in_float32(replay):
    def trained(device, **machine):
        method = method_named("client2vec", uses=["training"], weight=WEIGHT)
        module = build("bncnn", shape=(2, 5, 5), classes=4, **SMALL).double()
        trainer = Trainer(
            images(),
            method,
            method.extend(module, (2, 5, 5), 0),
            Training(
                rounds=4,
                cohort=10,
                batch_size=8,
                epochs=1,
                optimizer=optimizer_named("sgd", lr=0.05),
            ),
            Machine(device=device, **machine),
            Evaluation(every=0),
            seed=0,
        )
        trainer.run()
        return {name: tensor.cpu() for name, tensor in trainer.state.model.items()}

    wanted = trained("cpu", precision="float64", chunk=1)
    found = trained("cuda", precision="float32", chunk=10, replay=replay, tf32=False)
    assert distance(found, wanted) <= 1e-4
    again = trained("cuda", precision="float32", chunk=10, replay=replay, tf32=False)
    assert all(torch.equal(found[name], again[name]) for name in found)
