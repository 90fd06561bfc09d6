"""The picture of a federation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from equipoise.data import Iid, Source, draw, federate, load
from equipoise.errors import InputError


def test_svg_shows_every_client_and_marks_the_unseen(tmp_path: Path) -> None:
    bars = []
    for unseen in ([], [0, 4]):
        text = draw(
            load("digits", unseen=unseen), tmp_path / "new folder" / "digits.svg"
        ).read_text()
        assert text.startswith("<?xml")
        bars.append(len(re.findall(r'style="fill: url\(#', text)))
    assert bars == [0, 3]  # two hatched clients and the hatched key


@pytest.mark.parametrize("clients", [1, 200])
def test_png_for_few_and_many_clients(tmp_path: Path, clients: int) -> None:
    source = Source(x=torch.zeros(1000, 1), y=torch.arange(1000) % 62)
    assert (
        draw(federate(source, Iid(clients)), str(tmp_path / "many.png"))
        .read_bytes()
        .startswith(b"\x89PNG")
    )


def test_regression_has_sizes_only(tmp_path: Path) -> None:
    source = Source(x=torch.zeros(100, 1), y=torch.rand(100), task="regression")
    assert draw(federate(source, Iid(5)), tmp_path / "sizes.pdf").stat().st_size > 1000


def test_same_federation_same_svg(tmp_path: Path) -> None:
    federation = load("digits")
    assert (
        draw(federation, tmp_path / "a.svg").read_text()
        == draw(federation, tmp_path / "b.svg").read_text()
    )


@pytest.mark.parametrize("name", ["digits.jpeg", "digits"])
def test_refuses_other_formats(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"must end in \.png, \.svg, \.pdf"):
        draw(load("digits"), tmp_path / name)
