"""Where a request's time goes in a server, and what the late ones waited for.

    PYTHONPATH=.:src:tests/support:.gpu-deps python3 lab/serving/hops.py MIX --device cuda
        [--way eclip] [--bound 5] [--loads 0.67,0.8,0.9,1,1.3] [--seconds 2]

The server of lab/serving/goodput.py, with the bench as its front, at the loads given. Of each
load: how many requests are in time, and p50 and p99 of every hop of their batches. *queue*: from
arrival to the order for the device process; *to the device*: until the batch is launched there;
*device*: until it has ended; *back*: until the front has the answer. Then the late batches of each
load, in order of arrival, with their hops: late ones at one moment have one cause.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.serving.goodput import WARM_LOAD, WARM_S, WAYS, started
from lab.support.offered import MIXES, Front, services_of
from lab.support.tables import print_table

from eclip.core.requests import END, START
from eclip.server.front.open_service import OpenService
from eclip.server.front.replica import OpenBatch

HOPS = ("queue", "to the device", "device", "back")
MOST_LATE = 40  # lines of late requests, of a load
PAUSE_S = 0.5


@dataclass(frozen=True)
class Hops:
    """Of a batch, by its oldest request."""

    service: str
    rows: int
    arrival_ns: int
    each_ns: tuple[int, ...]

    @property
    def latency_ms(self) -> float:
        return sum(self.each_ns) / 1e6


class Notes:
    """Of every batch that a front has an answer for."""

    def __init__(self) -> None:
        self.hops: list[Hops] = []
        self._take = OpenService.take

    def take(self, service: OpenService, batch: OpenBatch, ended: memoryview) -> None:
        arrival_ns = min(one.asked.arrival_ns for one in batch.requests)
        moments = (
            *(arrival_ns, batch.sent_ns, ended[START]),
            *(ended[END], service.front_queue.now_ns()),
        )
        each = tuple(after - before for before, after in itertools.pairwise(moments))
        rows = sum(one.rows for one in batch.requests)
        self.hops.append(Hops(service.spec.name, rows, arrival_ns, each))
        self._take(service, batch, ended)


def print_load(load: float, found: Sequence[Hops], bounds_ms: dict[str, float]) -> None:
    lines = []
    for name in bounds_ms:
        of_service = [one for one in found if one.service == name]
        if not of_service:
            continue
        each = np.percentile([one.each_ns for one in of_service], [50, 99], axis=0) / 1e3
        cells = [f"{p50:.0f}, {p99:.0f}" for p50, p99 in each.T]
        rows = sum(one.rows for one in of_service) / len(of_service)
        lines.append([name, str(len(of_service)), f"{rows:.1f}", *cells])
    title = f"Load {load:g}: p50 and p99 of each hop, µs"
    print_table(title, ["service", "batches", "rows", *HOPS], lines)
    late = [one for one in found if one.latency_ms > bounds_ms[one.service]]
    if not late:
        return
    late.sort(key=lambda one: one.arrival_ns)
    begin_ns = min(one.arrival_ns for one in found)
    print_table(
        f"Load {load:g}: {len(late)} late batches, the first {MOST_LATE} at most",
        ["at ms", "service", "rows", *HOPS],
        [
            [
                f"{(one.arrival_ns - begin_ns) / 1e6:.0f}",
                one.service,
                str(one.rows),
                *(f"{ns / 1e3:.0f}" for ns in one.each_ns),
            ]
            for one in late[:MOST_LATE]
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("mix", choices=MIXES)
    parser.add_argument("--way", choices=WAYS, default="eclip")
    parser.add_argument("--device", default="sim")
    parser.add_argument("--bound", type=float, default=5.0, help="times the latency at rest")
    parser.add_argument("--loads", default="0.67,0.8,0.9,1,1.3")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load")
    given = parser.parse_args()
    services = services_of(given.mix, given.bound)
    bounds_ms = {service.name: service.bound_ms for service in services}
    notes = Notes()
    with (
        mock.patch.object(OpenService, "take", lambda *asked: notes.take(*asked)),
        started(services, given.way, given.device) as (driver, _),
    ):
        front = Front(driver, services)
        front.run(WARM_LOAD, WARM_S)
        for load in map(float, given.loads.split(",")):
            time.sleep(PAUSE_S)
            notes.hops.clear()
            run = front.run(load, given.seconds)
            print(
                f"load {load:g}: {run['requests']} requests, {run['attained']:.2%} in time, "
                f"the generator late by {run['generator_late_ms']:.2f} ms (p99)",
                flush=True,
            )
            print_load(load, notes.hops, bounds_ms)


if __name__ == "__main__":
    main()
