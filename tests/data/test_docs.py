"""The page on data: its examples run, and its tables are complete."""

from __future__ import annotations

import doctest
import re
from inspect import signature
from pathlib import Path

from equipoise.data import SOURCES, recipe_of

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_examples_run():
    failed, tried = doctest.testfile(
        str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert failed == 0
    assert tried >= 5


def first_column(section):
    """Return the words in code type that begin the rows of a section's table."""
    text = PAGE.read_text().split(f"{section}\n", 1)[1].split("\n## ")[0]
    return {
        word
        for row in text.splitlines()
        if row.startswith("| `")
        for word in re.findall("`(.*?)`", row.split("|")[1])
    }


def test_every_source_is_named():
    assert first_column("# Data") == {
        name for name, place in SOURCES.items() if isinstance(place, str)
    }


def test_every_option_of_image_folders_is_named():
    assert first_column("## Image folders") == set(
        signature(recipe_of("imagefolder")).parameters
    ) - {"seed"}


def test_every_option_of_prostate_volumes_is_named():
    assert first_column("## Prostate volumes") == set(
        signature(recipe_of("prostate")).parameters
    ) - {"seed"}


def test_every_option_of_tables_is_named():
    assert first_column("## A table") == set(signature(recipe_of("table")).parameters) - {"seed"}


def test_every_option_of_adult_is_named():
    assert first_column("## Adult") == set(signature(recipe_of("adult")).parameters) - {"seed"}
