"""The picture of docs/paper.md: masks over shader engines, a lookup table, and lanes over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.support.picture import Picture

COLOURS = {15: "#f2d7b6", 30: "#d9b26f", 45: "#b5651d", 60: "#5b8db8"}
WIDTH, LEFT = 860.0, 120.0
ENGINE, CELL = 34.0, 14.0
SPAN_NS = 16_000_000
BEGIN_NS = 10_000_000


def draw_paper(rows: Sequence[dict[str, Any]]) -> Picture:
    workers = [row for row in rows if "worker" in row]
    lanes = next(row["lanes"] for row in rows if "lanes" in row)
    picture = Picture("The policy eclip on the paper's third mix, a simulated MI50")
    for index, (size, colour) in enumerate(COLOURS.items()):
        picture.box(LEFT + 110 * index, 30, 12, 12, colour)
        picture.text(LEFT + 18 + 110 * index, 40, f"{size} CUs")
    y = _draw_masks(picture, lanes, 70)
    y = _draw_table(picture, workers, y + 30)
    _draw_time(picture, workers, y + 30)
    return picture


def _draw_masks(picture: Picture, lanes: Sequence[Any], y: float) -> float:
    """A row for each lane, a cell for each of the four shader engines."""
    picture.text(8, y, "The pool: lanes and the shader engines of their masks", weight="bold")
    for index, (owner, mask) in enumerate(lanes):
        column, line = divmod(index, 4)
        x, top = LEFT + 290 * column, y + 10 + (CELL + 4) * line
        picture.text(x - 8, top + 11, owner, anchor="end", size=10)
        for engine in range(4):
            inside = engine in mask
            colour = COLOURS[15 * len(mask)] if inside else "#888888"
            picture.box(x + ENGINE * engine, top, ENGINE - 2, CELL, colour, 1.0 if inside else 0.15)
    return y + 10 + (CELL + 4) * min(4, len(lanes))


def _draw_table(picture: Picture, workers: Sequence[Any], y: float) -> float:
    picture.text(8, y, "The lookup table: the size of each kernel, in launch order", weight="bold")
    y += 10
    for row in workers:
        kernels = sum(count for _, count in row["groups"])
        picture.text(8, y + 14, row["worker"])
        x = LEFT
        for size, count in row["groups"]:
            picture.box(x, y, WIDTH * count / kernels, 20, COLOURS[size])
            x += WIDTH * count / kernels
        words = f"{kernels} kernels, {len(row['groups']) - 1} switches"
        picture.text(LEFT + WIDTH, y + 34, words, anchor="end", size=10)
        y += 42
    return y


def _draw_time(picture: Picture, workers: Sequence[Any], y: float) -> None:
    """Work over time; a mark where a barrier makes one lane wait for another."""
    head = "Barriers over time: sixteen milliseconds of a run; a mark is a change of lanes"
    picture.text(8, y, head, weight="bold")
    y += 16
    for row in workers:
        picture.text(8, y + 14, row["worker"])
        merged: list[list[int]] = []
        for size, start, end in row["spans"]:
            begin, last = start - BEGIN_NS, min(end - BEGIN_NS, SPAN_NS)
            if begin < 0 or begin >= SPAN_NS:
                continue
            if merged and merged[-1][0] == size:
                merged[-1][2] = last
            else:
                merged.append([size, begin, last])
        for index, (size, begin, last) in enumerate(merged):
            x = LEFT + WIDTH * begin / SPAN_NS
            picture.box(x, y, WIDTH * (last - begin) / SPAN_NS, 20, COLOURS[size])
            if index:
                picture.line(x, y - 4, x, y + 24)
        y += 34
    for millisecond in range(0, 17, 4):
        x = LEFT + WIDTH * millisecond * 1_000_000 / SPAN_NS
        picture.text(x, y + 4, f"{millisecond} ms", anchor="middle")
