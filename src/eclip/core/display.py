"""How values are shown: HTML tables in a notebook with all text escaped, and digits of numbers."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a caption; the first column holds names."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="text-align:{"left" if index == 0 else "right"}">{html.escape(cell)}</td>'
            for index, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    caption = f'<caption style="text-align:left">{html.escape(title)}</caption>'
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def number(value: float | None, digits: int = 2) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def digits_apart(limit: float, values: Iterable[float | None]) -> int:
    """Digits behind the point, two at least, that show which values exceed the limit: 3.134 beside
    3.128. Values that equal the limit to a millionth need no more."""
    needed = [2]
    for value in values:
        if value is not None:
            apart = (n for n in range(2, 7) if f"{value:.{n}f}" != f"{limit:.{n}f}")
            needed.append(next(apart, 2))
    return max(needed)


def told_apart(value: float, limit: float) -> tuple[str, str]:
    """Both numbers with the digits that show which is larger."""
    digits = digits_apart(limit, [value])
    return f"{value:.{digits}f}", f"{limit:.{digits}f}"
