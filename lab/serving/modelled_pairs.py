"""A server against plain streams on the same arrivals, in simulated time, on four machines.

    PYTHONPATH=.:src:tests/support python3 lab/serving/modelled_pairs.py
        [--seeds 200-211] [--loads 0.2,0.6,1.0,1.4,2.0] [--bound 5] [--seconds 1] [--machines 0-3]

A cell is a service of a random mix at a load on a machine (lab/support/machines.py): its share of
requests in time under eclip, minus that under plain streams (one instance a model, as servers have
it unless told otherwise). A request that is refused has missed its bound. Everything is modelled.

Seeds 100 to 111 are for making rules; 200 to 211 are for tables, and looked at only there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.machines import MACHINES, Machine
from lab.support.offered import Service, random_services
from lab.support.tables import print_table
from lab.support.virtual import VirtualServer

from served_core import config_of

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of server and services
    "eclip": ({}, {}),
    "streams": ({"policy": "shared"}, {"instances": 1}),
}
POINT, MOST = 0.01, 0.03  # that a share may be lower: nearly always, and at most


def shares(
    services: list[Service], way: str, machine: Machine, loads: list[float], seconds: float
) -> dict[float, dict[str, float]]:
    of_server, of_services = WAYS[way]
    settings = [one.settings() | of_services for one in services]
    with VirtualServer(config_of(*settings, device="sim", **of_server), machine) as served:
        return {load: served.run(services, load, seconds)["services"] for load in loads}


def numbers(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return [*range(int(first), int(last or first) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=numbers, default=numbers("200-211"))
    parser.add_argument("--loads", default="0.2,0.6,1.0,1.4,2.0")
    parser.add_argument("--bound", type=float, default=5.0, help="times the time at rest")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--machines", type=numbers, default=numbers("0-3"))
    parser.add_argument("--worst", type=int, default=12, help="cells to print")
    given = parser.parse_args()
    loads = [float(load) for load in given.loads.split(",")]
    cells: list[tuple[float, str]] = []
    lines = []
    for machine in [MACHINES[place] for place in given.machines]:
        of_machine: dict[float, list[float]] = {load: [] for load in loads}
        for seed in given.seeds:
            services = random_services(seed, given.bound)
            ours, theirs = (shares(services, way, machine, loads, given.seconds) for way in WAYS)
            for load in loads:
                for name, share in ours[load].items():
                    gain = share - theirs[load][name]
                    of_machine[load].append(gain)
                    where = f"{machine.name}, random {seed}, load {load:g}, {name}"
                    cells.append((gain, f"{where}: {share:.3f} and {theirs[load][name]:.3f}"))
        for load, gains in of_machine.items():
            within = sum(gain >= -POINT for gain in gains) / len(gains)
            mean = sum(gains) / len(gains)
            row = [f"{100 * within:.1f}%", f"{100 * mean:+.2f}", f"{100 * min(gains):+.2f}"]
            lines.append([machine.name, f"{load:g}", *row])
            print(*lines[-1], flush=True)
    title = f"Share in time against plain streams, bounds {given.bound:g} times, points"
    print_table(title, ["machine", "load", "cells within a point", "mean", "least"], lines)
    within = sum(gain >= -POINT for gain, _ in cells) / len(cells)
    beyond = sum(gain < -MOST for gain, _ in cells)
    print(f"{len(cells)} cells: within a point {within:.2%}, worse than three points {beyond}")
    for gain, where in sorted(cells)[: given.worst]:
        print(f"{100 * gain:+.1f} {where}")


if __name__ == "__main__":
    main()
