"""Ellipses: masks with the drawn area, sites that differ in intensity, and refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from equipoise.cli import app
from equipoise.data import load
from equipoise.data.ellipses import ellipses
from equipoise.errors import InputError


def test_masks_are_ellipses():
    """The area of an ellipse is π times its half axes, which follow from second moments."""
    source = ellipses(sites=2, images=10, size=96)
    for mask in source.y.double():
        down, across = (axis.double() for axis in mask.nonzero(as_tuple=True))
        covariance = torch.cov(torch.stack([down, across]))
        # A uniform ellipse has variance a² / 4 along a half axis a.
        axes = 2 * torch.linalg.eigvalsh(covariance).sqrt()
        assert float(mask.sum()) == pytest.approx(float(np.pi * axes.prod()), rel=0.05)
        assert float(axes[0]) >= 96 / 8 - 1
        assert float(axes[1]) <= 96 / 3 + 1


def test_sites_differ_in_intensity():
    source = ellipses(sites=3, images=200, size=24)
    x, inside = source.x[:, 0].double(), source.y.bool()
    contrast, level = [], []
    for site in range(3):
        mine = source.groups == site
        contrast.append(float(x[mine][inside[mine]].mean() - x[mine][~inside[mine]].mean()))
        level.append(float(x[mine][:, :, 0][~inside[mine][:, :, 0]].mean()))
    assert contrast == pytest.approx([0.5, 1.0, 2.0], rel=0.1)
    # There is no shade at the left edge: the levels of sites have another order than their gains.
    assert level == pytest.approx([1.0, -1.0, 0.0], abs=0.02)


def test_seeds_and_empty_images():
    assert torch.equal(ellipses(images=3, seed=1).x, ellipses(images=3, seed=1).x)
    assert not torch.equal(ellipses(images=3, seed=1).x, ellipses(images=3, seed=2).x)
    empty = ellipses(sites=1, images=300, size=8, empty=0.2).y.flatten(1).sum(1) == 0
    assert 40 <= int(empty.sum()) <= 80
    assert not ellipses(sites=1, images=1, size=8, empty=1.0).y.any()


def test_a_site_is_a_client():
    federation = load("ellipses", sites=3, images=10, leave_out="site 1")
    assert federation.client_names == federation.group_names == ("site 0", "site 1", "site 2")
    assert federation.unseen.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 4}, "size of data 'ellipses'"),
        ({"empty": 1.5}, "must be a share from 0 to 1"),
        ({"sites": 0}, "sites"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        ellipses(**options)


def test_the_command_line_shows_sizes_without_labels(tmp_path):
    shown = CliRunner().invoke(
        app, ["data", "ellipses", "--set", "images=10", "--picture", str(tmp_path / "sites.png")]
    )
    assert shown.exit_code == 0, shown.output
    assert "site 3" in shown.output
    assert "labels" not in shown.output
    document = json.loads(
        CliRunner().invoke(app, ["data", "ellipses", "--set", "images=10", "--json"]).stdout
    )
    assert (document["task"], document["classes"], document["shape"]) == (
        "segmentation",
        2,
        [1, 32, 32],
    )
    assert "labels" not in document["clients"][0]
