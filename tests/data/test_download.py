"""Downloads from a local server: valid files are kept, and invalid ones leave nothing behind."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import sys
import tarfile
import threading
import zipfile
from dataclasses import replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from equipoise.cli import main
from equipoise.data import cifar, download, emnist, load, mnist
from equipoise.data.download import Archive, fetch
from equipoise.errors import InputError, RunError
from tests.data.small_files import cifar_batch, idx_bytes


class Site:
    """A server with published files by path, and a record of the requests."""

    def __init__(self):
        self.files, self.cut_off, self.asked = {}, set(), []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.lstrip("/")
                site.asked.append(name)
                if name not in site.files:
                    self.send_error(404)
                    return
                content = site.files[name]
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if name in site.cut_off else content)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def publish(self, name, content, folder, members=()):
        self.files[name] = content
        return Archive(f"{self.url}/{name}", sha256(content).hexdigest(), folder, members)


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    made = Site()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def tree(root):
    """List everything below a folder, hidden or not."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))


def tar(files):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tape:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tape.addfile(info, io.BytesIO(content))
    return made.getvalue()


def zipped(files):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, content in files.items():
            bundle.writestr(name, content)
    return made.getvalue()


LARGE = np.random.default_rng(0).bytes(3_000_001)


def test_a_file_comes_as_it_is_published_into_folders_made_for_it(site, tmp_path):
    fetch(site.publish("letters.gz", LARGE, "a/b"), tmp_path / "home")
    assert tree(tmp_path) == ["home", "home/a", "home/a/b", "home/a/b/letters.gz"]
    assert (tmp_path / "home/a/b/letters.gz").read_bytes() == LARGE


@pytest.mark.parametrize("pack", [tar, zipped])
def test_only_the_named_members_are_taken_out(site, tmp_path, pack):
    files = {"v1/one": b"1" * 5000, "v1/two": b"22", "v1/readme": b"?", "../../escaped": b"!"}
    fetch(site.publish("bundle", pack(files), "numbers", ("v1/one", "v1/two")), tmp_path)
    assert tree(tmp_path) == ["numbers", "numbers/one", "numbers/two"]
    assert (tmp_path / "numbers/one").read_bytes() == b"1" * 5000
    assert (tmp_path / "numbers/two").read_bytes() == b"22"


def test_a_member_cannot_leave_its_folder(site, tmp_path):
    home = tmp_path / "home"
    fetch(site.publish("bundle", tar({"../../escaped": b"!"}), "numbers", ("../../escaped",)), home)
    assert tree(tmp_path) == ["home", "home/numbers", "home/numbers/escaped"]


def test_the_wrong_content_is_refused_and_nothing_is_left(site, tmp_path):
    wrong = replace(site.publish("letters", LARGE, "letters"), sha256="0" * 64)
    with pytest.raises(
        RunError,
        match=f"/letters is not what was published: its SHA-256 is {sha256(LARGE).hexdigest()}",
    ):
        fetch(wrong, tmp_path)
    assert tree(tmp_path) == []


def test_what_was_there_before_stays_until_the_new_is_whole(site, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/letters").write_bytes(b"old")
    right = site.publish("letters", LARGE, "letters")
    with pytest.raises(RunError):
        fetch(replace(right, sha256="0" * 64), tmp_path)
    assert (tmp_path / "letters/letters").read_bytes() == b"old"
    fetch(right, tmp_path)
    assert (tmp_path / "letters/letters").read_bytes() == LARGE
    assert tree(tmp_path) == ["letters", "letters/letters"]


def test_a_broken_connection_leaves_nothing(site, tmp_path):
    archive = site.publish("letters", LARGE, "letters")
    site.cut_off.add("letters")
    with pytest.raises(
        RunError, match=r"broke off after 1,500,000 of 3,000,001 bytes|IncompleteRead"
    ):
        fetch(archive, tmp_path / "home")
    assert tree(tmp_path) == []


def test_an_interrupted_download_leaves_nothing(site, tmp_path, monkeypatch):
    def interrupt(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(download.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch(site.publish("bundle", tar({"one": b"1"}), "numbers", ("one",)), tmp_path)
    assert tree(tmp_path) == []


def test_members_that_are_not_there_leave_nothing(site, tmp_path):
    for pack in (tar, zipped):
        with pytest.raises(RunError, match="cannot get .*/bundle: KeyError: .*two"):
            fetch(site.publish("bundle", pack({"one": b"1"}), "numbers", ("one", "two")), tmp_path)
    assert tree(tmp_path) == []


def test_an_address_that_does_not_answer_is_named(site, tmp_path):
    with pytest.raises(RunError, match=r"cannot get http://127.0.0.1:\d+/none: HTTPError: .*404"):
        fetch(Archive(f"{site.url}/none", "0" * 64, "."), tmp_path)
    with pytest.raises(RunError, match="cannot get http://127.0.0.1:1/none: URLError"):
        fetch(Archive("http://127.0.0.1:1/none", "0" * 64, "."), tmp_path)
    assert tree(tmp_path) == []


def test_everything_published_has_a_safe_address_and_a_whole_checksum():
    archives = [*mnist.ARCHIVES.values(), *cifar.ARCHIVES.values(), emnist.ARCHIVE]
    assert len(archives) == 7
    assert len({archive.sha256 for archive in archives}) == 7
    for archive in archives:
        assert archive.url.startswith("https://")
        assert re.fullmatch("[0-9a-f]{64}", archive.sha256)


@pytest.fixture
def small_mnist(site, monkeypatch):
    """Three training images and two test images, published like the real ones."""
    for portion, count in (("train", 3), ("test", 2)):
        images = np.arange(count * 784).reshape(count, 28, 28).astype(np.uint8)
        for name, values in zip(mnist.FILES[portion], (images, np.arange(count)), strict=True):
            content = gzip.compress(idx_bytes(values))
            monkeypatch.setitem(mnist.ARCHIVES, name, site.publish(f"{name}.gz", content, "mnist"))
    return site


def test_mnist_is_downloaded_once_and_only_when_asked(small_mnist, tmp_path):
    root = str(tmp_path)
    with pytest.raises(InputError) as caught:
        mnist.mnist(root=root)
    message = str(caught.value)
    assert f"or download them from {small_mnist.url} with download=True" in message
    assert "(--download of equipoise data mnist)" in message
    assert "\n" not in message
    assert small_mnist.asked == []
    assert mnist.mnist(root=root, portion="test", download=True).y.tolist() == [0, 1]
    assert small_mnist.asked == ["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]
    assert mnist.mnist(root=root, download=True).y.tolist() == [0, 1, 2, 0, 1]
    asked = len(small_mnist.asked)
    assert mnist.mnist(root=root, download=True).x.shape == (5, 1, 28, 28)
    assert len(small_mnist.asked) == asked


def test_a_damaged_mnist_is_not_kept(small_mnist, tmp_path):
    small_mnist.files["t10k-labels-idx1-ubyte.gz"] = gzip.compress(idx_bytes(np.array([7, 7])))
    with pytest.raises(RunError, match="t10k-labels-idx1-ubyte.gz is not what was published"):
        mnist.mnist(root=str(tmp_path), portion="test", download=True)
    assert tree(tmp_path) == ["mnist", "mnist/t10k-images-idx3-ubyte.gz"]


def test_the_command_line_downloads(small_mnist, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["equipoise", "data", *arguments, "--json"])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capsys.readouterr()

    how = ("mnist", "--set", "partition.name=iid", "--set", "partition.clients=1")
    code, _, errors = call(*how)
    assert code == 2
    assert "--download of equipoise data mnist" in errors
    code, shown, errors = call(*how, "--download")
    assert (code, errors) == (0, "")
    assert json.loads(shown)["clients"][0]["train"] == 3
    code, _, errors = call("digits", "--download")
    assert code == 2
    assert "data.download" in errors


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_is_unpacked_where_it_is_read(site, tmp_path, monkeypatch, classes):
    published = cifar.ARCHIVES[classes]
    files = {
        name: pickle.dumps(cifar_batch(classes, 10 * i)) for i, name in enumerate(published.members)
    }
    files[f"{published.folder}/batches.meta"] = b"not needed"
    here = site.publish(published.name, tar(files), published.folder, published.members)
    monkeypatch.setitem(cifar.ARCHIVES, classes, here)
    partition = {"name": "iid", "clients": 2}
    federation = load(
        "cifar", classes=classes, root=str(tmp_path), download=True, partition=partition
    )
    assert len(federation.x) == 4 * len(published.members)
    assert tree(tmp_path) == sorted([published.folder, *published.members])


def test_emnist_is_unpacked_where_it_is_read(site, tmp_path, monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (2, 28, 28)).astype(np.uint8)
    contents = {
        "images": gzip.compress(idx_bytes(images)),
        "labels": gzip.compress(idx_bytes(np.array([0, 61]))),
    }
    files = {
        name: contents["images" if "images" in name else "labels"]
        for name in emnist.ARCHIVE.members
    }
    here = site.publish("gzip.zip", zipped(files), emnist.ARCHIVE.folder, emnist.ARCHIVE.members)
    monkeypatch.setattr(emnist, "ARCHIVE", here)
    source = emnist.emnist(root=str(tmp_path), download=True)
    assert source.y.tolist() == [0, 61, 0, 61]
    assert np.allclose(source.x[1, 0].numpy() * 255, images[1].T, atol=1e-4)
