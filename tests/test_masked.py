"""Sums over a batch against NumPy, with anything at all in the padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.func import vmap

from equipoise.masked import label_sums, masked_covariance, masked_mean, masked_sum

KEPT = [True, False, True, True, False, True]


def batch(*shape):
    """Six rows, four of them samples, and what the samples are for NumPy."""
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
    np.testing.assert_allclose(masked_covariance(values, None), np.cov(values.numpy(), rowvar=False), rtol=1e-9)


def test_the_covariance_of_a_single_sample_is_zero():
    values, _ = batch(3)
    assert not masked_covariance(values, (torch.arange(6) < 1).double()).any()
    assert not masked_covariance(values[:1], None).any()


@MASKS
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_sums_by_class(shape, dtype):
    values, _ = batch(*shape)
    labels = torch.tensor([2, 0, 0, 2, 3, 3])
    wanted = np.zeros((5, *shape))
    for value, label, kept in zip(values.numpy(), labels.tolist(), KEPT, strict=True):
        wanted[label] += value if kept else 0
    np.testing.assert_allclose(label_sums(values, labels, 5, torch.tensor(KEPT).to(dtype)), wanted, rtol=1e-12)
    whole = label_sums(values, labels, 5, None)
    np.testing.assert_allclose(whole.sum(0), values.numpy().sum(0), rtol=1e-9)


def test_stacked_clients_get_what_each_gets_alone():
    values = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 6, 2)))
    masks = (torch.arange(6) < torch.tensor([[6], [2], [4]])).double()
    labels = torch.arange(18).view(3, 6) % 4

    def everything(rows, mask, label):
        return masked_mean(rows, mask), masked_covariance(rows, mask), label_sums(rows, label, 4, mask)

    stacked = vmap(everything)(values, masks, labels)
    for client in range(3):
        alone = everything(values[client], masks[client], labels[client])
        for one, other in zip(stacked, alone, strict=True):
            torch.testing.assert_close(one[client], other, rtol=1e-12, atol=1e-12)
