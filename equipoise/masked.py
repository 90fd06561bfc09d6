"""Sums, means, covariances and CORAL over the samples of a batch, without its padding."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.errors import unknown


def masked_sum(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sum over the samples of a batch.

    Parameters
    ----------
    values : Tensor
        ``[samples, ...]``. Padding rows may have any finite values.
    mask : Tensor or None
        1 for samples, 0 for padding; ``None`` if all rows are samples.

    Returns
    -------
    Tensor
        ``[...]``.

    Examples
    --------
    >>> values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]])
    >>> masked_sum(values, torch.tensor([1.0, 1.0, 0.0]))
    tensor([4., 6.])
    """
    if mask is None:
        return values.sum(0)
    return (values * mask.to(values.dtype).view(-1, *(1,) * (values.dim() - 1))).sum(0)


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Average over the samples of a batch; see :func:`masked_sum`.

    Examples
    --------
    >>> masked_mean(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1.0, 1.0, 0.0]))
    tensor(2.)
    """
    return (
        values.mean(0) if mask is None else masked_sum(values, mask) / mask.to(values.dtype).sum()
    )


def masked_covariance(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the unbiased covariance matrix of the samples of a batch; zero for a single sample.

    Parameters
    ----------
    values : Tensor
        ``[samples, d]``.
    mask : Tensor or None
        As in :func:`masked_sum`.

    Returns
    -------
    Tensor
        ``[d, d]``.

    Examples
    --------
    >>> values = torch.tensor([[1.0, 0.0], [3.0, 2.0], [9.0, 9.0]])
    >>> masked_covariance(values, torch.tensor([1.0, 1.0, 0.0]))
    tensor([[2., 2.],
            [2., 2.]])
    """
    return _mean_and_covariance(values, mask)[1]


def _mean_and_covariance(values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    mean = masked_mean(values, mask)
    centred = values - mean
    if mask is None:
        return mean, centred.T @ centred / max(1, len(values) - 1)
    kept = mask.to(values.dtype)
    centred = centred * kept.unsqueeze(1)
    return mean, centred.T @ centred / (kept.sum() - 1).clamp(min=1)


CORAL_FORMS = ("domainbed", "deepcoral")


def coral(
    rows: Tensor,
    others: Tensor,
    mask: Tensor | None = None,
    others_mask: Tensor | None = None,
    *,
    form: str = "domainbed",
) -> Tensor:
    """Return the CORAL distance between two batches.

    With μ the mean and C the unbiased covariance of a batch of vectors of length d, the forms are

    - ``domainbed``, as in DomainBed: mean((μ₁ − μ₂)²) + mean((C₁ − C₂)²), means over the d and d²
      entries;
    - ``deepcoral``, as Sun and Saenko (2016) define it: ‖C₁ − C₂‖²_F / (4 d²).

    Both are zero for equal batches. The covariance of a single sample is zero. For two single
    samples, the first form therefore compares the means only, and the second form is zero.

    Parameters
    ----------
    rows, others : Tensor
        ``[samples, d]``. The numbers of samples may differ.
    mask, others_mask : Tensor or None
        As in :func:`masked_sum`.
    form : {"domainbed", "deepcoral"}
        Which form to use.

    Returns
    -------
    Tensor
        One number.

    Raises
    ------
    InputError
        If there is no such form.

    Examples
    --------
    >>> rows, others = torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [4.0]])
    >>> coral(rows, others), coral(rows, others, form="deepcoral")
    (tensor(37.), tensor(9.))
    """
    if form not in CORAL_FORMS:
        raise unknown("form", form, CORAL_FORMS, where="coral")
    moments = _mean_and_covariance(rows, mask), _mean_and_covariance(others, others_mask)
    means, covariances = (
        (one - other).square().mean() for one, other in zip(*moments, strict=True)
    )
    return means + covariances if form == "domainbed" else covariances / 4


def label_sums(values: Tensor, labels: Tensor, classes: int, mask: Tensor | None) -> Tensor:
    """Sum over the samples of each class.

    Parameters
    ----------
    values : Tensor
        ``[samples, ...]``.
    labels : Tensor
        The class of each sample.
    classes : int
        The number of classes.
    mask : Tensor or None
        As in :func:`masked_sum`.

    Returns
    -------
    Tensor
        ``[classes, ...]``; zero for classes without samples.

    Examples
    --------
    >>> label_sums(torch.ones(3), torch.tensor([0, 2, 2]), 3, None)
    tensor([1., 0., 2.])
    """
    members = (labels.unsqueeze(0) == torch.arange(classes, device=labels.device).unsqueeze(1)).to(
        values.dtype
    )
    if mask is not None:
        members = members * mask.to(values.dtype)
    return (members @ values.reshape(len(values), -1)).view(classes, *values.shape[1:])
