"""How the scripts print what they find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eclip.tune.speed import BENCHES, REPEATS


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


def print_claims(bench: str) -> None:
    """One of ``eclip bench``, its claims beside their targets."""
    print_table(
        f"This machine, one core, median of {REPEATS}",
        ["claim", "median", "range", "unit", "target", "met"],
        (
            [
                claim.what,
                f"{claim.median:.3g}",
                f"{claim.lowest:.3g} to {claim.highest:.3g}",
                claim.unit,
                claim.target,
                "yes" if claim.met else "NO",
            ]
            for claim in BENCHES[bench]()
        ),
    )
