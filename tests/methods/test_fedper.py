"""FedPer: joint training against plain PyTorch, which client has which head, and digits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from equipoise.methods import build
from equipoise.tree import size_in_bytes
from tests.engine.by_hand import Turn, rounds_by_hand, tensors
from tests.engine.comparison import distance
from tests.engine.five_clients import CHUNKS, COHORTS, EVERYONE
from tests.engine.small_models import NOISE, mlp, normalised
from tests.methods.decoupled import LR, adapt_by_hand, personal_models, played
from tests.methods.skewed import scores


@CHUNKS
def test_rounds_equal_plain_pytorch(chunk):
    def turns(shared, own, received):
        return [
            Turn(
                [shared.features, own],
                lambda x, y: F.cross_entropy(own(shared.features(x)), y),
                epochs=2,
            )
        ]

    wanted, owned = rounds_by_hand(
        normalised(), turns, COHORTS, make_own=lambda shared: copy.deepcopy(shared.head)
    )
    found = played("fedper", normalised(), chunk=chunk, epochs=2)
    assert distance(found.model, wanted, NOISE) <= 1e-9
    for client, whole in personal_models(found, build("fedper"), EVERYONE).items():
        own = {n: t for n, t in whole.items() if n.startswith("head.")}
        assert (
            distance(own, {f"head.{n}": t for n, t in tensors(owned[client]).items()}, NOISE)
            <= 1e-9
        )
        assert torch.equal(whole["features.0.weight"], found.model["features.0.weight"])


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_the_head_never_travels(method):
    """Both sides start with the same head, so it is never sent."""
    found = played(method, mlp(), [EVERYONE, EVERYONE])
    features = size_in_bytes({n: t for n, t in found.model.items() if n.startswith("features.")})
    assert [c.bytes_down for c in found.cohorts] == [len(EVERYONE) * features] * 2
    assert all(name.startswith("features.") for updates in found.updates for name in updates.params)
    assert torch.equal(found.model["head.weight"], mlp().head.weight)


def test_a_new_client_trains_a_head_on_the_features_as_they_are():
    found = played("fedper", normalised(), [[0, 1]])
    own = normalised()
    own.load_state_dict(found.model, strict=False)
    adapt_by_hand(
        own, [Turn([own.head], lambda x, y: F.cross_entropy(own(x), y), lr=LR)], 3, rounds=1
    )
    whole = personal_models(found, build("fedper"), [3])[3]
    assert distance(whole, tensors(own), NOISE) <= 1e-9
    assert all(
        torch.equal(whole[n], t) for n, t in found.model.items() if n.startswith("features.")
    )


def test_own_heads_beat_one_model_where_labels_are_skewed():
    one, own = scores("fedavg"), scores("fedper", average_kept=True)
    assert own["personal seen"] > one["global seen"] + 0.2
    assert own["personal unseen"] > one["global unseen"] + 0.2
    assert own["personal seen"] > own["global seen"] + 0.3, "heads averaged into one fit nobody"
