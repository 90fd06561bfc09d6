"""Building models by name: common parts, seeds, stacking, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from equipoise.errors import InputError
from equipoise.models import MODELS, build, defaults
from equipoise.models.base import Model

SMALL: dict[str, dict[str, Any]] = {
    "logistic": {},
    "mlp": {"hidden": (6, 5), "dropout": 0.5},
    "cnn2": {"channels": (3, 4), "hidden": 6},
    "cnn4": {"channels": (2, 3, 3, 4)},
    "bncnn": {"channels": (2, 3, 3), "hidden": (6, 5)},
    "pflcnn": {},
    "resnet18": {"width": 4, "norm": "group"},
    "vit": {"patch": 1, "width": 8, "depth": 1, "heads": 2, "dropout": 0.5},
    "cct": {"width": 8, "depth": 1, "heads": 2, "dropout": 0.5},
    "vitprompts": {"patch": 1, "width": 8, "depth": 1, "heads": 2, "prompts": 3},
    "fedgc": {
        "patch": 1,
        "width": 8,
        "depth": 1,
        "heads": 2,
        "prompts": 3,
        "hidden": 6,
        "dropout": 0.5,
    },
}
CASES = [*SMALL.items(), ("resnet18", {"width": 4, "norm": "batch"})]
NAMED_CASES = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[f"{n}-{o.get('norm', '')}" for n, o in CASES]
)


def test_every_registered_model_is_covered_here() -> None:
    ours = {name for name, place in MODELS.items() if isinstance(place, str)}
    # charlstm takes text, unet returns maps, pretrained needs files, dsaign takes embeddings, and
    # heads of CLIP are not linear layers; they have separate tests.
    assert (
        set(SMALL)
        | {"charlstm", "unet", "pretrained", "dsaign", "clip", "clipadapter", "clipprompts"}
        == ours
    )


@NAMED_CASES
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 13)])
def test_output_is_head_of_features(
    name: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    model = build(name, shape=shape, classes=5, **options).eval()
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(1))
    z = model.features(x if model.stem is None else model.stem(x))
    assert isinstance(model, Model)
    assert isinstance(model.head, nn.Linear)
    assert z.shape == (2, model.head.in_features)
    assert model(x).shape == (2, 5)
    torch.testing.assert_close(model(x), z @ model.head.weight.T + model.head.bias)
    assert {key.split(".")[0] for key in model.state_dict()} <= {"stem", "features", "head"}


@NAMED_CASES
def test_stacked_clients_match_one_client_at_a_time(name: str, options: dict[str, Any]) -> None:
    clients, shape = 3, (2, 8, 8)
    # Evaluation mode: the engine converts BatchNorm and Dropout of training mode before it stacks
    # clients.
    model = build(name, shape=shape, classes=4, **options).double().eval()
    draw = torch.Generator().manual_seed(2)
    x = torch.rand(clients, 5, *shape, generator=draw, dtype=torch.float64)
    y = torch.randint(4, (clients, 5), generator=draw)
    buffers = dict(model.named_buffers())
    stacked = {
        key: p.detach() + 0.1 * torch.randn(clients, *p.shape, generator=draw, dtype=torch.float64)
        for key, p in model.named_parameters()
        if p.requires_grad
    }

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, (parameters, buffers), (x,)), y)

    losses = vmap(loss)(stacked, x, y)
    gradients = vmap(grad(loss))(stacked, x, y)
    for k in range(clients):
        mine = {key: p[k].clone().requires_grad_() for key, p in stacked.items()}
        alone = loss(mine, x[k], y[k])
        alone.backward()
        assert losses[k].item() == pytest.approx(alone.item(), abs=1e-12)
        for key, p in mine.items():
            torch.testing.assert_close(gradients[key][k], p.grad, rtol=1e-9, atol=1e-12)
    assert all(g.abs().sum() > 0 for g in gradients.values())


@NAMED_CASES
def test_no_layer_works_in_place(name: str, options: dict[str, Any]) -> None:
    model = build(name, shape=(1, 8, 8), classes=3, **options)
    assert not any(getattr(layer, "inplace", False) for layer in model.modules())


def _state(name: str, seed: int, **options: Any) -> list[Tensor]:
    return list(build(name, shape=(1, 8, 8), classes=3, seed=seed, **options).state_dict().values())


@NAMED_CASES
def test_the_seed_decides_the_parameters(name: str, options: dict[str, Any]) -> None:
    first, again, other = (_state(name, seed, **options) for seed in (7, 7, 8))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_global_generator_is_neither_read_nor_changed() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        before = torch.get_rng_state()
        first = _state("mlp", 3)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(12)
        assert all(torch.equal(a, b) for a, b in zip(first, _state("mlp", 3), strict=True))


def test_models_are_built_on_the_cpu_whatever_the_default_device() -> None:
    expected = _state("mlp", 3)
    with torch.device("meta"):
        built = _state("mlp", 3)
    assert all(torch.equal(a, b) for a, b in zip(expected, built, strict=True))


def test_regression_takes_classes_as_number_of_outputs() -> None:
    assert build("logistic", shape=(7,), classes=1)(torch.zeros(4, 7)).shape == (4, 1)


def test_numpy_integers_and_lists_are_fine() -> None:
    model = build(
        "mlp", shape=[np.int64(4)], classes=np.int64(3), seed=np.int64(1), hidden=[np.int64(5)]
    )
    assert model(torch.zeros(2, 4)).shape == (2, 3)


def test_defaults_lists_the_options() -> None:
    assert defaults("logistic") == {}
    assert defaults("resnet18") == {"norm": "batch", "width": 64, "groups": 2}
    assert defaults("pretrained") == {"freeze": False}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("cn2", {}, "unknown model 'cn2'; did you mean 'cnn2'?"),
        ("mlp", {"hiden": (3,)}, "unknown option 'hiden' in model 'mlp'; did you mean 'hidden'?"),
        ("logistic", {"hidden": (3,)}, "model 'logistic' takes no options, got 'hidden'"),
        ("pretrained", {}, "model 'pretrained' needs the option 'source'"),
        ("mlp", {"shape": ()}, "shape () has no dimension"),
        ("mlp", {"shape": (1, 0)}, "each of shape must be a whole number of at least 1, got 0"),
        ("mlp", {"shape": 64}, "shape must be a list, got 64"),
        ("mlp", {"classes": 0}, "classes must be a whole number of at least 1, got 0"),
        ("mlp", {"classes": 2.0}, "classes must be a whole number of at least 1, got 2.0"),
        ("mlp", {"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ("mlp", {"seed": True}, "seed must be a whole number of at least 0, got True"),
        ("mlp", {"seed": 2**63}, "seed must be below 2**63"),
    ],
)
def test_refusals_name_the_value(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build(name, **{"shape": (1, 8, 8), "classes": 3, **arguments})
    assert message in str(caught.value)


def test_names_are_listed_without_importing_torch() -> None:
    code = "import sys; from equipoise.models import MODELS; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_small_models_do_not_import_transformers() -> None:
    code = (
        "import sys, equipoise; from equipoise.models import build; "
        "build('vitprompts', shape=(1, 8, 8), classes=3); import equipoise.models.pretrained; "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
