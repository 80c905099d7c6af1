"""The HTML of a page: sections, tables, tiles, printed numbers, and the style sheet for screens and paper."""

import html
import math
from collections.abc import Iterable, Sequence

from training.memory import gib

BEGINNING = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
)
"""The first lines of every page."""
STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #59636e; --rule: #d5dae0; --back: #ffffff;
  --panel: #f5f7f9; --c0: #0b5fc0; --c1: #b8420c; --c2: #23803f; --c3: #7c3aa8; --warm: 11 95 192; }
@media (prefers-color-scheme: dark) { :root { --text: #e6eaef; --soft: #9aa5b1; --rule: #38414c;
  --back: #14181d; --panel: #1d232a; --c0: #6db3ff; --c1: #ff9d66; --c2: #6ed694; --c3: #c9a0f2;
  --warm: 109 179 255; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 62rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; padding-top: .5rem; border-top: 1px solid var(--rule); }
p { margin: .5rem 0; }
.soft, .note, .missing, figcaption, th, dt { color: var(--soft); }
.missing, .note { font-size: .9rem; }
code, pre { font: .85rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
code { overflow-wrap: anywhere; }
pre { background: var(--panel); padding: .7rem .9rem; border-radius: 6px; margin: .5rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem;
  margin: 1rem 0; }
.tile { background: var(--panel); border-radius: 8px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.25rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr));
  gap: 1.2rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .95rem; }
svg.chart { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.c0 { stroke: var(--c0); } .line.c1 { stroke: var(--c1); stroke-dasharray: 7 3; }
.line.c2 { stroke: var(--c2); stroke-dasharray: 2 3; }
.line.c3 { stroke: var(--c3); stroke-dasharray: 9 3 2 3; }
circle.c0 { fill: var(--c0); } circle.c1 { fill: var(--c1); } circle.c2 { fill: var(--c2); }
circle.c3 { fill: var(--c3); }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .9rem; }
.key { overflow-wrap: anywhere; } .key svg { width: 26px; height: 8px; margin-right: .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
th { font-weight: 600; } th:first-child, td:first-child, .words { text-align: left; }
td:not(.words):not(:first-child) { white-space: nowrap; }
table.named td:first-child { min-width: 9rem; }
td.words { overflow-wrap: anywhere; min-width: 12rem; }
td.heat { background: rgb(var(--warm) / var(--share)); }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--soft); }
footer { margin-top: 2.5rem; color: var(--soft); font-size: .85rem; }
@media print {
  :root { --text: #000; --soft: #444; --rule: #bbb; --back: #fff; --panel: #f2f2f2; --c0: #0b5fc0;
    --c1: #b8420c; --c2: #23803f; --c3: #7c3aa8; --warm: 11 95 192; }
  body { max-width: none; padding: 0; font-size: 10.5pt; print-color-adjust: exact;
    -webkit-print-color-adjust: exact; }
  h2 { break-after: avoid; } details::details-content { content-visibility: visible; }
  figure, .tile, tr, pre { break-inside: avoid; } .scroll { overflow: visible; }
  .beside { grid-template-columns: 1fr 1fr; }
}
"""


def page(title: str, lead: str, body: Iterable[str], foot: str) -> str:
    """Returns a whole page; `lead` is below its title. `body` and `foot` are HTML."""
    return (
        f"{BEGINNING}<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{lead}\n"
        + "\n".join(body)
        + f"\n<footer>{foot}</footer>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Returns a section with a heading that links can name."""
    name = title.lower().replace(" ", "-")
    return f'<section><h2 id="{name}">{html.escape(title)}</h2>\n' + "\n".join(parts) + "</section>"


def missing(what: str, command: str = "") -> str:
    """Returns a line in the place of what a run has not recorded, with how to get it."""
    how = f": <code>{html.escape(command)}</code>" if command else ""
    return f'<p class="missing">{html.escape(what)}{how}</p>'


def table(header: Sequence[str], rows: Iterable[Sequence[object]], words: Sequence[int] = ()) -> str:
    """Returns a table that scrolls where the screen is narrower; columns of `words` are text.

    Without a header there is no row for it.
    """

    def line(tag: str, row: Sequence[object]) -> str:
        cells = ((" class=words" if i in words else "", html.escape(str(cell))) for i, cell in enumerate(row))
        return f"<tr>{''.join(f'<{tag}{of}>{text}</{tag}>' for of, text in cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    top = f"<thead>{line('th', header)}</thead>" if header else ""
    return f'<div class="scroll"><table class="named">{top}<tbody>{body}</tbody></table></div>'


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns numbers, each large above its name."""
    found = (
        f'<div class="tile"><b>{html.escape(number)}</b><span>{html.escape(name)}</span></div>'
        for number, name in pairs
    )
    return f'<div class="tiles">{"".join(found)}</div>'


def beside(*parts: str) -> str:
    """Returns charts or sections beside each other where there is room."""
    return f'<div class="beside">{"".join(parts)}</div>'


def details(summary: str, body: str) -> str:
    """Returns a summary that shows its body when it is clicked."""
    return f"<details><summary>{html.escape(summary)}</summary>{body}</details>"


def preformatted(text: str) -> str:
    """Returns text as it is, broken where the screen ends."""
    return f"<pre>{html.escape(text)}</pre>"


NONE = "-"
"""Stands for a number that is not on record."""


def number(value: float | None, form: str = ".4f") -> str:
    """Returns a number, or a dash for None."""
    return NONE if value is None else format(value, form)


def percent(value: float | None) -> str:
    """Returns a share in percent, or a dash for None."""
    return NONE if value is None else f"{100 * value:.1f} %"


def bytes_of(value: float | None) -> str:
    """Returns bytes in GiB, or a dash for None."""
    return NONE if value is None else f"{gib(value)} GiB"


def short_number(value: float | None, sign: str = "") -> str:
    """Returns a number with four digits or more; a dash for None and NaN."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return str(value)
    if abs(value) >= 1000 or value == int(value):
        return format(value, f"{sign},.0f")
    return format(value, f"{sign}.4g" if abs(value) >= 10 else f"{sign}.4f")
