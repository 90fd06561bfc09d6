"""FedBABU: features with a fixed head against plain PyTorch, fine-tuning, and digits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from equipoise.errors import InputError
from equipoise.methods import build
from tests.engine.by_hand import Turn, average, rounds_by_hand, tensors
from tests.engine.comparison import distance
from tests.engine.five_clients import CHUNKS, COHORTS, SIZES
from tests.engine.small_models import NOISE, normalised
from tests.methods.decoupled import adapt_by_hand, personal_models, played
from tests.methods.skewed import scores


@CHUNKS
def test_rounds_equal_plain_pytorch_and_the_head_stays_bit_for_bit(chunk):
    def turns(shared, own, received):
        return [Turn([shared.features], lambda x, y: F.cross_entropy(shared(x), y), epochs=2)]

    wanted, _ = rounds_by_hand(normalised(), turns, COHORTS)
    found = played("fedbabu", normalised(), chunk=chunk, epochs=2)
    assert distance(found.model, wanted, NOISE) <= 1e-9
    initial = tensors(normalised())
    assert all(
        torch.equal(found.model[name], initial[name])
        for name in initial
        if name.startswith("head.")
    )
    assert all(name.startswith("features.") for name in found.updates[0].params)


def test_clients_count_by_size_or_alike_if_asked():
    sizes = played("fedbabu", normalised(), [[0, 2]])
    alike = played(build("fedbabu", weights="uniform"), normalised(), [[0, 2]])
    for found, weights in ((sizes, [SIZES[0], SIZES[2]]), (alike, [1, 1])):
        rows = [{n: stack[row] for n, stack in found.updates[0].params.items()} for row in (0, 1)]
        wanted = average(rows, weights)
        assert distance({name: found.model[name] for name in wanted}, wanted) <= 1e-12


@CHUNKS
@pytest.mark.parametrize("tunes", ["all", "head", "features"])
def test_personal_models_are_fine_tuned_global_ones(tunes, chunk):
    method = build("fedbabu", tunes=tunes, tune_epochs=2)
    found = played(method, normalised(), COHORTS[:2], chunk=chunk)
    for client, whole in personal_models(found, method, [0, 3]).items():
        own = normalised()
        own.load_state_dict(found.model, strict=False)
        moving = own if tunes == "all" else getattr(own, tunes)
        turn = Turn([moving], lambda x, y, own=own: F.cross_entropy(own(x), y), epochs=2)
        adapt_by_hand(own, [turn], client, rounds=2)
        assert distance(whole, tensors(own), NOISE) <= 1e-9
    assert found.engine.memory.clients == []


def test_fine_tuning_makes_up_for_the_head():
    found = scores("fedbabu")
    assert found["personal seen"] > found["global seen"] + 0.2
    assert found["personal unseen"] > found["global unseen"] + 0.2


def test_bad_lengths_are_refused():
    with pytest.raises(
        InputError, match=r"fedbabu\.tune_epochs must be a whole number of at least 1, got 0"
    ):
        build("fedbabu", tune_epochs=0)
    found = played("fedbabu", normalised(), COHORTS[:1])
    with pytest.raises(InputError, match="unknown part 'haed'.*did you mean 'head'"):
        personal_models(found, build("fedbabu", tunes="haed"), [0])
