"""Widths of a table's columns.

A number is never folded; names are folded at spaces only. If the table does not fit, columns are
left out, and the printer of the table names them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len

_WORD = 24  # how far a name without spaces, such as a kernel's, may be cut
_PHRASE = 16  # how far a name of several words may be folded
_SHORTEST_NAME = 8
_BETWEEN = 2  # blanks between two columns


class Layout(NamedTuple):
    shown: list[int]
    widths: list[int]  # of the shown columns
    left_out: list[str]


def lay_out(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    names: int,
    width: int,
    optional: Sequence[str] = (),
) -> Layout:
    """The columns that fit into the width. ``optional`` columns are left out first, in their
    order, then columns at the right; names (the first columns) and the first number stay.
    """
    texts = [[column, *(row[index] for row in rows)] for index, column in enumerate(columns)]
    natural = [max(map(cell_len, text)) for text in texts]
    least = [
        _least_name(text) if index < names else _least_number(text)
        for index, text in enumerate(texts)
    ]
    shown = list(range(len(columns)))
    may_go = [columns.index(name) for name in optional if name in columns]
    may_go += [index for index in reversed(shown[names + 1 :]) if index not in may_go]
    left_out = []
    while _total(least, shown) > width and may_go:
        left_out.append(may_go.pop(0))
        shown = [index for index in shown if index not in left_out]
    while _total(least, shown) > width:  # names are left, and at most one number
        longest = max((index for index in shown if index < names), key=least.__getitem__, default=0)
        if least[longest] <= _SHORTEST_NAME:
            break
        least[longest] -= 1
    widths = list(natural)
    while _total(widths, shown) > width:
        widest = max(shown, key=lambda index: widths[index] - least[index])
        if widths[widest] <= least[widest]:
            break
        widths[widest] -= 1
    return Layout(shown, [widths[i] for i in shown], [columns[i] for i in sorted(left_out)])


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[index] + _BETWEEN for index in shown) + 1


def fold_header(header: str, width: int) -> str:
    """Folded at spaces, and after hyphens."""
    return "\n".join(textwrap.wrap(header, width, break_long_words=False))


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _least_header(header: str) -> int:
    return _longest_word(header.replace("-", "- "))


def _least_name(text: Sequence[str]) -> int:
    word = min(_WORD, max(map(_longest_word, text[1:]), default=0))
    phrase = min(_PHRASE, max(map(cell_len, text[1:]), default=0))
    return max(_least_header(text[0]), word, phrase)


def _least_number(text: Sequence[str]) -> int:
    """A list of numbers may be folded between two of them."""
    cells = [_longest_word(cell) if ", " in cell else cell_len(cell) for cell in text[1:]]
    return max([_least_header(text[0]), *cells])
