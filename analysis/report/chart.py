"""Line charts as inline SVG: they scale with the page, and take their colors from its style sheet."""

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 36
_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
COLORS = 4
"""Colors of the style sheet, `--c0` and so on; lines also differ in their dashes."""


class Line(NamedTuple):
    """A line of a chart.

    Attributes:
      points: y by x; points that are not finite interrupt the line.
      color: its color and dashes.
      marked: draw a dot at each point, which says its numbers where the pointer rests.
    """

    label: str
    points: Mapping[int, float]
    color: int = 0
    marked: bool = False


class Scale(NamedTuple):
    """The range of an axis and where it lies on the page."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Returns the position of a value."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-30))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Returns round values, three to seven of them, on the axis."""
        if self.logarithmic and self.high / self.low >= 8:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            parts = (1, 2, 5) if self.high / self.low < 200 else (1,)
            found = [part * 10.0**power for power in powers for part in parts]
        else:
            step = _round_step((self.high - self.low) / 4)
            first = math.ceil(self.low / step - 1e-9)
            found = [n * step for n in range(first, first + 12)]
        return [tick for tick in found if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    logarithmic: bool = False,
    from_zero: bool = False,
    percent: bool = False,
    skip: float = 0.0,
) -> str:
    """Returns a figure: its title, the lines over tokens with axes, and a legend if there are several labels.

    Args:
      logarithmic: of the vertical axis.
      from_zero: begin the vertical axis at 0.
      percent: show values times 100 with a percent sign.
      skip: share of the run, from its start, that may lie outside of the vertical axis.
    """
    x, y = _scales(lines, logarithmic, from_zero, skip)
    number = (lambda v: f"{100 * v:.3g} %") if percent else short
    grid = [
        f'<path class="grid" d="M{_LEFT} {y.at(v):.1f}H{WIDTH - _RIGHT}"/>'
        f'<text x="{_LEFT - 6}" y="{y.at(v) + 4:.1f}" text-anchor="end">{number(v)}</text>'
        for v in y.ticks()
    ]
    grid += [
        f'<text x="{x.at(v):.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{short(v)}</text>'
        for v in x.ticks()
    ]
    drawn = "".join(_path(line, x, y) for line in lines)
    left, top, width, height = _LEFT - 4, _TOP - 4, WIDTH - _LEFT - _RIGHT + 8, HEIGHT - _TOP - _BOTTOM + 8
    box = f'x="{left}" y="{top}" width="{width}" height="{height}" viewBox="{left} {top} {width} {height}"'
    labels = dict.fromkeys((line.label, line.color % COLORS) for line in lines)
    legend = "".join(
        f'<span class="key"><svg viewBox="0 0 26 8" aria-hidden="true">'
        f'<path class="line c{color}" d="M1 4H25"/></svg>{html.escape(label)}</span>'
        for label, color in labels
        if len(labels) > 1
    )
    name = html.escape(title)
    return (
        f'<figure><figcaption>{name}</figcaption><svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{name}">{"".join(grid)}'
        f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end">tokens</text>'
        f"<svg {box}>{drawn}</svg></svg>"
        f'<div class="legend">{legend}</div></figure>'
    )


def short(value: float) -> str:
    """Returns a number in few characters: 12.5k, 3M, 0.004."""
    for size, suffix in _SUFFIXES:
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.3g}"


def _scales(lines: Sequence[Line], logarithmic: bool, from_zero: bool, skip: float) -> tuple[Scale, Scale]:
    points = [(x, v) for line in lines for x, v in line.points.items() if math.isfinite(v)]
    points = [(x, v) for x, v in points if v > 0 or not logarithmic] or [(0, 1.0), (1, 1.0)]
    end = max(x for x, _ in points)
    values = [v for x, v in points if x >= skip * end]
    low, high = (0.0 if from_zero else min(values)), max(values)
    if logarithmic:
        low, high = low / 1.1, high * 1.1
    else:
        space = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        low, high = (low if from_zero else low - space), high + space
    horizontal = Scale(0, max(end, 1), _LEFT, WIDTH - _RIGHT)
    return horizontal, Scale(low, high, HEIGHT - _BOTTOM, _TOP, logarithmic)


def _round_step(size: float) -> float:
    """Returns the smallest of 1, 2, 2.5 and 5 times a power of ten that is at least `size`."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(part * power for part in (1, 2, 2.5, 5, 10) if part * power >= size * (1 - 1e-9))


def _path(line: Line, x: Scale, y: Scale) -> str:
    points = sorted(line.points.items())
    parts = []
    for finite, run in itertools.groupby(points, lambda point: math.isfinite(point[1])):
        if finite:
            parts.append("M" + "L".join(f"{x.at(a):.1f} {y.at(b):.1f}" for a, b in run))
    color = line.color % COLORS
    dots = "".join(_dot(line.label, a, b, color, x, y) for a, b in points if math.isfinite(b) and line.marked)
    return f'<path class="line c{color}" d="{"".join(parts)}"/>{dots}'


def _dot(label: str, a: float, b: float, color: int, x: Scale, y: Scale) -> str:
    said = html.escape(f"{label}: {b:.5g} at {a:,}")
    at = f'cx="{x.at(a):.1f}" cy="{y.at(b):.1f}"'
    return f'<circle class="c{color}" {at} r="3"><title>{said}</title></circle>'
