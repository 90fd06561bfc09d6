"""Frozen modules: folding clients into the batch changes only the number of calls."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from equipoise.errors import InputError
from equipoise.models.dropout import Dropout
from equipoise.models.frozen import Frozen, digest_of, frozen_names, plain_attention, transforms
from equipoise.models.layers import convert

CLIENTS, SAMPLES, TOKENS, WIDTH = 3, 4, 5, 8


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class FusedAttention(nn.Module):
    """Attention by PyTorch's fused kernel, which has no ``vmap`` rule and no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


class Calls(nn.Module):
    """Returns batches unchanged, and records their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return x


def transformer() -> Frozen:
    torch.manual_seed(3)
    layers = [
        FusedAttention(),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        FusedAttention(),
    ]
    return Frozen(nn.Sequential(Calls(), *layers)).double()


def convolutional() -> Frozen:
    torch.manual_seed(3)
    norm = nn.BatchNorm2d(6)
    nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
    layers = [
        nn.Unflatten(1, (1, TOKENS)),
        nn.Conv2d(1, 6, 3),
        norm,
        nn.Dropout(0.5),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    return Frozen(nn.Sequential(Calls(), *layers)).double()


KINDS = pytest.mark.parametrize("make", [transformer, convolutional])


@pytest.fixture(autouse=True)
def own_generator():
    with torch.random.fork_rng():
        yield


@KINDS
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_folded_clients_are_as_clients_one_by_one(make, axis):
    frozen, x = make(), normal(CLIENTS, SAMPLES, TOKENS, WIDTH).requires_grad_()
    folded = vmap(frozen, in_dims=axis)(x.movedim(0, axis))
    upper = normal(*folded.shape, seed=1)
    (found,) = torch.autograd.grad(folded, x, upper)
    assert frozen.module[0].shapes == [(CLIENTS * SAMPLES, TOKENS, WIDTH)]
    alone = torch.stack([frozen(own) for own in x])
    (wanted,) = torch.autograd.grad(alone, x, upper)
    torch.testing.assert_close(folded, alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert wanted.abs().max() > 1e-3


def test_learned_inputs_beside_data_that_clients_share():
    """Prompts of each client, appended to the same samples, as in prompt learning."""
    frozen = transformer()
    x, prompts = normal(SAMPLES, TOKENS, WIDTH), normal(CLIENTS, 2, WIDTH, seed=1).requires_grad_()

    def loss(prompts: Tensor, x: Tensor) -> Tensor:
        return frozen(torch.cat([x, prompts.expand(len(x), -1, -1)], 1))[:, 0].square().sum()

    losses = vmap(loss, in_dims=(0, None))(prompts, x)
    (found,) = torch.autograd.grad(losses.sum(), prompts)
    assert len(frozen.module[0].shapes) == 1
    alone = torch.stack([loss(own, x) for own in prompts])
    (wanted,) = torch.autograd.grad(alone.sum(), prompts)
    torch.testing.assert_close(losses, alone, rtol=1e-12, atol=0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


class Sums(nn.Module):
    """Several inputs and several outputs."""

    def forward(self, x: Tensor, y: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        return (x + y) * scale, (x * y).sum(1)


def test_several_inputs_and_outputs():
    frozen = Frozen(Sums())
    x, y, scale = (
        normal(CLIENTS, SAMPLES, 2),
        normal(SAMPLES, 2, seed=1),
        normal(SAMPLES, CLIENTS, 2, seed=2),
    )
    first, second = vmap(lambda x, scale: frozen(x, y, scale=scale), in_dims=(0, 1))(x, scale)
    torch.testing.assert_close(first, (x + y) * scale.movedim(1, 0))
    torch.testing.assert_close(second, (x * y).sum(-1))


def test_inputs_that_no_client_owns_are_computed_once():
    frozen, x = transformer(), normal(SAMPLES, TOKENS, WIDTH)
    found = vmap(lambda scale: scale * frozen(x))(torch.ones(CLIENTS))
    assert frozen.module[0].shapes == [(SAMPLES, TOKENS, WIDTH)]
    torch.testing.assert_close(found[2], frozen(x))


def gradient_norm(frozen: Frozen, x: Tensor) -> Tensor:
    """A loss with a gradient inside, whose differentiation needs second derivatives."""
    return grad(lambda x: frozen(x).square().sum())(x).square().sum()


@pytest.mark.parametrize("make", [transformer])
def test_second_derivatives_of_a_loss_that_takes_a_gradient(make):
    frozen, x = make(), normal(CLIENTS, SAMPLES, TOKENS, WIDTH).requires_grad_()
    losses = vmap(lambda x: gradient_norm(frozen, x))(x)
    (found,) = torch.autograd.grad(losses.sum(), x)
    one_by_one = []
    for own in x:
        with plain_attention():
            (inner,) = torch.autograd.grad(frozen(own).square().sum(), own, create_graph=True)
        one_by_one.append(inner.square().sum())
    (wanted,) = torch.autograd.grad(sum(one_by_one), x)  # type: ignore[arg-type]
    torch.testing.assert_close(losses, torch.stack(one_by_one), rtol=1e-12, atol=0)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    (alone,) = torch.autograd.grad(gradient_norm(frozen, x[1]), x)
    torch.testing.assert_close(alone[1], wanted[1], rtol=1e-11, atol=1e-12)


def test_second_derivatives_by_autograd_alone_need_plain_attention():
    frozen, x = transformer(), normal(CLIENTS, SAMPLES, TOKENS, WIDTH).requires_grad_()
    with plain_attention():
        (first,) = torch.autograd.grad(vmap(frozen)(x).square().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(first.square().sum(), x)
    (wanted,) = torch.autograd.grad(sum(gradient_norm(frozen, own) for own in x), x)  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_other_transforms_than_one_vmap_agree_too():
    frozen, x = transformer(), normal(CLIENTS, 2, SAMPLES, TOKENS, WIDTH)
    torch.testing.assert_close(vmap(vmap(frozen))(x)[1, 1], frozen(x[1, 1]), rtol=0, atol=1e-12)
    gradients = vmap(grad(lambda x: frozen(x).square().sum()))(x[:, 0])
    (wanted,) = torch.autograd.grad(
        frozen(own := x[1, 0].clone().requires_grad_()).square().sum(), own
    )
    torch.testing.assert_close(gradients[1], wanted, rtol=0, atol=1e-12)


def test_weights_that_someone_has_stacked_are_still_each_clients_own():
    frozen, x = transformer(), normal(CLIENTS, SAMPLES, TOKENS, WIDTH)
    weights = normal(CLIENTS, *frozen.module[3].weight.shape, seed=1)

    def output(weight: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(frozen, {"module.3.weight": weight}, (x,))

    found = vmap(output)(weights, x)
    for k in range(CLIENTS):
        torch.testing.assert_close(found[k], output(weights[k], x[k]), rtol=0, atol=1e-12)


@KINDS
def test_the_backward_pass_keeps_what_that_of_an_ordinary_batch_keeps(make):
    frozen, x = make(), normal(CLIENTS, SAMPLES, TOKENS, WIDTH).requires_grad_()

    def kept(output) -> int:
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output()
        return sum(sizes.values())

    assert kept(lambda: vmap(frozen)(x)) == kept(lambda: frozen(x.flatten(0, 1))) > 0


def test_nothing_moves_and_nothing_drops():
    frozen = Frozen(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)))
    around = nn.Sequential(frozen, nn.BatchNorm1d(2)).train()
    assert not any(p.requires_grad for p in frozen.parameters())
    assert not any(part.training for part in frozen.modules())
    assert around[1].training
    x = normal(6, 2, dtype=torch.float32)
    torch.testing.assert_close(frozen(x), x / (1 + 1e-5) ** 0.5)
    assert torch.equal(frozen.module[0].running_mean, torch.zeros(2))


def test_convert_leaves_it_as_it_is():
    frozen = Frozen(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Linear(2, 2))
    )
    kinds = [type(part) for part in frozen.modules()]
    converted = convert(nn.Sequential(frozen, nn.Sequential(frozen), nn.Dropout(0.5)))
    assert [type(part) for part in frozen.modules()] == kinds
    assert converted[0] is frozen is converted[1][0]
    assert type(converted[2]) is Dropout


def test_lowering_casts_inputs_and_outputs_and_lets_gradients_through():
    exact, x = transformer(), normal(CLIENTS, SAMPLES, TOKENS, WIDTH)
    lowered = copy.deepcopy(exact).lower(torch.bfloat16)
    assert {p.dtype for p in lowered.parameters()} == {torch.bfloat16}
    results = []
    for frozen in (exact, lowered):
        own = x.clone().requires_grad_()
        y = vmap(frozen)(own)
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), own)))
    for wanted, found in zip(*results, strict=True):
        assert found.dtype == torch.float64
        assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.02


class Scaled(nn.Module):
    """Converts bytes to floating point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_bytes_become_the_type_the_module_was_given_with():
    frozen, x = Frozen(Scaled()), torch.tensor([[3], [5]], dtype=torch.uint8)
    assert frozen(x).dtype == torch.float32
    assert frozen.lower(torch.bfloat16)(x).dtype == torch.float32
    assert frozen.to(torch.float64)(x).dtype == torch.float64
    assert copy.deepcopy(frozen).lower(torch.float16)(x).dtype == torch.float64
    assert frozen(x).tolist() == [[1.5], [2.5]]


@pytest.mark.parametrize("dtype", [torch.int8, "bfloat16"])
def test_other_types_are_refused(dtype):
    with pytest.raises(
        InputError, match="cannot be lowered to .*int8|cannot be lowered to 'bfloat16'"
    ):
        Frozen(nn.Linear(2, 2)).lower(dtype)


def test_transforms_are_listed_from_the_outside():
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.extend(str(kind).rpartition(".")[2] for kind in transforms())
        return x.sum()

    vmap(grad(note))(torch.ones(2, 3))
    assert seen == ["Vmap", "Grad"]
    assert transforms() == []


def test_names_of_what_is_frozen():
    norm = nn.BatchNorm1d(2)
    model = nn.ModuleDict(
        {"stem": Frozen(norm), "free": nn.Sequential(nn.Linear(2, 2), Frozen(nn.Linear(2, 1)))}
    )
    inside = {f"stem.module.{name}" for name in norm.state_dict()}
    assert frozen_names(model) == inside | {"free.1.module.weight", "free.1.module.bias"}
    assert frozen_names(Frozen(nn.Linear(1, 1))) == {"module.weight", "module.bias"}


def test_digests_know_names_types_shapes_and_values():
    def made(**changes: Tensor) -> nn.Module:
        module = nn.Module()
        tensors = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(3), **changes}
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return module

    wanted = digest_of(made())
    assert digest_of(made()) == wanted
    changed = [
        made(a=torch.tensor([[1.0, 2.5]])),
        made(a=torch.tensor([[1.0], [2.0]])),
        made(a=torch.tensor([[1.0, 2.0]], dtype=torch.float64)),
        made(b=torch.tensor(4)),
        made(c=torch.tensor(0)),
    ]
    assert len({wanted, *map(digest_of, changed)}) == 1 + len(changed)
    assert digest_of(made(a=torch.tensor([[1.0], [2.0]]).T)) == wanted
