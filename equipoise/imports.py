"""Import of user code, and registration of its models and sources."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from equipoise.errors import InputError, unknown

F = TypeVar("F", bound=Callable[..., Any])
Registry = dict[str, str | Callable[..., Any]]
"""Functions by name: where one is found, as ``module:function``, so that nothing is imported early, or itself."""


def import_own(
    imports: Iterable[str],
    *,
    beside: Path | None = None,
    on_import: Callable[[str], None] | None = None,
) -> None:
    """Import modules by file or by name; what is imported already is left as it is.

    Parameters
    ----------
    imports : iterable of str
        Files that end in ``.py``, or names of modules that are installed or lie in the current
        directory. See :func:`file_of` for where files are looked for.
    beside : Path, optional
        A directory to look in first.
    on_import : callable, optional
        Called with the path or name of each module before it is executed.

    Raises
    ------
    InputError
        If one is not there, fails, or has a name under which Python finds something else.

    Examples
    --------
    >>> import_own(["a module"])
    Traceback (most recent call last):
    equipoise.errors.InputError: imports: 'a module' cannot be imported (ModuleNotFoundError: No module named 'a module')
    """
    for given in imports:
        file = file_of(given, beside=beside)
        name, folder = (file.stem, file.parent) if file else (given, Path.cwd())
        if on_import and not _is_imported(name, file):
            on_import(str(file or name))
        # At the end, so that a user file never hides an installed module. Child processes inherit
        # it.
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        try:
            found = import_module(name)
        except (Exception, SystemExit) as error:
            raise InputError(
                f"imports: {given!r} cannot be imported ({type(error).__name__}: {error})"
            ) from error
        # A copy, such as that in a run directory, is accepted.
        if file and not _is_imported(name, file):
            raise InputError(
                f"imports: {given!r} cannot be imported, because Python finds "
                f"{found.__file__ or 'a built-in module'} under the name {name!r}; call the file "
                "something else"
            )


def import_of_run(imports: Any, directory: Path, *, trust: bool) -> None:
    """Import the code that a run directory names, if it is trusted.

    Code that is imported already, such as by the process that trained the run, needs no trust:
    nothing is executed.

    Parameters
    ----------
    imports : list of str
        The section ``imports`` of the run's configuration.
    directory : Path
        The run directory, in which the files are.
    trust : bool
        Whether the user has said to execute it.

    Raises
    ------
    InputError
        If there is code to execute and it is not trusted. The message says what would be executed.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "mine.py").write_text("print('hello')")
    >>> import_of_run(["mine.py"], folder, trust=False)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: the run in ... would execute .../mine.py; read it, and if you trust it, pass trust=True (--trust)
    """
    if isinstance(imports, str):
        imports = [imports]
    if not isinstance(imports, list) or not all(isinstance(given, str) for given in imports):
        raise InputError(
            f"imports of the run in {directory} must be a list of files or modules, got {imports!r}"
        )
    files = {given: file_of(given, beside=directory) for given in imports}
    pending = [
        str(file or given)
        for given, file in files.items()
        if not _is_imported(file.stem if file else given, file)
    ]
    if pending and not trust:
        raise InputError(
            f"the run in {directory} would execute {', '.join(pending)}; read it, and if you trust "
            "it, pass trust=True (--trust)"
        )
    # Otherwise the directory is not even added to the places where Python looks for modules.
    if pending:
        import_own(imports, beside=directory)


def _is_imported(name: str, file: Path | None) -> bool:
    """Say whether a module is imported already; a copy of its file counts as the same."""
    found = sys.modules.get(name)
    if found is None or file is None:
        return found is not None
    there = getattr(found, "__file__", None)
    return (
        there is not None
        and Path(there).is_file()
        and Path(there).read_bytes() == file.read_bytes()
    )


def file_of(given: str, *, beside: Path | None = None) -> Path | None:
    """Find a file: beside another, from the current directory, or by its name where Python looks for modules.

    The last is where a Flower app has it. Of the name of a module, ``None``.

    Examples
    --------
    >>> file_of("json") is None, file_of("this.py").name
    (True, 'this.py')
    """
    path = Path(given)
    if path.suffix != ".py":
        return None
    for candidate in (
        *([beside / path] if beside else []),
        path,
        *(Path(folder, path.name) for folder in sys.path),
    ):
        if candidate.is_file():
            return candidate.resolve()
    raise InputError(
        f"imports: no file {given!r} in {Path.cwd()}; give its path from there, or a module's name"
    )


def enter(registry: Registry, function: F, kind: str) -> F:
    """Enter a function under its own name; one that is defined again, as in a notebook, takes its own place.

    Examples
    --------
    >>> enter({"mlp": "equipoise.models.dense:mlp"}, lambda: None, "model").__name__
    '<lambda>'
    """
    name = function.__name__
    before = registry.get(name, function)
    taken_by = before if isinstance(before, str) else f"{before.__module__}:{before.__qualname__}"
    if taken_by != f"{function.__module__}:{function.__qualname__}":
        raise InputError(f"the name {name!r} of a {kind} is taken by {taken_by}; choose another")
    registry[name] = function
    return function


def look_up(registry: Registry, name: str, kind: str) -> Callable[..., Any]:
    """Return the function of a name, importing it if need be.

    Examples
    --------
    >>> look_up({"digits": "equipoise.data.digits:recipe"}, "digits", "data").__name__
    'recipe'
    """
    if name not in registry:
        raise unknown(kind, name, registry)
    entry = registry[name]
    if not isinstance(entry, str):
        return entry
    module, _, function = entry.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found
