"""Clusters of clients: the result, their numbers from round to round, and shares."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from equipoise.clustering import (
    CLUSTERINGS,
    centres_of,
    choose_number,
    cluster,
    mixture_shares,
    nearest,
    numbered,
    purity,
)
from equipoise.errors import InputError


def clouds(members, width=3, noise=0.1, seed=0):
    """Points around corners that are far apart, and the corner of each."""
    draws = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(members)), members)
    corners = 4 * draws.normal(size=(len(members), width))
    return corners[labels] + noise * draws.normal(size=(len(labels), width)), labels


@pytest.mark.parametrize("kind", CLUSTERINGS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_clusters_that_are_far_apart_are_found_on_any_scale(kind, scale):
    points, labels = clouds([4, 1, 3, 6], width=40)
    shuffled = np.random.default_rng(1).permutation(len(points))
    found = cluster(scale * points[shuffled], 4, kind=kind)
    assert adjusted_rand_score(found, labels[shuffled]) == 1
    _, first = np.unique(found, return_index=True)
    assert (np.diff(first) > 0).all()


@pytest.mark.parametrize("kind", CLUSTERINGS)
def test_few_points_are_clusters_of_their_own(kind):
    points = np.array([[1.0, 0.0], [2.0, 0.0], [1.0, 0.0]])
    assert cluster(points, 5, kind=kind).tolist() == [0, 1, 0]
    assert cluster(points[:1], 5, kind=kind).tolist() == [0]
    assert cluster(points, 1, kind=kind).tolist() == [0, 0, 0]


def test_the_key_decides():
    points = np.random.default_rng(3).normal(size=(40, 2))
    found = [cluster(points, 6, key=key).tolist() for key in (1, 1, 2, 3, 4)]
    assert found[0] == found[1]
    assert any(other != found[0] for other in found[2:])


def test_numbers_follow_the_nearest_centres_of_the_round_before():
    points, labels = clouds([3, 2, 4])
    before = centres_of(points, np.eye(3)[labels])
    for order in itertools.permutations(range(3)):
        renamed = np.array(order)[labels]
        assert numbered(renamed, points, before).tolist() == labels.tolist()
    # By hand: of two clusters, the nearer one gets the only number used so far.
    found = numbered(
        np.array([0, 1]), np.array([[9.0], [1.0]]), np.array([[np.nan], [2.0], [np.nan]])
    )
    assert found.tolist() == [0, 1]
    # The sum of squares counts: 1 -> 2 and 3 -> 4 cost 2, but 1 -> 4 and 3 -> 2 cost 10.
    assert numbered(
        np.array([0, 1]), np.array([[1.0], [3.0]]), np.array([[4.0], [2.0]])
    ).tolist() == [1, 0]


def test_numbers_of_a_first_round_are_those_of_the_clusters():
    points, labels = clouds([3, 2, 4])
    assert numbered(labels, points, np.full((5, 3), np.nan)).tolist() == labels.tolist()


def test_centres_are_weighted_means():
    points = np.array([[0.0, 1.0], [4.0, 5.0]])
    found = centres_of(points, np.array([[1.0, 0.25, 0.0], [0.0, 0.75, 0.0]]))
    assert found[:2].tolist() == [[0.0, 1.0], [3.0, 4.0]]
    assert np.isnan(found[2]).all()


def test_shares_of_mixtures_are_found():
    draws = np.random.default_rng(0)
    centres = draws.normal(size=(4, 30))
    for wanted in ([0.25, 0.75, 0, 0], [1, 0, 0, 0], [0.1, 0.2, 0.3, 0.4]):
        assert mixture_shares(np.array(wanted) @ centres, centres) == pytest.approx(
            wanted, abs=1e-6
        )
    # Outside of the centres the nearest mixture is the nearest centre.
    assert mixture_shares(np.array([9.0]), np.array([[1.0], [2.0]])).tolist() == pytest.approx(
        [0, 1]
    )
    assert mixture_shares(np.array([1.0]), np.array([[1.0]])).tolist() == [1]


def test_the_nearest_centre():
    assert nearest(
        np.array([[0.0, 3.0], [2.0, 1.0]]), np.array([[0.0, 0.0], [0.0, 4.0]])
    ).tolist() == [1, 0]


@pytest.mark.parametrize("by", ["bic", "stability"])
@pytest.mark.parametrize("width", [3, 384])
def test_the_number_of_types_is_found_among_22_clients(by, width):
    """Sizes as in the paper's federation of digits; a few small clients have more noise."""
    points, labels = clouds([10, 6, 3, 2, 1], width=width, noise=0.2)
    points[::7] += 0.3 * np.random.default_rng(5).normal(size=points[::7].shape)
    assert choose_number(points, 8, by=by) == 5
    assert adjusted_rand_score(cluster(points, 5), labels) == 1


def test_one_type_is_found_by_bic():
    assert choose_number(np.random.default_rng(0).normal(size=(22, 384)), 8) == 1
    assert (
        choose_number(np.zeros((22, 3)), 8)
        == choose_number(np.zeros((22, 3)), 8, by="stability")
        == 1
    )


def test_purity_by_hand():
    assert purity(np.array([0, 0, 1, 1, 1]), np.array([0, 1, 2, 2, 0])) == pytest.approx(3 / 5)


def test_refusals():
    with pytest.raises(InputError, match="unknown clustering 'gm'"):
        cluster(np.zeros((3, 1)), 2, kind="gm")
    with pytest.raises(InputError, match="unknown choice 'aic'"):
        choose_number(np.zeros((3, 1)), 2, by="aic")
