"""Digits drawn with fonts: the same for the same seed, all different, and readable."""

from __future__ import annotations

import numpy as np
import pytest

from equipoise.data import fonts
from equipoise.data.fonts import font_digits
from equipoise.errors import InputError

pytest.importorskip("matplotlib", reason="matplotlib is not installed: equipoise[digitfive]")
pytest.importorskip("PIL", reason="Pillow is not installed: equipoise[digitfive]")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_seed_decides_how_digits_look(cache, tmp_path, monkeypatch):
    images, labels = font_digits(20)
    assert images.shape == (20, 32, 32, 3)
    assert images.dtype == np.uint8
    assert labels.tolist() == [*range(10), *range(10)]
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "other"))
    assert np.array_equal(font_digits(20)[0], images)
    assert not np.array_equal(font_digits(20, seed=1)[0], images)
    assert len({image.tobytes() for image in images}) == 20


def test_digits_are_drawn_once(monkeypatch):
    first = font_digits(10)[0]
    monkeypatch.setattr(fonts, "_draw", None)
    assert np.array_equal(font_digits(10)[0], first)


def test_digits_differ_from_their_background_everywhere():
    """Images have many pixels far from their most frequent brightness, both lighter and darker."""
    images, _ = font_digits(100)
    grey = images.astype(float) @ (0.299, 0.587, 0.114)
    background = np.median(grey, axis=(1, 2), keepdims=True)
    inked = np.abs(grey - background) > 25
    assert (inked[:, 8:24, 8:24].mean(axis=(1, 2)) > 0.05).all()
    lighter = np.where(inked, grey - background, 0).sum(axis=(1, 2)) > 0
    assert 20 < lighter.sum() < 80


def test_the_digits_of_a_kind_resemble_each_other():
    """The outline of a digit is closer to the mean outline of its class than to most others."""
    images, labels = font_digits(400)
    grey = images.astype(float) @ (0.299, 0.587, 0.114)
    outline = np.abs(grey - np.median(grey, axis=(1, 2), keepdims=True)).reshape(400, -1)
    outline /= np.linalg.norm(outline, axis=1, keepdims=True)
    means = np.stack([outline[:300][labels[:300] == kind].mean(0) for kind in range(10)])
    found = (outline[300:] @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T).argmax(1)
    assert (found == labels[300:]).mean() > 0.35


def test_a_number_below_one_is_refused():
    with pytest.raises(
        InputError, match="number of digits must be a whole number of at least 1, got 0"
    ):
        font_digits(0)
