"""Tables in LaTeX, with the marks of the tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["latex_table"]

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "±": r"$\pm$",
    "–": "--",
    "†": r"$^{\dagger}$",
    "<": "$<$",
    ">": "$>$",
    "σ": r"$\sigma$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
}


def latex_table(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    texts: int = 1,
    note: str = "",
) -> str:
    r"""Return a table.

    Parameters
    ----------
    title : str
        Its caption.
    header : sequence of str
        The heads of columns.
    rows : iterable of sequences of str
        Cells with ``**best**`` and ``<u>second</u>``, as in Markdown.
    texts : int
        How many of the first columns are text. The others are numbers.
    note : str
        The end of the caption, which explains the marks.

    Returns
    -------
    str
        A ``table`` that needs ``\usepackage{booktabs}``.

    Examples
    --------
    >>> print(latex_table("a_b", ["Method", "σ over clients"], [["fedavg", "**0.9 ± 0.1**"]]))
    \begin{table}
    \caption{a\_b.}
    \begin{tabular}{lr}
    \toprule
    Method & $\sigma$ over clients \\
    \midrule
    fedavg & \textbf{0.9 $\pm$ 0.1} \\
    \bottomrule
    \end{tabular}
    \end{table}
    <BLANKLINE>
    """
    lines = [" & ".join(map(_cell, row)) + r" \\" for row in (header, *rows)]
    caption = " ".join(filter(None, [f"{_escaped(title)}.", _escaped(note)]))
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{'l' * texts}{'r' * (len(header) - texts)}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _cell(text: str) -> str:
    pieces = re.fullmatch(r"\*\*(?P<best>.*)\*\*|<u>(?P<second>.*)</u>(?P<after>.*)", text)
    if pieces is None:
        return _escaped(text)
    if pieces["best"] is not None:
        return rf"\textbf{{{_escaped(pieces['best'])}}}"
    return rf"\underline{{{_escaped(pieces['second'])}}}{_escaped(pieces['after'])}"


def _escaped(text: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in text)
