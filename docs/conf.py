"""The documentation as a site: ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import pages  # noqa: E402

import equipoise  # noqa: E402

project = "Equipoise"
version = release = equipoise.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 4
napoleon_google_docstring = False
# Attributes are listed with their class, and not once more as members.
napoleon_use_ivar = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = "Equipoise"
html_show_copyright = False


def escape_bars(
    app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Keep |S| and |x − y| from being read as substitutions."""
    lines[:] = [
        line if ">>>" in line or "``" in line else line.replace("|", r"\|") for line in lines
    ]


def setup(app: Any) -> None:
    """Write the pages of the methods before anything is read."""
    pages.write_pages(HERE / "methods")
    app.connect("autodoc-process-docstring", escape_bars)
