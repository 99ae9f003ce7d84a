"""What the way from a front to the device and back costs, with a device that is nearly free.

    PYTHONPATH=.:src:tests/support:tests/fakes python lab/serving/data_path.py [--requests N]
        [--rate RPS] [--beside CHECKOUT] [--turns N]

A model is one kernel of 20 µs on the stand-in driver (lab/support/standin_device.py), which needs
``make native-tests``. First the bench is the front: Poisson arrivals, p50 and p99 of *to the
device* (a batch is written to its launch) and *back* (its end to its answer in the front), and the
device process's CPU time for a request. Then one client asks a whole server over HTTP and gRPC, one
request at a time, with 100 bytes and with 300 KB: what the server adds to the model, by its own
statistics, what the client sees of it, and the front's CPU time for a request.

``--beside``: another checkout with this bench takes turns with this one; medians over the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import tritonclient.grpc
import tritonclient.http

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.serving.hops import HOPS, Notes
from lab.serving.overhead import Statistics, sample
from lab.support.processes import cpu_ns
from lab.support.standin_device import on_standin
from lab.support.tables import print_table

from eclip.server.front.open_service import OpenService
from eclip.server.supervisor.running import RunningServer
from served_core import Driver, config_of, request

ROOT = Path(__file__).parents[2]
SIZES = {"100 bytes": 25, "300 KB": 75_000}  # elements of four bytes
CLIENTS = {"HTTP": tritonclient.http, "gRPC": tritonclient.grpc}
MEASURED = HOPS[1], HOPS[3]
WARM_UP = 200

Found = dict[str, float]  # by what was measured, in µs


def service(name: str, elements: int) -> dict[str, Any]:
    return {
        "name": name.replace(" ", ""),
        "model": "alexnet",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [elements]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1]}],
        "batches": [1, 8],
        "instances": 2,
        "bound": "10s",
    }


def measure_hops(requests: int, rate: float) -> Found:
    """Of small requests, at a rate."""
    notes, elements = Notes(), SIZES["100 bytes"]
    config = config_of(service("small", elements))
    with (
        mock.patch.object(OpenService, "take", lambda *asked: notes.take(*asked)),
        on_standin(),
        Driver(config, patience_s=300.0) as driver,
    ):
        served, data = driver.served, {"x": np.zeros((1, elements), dtype=np.float32)}

        async def send(count: int) -> None:
            loop = asyncio.get_running_loop()
            gaps_s = np.random.default_rng(0).exponential(1 / rate, count)
            asked, due_s = [], loop.time()
            for gap_s in gaps_s:
                due_s += gap_s
                await asyncio.sleep(due_s - loop.time())
                asked.append(loop.create_task(served.core.infer(request("small", data))))
            await asyncio.gather(*asked)

        driver(send(WARM_UP))
        notes.hops.clear()
        before_ns = cpu_ns(served.device_pid)
        driver(send(requests), 60.0 + 10 * requests / rate)
        device_ns = cpu_ns(served.device_pid) - before_ns
    each = np.array([one.each_ns for one in notes.hops]) / 1e3
    found = {}
    for name in MEASURED:
        column = each[:, HOPS.index(name)]
        for share in (50, 99):
            found[f"{name}, p{share}"] = float(np.percentile(column, share))
    return found | {"the device process's CPU": device_ns / requests / 1e3}


def ask_by(module: ModuleType, client: Any, name: str, elements: int) -> Callable[[], None]:
    given = module.InferInput("x", (1, elements), "FP32")
    given.set_data_from_numpy(np.zeros((1, elements), np.float32))

    def ask() -> None:
        client.infer(name, [given])

    return ask


def measure_whole(requests: int) -> Found:
    """One request at a time."""
    found: Found = {}
    services = [service(name, elements) for name, elements in SIZES.items()]
    with on_standin(), RunningServer(config_of(*services)) as server:
        child = server._supervisor.fronts.attachments[0].child
        front = child.pid  # type: ignore[union-attr]
        http = server.url.partition("://")[2]
        for protocol, module in CLIENTS.items():
            address = http if protocol == "HTTP" else server.grpc
            for size, elements in SIZES.items():
                name = size.replace(" ", "")
                with (
                    contextlib.closing(module.InferenceServerClient(address)) as client,
                    contextlib.closing(Statistics(http, name)) as statistics,
                ):
                    ask = ask_by(module, client, name, elements)
                    for _ in range(WARM_UP):
                        ask()
                    before_ns = cpu_ns(front)
                    for _ in range(requests):
                        ask()
                    front_ns = (cpu_ns(front) - before_ns) / requests
                    inside, seen, _ = sample(ask, statistics, requests)
                title = f"{protocol}, {size}"
                found[f"{title}: inside, p50"] = float(np.median(inside)) / 1e3
                found[f"{title}: round trip, p50"] = float(np.median(seen)) / 1e3
                found[f"{title}: the front's CPU"] = front_ns / 1e3
    return found


def measure(requests: int, rate: float) -> Found:
    return measure_hops(requests, rate) | measure_whole(max(requests // 10, 1))


def measure_there(checkout: Path, requests: int, rate: float) -> Found:
    """In a process of its own, with the code of that checkout."""
    folders = (".", "src", "tests/support", "tests/fakes")
    path = os.pathsep.join(str(checkout / folder) for folder in folders)
    asked = ("--requests", str(requests), "--rate", str(rate), "--json")
    done = subprocess.run(
        [sys.executable, checkout / "lab/serving/data_path.py", *asked],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second")
    parser.add_argument("--beside", type=Path, help="another checkout, which takes turns")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one turn, for a program")
    given = parser.parse_args()
    if given.json:
        print(json.dumps(measure(given.requests, given.rate)))
        return
    sides = {"here": ROOT} | ({"beside": given.beside.resolve()} if given.beside else {})
    turns: dict[str, list[Found]] = {side: [] for side in sides}
    for turn in range(given.turns):
        for side in sorted(sides, reverse=bool(turn % 2)):
            turns[side].append(measure_there(sides[side], given.requests, given.rate))
    rows = []
    for name in turns["here"][0]:
        medians = [float(np.median([one[name] for one in turns[side]])) for side in sides]
        rows.append([name, *(f"{found:.0f}" for found in medians)])
    title = f"Medians of {given.turns} turns of {given.requests} requests, in µs"
    print_table(title, ["measured", *sides], rows)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
