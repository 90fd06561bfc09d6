"""The federations and the study that test `equipoise advise`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from equipoise.advise import FAMILIES
from equipoise.data import load
from equipoise.imports import import_own
from equipoise.study import load_study

HOME = Path(__file__).parents[2] / "experiments" / "advice"


def test_the_study_compares_all_methods_of_the_trial():
    study = load_study(HOME / "digits.yaml")
    assert study.settings == ("iid", "labels", "features", "sizes")
    assert {label for family in FAMILIES.values() for label in family.labels} <= set(study.methods)
    assert min(study.seeds) > 100


@pytest.mark.parametrize("name", ["iid", "labels", "features", "sizes"])
def test_federations_differ_in_one_way(name):
    import_own([str(HOME / "federations.py")])
    federation = load(f"digits_{name}", seed=1)
    sizes = np.sum([federation.split(split).sizes for split in ("train", "val", "test")], axis=0)
    assert (federation.clients, len(federation.group_names)) == (20, 5 if name == "features" else 1)
    assert sizes.min() >= 20
    if name == "sizes":
        assert sizes.max() > 10 * np.median(sizes)
        assert list(sizes) == sorted(sizes, reverse=True)
        # Clients do not share samples.
        assert len(
            np.unique(np.concatenate([federation.train.indices, federation.val.indices]))
        ) == sum(federation.split(split).sizes.sum() for split in ("train", "val"))
    elif name != "labels":
        assert sizes.max() - sizes.min() <= 1
