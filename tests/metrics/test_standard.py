"""The metrics of the library against scikit-learn or by hand, also with missing classes."""

from __future__ import annotations

import math
import sys
import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn

from equipoise import tasks
from equipoise.metrics import build, names

CLASSES = 4
# Targets of clients: all classes, two of four, and a single sample.
TARGETS = {
    "all": [0, 1, 2, 3, 0, 0, 2, 1, 1, 3, 3, 2, 0],
    "two": [1, 3, 3, 1, 1, 3, 1],
    "one sample": [2],
}


def answers(y, seed=0):
    """Scores that are right more often than not."""
    noise = np.random.default_rng(seed).normal(size=(len(y), CLASSES))
    return torch.from_numpy(noise + 1.2 * np.eye(CLASSES)[y])


def probabilities(output):
    exponentials = np.exp(output.numpy())
    return exponentials / exponentials.sum(1, keepdims=True)


def mean_over_classes(function, output, y):
    return np.mean(
        [
            function(np.array(y) == label, probabilities(output)[:, label])
            for label in sorted(set(y))
        ]
    )


BY_LABELS = {
    "accuracy": sklearn.accuracy_score,
    "balanced_accuracy": sklearn.balanced_accuracy_score,
    "f1_macro": lambda y, found: sklearn.f1_score(y, found, average="macro"),
    "f1_weighted": lambda y, found: sklearn.f1_score(y, found, average="weighted"),
    "precision_macro": lambda y, found: sklearn.precision_score(y, found, average="macro"),
    "recall_macro": lambda y, found: sklearn.recall_score(y, found, average="macro"),
}


@pytest.mark.parametrize("held", TARGETS)
@pytest.mark.parametrize("name", BY_LABELS)
def test_metrics_of_labels(name, held):
    y = TARGETS[held]
    output = answers(y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = BY_LABELS[name](y, output.argmax(1).numpy())
    assert build(name)(output.float(), torch.tensor(y)) == pytest.approx(wanted, abs=1e-12)


def test_matthews_correlation():
    output = answers(TARGETS["all"])
    wanted = sklearn.matthews_corrcoef(TARGETS["all"], output.argmax(1).numpy())
    assert build("mcc")(output, torch.tensor(TARGETS["all"])) == pytest.approx(wanted, abs=1e-12)


def test_area_under_the_curve_is_scikit_learns_where_all_classes_are_there():
    y = TARGETS["all"]
    output = answers(y)
    wanted = sklearn.roc_auc_score(y, probabilities(output), multi_class="ovr", average="macro")
    assert build("auroc")(output, torch.tensor(y)) == pytest.approx(wanted, abs=1e-12)


def test_area_under_the_curve_of_two_classes():
    y = [0, 1, 1, 0, 1, 0, 0]
    output = answers(y)[:, :2]
    for name, function in (("auroc", sklearn.roc_auc_score),):
        assert build(name)(output, torch.tensor(y)) == pytest.approx(
            function(y, probabilities(output)[:, 1]), abs=1e-12
        )


@pytest.mark.parametrize("held", ["all", "two"])
@pytest.mark.parametrize(
    ("name", "function"),
    [("auroc", sklearn.roc_auc_score), ("average_precision", sklearn.average_precision_score)],
)
def test_each_class_against_the_others(name, function, held):
    y = TARGETS[held]
    output = answers(y)
    wanted = mean_over_classes(function, output, y)
    assert build(name)(output, torch.tensor(y)) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("name", ["auroc", "average_precision", "mcc"])
def test_one_class_leaves_it_undefined(name):
    y = torch.tensor([2, 2, 2])
    assert math.isnan(build(name)(answers(y), y))


@pytest.mark.parametrize("rounded", [False, True], ids=["different scores", "many equal scores"])
@pytest.mark.parametrize("samples", [3, 40, 1500])
def test_random_clients_have_scikit_learns_values(samples, rounded):
    """Also those without some classes, and with certain models, whose probabilities are 0 or 1."""
    rng = np.random.default_rng(samples)
    for scale in (0.1, 3.0, 900.0):
        y = rng.choice([0, 2, 3, 5], samples)
        y[:2] = 0, 3
        output = torch.from_numpy(scale * (rng.normal(size=(samples, 6)) + np.eye(6)[y]))
        output, found = output.round() if rounded else output, {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, function in (BY_LABELS | {"mcc": sklearn.matthews_corrcoef}).items():
                found[name] = function(y, output.argmax(1).numpy())
        exact = output.softmax(1).numpy()
        for name, function in (
            ("auroc", sklearn.roc_auc_score),
            ("average_precision", sklearn.average_precision_score),
        ):
            found[name] = np.mean([function(y == c, exact[:, c]) for c in np.unique(y)])
        for name, value in found.items():
            assert build(name)(output, torch.from_numpy(y)) == pytest.approx(value, abs=1e-12), name


def test_metrics_of_labels_and_numbers_do_not_need_scikit_learn(monkeypatch):
    """Its checks of arguments take many times as long as the metrics of a client."""
    for module in ("sklearn", "sklearn.metrics"):
        monkeypatch.setitem(sys.modules, module, None)
    y = torch.tensor(TARGETS["all"])
    for name in (*BY_LABELS, "mcc", "auroc", "average_precision"):
        assert math.isfinite(build(name)(answers(TARGETS["all"]), y)), name
    for name in ("mae", "rmse", "r2"):
        assert math.isfinite(build(name)(y.unsqueeze(1) + 0.5, y.double())), name


@pytest.mark.parametrize("name", ["auroc", "average_precision"])
def test_a_model_that_has_diverged_has_no_order(name):
    output, y = answers(TARGETS["all"]), torch.tensor(TARGETS["all"])
    output[0, 1] = math.nan
    assert math.isnan(build(name)(output, y))


def test_calibration_error_by_hand():
    y = TARGETS["all"] * 5
    output = 2 * answers(y, seed=1)
    bins = {}
    for row, label in zip(probabilities(output), y, strict=True):
        place = next(b for b in range(15) if b / 15 < row.max() <= (b + 1) / 15)
        bins.setdefault(place, []).append((row.argmax() == label, row.max()))
    wanted = sum(
        len(b) / len(y) * abs(np.mean([hit for hit, _ in b]) - np.mean([p for _, p in b]))
        for b in bins.values()
    )
    assert len(bins) > 4
    assert build("ece")(output, torch.tensor(y)) == pytest.approx(wanted, abs=1e-12)


def test_a_certain_model_that_is_wrong_is_not_calibrated():
    assert build("ece")(torch.tensor([[900.0, 0.0]]), torch.tensor([1])) == 1.0


def test_brier_score_of_two_classes_is_twice_scikit_learns():
    y = [0, 1, 1, 0, 1]
    output = answers(y)[:, :2]
    wanted = 2 * sklearn.brier_score_loss(y, probabilities(output)[:, 1])
    assert build("brier")(output, torch.tensor(y)) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("shape", [(9,), (9, 1), (9, 3)])
def test_metrics_of_regression(shape):
    rng = np.random.default_rng(0)
    y, found = rng.normal(size=shape), rng.normal(size=(9, *(shape[1:] or (1,))))
    output, same = torch.from_numpy(found), found.reshape(shape)
    wanted = {
        "mae": sklearn.mean_absolute_error(y, same),
        "rmse": math.sqrt(sklearn.mean_squared_error(y, same)),
        "r2": sklearn.r2_score(y, same),
    }
    for name, value in wanted.items():
        assert build(name)(output, torch.from_numpy(y)) == pytest.approx(value, abs=1e-12)


def test_constant_targets_leave_the_share_of_explained_variance_undefined():
    assert math.isnan(build("r2")(torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 3.0])))


def test_metrics_of_segmentation_pool_the_pixels_of_all_images():
    rng = np.random.default_rng(0)
    y, output = (
        torch.from_numpy(rng.integers(0, 3, (4, 5, 6))),
        torch.from_numpy(rng.normal(size=(4, 3, 5, 6))),
    )
    found = output.argmax(1)
    shares = [
        int(((y == c) & (found == c)).sum()) / int(((y == c) | (found == c)).sum()) for c in (1, 2)
    ]
    assert build("iou")(output, y) == pytest.approx(sum(shares) / 2, abs=1e-12)
    assert build("pixel_accuracy")(output, y) == pytest.approx(
        sklearn.accuracy_score(y.flatten(), found.flatten())
    )
    empty = torch.zeros(1, 2, 2, dtype=torch.int64)
    assert math.isnan(build("iou")(torch.stack([1.0 - empty, 0.0 * empty], 1), empty))


def test_every_metric_of_the_library_is_for_a_task_and_lies_in_its_range():
    rng = np.random.default_rng(0)
    samples = {
        "classification": (answers(TARGETS["all"]), torch.tensor(TARGETS["all"])),
        "regression": (
            torch.from_numpy(rng.normal(size=(9, 1))),
            torch.from_numpy(rng.normal(size=9)),
        ),
        "segmentation": (
            torch.from_numpy(rng.normal(size=(2, 3, 4, 4))),
            torch.from_numpy(rng.integers(0, 3, (2, 4, 4))),
        ),
        "multilabel": (
            torch.from_numpy(rng.normal(size=(9, 3))),
            torch.from_numpy(rng.integers(0, 2, (9, 3))),
        ),
    }
    own = [metric for metric in map(build, names()) if not metric._own]
    assert len(own) >= 16
    for metric in own:
        (task,) = metric.tasks
        assert metric.fits(tasks.build(task))
        assert metric.fault(metric(*samples[task])) is None, metric.name
