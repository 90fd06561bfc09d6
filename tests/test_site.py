"""The documentation as a site: a page per method, tables from the registry, valid links."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise import methods

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("pages", DOCS / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_registry(pages):
    names = [page.name for page in pages.pages_with_tables()]
    assert {"README.md", "architecture.md", "flower.md"} <= set(names)
    for page in pages.pages_with_tables():
        text = page.read_text(encoding="utf-8")
        assert pages.filled(text) == text, f"{page.name}: run python docs/pages.py"


def test_a_table_that_has_changed_is_made_anew(pages):
    text = "before\n<!-- table: purposes -->\n| old |\n<!-- end of table -->\nafter"
    made = pages.filled(text)
    assert "| old |" not in made
    assert made.startswith("before\n<!-- table: purposes -->\n| purpose |")
    assert made.endswith("|\n<!-- end of table -->\nafter")
    assert all(f"`{name}`" in made for name in pages.own_methods())


def test_an_empty_table_is_filled_without_the_text_after_it(pages):
    empty = "<!-- table: purposes -->\n<!-- end of table -->\n"
    made = pages.filled(f"{empty}between\n{empty}")
    assert made.count("| purpose |") == 2
    assert "<!-- end of table -->\nbetween\n<!-- table: purposes -->" in made


def test_the_table_of_speed_has_the_numbers_of_the_page_on_speed(pages):
    page = (DOCS / "results" / "speed.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in pages.speed().splitlines()[2:]]
    assert len({machine for machine, *_ in rows}) >= 2
    for machine, job, rate, *ratios in rows:
        section = page.partition(f"## {machine}\n")[2].partition("\n## ")[0]
        (line,) = [
            line
            for line in section.splitlines()
            if line.startswith(f"| {job}") and f"| {rate}" in line
        ]
        for ratio in ratios:
            assert ratio == "–" or f"| {ratio} |" in line


def test_results_that_are_named_are_there(pages):
    described = pages.read()["methods"]
    for name, about in described.items():
        for result in about["results"]:
            text = (DOCS / "results" / f"{result}.md").read_text(encoding="utf-8").lower()
            assert about["title"].lower() in text or name in text


@pytest.mark.slow
def test_the_site_is_built_without_warnings(tmp_path):
    pytest.importorskip("sphinx", reason="needs the extra docs")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        str(DOCS),
        str(tmp_path),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    for name in methods.names():
        page = (tmp_path / "methods" / f"{name}.html").read_text(encoding="utf-8")
        assert "When." in page
        assert methods.part_class(name).__name__ in page
