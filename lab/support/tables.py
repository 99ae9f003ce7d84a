"""How the scripts print what they find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """The first column holds names, to the left; the others numbers, to the right."""
    cells = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"{title}\n")
    for line, row in enumerate(cells):
        name, *numbers = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join((name, *numbers)).rstrip())
        if line == 0:
            print("-" * (sum(widths) + 2 * len(widths) - 2))
    print(flush=True)
