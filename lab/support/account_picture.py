"""Credit, lateness and background of one run over time, as a picture.

``record_account`` runs a service beside background on the simulator, with rules that dare too much,
and keeps a line for each quarter of a second. ``draw_account`` draws what was kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from lab.support.picture import Picture

import eclip
from eclip.core.credit import IN_TIME, MOST_CREDIT, NOT_STRICT, fate_of
from eclip.core.plan import P99_GAIN, Plan, Rule, Slack
from eclip.core.runlog import RunLog

MIX = "bert:1@300rps/1.5x,vgg19:32@background"
DARES_NS = 100_000  # background goes on until bert has less slack than this
SECONDS, BIN_S, SEED = 20.0, 0.25, 3
LEFT, WIDTH, PANEL = 150.0, 760.0, 90.0
COLOURS = ("#5b8db8", "#c0392b", "#d9b26f")

Row = dict[str, Any]


def record_account(path: Path) -> None:
    plan = daring(eclip.plan(MIX, policy="yield"))
    log = eclip.run(plan, seconds=SECONDS, trace_ms=0, warmup=0, seed=SEED)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(log)))


def daring(plan: Plan) -> Plan:
    """Background goes on beside bert until bert has hardly any slack."""
    service, background = plan.workers
    assert service.promise is not None and background.joints is not None
    promise = msgspec.structs.replace(
        service.promise, none_ns=DARES_NS, some_ns=DARES_NS, gain=P99_GAIN
    )
    rules = (Rule(to=(0,), slack=Slack.NONE),)
    joints = msgspec.structs.replace(background.joints, rules=rules)
    workers = (
        msgspec.structs.replace(service, promise=promise),
        msgspec.structs.replace(background, joints=joints),
    )
    return msgspec.structs.replace(plan, workers=workers)


def rows_of(log: RunLog) -> list[Row]:
    """For each quarter of a second: the credit at its end, the late share so far, requests that
    were late and strict ones in it, and the rate of background over that alone."""
    count = round(SECONDS / BIN_S)
    rows = [{"late": 0, "strict": 0, "requests": 0, "background": 0.0} for _ in range(count)]
    credit, late, seen = 0.0, 0, 0
    columns = log.requests
    for worker, end, verdict in zip(columns.worker, columns.end_ns, columns.verdict, strict=True):
        row: Row = rows[min(int(end / 1e9 / BIN_S), count - 1)]
        if worker == 1:
            row["background"] += 1 / (log.alone_rps[1] * BIN_S)
            continue
        fate, reason = fate_of(verdict)
        was_late = fate != IN_TIME
        credit = min(credit - 1 if was_late else credit + P99_GAIN, MOST_CREDIT)
        late, seen = late + was_late, seen + 1
        row["requests"] += 1
        row["late"] += was_late
        row["strict"] += reason != NOT_STRICT
        row["credit"], row["share"] = round(credit, 3), round(late / seen, 5)
    return rows


def draw_account(rows: Sequence[Row]) -> Picture:
    picture = Picture(
        "An account at work: bert beside vgg19, whose rules dare too much (modelled by the "
        "simulator)"
    )
    panels: list[tuple[str, str, float, float, Callable[[Row], float]]] = [
        ("credit", COLOURS[0], -4.0, float(MOST_CREDIT), lambda row: row["credit"]),
        ("late so far, %", COLOURS[1], 0.0, 3.0, lambda row: 100 * row["share"]),
        (
            *("strict, % of requests", COLOURS[1], 0.0, 100.0),
            lambda row: 100 * row["strict"] / max(row["requests"], 1),
        ),
        ("vgg19, % of alone", COLOURS[2], 0.0, 100.0, lambda row: 100 * row["background"]),
    ]
    top = 44.0
    step = WIDTH / len(rows)
    for name, colour, low, high, read in panels:
        picture.text(8, top + PANEL / 2, name, weight="bold")
        for value in (low, high):
            y = top + PANEL * (high - value) / (high - low)
            picture.text(LEFT - 6, y + 4, f"{value:g}", anchor="end")
            picture.line(LEFT, y, LEFT + WIDTH, y, grid=True)
        zero = top + PANEL * (high - max(low, 0.0)) / (high - low)
        for index, row in enumerate(rows):
            value = min(max(read(row), low), high)
            y = top + PANEL * (high - value) / (high - low)
            picture.box(LEFT + index * step, min(y, zero), step, abs(zero - y), colour)
        picture.line(LEFT, zero, LEFT + WIDTH, zero)
        top += PANEL + 26
    for second in range(0, round(SECONDS) + 1, 5):
        picture.text(LEFT + WIDTH * second / SECONDS, top, f"{second} s", anchor="middle")
    return picture
