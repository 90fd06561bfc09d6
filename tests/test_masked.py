"""Sums over a batch against NumPy, with arbitrary values in the padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.func import vmap

from equipoise.errors import InputError
from equipoise.masked import coral, label_sums, masked_covariance, masked_mean, masked_sum

KEPT = [True, False, True, True, False, True]


def batch(*shape):
    """Six rows, four of them samples, and the samples for NumPy."""
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(6, *shape)))
    values[~torch.tensor(KEPT)] = 1e6
    return values, values.numpy()[KEPT]


MASKS = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bool], ids=str)


@MASKS
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)], ids=str)
def test_sums_and_means_leave_padding_out(shape, dtype):
    values, samples = batch(*shape)
    mask = torch.tensor(KEPT).to(dtype)
    np.testing.assert_allclose(masked_sum(values, mask), samples.sum(0), rtol=1e-12)
    np.testing.assert_allclose(masked_mean(values, mask), samples.mean(0), rtol=1e-12)
    np.testing.assert_allclose(masked_sum(values, None), values.numpy().sum(0), rtol=1e-12)
    np.testing.assert_allclose(masked_mean(values, None), values.numpy().mean(0), rtol=1e-12)


@MASKS
def test_the_covariance_is_that_of_the_samples(dtype):
    values, samples = batch(3)
    found = masked_covariance(values, torch.tensor(KEPT).to(dtype))
    np.testing.assert_allclose(found, np.cov(samples, rowvar=False), rtol=1e-9)
    np.testing.assert_allclose(
        masked_covariance(values, None), np.cov(values.numpy(), rowvar=False), rtol=1e-9
    )


def test_the_covariance_of_a_single_sample_is_zero():
    values, _ = batch(3)
    assert not masked_covariance(values, (torch.arange(6) < 1).double()).any()
    assert not masked_covariance(values[:1], None).any()


def coral_in_numpy(one, other, form):
    """Both forms by definition, entry by entry."""

    def moments(rows):
        mean = [sum(row[i] for row in rows) / len(rows) for i in range(3)]
        spread = [
            [
                sum((row[i] - mean[i]) * (row[j] - mean[j]) for row in rows) / (len(rows) - 1)
                for j in range(3)
            ]
            for i in range(3)
        ]
        return np.array(mean), np.array(spread)

    (mean, spread), (other_mean, other_spread) = moments(one), moments(other)
    if form == "deepcoral":
        return np.linalg.norm(spread - other_spread) ** 2 / (4 * 3**2)
    return np.mean((mean - other_mean) ** 2) + np.mean((spread - other_spread) ** 2)


FORMS = pytest.mark.parametrize("form", ["domainbed", "deepcoral"])


@MASKS
@FORMS
def test_coral_by_definition(form, dtype):
    values, samples = batch(3)
    others = torch.from_numpy(np.random.default_rng(1).normal(size=(9, 3)) + 0.5)
    mask = torch.tensor(KEPT).to(dtype)
    wanted = coral_in_numpy(samples, others.numpy(), form)
    assert float(coral(values, others, mask, form=form)) == pytest.approx(wanted)
    assert float(coral(others, values, None, mask, form=form)) == pytest.approx(wanted)
    assert float(coral(values[mask.bool()], others, form=form)) == pytest.approx(wanted)


@FORMS
def test_coral_of_equal_batches_is_exactly_zero(form):
    values, _ = batch(3)
    mask = torch.tensor(KEPT)
    elsewhere = torch.where(mask.unsqueeze(1), values, -values)
    assert float(coral(values, values, form=form)) == 0
    assert float(coral(values, elsewhere, mask, mask, form=form)) == 0


@FORMS
def test_coral_of_single_samples_compares_means_alone(form):
    one, other = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.tensor([[2.0, 4.0]])
    found = coral(one, other, form=form)
    found.backward()
    assert found.item() == (2.5 if form == "domainbed" else 0.0)
    assert one.grad.tolist() == [[-1.0, -2.0] if form == "domainbed" else [0.0, 0.0]]


@FORMS
def test_coral_of_stacked_batches(form):
    draws = np.random.default_rng(2)
    one, other = (torch.from_numpy(draws.normal(size=(4, 5, 3))) for _ in range(2))
    mask = torch.tensor(
        [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    ).double()
    together = vmap(lambda a, b, m: coral(a, b, m, m, form=form))(one, other, mask)
    alone = [
        coral(*(rows[i][mask[i].bool()] for rows in (one, other)), form=form) for i in range(4)
    ]
    torch.testing.assert_close(together, torch.stack(alone))


def test_an_unknown_form_of_coral_is_refused():
    with pytest.raises(InputError, match="unknown form 'mmd' in coral"):
        coral(torch.zeros(2, 1), torch.zeros(2, 1), form="mmd")


@MASKS
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_sums_by_class(shape, dtype):
    values, _ = batch(*shape)
    labels = torch.tensor([2, 0, 0, 2, 3, 3])
    wanted = np.zeros((5, *shape))
    for value, label, kept in zip(values.numpy(), labels.tolist(), KEPT, strict=True):
        wanted[label] += value if kept else 0
    np.testing.assert_allclose(
        label_sums(values, labels, 5, torch.tensor(KEPT).to(dtype)), wanted, rtol=1e-12
    )
    whole = label_sums(values, labels, 5, None)
    np.testing.assert_allclose(whole.sum(0), values.numpy().sum(0), rtol=1e-9)


def test_stacked_clients_get_what_each_gets_alone():
    values = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 6, 2)))
    masks = (torch.arange(6) < torch.tensor([[6], [2], [4]])).double()
    labels = torch.arange(18).view(3, 6) % 4

    def everything(rows, mask, label):
        return (
            masked_mean(rows, mask),
            masked_covariance(rows, mask),
            label_sums(rows, label, 4, mask),
        )

    stacked = vmap(everything)(values, masks, labels)
    for client in range(3):
        alone = everything(values[client], masks[client], labels[client])
        for one, other in zip(stacked, alone, strict=True):
            torch.testing.assert_close(one[client], other, rtol=1e-12, atol=1e-12)
