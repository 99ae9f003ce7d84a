"""Goodput of a server: the largest load at which 99% of the requests are answered in their bounds.

    PYTHONPATH=.:src:tests/support:.gpu-deps python3 lab/serving/goodput.py FOLDER --device cuda
        [--mixes three,four,five,six] [--bounds 5,3,10]
        [--ways eclip,streams,instances,priorities,mps,beside] [--minutes 9]

Services of a mix get Poisson arrivals. At load 1 all of them together ask for the device's whole
time at batch 1, each for an equal part. All ways have the same arrivals. The load goes in steps
until one is served and one is not, and is then halved towards 99%. The first load is what was found
for the mix before. A request that is refused has missed its bound. The bench itself is the front,
so protocols are not measured. A load that is missed while the generator itself was late is measured
once more.

eclip: a server as it plans by itself. streams, priorities: the same server with another policy, and
one instance a model, as servers have it unless told otherwise. instances: plain streams with
eclip's instances. mps: a server with plain streams for every model, all under one MPS daemon; on a
simulator there is none, and the way is left out.
beside, at bound 5: eclip at 60% of its goodput, with background work beside its services.

A way takes about 40 s, and begins only if it should end in time. Its row is in FOLDER as soon as it
is done, and is not measured again; a way that failed has a row with an error, and is tried again by
the next call.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.beside import ATTACHMENTS, SETTINGS, BackgroundFront, busy_share_during
from lab.support.goodput_tables import (
    generator_was_late,
    print_beside,
    print_goodput,
    title_of,
)
from lab.support.kept import Row, add_rows, read_rows
from lab.support.knee import WANTED, find_knee
from lab.support.mps import client_pids, gpu_uuid, under_mps
from lab.support.offered import MIXES, Front, Service, services_of

from eclip.server.config import ServingConfig
from served_core import Driver, config_of

MPS, BESIDE = "mps", "beside"
_ONE = {"instances": 1}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of server and services
    "eclip": ({"replan": True, "replan_seconds": 5.0}, {}),
    "streams": ({"policy": "shared"}, _ONE),
    "instances": ({"policy": "shared"}, {}),
    "priorities": ({"policy": "priority"}, _ONE),
    MPS: ({"policy": "shared"}, _ONE),
}
FIRST_LOAD = 1.0  # where nothing is known yet
BESIDE_BOUND, BESIDE_PART = 5.0, 0.6
BESIDE_TIMES = 2  # as long as a load of a sweep: there is one load only
SETTLE_S = 0.5
WARM_LOAD, WARM_S = 0.5, 2.5
TRIES = 2  # of a load that is missed while the generator itself was late
USUAL_S = 45.0  # of a way, until one is measured
START_S = 150.0  # of servers, at most; two models took 34 s on an H200 beside other tests


def measure(mix: str, times: float, way: str, *, device: str, seconds: float, first: float) -> Row:
    services = services_of(mix, times)
    begin_s = time.monotonic()
    bounds_ms = {service.name: service.bound_ms for service in services}
    runs: list[Row] = []
    with started(services, way, device) as (driver, about):
        front = Front(driver, services)
        rest_ms = front.rest_ms()
        front.run(WARM_LOAD, WARM_S)  # meanwhile the server starts a spare process
        ready_s = time.monotonic()

        def attain(load: float) -> float:
            for _ in range(TRIES):
                time.sleep(SETTLE_S)
                run = front.run(load, seconds)
                runs.append(run)
                print(json.dumps(run), flush=True)
                if run["attained"] >= WANTED or not generator_was_late(run, bounds_ms):
                    break
            return float(run["attained"])

        goodput = find_knee(attain, first)
        sweep_s = time.monotonic() - ready_s
        plans = driver.served.supervisor.services.deployed.generation
    return about | {
        "goodput": goodput,
        "bounds_ms": bounds_ms,
        "rest_ms": rest_ms,
        "plans": plans,  # more than one: rates had drifted, and the server planned again
        "start_s": ready_s - begin_s,
        "sweep_s": sweep_s,
        "runs": runs,
    }


@contextlib.contextmanager
def started(services: Sequence[Service], way: str, device: str) -> Iterator[tuple[Driver, Row]]:
    """The servers of a way, and what is to be said of them."""
    configs = configs_of(services, way, device)
    if way != MPS:
        with Driver(*configs, patience_s=START_S) as driver:
            yield driver, {}
        return
    with under_mps(gpu_uuid()) as daemon, Driver(*configs, patience_s=START_S) as driver:
        clients = client_pids(daemon)
        reached = sum(served.device_pid in clients for served in driver.servers)
        yield driver, {"servers": len(driver.servers), "mps_clients": reached}


def configs_of(services: Sequence[Service], way: str, device: str) -> list[ServingConfig]:
    """One server for all services, or one for each."""
    of_server, of_services = WAYS[way]
    groups = [[service] for service in services] if way == MPS else [services]
    return [
        config_of(*(one.settings() | of_services for one in group), device=device, **of_server)
        for group in groups
    ]


def measure_beside(mix: str, times: float, *, device: str, seconds: float, goodput: float) -> Row:
    """Background alone, services alone, and both, at one server. Its plan is that of its start:
    background yields to services."""
    if not goodput:
        raise RuntimeError("eclip has no goodput to take a part of")
    services = services_of(mix, times)
    load, seconds = BESIDE_PART * goodput, BESIDE_TIMES * seconds
    settings = [service.settings() for service in services]
    config = config_of(*settings, SETTINGS, device=device, fronts=ATTACHMENTS)
    begin_s = time.monotonic()
    with Driver(config, patience_s=START_S) as driver, BackgroundFront(driver) as background:
        front = Front(driver, services)
        front.run(load, SETTLE_S)  # warm
        ready_s = time.monotonic()
        alone_rps, _ = background.rate_during(lambda: time.sleep(seconds))
        busy_share, alone = busy_share_during(driver, lambda: front.run(load, seconds))
        beside_rps, beside = background.rate_during(lambda: front.run(load, seconds))
        ended_s = time.monotonic()
    return beside | {
        "attained_alone": alone["attained"],
        "busy_share": busy_share,
        "alone_rps": alone_rps,
        "beside_rps": beside_rps,
        "start_s": ready_s - begin_s,
        "sweep_s": ended_s - ready_s,
    }


class Results:
    """Rows in a file: one for every key, as soon as it is there. Nothing begins that should end
    after ``until_s``, of time.monotonic()."""

    def __init__(self, path: Path, until_s: float = math.inf) -> None:
        self._path, self._until_s = path, until_s
        self._rows = read_rows(path)

    @property
    def rows(self) -> list[Row]:
        """The last one of every key; one that failed may have been tried again."""
        return list({json.dumps(row["key"]): row for row in self._rows}.values())

    @property
    def measured(self) -> list[Row]:
        return [row for row in self.rows if "error" not in row]

    @property
    def expected_s(self) -> float:
        """The longest that one took so far."""
        return max((row["start_s"] + row["sweep_s"] for row in self.measured), default=USUAL_S)

    def find(self, **key: Any) -> Row | None:
        return next((row for row in self.measured if row["key"] == key), None)

    def attempt(self, find: Callable[[], Row], **key: Any) -> None:
        """Measure what is not there yet. Whatever goes wrong, the next one may work."""
        if self.find(**key) is not None:
            return
        begin_s = time.monotonic()
        if begin_s + self.expected_s > self._until_s:
            print(
                f"{title_of(key)}: left out, {self._until_s - begin_s:.0f} s are left", flush=True
            )
            return
        print(f"{title_of(key)} …", flush=True)
        row: Row = {"key": key}
        try:
            row |= find()
            line = f"start {row['start_s']:.1f} s, loads {row['sweep_s']:.1f} s"
        except Exception as error:
            row["error"] = line = f"{type(error).__name__}: {error}"
        self._rows.append(row)
        add_rows(self._path, [row])
        print(f"{title_of(key)}: {time.monotonic() - begin_s:.1f} s in all, {line}", flush=True)


def first_load(rows: Sequence[Row], mix: str, times: float) -> float:
    """Where to begin: what was found for the mix last, at this bound if there is one."""
    known = [row for row in rows if row["key"]["mix"] == mix and row["goodput"] > 0]
    known.sort(key=lambda row: row["key"]["bound"] == times)
    return float(known[-1]["goodput"]) if known else FIRST_LOAD


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="sim")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--bounds", default="5,3,10")
    parser.add_argument("--ways", default=",".join([*WAYS, BESIDE]))
    parser.add_argument("--seconds", type=float, default=2.5, help="of load, for each load")
    parser.add_argument("--minutes", type=float, default=math.inf)
    given = parser.parse_args()
    mixes, ways = given.mixes.split(","), given.ways.split(",")
    if unknown := {*mixes, *ways} - {*MIXES, *WAYS, BESIDE}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    given.folder.mkdir(parents=True, exist_ok=True)
    run(
        given.folder,
        device=given.device,
        mixes=mixes,
        bounds=[float(times) for times in given.bounds.split(",")],
        ways=ways,
        seconds=given.seconds,
        until_s=time.monotonic() + 60 * given.minutes,
    )


def run(
    folder: Path,
    *,
    device: str,
    mixes: Sequence[str],
    bounds: Sequence[float],
    ways: Sequence[str],
    seconds: float,
    until_s: float = math.inf,
) -> None:
    found = Results(folder / f"goodput-{device}.jsonl", until_s)
    beside = Results(folder / f"beside-{device}.jsonl", until_s)
    if MPS in ways and device != "cuda":
        print(f"{MPS} is left out: it needs --device cuda", flush=True)
    sweeps = [way for way in WAYS if way in ways and (way != MPS or device == "cuda")]
    for times, mix in itertools.product(bounds, mixes):
        for way in sweeps:
            first = first_load(found.measured, mix, times)
            sweep = functools.partial(
                measure, mix, times, way, device=device, seconds=seconds, first=first
            )
            found.attempt(sweep, mix=mix, bound=times, way=way)
        if BESIDE in ways and times == BESIDE_BOUND:
            ours = found.find(mix=mix, bound=times, way="eclip")
            if ours is None:
                continue  # without its goodput there is nothing to take a part of
            both = functools.partial(
                measure_beside, mix, times, device=device, seconds=seconds, goodput=ours["goodput"]
            )
            beside.attempt(both, mix=mix, bound=times)
    print_goodput(found.rows, list(WAYS))
    if beside.rows:
        print_beside(beside.rows, BESIDE_PART)


if __name__ == "__main__":
    main()
