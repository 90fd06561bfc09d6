"""Digit-Five from small files written by the tests, and its sizes with the real files."""

from __future__ import annotations

import bz2

import numpy as np
import pytest
import torch
from scipy.io import savemat

from equipoise.data import Source, federate, load
from equipoise.data.digitfive import DOMAINS, digitfive, recipe
from equipoise.data.emnist import UPRIGHT
from equipoise.data.mnist import FILES
from equipoise.data.partition import ByGroup
from equipoise.errors import InputError
from tests.data.real_files import SHARED, needs_shared
from tests.data.small_files import write_idx_pair

TRAIN, TEST = 12, 5
DRAWS = np.random.default_rng(0)


def pictures(number, *shape):
    return DRAWS.integers(0, 256, (number, *shape)).astype(np.uint8)


def labels(number):
    return np.arange(number) % 10


def write_usps(path, values, targets):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed: equipoise[digitfive]")
    with h5py.File(path, "w") as file:
        for portion, data, target in zip(("train", "test"), values, targets, strict=True):
            file[f"{portion}/data"] = data.reshape(len(data), 256).astype(np.float32)
            file[f"{portion}/target"] = target.astype(np.int32)


def libsvm(values, targets):
    rows = (
        f"{target + 1} " + " ".join(f"{i + 1}:{2 * v - 1:.6f}" for i, v in enumerate(row.flatten()))
        for row, target in zip(values, targets, strict=True)
    )
    return bz2.compress("\n".join(rows).encode() + b"\n")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Write all real domains, with 12 training and 5 test images each; return folder and images."""
    root = tmp_path_factory.mktemp("digits")
    wanted = {}
    for folder in ("usps", "synth", "svhn", "mnist_m"):
        (root / folder).mkdir()
    sizes, names = (TRAIN, TEST), ("train", "test")
    wanted["mnist"] = [pictures(n, 28, 28) for n in sizes]
    for name, images in zip(names, wanted["mnist"], strict=True):
        write_idx_pair(images, labels(len(images)), root / "mnist", FILES[name])
    wanted["usps"] = [pictures(n, 16, 16) for n in sizes]
    write_usps(
        root / "usps" / "usps.h5", [x / 255 for x in wanted["usps"]], [labels(n) for n in sizes]
    )
    for domain, files, ten in (("synth", "synth_{}_32x32.mat", 0), ("svhn", "{}_32x32.mat", 10)):
        wanted[domain] = [pictures(n, 32, 32, 3) for n in sizes]
        for name, images in zip(names, wanted[domain], strict=True):
            y = np.where(labels(len(images)) == 0, ten, labels(len(images)))[:, None]
            savemat(
                root / domain / files.format(name),
                {"X": images.transpose(1, 2, 3, 0), "y": y.astype(np.uint8)},
            )
    wanted["mnistm"] = [pictures(n, 32, 32, 3) for n in sizes]
    for name, images in zip(names, wanted["mnistm"], strict=True):
        np.savez(
            root / "mnist_m" / f"mnist_m_{name}.npz",
            x=images,
            y=labels(len(images)).astype(np.uint8),
        )
    write_idx_pair(pictures(50, 28, 28), np.arange(50) % 25, root / "emnist", UPRIGHT)
    return root, wanted


def rgb(images):
    """Images as [N, 3, height, width]."""
    return (
        np.repeat(images[:, None], 3, axis=1) if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    )


@pytest.mark.parametrize(
    ("domain", "size"), [("mnist", 28), ("usps", 16), ("synth", 32), ("mnistm", 32), ("svhn", 32)]
)
def test_every_domain_is_read_as_it_is(small, domain, size):
    root, wanted = small
    source = digitfive(root=str(root), domains=[domain], size=size)
    assert np.array_equal(
        source.x.numpy(), np.concatenate([rgb(images) for images in wanted[domain]])
    )
    assert source.y.tolist() == [*labels(TRAIN), *labels(TEST)]
    assert source.test.tolist() == [False] * TRAIN + [True] * TEST
    assert (source.classes, source.group_names, source.test_of) == (10, (domain,), "group")


def test_usps_in_libsvms_format_is_the_same(small, tmp_path):
    _, wanted = small
    (tmp_path / "usps").mkdir()
    for images, name in zip(wanted["usps"], ("usps.bz2", "usps.t.bz2"), strict=True):
        (tmp_path / "usps" / name).write_bytes(libsvm(images / 255, labels(len(images))))
    found, same = (
        digitfive(root=str(root), domains=["usps"], size=16) for root in (tmp_path, small[0])
    )
    assert torch.equal(found.x, same.x)
    assert torch.equal(found.y, same.y)


def test_domains_come_in_their_order_and_size(small):
    source = digitfive(root=str(small[0]), size=20)
    assert source.group_names == DOMAINS
    assert source.x.shape == (5 * (TRAIN + TEST), 3, 20, 20)
    assert source.x.dtype == torch.uint8
    assert np.bincount(source.groups).tolist() == [TRAIN + TEST] * 5
    turned = digitfive(root=str(small[0]), size=20, domains=DOMAINS[::-1])
    assert turned.group_names == DOMAINS[::-1]
    assert torch.equal(turned.x[turned.groups == 4], source.x[source.groups == 0])


def test_resizing_keeps_brightness(small):
    """Halving an image averages its pixels, up to the width of the filter."""
    flat = digitfive(root=str(small[0]), domains=["svhn"], size=32).x.double()
    half = digitfive(root=str(small[0]), domains=["svhn"], size=16).x.double()
    assert (flat.mean((1, 2, 3)) - half.mean((1, 2, 3))).abs().max() < 3


def test_fewer_images_are_drawn_by_the_seed(small):
    how = {
        "root": str(small[0]),
        "domains": ["mnistm"],
        "size": 32,
        "train_images": 4,
        "test_images": 2,
    }
    whole = digitfive(root=str(small[0]), domains=["mnistm"], size=32)
    few, again, other = (digitfive(**how, seed=seed) for seed in (0, 0, 3))
    assert few.test.tolist() == [False] * 4 + [True] * 2
    assert torch.equal(few.x, again.x)
    assert not torch.equal(few.x, other.x)
    for image, label, test in zip(few.x, few.y, few.test, strict=True):
        (same,) = np.flatnonzero((whole.x == image).all((1, 2, 3)).numpy())
        assert (whole.y[same], whole.test[same]) == (label, test)


def test_inverted_digits_of_emnist_are_dark_on_bright(small):
    source = digitfive(root=str(small[0]), domains=["inverted"])
    # The first 10 of 25 labels are digits: 20 of 50 images, four of which are for testing.
    assert (len(source.x), source.test.sum()) == (20, 4)
    assert source.y.bincount().tolist() == [2] * 10
    upright = load(
        "emnist",
        root=str(small[0]),
        characters="0123456789",
        partition={"name": "iid", "clients": 1},
    ).x
    dark = 255 - (upright[:, 0] * 255).round().to(torch.uint8)
    assert {image.numpy().tobytes() for image in source.x[:, 0]} == {
        image.numpy().tobytes() for image in dark
    }


def test_digits_of_fonts_need_no_files(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: equipoise[digitfive]")
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path))
    source = digitfive(root="nowhere", domains=["fonts"], size=32, train_images=20, test_images=10)
    assert source.x.shape == (30, 3, 32, 32)
    assert source.test.sum() == 10
    with pytest.raises(InputError, match="domain 'fonts' of data 'digitfive' has no fixed size"):
        digitfive(domains=["fonts"], train_images=None)


@pytest.mark.parametrize(
    ("dif", "partition"),
    [
        (1, ByGroup(1, largest=1487)),
        (5, ByGroup(5, ratio=1.5, largest=2975)),
        (10.0, ByGroup(10, ratio=1.8, largest=2975)),
        (4, ByGroup(4, largest=2975)),
    ],
)
def test_the_factor_decides_the_partition(small, dif, partition):
    assert recipe(seed=0, root=str(small[0]), dif=dif)[1] == partition


def test_clients_share_the_test_images_of_their_domain(small):
    federation = load("digitfive", root=str(small[0]), dif=2, largest=12, splits=(1, 0, 0))
    assert federation.group_names == DOMAINS
    assert federation.test.sizes.tolist() == [TEST] * federation.clients
    assert federation.train.sizes.tolist() == [5, 6, 4, 5, 8, 6, 5]
    for client, group in enumerate(federation.groups):
        assert federation.test.of(client).tolist() == list(
            range(17 * group + TRAIN, 17 * group + 17)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domains": []}, "must be a list of different names"),
        ({"domains": ["mnist", "mnist"]}, "must be a list of different names"),
        ({"size": 0}, "size of data 'digitfive' must be a whole number of at least 1"),
        (
            {"test_images": 0},
            "test_images of data 'digitfive' must be a whole number of at least 1",
        ),
        (
            {"domains": ["svhn"], "root": "nowhere"},
            "no files of data 'digitfive svhn' in .*expected train_32x32.mat",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        digitfive(**options)


BROKEN = {
    "svhn/train_32x32.mat": ("svhn", r"cannot read .*train_32x32\.mat"),
    "usps/usps.h5": ("usps", r"cannot read .*usps\.h5"),
    "mnist_m/mnist_m_train.npz": ("mnistm", r"cannot read .*mnist_m_train\.npz"),
    "usps/usps.bz2": ("usps", r"cannot read .*usps\.bz2"),
}


@pytest.mark.parametrize("file", BROKEN)
def test_broken_files_are_named(file, tmp_path):
    domain, message = BROKEN[file]
    path = tmp_path / file
    path.parent.mkdir()
    path.write_bytes(b"nothing of use" * 20)
    for beside in (
        "test_32x32.mat",
        "mnist_m_test.npz",
        *(["usps.t.bz2"] if "bz2" in file else []),
    ):
        (path.parent / beside).touch()
    with pytest.raises(InputError, match=message):
        digitfive(root=str(tmp_path), domains=[domain])


def test_wrong_labels_are_refused(tmp_path):
    (tmp_path / "svhn").mkdir()
    for name in ("train", "test"):
        images = np.zeros((32, 32, 3, 2), np.uint8)
        savemat(tmp_path / "svhn" / f"{name}_32x32.mat", {"X": images, "y": np.array([[1], [11]])})
    with pytest.raises(InputError, match="must hold a label from 0 to 9 for each of its 2 images"):
        digitfive(root=str(tmp_path), domains=["svhn"])


@needs_shared("usps")
@needs_shared("mnist_m")
def test_real_counts():
    pytest.importorskip("h5py", reason="h5py is not installed: equipoise[digitfive]")
    how = {"root": str(SHARED), "train_images": None, "test_images": None}
    usps, mnistm = (
        digitfive(domains=[d], size=s, **how) for d, s in (("usps", 16), ("mnistm", 32))
    )
    assert [len(usps.x) - usps.test.sum(), usps.test.sum()] == [7291, 2007]
    assert [len(mnistm.x) - mnistm.test.sum(), mnistm.test.sum()] == [8000, 2000]
    assert np.bincount(usps.y[usps.test]).tolist() == [
        359,
        264,
        198,
        166,
        200,
        160,
        170,
        147,
        166,
        177,
    ]


@needs_shared("pacs")
def test_real_pacs_has_the_published_sizes():
    """Images are not decoded: a partition uses their domains only."""
    domains = ("photo", "art_painting", "cartoon", "sketch")
    counts = [len(list((SHARED / "pacs" / domain).glob("*/*.jpg"))) for domain in domains]
    assert sum(counts) == 9991
    source = Source(
        x=torch.zeros(9991, 1),
        y=torch.zeros(9991).long(),
        groups=np.repeat(range(4), counts),
        group_names=domains,
    )
    partition = ByGroup(10, ratio=2.165, largest=600, within="imbalance")
    federation = federate(source, partition, splits=(0.8, 0.0, 0.2), test="group")
    assert (federation.clients, federation.train.sizes.sum()) == (18, 1052)
    assert federation.test.sizes[[0, 10, 15, 17]].tolist() == [334, 410, 469, 786]
