"""The page that reports are set on: one HTML file with its style inside and no other resource."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --bg: #f6f6f3; --card: #ffffff; --text: #1b1f24; --soft: #57606a;
  --rule: #e2e2dc; --band: #f1f3f6; --accent: #0b5cad; --heat: 11 92 173; }
.ink { color: var(--l); }
@media (prefers-color-scheme: dark) {
  :root { --bg: #0f1215; --card: #171b20; --text: #e9ebee; --soft: #a3abb5;
    --rule: #2c333b; --band: #1e242b; --accent: #6cb2ff; --heat: 108 178 255; }
  .ink { color: var(--d); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text); -webkit-text-size-adjust: 100%;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 56px 28px 72px; }
.over { margin: 0 0 10px; color: var(--soft); font-size: 14px; }
.over b { color: var(--accent); font-weight: 600; }
h1 { margin: 0; font-size: clamp(23px, 3.6vw, 34px); line-height: 1.2; font-weight: 640;
  letter-spacing: -.018em; text-wrap: balance; max-width: 27em; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 17px; font-weight: 650; letter-spacing: -.005em; overflow-wrap: anywhere; }
h3 { margin: 0 0 6px; font-size: 13px; font-weight: 600; color: var(--soft); }
.section { margin: 44px 0 0; font-size: 22px; }
.lead { margin: 14px 0 0; color: var(--soft); max-width: 54em; }
.soft, .note { color: var(--soft); }
.note { margin: 2px 0 18px; font-size: 14px; max-width: 52em; text-wrap: pretty; }
.tiles { display: flex; flex-wrap: wrap; gap: 1px;
  margin: 34px 0 0; background: var(--rule);
  border: 1px solid var(--rule); border-radius: 12px; overflow: hidden; }
.tile { flex: 1 1 136px; background: var(--card); padding: 16px 12px 14px 17px; }
.tile dt { font-size: 13px; color: var(--soft); }
.tile dd { margin: 3px 0 0; font-size: 24px; line-height: 1.2; font-weight: 620; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile dd small { font-size: 13px; font-weight: 500; color: var(--soft); letter-spacing: 0; }
.tile p { margin: 3px 0 0; font-size: 12px; line-height: 1.35; font-weight: 400; letter-spacing: 0;
  color: var(--soft); white-space: normal; }
.cards { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 18px; margin-top: 18px; }
.lead + .cards { margin-top: 34px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 22px 24px 20px;
  min-width: 0; break-inside: avoid; }
.card > h2 + :not(.note) { margin-top: 14px; }
.card.full { grid-column: 1 / -1; }
svg.chart { display: block; width: 100%; height: auto; font-size: 12px; line-height: 1; }
svg text { fill: var(--text); font-variant-numeric: tabular-nums; }
svg .tick, svg .axis { fill: var(--soft); font-size: 11.5px; }
svg .name { fill: currentColor; font-weight: 600; }
svg .label { fill: var(--soft); }
svg .value { font-weight: 600; }
svg .band { fill: var(--band); }
svg .grid { stroke: var(--rule); stroke-width: 1; fill: none; }
svg .zero { stroke: var(--soft); stroke-width: 1; fill: none; }
svg .whisker { stroke: var(--text); stroke-width: 1.5; fill: none; }
svg .line { stroke: currentColor; stroke-width: 2; fill: none; stroke-linejoin: round; }
svg .leader { stroke: currentColor; stroke-width: .8; opacity: .55; fill: none; }
svg circle, svg g.ink > rect { fill: currentColor; }
svg g.ink:hover .line { stroke-width: 3.5; }
.middle, .narrow { display: none; }
.scroll { overflow-x: auto; }
.scroll:focus-visible, a:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { font-weight: 500; color: var(--soft); text-align: left; }
.heatmap { border-collapse: separate; border-spacing: 2px; }
.heatmap td { text-align: center; padding: 8px 3px; min-width: 40px; border-radius: 4px; }
.heatmap td.heat { background: rgb(var(--heat) / var(--v)); }
.heatmap thead th { text-align: center; font-size: 13px; padding-bottom: 3px; }
.heatmap th:first-child { text-align: left; padding-right: 12px; white-space: nowrap; position: sticky;
  left: 0; background: var(--card); max-width: 200px; overflow: hidden; text-overflow: ellipsis; }
.heatmap th b { display: inline-block; min-width: 1.8em; color: var(--text); font-weight: 600; }
.heatmap tfoot td { font-weight: 600; }
.heatmap.dense { font-size: 12px; border-spacing: 1px; }
.heatmap.dense td { padding: 6px 0; min-width: 0; }
.heatmap.dense th:first-child { max-width: 136px; }
.list td, .list th { padding: 9px 14px 9px 0; border-bottom: 1px solid var(--rule); text-align: right;
  white-space: nowrap; }
.list tr > :first-child { text-align: left; color: var(--text); font-weight: 600; }
.list thead th { font-size: 13px; }
.list thead tr > :first-child { color: var(--soft); font-weight: 500; }
.list tbody tr:last-child > * { border-bottom: 0; }
.settings { columns: 3 240px; column-gap: 36px; }
.settings section { break-inside: avoid; margin-bottom: 18px; }
.settings dl, .facts { margin: 0; display: grid; grid-template-columns: minmax(0, auto) minmax(0, 1fr);
  gap: 3px 16px; font-size: 14px; }
.settings dt, .facts dt { color: var(--soft); overflow-wrap: anywhere; }
.settings dd, .facts dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
.facts dd { text-align: left; }
.warnings { margin: 0; padding-left: 1.2em; overflow-wrap: anywhere; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
a { color: var(--accent); }
.links { margin: 0; padding: 0; list-style: none; columns: 3 220px; font-size: 14px; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
@media (max-width: 960px) {
  .tile { flex-basis: 22%; }
  .cards { grid-template-columns: minmax(0, 1fr); }
  .wide { display: none; }
  .middle { display: block; }
}
@media (max-width: 720px) {
  main { padding: 32px 14px 48px; }
  .tiles { margin-top: 26px; }
  .tile { flex-basis: 40%; padding: 13px 14px 11px; }
  .tile dd { font-size: 22px; }
  .cards { gap: 12px; margin-top: 12px; }
  .card { padding: 17px 15px 15px; }
  .heatmap, .heatmap.dense, .heatmap thead th { font-size: 10px; }
  .heatmap { border-spacing: 1px; }
  .heatmap td, .heatmap.dense td { padding: 6px 1px; min-width: 0; border-radius: 3px; }
  .heatmap th:first-child { max-width: 96px; padding-right: 5px; }
  .heatmap.numbered tbody th span { display: none; }
  .heatmap.numbered th b { min-width: 0; }
}
@media (max-width: 560px) {
  .middle { display: none; }
  .narrow { display: block; }
}
@media print {
  :root { --bg: #ffffff; --rule: #cccccc; }
  main { padding: 0; max-width: none; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def tile(name: str, value: str, note: str) -> str:
    """Return one headline number with its name above and a few words below; its units are set smaller."""
    parts = [
        f"<small>{escape(part)}</small>" if part.isalpha() or part == "%" else part for part in value.split()
    ]
    return f'<div class="tile"><dt>{escape(name)}</dt><dd>{" ".join(parts)}<p>{escape(note)}</p></dd></div>'


def tiles(parts: Sequence[str]) -> str:
    """Return the row of headline numbers."""
    return f'<dl class="tiles">{"".join(parts)}</dl>'


def card(title: str, note: str, content: str, *, full: bool = False) -> str:
    """Return a titled box; ``content`` is HTML, the rest is text."""
    kind = "card full" if full else "card"
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{said}{content}</section>'


def cards(parts: Sequence[str]) -> str:
    """Return boxes in two columns, one on a phone; empty ones are left out."""
    return f'<div class="cards">{"".join(parts)}</div>'


def chart(draw: Callable[[int], str], *, full: bool = False) -> str:
    """Return a chart drawn for three widths of page, so that its type stays of one size on all of them."""
    widths = {"wide": 980 if full else 464, "middle": 640, "narrow": 330}
    return "".join(f'<div class="{name}">{draw(width)}</div>' for name, width in widths.items())


def page(title: str, over: str, heading: str, lead: str, body: str) -> str:
    """Return the whole document; ``over`` and ``body`` are HTML, the rest is text."""
    joined = heading.replace(" %", "\N{NO-BREAK SPACE}%")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>{_STYLE}</style>\n</head>\n'
        f'<body>\n<main>\n<p class="over">{over}</p>\n<h1>{escape(joined)}</h1>\n'
        f'<p class="lead">{escape(lead)}</p>\n{body}\n</main>\n</body>\n</html>\n'
    )
