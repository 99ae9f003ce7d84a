"""The same ten milliseconds under plain streams, masks and joints, as a picture.

``record`` runs a service beside background on the simulator, with the same arrivals under each
policy, and keeps what happened between two moments: spans of work by worker and slices, and the
service's requests. ``draw_ten_ms`` draws what was kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.support.picture import Picture

import eclip

MIX = "bert:1@300rps/1.5x,vgg19:32@background"
WAYS = (
    ("shared", "Plain streams: bert's kernels wait behind vgg19's blocks"),
    ("model", "Masks: each model has its own SMs, and no other"),
    ("yield", "Joints: vgg19 has all SMs, and steps aside between two kernels"),
)
BEGIN_NS, END_NS = 12_500_000, 22_500_000
JOINED_NS = 8_000  # a gap that is too short to be seen
SECONDS, TRACE_MS, SEED = 3, 60, 3
COLOURS = ("#c0392b", "#5b8db8")
LEFT, SCALE, PANEL, CELL = 110.0, 84.0, 128.0, 5.5

Row = dict[str, Any]


def record(path: Path) -> None:
    """Run all ways, and keep a JSON line of each."""
    with path.open("w") as file:
        for policy, _ in WAYS:
            plan = eclip.plan(MIX, policy=policy)
            log = eclip.run(plan, seconds=SECONDS, trace_ms=TRACE_MS, seed=SEED)
            requests = log.requests
            waits = [
                (arrival, end)
                for worker, arrival, end in zip(
                    requests.worker, requests.arrival_ns, requests.end_ns, strict=True
                )
                if worker == 0 and BEGIN_NS <= arrival < END_NS
            ]
            spans = _spans(log)
            units = list(plan.topology.slice_units)
            measures = eclip.measure(log)
            row = {
                "policy": policy,
                "p99_ms": measures.workers[0].p99_ms,
                "background": measures.background,
                "slice_units": units,
                "requests": waits,
                "spans": spans,
            }
            file.write(json.dumps(row) + "\n")


def _spans(log: Any) -> list[tuple[int, list[int], int, int]]:
    """Worker, slices, begin and end of work without a visible gap, inside the window."""
    spans: list[tuple[int, list[int], int, int]] = []
    latest: dict[tuple[int, int], int] = {}  # by worker and lane: its last span
    for worker, _, lane, start, end in sorted(log.kernels.rows(), key=lambda row: row[3]):
        start, end = max(start, BEGIN_NS), min(end, END_NS)
        if start >= end:
            continue
        index = latest.get((worker, lane))
        if index is not None and start - spans[index][3] <= JOINED_NS:
            spans[index] = (*spans[index][:3], max(end, spans[index][3]))
            continue
        latest[worker, lane] = len(spans)
        spans.append((worker, list(log.plan.lanes[lane].mask), start, end))
    return spans


def draw_ten_ms(rows: Sequence[Row]) -> Picture:
    """A panel for each way: SMs over time, and above them the service's requests."""
    picture = Picture(
        "The same ten milliseconds of an H200, three ways (modelled by the simulator)"
    )
    for index, name in enumerate(("bert, 300 requests a second", "vgg19, background", "both")):
        picture.box(LEFT + 210 * index, 30, 12, 12, COLOURS[-1 if index else 0], 0.75)
        if name == "both":
            picture.box(LEFT + 210 * index, 30, 12, 12, COLOURS[0], 0.75)
        picture.text(LEFT + 18 + 210 * index, 40, name)
    titles = dict(WAYS)
    top = 66.0
    for row in rows:
        measured = f"bert's p99 {row['p99_ms']:,.1f} ms, vgg19 at {row['background']:.0%} of alone"
        picture.text(8, top, titles[row["policy"]], weight="bold")
        picture.text(_x(END_NS), top, measured, anchor="end")
        _draw_requests(picture, row["requests"], top + 8)
        _draw_spans(picture, row, top + 30)
        top += PANEL + 32
    for millisecond in range(0, 11, 2):
        x = _x(BEGIN_NS + millisecond * 1_000_000)
        picture.text(x, top - 18, f"{millisecond} ms", anchor="middle")
    return picture


def _x(time_ns: float) -> float:
    return LEFT + SCALE * (min(time_ns, END_NS) - BEGIN_NS) / 1e6


def _draw_requests(picture: Picture, requests: Sequence[Sequence[int]], y: float) -> None:
    """From arrival to answer, with the time that it took."""
    picture.text(8, y + 11, "requests")
    for number, (arrival, end) in enumerate(requests):
        level = y + (6 if number % 2 else 0)
        picture.box(_x(arrival), level, max(_x(end) - _x(arrival), 2), 4, COLOURS[0])
        late = end > END_NS + 2_000_000
        if late and number == 0:
            least = min(end - arrival for arrival, end in requests) / 1e6
            words = f"answered {least:.0f} ms after they came, and later"
            picture.text(_x(END_NS), y + 20, words, anchor="end", size=10)
        elif not late:
            words = f"{(end - arrival) / 1e6:.1f} ms"
            picture.text(_x(arrival) - 4, level + 6, words, anchor="end", size=10)


def _draw_spans(picture: Picture, row: Row, y: float) -> None:
    units, height = row["slice_units"], PANEL - 34
    picture.text(8, y + 11, f"{sum(units)} SMs")
    picture.box(LEFT, y, SCALE * (END_NS - BEGIN_NS) / 1e6, height, "#888", 0.10)
    edges = [0]
    for count in units:
        edges.append(edges[-1] + count)
    for worker in (1, 0):
        for owner, slices, start, end in row["spans"]:
            if owner == worker:
                first, last = edges[slices[0]], edges[slices[-1] + 1]
                picture.box(
                    _x(start),
                    y + height * first / edges[-1],
                    _x(end) - _x(start),
                    height * (last - first) / edges[-1],
                    COLOURS[owner],
                    0.75 if row["policy"] != "shared" else 0.5,
                )
