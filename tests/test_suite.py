"""The test suite itself: shared code of tests is in separate modules."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def imports_of_tests(source):
    """Return the lines of a module that import a ``test_*`` module or something from one."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            paths = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if any(part.startswith("test_") for path in paths for part in path.split(".")):
                lines.append(node.lineno)
    return lines


def test_no_module_imports_from_a_test_module():
    ways = (
        "import tests.data.test_files\nfrom tests.data.test_files import x\n"
        "from tests.data import test_files\n"
    )
    assert imports_of_tests(ways + "from . import test_files\nfrom .test_files import x\n") == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert imports_of_tests("from tests.rounds import play\nfrom tests import latest_\n") == []
    # The environments of the benchmarks' peers are in a hidden directory.
    files = [
        path
        for folder in ("tests", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]
    assert Path(__file__) in files
    found = {
        str(path.relative_to(ROOT)): imports_of_tests(path.read_text(encoding="utf-8"))
        for path in files
    }
    assert {path: lines for path, lines in found.items() if lines} == {}
