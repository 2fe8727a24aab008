"""Charts as inline SVG for a page without network and scripts: colours and text come from the page's CSS.

`s0` to `s6` are the classes of series, `d0` to `d3` their dashes; --ink and --muted are the colours of text and axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

SERIES, DASHES = 7, 4
_WIDTH = 720
# From dark to bright, told apart in grey as well.
_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: a name, its x and y values, and its place among the names, which says colour and dashes."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    place: int


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row of an interval chart; `mark` is a class of the page: "better", "worse" or ""."""

    name: str
    value: float
    low: float
    high: float
    mark: str = ""


def style(place: int) -> str:
    """The classes of the place-th series."""
    return f"s{place % SERIES} d{place // SERIES % DASHES}"


def intervals(bars: Sequence[Bar], *, title: str, low: float = 0.0, high: float = 1.0) -> str:
    """A row for each bar with its value and its interval; the first one's interval is drawn through as a band."""
    left, right, row = 190, 70, 24
    height = row * len(bars) + 46

    def x(value: float) -> float:
        share = (min(max(value, low), high) - low) / (high - low or 1)
        return left + share * (_WIDTH - left - right)

    parts = [
        f'<rect class="band" x="{x(bars[0].low):.1f}" y="6" '
        f'width="{max(1.0, x(bars[0].high) - x(bars[0].low)):.1f}" height="{height - 40}"/>'
    ]
    for tick in _ticks(low, high):
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="6" y2="{height - 34}"/>')
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{height - 18}" text-anchor="middle">{tick:g}</text>')
    for at, bar in enumerate(bars):
        y = 6 + row * at + row / 2
        told = escape(f"{bar.name}: {bar.value:.3f} ({bar.low:.3f} to {bar.high:.3f})")
        parts.append(f'<g class="bar {bar.mark}"><title>{told}</title>')
        parts.append(f'<text x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(bar.name)}</text>')
        parts.append(f'<line x1="{x(bar.low):.1f}" x2="{x(bar.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<circle cx="{x(bar.value):.1f}" cy="{y:.1f}" r="5"/>')
        parts.append(f'<text x="{_WIDTH - right + 10}" y="{y + 4:.1f}">{bar.value:.3f}</text></g>')
    return _svg(height, title, parts)


def lines(series: Sequence[Series], *, title: str, x_label: str, y_label: str, log: bool = False) -> str:
    """Lines over one x axis; `log` has both axes logarithmic. What each line is, `legend` says."""
    left, top, bottom, right, height = 78, 12, 48, 16, 320
    move = (lambda v: math.log2(max(v, 1e-12))) if log else (lambda v: v)
    xs = [move(v) for one in series for v in one.x]
    ys = [move(v) for one in series for v in one.y]
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
    margin = 0.06 * (y_high - y_low) or 0.5
    y_low, y_high = y_low - margin, y_high + margin

    def x(value: float) -> float:
        return left + (move(value) - x_low) / (x_high - x_low or 1) * (_WIDTH - left - right)

    def y(value: float) -> float:
        return height - bottom - (move(value) - y_low) / (y_high - y_low) * (height - top - bottom)

    back = (lambda v: 2.0**v) if log else (lambda v: v)
    parts = []
    for tick in _ticks(y_low, y_high) if not log else [y_low + i * (y_high - y_low) / 5 for i in range(6)]:
        at = y(back(tick))
        parts.append(f'<line class="grid" x1="{left}" x2="{_WIDTH - right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{_told(back(tick))}</text>')
    for value in sorted({v for one in series for v in one.x} if log else {back(t) for t in _ticks(x_low, x_high)}):
        parts.append(
            f'<text class="tick" x="{x(value):.1f}" y="{height - 28}" text-anchor="middle">{_told(value)}</text>'
        )
    parts.append(
        f'<text class="tick" x="{(_WIDTH + left) / 2}" y="{height - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text class="tick" x="12" y="{height / 2}" text-anchor="middle" '
        f'transform="rotate(-90 12 {height / 2})">{escape(y_label)}</text>'
    )
    for one in series:
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(one.x, one.y, strict=True))
        parts.append(
            f'<g class="line {style(one.place)}"><title>{escape(one.name)}</title><polyline points="{points}"/>'
        )
        parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.5"/>' for a, b in zip(one.x, one.y, strict=True)]
        parts.append("</g>")
    return _svg(height, title, parts)


def legend(series: Sequence[Series]) -> str:
    """Names of the lines with a stroke of each."""
    items = [
        f'<li><svg width="34" height="12" aria-hidden="true"><g class="line {style(one.place)}">'
        f'<polyline points="1,6 33,6"/></g></svg> {escape(one.name)}</li>'
        for one in series
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def heatmap(
    values: Sequence[Sequence[float | None]], rows: Sequence[str], columns: Sequence[str], *, title: str
) -> str:
    """A cell for each value from 0 to 1, with the number in it; None stays empty."""
    left, top, cell, height = 52, 4, 50, 26
    width, whole = left + cell * len(columns) + 4, top + height * len(rows) + 24
    parts = []
    for i, (row, name) in enumerate(zip(values, rows, strict=True)):
        y = top + height * i
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 17}" text-anchor="end">{escape(name)}</text>')
        for j, value in enumerate(row):
            if value is not None:
                red, green, blue = _colour(value)
                ink = "#000" if 0.3 * red + 0.59 * green + 0.11 * blue > 120 else "#fff"
                x = left + cell * j
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{cell - 2}" height="{height - 2}" '
                    f'fill="rgb({red},{green},{blue})"/><text x="{x + cell / 2 - 1}" y="{y + 17}" '
                    f'text-anchor="middle" class="c" fill="{ink}">{value:.2f}</text>'
                )
    for j, name in enumerate(columns):
        at = left + cell * (j + 0.5)
        parts.append(f'<text class="tick" x="{at}" y="{whole - 6}" text-anchor="middle">{escape(name)}</text>')
    return _svg(whole, title, parts, width=width)


def _svg(height: float, title: str, parts: Sequence[str], *, width: float = _WIDTH) -> str:
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _told(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two, about five of them."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * base for base in (1, 2, 5, 10) if span / (power * base) <= 6)
    first = math.ceil(low / step - 1e-9)
    return [round(step * i, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _colour(value: float) -> tuple[int, int, int]:
    place = min(max(value, 0.0), 1.0) * (len(_SCALE) - 1)
    at = min(int(place), len(_SCALE) - 2)
    a, b = _SCALE[at], _SCALE[at + 1]
    red, green, blue = (round(x + (y - x) * (place - at)) for x, y in zip(a, b, strict=True))
    return red, green, blue
