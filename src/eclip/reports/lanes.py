"""Charts of one run: its plan, the timeline of its lanes, the occupancy of its slices.

Each is kept small whatever the run's size: one or two traces per worker, at most MAX_BARS kernels,
about BINS columns of occupancy. A time is drawn in milliseconds since the measured part began.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eclip.artefacts.plan import Assignment, Plan
from eclip.artefacts.runlog import RunLog
from eclip.reports.compare import Figure, axis, layout
from eclip.reports.labels import (
    count,
    duration,
    lane_title,
    plain,
    units_title,
    worker_colour,
)

MAX_BARS = 4000
BINS = 400

Integers = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]

_OCCUPANCY_COLOURS = [[0, "#f0f2f5"], [0.5, "#6aa5d8"], [1, "#08306b"]]


def plan_drawing(plan: Plan) -> Figure:
    """Per worker, the units of the lane over the kernels; a bar is a group."""
    assignments = plan.main.assignments
    row_px, gap_px = (88, 64) if len(assignments) <= 8 else (54, 56)
    height = len(assignments) * (row_px + gap_px)
    units = plan.topology.units
    data: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    titles = []
    for row, part in enumerate(assignments):
        worker = plan.workers[part.worker]
        suffix = "" if row == 0 else str(row + 1)  # Plotly's names: x, x2, x3, …
        last = row == len(assignments) - 1
        top = 1 - (row * (row_px + gap_px) + gap_px / 2) / height
        axes[f"xaxis{suffix}"] = axis(
            "kernel (position in the request)" if last else "",
            anchor=f"y{suffix}",
            range=[0, worker.kernels],
            showgrid=False,
            nticks=12,
        )
        axes[f"yaxis{suffix}"] = axis(
            domain=[top - row_px / height, top],
            range=[0, 1.08 * units],
            tickvals=[0, units / 2, units],
            ticktext=["0", f"{units / 2:g}", plain(units_title(plan, units))],
        )
        data += [
            trace | {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
            for trace in _group_traces(plan, part)
        ]
        titles.append(
            {
                "text": _assignment_title(plan, part),
                "xref": "paper",
                "yref": "paper",
                "x": 0,
                "y": top,
                "xanchor": "left",
                "yanchor": "bottom",
                "showarrow": False,
            }
        )
    return {
        "data": data,
        "layout": layout(
            height + 20,
            annotations=titles,
            hovermode="closest",
            margin={"l": 70, "r": 20, "t": 6, "b": 4},
            **axes,
        ),
    }


def _group_traces(plan: Plan, part: Assignment) -> tuple[dict[str, Any], dict[str, Any]]:
    """A worker's groups as bars in two alternating shades, and the steps along their tops."""
    kernels = np.array([group.kernels for group in part.groups], dtype=np.int64)
    ends = np.cumsum(kernels)
    starts = ends - kernels
    heights = [plan.units(group.lane) for group in part.groups]
    spans = zip(part.groups, starts.tolist(), ends.tolist(), strict=True)
    bars = {
        "type": "bar",
        "name": plain(plan.workers[part.worker].name),
        "x": ((starts + ends) / 2).tolist(),
        "width": kernels.tolist(),
        "y": heights,
        "marker": {
            "color": [
                worker_colour(part.worker, 0.45 if index % 2 else 0.2)
                for index in range(len(part.groups))
            ],
            "line": {"width": 0},
        },
        "text": [
            f"group {index + 1}: {_span(start, end)}<br>"
            f"{plain(lane_title(plan, group.lane))}<br>predicted {duration(group.predicted_ns)}"
            for index, (group, start, end) in enumerate(spans)
        ],
        "textposition": "none",
        "hovertemplate": "%{fullData.name}<br>%{text}<extra></extra>",
    }
    steps = {
        "type": "scatter",
        "mode": "lines",
        "x": [*starts.tolist(), *ends[-1:].tolist()],
        "y": [*heights, *heights[-1:]],
        "line": {"color": worker_colour(part.worker), "width": 2, "shape": "hv"},
        "hoverinfo": "skip",
    }
    return bars, steps


def _span(start: int, end: int) -> str:
    return f"kernel {start}" if end == start + 1 else f"kernels {start}-{end - 1}"


def _assignment_title(plan: Plan, part: Assignment) -> str:
    worker = plan.workers[part.worker]
    predicted_ns = sum(group.predicted_ns for group in part.groups)
    return (
        f"<b>{plain(worker.name)}</b>: {count(worker.kernels, 'kernel')} in "
        f"{count(len(part.groups), 'group')}, predicted {duration(predicted_ns)}"
    )


def timeline(log: RunLog) -> tuple[Figure, int]:
    """The kernels on their lanes, as many as are drawn well; and how many that is."""
    records = log.kernels
    order = np.argsort(np.asarray(records.end_ns, dtype=np.int64), kind="stable")[:MAX_BARS]
    worker, position, lane, start_ns, end_ns = (
        np.asarray(column, dtype=np.int64)[order]
        for column in (
            records.worker,
            records.position,
            records.lane,
            records.start_ns,
            records.end_ns,
        )
    )
    # Lanes of one worker stay together, in the order of the plan.
    used = sorted(set(lane.tolist()), key=lambda index: (log.plan.lanes[index].owner, index))
    row_of = np.full(len(log.plan.lanes), -1, dtype=np.int64)
    row_of[used] = np.arange(len(used))
    data = []
    for index in np.unique(worker).tolist():
        mine = worker == index
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(log.plan.workers[index].name),
                "meta": {"model": str(log.plan.workers[index].model)},
                "y": row_of[lane[mine]].tolist(),
                "base": (start_ns[mine] / 1e6).tolist(),
                "x": ((end_ns - start_ns)[mine] / 1e6).tolist(),
                "customdata": np.stack(
                    [position[mine], (end_ns - start_ns)[mine] / 1e3], axis=-1
                ).tolist(),
                # Two tones tell a kernel from the next; an outline would cover the short ones.
                "marker": {
                    "color": worker_colour(index),
                    "opacity": np.where(position[mine] % 2, 0.62, 1.0).tolist(),
                    "line": {"width": 0},
                },
                "hovertemplate": (
                    "%{fullData.name}, kernel %{customdata[0]}<br>%{text}<br>"
                    "%{customdata[1]} µs from %{base:.4f} ms<br>%{y}<extra></extra>"
                ),
            }
        )
    shown_ns = int(end_ns[-1]) if len(order) < len(records.end_ns) else records.window_ns
    figure = {
        "data": data,
        "layout": layout(
            70 + max(24 * len(used), 60),
            barmode="overlay",
            bargap=0.25,
            hovermode="closest",
            dragmode="zoom",
            xaxis=axis("time (ms)", range=[0, shown_ns / 1e6]),
            yaxis=axis(
                tickmode="array",
                tickvals=list(range(len(used))),
                ticktext=[plain(_short(lane_title(log.plan, index))) for index in used],
                range=[len(used) - 0.5, -0.5],
                fixedrange=True,
                showgrid=False,
            ),
        ),
    }
    return figure, len(order)


def _short(text: str) -> str:
    """A mask of scattered slices must not push the chart off the page."""
    return text if len(text) <= 44 else text[:43] + "…"


def occupancy(log: RunLog) -> Figure:
    """Kernels on every slice, averaged over each bin of the window."""
    edges = np.linspace(0, log.kernels.window_ns, min(BINS, log.kernels.window_ns) + 1)
    table = occupied(log, edges)
    slices = len(table)
    width_ms = float(edges[1] - edges[0]) / 1e6
    trace = {
        "type": "heatmap",
        "x0": width_ms / 2,
        "dx": width_ms,
        "y0": 0,
        "dy": 1,
        "z": np.round(table, 2).tolist(),
        "zmin": 0,
        "zmax": 2,
        "colorscale": _OCCUPANCY_COLOURS,
        "colorbar": {
            "title": {"text": "kernels at once", "side": "right", "font": {"size": 12}},
            "tickvals": [0, 1, 2],
            "ticktext": ["0 idle", "1", "2+ shared"],
            "thickness": 14,
        },
        "hovertemplate": "slice %{y} at %{x:.4f} ms: %{z} kernels on average<extra></extra>",
    }
    return {
        "data": [trace],
        "layout": layout(
            90 + min(18 * slices, 640),
            xaxis=axis("time (ms)", showgrid=False),
            yaxis=axis("slice", showgrid=False, **({"dtick": 1} if slices <= 32 else {})),
        ),
    }


def occupied(log: RunLog, edges: Times) -> Times:
    """By slice, then bin: how many kernels ran there at once, averaged over the bin's time."""
    lane = np.asarray(log.kernels.lane, dtype=np.int64)
    start = np.asarray(log.kernels.start_ns, dtype=np.float64)
    end = np.asarray(log.kernels.end_ns, dtype=np.float64)
    table = np.zeros((len(log.plan.topology.slice_units), len(edges) - 1))
    for index in np.unique(lane).tolist():
        mine = lane == index
        # Time since the starts less time since the ends, at an edge, is the busy time before it.
        busy = _elapsed(start[mine], edges) - _elapsed(end[mine], edges)
        table[list(log.plan.lanes[index].mask)] += np.diff(busy) / np.diff(edges)
    return table


def _elapsed(moments: Times, edges: Times) -> Times:
    """For every edge, the sum over earlier moments of the time passed since."""
    moments = np.sort(moments)
    before = np.searchsorted(moments, edges)
    passed = np.concatenate([[0.0], np.cumsum(moments)])
    since: Times = before * edges - passed[before]
    return since
