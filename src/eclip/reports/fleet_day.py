"""A simulated day of a fleet as a picture: rates, GPUs in use and bounds kept, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from eclip.fleet.place.simulate import Day, DayStep

TITLE = "a simulated day: modelled"
MARK = TITLE.encode()
_COLOURS = ("#d1322f", "#3b7dbd", "#7a8a3a")
_WIDTH, _HEIGHT, _LEFT, _GAP = 560.0, 110.0, 70.0, 46.0
_TOP = 64.0
_FONT = 'font-family="system-ui, sans-serif" font-size="13"'
_STYLE = """<style>
.page { fill: white } text { fill: #222 } .frame { stroke: #999 }
@media (prefers-color-scheme: dark) {
.page { fill: #16191d } text { fill: #ddd } .frame { stroke: #666 }
}
</style>"""


def draw_days(days: Sequence[Day]) -> str:
    """One picture of several days with the same load: a panel for each quantity, a line a day."""
    panels: list[tuple[str, Callable[[DayStep], float], bool]] = [
        ("requests/s offered", lambda step: step.rate_rps, True),
        ("GPUs in use", lambda step: float(step.gpus), True),
        ("requests at GPUs that keep their bounds, %", lambda step: 100 * step.kept, False),
        ("power, kW", lambda step: step.power_w / 1e3, True),
    ]
    parts = [f'<text x="{_LEFT}" y="18" {_FONT}>{TITLE}</text>']
    for number, (title, value, from_zero) in enumerate(panels):
        top = _TOP + number * (_HEIGHT + _GAP)
        parts.append(
            _panel(title, [[value(step) for step in day.steps] for day in days], top, from_zero)
        )
    for number, day in enumerate(days):
        x = _LEFT + 160 * number
        parts.append(
            f'<line x1="{x}" y1="32" x2="{x + 20}" y2="32" stroke="{_COLOURS[number]}" '
            f'stroke-width="3"/><text x="{x + 26}" y="36" {_FONT}>{escape(day.label)}</text>'
        )
    width, height = f"{_LEFT + _WIDTH + 24:.0f}", f"{_TOP + len(panels) * (_HEIGHT + _GAP):.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">\n{_STYLE}\n'
        '<rect class="page" width="100%" height="100%"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(title: str, lines: Sequence[Sequence[float]], top: float, from_zero: bool) -> str:
    low = 0.0 if from_zero else min(map(min, lines))
    high = max(max(map(max, lines)), low + 1e-9)
    parts = [
        f'<text x="{_LEFT}" y="{top - 6:.1f}" {_FONT} font-weight="bold">{escape(title)}</text>',
        f'<rect x="{_LEFT}" y="{top:.1f}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        f'class="frame"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        y = top + (1 - share) * _HEIGHT
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" {_FONT}>'
            f"{_plain(low + share * (high - low))}</text>"
        )
    for hour in range(0, 25, 6):
        x = _LEFT + _WIDTH * hour / 24
        parts.append(
            f'<text x="{x:.1f}" y="{top + _HEIGHT + 16:.1f}" text-anchor="middle" {_FONT}>'
            f"{hour}:00</text>"
        )
    for line, colour in zip(lines, _COLOURS, strict=False):
        points = " ".join(
            f"{_LEFT + _WIDTH * index / max(len(line) - 1, 1):.1f},"
            f"{top + (1 - (value - low) / (high - low)) * _HEIGHT:.1f}"
            for index, value in enumerate(line)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
    return "\n".join(parts)


def _plain(value: float) -> str:
    """Four digits, never as a power of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
