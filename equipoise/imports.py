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
"""Functions by name: a function, or ``module:function``, which is imported on first use."""


def import_own(
    imports: Iterable[str],
    *,
    beside: Path | None = None,
    on_import: Callable[[str], None] | None = None,
) -> None:
    """Import modules by file or by name. Modules that are already imported are not changed.

    Parameters
    ----------
    imports : iterable of str
        Files that end in ``.py``, or names of modules that are installed or in the current
        directory. See :func:`file_of` for where files are searched.
    beside : Path, optional
        A directory to search first.
    on_import : callable, optional
        Called with the path or name of each module before it is executed.

    Raises
    ------
    InputError
        If a module does not exist, fails, or has the name of another module.

    Examples
    --------
    >>> import_own(["a module"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: imports: 'a module' cannot be imported (ModuleNotFoundError: ...)
    """
    for given in imports:
        file = file_of(given, beside=beside)
        name, folder = (file.stem, file.parent) if file else (given, Path.cwd())
        if on_import and not _is_imported(name, file):
            on_import(str(file or name))
        # At the end, so that a user's file never hides an installed module. Child processes
        # inherit the path.
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
                f"{found.__file__ or 'a built-in module'} under the name {name!r}; rename the file"
            )


def import_of_run(imports: Any, directory: Path, *, trust: bool) -> None:
    """Import the code that a run directory names, if it is trusted.

    Code that is already imported, such as in the process that trained the run, is not executed
    again and needs no trust.

    Parameters
    ----------
    imports : list of str
        The key ``imports`` of the run's configuration.
    directory : Path
        The run directory, in which the files are.
    trust : bool
        Whether the user trusts the code.

    Raises
    ------
    InputError
        If there is code to execute and it is not trusted. The message names it.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "mine.py").write_text("print('hello')")
    >>> import_of_run(["mine.py"], folder, trust=False)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: the run in ... would execute .../mine.py; read it, and ...
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
    # If there is nothing to execute, the directory is not added to Python's search path.
    if pending:
        import_own(imports, beside=directory)


def _is_imported(name: str, file: Path | None) -> bool:
    """Return whether a module is already imported, from this file or from a copy of it."""
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
    """Return the path of a file, or ``None`` for the name of a module.

    The file is searched in ``beside``, in the current directory, and on Python's search path, where
    a Flower app has it.

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
    """Register a function under its own name.

    A function that is defined again, as in a notebook, replaces the earlier one.

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
    """Return the function of a name. Import it if necessary.

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
