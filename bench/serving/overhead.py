"""What a server adds to a model: a whole `eclip serve` on the simulated device, asked by clients.

    PYTHONPATH=src python bench/serving/overhead.py [--requests N]

One connection, one request at a time: the time from a request's last byte read to its answer, less
the model's (by the server's own statistics, asked after every request), and the round trip less the
model's, for a socket and for Triton's clients. Then as many requests as the server takes, with one
front and with two: requests a second, and the CPU time that each part has for a request. What a
front could take on a core of its own follows from its CPU time; requests a second follow from it
only where client, fronts and device process have a core each. ``bench/front.py`` has the protocols
alone, with few and many models.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType

import numpy as np
import tritonclient.grpc
import tritonclient.http

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.support.add_clients import ADD, Requests, answer_up_to, infer_bytes
from bench.support.processes import cpu_s
from bench.support.served import ServeProcess
from bench.support.tables import print_table

CONFIG = """
[server]
http_port = 0
grpc_port = 0
fronts = {fronts}
grace_seconds = 0
replan = false
"""
WARM_UP = 50


class Statistics:
    """The sums of the server, asked over a connection of its own."""

    def __init__(self, address: str) -> None:
        self._connection = HTTPConnection(address)

    def sums_ns(self) -> tuple[int, int]:
        """Of all requests so far: from the last byte to the answer, and of that the model's."""
        self._connection.request("GET", "/v2/models/add/stats")
        (found,) = json.loads(self._connection.getresponse().read())["model_stats"]
        stats = found["inference_stats"]
        return stats["success"]["ns"], stats["compute_infer"]["ns"]


def ask_by_socket(address: str) -> Callable[[], None]:
    host, _, port = address.partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask() -> None:
        connection.sendall(infer_bytes(1))
        answer = b""
        while b'"data":[2,0,2,2]' not in answer.replace(b" ", b""):  # which is near its end
            if not (piece := connection.recv(65536)):
                raise RuntimeError(f"the answer is wrong: {answer!r}")
            answer += piece

    return ask


def ask_by_triton(module: ModuleType, address: str) -> Callable[[], None]:
    client = module.InferenceServerClient(address)
    inputs = [module.InferInput(name, (1, 4), "INT32") for name in "ab"]
    for given in inputs:
        given.set_data_from_numpy(np.ones((1, 4), np.int32))

    def ask() -> None:
        client.infer("add", inputs)

    return ask


def measure(ask: Callable[[], None], statistics: Statistics, count: int) -> list[str]:
    """In µs at p50 and p99: what the server adds by its own count, and what the client sees of it;
    and the model."""
    for _ in range(WARM_UP):
        ask()
    inside, seen, model = [], [], []
    before = statistics.sums_ns()
    for _ in range(count):
        begin_ns = time.perf_counter_ns()
        ask()
        took_ns = time.perf_counter_ns() - begin_ns
        after = statistics.sums_ns()
        all_ns, model_ns = after[0] - before[0], after[1] - before[1]
        inside.append(all_ns - model_ns)
        seen.append(took_ns - model_ns)
        model.append(model_ns)
        before = after
    return [
        f"{np.percentile(times, share) / 1e3:.0f}"
        for times, shares in ((inside, (50, 99)), (seen, (50, 99)), (model, (50,)))
        for share in shares
    ]


def measure_full(server: ServeProcess, count: int) -> list[str]:
    """Requests a second, and the CPU time in µs of a front's and the device process's for each."""
    parts = server.parts()
    fronts = [pid for name, pid in parts.items() if name.startswith("front")]
    device = parts["device process 1"]
    asyncio.run(answer_up_to(server, Requests(), count // 10))
    requests = Requests()
    front_s, device_s = sum(map(cpu_s, fronts)), cpu_s(device)
    begin_s = time.perf_counter()
    asyncio.run(answer_up_to(server, requests, count))
    took_s = time.perf_counter() - begin_s
    front_us = 1e6 * (sum(map(cpu_s, fronts)) - front_s) / requests.answered
    device_us = 1e6 * (cpu_s(device) - device_s) / requests.answered
    return [
        f"{requests.answered / took_s:.0f}",
        f"{front_us:.0f}",
        f"{len(fronts) * 1e6 / front_us:.0f}",
        f"{device_us:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    count = parser.parse_args().requests
    alone: list[list[str]] = []
    full: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for fronts in (1, 2):
            file = Path(folder) / f"models{fronts}.toml"
            file.write_text(CONFIG.format(fronts=fronts) + ADD)
            with ServeProcess(file, Path(folder) / "log") as server:
                if fronts == 1:
                    statistics = Statistics(server.http)
                    for name, ask in (
                        ("a socket, HTTP", ask_by_socket(server.http)),
                        ("tritonclient, HTTP", ask_by_triton(tritonclient.http, server.http)),
                        ("tritonclient, gRPC", ask_by_triton(tritonclient.grpc, server.grpc)),
                    ):
                        alone.append([name, *measure(ask, statistics, count)])
                full.append([str(fronts), *measure_full(server, 10 * count)])
    columns = ["client", "inside p50 µs", "p99", "round trip p50 µs", "p99", "the model µs"]
    print_table("One connection, the model's time taken off", columns, alone)
    columns = ["fronts", "requests/s", "front's CPU µs", "fronts could take/s", "device's CPU µs"]
    print_table("As many requests as it takes, HTTP and gRPC", columns, full)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
