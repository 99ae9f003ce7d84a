"""The page of ``eclip varout compare``: growth of the interval by mechanism, one part a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eclip.reports.drawing import Lines, scale_of
from eclip.reports.labels import ABSENT, number, palette
from eclip.reports.page import template
from eclip.varout.growth import Growth
from eclip.varout.mechanisms import WORDS


def render(all_growth: Sequence[Growth]) -> str:
    return template("growth.html").render(
        parts=[_part(one) for one in all_growth],
        words=[(mechanism.value, text) for mechanism, text in WORDS.items()],
        light=palette(len(WORDS)),
        dark=palette(len(WORDS), dark=True),
    )


def percent(value: float | None) -> str:
    return ABSENT if value is None else f"{value:+.1f}%"


def _part(growth: Growth) -> dict[str, Any]:
    mechanisms = list(growth.points[0].interval)
    columns = [growth.percent(name) for name in mechanisms]
    return {
        "title": growth.title,
        "modelled": growth.modelled,
        "source": growth.source,
        "unit": growth.unit,
        "allocated": number(growth.allocated_ratio),
        "mechanisms": mechanisms,
        "rows": [
            {
                "ratio": f"{point.ratio:.4g}",
                "exact": number(point.exact),
                "cells": [
                    {"text": percent(column[index]), "best": name == point.best}
                    for name, column in zip(mechanisms, columns, strict=True)
                ],
            }
            for index, point in enumerate(growth.points)
        ],
        "chart": lines(growth),
    }


def lines(growth: Growth) -> Lines:
    """A line for every mechanism, with gaps at lengths that the mechanism cannot serve."""
    curves = [
        (
            name,
            [
                (point.ratio, value)
                for point, value in zip(growth.points, growth.percent(name), strict=True)
                if value is not None
            ],
        )
        for name in growth.points[0].interval
    ]
    ends = [f"{name} {percent(places[-1][1])}" for name, places in curves if places]
    return Lines(
        x=scale_of([point.ratio for point in growth.points]),
        y=scale_of([value for _, places in curves for _, value in places], log=False),
        x_title="actual A (outputs per input)",
        y_title="longer than exact allocation, %",
        curves=curves,
        words=f"Growth at the longest outputs: {', '.join(ends)}",
        mark=growth.allocated_ratio,
    )
