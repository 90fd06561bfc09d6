"""What all checks of clients' messages share: the error, bounds, and values as text."""

from __future__ import annotations

from collections.abc import Iterable

LARGEST_SHAPE = 10**9
MOST_AXES = 16
MOST_NAMES = 10_000
LONGEST_NAME = 300


class Misfit(ValueError):
    """An answer or a registration that cannot be used. The message is the reason in one line."""


def shown(value: object, longest: int = 80) -> str:
    r"""Return a value from a client for a terminal or a journal: short, and on one line.

    Parameters
    ----------
    value : object
        Text is kept, other values are converted with ``repr``.
    longest : int
        Maximum number of characters.

    Returns
    -------
    str
        Without characters that are not printable.

    Examples
    --------
    >>> shown("head\x1b[2J\n"), shown([1, 2]), shown("x" * 100, longest=8)
    ('head\\x1b[2J\\n', '[1, 2]', 'xxxxx...')
    """
    # Truncate first: the value may be very long.
    text = (value if isinstance(value, str) else _represented(value))[: longest + 1]
    plain = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )
    return plain if len(plain) <= longest else plain[: longest - 3] + "..."


def _represented(value: object) -> str:
    if isinstance(value, list | tuple | dict) and len(value) > 20:
        return f"a {type(value).__name__} of {len(value)} values"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    return repr(value)


def several(names: Iterable[str]) -> str:
    """Return the first few names."""
    listed = sorted(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(shown(name) for name in listed[:3]) + more
