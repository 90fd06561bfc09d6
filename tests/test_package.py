"""Which modules may import which: methods and models do not depend on engines and runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import equipoise

PACKAGE = Path(equipoise.__file__).parent
WORDS = sorted(
    str(path.relative_to(PACKAGE))
    for pattern in (
        "method.py",
        "method_parts.py",
        "task.py",
        "tasks/*.py",
        "client.py",
        "masked.py",
        "tree.py",
        "random.py",
        "optimizers/*.py",
        "checks.py",
        "errors.py",
        "methods/*.py",
        "models/*.py",
    )
    for path in PACKAGE.glob(pattern)
)
ABOVE = (
    "equipoise.engine",
    "equipoise.run",
    "equipoise.flower",
    "equipoise.config",
    "equipoise.study",
    "equipoise.cli",
)


def imported_by(path):
    """List a module's imports at import time, without those in functions or for type checkers."""
    found = []

    def visit(statements):
        for statement in statements:
            if isinstance(statement, ast.Import):
                found.extend(alias.name for alias in statement.names)
            elif isinstance(statement, ast.ImportFrom):
                assert statement.level == 0, f"{path}: relative imports are not followed here"
                found.extend(f"{statement.module}.{alias.name}" for alias in statement.names)
            elif isinstance(statement, ast.If) and ast.unparse(statement.test).endswith(
                "TYPE_CHECKING"
            ):
                visit(statement.orelse)
            elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                for field in ("body", "orelse", "finalbody"):
                    visit(getattr(statement, field, []))
                for handler in getattr(statement, "handlers", []):
                    visit(handler.body)

    visit(ast.parse(path.read_text(encoding="utf-8")).body)
    return found


def within(name, packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_imports_are_found(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport a.b\ntry:\n    from c import d\nexcept "
        "ImportError:\n    import e\n"
        "if TYPE_CHECKING:\n    import never\nclass K:\n    import f\ndef function():\n    import "
        "never\n"
    )
    assert imported_by(file) == ["typing.TYPE_CHECKING", "a.b", "c.d", "e", "f"]


@pytest.mark.parametrize("name", WORDS)
def test_the_words_of_methods_and_models_know_nothing_of_engines(name):
    assert [found for found in imported_by(PACKAGE / name) if within(found, ABOVE)] == []


def test_no_module_imports_itself_in_a_circle():
    """Resolve packages to modules, and ``from package import name`` to the module ``name``."""
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in PACKAGE.rglob("*.py")
    }

    def module_of(name):
        while name not in modules:
            name = name.rpartition(".")[0]
        return name

    graph = {
        name: {module_of(found) for found in imported_by(path) if within(found, ["equipoise"])}
        - {name}
        for name, path in modules.items()
    }
    finished: set[str] = set()

    def circle_from(name, way):
        if name in way:
            return [*way[way.index(name) :], name]
        if name in finished:
            return None
        for other in sorted(graph[name]):
            if found := circle_from(other, [*way, name]):
                return found
        finished.add(name)
        return None

    for name in sorted(graph):
        assert circle_from(name, []) is None


def test_what_is_imported_on_first_use_is_listed():
    assert set(equipoise.__all__) <= set(dir(equipoise))
