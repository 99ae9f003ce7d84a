"""The picture of services beside background work: what each way costs the one and gives the other.

A point is a pair under one way of sharing. To the right: more background work, over the time that
the service leaves. Down: the service's p99 is nearer to its p99 alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from bench.support.picture import Picture

Point = dict[str, Any]

WAYS = {  # name, shape and colour of every way that is drawn
    "streams": ("plain streams", "cross", "#8a929b"),
    "priorities": ("stream priorities", "triangle", "#7b5ea7"),
    "MPS 50": ("MPS, half and half", "square", "#5b8db8"),
    "masks 50": ("static masks, half and half", "diamond", "#3d9970"),
    "launches 4/2": ("yield by launch counts", "plus", "#c98a1b"),
    "yield d2": ("eclip, yield at joints", "circle", "#d1322f"),
    "bound 1.5 careful": ("eclip, plan for a bound of 1.5", "star", "#d1322f"),
}
OURS = ("yield d2", "bound 1.5 careful")
LEFT, TOP, WIDTH, HEIGHT = 60.0, 104.0, 640.0, 380.0
LEAST_OVER_REST, MOST_OVER_REST = 0.4, 1.6  # of the axis: background, over the time that is left
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


def points_of(rows: Iterable[Mapping[str, Any]]) -> list[Point]:
    """What the picture needs of a visit's rows: the worst service of each."""
    found = []
    for row in rows:
        if "background" not in row or not row.get("services"):
            continue
        worst = max(row["services"], key=lambda one: one["p99_ratio"]["value"])
        found.append(
            {
                "device": row["device"],
                "pair": row["pair"],
                "load": row["load"],
                "shape": row["shape"],
                "way": row["way"],
                "requests": worst["requests"],
                "p99_ratio": round(worst["p99_ratio"]["value"], 3),
                "background": round(row["background"], 4),
                "over_rest": round(row["background_over_rest"], 4),
            }
        )
    return found


def draw_services(points: Sequence[Point]) -> Picture:
    drawn = [one for one in points if one["way"] in WAYS and one["shape"] == "poisson"]
    first = {}  # one load of every pair: the one that has most ways
    for one in drawn:
        loads = [other["load"] for other in drawn if other["pair"] == one["pair"]]
        first[one["pair"]] = max(sorted(set(loads)), key=loads.count)
    drawn = [one for one in drawn if one["load"] == first[one["pair"]]]
    top = max(one["p99_ratio"] for one in drawn)

    def x_of(over_rest: float) -> float:
        return LEFT + WIDTH * (over_rest - LEAST_OVER_REST) / (MOST_OVER_REST - LEAST_OVER_REST)

    def y_of(ratio: float) -> float:
        part = np.log(ratio / 0.9) / np.log(top * 1.2 / 0.9)
        return TOP + HEIGHT * (1 - float(part))

    picture = Picture(
        f"Services beside background work: {len(first)} pairs on an H200, same arrivals for all"
    )
    for index, (name, shape, colour) in enumerate(WAYS.values()):
        x, y = LEFT + 210 * (index % 3), 36 + 15 * (index // 3)
        picture.point(x, y - 4, shape, colour)
        picture.text(x + 12, y, name)
    for tick in (tick for tick in TICKS if tick <= top * 1.2):
        picture.line(LEFT, y_of(tick), LEFT + WIDTH, y_of(tick), grid=tick > 1)
        picture.text(LEFT - 34, y_of(tick) + 4, f"{tick}×")
    for part in np.arange(LEAST_OVER_REST, MOST_OVER_REST + 0.01, 0.2).tolist():
        picture.line(x_of(part), TOP, x_of(part), TOP + HEIGHT, grid=abs(part - 1) > 0.01)
        picture.text(x_of(part) - 8, TOP + HEIGHT + 16, f"{part:.1f}")
    picture.text(8, TOP - 10, "p99 of the service, over its p99 alone")
    picture.text(
        LEFT + 90,
        TOP + HEIGHT + 34,
        "background work, over its rate alone × the time that the service leaves",
    )
    for one in drawn:
        _, shape, colour = WAYS[one["way"]]
        told = f"{one['pair']} at load {one['load']:g}, {WAYS[one['way']][0]}: p99 "
        told += f"{one['p99_ratio']:.2f} times alone, background {one['background']:.2f}"
        picture.point(x_of(one["over_rest"]), y_of(one["p99_ratio"]), shape, colour, told)
    _name_worst(picture, drawn, x_of, y_of)
    return picture


def _name_worst(picture: Picture, drawn: Sequence[Point], x_of: Any, y_of: Any) -> None:
    for way in OURS:
        ours = [one for one in drawn if one["way"] == way]
        if not ours:
            continue
        worst = max(ours, key=lambda one: one["p99_ratio"])
        words = f"worst: {worst['pair']}, {worst['p99_ratio']:.1f}×"
        picture.text(x_of(worst["over_rest"]) + 10, y_of(worst["p99_ratio"]) + 4, words)
