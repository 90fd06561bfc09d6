"""Attention against PyTorch's own, stacked and single clients, and its derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise import tasks
from equipoise.engine.model_trial import try_out
from equipoise.engine.network import Network
from equipoise.errors import InputError
from equipoise.models.attention import Attention, Block, attend
from equipoise.models.base import Model
from equipoise.models.frozen import Frozen
from equipoise.models.passes import Forward

CLIENTS, SAMPLES, TOKENS, WIDTH, HEADS = 3, 4, 5, 8, 2


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(module: nn.Module) -> nn.Module:
    """Give a module parameters of its own, in float64."""
    module = module.double()
    with torch.no_grad():
        for seed, p in enumerate(module.parameters()):
            p.copy_(0.4 * normal(*p.shape, seed=seed))
    return module


def by_pytorch(attention: Attention) -> nn.MultiheadAttention:
    wanted = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    names = {
        "in_proj_weight": "qkv.weight",
        "in_proj_bias": "qkv.bias",
        "out_proj.weight": "out.weight",
        "out_proj.bias": "out.bias",
    }
    state = attention.state_dict()
    wanted.load_state_dict({theirs: state[ours] for theirs, ours in names.items()})
    return wanted


@pytest.mark.parametrize("fused", [False, True])
def test_causal_attention_leaves_later_tokens_out(fused):
    attention, x = filled(Attention(WIDTH, HEADS, fused)), normal(SAMPLES, TOKENS, WIDTH)
    attention.causal = True
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    wanted, _ = by_pytorch(attention)(x, x, x, need_weights=False, attn_mask=later)
    torch.testing.assert_close(attention(x), wanted, rtol=0, atol=1e-13)
    # The output for a token does not depend on the number of later tokens.
    torch.testing.assert_close(attention(x[:, :2]), wanted[:, :2], rtol=0, atol=1e-13)


def test_causal_attention_of_a_single_query_sees_the_first_token():
    q, k, v = (normal(2, tokens, 4, seed=tokens) for tokens in (1, 3, 3))
    torch.testing.assert_close(attend(q, k, v, is_causal=True), v[:, :1])


@pytest.mark.parametrize("fused", [False, True])
def test_attention_is_pytorchs(fused):
    attention, x = (
        filled(Attention(WIDTH, HEADS, fused)),
        normal(SAMPLES, TOKENS, WIDTH).requires_grad_(),
    )
    wanted, _ = by_pytorch(attention)(x, x, x, need_weights=False)
    upper = normal(*wanted.shape, seed=1)
    torch.testing.assert_close(attention(x), wanted, rtol=0, atol=1e-13)
    for found, right in zip(
        torch.autograd.grad(attention(x), [x, *attention.parameters()], upper),
        torch.autograd.grad(wanted, [x], upper),
        strict=False,
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_a_block_is_pytorchs_pre_norm_encoder_layer():
    block = filled(Block(WIDTH, HEADS, mlp_ratio=3.0))
    wanted = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 3 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    ).double()
    wanted.self_attn = by_pytorch(block.attention)
    for theirs, ours in (
        ("norm1", "norm1"),
        ("norm2", "norm2"),
        ("linear1", "mlp.0"),
        ("linear2", "mlp.2"),
    ):
        getattr(wanted, theirs).load_state_dict(block.get_submodule(ours).state_dict())
    x = normal(SAMPLES, TOKENS, WIDTH)
    torch.testing.assert_close(block(x), wanted.train()(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [Attention, Block])
def test_stacked_blocks_match_one_by_one_to_the_second_derivative(make):
    module = filled(make(WIDTH, HEADS))
    stacked = {
        name: (p.detach() + 0.1 * normal(CLIENTS, *p.shape, seed=seed)).requires_grad_()
        for seed, (name, p) in enumerate(module.named_parameters())
    }
    x = normal(CLIENTS, SAMPLES, TOKENS, WIDTH, seed=9)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, params, (x,)).square().mean()

    def sharpness(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return sum(g.square().sum() for g in grad(loss)(params, x).values())  # type: ignore[return-value]

    for value in (loss, sharpness):
        values = vmap(value)(stacked, x)
        found = torch.autograd.grad(values.sum(), list(stacked.values()))
        for k in range(CLIENTS):
            mine = {name: p[k].detach().requires_grad_() for name, p in stacked.items()}
            if value is loss:
                alone = loss(mine, x[k])
            else:
                first = torch.autograd.grad(
                    loss(mine, x[k]), list(mine.values()), create_graph=True
                )
                alone = sum(g.square().sum() for g in first)
            torch.testing.assert_close(values[k], alone, rtol=1e-11, atol=1e-13)
            wanted = torch.autograd.grad(alone, list(mine.values()))
            for gradient, right in zip(found, wanted, strict=True):
                torch.testing.assert_close(gradient[k], right, rtol=1e-10, atol=1e-12)


def test_no_weights_are_copied_for_stacked_clients():
    block = Block(16, 2, mlp_ratio=2.0)
    stacked = {
        name: p.detach().expand(2, *p.shape).clone().requires_grad_()
        for name, p in block.named_parameters()
    }
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "mm" in function.__name__:
                sizes.append(max(tensor.numel() for tensor in args if isinstance(tensor, Tensor)))
            return function(*args, **(kwargs or {}))

    x = torch.zeros(2, 30, 3, 16)
    with Watch():
        vmap(lambda params, x: functional_call(block, params, (x,)))(stacked, x).sum().backward()
    # The largest operand has 48 numbers per token; a copy of a weight per sample would have 16 * 48
    # * 60.
    assert max(sizes) == 2 * 30 * 3 * 48


def test_fused_attention_inside_a_frozen_module_matches_the_plain_one():
    plain, fused = (filled(Block(WIDTH, HEADS, fused=fused)) for fused in (False, True))
    x = normal(CLIENTS, SAMPLES, TOKENS, WIDTH).requires_grad_()
    wanted, found = vmap(plain)(x), vmap(Frozen(fused))(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    upper = normal(*wanted.shape, seed=1)
    for gradient, right in zip(
        torch.autograd.grad(found, x, upper), torch.autograd.grad(wanted, x, upper), strict=True
    ):
        torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)


def test_dropout_is_the_engines():
    model = Model(
        nn.Sequential(Block(WIDTH, HEADS, dropout=0.5), nn.Flatten()), nn.Linear(TOKENS * WIDTH, 2)
    )
    network = Network(model.double(), tasks.build("classification"), dtype=torch.float64)
    x = normal(SAMPLES, TOKENS, WIDTH)
    try_out(network, x, torch.tensor([0, 1, 0, 1]), 2)
    keys = torch.tensor([1, 1, 2])

    def output(key: Tensor) -> Tensor:
        return network.apply(network.initial(), x, Forward(train=True, key=key))[0]

    one, same, other = (output(key) for key in keys)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(
        network.apply(network.initial(), x, Forward(train=False))[0], model.eval()(x)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(8, 3), "heads=3 do not divide width=8 of attention"),
        (lambda: Attention(8, 0), "heads of attention must be a whole number of at least 1, got 0"),
        (
            lambda: Block(4, 2, mlp_ratio=0.1),
            "width=4 times mlp_ratio=0.1 of a block, rounded, must be a whole number",
        ),
        (
            lambda: Block(4, 2, dropout=1.0),
            "dropout of a block must be a number from 0 to below 1, got 1.0",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)
