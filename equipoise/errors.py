"""The two ways an Equipoise command can end badly, and the complaints that all parts phrase alike."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """What was asked for is wrong: the message names the value, where it came from and what would be valid (exit code 2)."""


class RunError(RuntimeError):
    """The input is valid, but the run failed (exit code 1).

    Everything that was written before is intact.
    """


def unknown(
    kind: str, name: object, valid: Iterable[str], *, where: str | None = None
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
    near = get_close_matches(str(name), valid, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    place = f" in {where}" if where else ""
    return InputError(f"unknown {kind} {name!r}{place}{hint} Valid: {', '.join(valid)}")
