"""Run directories of models with frozen tensors: what they contain, restore and refuse."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from equipoise import Evaluation, Federation, Machine, load, train
from equipoise.config import experiment_from
from equipoise.engine.slots import frozen_digest
from equipoise.errors import InputError, RunError
from equipoise.models import build
from equipoise.models.base import Model
from equipoise.models.frozen import Frozen
from equipoise.run.files import load_tensors, save_tensors
from tests.engine.federations import images
from tests.run.small import Stop, promised, stop_after

PROMPTS = {"name": "vitprompts", "patch": 4, "width": 16, "depth": 1, "heads": 2}
MOVING = {"features.prompts", "head.weight", "head.bias"}


def pictures():
    """Ten clients with images of shape (1, 8, 8), all of them with test samples."""
    data = images(shape=(1, 8, 8), sizes=[12] * 10)
    clients = np.repeat(np.arange(10), 12)
    return Federation.from_arrays(
        data.x.float(), data.y, clients=clients, splits=(0.5, 0.25, 0.25), classes=4
    )


def frozen_run(out=None, method="fedavg", model=PROMPTS, **options):
    options = {
        "rounds": 3,
        "cohort": 4,
        "batch_size": 8,
        "optimizer": {"name": "sgd", "lr": 0.1},
        **options,
    }
    return train(pictures(), method=method, model=model, out=out, seed=3, **options)


def everything_in(directory):
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in Path(directory).iterdir()
    }


def config_of(directory):
    return yaml.safe_load((directory / "config.yaml").read_text())


def write_config(directory, config):
    (directory / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fedavg", set()),
        ("local", MOVING),
        ("ditto", MOVING),
        ("fedper", {"head.weight", "head.bias"}),
    ],
)
def test_files_hold_nothing_that_is_frozen(method, own, tmp_path):
    frozen_run(tmp_path / "run", method, evaluation=Evaluation(select="best"))
    shared, _ = load_tensors(tmp_path / "run" / "model.safetensors")
    assert set(shared) == MOVING
    if own:
        assert set(load_tensors(tmp_path / "run" / "personal.safetensors")[0]) == own
    for file in ("checkpoint.safetensors", "best.safetensors"):
        tensors, _ = load_tensors(tmp_path / "run" / file)
        held = {name.rpartition("/")[2].removeprefix("personal.") for name in tensors}
        assert held - {"clients"} == MOVING


def test_models_come_back_whole(tmp_path):
    run = frozen_run(tmp_path / "run", "ditto")
    x = pictures().x[:7]
    begun = build(shape=(1, 8, 8), classes=4, seed=3, **PROMPTS)
    for client in (None, run.trainer.engine.remembering[0]):
        one, other = run.model(client), load(tmp_path / "run", client)
        assert torch.equal(one(x), other(x))
        assert not torch.allclose(one(x), begun(x), atol=1e-4)
        assert torch.equal(one.stem(x), begun.stem(x))
        # Clients were evaluated with exactly this model.
        tokens = one.stem(x)
        by_hand = one.head(
            begun.features.encoder(torch.cat([tokens, one.features.prompts.expand(7, -1, -1)], 1))
        )
        torch.testing.assert_close(one(x), by_hand)


def custom(seed=0, moving_seed=0):
    """A user-defined module: a frozen layer with BatchNorm, and trained layers."""
    torch.manual_seed(seed)
    frozen = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12))
    nn.init.normal_(frozen[2].running_mean)
    torch.manual_seed(moving_seed)
    return Model(nn.Sequential(Frozen(frozen), nn.ReLU(), nn.Linear(12, 8)), nn.Linear(8, 4))


def test_a_module_of_ones_own_comes_back_whole(tmp_path):
    run = frozen_run(tmp_path / "run", model=custom())
    x = pictures().x[:7]
    # The values of trained tensors come from the run.
    loaded = load(tmp_path / "run", module=custom(moving_seed=1))
    assert torch.equal(run.model()(x), loaded(x))
    assert torch.equal(loaded.features[0](x), custom().features[0](x))


def test_the_configuration_holds_the_hash(tmp_path):
    frozen_run(tmp_path / "run", rounds=1)
    wanted = frozen_digest(build(shape=(1, 8, 8), classes=4, seed=3, **PROMPTS))
    assert config_of(tmp_path / "run")["resolved"]["frozen"] == wanted
    assert "frozen" not in frozen_run(model="mlp", rounds=1).config["resolved"]


def test_other_frozen_weights_are_not_resumed(tmp_path):
    with pytest.raises(Stop):
        frozen_run(tmp_path / "run", model=custom(), on_round=stop_after(2))
    before = everything_in(tmp_path / "run")
    with pytest.raises(
        InputError,
        match=r"holds another experiment: resolved.frozen is '\w{32}' there and '\w{32}' here",
    ):
        frozen_run(tmp_path / "run", model=custom(seed=1), resume=True)
    assert everything_in(tmp_path / "run") == before
    # The checkpoint has other values of trained tensors.
    frozen_run(tmp_path / "run", model=custom(moving_seed=1), resume=True)
    frozen_run(tmp_path / "whole", model=custom())
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")


def test_other_frozen_weights_are_not_filled_with_a_run(tmp_path):
    frozen_run(tmp_path / "run", model=custom(), rounds=1)
    here, there = frozen_digest(custom(seed=1)), frozen_digest(custom())
    with pytest.raises(
        InputError, match=f"frozen tensors .* differ .*: their hash is {here}, the run's {there}"
    ):
        load(tmp_path / "run", module=custom(seed=1))


class Turned(nn.Module):
    """Change the order of columns, as a buffer of integers says."""

    def __init__(self, order):
        super().__init__()
        self.register_buffer("order", torch.tensor(order))

    def forward(self, x):
        return x[..., self.order]


def turned(order=tuple(range(12))[::-1]):
    return Model(nn.Sequential(custom().features[0], Turned(order)), nn.Linear(12, 4))


def test_other_buffers_of_integers_are_neither_resumed_nor_filled(tmp_path):
    with pytest.raises(Stop):
        frozen_run(tmp_path / "run", model=turned(), on_round=stop_after(2))
    with pytest.raises(InputError, match="holds another experiment: resolved.frozen is"):
        frozen_run(tmp_path / "run", model=turned(tuple(range(12))), resume=True)
    frozen_run(tmp_path / "run", model=turned(), resume=True)
    with pytest.raises(InputError, match="the frozen tensors of the model differ from those of"):
        load(tmp_path / "run", module=turned(tuple(range(12))))


def test_a_hash_without_buffers_of_integers_is_accepted(tmp_path):
    """Runs of the release before have recorded it."""
    with pytest.raises(Stop):
        frozen_run(tmp_path / "run", model=turned(), on_round=stop_after(2))
    config = config_of(tmp_path / "run")
    config["resolved"]["frozen"] = frozen_digest(Model(turned().features[:1], nn.Linear(12, 4)))
    write_config(tmp_path / "run", config)
    (tmp_path / "run" / "SHA256SUMS").unlink()
    frozen_run(tmp_path / "run", model=turned(), resume=True)
    frozen_run(tmp_path / "whole", model=turned())
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")
    x = pictures().x[:7]
    assert torch.equal(
        load(tmp_path / "run", module=turned())(x), load(tmp_path / "whole", module=turned())(x)
    )


# ---- directories of the release before -----------------------------------------------------------


def make_old(directory, module):
    """Rewrite a run directory like the previous release: with frozen tensors in the files."""
    config = config_of(directory)
    del config["resolved"]["frozen"]
    for setting in ("frozen", "encode"):
        del config["machine"][setting]
    write_config(directory, config)
    (directory / "SHA256SUMS").unlink()
    slots = {name: t for name, t in module.state_dict().items() if t.is_floating_point()}
    for file, prefix in (("model.safetensors", ""), ("checkpoint.safetensors", "model/")):
        if (directory / file).exists():
            tensors, note = load_tensors(directory / file)
            note.pop("version", None)
            save_tensors(
                directory / file,
                {**{prefix + name: t for name, t in slots.items()}, **tensors},
                note,
            )


def test_runs_of_the_release_before_are_loaded_with_the_frozen_tensors_they_hold(tmp_path):
    run = frozen_run(tmp_path / "run", model=custom())
    make_old(tmp_path / "run", custom())
    assert "features.0.module.1.weight" in load_tensors(tmp_path / "run" / "model.safetensors")[0]
    x = pictures().x[:7]
    # The module's own frozen values do not matter then.
    assert torch.equal(load(tmp_path / "run", module=custom(seed=1))(x), run.model()(x))


@pytest.mark.parametrize("finished", [False, True])
def test_runs_of_the_release_before_are_not_resumed(finished, tmp_path):
    if finished:
        frozen_run(tmp_path / "run", model=custom())
    else:
        with pytest.raises(Stop):
            frozen_run(tmp_path / "run", model=custom(), on_round=stop_after(2))
    make_old(tmp_path / "run", custom())
    before = everything_in(tmp_path / "run")
    with pytest.raises(
        RunError, match="checkpoint of version 1, but this release of Equipoise resumes version 2"
    ):
        frozen_run(tmp_path / "run", model=custom(), resume=True)
    assert everything_in(tmp_path / "run") == before


# ---- settings ------------------------------------------------------------------------------------


def test_lowered_runs_can_be_resumed_and_written_as_yaml(tmp_path):
    machine = Machine(device="cpu", frozen="bfloat16", encode=False)
    frozen_run(tmp_path / "whole", machine=machine)
    with pytest.raises(Stop):
        frozen_run(tmp_path / "run", machine=machine, on_round=stop_after(2))
    with pytest.raises(InputError, match="machine.frozen is 'bfloat16' there and None here"):
        frozen_run(tmp_path / "run", machine=Machine(device="cpu", encode=False), resume=True)
    frozen_run(tmp_path / "run", machine=machine, resume=True)
    assert promised(tmp_path / "run") == promised(tmp_path / "whole")
    written = config_of(tmp_path / "run")["machine"]
    assert (written["frozen"], written["encode"]) == ("bfloat16", False)
    assert experiment_from({"data": "digits", "machine": written}).machine == machine


def test_experiments_say_how_frozen_modules_are_held():
    made = experiment_from({"data": "digits", "machine": {"frozen": "bfloat16"}})
    assert made.machine.frozen_dtype == torch.bfloat16
    assert experiment_from(made.plain()).machine == made.machine
    with pytest.raises(InputError, match=r"a\.yaml: unknown value 'float16' in machine\.frozen"):
        experiment_from({"data": "digits", "machine": {"frozen": "float16"}}, "a.yaml")
    with pytest.raises(InputError, match=r"a\.yaml: machine\.encode"):
        experiment_from({"data": "digits", "machine": {"encode": "never"}}, "a.yaml")


# ---- real weights --------------------------------------------------------------------------------

SHARED = Path(os.environ.get("EQUIPOISE_SHARED", Path(__file__).parents[3] / "shared"))
WEIGHTS = SHARED / "weights" / "vit-small-14"


@pytest.mark.skipif(not WEIGHTS.exists(), reason=f"{WEIGHTS} is not here")
def test_files_of_a_run_with_a_real_transformer_are_small(tmp_path):
    pytest.importorskip(
        "transformers", reason="transformers is not installed: equipoise[pretrained]"
    )
    draws = torch.Generator().manual_seed(0)
    x = torch.randint(256, (12, 3, 28, 28), generator=draws, dtype=torch.uint8)
    clients = Federation.from_arrays(x, torch.arange(12) % 3, clients=[0] * 6 + [1] * 6, classes=3)
    model = {"name": "vitprompts", "source": str(WEIGHTS)}
    run = train(clients, model=model, rounds=1, machine=Machine(device="cpu"), out=tmp_path / "run")
    for file in ("checkpoint.safetensors", "model.safetensors"):
        assert 4 * (4 * 384 + 3 * 385) < (tmp_path / "run" / file).stat().st_size < 1_000_000
    assert sum(p.numel() for p in run.model().parameters()) > 20_000_000
    assert torch.equal(load(tmp_path / "run")(x[:2]), run.model()(x[:2]))
