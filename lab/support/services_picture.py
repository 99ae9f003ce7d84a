"""The picture of services beside background work: what each way costs the one and gives the other.

A point is a pair under one way of sharing. To the right: more background work, over the time that
the service leaves. Down: the service's p99 is nearer to its p99 alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lab.support.picture import Picture

Point = dict[str, Any]

WAYS = {  # name, shape and colour of every way that is drawn
    "yield d2": ("eclip: yield at joints", "circle", "#d1322f"),
    "bound 1.5 careful": ("eclip: plan for a bound of 1.5×", "star", "#d1322f"),
    "launches 4/2": ("yield by launch counts", "plus", "#c98a1b"),
    "masks 50": ("static masks, half and half", "diamond", "#3d9970"),
    "MPS 50": ("MPS, half and half", "square", "#5b8db8"),
    "priorities": ("stream priorities", "triangle", "#8a6cb8"),
    "streams": ("plain streams", "cross", "#8a929b"),
}
OURS = ("yield d2", "bound 1.5 careful")
PAIRS = {  # in words: the service, then the background
    "bert+vgg": "bert beside vgg19",
    "alexnet+resnet152": "alexnet beside resnet152",
    "resnet+train-gpt": "resnet50 beside training",
    "vit+products12": "vit beside 5 ms kernels",
    "copies+copies": "copies beside copies",
    "decode+prefill": "decode beside prefill",
}
LEFT, TOP, WIDTH, HEIGHT = 50.0, 178.0, 530.0, 360.0
LEAST_OVER_REST, MOST_OVER_REST = 0.4, 1.6  # of the axis: background, over the time that is left
GOOD = 2.0  # times the p99 alone: the ground where both do well
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


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

    picture = Picture("What a service pays for background work beside it", size=17)
    told = f"A point is a service and its background. {len(first)} pairs, same arrivals, one H200."
    picture.text(8, 42, told, size=13)
    for index, (way, (name, shape, colour)) in enumerate(WAYS.items()):
        x, y = 18.0 + 280 * (index % 2), 72.0 + 20 * (index // 2)
        picture.point(x, y - 4, shape, colour, scale=_scale(way))
        picture.text(x + 16, y, name, size=14, weight="bold" if way in OURS else "normal")
    picture.good(x_of(1), y_of(GOOD), LEFT + WIDTH - x_of(1), y_of(0.9) - y_of(GOOD))
    for tick in (tick for tick in TICKS if tick <= top * 1.2):
        picture.line(LEFT, y_of(tick), LEFT + WIDTH, y_of(tick), grid=tick > 1)
        picture.text(LEFT - 6, y_of(tick) + 5, f"{tick}×", size=13, anchor="end")
    for part in np.arange(LEAST_OVER_REST, MOST_OVER_REST + 0.01, 0.2).tolist():
        picture.line(x_of(part), TOP, x_of(part), TOP + HEIGHT, grid=abs(part - 1) > 0.01)
        picture.text(x_of(part), TOP + HEIGHT + 18, f"{part:.1f}", size=13, anchor="middle")
    picture.text(8, TOP - 12, "↓ better: p99 of the service ÷ its p99 alone", size=14)
    picture.text(
        LEFT + WIDTH,
        TOP + HEIGHT + 40,
        "better →  background work ÷ the time that the service leaves",
        size=14,
        anchor="end",
    )
    picture.text(LEFT + WIDTH - 6, y_of(GOOD) + 16, "good for both", size=13, anchor="end")
    _name_worst(picture, drawn, x_of, y_of)
    for one in sorted(drawn, key=lambda one: one["way"] in OURS):  # ours on top
        _, shape, colour = WAYS[one["way"]]
        told = f"{one['pair']} at load {one['load']:g}, {WAYS[one['way']][0]}: p99 "
        told += f"{one['p99_ratio']:.2f} times alone, background {one['background']:.2f}"
        x, y = x_of(one["over_rest"]), y_of(one["p99_ratio"])
        picture.point(x, y, shape, colour, told, _scale(one["way"]))
    return picture


def _scale(way: str) -> float:
    return 1.35 if way in OURS else 1.1


def _name_worst(picture: Picture, drawn: Sequence[Point], x_of: Any, y_of: Any) -> None:
    """Left of its point, on two lines, as high as it covers fewest others."""
    places = [(x_of(one["over_rest"]), y_of(one["p99_ratio"])) for one in drawn]
    for way in OURS:
        ours = [one for one in drawn if one["way"] == way]
        if not ours:
            continue
        worst = max(ours, key=lambda one: one["p99_ratio"])
        x, y = x_of(worst["over_rest"]) - 14, y_of(worst["p99_ratio"])
        pair = PAIRS.get(worst["pair"], str(worst["pair"]))
        words = f"{WAYS[way][0].partition(': ')[2]}, worst: {worst['p99_ratio']:.1f}×"

        def covered(
            shift: float, x: float = x, y: float = y, wide: float = 8.0 * len(words)
        ) -> int:
            return sum(x - wide < a < x and -18 < b - y - shift < 22 for a, b in places)

        y += min((-3.0, -11.0, 5.0), key=covered)
        picture.text(x, y, words, size=13, weight="bold", anchor="end", halo=True)
        picture.text(x, y + 16, pair, size=13, anchor="end", halo=True)
