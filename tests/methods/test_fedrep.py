"""FedRep: head, then features, against plain PyTorch; what is trained when; and digits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from equipoise.errors import InputError
from equipoise.methods import build
from equipoise.methods.fedrep import FedRep
from tests.engine.by_hand import Turn, rounds_by_hand, tensors
from tests.engine.comparison import distance
from tests.engine.five_clients import CHUNKS, COHORTS, EVERYONE
from tests.engine.small_models import NOISE, normalised
from tests.methods.decoupled import adapt_by_hand, personal_models, played
from tests.methods.skewed import scores


@CHUNKS
@pytest.mark.parametrize(
    ("options", "lengths"), [({}, (3, 1)), ({"head_epochs": 1, "features_epochs": 2}, (1, 2))]
)
def test_rounds_equal_plain_pytorch(options, lengths, chunk):
    def turns(shared, own, received):
        def loss(x, y):
            return F.cross_entropy(own(shared.features(x)), y)

        return [
            Turn([own], loss, epochs=lengths[0]),
            Turn([shared.features], loss, epochs=lengths[1]),
        ]

    method = build("fedrep", **options)
    wanted, owned = rounds_by_hand(
        normalised(), turns, COHORTS, make_own=lambda shared: copy.deepcopy(shared.head)
    )
    found = played(method, normalised(), chunk=chunk, epochs=3)
    assert distance(found.model, wanted, NOISE) <= 1e-9
    for client, whole in personal_models(found, method, EVERYONE).items():
        own = {n: t for n, t in whole.items() if n.startswith("head.")}
        assert (
            distance(own, {f"head.{n}": t for n, t in tensors(owned[client]).items()}, NOISE)
            <= 1e-9
        )


class HeadAlone(FedRep):
    """The first of the two steps."""

    def phases(self):
        return super().phases()[:1]


def test_the_first_step_leaves_the_features_bit_for_bit():
    found = played(build("fedavg", local=HeadAlone()), normalised())
    initial = tensors(normalised())
    assert all(torch.equal(found.model[name], initial[name]) for name in initial)
    heads = personal_models(found, build("fedavg", local=HeadAlone()), EVERYONE).values()
    assert not any(torch.equal(whole["head.3.weight"], initial["head.3.weight"]) for whole in heads)


def test_a_new_client_fits_a_head():
    method = build("fedrep", head_epochs=2)
    found = played(method, normalised(), [[0, 1]])
    own = normalised()
    own.load_state_dict(found.model, strict=False)
    adapt_by_hand(
        own, [Turn([own.head], lambda x, y: F.cross_entropy(own(x), y), epochs=2)], 3, rounds=1
    )
    assert distance(personal_models(found, method, [3])[3], tensors(own), NOISE) <= 1e-9


def test_own_heads_beat_one_model_where_labels_are_skewed():
    one, own = scores("fedavg"), scores("fedrep", average_kept=True)
    assert own["personal seen"] > one["global seen"] + 0.2
    assert own["personal unseen"] > one["global unseen"] + 0.2


@pytest.mark.parametrize(
    "options", [{"head_epochs": 0}, {"features_epochs": 0}, {"features_epochs": True}]
)
def test_bad_lengths_are_refused(options):
    with pytest.raises(
        InputError,
        match=rf"fedrep\.{next(iter(options))} must be a whole number of at least 1, got",
    ):
        build("fedrep", **options)
