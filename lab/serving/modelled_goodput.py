"""Goodput of a server in simulated time: what its own decisions are worth, without a GPU.

    PYTHONPATH=.:src:tests/support python3 lab/serving/modelled_goodput.py
        [--mixes three,four,five,six] [--random 8] [--bounds 5,3,10] [--seconds 2] [--machine even]

As lab/serving/goodput.py, with a simulated GPU, and with a clock that jumps from event to event:
batches, instances, admission and plans are the server's own. The same command gives the same
table, wherever it runs. Everything is modelled. --machine is what is simulated
(lab/support/machines.py), by its place there, near, or even.

eclip: the server as it plans by itself. streams: plain streams, one instance a model, as servers
have it unless told otherwise. in turn: one service after another, the one with less slack first,
and one instance a model, as eclip's servers ran before 2026-11-18. Without background work eclip's
plan is plain streams, too: instances and turns make the difference.

Random mixes have 2 to 6 of all models, buckets 1 and 8 or 1, 8 and 32, and shares of the load that
differ by up to 4 times. Random 1 and 4 were looked at while the rules were made. To try a change,
take other seeds than these.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.knee import WANTED, find_knee
from lab.support.machines import EVEN, MACHINES, NEAR, Machine
from lab.support.offered import MIXES, Service, random_services, services_of
from lab.support.tables import print_table
from lab.support.virtual import VirtualServer

from served_core import config_of

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of server and services
    "eclip": ({}, {}),
    "streams": ({"policy": "shared"}, {"instances": 1}),
    "in turn": ({"policy": "yield"}, {"instances": 1}),
}

_BY_NAME = {"even": EVEN, "near": NEAR} | {str(place): one for place, one in enumerate(MACHINES)}


def goodput(services: Sequence[Service], way: str, seconds: float, machine: Machine) -> float:
    of_server, of_services = WAYS[way]
    settings = [one.settings() | of_services for one in services]
    with VirtualServer(config_of(*settings, device="sim", **of_server), machine) as served:
        return find_knee(lambda load: float(served.run(services, load, seconds)["attained"]), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--random", type=int, default=8, help="so many random mixes besides")
    parser.add_argument("--first", type=int, default=0, help="seed of the random mixes")
    parser.add_argument("--machine", choices=_BY_NAME, default="even")
    parser.add_argument("--bounds", default="5,3,10")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seconds", type=float, default=2.0, help="of load, for each load")
    given = parser.parse_args()
    ways, machine = given.ways.split(","), _BY_NAME[given.machine]
    if unknown := {*ways} - {*WAYS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    mixes: dict[str, Callable[[float], list[Service]]] = {
        mix: lambda times, mix=mix: services_of(mix, times)  # type: ignore[misc]
        for mix in filter(None, given.mixes.split(","))
    }
    for seed in range(given.first, given.first + given.random):
        mixes[f"random {seed}"] = lambda times, seed=seed: random_services(seed, times)  # type: ignore[misc]
    for times in map(float, given.bounds.split(",")):
        lines, ratios = [], []
        for mix, make in mixes.items():
            services = make(times)
            found = {way: goodput(services, way, given.seconds, machine) for way in ways}
            ratio = found["eclip"] / found["streams"] if {"eclip", "streams"} <= {*ways} else 0.0
            ratios.append(ratio)
            names = ", ".join(f"{one.name} {'/'.join(map(str, one.batches))}" for one in services)
            cells = [f"{found[way]:.2f}" for way in ways]
            lines.append([mix, names, *cells, f"{ratio:.2f}"])
            print(*lines[-1], flush=True)
        title = (
            f"Load at which {WANTED:.0%} keep bounds of {times:g} times at rest ({machine.name})"
        )
        print_table(title, ["mix", "services", *ways, "eclip ÷ streams"], lines)
        print(f"eclip ÷ streams: mean {statistics.fmean(ratios):.2f}, least {min(ratios):.2f}")


if __name__ == "__main__":
    main()
