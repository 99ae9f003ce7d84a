"""The page of ``eclip varout compare``: growth of the interval by mechanism, one part a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eclip.reports.compare import Figure, axis, layout
from eclip.reports.labels import ABSENT, NEUTRAL, number, plain, worker_colour
from eclip.reports.page import plotly_script, template
from eclip.varout.growth import Growth
from eclip.varout.mechanisms import WORDS

_DASHES = ("solid", "dot", "dash", "longdash", "dashdot", "longdashdot", "solid")


def render(all_growth: Sequence[Growth]) -> str:
    return template("growth.html").render(
        parts=[_part(one) for one in all_growth],
        words=[(mechanism.value, text) for mechanism, text in WORDS.items()],
        plotly_script=plotly_script(),
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
        "figure": lines(growth),
    }


def lines(growth: Growth) -> Figure:
    """One line a mechanism; where it cannot serve the length there is none."""
    ratios = [point.ratio for point in growth.points]
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": plain(name),
            "x": ratios,
            "y": [None if value is None else round(value, 4) for value in growth.percent(name)],
            "line": {"color": worker_colour(index), "width": 2, "dash": _DASHES[index]},
            "hovertemplate": "%{fullData.name}: %{y:+.1f}% at A = %{x:.4g}<extra></extra>",
        }
        for index, name in enumerate(growth.points[0].interval)
    ]
    allocated = {
        "type": "line",
        "yref": "paper",
        "x0": growth.allocated_ratio,
        "x1": growth.allocated_ratio,
        "y0": 0,
        "y1": 1,
        "line": {"color": NEUTRAL, "width": 1, "dash": "dash"},
    }
    return {
        "data": data,
        "layout": layout(
            420,
            xaxis=axis("actual A (outputs per input)"),
            yaxis=axis("longer than exact allocation (%)"),
            shapes=[allocated],
            showlegend=True,
            legend={"orientation": "h", "y": 1.12},
            margin={"l": 60, "r": 20, "t": 40, "b": 48},
        ),
    }
