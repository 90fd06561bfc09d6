"""The two kinds of errors of Equipoise, and messages that all modules share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

# How users name the head of a model of their own.
NAME_THE_HEAD = (
    'the name of the layer that is its head, such as train(..., head="classifier") or, where a '
    'model is registered, equipoise.models.headed.with_head(module, "classifier")'
)


class InputError(ValueError):
    """What was asked for is wrong (exit code 2).

    The message names the value, where it came from and what would be valid.
    """


class RunError(RuntimeError):
    """The input is valid, but the run failed (exit code 1).

    Everything that was written before is intact.
    """


def unknown(
    kind: str,
    name: object,
    valid: Iterable[str],
    *,
    where: str | None = None,
    of: str | None = None,
    listed: str | None = None,
    elsewhere: Sequence[str] = (),
) -> InputError:
    """Return the error for an unknown name. It suggests the most similar valid name.

    Parameters
    ----------
    kind : str
        What the name should have been, such as ``"method"``.
    name : object
        The value that was given.
    valid : iterable of str
        All valid names.
    where : str, optional
        Where the value came from: a file, a key, a command line option.
    of : str, optional
        What the valid names depend on, such as ``"method 'ditto'"``.
    listed : str, optional
        What lists all valid names, if there are too many for a message. Then the message names the
        nearest ones only.
    elsewhere : sequence of str
        Names that are valid elsewhere and are suggested instead; at most three are shown.

    Returns
    -------
    InputError
        For the caller to raise.

    Examples
    --------
    >>> str(unknown("method", "fedvag", ["fedavg", "local"]))
    "unknown method 'fedvag'; did you mean 'fedavg'? Valid: fedavg, local"
    """
    valid = sorted(valid)
    hint = suggest(elsewhere[:3]) or near(str(name), valid, most=3 if listed else 1) or "."
    place = f" in {where}" if where else ""
    valid_for = f"Valid with {of}" if of else "Valid"
    rest = f"All are listed by: {listed}" if listed else f"{valid_for}: {', '.join(valid)}"
    return InputError(f"unknown {kind} {name!r}{place}{hint} {rest}")


def near(name: str, valid: Collection[str], *, most: int = 1) -> str:
    """Return the end of a sentence that suggests the nearest names, or nothing if none is near.

    Examples
    --------
    >>> near("fedvag", ["fedavg", "local"])
    "; did you mean 'fedavg'?"
    """
    # What all dotted keys have in common would make them alike.
    above = name.rpartition(".")[0]
    shared = f"{above}." if above and all(one.startswith(f"{above}.") for one in valid) else ""
    ends = [one.removeprefix(shared) for one in sorted(valid)]
    found = get_close_matches(name.removeprefix(shared), ends, n=most, cutoff=0.6)
    return suggest([f"{shared}{end}" for end in found])


def suggest(names: Sequence[str]) -> str:
    """Return the end of a sentence that suggests names, or nothing without any.

    Examples
    --------
    >>> suggest(["data.seed", "seed"])
    "; did you mean 'data.seed' or 'seed'?"
    """
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""


def near_files(path: str | Path) -> str:
    """Suggest the files with names like that of a file that is missing, from its directory.

    Examples
    --------
    >>> near_files("pyprojekt.toml")
    "; did you mean 'pyproject.toml'?"
    """
    missing = Path(path)
    try:
        files = sorted(entry for entry in missing.parent.iterdir() if entry.is_file())
    except OSError:
        return ""
    # Names are compared without their endings, which would make all of them alike.
    names = {file.stem: file.name for file in files if missing.suffix in ("", file.suffix)}
    found = get_close_matches(missing.stem, names, n=1, cutoff=0.6)
    return f"; did you mean {names[found[0]]!r}?" if found else ""


def few(values: Sequence[object]) -> str:
    """Return the first eight values as text, with an ellipsis if there are more.

    Examples
    --------
    >>> few(["ann", "bob"]), few(range(100))
    ("'ann', 'bob'", '0, 1, 2, 3, 4, 5, 6, 7, ...')
    """
    shown = ", ".join(repr(value) for value in values[:8])
    return f"{shown}, ..." if len(values) > 8 else shown
