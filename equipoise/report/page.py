"""The page around the sections of a report: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from equipoise.report.html import Section
from equipoise.report.svg import DEFINITIONS

# The colours of Okabe and Ito, made darker or lighter if their contrast to the background is low.
_LIGHT = ("#0072b2", "#c04e00", "#00855f", "#b3568d", "#a87000", "#2a8cc7", "#7a5195", "#7a5f2a")
_DARK = ("#56a8e0", "#ff8a3c", "#35c79b", "#e79cc6", "#f0b429", "#8fd0f5", "#b79ad1", "#c9ad74")
_SCHEMES = {
    "light": {
        "ink": "#23252b",
        "soft": "#5a5f6b",
        "grid": "#e3e6eb",
        "paper": "#ffffff",
        "panel": "#f6f7f9",
    },
    "dark": {
        "ink": "#e8eaee",
        "soft": "#a9afbb",
        "grid": "#3a3f49",
        "paper": "#16181d",
        "panel": "#1f2229",
    },
}


def _variables(scheme: str, hues: Sequence[str]) -> str:
    named = {**_SCHEMES[scheme], **{f"h{number}": hue for number, hue in enumerate(hues)}}
    return "".join(f"--{name}:{value};" for name, value in named.items())


_HEAT = "".join(
    f".heat{n}{{background:color-mix(in srgb,var(--h0) {n * 15}%,transparent)}}" for n in range(5)
)
STYLE = f"""
:root{{color-scheme:light dark;{_variables("light", _LIGHT)}--warn:#9c3c00}}
@media (prefers-color-scheme:dark){{:root{{{_variables("dark", _DARK)}--warn:#ffb482}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif}}
header,main,footer,nav{{max-width:1240px;margin:0 auto;padding:0 20px}}
header{{padding-top:28px}}
h1{{font-size:1.75rem;line-height:1.2;margin:0 0 .3rem}}
h2{{font-size:1.3rem;line-height:1.3;margin:0 0 .6rem;padding-top:1.4rem;
border-top:1px solid var(--grid)}}
h3{{font-size:1.02rem;margin:1.2rem 0 .4rem}}
figcaption h3{{font-size:.95rem;margin:0}}
p{{margin:.4rem 0;max-width:72ch}}
.soft,header p,figcaption p,.missing{{color:var(--soft)}}
a{{color:var(--h0)}}
:focus-visible{{outline:2px solid var(--h0);outline-offset:2px}}
.skip{{position:absolute;left:-9999px}}.skip:focus{{left:20px;top:4px;background:var(--paper);
padding:4px 8px}}
nav ul{{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;list-style:none;padding:0;
margin:.9rem 0 1.2rem;font-size:.92rem}}
section{{margin:0 0 1.8rem}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:10px;
margin:.4rem 0 .8rem}}
.tiles div{{background:var(--panel);border-radius:8px;padding:10px 14px;display:flex;
flex-direction:column-reverse;justify-content:flex-end}}
.tiles dt{{color:var(--soft);font-size:.84rem}}
.tiles dd{{margin:0;font-size:1.6rem;font-weight:600;font-variant-numeric:tabular-nums;
line-height:1.25}}
.which{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,230px),1fr));
gap:8px 24px;margin:.3rem 0 1rem}}
.which dt{{font-weight:600;font-size:.9rem}}.which dd{{margin:0;font-size:.9rem;color:var(--soft)}}
.figures{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,355px),1fr));
column-gap:22px;margin:.8rem 0}}
figure{{margin:0;min-width:0;max-width:620px;display:grid;grid-row:span 3;
grid-template-rows:subgrid;gap:0}}
figcaption p{{font-size:.86rem;margin:.1rem 0 .35rem}}
figure>svg{{width:100%;height:auto;background:var(--panel);border-radius:8px}}
svg text{{font-size:11px;fill:var(--soft)}}svg text.axis{{fill:var(--ink)}}
svg .grid{{stroke:var(--grid);fill:none}}
svg .reference{{stroke:var(--soft);stroke-dasharray:2 4;fill:none}}
svg .line{{fill:none;stroke-width:1.8;stroke-linejoin:round}}svg .dashed{{stroke-dasharray:5 3}}
svg .band{{stroke:none;fill-opacity:.16}}
.defs{{position:absolute}}
{"".join(f".h{n}{{fill:var(--h{n});stroke:var(--h{n})}}" for n in range(len(_LIGHT)))}
svg use{{stroke:none;fill-opacity:.85}}
.legend{{display:flex;flex-wrap:wrap;gap:.1rem .9rem;list-style:none;margin:.45rem 0 0;padding:0;
font-size:.84rem;align-content:start}}
figure::after{{content:"";height:18px;grid-row:3;align-self:end}}.legend{{margin-bottom:20px}}
.legend li{{display:flex;align-items:center;gap:.35rem}}
.legend svg{{width:22px;height:12px;flex:none}}
.scroll{{overflow-x:auto;margin:.8rem 0}}
table{{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}}
caption{{text-align:left;font-weight:600;padding-bottom:.3rem}}
caption span{{display:inline-block;position:sticky;left:0;max-width:calc(100vw - 40px)}}
th,td{{padding:.28rem .7rem .28rem 0;text-align:right;vertical-align:top;
border-bottom:1px solid var(--grid);white-space:nowrap}}
thead th{{color:var(--soft);font-weight:600;vertical-align:bottom;white-space:normal;
min-width:3.4rem}}
tbody th,.text{{text-align:left}}tbody th{{font-weight:500}}
td.text{{white-space:normal;font-weight:400;min-width:5rem}}
td.long{{white-space:normal;text-align:left;min-width:17rem}}
td.best{{font-weight:700}}td.second{{text-decoration:underline;text-underline-offset:3px}}
td.worst{{color:var(--warn);font-weight:600}}
{_HEAT}
details{{margin:.6rem 0}}summary{{cursor:pointer;font-weight:600;font-size:.92rem;
overflow-wrap:anywhere}}
details[open]>.scroll{{max-height:28rem;overflow:auto}}
pre{{background:var(--panel);border-radius:8px;padding:10px 14px;overflow-x:auto;font-size:.84rem;
line-height:1.45}}
.command{{white-space:pre-wrap;overflow-wrap:anywhere}}
.caution{{border-left:4px solid var(--warn);padding:.1rem 0 .1rem 14px;margin:1rem 0}}
.caution h3{{margin-top:.2rem}}
footer{{padding-top:1rem;padding-bottom:2.5rem;font-size:.86rem;color:var(--soft)}}
@media (max-width:600px){{header,main,footer,nav{{padding-left:14px;padding-right:14px}}
h1{{font-size:1.45rem}}.tiles{{grid-template-columns:1fr 1fr}}
.figures{{grid-template-columns:minmax(0,1fr)}}}}
@media print{{:root{{color-scheme:light;{_variables("light", _LIGHT)}--warn:#9c3c00}}
body{{font-size:10.5pt}}nav,.skip{{display:none}}
header,main,footer{{max-width:none;padding-left:0;padding-right:0}}
figure,tr,.tiles{{break-inside:avoid}}h2,h3,caption{{break-after:avoid}}
.figures{{grid-template-columns:1fr 1fr}}.scroll,pre{{overflow:visible;white-space:pre-wrap}}
th,td{{padding:.2rem .4rem .2rem 0}}thead th{{min-width:0}}table{{font-size:7pt}}
td.long,td.text{{min-width:0}}td{{white-space:normal}}
*{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}}}
"""


def page(title: str, about: str, sections: Sequence[Section], *, made: str) -> str:
    """Return the whole page.

    Parameters
    ----------
    title : str
        Its heading.
    about : str
        One line about the runs.
    sections : sequence of Section
        The sections in order. Empty ones are listed at the end with the reason.
    made : str
        How to make the report again.

    Returns
    -------
    str
        HTML.
    """
    shown = [section for section in sections if not section.missing]
    left_out = [section for section in sections if section.missing]
    links = "".join(
        f'<li><a href="#{section.name}">{escape(section.title)}</a></li>' for section in shown
    )
    body = "".join(section.html() for section in shown)
    if left_out:
        items = "".join(
            f'<li id="{section.name}"><strong>{escape(section.title)}.</strong> '
            f"{escape(section.missing)}</li>"
            for section in left_out
        )
        heading = '<h2 id="left-out-title">Not in this report</h2>'
        body += (
            f'<section id="left-out" aria-labelledby="left-out-title">{heading}'
            f'<ul class="missing">{items}</ul></section>'
        )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width,initial-scale=1"><title>{escape(title)}</title><link '
        f'rel="icon" href="data:,"><style>{STYLE}</style></head><body><a class="skip" '
        f'href="#main">Skip to the results</a>{DEFINITIONS}'
        f"<header><h1>{escape(title)}</h1><p>{escape(about)}</p></header>"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav><main id="main">{body}</main>'
        "<footer><p>Made by Equipoise from the files of the runs: "
        f"<code>{escape(made)}</code></p></footer></body></html>\n"
    )
