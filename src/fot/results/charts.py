"""Charts as inline SVG and HTML, drawn without a plotting library so that a report is one small file.

Colours come in pairs, one for a light and one for a dark page, and are handed over as the CSS variables
``--l`` and ``--d``; the class ``ink`` picks one (see ``page.py``). Both palettes keep a contrast of 3:1
against the page and stay apart for colour-blind readers; lines carry their names beside them as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Colour = tuple[str, str]
Point = tuple[float, float]

ACCENT: Colour = ("#0b5cad", "#6cb2ff")
LOSS: Colour = ("#b3470b", "#ffa066")
QUIET: Colour = ("#6b7682", "#98a2ad")

_CATEGORIES: tuple[Colour, ...] = (
    ("#6b7682", "#a8b1bb"),
    ("#0b5cad", "#6cb2ff"),
    ("#b3470b", "#ff9a5c"),
    ("#00795c", "#3fd0a4"),
    ("#9b3f86", "#e79bd3"),
    ("#8a6500", "#f0cf4a"),
    ("#3f3f9e", "#a9a6ff"),
    ("#a32035", "#ff8a95"),
)
_RAMP_LIGHT = ((58, 36, 130), (8, 112, 140), (176, 84, 8))
_RAMP_DARK = ((165, 150, 255), (64, 196, 208), (255, 190, 92))
_HEAT_LIGHT, _HEAT_DARK = (11, 92, 173), (108, 178, 255)
_CARD_LIGHT, _CARD_DARK = (255, 255, 255), (23, 27, 32)


def category(index: int) -> Colour:
    """Return the colour of the ``index``-th of things without an order, such as methods."""
    return _CATEGORIES[index % len(_CATEGORIES)]


def ramp(index: int, count: int) -> Colour:
    """Return the colour of the ``index``-th of ``count`` things in an order, such as tasks."""

    def blend(stops: tuple[tuple[int, int, int], ...]) -> str:
        place = index / max(count - 1, 1) * (len(stops) - 1)
        left = min(int(place), len(stops) - 2)
        pairs = zip(stops[left], stops[left + 1], strict=True)
        return "#" + "".join(f"{round(a + (b - a) * (place - left)):02x}" for a, b in pairs)

    return blend(_RAMP_LIGHT), blend(_RAMP_DARK)


def ink(colour: Colour) -> str:
    """Return the attributes that give an element its colour on either page."""
    return f'class="ink" style="--l:{colour[0]};--d:{colour[1]}"'


def _readable(heat: tuple[int, int, int], card: tuple[int, int, int], share: float) -> str:
    """Return black or white, whichever stands out more on ``share`` of heat over the card."""
    mixed = [(b + (h - b) * share) / 255 for h, b in zip(heat, card, strict=True)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in mixed]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000" if luminance > 0.179 else "#fff"  # where both reach a contrast of 4.58


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return up to ``most`` ticks around ``low`` to ``high``, in steps of 1, 2 or 5 times a power of ten.

    Examples
    --------
    >>> round_ticks(61.0, 97.0)
    [60.0, 70.0, 80.0, 90.0, 100.0]
    """
    span = max(high - low, 1e-9)
    step = 10.0 ** math.floor(math.log10(span / most))
    for factor in (1, 2, 5, 10, 20, 50):
        first, last = math.floor(low / (step * factor) + 1e-9), math.ceil(high / (step * factor) - 1e-9)
        if last - first + 1 <= most:
            break
    return [round(n * step * factor, 10) for n in range(first, max(last, first + 1) + 1)]


def task_ticks(count: int) -> list[float]:
    """Return which of ``count`` tasks to number on an axis: all of ten, every fifth of more."""
    return [float(t) for t in range(1, count + 1) if count <= 10 or t % 5 == 0 or t == 1]


def _long(texts: Sequence[str]) -> float:
    """Return room enough for the longest of some texts at 12 px, in a wide font such as DejaVu Sans Bold."""
    return max(
        (sum(11.5 if c.isupper() or c in "mw%—@" else 7.9 for c in text) for text in texts), default=0.0
    )


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    box = f'class="chart" viewBox="0 0 {width:g} {height:g}"'
    return f'<svg {box} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def scroll(label: str, table: str) -> str:
    """Return a table in a box of its own that scrolls where the page is too narrow for it."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{table}</div>'


def heat_map(
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    tips: Sequence[Sequence[str]],
    *,
    caption: str,
    corner: str = "Task",
    bounds: tuple[float, float],
    footer: tuple[str, Sequence[float]] | None = None,
    numbered: bool = False,
) -> str:
    """Return a table whose cells are shaded by their value: a screen reader and a spreadsheet can read it.

    Parameters
    ----------
    values, tips
        The numbers row by row, ``None`` for an empty cell, and what each cell says when pointed at.
    rows
        Names of the rows; ``numbered`` puts 1, 2, ... before them and leaves the number alone on a phone.
    bounds
        The values of the palest and the strongest shade.
    footer
        A last, unshaded row.
    """
    low, high = bounds
    columns = max((len(row) for row in values), default=0)
    head = "".join(f'<th scope="col">{t + 1}</th>' for t in range(columns))
    body = []
    for i, (row, name) in enumerate(zip(values, rows, strict=True)):
        number = f"<b>{i + 1}</b> " if numbered else ""
        cells = []
        for value, tip in zip(row, tips[i], strict=True):
            if value is None:
                cells.append("<td></td>")
                continue
            shade = round(0.05 + 0.95 * min(max((value - low) / max(high - low, 1e-9), 0), 1), 3)
            light = _readable(_HEAT_LIGHT, _CARD_LIGHT, shade)
            dark = _readable(_HEAT_DARK, _CARD_DARK, shade)
            style = f"--v:{shade};--l:{light};--d:{dark}"
            cells.append(f'<td class="ink heat" style="{style}" title="{escape(tip)}">{value:.1f}</td>')
        label = f'<span title="{escape(name)}">{escape(name)}</span>'
        body.append(f'<tr><th scope="row">{number}{label}</th>{"".join(cells)}</tr>')
    foot = ""
    if footer is not None:
        means = "".join(f"<td>{value:.1f}</td>" for value in footer[1])
        foot = f'<tfoot><tr><th scope="row">{escape(footer[0])}</th>{means}</tr></tfoot>'
    kind = "heatmap" + " numbered" * numbered + " dense" * (columns > 12)
    return scroll(
        caption,
        f'<table class="{kind}"><caption class="unseen">{escape(caption)}</caption>'
        f'<thead><tr><th scope="col">{escape(corner)}</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody>{foot}</table>",
    )


@dataclass(frozen=True)
class Line:
    """One line of a chart: its name, its colour and its points in order of x; phones get the short name."""

    name: str
    colour: Colour
    points: Sequence[Point]
    short: str = ""


def _spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move label heights apart to ``gap``, in their order, between ``low`` and ``high``."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = list(wanted)
    floor = low
    for i in order:
        placed[i] = floor = max(placed[i], floor)
        floor += gap
    ceiling = high
    for i in reversed(order):
        placed[i] = ceiling = min(placed[i], ceiling)
        ceiling -= gap
    return placed


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    x_name: str,
    width: int = 400,
    bands: Sequence[tuple[float, float, str]] = (),
    x_ticks: Sequence[float] | None = None,
    floor: float | None = None,
) -> str:
    """Return lines over x with their names at the right end, over shaded bands (the tasks) where given.

    What lies below ``floor`` is cut off, so that the steep first rounds of a task do not flatten the rest.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return '<p class="soft">Nothing was measured.</p>'
    slim = width < 500
    names = [_shorten(line.short if slim and line.short else line.name, 18) for line in lines]
    gap = 13.0
    height = max(250 if slim else 330, len(lines) * gap + 70)
    margin = 14 + _long(names)
    left, right, top, bottom = 34.0, width - margin, 24.0 if bands else 12.0, height - 38
    xs = [x for line in lines for x, _ in line.points] + [x for band in bands for x in band[:2]]
    ys = [y if floor is None else max(y, floor) for line in lines for _, y in line.points]
    y_ticks = round_ticks(min(ys), max(ys))
    x_low, x_high, y_low, y_high = min(xs), max(xs), y_ticks[0], y_ticks[-1]

    def x_at(x: float) -> float:
        return left + (x - x_low) / max(x_high - x_low, 1e-9) * (right - left)

    def y_at(y: float) -> float:
        return bottom - (y - y_low) / (y_high - y_low) * (bottom - top)

    parts = []
    fits = all(6.9 * len(name) < x_at(end) - x_at(start) for start, end, name in bands)
    step = next(n for n in (1, 2, 5, 10, 10**6) if 20 * len(bands) < n * (right - left))
    for number, (start, end, name) in enumerate(bands):
        wide = x_at(end) - x_at(start)
        if number % 2 == 0:
            corner = f'x="{x_at(start):.1f}" y="{top}"'
            parts.append(f'<rect class="band" {corner} width="{wide:.1f}" height="{bottom - top}"/>')
        if (number + 1) % step == 0 or (number == 0 and step > 2):
            said = name if fits else str(number + 1)
            parts.append(_text((x_at(start) + x_at(end)) / 2, top - 8, said, "tick", "middle"))
    for y in y_ticks:
        parts.append(f'<path class="grid" d="M{left} {y_at(y):.1f}H{right:.1f}"/>')
        parts.append(_text(left - 7, y_at(y) + 4, f"{y:g}", "tick", "end"))
    inner = round_ticks(x_low, x_high, 5 if slim else 8)
    for x in x_ticks if x_ticks is not None else [x for x in inner if x_low <= x <= x_high]:
        parts.append(_text(x_at(x), bottom + 17, f"{x:g}", "tick", "middle"))
    parts.append(_text((left + right) / 2, height - 4, x_name, "axis", "middle"))
    ends = _spread([y_at(line.points[-1][1]) for line in lines], gap, top, bottom)
    # A nested drawing clips what it holds; the margin of 4 keeps dots on the border whole.
    clip = f'x="{left - 4}" y="{top - 4}" width="{right - left + 8:.1f}" height="{bottom - top + 4:.1f}"'
    inside = f'viewBox="{left - 4} {top - 4} {right - left + 8:.1f} {bottom - top + 4:.1f}"'
    for line, name, end in zip(lines, names, ends, strict=True):
        spots = [(x_at(x), y_at(y)) for x, y in line.points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        last_x, last_y = spots[-1]
        said = f"{line.name}: {line.points[-1][1]:.1f} % at the end"
        dots = spots if len(spots) <= 20 and not bands else spots[-1:]
        parts.append(
            f"<g {ink(line.colour)}><title>{escape(said)}</title>"
            f'<svg {clip} {inside}><path class="line" d="{path}"/>'
            + "".join(f'<circle r="2.4" cx="{x:.1f}" cy="{y:.1f}"/>' for x, y in dots)
            + "</svg>"
            + f'<path class="leader" d="M{last_x + 4:.1f} {last_y:.1f}L{right + 9:.1f} {end:.1f}"/>'
            * bool(name)
            + _text(right + 12, end + 4, name, "name")
            + "</g>"
        )
    return _svg(width, height, label, parts)


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its value, how the value is written, its colour and the spread around it."""

    name: str
    value: float
    said: str
    colour: Colour = ACCENT
    spread: float = 0.0


def bar_chart(bars: Sequence[Bar], *, label: str, width: int = 400) -> str:
    """Return horizontal bars from zero, to the left where negative, each with its value written beside it."""
    row, names = 27, [_shorten(bar.name, 18) for bar in bars]
    left = 10 + _long(names) * 0.92  # regular type is narrower than bold
    written = 8 + _long([bar.said for bar in bars])
    low = min([0.0, *(bar.value - bar.spread for bar in bars)])
    high = max([0.0, *(bar.value + bar.spread for bar in bars)])
    start = left + (written if low < 0 else 0)
    scale = (width - written - start) / ((high - low) or 1.0)

    def x_at(value: float) -> float:
        return start + (value - low) * scale

    parts = []
    for number, (bar, name) in enumerate(zip(bars, names, strict=True)):
        middle = number * row + row / 2
        x, long = min(x_at(0), x_at(bar.value)), abs(bar.value) * scale
        parts.append(_text(left - 8, middle + 4, name, "label", "end"))
        parts.append(
            f"<g {ink(bar.colour)}><title>{escape(f'{bar.name}: {bar.said}')}</title>"
            f'<rect x="{x:.1f}" y="{middle - 8:.1f}" width="{max(long, 1):.1f}" height="16" rx="2.5"/></g>'
        )
        reach = bar.value + math.copysign(bar.spread, bar.value)
        if bar.spread:
            least, most = x_at(bar.value - bar.spread), x_at(bar.value + bar.spread)
            parts.append(f'<path class="whisker" d="M{least:.1f} {middle:.1f}H{most:.1f}"/>')
        away = (-6.0, "end") if bar.value < 0 else (6.0, "start")
        parts.append(_text(x_at(reach) + away[0], middle + 4, bar.said, "value", away[1]))
    parts.append(f'<path class="zero" d="M{x_at(0):.1f} 0V{len(bars) * row}"/>')
    return _svg(width, len(bars) * row + 2, label, parts)
