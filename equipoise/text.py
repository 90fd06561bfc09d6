"""Text for users: text from files and clients made safe to print, and numbers with units."""

from __future__ import annotations

import unicodedata

# Control characters, lone surrogates, and separators of lines and paragraphs.
_UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")
# Characters that change the direction of the text around them.
_TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

# The longest error message, in characters. Longer messages contain a long value.
LONGEST_MESSAGE = 2000


def printable(text: str, longest: int | None = None) -> str:
    r"""Return text with control characters escaped, and shortened if necessary.

    Names come from files and from clients. An escape sequence in a name could change the colours,
    the content or the title of the terminal, and a newline could look like the message of another
    program.

    Parameters
    ----------
    text : str
        Any text.
    longest : int, optional
        How many characters to keep. The rest is replaced by an ellipsis and the length of the
        text.

    Returns
    -------
    str
        One line.

    Examples
    --------
    >>> printable("ward\x1b[2J\n3")
    'ward\\x1b[2J\\n3'
    >>> printable("a" * 100, 5)
    'aaaaa… (100 characters)'
    """
    shown = text[:longest]
    if not shown.isprintable():
        shown = "".join(_written_out(character) for character in shown)
    return (
        shown if longest is None or len(text) <= longest else f"{shown}… ({len(text)} characters)"
    )


def unprintable_in(text: str) -> bool:
    r"""Return whether text has characters that must not be printed on a terminal.

    Examples
    --------
    >>> unprintable_in("Zürich 東京"), unprintable_in("ward\x1b[2J")
    (False, True)
    """
    return not text.isprintable() and any(map(_is_unprintable, text))


def represented(value: object) -> str:
    r"""Return a value as text for a message, shortened if it is long.

    Examples
    --------
    >>> represented({"rounds": "a\n"})
    "{'rounds': 'a\\n'}"
    """
    try:
        return printable(repr(value), 500)
    except ValueError:
        # Python refuses to convert numbers with thousands of digits to text.
        return f"a value of {type(value).__name__} that is too long to show"


def one_line(error: Exception) -> str:
    r"""Return the message of an error on one line.

    Examples
    --------
    >>> one_line(ValueError("line 3:\n  a colon is missing"))
    'line 3: a colon is missing'
    """
    return " ".join(str(error).split())


def _is_unprintable(character: str) -> bool:
    return unicodedata.category(character) in _UNPRINTABLE or character in _TURNING


def _written_out(character: str) -> str:
    return character.encode("unicode_escape").decode() if _is_unprintable(character) else character


def capital(text: str) -> str:
    """Capitalize the first letter.

    Examples
    --------
    >>> capital("global model"), capital("σ over clients")
    ('Global model', 'σ over clients')
    """
    # Symbols such as σ have another meaning as capital letters.
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def plural(count: int, what: str) -> str:
    """Format a number with a noun.

    Examples
    --------
    >>> plural(1, "round"), plural(3, "round")
    ('1 round', '3 rounds')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Format a number of bytes.

    Examples
    --------
    >>> size(193_040), size(12), size(2 * 10**12)
    ('193.0 kB', '12 B', '2.0 TB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
