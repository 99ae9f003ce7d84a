"""What the router of a fleet adds, on a local Ray with simulated GPUs.

    PYTHONPATH=src python lab/fleet_ray.py [--requests N]

The round trip through a router, near (shared memory) and far (TCP), against the same GPU asked
directly, and the routers' time on a CPU. What is lost when parts of a fleet die is held by
tests/e2e/test_fleet_on_ray.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import tritonclient.grpc
import tritonclient.http

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from lab.support.processes import cpu_s
from lab.support.tables import print_table

from eclip.fleet.ray import cluster
from running_fleet import fleet


def ask_in_turns(
    addresses: dict[str, tuple[ModuleType, str]], count: int, pid: int
) -> dict[str, tuple[float, float, float]]:
    """p50 and p10 of the round trip in ms, and ms of the process' time for a request. Addresses are
    asked in turns of 50, so that what else the machine does meets all alike; the p10 is that of
    requests that met little of it."""
    times: dict[str, list[float]] = {name: [] for name in addresses}
    used = dict.fromkeys(addresses, 0.0)
    clients = {
        name: (module, module.InferenceServerClient(address))
        for name, (module, address) in addresses.items()
    }
    for turn in range(count // 50 + 1):
        for name, (module, client) in clients.items():
            given = module.InferInput("number", (1, 1), "INT64")
            given.set_data_from_numpy(np.array([[1]]))
            before_s = cpu_s(pid)
            for _ in range(50):
                begin_s = time.perf_counter()
                client.infer("double", [given])
                if turn:
                    times[name].append(time.perf_counter() - begin_s)
            if turn:
                used[name] += cpu_s(pid) - before_s
    for _, client in clients.values():
        client.close()
    return {
        name: (
            1e3 * float(np.percentile(taken, 50)),
            1e3 * float(np.percentile(taken, 10)),
            1e3 * used[name] / len(taken),
        )
        for name, taken in times.items()
    }


def measure_latency(count: int) -> None:
    rows = []
    for near in (True, False):
        with fleet({"node-1": 1}, 1, near) as running:
            cluster.connect(running.settings)
            now = running.status()
            grpc = f"127.0.0.1:{running.grpc_port}"
            http = f"127.0.0.1:{running.http_port}"
            gpu = now.gpus[0].http
            controller = cluster.find_controller()
            assert controller is not None
            (place,) = cluster.ask(controller.table).places
            figures = ask_in_turns(
                {
                    "HTTP direct": (tritonclient.http, gpu),
                    "HTTP routed": (tritonclient.http, http),
                    "gRPC direct": (tritonclient.grpc, place.grpc),
                    "gRPC routed": (tritonclient.grpc, grpc),
                },
                count,
                now.routers[0].pid,
            )
            cluster.disconnect()
        how = "shared memory" if near else "TCP"
        for protocol in ("HTTP", "gRPC"):
            direct, routed = figures[f"{protocol} direct"], figures[f"{protocol} routed"]
            rows.append(
                [
                    f"{protocol}, {how}",
                    f"{direct[0]:.2f}",
                    f"{routed[0]:.2f}",
                    f"{routed[0] - direct[0]:+.2f}",
                    f"{direct[1]:.2f}",
                    f"{routed[1]:.2f}",
                    f"{routed[1] - direct[1]:+.2f}",
                    f"{routed[2]:.2f}",
                ]
            )
    columns = ["client, way to the GPU", "direct p50 ms", "routed", "added", "direct p10 ms",
               "routed", "added", "router's CPU ms"]  # fmt: skip
    print_table(f"Router, {count} requests in turn each", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    measure_latency(parser.parse_args().requests)


if __name__ == "__main__":
    main()
