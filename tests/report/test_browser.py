"""Reports in a browser: drawn without errors, readable on a phone and on a wide screen, light and
dark, and usable with a keyboard and a screen reader.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from equipoise import Evaluation, Training
from equipoise.report import write_report
from tests.attributed import attributed
from tests.report.browser import EXECUTABLE, MISSING, Browser
from tests.report.synthetic import write_run
from tests.run.small import small_run

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason=MISSING)
NOTES = {
    "weights": lambda number, ids: [
        1 / len(ids) + 0.01 * (position % 2) for position in range(len(ids))
    ],
    "clusters": lambda number, ids: [int(client) % 2 for client in ids],
}
BACKGROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 29)"}
# Measures the page as it is laid out.
MEASURE = """
(() => {
  // [red, green, blue, opacity] of "rgb(…)", "rgba(…)" and "color(srgb …)", from 0 to 1.
  const parsed = colour => {
    const parts = colour.match(/[\\d.]+/g).map(Number);
    const scale = colour.startsWith("rgb") ? 255 : 1;
    return [...parts.slice(0, 3).map(v => v / scale), parts[3] ?? 1];
  };
  const behind = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      layers.push(parsed(getComputedStyle(at).backgroundColor));
    }
    return layers.reduceRight(
      (under, [r, g, b, a]) => [r, g, b].map((v, i) => a * v + (1 - a) * under[i]), [1, 1, 1]);
  };
  const luminance = colour => {
    const linear = colour.map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const contrast = (colour, element) => {
    const both = [parsed(colour).slice(0, 3), behind(element)].map(luminance);
    return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  };
  const box = element => element.getBoundingClientRect();
  const charts = [...document.querySelectorAll("figure > svg")].map(svg => {
    const own = box(svg), texts = [...svg.querySelectorAll("text")];
    const marks = [...svg.querySelectorAll("path, use")].map(box);
    const outside = texts.filter(text => box(text).left < own.left - 1
      || box(text).right > own.right + 1 || box(text).top < own.top - 1
      || box(text).bottom > own.bottom + 1);
    const series = [...svg.querySelectorAll(".points")];
    return {
      label: svg.getAttribute("aria-label"),
      marks: marks.length,
      drawn: marks.filter(mark => mark.width + mark.height > 0).length,
      outside: outside.map(text => text.textContent),
      series: Math.min(...series.map(group => contrast(getComputedStyle(group).fill, svg))),
      text: Math.min(...texts.map(text => contrast(getComputedStyle(text).fill, svg))),
      height: Math.max(...texts.map(text => Math.min(box(text).width, box(text).height))),
    };
  });
  const tags = "p, td, th, dd, dt, li, a, summary, h1, h2, h3, code";
  const written = [...document.querySelectorAll(tags)];
  return {
    charts,
    figures: document.querySelectorAll("figure").length,
    wide: document.documentElement.scrollWidth,
    body: getComputedStyle(document.body).backgroundColor,
    text: Math.min(...written.map(element => contrast(getComputedStyle(element).color, element))),
  };
})()
"""
UNFOLD = "document.querySelectorAll('details').forEach(one => { one.open = true; })"
AUDIT = """axe.run({resultTypes: ["violations"]}).then(found => found.violations.map(
  one => `${one.impact}: ${one.help}: ${one.nodes.map(node => node.html).slice(0, 3)}`))"""
# What the keyboard can reach, in the order in which it is written.
REACHABLE = """[...document.querySelectorAll("a[href], summary, [tabindex]")]
  .filter(one => one.checkVisibility()).length"""
FOCUSED = """(() => {
  const one = document.activeElement, all = [...document.querySelectorAll("*")];
  return {
    place: all.indexOf(one),
    tag: one.tagName,
    name: one.getAttribute("aria-label") || one.textContent,
    outline: getComputedStyle(one).outlineStyle,
    seen: one.getBoundingClientRect().left >= 0,
  };
})()"""


def axe():
    """Return the file of axe-core, which checks pages for accessibility, or None."""
    if given := os.environ.get("EQUIPOISE_AXE"):
        return Path(given)
    package = importlib.util.find_spec("axe_core_python")
    return Path(package.origin).with_name("axe.min.js") if package else None


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module", params=["one", "several", "personal"])
def page(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    if request.param == "personal":
        settings = {
            "federation": attributed(unseen=[3]),
            "model": "logistic",
            "training": Training(rounds=2),
            "evaluation": Evaluation(min_cell=3),
        }
        small_run(folder / "ditto", "ditto", **settings)
        return write_report([folder / "ditto"])
    methods = ("faa", "a method with a rather long name", "ga")
    runs = [
        write_run(folder / f"run{i}", method=m, cohort=5, notes=NOTES, unseen=2)
        for i, m in enumerate(methods)
    ]
    return write_report(runs if request.param == "several" else runs[:1], folder / "report.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_is_drawn_without_errors_and_can_be_read(browser, page, width, scheme):
    browser.show(width, scheme)
    browser.complaints.clear()
    browser.open(page)
    browser.evaluate(UNFOLD)
    found = browser.evaluate(MEASURE)
    assert browser.complaints == []
    assert found["wide"] == width  # tables scroll on their own
    assert found["body"] == BACKGROUNDS[scheme]
    assert found["text"] >= 4.5  # WCAG 2, level AA
    assert len(found["charts"]) == found["figures"] >= 8
    for chart in found["charts"]:
        assert chart["drawn"] == chart["marks"] > 0, chart
        assert not chart["outside"], chart
        assert chart["series"] >= 3, chart
        assert chart["text"] >= 4.5, chart
        assert chart["height"] >= 10, chart


@pytest.mark.skipif(axe() is None, reason="needs axe-core-python (or EQUIPOISE_AXE=axe.min.js)")
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light")])
def test_axe_finds_nothing(browser, page, width, scheme):
    browser.show(width, scheme)
    browser.open(page)
    browser.evaluate(UNFOLD)
    browser.evaluate(axe().read_text(encoding="utf-8"))
    assert browser.evaluate(AUDIT) == []


def test_the_keyboard_reaches_everything_in_the_order_of_the_page(browser, page):
    browser.show(390)
    browser.open(page)
    browser.evaluate(UNFOLD)
    stops = []
    for _ in range(browser.evaluate(REACHABLE)):
        browser.press_tab()
        stops.append(browser.evaluate(FOCUSED))
    assert stops[0]["name"] == "Skip to the results"
    places = [stop["place"] for stop in stops]
    assert places == sorted(set(places))
    assert {stop["tag"] for stop in stops} >= {"A", "SUMMARY", "DIV", "PRE"}
    for stop in stops:
        assert stop["name"].strip(), stop
        assert stop["outline"] != "none", stop
        assert stop["seen"], stop
    browser.press_tab()
    assert browser.evaluate("document.activeElement === document.body")


def test_the_page_can_be_printed(browser, page):
    browser.show(800, "dark", media="print")
    browser.open(page)
    assert browser.evaluate(MEASURE)["body"] == BACKGROUNDS["light"]
    assert browser.pdf().startswith(b"%PDF")
