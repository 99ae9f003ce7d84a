"""HTML tables of artefacts in a notebook; all text is escaped."""

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
