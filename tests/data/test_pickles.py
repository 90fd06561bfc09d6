"""Harmful pickles are read without harm."""

from __future__ import annotations

import pickle
import struct
import time
from collections import OrderedDict
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.data import pickles
from equipoise.data.cifar import cifar, read_pickle
from equipoise.errors import InputError


def text(content):
    return b"X" + struct.pack("<I", len(content)) + content


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"


def array(code=b"u1", shape=b"K\x03\x85", content=b"C\x03abc", state=b""):
    """Write an array of three bytes, any part of which can be replaced."""
    kind = b"cnumpy\ndtype\n" + text(code) + b"\x89\x88\x87R" + state
    return b"\x80\x02" + ARRAY + b"(K\x01" + shape + kind + b"\x89" + content + b"tb."


def test_the_array_that_others_are_made_from():
    assert pickles.loads(array()).tolist() == [97, 98, 99]


@pytest.mark.parametrize(
    "content",
    [
        # ndarray with a given buffer, strides and offset: memory outside the array.
        b"\x80\x02cnumpy\nndarray\n(K\x03\x85cnumpy\ndtype\n"
        + text(b"u1")
        + b"\x89\x88\x87RNJ\xff\xff\xff\x7ftR.",
        array(code=b"O8"),
        array(code=b"V8"),
        array(code=b"U8"),
        array(code=b"M8[ns]"),
        array(code=b"u1,u1"),
        array(
            state=b"(K\x03"
            + text(b"|")
            + b"N("
            + text(b"a")
            + b"tNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        ),
        array(shape=b"K\x04\x85"),
        array(shape=b"J\xff\xff\xff\xff\x85"),
        array(shape=b"(" + b"K\x00" * 99 + b"t"),
        array(shape=b"\x8a\x08" + b"\xff" * 7 + b"\x7f\x85", content=b"C\x00"),
        array(content=b"]"),
        array(content=b"N"),
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\nK\x00\x85C\x01b\x87R.",
        b"\x80\x02cnumpy.core.multiarray\nscalar\n.",
        b"\x80\x02cnumpy\nndarray\n.",
        b"\x80\x02" + ARRAY + b".",
        b"\x80\x02}(K\x01" + ARRAY + b"u.",
    ],
)
def test_crafted_arrays_are_refused(content, tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(content)
    with pytest.raises(InputError, match="batch is"):
        read_pickle(path)


def test_the_file_that_crashed_the_interpreter_is_refused(tmp_path):
    """The state of a type that declares objects, and bytes that would be used as addresses."""
    state = b"(K\x03" + text(b"|") + b"NNNK\x08K\x01K\x3ftb"
    path = tmp_path / "batch"
    path.write_bytes(array(code=b"O8", shape=b"K\x01\x85", content=b"C\x08AAAAAAAA", state=state))
    with pytest.raises(
        InputError, match="is refused: it asks for an array of 'O8', which is not a number type"
    ):
        read_pickle(path)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(OrderedDict(a=1)),
        pickle.dumps(np.float64(3)),
        pickle.dumps({1, 2}),
        b"\x80\x02\x82\x01.",
        b"Pid\n.",
        b"(dos\nsystem\nib.",
        b"0.",
        b"(.",
        b"K\x01K\x02.",
        b"h\x05.",
        b"a.",
        b"}K\x01s.",
        b"}](K\x01ss.",
        b"I" + b"9" * 5000 + b"\n.",
        b"\x8a\xff" + b"\x01" * 255 + b".",
        b"\x8b" + struct.pack("<i", 10**6) + b"\x01" * 10**6 + b".",
        b"X\xff\xff\xff\xffabc",
        b"\x8e" + b"\xff" * 8 + b"abc",
        b"Sabc\n.",
    ],
)
def test_other_programs_are_refused(content, tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(content)
    with pytest.raises(InputError, match="batch is"):
        read_pickle(path)


def test_a_value_that_is_referred_to_again_and_again_is_refused():
    """A thousand arrays from the same megabyte."""
    content = b"B" + struct.pack("<I", 1 << 20) + b"\0" * (1 << 20) + b"q\x01"
    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"\x89\x88\x87Rq\x02"
    one = ARRAY + b"(K\x01\x8a\x04\x00\x00\x10\x00\x85h\x02\x89h\x01tb"
    with pytest.raises(InputError, match="its values are larger than the file itself"):
        pickles.loads(b"\x80\x02]" + content + b"a" + kind + b"a(" + one * 1000 + b"e.")


def test_labels_that_stand_for_too_many_values_are_refused(tmp_path):
    """Lists of lists of lists, thirty deep, each of which contains the next twice."""
    images = pickle.dumps(np.zeros((1, 3072), np.uint8), protocol=2)[2:-1]
    labels = b"]K\x00aq\x30" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(0x30, 0x50))
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.parent.mkdir()
    path.write_bytes(b"\x80\x02}(C\x04data" + images + b"C\x06labels" + labels[:-2] + b"u.")
    began = time.monotonic()
    with pytest.raises(InputError, match="test_batch"):
        cifar(root=str(tmp_path), portion="test")
    assert time.monotonic() - began < 5


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(min_size=1),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(-(2**62), 2**62), inner)
    ),
    max_leaves=20,
)


@given(value=VALUES, protocol=st.integers(3, 5))
def test_plain_values_come_back(value, protocol):
    assert pickles.loads(pickle.dumps(value, protocol)) == value


@given(
    dtype=st.sampled_from(["u1", "<i4", ">i4", "<f8", ">f2", "?"]),
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    order=st.sampled_from("CF"),
    protocol=st.integers(0, 5),
)
def test_arrays_come_back(dtype, shape, order, protocol):
    # Protocols below 3 write empty bytes as a function call.
    wanted = np.ones(shape if protocol > 2 or 0 not in shape else (1,), dtype, order)
    found = pickles.loads(pickle.dumps(wanted, protocol))
    assert np.array_equal(found, wanted)
    assert found.shape == wanted.shape


@given(content=st.binary(max_size=60), where=st.integers(0, 200))
def test_damaged_pickles_end_in_one_error(content, where):
    whole = pickle.dumps({b"data": np.arange(4, dtype=np.uint8), b"labels": [1, 2]}, protocol=2)
    for damaged in (
        b"\x80\x02" + content + b".",
        whole[:where] + content + whole[where + len(content) :],
    ):
        with suppress(ValueError):  # an InputError is one too
            pickles.loads(damaged)
