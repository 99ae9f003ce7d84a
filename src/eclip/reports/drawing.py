"""Drawing: scales, and the few shapes that the charts are made of.

Charts are drawn here, not by a script: they stand in the page before any script runs, print, and
need no library. Places are percentages of the chart's width and height, so a chart has the width of
its place while its text keeps its size. Colours are CSS classes: one chart serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from eclip.reports.labels import number

_LOG_FROM = 20  # values further apart than this need a logarithmic axis to be told apart
_MOST_TICKS = 5
_NOMINAL = (700, 320)  # pixels of a scatter chart, about


class AxisTick(NamedTuple):
    at: float  # percent
    text: str


@dataclass(frozen=True)
class Scale:
    """Values to percentages of a chart."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        low, high, value = self._shown(self.low), self._shown(self.high), self._shown(value)
        part = (value - low) / (high - low) if high > low else 0.5
        return round(100 * min(max(part, 0.0), 1.0), 2)

    def _shown(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value

    @property
    def ticks(self) -> list[AxisTick]:
        values = _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)
        return [AxisTick(self.place(value), _short(value)) for value in values]


def scale_of(values: Iterable[float], *, zero: bool = False, log: bool | None = None) -> Scale:
    """For these values: from 0 if asked, logarithmic if asked or if they lie far apart."""
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    if high > 0 and (log or (log is None and low > 0 and high / low > _LOG_FROM)):
        low = low if low > 0 else high / 1e4
        return Scale(low / 1.15, max(high, low) * 1.15, log=True)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(0.0 if zero else low - room, high + room)


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / _MOST_TICKS
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [step * index for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Decades, every second one if there are many; with few also what lies between them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
        values = [
            factor * 10.0**power
            for power in powers
            for factor in factors
            if power % every == 0 and low <= factor * 10.0**power <= high
        ]
        if len(values) <= _MOST_TICKS + 1:
            break
    return values


def _short(value: float) -> str:
    """``0.5``, ``2``, ``1,000``: no zeros behind the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def strip(curve: Sequence[float], scale: Scale, bound: float | None, words: str) -> Markup:
    """A distribution on one line: 1 to 99%, 5 to 95%, 25 to 75% of the values in three weights, a
    dot at the median, a bar at the 99th percentile, and a dashed line at the bound.

    ``curve`` has the values at measures.LEVELS, or only the median and the 99th percentile.
    """
    places = [scale.place(value) for value in curve]
    parts = []
    if len(places) == 2:
        p50, p99 = places
        parts.append(_box(p50, p99, 12, 2, "thin"))
    else:
        _, p1, p5, _, p25, p50, p75, _, p95, p99, _, longest = places
        parts += [
            _box(p1, p99, 12, 2, "thin"),
            _box(p5, p95, 9, 8, "mid"),
            _box(p25, p75, 6, 14, "core"),
            Markup('<line class="longest" x1="{0}%" x2="{0}%" y1="9" y2="17"/>').format(longest),
        ]
    parts += [
        Markup('<line class="p99" x1="{0}%" x2="{0}%" y1="3" y2="23"/>').format(p99),
        Markup('<circle class="p50" cx="{}%" cy="13" r="4.5"/>').format(p50),
    ]
    if bound is not None:
        at = scale.place(bound)
        parts.append(Markup('<line class="bound" x1="{0}%" x2="{0}%" y1="0" y2="26"/>').format(at))
    return Markup('<svg class="strip" role="img" aria-label="{}">{}</svg>').format(
        words, Markup("").join(parts)
    )


def _box(low: float, high: float, y: int, height: int, name: str) -> Markup:
    return Markup('<rect class="{}" x="{}%" y="{}" width="{}%" height="{}"/>').format(
        name, low, y, round(max(high - low, 0.15), 2), height
    )


def axis(scale: Scale) -> Markup:
    """Ticks below or above strips, as HTML, which keeps its size at any width."""
    return Markup('<div class="axis" aria-hidden="true">{}</div>').format(
        _tick_texts(scale, "left")
    )


class Points(NamedTuple):
    """Points of one kind in a scatter chart: places, texts, and a common sign or a number each."""

    name: str  # for the legend
    sign: str  # CSS class
    places: Sequence[tuple[float, float]]
    words: Sequence[str] = ()
    numbers: Sequence[int] = ()
    line: bool = False


@dataclass(frozen=True)
class Scatter:
    x: Scale
    y: Scale
    x_title: str
    y_title: str
    sets: Sequence[Points]
    words: str  # a description, for screen readers
    bound: float | None = None  # a dashed line across, at this y

    def __html__(self) -> str:
        parts: list[Markup] = []
        if self.bound is not None:
            at = round(100 - self.y.place(self.bound), 2)
            parts.append(
                Markup('<line class="bound" y1="{0}%" y2="{0}%" x1="0" x2="100%"/>').format(at)
            )
        for one in self.sets:
            parts += self._drawn(one)
        return _framed(self, parts)

    def _drawn(self, one: Points) -> list[Markup]:
        places = [(self.x.place(x), round(100 - self.y.place(y), 2)) for x, y in one.places]
        parts = []
        if one.line:
            corners = " ".join(f"{x},{y}" for x, y in places)
            parts.append(
                Markup(
                    '<svg viewBox="0 0 100 100" preserveAspectRatio="none">'
                    '<polyline class="{}-line" points="{}"/></svg>'
                ).format(one.sign, corners)
            )
        aside = _apart(places) if one.numbers else [(0, 0)] * len(places)
        for index, ((x, y), (right, down)) in enumerate(zip(places, aside, strict=True)):
            title = Markup("<title>{}</title>").format(one.words[index]) if one.words else ""
            point = Markup('<circle class="{}" cx="{}%" cy="{}%">{}</circle>').format(
                one.sign, x, y, title
            )
            if one.numbers:
                point += Markup('<text class="on" x="{}%" y="{}%" dy=".36em">{}</text>').format(
                    x, y, one.numbers[index]
                )
            if right or down:
                leader = Markup(
                    '<svg x="{}%" y="{}%" overflow="visible">'
                    '<path class="leader" d="M0 0L{} {}"/></svg>'
                )
                moved = Markup('<g transform="translate({} {})">{}</g>').format(right, down, point)
                point = leader.format(x, y, right, down) + moved
            parts.append(point)
        return parts


def _apart(places: Sequence[tuple[float, float]]) -> list[tuple[int, int]]:
    """By how many pixels to move numbers aside that would cover each other; the last ones stay."""
    taken: list[tuple[float, float]] = []
    moved = []
    for x, y in reversed(places):
        x, y = x * _NOMINAL[0] / 100, y * _NOMINAL[1] / 100
        steps = [(0, 0)] + [
            (step * right, step * down)
            for step in (22, 44)
            for right, down in ((-1, 0), (0, 1), (1, 0), (0, -1), (-1, 1), (1, -1))
        ]
        aside = next(
            (
                (right, down)
                for right, down in steps
                if all(math.hypot(x + right - a, y + down - b) >= 20 for a, b in taken)
            ),
            (0, 0),
        )
        taken.append((x + aside[0], y + aside[1]))
        moved.append(aside)
    return moved[::-1]


@dataclass(frozen=True)
class Lines:
    """Curves over one axis, a legend above them."""

    x: Scale
    y: Scale
    x_title: str
    y_title: str
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    words: str
    mark: float | None = None  # a dashed line at this x

    def __html__(self) -> str:
        parts: list[Markup] = []
        if self.mark is not None:
            at = self.x.place(self.mark)
            parts.append(
                Markup('<line class="bound" x1="{0}%" x2="{0}%" y1="0" y2="100%"/>').format(at)
            )
        keys = []
        for index, (name, places) in enumerate(self.curves):
            corners = " ".join(
                f"{self.x.place(x)},{round(100 - self.y.place(y), 2)}" for x, y in places
            )
            parts.append(
                Markup(
                    '<svg viewBox="0 0 100 100" preserveAspectRatio="none"><polyline '
                    'class="curve dash{}" style="stroke:var(--w{})" points="{}"/></svg>'
                ).format(index, index, corners)
            )
            keys.append(
                Markup(
                    '<li><svg class="sample line" aria-hidden="true"><line class="curve dash{0}" '
                    'style="stroke:var(--w{0})" x1="0" x2="28" y1="6" y2="6"/></svg>{1}</li>'
                ).format(index, name)
            )
        return Markup('<ul class="key">{}</ul>{}').format(
            Markup("").join(keys), _framed(self, parts)
        )


def _framed(chart: Scatter | Lines, parts: Sequence[Markup]) -> Markup:
    """The chart with its grid, the ticks of both axes and their titles."""
    grid = [
        Markup('<line class="grid" x1="{0}%" x2="{0}%" y1="0" y2="100%"/>').format(tick.at)
        for tick in chart.x.ticks
    ] + [
        Markup('<line class="grid" y1="{0}%" y2="{0}%" x1="0" x2="100%"/>').format(100 - tick.at)
        for tick in chart.y.ticks
    ]
    return Markup(
        '<div class="scatter"><p class="titles">↑ {}</p>'
        '<div class="up" aria-hidden="true">{}</div>'
        '<svg class="area" role="img" aria-label="{}">{}</svg>'
        '<div class="along" aria-hidden="true">{}</div>'
        '<p class="titles last">{} →</p></div>'
    ).format(
        chart.y_title,
        _tick_texts(chart.y, "bottom"),
        chart.words,
        Markup("").join([*grid, *parts]),
        _tick_texts(chart.x, "left"),
        chart.x_title,
    )


def _tick_texts(scale: Scale, side: str) -> Markup:
    return Markup("").join(
        Markup('<span style="{}:{}%">{}</span>').format(side, at, text) for at, text in scale.ticks
    )


def distribution_words(name: str, curve: Sequence[float], unit: str) -> str:
    """The strip's description, for screen readers."""
    p50, p99 = curve if len(curve) == 2 else (curve[5], curve[9])
    longest = "" if len(curve) == 2 else f", the longest {number(curve[-1])} {unit}"
    return f"{name}: half within {number(p50)} {unit}, 99% within {number(p99)} {unit}{longest}"
