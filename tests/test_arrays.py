"""Arrays from Python and from files: converted without loss, or refused in one line."""

from __future__ import annotations

import io
import re
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

from equipoise import Federation
from equipoise.arrays import MOST_BYTES, read_npz
from equipoise.data.files import read
from equipoise.data.silos import silos
from equipoise.errors import InputError

X, Y, IDS = np.arange(24.0).reshape(12, 2), np.arange(12) % 3, np.repeat([0, 1], 6)


def from_arrays(tmp_path, x, y, **options):
    return Federation.from_arrays(x, y, clients=IDS, **options)


def from_silos(tmp_path, x, y, **options):
    """Write two silos with half of the samples each, and read them."""
    for number, half in enumerate((slice(0, 6), slice(6, 12))):
        (tmp_path / f"c{number}").mkdir()
        np.savez(tmp_path / f"c{number}" / "data.npz", x=np.asarray(x)[half], y=np.asarray(y)[half])
    return silos(root=str(tmp_path), **options)


BOTH = pytest.mark.parametrize("made", [from_arrays, from_silos])


@BOTH
@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (X, Y + 0.5, {}, "has label 0.5 in y; labels must be whole numbers"),
        (X, np.where(Y == 2, np.nan, Y), {}, "has label nan in y"),
        (X, Y * 1j, {}, r"y.* must hold real numbers, not complex128"),
        (X * 1j, Y, {}, r"x.* must hold real numbers, not complex128"),
        (X, Y.astype(str), {}, r"y.* must hold real numbers, not <U"),
        (X, Y.astype("M8[D]"), {}, r"y.* must hold real numbers, not datetime64"),
        (X, Y, {"classes": 0}, "classes.* must be a whole number of at least 1, got 0"),
        (X, Y, {"classes": -1}, "classes.* must be a whole number of at least 1, got -1"),
        (X, Y * 1_000_000, {}, "which would make 2000001 classes; check that y holds labels"),
    ],
)
def test_both_ways_refuse_the_same(made, x, y, options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        made(tmp_path, x, y, **options)


@BOTH
def test_many_classes_are_fine_if_they_are_meant(made, tmp_path):
    assert made(tmp_path, X, Y * 10_000, classes=20_001).classes == 20_001


@BOTH
@pytest.mark.parametrize("kind", [">f8", "<f8", ">f4", "f2", np.longdouble, ">i4", "u1", "?"])
def test_numbers_of_all_kinds_and_orders_are_the_same(made, kind, tmp_path):
    made_of = made(tmp_path, X.astype(kind), Y.astype(">i8"))
    assert torch.equal(made_of.x.double(), torch.from_numpy(X.astype(kind).astype(np.float64)))
    assert made_of.y.tolist() == Y.tolist()


@pytest.mark.parametrize("name", ["x", "y", "clients"])
def test_masked_values_are_refused(name):
    given = {"x": X, "y": Y, "clients": IDS}
    mask = np.zeros_like(given[name], bool)
    mask[3] = True
    with pytest.raises(InputError, match="masked values|sample 3 has no client"):
        Federation.from_arrays(**{**given, name: np.ma.masked_array(given[name], mask)})
    # An array in which nothing is masked is an array.
    Federation.from_arrays(**{**given, name: np.ma.masked_array(given[name])})


@pytest.mark.parametrize(
    "ids",
    [
        np.where(np.arange(12) == 4, np.nan, IDS),
        torch.where(torch.arange(12) == 4, torch.nan, torch.from_numpy(IDS).double()),
        [*IDS[:4], float("nan"), *IDS[5:]],
        [*IDS[:4], None, *IDS[5:]],
        np.where(np.arange(12) == 4, None, IDS),
        np.where(np.arange(12) == 4, np.datetime64("NaT", "D"), IDS.astype("M8[D]")),
    ],
    ids=["array", "tensor", "list", "None", "objects", "dates"],
)
def test_missing_clients_are_refused(ids):
    with pytest.raises(InputError, match="clients: sample 4 has no client"):
        Federation.from_arrays(X, Y, clients=ids)


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(InputError, match="x must be an array of numbers"):
        Federation.from_arrays([[1], [2, 3]], [0, 1], clients=[0, 0])


@pytest.mark.parametrize("name", ["ward\x1b[2J", "ward\n3", "ward\u202e3", "w" * 1_000_000])
def test_names_that_a_terminal_would_act_on_are_refused(name, tmp_path):
    for names in ({"groups": {0: "a", 1: name}}, {"clients": np.where(IDS == 0, "a", name)}):
        with pytest.raises(InputError, match="the name of a (client|group) must") as caught:
            Federation.from_arrays(**{"x": X, "y": Y, "clients": IDS, **names})
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500
    from_silos(tmp_path, X, Y)
    (tmp_path / "c1" / "client.yaml").write_text(f"group: {name!r}".replace("'", '"'))
    with pytest.raises(InputError, match="group in .*client.yaml must"):
        silos(root=str(tmp_path))


# ---- files ---------------------------------------------------------------------------------------


def npz(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


def with_entries(path, entries, compression=zipfile.ZIP_DEFLATED):
    """Write a zip file with any entries."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def npy(values, **changes):
    """Return the bytes of an array, with another head if wanted."""
    buffer = io.BytesIO()
    np.save(buffer, values)
    content = buffer.getvalue()
    for old, new in changes.get("replace", {}).items():
        content = content.replace(old, new.ljust(len(old))[: len(old)])
    return content


Y_FILE = npy(np.arange(3))


def test_a_small_file_that_grows_to_gigabytes_is_refused_before_it_does(tmp_path):
    path = tmp_path / "data.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w", force_zip64=True) as file,
    ):
        rows = MOST_BYTES // 1024 + 1
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": (rows, 1024)}
        )
        for _ in range(rows // 1024):
            file.write(bytes(1 << 20))
        file.write(bytes(rows % 1024 * 1024))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("y.npy", Y_FILE)
    tracemalloc.start()
    with pytest.raises(
        InputError,
        match=rf"would grow from {path.stat().st_size} to \d+ bytes; valid: at most {MOST_BYTES}",
    ):
        read_npz(path, ["x", "y"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def test_a_gzip_file_that_grows_without_end_is_refused(tmp_path, monkeypatch):
    import gzip

    monkeypatch.setattr("equipoise.arrays.MOST_BYTES", 1 << 20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(8 << 20)))
    with pytest.raises(InputError, match=r"bomb.gz would grow from \d+ to more than 1048576 bytes"):
        read(path)
    path.write_bytes(gzip.compress(np.random.default_rng(0).bytes(2 << 20)))
    assert len(read(path)) == 2 << 20


@pytest.mark.parametrize(
    "entries",
    [
        {"x.npy": npy(np.zeros(3), replace={b"(3,)": b"(9,)"}), "y.npy": Y_FILE},
        {"x.npy": npy(np.zeros(3), replace={b"(3,), ": b"(-3,),"}), "y.npy": Y_FILE},
        {
            "x.npy": npy(np.zeros(3), replace={b"(3,), }       ": b"(99999999999,)}"}),
            "y.npy": Y_FILE,
        },
        {"x.npy": npy(np.zeros(3), replace={b"'<f8'": b"'|O' "}), "y.npy": Y_FILE},
        {"x.npy": npy(np.zeros(3), replace={b"'<f8'": b"'|V8'"}), "y.npy": Y_FILE},
        {"x.npy": npy(np.zeros(3), replace={b"{'descr'": b"(((((((("}), "y.npy": Y_FILE},
        {"x.npy": npy(np.zeros(3), replace={b"NUMPY\x01": b"NUMPY\x09"}), "y.npy": Y_FILE},
        {"x.npy": npy(np.zeros(3))[:-1], "y.npy": Y_FILE},
        {"x.npy": npy(np.zeros(3))[:20], "y.npy": Y_FILE},
        {"x.npy": npy(np.array([{}], object)), "y.npy": Y_FILE},
        {"x.npy": npy(np.array(["a", "b", "c"])), "y.npy": Y_FILE},
        {"x.npy": npy(np.zeros(())), "y.npy": Y_FILE},
        {"x.npy": npy(np.zeros((0, 3))), "y.npy": npy(np.zeros(0))},
        {"x.npy": npy(np.zeros(4)), "y.npy": Y_FILE},
        {"x.npy": b"", "y.npy": Y_FILE},
        {"x.npy": npy(np.zeros(3))},
        {"x": npy(np.zeros(3)), "y": Y_FILE},
        {},
    ],
)
def test_odd_files_of_arrays_are_one_line(entries, tmp_path):
    (tmp_path / "c1").mkdir()
    with_entries(tmp_path / "c1" / "data.npz", entries)
    with pytest.raises(InputError, match=re.escape(str(tmp_path))) as caught:
        silos(root=str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"no zip", npy(np.zeros(3))])
def test_files_that_are_no_archives_are_one_line(content, tmp_path):
    (tmp_path / "c1").mkdir()
    (tmp_path / "c1" / "data.npz").write_bytes(content)
    with pytest.raises(InputError, match="cannot read .*data.npz"):
        silos(root=str(tmp_path))


def test_an_encrypted_archive_is_one_line(tmp_path):
    path = with_entries(tmp_path / "data.npz", {"x.npy": npy(np.zeros(3)), "y.npy": Y_FILE})
    content = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + place] |= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="cannot read .*encrypted"):
        read_npz(path, ["x", "y"])
