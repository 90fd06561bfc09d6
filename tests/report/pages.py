"""Parsing reports like a browser or a screen reader."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "wbr", "link", "br", "hr", "img", "input", "circle", "path"}


class Page(HTMLParser):
    """The content of a page: tables by caption, text, ids and references."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.ids, self.references, self.headings, self.figures = {}, [], [], [], {}
        self.tags, self.words = [], []
        self._open, self._cell, self._rows, self._figure = [], None, None, None
        self.feed(text)
        self.close()
        assert not self._open, self._open

    @property
    def text(self):
        return " ".join("".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append((tag, given))
        if "id" in given:
            self.ids.append(given["id"])
        self.references += [given[name] for name in ("href", "src", "xlink:href") if name in given]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th", "caption", "h1", "h2", "h3", "h4"):
            self._cell = []
        elif tag == "figure":
            self._figure = given["id"]
            self.figures[self._figure] = {"marks": 0}
        elif tag == "svg" and self._figure and given.get("role") == "img":
            self.figures[self._figure]["label"] = given["aria-label"]
        elif tag == "use" and self._figure and "ul" not in self._open:
            self.figures[self._figure]["marks"] += 1

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self._open.pop() == tag
        said = " ".join("".join(self._cell or []).split())
        if tag in ("td", "th"):
            self._rows[-1].append(said)
        elif tag == "caption":
            self._caption = said
        elif tag == "table":
            assert self._caption not in self.tables
            self.tables[self._caption] = self._rows
        elif tag == "figure":
            self._figure = None
        elif tag in ("h1", "h2", "h3", "h4"):
            self.headings.append((int(tag[1]), said))

    def handle_data(self, data):
        self.words.append(data)
        if self._cell is not None:
            self._cell.append(data)

    def table(self, caption):
        """Return a table as one dictionary per row, by the first column."""
        header, *rows = self.tables[caption]
        return {row[0]: dict(zip(header, row, strict=True)) for row in rows}
