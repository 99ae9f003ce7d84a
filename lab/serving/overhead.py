"""What a server adds to a model: a whole `eclip serve` on the simulated device, asked by clients.

    PYTHONPATH=src python lab/serving/overhead.py [--requests N] [--beside CHECKOUT]

One connection, one request at a time: the time from a request's last byte read to its answer, less
the model's (by the server's own statistics, asked after every request), and the round trip less the
model's, for a socket and for Triton's clients. Then as many requests as the server takes, with one
front and with two: requests a second, and the CPU time that each part has for a request. What a
front could take on a core of its own follows from its CPU time; requests a second follow from it
only where client, fronts and device process have a core each.

``--beside``: instead, this checkout's server and another's are asked in turns, so that whatever
else the machine does disturbs both alike. Medians over the turns.
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

from lab.support.add_clients import ADD, Requests, answer_up_to, infer_bytes
from lab.support.processes import cpu_ns, cpu_s
from lab.support.served import ServeProcess
from lab.support.tables import print_table

CONFIG = """
[server]
http_port = 0
grpc_port = 0
fronts = {fronts}
grace_seconds = 0
replan = false
"""
WARM_UP = 50
TURNS = 20
CLIENTS = ("a socket, HTTP", "tritonclient, HTTP", "tritonclient, gRPC")


class Statistics:
    """The sums of the server, asked over a connection of its own."""

    def __init__(self, address: str, model: str = "add") -> None:
        self._connection = HTTPConnection(address)
        self._path = f"/v2/models/{model}/stats"

    def sums_ns(self) -> tuple[int, int]:
        """Of all requests so far: from the last byte to the answer, and of that the model's."""
        self._connection.request("GET", self._path)
        (found,) = json.loads(self._connection.getresponse().read())["model_stats"]
        stats = found["inference_stats"]
        return stats["success"]["ns"], stats["compute_infer"]["ns"]

    def close(self) -> None:
        self._connection.close()


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


def sample(
    ask: Callable[[], None], statistics: Statistics, count: int
) -> tuple[list[int], list[int], list[int]]:
    """Of every request, in ns: what the server adds by its own count, and what the client sees of
    it; and the model."""
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
    return inside, seen, model


def measure(ask: Callable[[], None], statistics: Statistics, count: int) -> list[str]:
    """In µs at p50 and p99: what ``sample`` finds."""
    for _ in range(WARM_UP):
        ask()
    inside, seen, model = sample(ask, statistics, count)
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


class Side:
    """A server that takes its turns."""

    def __init__(self, server: ServeProcess) -> None:
        self.clients = clients_of(server)
        self._front = server.parts()["front 1"]
        self._statistics = Statistics(server.http)
        self._found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CLIENTS}
        for name in CLIENTS:
            measure(self.clients[name], self._statistics, WARM_UP)

    def take_turn(self, client: str, count: int) -> None:
        ask = self.clients[client]
        begin_ns = cpu_ns(self._front)
        for _ in range(count):
            ask()
        front_ns = (cpu_ns(self._front) - begin_ns) / count
        inside, seen, _ = sample(ask, self._statistics, count)
        self._found[client].append((front_ns, float(np.median(inside)), float(np.median(seen))))

    def row(self, client: str) -> list[str]:
        return [f"{found / 1e3:.0f}" for found in np.median(self._found[client], axis=0)]


def compare(folder: Path, other: Path, count: int) -> list[list[str]]:
    """Median of the turns in µs, here and there: CPU time of the front, what the server adds, and
    what the client sees of it."""
    file = folder / "models.toml"
    file.write_text(CONFIG.format(fronts=1) + ADD)
    there = {"PYTHONPATH": str(other.resolve() / "src")}
    with (
        ServeProcess(file, folder / "here") as first,
        ServeProcess(file, folder / "there", there) as second,
    ):
        sides = {"this checkout": Side(first), "the other": Side(second)}
        for turn in range(TURNS):
            for client in CLIENTS:
                for name in sorted(sides, reverse=bool(turn % 2)):
                    sides[name].take_turn(client, max(count // TURNS, 1))
        first.stop()
        second.stop()
    return [
        [f"{client}, {name}", *side.row(client)]
        for client in CLIENTS
        for name, side in sides.items()
    ]


def clients_of(server: ServeProcess) -> dict[str, Callable[[], None]]:
    asks = (
        ask_by_socket(server.http),
        ask_by_triton(tritonclient.http, server.http),
        ask_by_triton(tritonclient.grpc, server.grpc),
    )
    return dict(zip(CLIENTS, asks, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--beside", type=Path, help="another checkout, to be asked in turns")
    arguments = parser.parse_args()
    if arguments.beside is None:
        measure_here(arguments.requests)
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = compare(Path(folder), arguments.beside, arguments.requests)
        columns = ["client, server", "front's CPU µs", "inside p50 µs", "round trip p50 µs"]
        print_table(f"In {TURNS} turns, the model's time taken off", columns, rows)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def measure_here(count: int) -> None:
    alone: list[list[str]] = []
    full: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for fronts in (1, 2):
            file = Path(folder) / f"models{fronts}.toml"
            file.write_text(CONFIG.format(fronts=fronts) + ADD)
            with ServeProcess(file, Path(folder) / "log") as server:
                if fronts == 1:
                    statistics = Statistics(server.http)
                    for name, ask in clients_of(server).items():
                        alone.append([name, *measure(ask, statistics, count)])
                full.append([str(fronts), *measure_full(server, 10 * count)])
                server.stop()
    columns = ["client", "inside p50 µs", "p99", "round trip p50 µs", "p99", "the model µs"]
    print_table("One connection, the model's time taken off", columns, alone)
    columns = ["fronts", "requests/s", "front's CPU µs", "fronts could take/s", "device's CPU µs"]
    print_table("As many requests as it takes, HTTP and gRPC", columns, full)


if __name__ == "__main__":
    main()
