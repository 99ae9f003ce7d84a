"""What a server's two protocols cost: a core that gives inputs back at once, Triton's own clients.

    PYTHONPATH=src python lab/front.py [--requests N]

One connection, one request at a time: the round trip that a client sees, and the time of the
server's process for a request, with few models and with a thousand. Then 64 connections in an open
loop at 500 requests a second. Last, an empty server of grpc.aio: what no front on it can go below.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc
import tritonclient.http
import tritonclient.http.aio

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from lab.support import echo
from lab.support.processes import cpu_s
from lab.support.tables import print_table

from numpy_server import NumpyServer

SHAPES = {"identity_fp32": (1, 16), "image": (1, 3, 224, 224)}
CONNECTIONS, RATE_RPS = 64, 500
ECHO = Path(__file__).parent / "support" / "echo.py"


def percentile_us(times_s: list[float], percent: float) -> str:
    return f"{np.percentile(times_s, percent) * 1e6:.0f}"


def ask_in_turn(
    server: NumpyServer, module: ModuleType, address: str, model: str, count: int
) -> list[str]:
    """p50 and p99 of the round trip, and time of the server's process, in µs."""
    given = module.InferInput("IN", SHAPES[model], "FP32")
    given.set_data_from_numpy(np.ones(SHAPES[model], np.float32))
    outputs = [module.InferRequestedOutput("OUT")]
    with module.InferenceServerClient(address) as client:
        ask = functools.partial(client.infer, model, [given], outputs=outputs)
        return _in_turn(ask, server.pid, count)


def _in_turn(ask: Callable[[], object], pid: int, count: int) -> list[str]:
    for _ in range(50):
        ask()
    times_s = []
    before_s = cpu_s(pid)
    for _ in range(count):
        begin_s = time.perf_counter()
        ask()
        times_s.append(time.perf_counter() - begin_s)
    used_s = cpu_s(pid) - before_s
    return [
        percentile_us(times_s, 50),
        percentile_us(times_s, 99),
        f"{used_s / count * 1e6:.0f}",
    ]


async def ask_in_open_loop(server: NumpyServer, count: int) -> list[str]:
    """p50, p99 and time of the server's process, in µs, counted from when a request was due."""
    module = tritonclient.http.aio
    given = module.InferInput("IN", (1, 16), "FP32")
    given.set_data_from_numpy(np.ones((1, 16), np.float32))
    outputs = [module.InferRequestedOutput("OUT")]
    due_s = np.cumsum(np.random.default_rng(1).exponential(1 / RATE_RPS, count))
    async with module.InferenceServerClient(server.http, conn_limit=CONNECTIONS) as client:
        times_s: list[float] = []
        begin_s = time.perf_counter()

        async def ask(at_s: float) -> None:
            # aiohttp asks for gzip unless it is told what to ask for
            headers = {"Accept-Encoding": "identity"}
            await client.infer("identity_fp32", [given], outputs=outputs, headers=headers)
            times_s.append(time.perf_counter() - begin_s - at_s)

        before_s = cpu_s(server.pid)
        tasks = []
        for at_s in due_s:
            await asyncio.sleep(max(0.0, begin_s + at_s - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(at_s)))
        await asyncio.gather(*tasks)
        used_s = cpu_s(server.pid) - before_s
    return [
        percentile_us(times_s, 50),
        percentile_us(times_s, 99),
        f"{used_s / count * 1e6:.0f}",
    ]


def ask_echo(count: int) -> list[str]:
    """The same of a server that only gives bytes back."""
    process = subprocess.Popen([sys.executable, ECHO], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        with grpc.insecure_channel(f"127.0.0.1:{process.stdout.readline().strip()}") as channel:
            call: Any = channel.unary_unary(f"/{echo.SERVICE}/{echo.METHOD}")
            return _in_turn(lambda: call(bytes(100)), process.pid, count)
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    count = parser.parse_args().requests
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for idle_models in (0, 1000):
            server = NumpyServer(Path(folder) / "log", idle_models)
            for module, name, address in (
                (tritonclient.http, "HTTP", server.http),
                (tritonclient.grpc, "gRPC", server.grpc),
            ):
                for model, shape in SHAPES.items():
                    figures = ask_in_turn(server, module, address, model, count)
                    rows.append([f"{name}, FP32 {shape}, {idle_models} idle models", *figures])
            if idle_models == 0:
                figures = asyncio.run(ask_in_open_loop(server, count))
                rows.append(
                    [f"HTTP, {CONNECTIONS} connections, {RATE_RPS} requests/s, open loop", *figures]
                )
            server.stop()
    rows.append(["gRPC, an empty server that gives 100 bytes back", *ask_echo(count)])
    columns = ["what", "p50 µs", "p99 µs", "server's CPU µs"]
    print_table("Front with a core that gives inputs back at once", columns, rows)


if __name__ == "__main__":
    main()
