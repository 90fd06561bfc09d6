"""Reports in a browser: without errors, readable on a phone and a wide screen, light and dark."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape

import pytest

from equipoise.report import write_report
from tests.report.synthetic import write_run

BROWSER = os.environ.get("EQUIPOISE_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium is installed (or named by EQUIPOISE_BROWSER)"
)
NOTES = {
    "weights": lambda number, ids: [
        1 / len(ids) + 0.01 * (position % 2) for position in range(len(ids))
    ],
    "clusters": lambda number, ids: [int(client) % 2 for client in ids],
}
DARK = "--blink-settings=preferredColorScheme=0"
LIGHT = "--blink-settings=preferredColorScheme=1"
# Measures the page as it is laid out.
PROBE = """
<script>
const luminance = colour => {
  const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255);
  const linear = parts.map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const contrast = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};
const body = getComputedStyle(document.body).backgroundColor;
const charts = [...document.querySelectorAll("figure > svg")].map(svg => {
  const own = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll("path, use")].filter(mark => !mark.closest("ul"));
  const drawn = marks.filter(mark => {
    const box = mark.getBoundingClientRect(); return box.width + box.height > 0;
  });
  const outside = [...svg.querySelectorAll("text")].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < own.left - 1 || box.right > own.right + 1
      || box.top < own.top - 1 || box.bottom > own.bottom + 1;
  }).map(text => text.textContent);
  const panel = getComputedStyle(svg).backgroundColor;
  const series = [...svg.querySelectorAll(".points")].map(
    group => contrast(getComputedStyle(group).fill, panel));
  const label = getComputedStyle(svg.querySelector("text")).fill;
  const height = [...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect())
    .map(box => Math.min(box.width, box.height)).reduce((a, b) => Math.max(a, b), 0);
  return {marks: marks.length, drawn: drawn.length, outside, series: Math.min(...series), height,
          text: contrast(label, panel), label: svg.getAttribute("aria-label")};
});
const words = "p, td, th, dd, dt, li, a, summary, h1, h2, h3, h4";
const soft = [...document.querySelectorAll(words)].map(element =>
  contrast(getComputedStyle(element).color, body));
const found = {wide: document.documentElement.scrollWidth, body, charts, text: Math.min(...soft),
               width: innerWidth, hidden: document.querySelectorAll("figure").length};
parent.postMessage(JSON.stringify(found), "*");
</script>
"""
# A window cannot be as narrow as a phone, but a frame can.
FRAME = """<!DOCTYPE html><script>
onmessage = event => document.documentElement.setAttribute("data-found", event.data);
</script><iframe src="report.html" style="border:0;width:{width}px;height:900px"></iframe>"""


@pytest.fixture(scope="module", params=["one", "several"])
def page(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    methods = ("faa", "a method with a rather long name", "ga")
    runs = [
        write_run(folder / f"run{i}", method=m, cohort=5, notes=NOTES, unseen=2)
        for i, m in enumerate(methods)
    ]
    made = write_report(runs if request.param == "several" else runs[:1], folder / "report.html")
    made.write_text(
        made.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>"), encoding="utf-8"
    )
    return made


def opened(page, profile, *options):
    """Open a page without a window; return its layout and the browser's messages."""
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
    ]
    command += [
        f"--user-data-dir={profile}",
        *options,
        "--virtual-time-budget=5000",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout, done.stderr


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_is_drawn_without_errors_and_can_be_read(page, tmp_path, width, scheme):
    frame = page.with_name(f"frame{width}.html")
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    document, said = opened(frame, tmp_path, "--window-size=1500,1000", scheme)
    assert "CONSOLE" not in said
    found = json.loads(unescape(re.search(r'data-found="([^"]*)"', document)[1]))
    assert found["width"] == width
    assert found["wide"] <= width  # tables scroll on their own
    assert found["body"] == ("rgb(255, 255, 255)" if scheme == LIGHT else "rgb(22, 24, 29)")
    assert found["text"] >= 4.5  # WCAG 2, level AA
    assert len(found["charts"]) >= 8
    for chart in found["charts"]:
        assert chart["drawn"] == chart["marks"] > 0, chart
        assert not chart["outside"], chart
        assert chart["series"] >= 3, chart
        assert chart["text"] >= 4.5, chart
        assert chart["height"] >= 10, chart


def test_the_page_can_be_printed(page, tmp_path):
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    subprocess.run(
        [*command, f"--print-to-pdf={tmp_path / 'page.pdf'}", page.as_uri()],
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
