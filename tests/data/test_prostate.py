"""Volumes in NIfTI format that the tests write, and invalid ones."""

from __future__ import annotations

import os
import re
import sys

import nibabel
import numpy as np
import pytest
import torch

from equipoise import train
from equipoise.data import load
from equipoise.data.cache import MappedArray
from equipoise.data.prostate import prostate
from equipoise.errors import InputError

# The slices of each volume that show the prostate.
SHOWN = {
    ("HK", "Case00"): [1, 2],
    ("HK", "Case01"): [0, 1, 2, 3],
    ("UCL", "Case00"): [2],
    ("UCL", "Case03"): [0, 3],
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("EQUIPOISE_CACHE", str(folder))
    return folder


def save(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    # Voxels of different length on each axis, as in real scans.
    nibabel.save(nibabel.Nifti1Image(values, np.diag([0.5, 0.6, 3.0, 1.0])), path)


def volume_of(number, shape=(10, 10, 4)):
    return np.random.default_rng(number).integers(0, 1000, shape).astype(np.int16)


def mask_of(number, slices, shape=(10, 10, 4)):
    """Labels 1 and 2, the two zones of a prostate, in some slices."""
    mask = np.zeros(shape, np.uint8)
    mask[2 : 5 + number, 1:4, slices] = 1
    mask[2, 1, slices] = 2
    return mask


@pytest.fixture
def root(tmp_path):
    for number, ((site, case), slices) in enumerate(SHOWN.items()):
        save(tmp_path / "scans" / site / f"{case}.nii.gz", volume_of(number))
        ending = "_segmentation.nii.gz" if number else "_Segmentation.nii.gz"
        save(tmp_path / "scans" / site / f"{case}{ending}", mask_of(number, slices))
    return tmp_path / "scans"


def slices_by_hand(channels=1, quantile=1.0, empty=False):
    """Read the arrays that were written, slice by slice."""
    images, masks = [], []
    for number, slices in enumerate(SHOWN.values()):
        values = volume_of(number).astype(np.float64)
        lowest, highest = values.min(), np.quantile(values, quantile)
        for k in range(4) if empty else slices:
            around = [
                min(max(k + step, 0), 3) for step in range(-(channels // 2), channels // 2 + 1)
            ]
            scaled = [
                2 * (np.minimum(values[:, :, i], highest) - lowest) / (highest - lowest) - 1
                for i in around
            ]
            images.append(np.stack([image.T for image in scaled]))
            masks.append(mask_of(number, slices)[:, :, k].T > 0)
    return np.stack(images), np.stack(masks)


@pytest.mark.parametrize("options", [{}, {"channels": 3}, {"quantile": 0.9}, {"empty": True}])
def test_slices_are_those_of_the_files(root, options):
    source = prostate(root=str(root), size=10, **options)
    images, masks = slices_by_hand(**options)
    assert source.x.shape == (len(images), options.get("channels", 1), 10, 10)
    assert source.x.dtype == torch.float32
    assert np.allclose(source.x.numpy(), images, atol=1e-6)
    assert source.y.dtype == torch.uint8
    assert np.array_equal(source.y.numpy(), masks)


def test_sites_volumes_and_splits(root):
    source = prostate(root=str(root), size=12)
    assert source.group_names == ("HK", "UCL")
    assert source.groups.tolist() == [0] * 6 + [1] * 3
    assert source.units.tolist() == [0, 0, 1, 1, 1, 1, 2, 3, 3]
    assert source.x.shape == (9, 1, 12, 12)
    # Resized masks are still masks of about the same area.
    _, masks = slices_by_hand()
    area = source.y.double().mean((1, 2)).numpy()
    assert set(source.y.unique().tolist()) == {0, 1}
    assert np.allclose(area, masks.mean((1, 2)), rtol=0.35)
    federation = load("prostate", root=str(root), size=12, splits=(0.5, 0.0, 0.5))
    assert federation.client_names == ("HK", "UCL")
    for client in range(2):
        train_units, test_units = (
            set(source.units[split.of(client)].tolist())
            for split in (federation.train, federation.test)
        )
        assert len(train_units) == len(test_units) == 1
        assert not train_units & test_units
    assert prostate(root=str(root), size=12, sites=["UCL", "HK"]).group_names == ("UCL", "HK")


def test_volumes_are_prepared_once(root, monkeypatch):
    first = prostate(root=str(root), size=12)
    with monkeypatch.context() as patched:
        patched.setattr(nibabel, "load", lambda path: pytest.fail(f"{path} was read again"))
        again = prostate(root=str(root), size=12, mapped=True)
    assert isinstance(again.x, MappedArray)
    assert torch.equal(again.x[:], first.x)
    assert torch.equal(again.y, first.y)
    # A changed file is read again.
    path = root / "UCL" / "Case00.nii.gz"
    save(path, volume_of(9))
    os.utime(path, ns=(1, 1))
    assert not torch.equal(prostate(root=str(root), size=12).x[6], first.x[6])


def test_a_federation_of_volumes_is_trained_on(root):
    federation = load("prostate", root=str(root), size=16, splits=(0.5, 0.0, 0.5))
    run = train(federation, model={"name": "unet", "width": 2, "depth": 1}, rounds=1, batch_size=5)
    assert 0 <= run.summary["results"]["global"]["seen"]["mean"] <= 1


def test_what_is_missing_or_broken_is_named(root, tmp_path):
    where = str(root)
    with pytest.raises(InputError, match="unknown site 'BMC'"):
        prostate(root=where, sites=["BMC"])
    (root / "UCL" / "Case00_segmentation.nii.gz").rename(
        root / "UCL" / "Case07_segmentation.nii.gz"
    )
    with pytest.raises(
        InputError,
        match="UCL/Case00.nii.gz has no mask, UCL/Case07_segmentation.nii.gz has no volume",
    ):
        prostate(root=where)
    (root / "UCL" / "Case07_segmentation.nii.gz").rename(
        root / "UCL" / "Case00_segmentation.nii.gz"
    )
    (root / "BMC").mkdir()
    with pytest.raises(
        InputError,
        match=r"no volumes \(files that end in .nii.gz, .nii\) in these folders of .*: BMC",
    ):
        prostate(root=where)
    (root / "BMC").rmdir()
    save(root / "UCL" / "Case03.nii.gz", volume_of(0, (10, 10, 5)))
    (root / "HK" / "Case00.nii.gz").write_bytes(b"not a volume")
    message = (
        r"2 of the 4 volumes cannot be read: HK/Case00.nii.gz \(.*\), UCL/Case03.nii.gz "
        r"\(its shape is \(10, 10, 5\), but that of its mask \(10, 10, 4\)\)"
    )
    with pytest.raises(InputError, match=message):
        prostate(root=where, size=12)
    nothing = tmp_path / "nothing" / "HK"
    save(nothing / "a.nii", volume_of(0))
    save(nothing / "a_segmentation.nii", mask_of(0, []))
    with pytest.raises(InputError, match="shows the prostate: all masks are empty"):
        prostate(root=str(nothing.parent), size=12)
    assert len(prostate(root=str(nothing.parent), size=12, empty=True).x) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 2}, "channels of data 'prostate' must be odd, got 2"),
        ({"quantile": 99}, "quantile of data 'prostate' must be at most 1, got 99"),
        ({"size": 0}, "size of data 'prostate'"),
        ({"empty": "no"}, "empty of data 'prostate' must be true or false"),
        ({"mapped": 1}, "mapped of data 'prostate' must be true or false"),
    ],
)
def test_wrong_options_are_refused(root, options, message):
    with pytest.raises(InputError, match=message):
        prostate(root=str(root), **options)


def test_without_nibabel_the_error_says_what_to_install(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(
        InputError, match=re.escape("needs nibabel: pip install 'equipoise[medical]'")
    ):
        prostate(root=str(root))
