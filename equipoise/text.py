"""Text from others, made fit for a terminal."""

from __future__ import annotations

import unicodedata

# Control characters, lone surrogates, and separators of lines and paragraphs.
_UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")
# Characters that change the direction of the text around them.
_TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

# Of an error in one line. What is longer repeats a value that nobody reads.
LONGEST_MESSAGE = 2000


def printable(text: str, longest: int | None = None) -> str:
    r"""Return text with control characters written out, and shortened if need be.

    Names come from files and from clients. An escape sequence in one could recolour, rewrite or
    retitle the terminal it is printed on, and a new line could look like a message of another
    program.

    Parameters
    ----------
    text : str
        Any text.
    longest : int, optional
        How many characters to keep. The rest is replaced by an ellipsis and the number of
        characters there were.

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
    r"""Say whether text has characters that must not reach a terminal.

    Examples
    --------
    >>> unprintable_in("Zürich 東京"), unprintable_in("ward\x1b[2J")
    (False, True)
    """
    return not text.isprintable() and any(map(_is_unprintable, text))


def _is_unprintable(character: str) -> bool:
    return unicodedata.category(character) in _UNPRINTABLE or character in _TURNING


def _written_out(character: str) -> str:
    return character.encode("unicode_escape").decode() if _is_unprintable(character) else character
