"""Charts that set the policies side by side, and the heat map of a profile.

A figure is a plain dict of ``data`` and ``layout``, ready for ``Plotly.newPlot``. Runs sit at whole
numbers on their axis, with their labels as tick texts, so two runs with one label stay two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from eclip.artefacts.measures import Measures
from eclip.artefacts.profile import Profile
from eclip.reports.labels import GRID, INK, NEUTRAL, TIMES, number, plain, worker_colour
from eclip.reports.tables import energy_per_request

Figure = dict[str, Any]

HEAT_CAP = 8  # times the busy time on the whole device; beyond, the colour stays the darkest
_HEAT_COLOURS = [[0, "#f3f1f6"], [0.5, "#a184bd"], [1, "#35134f"]]  # one hue, light to dark
_LOG_FROM = 20  # latencies further apart than this need a logarithmic axis to be told apart
_FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13}


def layout(height: int, **parts: Any) -> dict[str, Any]:
    """The look all charts share; the width is the page's."""
    return {
        "height": height,
        "margin": {"l": 60, "r": 20, "t": 12, "b": 48},
        "font": _FONT | {"color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "#ffffff",
        "showlegend": False,
        "hoverlabel": {"align": "left", "font": {"size": 13}},
        **parts,
    }


def axis(title: str = "", **parts: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 13}},
        "gridcolor": GRID,
        "linecolor": GRID,
        "zeroline": False,
        "automargin": True,
        **parts,
    }


def throughput(labels: Sequence[str], all_measures: Sequence[Measures]) -> Figure:
    """Each worker's ratio, stacked: the length of a bar is the STP."""
    runs = list(range(len(labels)))
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain(worker.name),
            "y": runs,
            "x": [round(each.workers[index].ratio, 5) for each in all_measures],
            "marker": {
                "color": worker_colour(index),
                # An outline parts neighbours; where many workers share a bar it would cover them.
                "line": {
                    "color": "#ffffff",
                    "width": 1 if len(all_measures[0].workers) <= 8 else 0,
                },
            },
            "hovertemplate": "%{fullData.name}: ratio %{x:.3f}<extra></extra>",
        }
        for index, worker in enumerate(all_measures[0].workers)
    ]
    totals = [each.stp for each in all_measures]
    data.append(
        {
            "type": "scatter",
            "mode": "text",
            "y": runs,
            "x": totals,
            "text": [f" {number(total)}" for total in totals],
            "textposition": "middle right",
            "hoverinfo": "skip",
            "cliponaxis": False,
        }
    )
    return {"data": data, "layout": _bars_layout(labels, "STP (sum of the ratios)", max(totals))}


def fairness(labels: Sequence[str], all_measures: Sequence[Measures]) -> Figure:
    values = [each.fairness for each in all_measures]
    return _plain_bars(labels, values, "fairness (smallest ÷ largest ratio)", 1.0)


def energy(labels: Sequence[str], all_measures: Sequence[Measures]) -> Figure:
    values, unit = energy_per_request(all_measures)
    highest = max((value for value in values if value is not None), default=1.0)
    return _plain_bars(labels, values, f"energy per request ({unit})", highest)


def _plain_bars(
    labels: Sequence[str], values: Sequence[float | None], title: str, highest: float
) -> Figure:
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": list(range(len(labels))),
        "x": values,
        "text": [number(value) for value in values],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": NEUTRAL},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    return {"data": [bars], "layout": _bars_layout(labels, title, highest)}


def _bars_layout(labels: Sequence[str], title: str, highest: float) -> dict[str, Any]:
    return layout(
        72 + 34 * len(labels),
        barmode="stack",
        bargap=0.3,
        # A sixth more than the longest bar leaves room for the number after it.
        xaxis=axis(title, range=[0, 1.17 * highest or 1.0], nticks=6),
        yaxis=axis(**run_ticks(labels), range=[len(labels) - 0.5, -0.5], showgrid=False),
        margin={"l": 20, "r": 12, "t": 8, "b": 44},
    )


def run_ticks(labels: Sequence[str]) -> dict[str, Any]:
    return {
        "tickmode": "array",
        "tickvals": list(range(len(labels))),
        "ticktext": [plain(label) for label in labels],
    }


def latency(labels: Sequence[str], all_measures: Sequence[Measures]) -> Figure | None:
    """p50, p95 and p99 of every worker under every policy, or nothing if no request completed."""
    workers = len(all_measures[0].workers)
    step = 0.8 / workers
    data = []
    seen: list[float] = []
    for index, worker in enumerate(all_measures[0].workers):
        x: list[float | None] = []
        y: list[float | None] = []
        for run, each in enumerate(all_measures):
            mine = each.workers[index]
            place = run + (index - (workers - 1) / 2) * step
            x += [place] * 3 + [None]  # the gap ends the line from p50 to p99
            y += [mine.p50_ms, mine.p95_ms, mine.p99_ms, None]
        seen += [value for value in y if value is not None]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plain(worker.name),
                "x": x,
                "y": [None if value is None else round(value, 6) for value in y],
                "text": ["p50", "p95", "p99", ""] * len(labels),
                "line": {"color": worker_colour(index), "width": 2},
                "marker": {
                    "color": worker_colour(index),
                    "opacity": 1,
                    "symbol": ["circle", "diamond", "line-ew", "circle"] * len(labels),
                    "size": [9, 9, 18, 9] * len(labels) if workers <= 8 else 5,
                    "line": {"color": worker_colour(index), "width": [0, 0, 2.5, 0] * len(labels)},
                },
                "hovertemplate": "%{fullData.name}: %{text} %{y:.4g} ms<extra></extra>",
            }
        )
    if not seen:
        return None
    low, high = min(seen), max(seen)
    if low > 0 and high / low > _LOG_FROM:
        span = [math.log10(low) - 0.1, math.log10(high) + 0.1]
        y_axis = axis("latency (ms, logarithmic)", type="log", range=span, dtick="D2")
    else:
        y_axis = axis("latency (ms)", range=[0, 1.08 * high or 1.0])
    borders = [
        {
            "type": "line",
            "yref": "paper",
            "x0": run - 0.5,
            "x1": run - 0.5,
            "y0": 0,
            "y1": 1,
            "line": {"color": GRID, "width": 1},
        }
        for run in range(1, len(labels))
    ]
    x_axis = axis(**run_ticks(labels), range=[-0.5, len(labels) - 0.5], showgrid=False)
    return {
        "data": data,
        "layout": layout(380, xaxis=x_axis, yaxis=y_axis, shapes=borders, hovermode="closest"),
    }


def heat_map(profile: Profile, unit_name: str) -> Figure:
    """Busy time of every kernel at every size, relative to the whole device, on a log scale."""
    busy = np.asarray(profile.busy_ns, dtype=np.float64).T  # by size, then kernel
    ratio = busy / busy[-1]
    ticks = [2**power for power in range(int(math.log2(HEAT_CAP)) + 1)]
    trace = {
        "type": "heatmap",
        "meta": {"model": str(profile.model)},
        "x": list(range(busy.shape[1])),
        "y": [f"{size} {plain(unit_name)}s" for size in profile.sizes],
        "z": np.round(np.log2(ratio), 3).tolist(),
        "zmin": 0,
        "zmax": math.log2(HEAT_CAP),
        "customdata": np.stack([np.round(ratio, 2), np.round(busy / 1e3, 2)], axis=-1).tolist(),
        "colorscale": _HEAT_COLOURS,
        "colorbar": {
            "title": {"text": "busy time", "side": "right", "font": {"size": 12}},
            "tickvals": [math.log2(tick) for tick in ticks],
            "ticktext": [f"{tick}{TIMES}" for tick in ticks[:-1]] + [f"{HEAT_CAP}{TIMES}+"],
            "thickness": 14,
        },
        "hovertemplate": (
            "%{text}<br>kernel %{x} on %{y}: %{customdata[1]} µs, "
            "%{customdata[0]}" + TIMES + " the whole device<extra></extra>"
        ),
    }
    return {
        "data": [trace],
        "layout": layout(
            110 + 24 * len(profile.sizes),
            xaxis=axis("kernel (position in the request)", showgrid=False),
            yaxis=axis("lane size", type="category", showgrid=False),
        ),
    }
