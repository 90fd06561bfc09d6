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


def import_own(imports: Iterable[str], *, beside: Path | None = None) -> None:
    """Import modules by file or by name; what is imported already is left as it is.

    Parameters
    ----------
    imports : iterable of str
        Files that end in ``.py``, or names of modules that are installed or lie in the current directory. See :func:`file_of`
        for where files are looked for.
    beside : Path, optional
        A directory to look in first.

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
        # At the end, so that a user file never hides an installed module. Child processes inherit it.
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        try:
            found = import_module(name)
        except (Exception, SystemExit) as error:
            raise InputError(f"imports: {given!r} cannot be imported ({type(error).__name__}: {error})") from error
        # A copy, such as that in a run directory, is accepted.
        if file and (found.__file__ is None or Path(found.__file__).read_bytes() != file.read_bytes()):
            raise InputError(
                f"imports: {given!r} cannot be imported, because Python finds {found.__file__ or 'a built-in module'} "
                f"under the name {name!r}; call the file something else"
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
    for candidate in (*([beside / path] if beside else []), path, *(Path(folder, path.name) for folder in sys.path)):
        if candidate.is_file():
            return candidate.resolve()
    raise InputError(f"imports: no file {given!r} in {Path.cwd()}; give its path from there, or a module's name")


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
