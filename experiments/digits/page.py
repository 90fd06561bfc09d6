"""Put the results of ``experiments/digits/all.yaml`` into the documentation.

Tables go into ``docs/results/digits.md``, the report beside it:
``python experiments/digits/page.py runs/digits-all``, after ``equipoise compare
experiments/digits/all.yaml --out runs/digits-all --markdown runs/digits-all/table.md``.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "results" / "digits.md"
BEGIN, END = "<!-- tables of compare -->", "<!-- end of tables -->"
REPORT = "[The report of all runs](digits-report.html) has figures, all clients and intervals."


def filled(page: str, tables: str) -> str:
    """Return the page with the tables of methods and groups between the two comments.

    A link to the report, which has the other tables, follows.
    """
    shown = f"{tables.partition('**base: 95% bootstrap')[0].strip()}\n\n{REPORT}"
    pattern = f"({re.escape(BEGIN)}\n).*?({re.escape(END)})"
    new, count = re.subn(
        pattern, lambda found: f"{found[1]}{shown}\n{found[2]}", page, flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"{PAGE} must have {BEGIN} and {END} once")
    return new


def main() -> None:
    """Fill in the page and copy the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="the directory of the study")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to fill in")
    arguments = parser.parse_args()
    tables, report = arguments.runs / "table.md", arguments.runs / "report.html"
    for path in (tables, report):
        if not path.exists():
            parser.error(
                f"{path} is missing; make it with equipoise compare, see the top of this file"
            )
    page = arguments.page
    page.write_text(
        filled(page.read_text(encoding="utf-8"), tables.read_text(encoding="utf-8")),
        encoding="utf-8",
    )
    shutil.copy(report, page.with_name("digits-report.html"))
    print(page)


if __name__ == "__main__":
    main()
