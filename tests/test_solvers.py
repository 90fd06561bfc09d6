"""The server's small problems against brute force, their optimality conditions, and each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.solvers import project_to_simplex, shortest_mixture

points = st.lists(st.floats(-50, 50), min_size=1, max_size=30).map(np.array)


@settings(max_examples=200, deadline=None)
@given(points)
def test_the_projection_lies_on_the_simplex_and_nothing_there_is_nearer(point):
    found = project_to_simplex(point)
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1, abs=1e-12)
    # The projection P of v is the one point with (v - P)·(z - P) ≤ 0 for all z; corners of the
    # simplex suffice.
    slack = (point - found) - (point - found) @ found
    assert slack.max() <= 1e-10


@pytest.mark.parametrize("seed", range(20))
def test_the_projection_equals_bisection(seed):
    draws = np.random.default_rng(seed)
    point = draws.normal(scale=3, size=draws.integers(1, 40))
    low, high = point.min() - 1, point.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > 1 else (low, middle)
    np.testing.assert_allclose(project_to_simplex(point), np.maximum(point - low, 0), atol=1e-12)


def test_projections_by_hand():
    assert project_to_simplex(np.array([0.2, 0.8])).tolist() == pytest.approx([0.2, 0.8])
    assert project_to_simplex(np.array([7.0])).tolist() == [1.0]
    assert project_to_simplex(np.array([5.0, 1.0, 0.0])).tolist() == [1.0, 0.0, 0.0]
    assert project_to_simplex(np.array([-3.0, -3.0])).tolist() == [0.5, 0.5]
    assert project_to_simplex(np.array([1.0, 0.5])).tolist() == [0.75, 0.25]


def test_the_projection_leaves_its_input_alone():
    point = np.array([3.0, 1.0, 2.0])
    project_to_simplex(point)
    assert point.tolist() == [3.0, 1.0, 2.0]


def violation(gram, weights, radius):
    """How far weights are from optimal: the largest gain from moving weight between clients."""
    low = np.maximum(1 / len(gram) - radius, 0)
    high = np.minimum(1 / len(gram) + radius, 1)
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert (weights >= low - 1e-12).all()
    assert (weights <= high + 1e-12).all()
    slope = gram @ weights
    gives, takes = weights > low + 1e-9, weights < high - 1e-9
    return slope[gives].max() - slope[takes].min() if gives.any() and takes.any() else 0.0


@pytest.mark.parametrize("radius", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("shape", [(2, 5), (6, 3), (6, 40), (25, 60), (40, 10)])
def test_mixtures_satisfy_the_optimality_conditions(shape, radius):
    for seed in range(5):
        vectors = np.random.default_rng(seed).normal(size=shape) + 0.3
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        gram = vectors @ vectors.T
        assert violation(gram, shortest_mixture(gram, radius=radius), radius) <= 1e-8


def test_mixtures_of_two_vectors_by_hand():
    # The shortest point of the segment between a and b: λ_a = b·(b - a) / ‖b - a‖².
    a, b = np.array([1.0, 0.0]), np.array([1.0, 2.0])
    stacked = np.stack([a, b])
    # The foot of the perpendicular is a itself.
    np.testing.assert_allclose(shortest_mixture(stacked @ stacked.T, radius=1.0), [1, 0], atol=1e-9)
    np.testing.assert_allclose(
        shortest_mixture(stacked @ stacked.T, radius=0.1), [0.6, 0.4], atol=1e-9
    )
    stacked = np.array([[2.0, 0.0], [0.0, 1.0]])
    np.testing.assert_allclose(
        shortest_mixture(stacked @ stacked.T, radius=1.0), [0.2, 0.8], atol=1e-12
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_shortest_of_three_vectors_equals_a_fine_search(seed):
    vectors = np.random.default_rng(seed).normal(size=(3, 4)) + 0.5
    gram = vectors @ vectors.T
    ticks = np.linspace(0, 1, 401)
    first, second = np.meshgrid(ticks, ticks)
    all_weights = np.stack([first, second, 1 - first - second], axis=-1)
    inside = (np.abs(all_weights - 1 / 3) <= 0.25).all(-1) & (all_weights >= 0).all(-1)
    lengths = np.einsum("abi,ij,abj->ab", all_weights, gram, all_weights)[inside]
    found = shortest_mixture(gram, radius=0.25)
    assert found @ gram @ found <= lengths.min() + 1e-12
    assert found @ gram @ found >= lengths.min() - 0.02


def test_radius_zero_one_vector_and_no_vector_at_all():
    assert shortest_mixture(np.eye(4), radius=0.0).tolist() == [0.25] * 4
    assert shortest_mixture(np.array([[3.0]]), radius=1.0).tolist() == [1.0]
    still = shortest_mixture(np.zeros((3, 3)), radius=1.0)
    assert still.sum() == pytest.approx(1)
    assert (still >= 0).all()


def test_a_vector_of_length_zero_takes_all_the_weight():
    found = shortest_mixture(np.diag([0.0, 1.0, 1.0]), radius=1.0)
    np.testing.assert_allclose(found, [1, 0, 0], atol=1e-9)


def test_opposite_vectors_cancel():
    vectors = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    found = shortest_mixture(vectors @ vectors.T, radius=1.0)
    np.testing.assert_allclose(found @ vectors, [0, 0], atol=1e-8)


def test_rounding_of_the_input_hardly_moves_the_mixture():
    draws = np.random.default_rng(3)
    vectors = draws.normal(size=(12, 50)) + 0.4
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    gram = vectors @ vectors.T
    nearly = gram + 1e-15 * draws.normal(size=gram.shape)
    first, second = (
        shortest_mixture(gram, radius=0.05),
        shortest_mixture((nearly + nearly.T) / 2, radius=0.05),
    )
    np.testing.assert_allclose(first, second, atol=1e-11)
