"""Image folders: small ones with known pixels, invalid ones, and PACS."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from equipoise import train
from equipoise.cli import app
from equipoise.data import ByGroup, load
from equipoise.data.augment import Crop, Flip
from equipoise.data.cache import MappedArray
from equipoise.data.imagefolder import imagefolder, recipe
from equipoise.errors import InputError
from equipoise.models.base import Model
from tests.data.real_files import SHARED, needs_shared


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("EQUIPOISE_CACHE", str(folder))
    return folder


def picture(seed, height=8, width=8):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path: Path, pixels) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write(root: Path, domains=("photo", "art"), classes=("dog", "cat"), each=5) -> list[str]:
    """Write PNG files whose pixels follow from their index; return their names in reading order."""
    names = [
        f"{d}/{c}/{i}.png" for d in sorted(domains) for c in sorted(classes) for i in range(each)
    ]
    for seed, name in enumerate(names):
        save(root / name, picture(seed))
    return names


def test_pixels_labels_and_groups_are_those_of_the_files(tmp_path):
    names = write(tmp_path / "animals")
    source = imagefolder(root=str(tmp_path / "animals"), size=8)
    assert source.name == "animals"
    assert source.x.dtype == torch.uint8
    assert source.y.dtype == torch.int64
    expected = np.stack([picture(seed).transpose(2, 0, 1) for seed in range(len(names))])
    assert np.array_equal(source.x.numpy(), expected)
    assert source.group_names == ("art", "photo")
    assert source.groups.tolist() == [0] * 10 + [1] * 10
    assert source.y.tolist() == ([0] * 5 + [1] * 5) * 2
    assert source.classes == 2
    assert source.ids.tolist() == ["art"] * 10 + ["photo"] * 10


READER = """
import hashlib, sys
from equipoise.data.imagefolder import imagefolder

print("ready", flush=True)
sys.stdin.readline()
x = imagefolder(root=sys.argv[1], size=64, mapped=sys.argv[2] == "mapped").x
print(x.shape[0], hashlib.sha256(x[:].numpy().tobytes()).hexdigest(), flush=True)
"""


def test_runs_that_start_together_and_are_killed_share_the_cache(tmp_path, cache):
    names = write(tmp_path / "animals", each=100)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, tmp_path / "animals", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for kind in ("mapped", "in memory") * 3
    ]
    assert [reader.stdout.readline() for reader in readers] == 6 * ["ready\n"]
    for reader in readers:
        reader.stdin.write("go\n")
        reader.stdin.flush()
    # Whichever of them writes the entry: the first two are killed meanwhile, or soon after.
    deadline = time.monotonic() + 60
    while not list(cache.glob("arrays/*.npy*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    for reader in readers[:2]:
        reader.kill()
    said = {reader.communicate(timeout=120)[0] for reader in readers[2:]}
    assert [reader.returncode for reader in readers[2:]] == [0, 0, 0, 0]
    for reader in readers[:2]:
        reader.communicate()
    x = imagefolder(root=str(tmp_path / "animals"), size=64).x
    assert said == {f"{len(names)} {hashlib.sha256(x.numpy().tobytes()).hexdigest()}\n"}
    assert sorted(path.suffix for path in (cache / "arrays").iterdir()) == [".npy", ".txt"]


def test_classes_and_domains_may_be_chosen_and_ordered(tmp_path):
    names = write(tmp_path, domains=("a", "b", "c"), classes=("x", "y", "z"), each=3)
    source = imagefolder(root=str(tmp_path), size=8, classes=["z", "x"], domains=["c", "a"])
    wanted = [f"{d}/{c}/{i}.png" for d in "ca" for c in "zx" for i in range(3)]
    expected = np.stack([picture(names.index(name)).transpose(2, 0, 1) for name in wanted])
    assert np.array_equal(source.x.numpy(), expected)
    assert source.group_names == ("c", "a")
    assert source.y.tolist() == ([0] * 3 + [1] * 3) * 2
    assert source.classes == 2


def test_images_are_resized_without_regard_to_their_proportions(tmp_path):
    smooth = np.indices((40, 64)).sum(0)[..., None] * np.array([1, 2, 0.5])
    for name in ("c", "e"):
        save(tmp_path / "d" / name / "1.png", smooth.clip(0, 255).astype(np.uint8))
    x = imagefolder(root=str(tmp_path), size=16).x
    pixels = (
        torch.from_numpy(smooth.clip(0, 255).astype(np.uint8)).permute(2, 0, 1).unsqueeze(0).float()
    )
    expected = F.interpolate(pixels, (16, 16), mode="bilinear", antialias=True)
    assert x.shape == (2, 3, 16, 16)
    assert (x.float() - expected).abs().max() <= 1


def test_images_of_every_kind_become_rgb(tmp_path):
    folder = tmp_path / "d" / "c"
    folder.mkdir(parents=True)
    red = Image.new("RGB", (4, 4), (200, 30, 10))
    red.save(folder / "1.bmp")
    red.convert("RGBA").save(folder / "2.PNG")
    red.save(folder / "3.jpeg", quality=100, subsampling=0)
    red.quantize(4).save(folder / "4.gif")
    red.quantize(4).save(folder / "5.png", transparency=b"\x00\x80\xff")
    red.convert("L").save(folder / "6.png")
    red.convert("CMYK").save(folder / "7.tif")
    Image.new("1", (4, 4), 1).save(folder / "8.png")
    red.save(folder / "9.webp", lossless=True)
    (folder / "notes.txt").write_text("not an image, and not named like one")
    (folder / ".hidden.png").write_text("neither")
    (folder / "more.png").mkdir()
    save(tmp_path / "d" / "other" / "1.png", picture(0))
    x = imagefolder(root=str(tmp_path), size=4).x[:-1].float()
    assert len(x) == 9
    assert x.flatten(2).std(2).max() <= 1
    grey = round(200 * 0.299 + 30 * 0.587 + 10 * 0.114)
    colours = [(200, 30, 10)] * 5 + [(grey,) * 3] + [(200, 30, 10)] + [(255,) * 3] + [(200, 30, 10)]
    assert (x[:, :, 0, 0] - torch.tensor(colours)).abs().max() <= 3


def test_scaled_pixels(tmp_path):
    write(tmp_path)
    scaled, plain = (imagefolder(root=str(tmp_path), size=8, scaled=how).x for how in (True, False))
    assert scaled.dtype == torch.float32
    assert torch.equal((scaled * 255).round().to(torch.uint8), plain)
    with pytest.raises(InputError, match="mapped of data 'imagefolder' is true, but scaled"):
        imagefolder(root=str(tmp_path), size=8, scaled=True, mapped=True)


def test_the_usual_partition_is_one_client_a_domain(tmp_path):
    write(tmp_path)
    federation = load("imagefolder", root=str(tmp_path), size=8)
    assert [federation.client_name(client) for client in range(federation.clients)] == [
        "art",
        "photo",
    ]
    assert federation.group_names == ("art", "photo")
    assert federation.groups.tolist() == [0, 1]
    assert federation.label_counts().tolist() == [[5, 5], [5, 5]]
    unequal = load("imagefolder", root=str(tmp_path), size=8, partition=ByGroup(1, truncate=False))
    assert unequal.groups.tolist() == [0, 0, 1, 1]
    held_out = load("imagefolder", root=str(tmp_path), size=8, leave_out="photo")
    assert held_out.unseen.tolist() == [False, True]


def test_a_relative_root_is_also_looked_for_in_the_data_directory(tmp_path, monkeypatch):
    write(tmp_path / "data" / "animals")
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    assert len(imagefolder(root="animals", size=8).x) == 20
    write(tmp_path / "animals", each=1)
    assert len(imagefolder(root="animals", size=8).x) == 4


def test_images_are_decoded_once(tmp_path, cache):
    names = write(tmp_path / "root")
    first = imagefolder(root=str(tmp_path / "root"), size=8)
    # This file differs from the previous one only in its content, so it is not read again.
    file = tmp_path / "root" / names[3]
    status = file.stat()
    file.write_bytes(bytes(status.st_size))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = imagefolder(root=str(tmp_path / "root"), size=8)
    assert torch.equal(again.x, first.x)
    assert len(list((cache / "arrays").glob("*.npy"))) == 1
    os.utime(file)
    with pytest.raises(
        InputError, match=r"1 of the 20 images .*: art/cat/3\.png \(not an image\)$"
    ):
        imagefolder(root=str(tmp_path / "root"), size=8)


def test_a_moved_folder_is_not_decoded_again_but_other_files_and_sizes_are(tmp_path, cache):
    write(tmp_path / "root")
    imagefolder(root=str(tmp_path / "root"), size=8)
    (tmp_path / "root").rename(tmp_path / "moved")
    imagefolder(root=str(tmp_path / "moved"), size=8)
    assert len(list((cache / "arrays").glob("*.npy"))) == 1
    imagefolder(root=str(tmp_path / "moved"), size=4)
    assert len(list((cache / "arrays").glob("*.npy"))) == 2
    save(tmp_path / "moved" / "art" / "cat" / "new.png", picture(99))
    source = imagefolder(root=str(tmp_path / "moved"), size=8)
    assert len(source.x) == 21
    assert np.array_equal(source.x[5].numpy(), picture(99).transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("mapped", "kind"), [(None, torch.Tensor), (False, torch.Tensor), (True, MappedArray)]
)
def test_small_images_are_in_memory_unless_told_otherwise(tmp_path, mapped, kind):
    write(tmp_path)
    source = imagefolder(root=str(tmp_path), size=8, mapped=mapped)
    assert isinstance(source.x, kind)
    assert np.array_equal(
        source.x[3:5].numpy(), np.stack([picture(s).transpose(2, 0, 1) for s in (3, 4)])
    )


def test_large_images_stay_on_disk(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr("equipoise.data.imagefolder.LARGEST_IN_MEMORY", 20 * 3 * 8 * 8)
    assert isinstance(imagefolder(root=str(tmp_path), size=8).x, MappedArray)
    assert isinstance(imagefolder(root=str(tmp_path), size=7).x, torch.Tensor)


def test_broken_images_are_named_together(tmp_path, cache):
    names = write(tmp_path, each=2)
    whole = (tmp_path / names[0]).read_bytes()
    (tmp_path / names[0]).write_bytes(whole[: len(whole) // 2])
    (tmp_path / names[3]).write_text("no image")
    (tmp_path / names[5]).write_bytes(b"")
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / names[6])
    with pytest.raises(InputError) as raised:
        imagefolder(root=str(tmp_path), size=8)
    message = str(raised.value)
    assert message.startswith(f"4 of the 8 images in {tmp_path} cannot be read: art/cat/0.png (")
    assert (
        "art/dog/1.png (not an image), photo/cat/1.png (not an image), photo/dog/0.png (its pixels "
        "are of" in message
    )
    assert not list((cache / "arrays").glob("*.npy"))


def test_eight_broken_images_are_named_at_most(tmp_path):
    names = write(tmp_path, each=6)
    for name in names:
        (tmp_path / name).write_text("no image")
    with pytest.raises(InputError, match="^24 of the 24 images .* and 16 more$") as raised:
        imagefolder(root=str(tmp_path), size=8)
    assert [name for name in names if name in str(raised.value)] == names[:8]


def remove(root: Path, name: str) -> None:
    for file in (root / name).iterdir():
        file.unlink()
    (root / name).rmdir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"domains": ["foto"]},
            "unknown domain 'foto' in domains of data 'imagefolder', read from ROOT; did you mean "
            "'photo'",
        ),
        (
            {"classes": ["dg"]},
            "unknown class 'dg' in classes of data 'imagefolder', read from ROOT; did you mean "
            "'dog'",
        ),
        (
            {"classes": []},
            "classes of data 'imagefolder' must be distinct names, at least one, got []",
        ),
        ({"classes": ["dog"]}, "reads one class only from ROOT, 'dog'; valid: two classes or more"),
        ({"classes": ["dog", "dog"]}, "classes of data 'imagefolder' must be distinct names"),
        ({"domains": "photo"}, "domains of data 'imagefolder' must be a list, got 'photo'"),
        ({"domains": [3]}, "each of domains of data 'imagefolder' must be a name, got 3"),
        ({"size": 0}, "size of data 'imagefolder' must be a whole number of at least 1, got 0"),
        ({"mapped": "no"}, "mapped of data 'imagefolder' must be true or false, got 'no'"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    write(tmp_path)
    with pytest.raises(InputError, match=re.escape(message.replace("ROOT", str(tmp_path)))):
        imagefolder(**{"root": str(tmp_path), "size": 8, **options})


def test_a_missing_root_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_DATA", "/srv/data")
    message = (
        "root='animals' of data 'imagefolder' is not a folder; looked for "
        f"{tmp_path}/animals and /srv/data/animals"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        imagefolder(root="animals")
    with pytest.raises(InputError, match=f"not a folder; looked for {tmp_path}/other$"):
        imagefolder(root=str(tmp_path / "other"))
    with pytest.raises(InputError, match="data 'imagefolder' needs root"):
        load("imagefolder")


def test_folders_that_are_empty_or_unequal_are_named(tmp_path):
    with pytest.raises(InputError, match="has no folders; data 'imagefolder' needs one per domain"):
        imagefolder(root=str(tmp_path))
    write(tmp_path, domains=("a", "b", "c"), classes=("w", "x", "y"), each=2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "void").mkdir()
    with pytest.raises(
        InputError, match="each domain needs .*; there is none in domain 'empty', domain 'void'$"
    ):
        imagefolder(root=str(tmp_path))
    three = {"root": str(tmp_path), "domains": ("a", "b", "c"), "size": 8}
    (tmp_path / "a" / "x" / "0.png").rename(tmp_path / "a" / "x" / "0.txt")
    (tmp_path / "a" / "x" / "1.png").unlink()
    with pytest.raises(
        InputError, match=r"no images \(files that end in \.bmp, .*\) in these folders of .*: a/x$"
    ):
        imagefolder(**three)
    remove(tmp_path, "a/x")
    (tmp_path / "b" / "z").mkdir()
    with pytest.raises(
        InputError,
        match="must have the same classes.*: 'x' is missing in 'a', 'z' is missing in 'a', "
        "'z' is missing in 'c'$",
    ):
        imagefolder(**three)
    assert len(imagefolder(**three, classes=["w", "y"]).x) == 12


def test_without_pillow_the_error_says_what_to_install(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"needs Pillow: pip install 'equipoise\[images\]'"):
        imagefolder(root=str(tmp_path), size=8)


class Bytes(nn.Module):
    """Features that take bytes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3 * 8 * 8, 6)

    def forward(self, x):
        return self.linear(x.flatten(1).float() / 255).tanh()


def test_bytes_are_augmented_and_trained_on_from_memory_and_from_disk(tmp_path):
    write(tmp_path)
    torch.manual_seed(0)
    model = Model(Bytes(), nn.Linear(6, 2))
    results = [
        train(
            load("imagefolder", root=str(tmp_path), size=8, mapped=mapped),
            model=model,
            rounds=2,
            batch_size=4,
            augment=(Flip(), Crop(padding=1)),
        ).summary["results"]
        for mapped in (False, True)
    ]
    assert results[0] == results[1]


def test_a_model_that_does_not_take_bytes_is_refused_with_advice(tmp_path):
    write(tmp_path)
    with pytest.raises(
        InputError, match="x holds uint8 of shape .* most models need floating point"
    ):
        train(
            load("imagefolder", root=str(tmp_path), size=8),
            model=Model(nn.Flatten(), nn.Linear(192, 2)),
            rounds=1,
        )


@pytest.mark.parametrize("mapped", ["true", "false"])
def test_the_command_line_shows_the_federation(tmp_path, mapped):
    write(tmp_path / "animals", classes=("cat", "dog", "owl"))
    options = [f"root={tmp_path / 'animals'}", "size=8", "classes=[dog,owl]", f"mapped={mapped}"]
    settings = [text for option in options for text in ("--set", option)]
    drawn = tmp_path / "animals.png"
    shown = CliRunner().invoke(app, ["data", "imagefolder", *settings, "--picture", str(drawn)])
    assert shown.exit_code == 0, shown.output
    assert "clients of animals" in shown.output
    assert drawn.read_bytes().startswith(b"\x89PNG")
    told = CliRunner().invoke(app, ["data", "imagefolder", *settings, "--json"])
    document = json.loads(told.stdout)
    assert document["shape"] == [3, 8, 8]
    assert [(client["name"], client["labels"]) for client in document["clients"]] == [
        ("art", [5, 5]),
        ("photo", [5, 5]),
    ]


# Images per class (dog, elephant, giraffe, guitar, horse, house, person).
PACS = {
    "photo": [189, 202, 182, 186, 199, 280, 432],
    "art_painting": [379, 255, 285, 184, 201, 295, 449],
    "cartoon": [389, 457, 346, 135, 324, 288, 405],
    "sketch": [772, 740, 753, 608, 816, 80, 160],
}


@needs_shared("pacs")
def test_real_pacs(monkeypatch):
    with TemporaryDirectory() as folder:  # 376 MB, which need not stay until the next tests
        monkeypatch.setenv("EQUIPOISE_CACHE", folder)
        source, partition = recipe(seed=0, root=str(SHARED / "pacs"), size=112, domains=tuple(PACS))
    assert source.x.shape == (9991, 3, 112, 112)
    assert source.group_names == tuple(PACS)
    counts = np.zeros((4, 7), np.int64)
    np.add.at(counts, (source.groups, source.y.numpy()), 1)
    assert counts.tolist() == list(PACS.values())
    assert np.bincount(source.groups).tolist() == [1670, 2048, 2344, 3929]
    assert partition.assign(source, 0).names == tuple(PACS)
    # The files already have this size, so pixels are those of the file.
    first = sorted((SHARED / "pacs" / "cartoon" / "giraffe").iterdir())[0]
    place = 1670 + 2048 + 389 + 457
    assert np.array_equal(source.x[place].numpy(), np.asarray(Image.open(first)).transpose(2, 0, 1))
    # Sketches are black on white.
    whiteness = [float(source.x[source.groups == group].float().mean()) for group in range(4)]
    assert whiteness[3] > 230 > max(whiteness[:3])


def test_the_federation_knows_the_names_of_the_classes(tmp_path):
    write(tmp_path / "animals", classes=("dog", "cat", "big_mouse"))
    root = str(tmp_path / "animals")
    assert load("imagefolder", root=root, size=8).class_names == ("big_mouse", "cat", "dog")
    assert load("imagefolder", root=root, size=8, classes=("dog", "cat")).class_names == (
        "dog",
        "cat",
    )
