"""One service makes trouble, in simulated time: do the others notice?

    PYTHONPATH=.:src:tests/support python3 lab/serving/modelled_trouble.py
        [--seeds 200-203] [--load 0.8] [--bound 5] [--seconds 1]

The first service of a random mix is three times slower than its profile says, asks five times its
rate all the time, or asks ten times its rate for the first 100 ms of each second. The table has the
share in time of the others: the worst of them, under eclip and plain streams, with and without the
trouble. Everything is modelled, on the machines of lab/support/machines.py.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.serving.modelled_pairs import WAYS, numbers
from lab.support.machines import MACHINES, Machine
from lab.support.offered import Service, arrivals_of, random_services
from lab.support.tables import print_table
from lab.support.virtual import VirtualServer

from served_core import config_of

Arrivals = list[tuple[float, Service]]
NONE, SLOWER, OVERLOAD, BURSTS = "none", "three times slower", "five times its rate", "bursts"
KINDS = (NONE, SLOWER, OVERLOAD, BURSTS)


def more(services: list[Service], load: float, seconds: float, kind: str) -> Arrivals:
    """The usual arrivals, and what the first service asks besides."""
    arrivals = arrivals_of(services, load, seconds)
    times = {OVERLOAD: 4.0, BURSTS: 9.0}.get(kind, 0.0)
    if not times:
        return arrivals
    service = services[0]
    random, at_s = np.random.default_rng(99), 0.0
    while (at_s := at_s + random.exponential(1 / (times * service.rate_rps(load)))) < seconds:
        if kind == OVERLOAD or at_s % 1.0 < 0.1:
            arrivals.append((at_s, service))
    return sorted(arrivals, key=lambda pair: pair[0])


def others(
    services: list[Service], way: str, machine: Machine, load: float, seconds: float, kind: str
) -> dict[str, float]:
    """Their shares in time."""
    of_server, of_services = WAYS[way]
    settings = [one.settings() | of_services for one in services]
    slower = {services[0].name: 3.0} if kind == SLOWER else {}
    config = config_of(*settings, device="sim", **of_server)
    with VirtualServer(config, machine, slower) as served:
        arrivals = more(services, load, seconds, kind)
        shares: dict[str, float] = served.run(services, load, seconds, arrivals)["services"]
    return {name: share for name, share in shares.items() if name != services[0].name}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=numbers, default=numbers("200-203"))
    parser.add_argument("--machines", type=numbers, default=numbers("0-3"))
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--bound", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=1.0)
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")  # which profile is wrong is said there
    lines = []
    for kind in KINDS:
        for machine in [MACHINES[place] for place in given.machines]:
            worst = dict.fromkeys(WAYS, 1.0)
            least = 1.0
            for seed in given.seeds:
                services = random_services(seed, given.bound)
                ours, theirs = (
                    others(services, way, machine, given.load, given.seconds, kind) for way in WAYS
                )
                for way, shares in (("eclip", ours), ("streams", theirs)):
                    worst[way] = min(worst[way], *shares.values())
                least = min(least, *(ours[name] - theirs[name] for name in ours))
            cells = [f"{100 * worst[way]:.1f}%" for way in WAYS]
            lines.append([kind, machine.name, *cells, f"{100 * least:+.1f}"])
            print(*lines[-1], flush=True)
    title = f"The others' worst share in time, load {given.load:g}, bounds {given.bound:g} times"
    print_table(title, ["trouble", "machine", *WAYS, "least difference, points"], lines)


if __name__ == "__main__":
    main()
