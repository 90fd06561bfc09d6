"""What a machine can do, and what a step needs, against numbers worked out otherwise."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time

import pytest
import torch
from torch import nn

import benchmarks.text  # noqa: F401 (registers model textlstm)
from benchmarks import machine
from benchmarks.machine import cost_of_step, main, measure
from equipoise.errors import InputError
from equipoise.models import build


def test_rates_are_those_of_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 8 x 8 matrices and copies of 4,000 bytes; the first of each does not count."""
    ends = iter([0.0, 9.0, 10.0, 12.0, 20.0, 29.0, 30.0, 34.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ends))
    rates = measure(torch.device("cpu"), precision="tf32", rows=8, copied=4000, repeats=1)
    assert rates.operations == 2 * 8**3 / 2.0
    assert rates.bytes == 2 * 4000 / 4.0
    assert rates.precision == "float32", "a CPU has no TF32"


def test_a_convolutional_model_by_hand() -> None:
    """The CNN of pfl, 10 images: three products a layer, two of the first; tensors by hand."""
    cost = cost_of_step(build("pflcnn", shape=(3, 32, 32), classes=10), torch.zeros(10, 3, 32, 32))
    layers = [
        (32 * 30 * 30, 3 * 9),
        (64 * 28 * 28, 32 * 9),
        (128, 64 * 14 * 14),
        (10, 128),
    ]
    products = [2 * 10 * outputs * inner for outputs, inner in layers]
    assert cost.operations == 2 * products[0] + 3 * sum(products[1:])
    inputs = [3 * 32 * 32, 32 * 30 * 30, 64 * 14 * 14, 128]
    numbers = 10 * (2 * inputs[0] + 3 * sum(inputs[1:]) + 2 * sum(outputs for outputs, _ in layers))
    assert cost.bytes == 4 * (numbers + 3 * 1_626_442)


@pytest.mark.parametrize("name", ["textlstm", "charlstm"])
def test_recurrent_layers_by_hand(name: str) -> None:
    """5 texts of 7 characters. Weights of a layer are read once, however many steps there are."""
    hidden, size, characters = 4, 3, 9
    model = build(name, shape=(7,), classes=characters, hidden=hidden, embedding=size)
    cost = cost_of_step(model, torch.zeros(5, 7, dtype=torch.int64))
    rows = 5 * 7
    inner = [size + hidden, hidden + hidden]
    expected = [3 * 2 * rows * 4 * hidden * width for width in inner]
    head = 3 * 2 * 5 * hidden * characters
    # ``nn.LSTM`` and ours differ in products with the zeros before the first step, and ours looks
    # characters up by a product.
    assert cost.operations == pytest.approx(sum(expected) + head, rel=0.2)
    parameters = sum(p.numel() for p in model.parameters())
    assert 4 * 3 * parameters < cost.bytes < 4 * (3 * parameters + 20 * rows * hidden)


def test_frozen_parameters_are_read_and_not_written() -> None:
    layer, frozen = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)
    x = torch.zeros(5, 3)
    assert (
        cost_of_step(nn.Sequential(frozen, nn.Linear(2, 2)), x).bytes
        < cost_of_step(nn.Sequential(layer, nn.Linear(2, 2)), x).bytes
    )


def test_bfloat16_halves_what_lies_between_layers_and_keeps_parameters() -> None:
    """Inputs of 5 x 3 are read twice, outputs of 5 x 2 written and their gradients read."""
    cost = cost_of_step(nn.Linear(3, 2), torch.zeros(5, 3), precision="bfloat16")
    assert cost.bytes == 2 * (2 * 15 + 2 * 10) + 4 * 3 * 8
    # Characters are no numbers that could be rounded: 5 x 7 of 8 bytes, read twice.
    table, texts = nn.Embedding(9, 3), torch.zeros(5, 7, dtype=torch.int64)
    cost = cost_of_step(table, texts, precision="bfloat16")
    assert cost.bytes == 2 * 8 * 35 + 2 * (2 * 35 * 3) + 4 * 3 * 27


def test_a_forward_pass_reads_and_writes_once() -> None:
    model, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)), torch.zeros(5, 3)
    cost = cost_of_step(model, x, training=False)
    assert cost.operations == 2 * 5 * (3 * 2 + 2 * 1)
    assert cost.bytes == 4 * (15 + 10 + 10 + 5 + 8 + 3)
    assert all(p.requires_grad for p in model.parameters()), "the model itself is left alone"


def test_rates_are_measured_once_for_each_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, started = machine.Rates(4.0, 1.0, "here", "float32"), []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        text = json.dumps(dataclasses.asdict(rates))
        return subprocess.CompletedProcess(command, 0, stdout=text)

    monkeypatch.setattr(subprocess, "run", run)
    machine._measured_apart.cache_clear()
    try:
        for device in ("cpu", "cuda", "cpu"):
            for precision in machine.PRECISIONS:
                assert machine.measured_apart(device, precision=precision, threads=3) == rates
    finally:
        machine._measured_apart.cache_clear()
    assert [(command[4], command[-1]) for command in started] == [
        ("cpu", "float32"),
        ("cpu", "bfloat16"),
        *(("cuda", precision) for precision in machine.PRECISIONS),
    ]


def test_the_command_prints_what_another_process_can_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--json", "--rows", "16", "--copied", "4096", "--threads", "1"]) == 0
    rates = machine.Rates(**json.loads(capsys.readouterr().out))
    assert rates.operations > 0
    assert rates.bytes > 0
    assert machine.in_words(rates).endswith("B/s")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(InputError, match="finds no GPU"):
        main(["--device", "cuda"])
