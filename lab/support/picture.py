"""A picture of boxes, points and words as SVG, in light and dark."""

from __future__ import annotations

from html import escape
from pathlib import Path

FONT_PX = 12.0
STYLE = """<style>
text { font-family: system-ui, sans-serif; fill: #222 }
.page { fill: white } .good { fill: #e4f4e9 }
line { stroke: #333 } line.grid { stroke: #ddd } .halo { stroke: white }
@media (prefers-color-scheme: dark) {
text { fill: #ddd } .page { fill: #16191d } .good { fill: #17301f }
line { stroke: #bbb } line.grid { stroke: #3a3f45 } .halo { stroke: #16191d }
}
</style>"""
SHAPES = {
    "circle": "M -4.5 0 A 4.5 4.5 0 1 0 4.5 0 A 4.5 4.5 0 1 0 -4.5 0 Z",
    "square": "M -4 -4 H 4 V 4 H -4 Z",
    "triangle": "M 0 -5 L 5 4 H -5 Z",
    "diamond": "M 0 -5.5 L 5 0 L 0 5.5 L -5 0 Z",
    "cross": "M -4 -4 L 4 4 M -4 4 L 4 -4",
    "plus": "M -5 0 H 5 M 0 -5 V 5",
    "star": "M 0 -7 L 2 -2 L 7 -2 L 3 1.5 L 4.5 6.5 L 0 3.5 L -4.5 6.5 L -3 1.5 L -7 -2 L -2 -2 Z",
}
OPEN = ("cross", "plus")  # strokes only


class Picture:
    def __init__(self, title: str, size: float = 13) -> None:
        self._title = title
        self._parts: list[str] = []
        self._width = self._height = 0.0
        self.text(8, 20, title, weight="bold", size=size)

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, alpha: float = 1.0
    ) -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{colour}" fill-opacity="{alpha:.2f}" stroke="#ccc" stroke-width="0.5"/>'
        )
        self._reach(x + width, y + height)

    def good(self, x: float, y: float, width: float, height: float) -> None:
        """Ground for the part of a picture where one wants to be."""
        self._parts.append(
            f'<rect class="good" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}"/>'
        )
        self._reach(x + width, y + height)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        weight: str = "normal",
        size: float = FONT_PX,
        anchor: str = "start",
        halo: bool = False,
    ) -> None:
        """``halo``: can be read on top of lines and points."""
        around = ' class="halo" paint-order="stroke" stroke-width="4"' if halo else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" font-weight="{weight}" '
            f'text-anchor="{anchor}"{around}>{escape(words)}</text>'
        )
        length = (0.6 if weight == "bold" else 0.56) * size * len(words)
        self._reach(x + {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor] * length, y)

    def line(self, x: float, y: float, to_x: float, to_y: float, *, grid: bool = False) -> None:
        kind = ' class="grid"' if grid else ""
        self._parts.append(
            f'<line{kind} x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'
        )

    def point(
        self, x: float, y: float, shape: str, colour: str, told: str = "", scale: float = 1.0
    ) -> None:
        """``told`` is shown by browsers where the mouse rests."""
        filled = "none" if shape in OPEN else colour
        self._parts.append(
            f'<path transform="translate({x:.1f} {y:.1f}) scale({scale:g})" d="{SHAPES[shape]}" '
            f'fill="{filled}" stroke="{colour}" stroke-width="1.6">'
            f"<title>{escape(told)}</title></path>"
        )
        self._reach(x + 6, y + 6)

    def save(self, path: Path) -> None:
        width, height = f"{self._width + 12:.0f}", f"{self._height + 12:.0f}"
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        body = "\n".join(self._parts)
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
            f'aria-label="{escape(self._title)}">\n{STYLE}\n'
            f'<rect class="page" width="100%" height="100%"/>\n{body}\n</svg>\n'
        )

    def _reach(self, x: float, y: float) -> None:
        self._width, self._height = max(self._width, x), max(self._height, y)
