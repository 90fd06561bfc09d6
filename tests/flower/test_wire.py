"""Messages arrive bit for bit, with little overhead."""

from __future__ import annotations

import pytest
import torch
from flwr.app import Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.flower.wire import bytes_of, from_record, pack, to_metrics, to_record, unpack
from equipoise.models import build
from equipoise.tree import digest
from tests.flower.loop import through_bytes

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def across(content):
    """Send records through a message as bytes."""
    return through_bytes(Message(RecordDict(content), 1, "train"))[0].content


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)], ids=str)
def test_tensors_of_every_type_cross_bit_for_bit(dtype, shape):
    width = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(
        0,
        2 if dtype is torch.bool else 256,
        (*shape, width),
        generator=torch.Generator().manual_seed(1),
    )
    tensor = raw.to(torch.uint8).view(dtype).reshape(shape)
    arrived = from_record(across({"model": to_record({"w": tensor})}).array_records["model"])["w"]
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert bits(arrived) == bits(tensor)


def test_views_and_gradients_cross_as_the_numbers_they_show():
    whole = torch.arange(24.0).reshape(4, 6).requires_grad_()
    tree = {"columns": whole[:, ::2].T, "row": whole[1].expand(3, 6)}
    arrived = from_record(to_record(tree))
    assert all(torch.equal(arrived[name], tensor) for name, tensor in tree.items())
    assert not any(tensor.requires_grad for tensor in arrived.values())


def test_the_order_of_names_survives():
    names = ["z", "a", "features.10.weight", "features.2.weight"]
    record = across({"model": to_record({name: torch.ones(1) for name in names})}).array_records[
        "model"
    ]
    assert list(from_record(record)) == names


@given(
    st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-5, 5),
            st.floats(allow_nan=False),
            st.text(max_size=3),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ),
        max_leaves=8,
    )
)
@settings(max_examples=50)
def test_nested_values_are_put_together_again(value):
    assert unpack(*pack(value)) == value


def test_tensors_inside_nested_values_are_put_together_again():
    value = [{"w": torch.ones(2)}, (torch.zeros(1), 3)]
    text, tensors = pack(value)
    arrived = unpack(
        text, from_record(across({"arguments": to_record(tensors)}).array_records["arguments"])
    )
    assert torch.equal(arrived[0]["w"], torch.ones(2))
    assert torch.equal(arrived[1][0], torch.zeros(1))
    assert arrived[1][1] == 3


def test_reports_cross_in_full_precision():
    reports = {
        "loss": torch.tensor([0.1 + 0.2], dtype=torch.float64),
        "nothing": torch.tensor([float("nan")]),
    }
    arrived = across({"reports": to_metrics(reports)}).metric_records["reports"]
    assert arrived["loss"] == 0.1 + 0.2
    assert arrived["nothing"] != arrived["nothing"]


def test_a_message_is_within_one_percent_of_its_parameters():
    model = build("mlp", shape=(1, 28, 28), classes=10, hidden=[1024, 128])
    tree = dict(model.named_parameters())
    own = sum(tensor.numel() * tensor.element_size() for tensor in tree.values())
    assert own > 3.7e6
    content = RecordDict({"model": to_record(tree)})
    _, really_sent = through_bytes(Message(content, 1, "train"))
    assert own <= bytes_of(content) < 1.01 * own
    assert own <= really_sent < 1.01 * own


def test_a_hash_tells_names_types_shapes_and_values_apart():
    one = {"w": torch.tensor([1.0, 2.0])}
    others = [
        {"v": one["w"]},
        {"w": one["w"].double()},
        {"w": one["w"].reshape(2, 1)},
        {"w": one["w"] + 1e-6},
        {},
    ]
    assert len({digest(tree) for tree in (one, *others)}) == len(others) + 1
    assert digest({"a": one["w"], "b": one["w"]}) == digest({"b": one["w"], "a": one["w"]})
