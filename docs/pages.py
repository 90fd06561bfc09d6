"""Make the pages and tables that list methods, from the registry and ``methods.yaml``.

``python docs/pages.py`` fills in the tables of README and docs, between two comments each. Sphinx
calls :func:`write_pages` for the pages of methods, which are not in the repository.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from equipoise import methods
from equipoise.method import Part, Sees

DOCS = Path(__file__).parent
ROOT = DOCS.parent

KINDS = {
    "sampler": ("Sampler", "Which clients take part?"),
    "local": ("LocalRule", "What does each client do, and what does it keep?"),
    "aggregation": ("Aggregation", "How do updates become the new global model?"),
    "view": ("View", "On which view of the federation?"),
    "guard": ("Guard", "Which updates are trusted, and how far?"),
}

SECURE_AGGREGATION = {
    Sees.NOTHING: "nothing is sent",
    Sees.SUMS: "yes: weights are known before clients train, and only the weighted sum is used "
    "(SCAFFOLD: two sums; HarmoFL: one more before round 1, of amplitudes)",
    Sees.SCALARS: "only if every client's loss is visible (FedNova: its number of steps): weights "
    "are computed from these, the model from a weighted sum. TERM needs all losses before it can "
    "compute weights",
    Sees.UPDATES: "no: the weights are computed from inner products of single updates, or single "
    "numbers of all updates are compared",
    Sees.REPRESENTATIONS: "no: clients are clustered by vectors that describe their data (FedMix: "
    "the server sends the mean images and labels of single clients to all clients)",
    Sees.DATA: "not available on Flower",
}


def read() -> dict[str, Any]:
    """Read ``methods.yaml``; refuse it if it does not describe exactly the methods there are."""
    described: dict[str, Any] = yaml.safe_load((DOCS / "methods.yaml").read_text(encoding="utf-8"))
    listed = {name for group in described["purposes"].values() for name in group}
    for what, found in (("methods", set(described["methods"])), ("purposes", listed)):
        if differing := found ^ set(own_methods()):
            raise SystemExit(
                f"{what} of docs/methods.yaml and the registry differ by "
                f"{', '.join(sorted(differing))}"
            )
    return described


def own_methods() -> list[str]:
    """List the methods of the library, without those that a user has registered."""
    return [name for name in methods.names() if _is_own(name)]


def _is_own(name: str) -> bool:
    return methods.part_class(name).__module__.startswith("equipoise.")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join([_row(*head), "|" + "---|" * len(head), *(_row(*cells) for cells in rows)])


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def purposes() -> str:
    """Return the table of methods by purpose."""
    return _table(
        ("purpose", "methods"),
        [(purpose, _code(names)) for purpose, names in read()["purposes"].items()],
    )


def parts() -> str:
    """Return the table of registered parts by kind."""
    rows = [
        (f"`{kind}`", question, _code(sorted(filter(_is_own, methods.fitting(slot)))))
        for slot, (kind, question) in KINDS.items()
    ]
    return _table(("part", "question", "registered parts"), rows)


def server_sees() -> str:
    """Return the table of methods by what the server sees of clients."""
    seen = {
        level: [n for n in own_methods() if methods.build(n).sees == level]
        for level in SECURE_AGGREGATION
    }
    rows = [(level.words, _code(seen[level]), text) for level, text in SECURE_AGGREGATION.items()]
    return _table(("server sees", "methods", "under secure aggregation"), rows)


def speed() -> str:
    """Return the table of speed, from the first table of each machine in ``results/speed.md``."""
    wanted = ("job", "Equipoise", "against bare", "against pfl", "against Flower")
    rows: list[tuple[str, ...]] = []
    text = (DOCS / "results" / "speed.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        machine = section.partition("\n")[0]
        tables = re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
        measured = next(
            (made for made in map(_cells, tables) if set(wanted[:3]) <= set(made[0])), ()
        )
        for cells in measured[1:]:
            found = dict(zip(measured[0], cells, strict=True))
            job, rate, *ratios = (found.get(name, "") for name in wanted)
            # Without the details in brackets: the range of repeats, how often it was measured.
            rows.append((machine, _plain(job), _plain(rate), *(ratio or "–" for ratio in ratios)))
    if not rows:
        raise SystemExit(f"docs/results/speed.md has no table with {', '.join(wanted[:3])}")
    head = ("machine", "job", "client-steps/s", "bare PyTorch loop", "pfl-research", "Flower")
    return _table(head, rows)


def _cells(table: str) -> list[list[str]]:
    """Return the cells of a Markdown table, its header first."""
    lines = [line for line in table.splitlines() if not set(line) <= set("|-: ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _plain(cell: str) -> str:
    return re.sub(r" \(.*?\)", "", cell)


TABLES: Mapping[str, Callable[[], str]] = {
    "purposes": purposes,
    "parts": parts,
    "server sees": server_sees,
    "speed": speed,
}


def filled(text: str) -> str:
    """Return a page with its tables made anew.

    A table is between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
    """

    def made(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    return re.sub(
        r"(<!-- table: ([a-z ]+) -->)\n(?:.*?\n)??(<!-- end of table -->)",
        made,
        text,
        flags=re.DOTALL,
    )


def pages_with_tables() -> list[Path]:
    """List README and the pages that have tables."""
    pages = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    return [page for page in pages if "<!-- table: " in page.read_text(encoding="utf-8")]


def page_of(name: str, described: Mapping[str, Any]) -> str:
    """Return the page of a method."""
    part = methods.part_class(name)
    about = described["methods"][name]
    # The study of the digits has every method.
    results = ", ".join(f"[{page}](../results/{page}.md)" for page in (*about["results"], "digits"))
    lines = [
        f"# {about['title']}",
        "",
        f"`method: {name}`" + (f" · {part.paper}" if part.paper else ""),
        "",
        f"**When.** {about['when']}",
        "",
        f"**Cost.** {about['cost']}",
        "",
        f"**The server sees** {methods.build(name).sees.words}; see [what this "
        "means](../flower.md#what-the-server-sees).",
        "",
        f"**Results here.** {results}.",
        "",
        "```{eval-rst}",
        f".. autoclass:: {part.__module__}.{part.__name__}",
        "",
        *(
            f".. autoclass:: {base.__module__}.{base.__name__}\n   :no-index:\n"
            for base in _described_with(part)
        ),
        "```",
        "",
    ]
    return "\n".join(lines)


def _described_with(part: type[Part]) -> list[type[Any]]:
    """List the base classes of a part with options that are not methods themselves."""
    registered = {methods.part_class(name) for name in own_methods()}
    return [
        base
        for base in part.__mro__[1:]
        if base.__module__.startswith(("equipoise.methods.", "equipoise.grouping"))
        and base not in registered
    ]


def write_pages(folder: Path) -> None:
    """Write the page of each method, and their index, into a folder."""
    described = read()
    folder.mkdir(exist_ok=True)
    for name in own_methods():
        (folder / f"{name}.md").write_text(page_of(name, described), encoding="utf-8")
    groups = [
        f"## {purpose[0].upper()}{purpose[1:]}\n\n"
        + "\n".join(
            f"- [{described['methods'][name]['title']}]({name}.md): "
            f"{described['methods'][name]['when']}"
            for name in names
        )
        for purpose, names in described["purposes"].items()
    ]
    hidden = "\n".join(["```{toctree}", ":hidden:", "", *own_methods(), "```"])
    (folder / "index.md").write_text(
        "\n\n".join(["# Methods", *groups, hidden]) + "\n", encoding="utf-8"
    )


def main() -> int:
    """Fill in all tables. With ``--check`` only print which pages are out of date."""
    outdated = []
    for page in pages_with_tables():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            outdated.append(page.name)
            if "--check" not in sys.argv[1:]:
                page.write_text(new, encoding="utf-8")
    if outdated:
        print(f"tables updated: {', '.join(outdated)}")
    return int("--check" in sys.argv[1:] and bool(outdated))


if __name__ == "__main__":
    raise SystemExit(main())
