"""A server, three clients and its live page, for 20 seconds and without a GPU."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import eclip

SECONDS = 20.0


def tensor(name: str, datatype: str, data: list[Any], rows: int = 1) -> dict[str, Any]:
    shape = [rows, len(data) // rows]
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


REQUESTS = {  # of every client: what it asks, and the pause between two
    "digits": ([tensor("image", "FP32", [0.5] * 64)], 0.01),
    "add": ([tensor("a", "INT32", [1, 2, 3, 4]), tensor("b", "INT32", [4, 3, 2, 1])], 0.02),
    "shout": ([tensor("text", "BYTES", ["hello"] * 8, rows=8)], 0.0),
}


def ask(name: str, url: str, until: float, latencies: list[float]) -> None:
    inputs, pause_s = REQUESTS[name]
    body = json.dumps({"inputs": inputs})
    host, _, port = url.removeprefix("http://").partition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        while time.monotonic() < until:
            begin = time.monotonic()
            connection.request("POST", f"/v2/models/{name}/infer", body)
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                latencies.append(1000 * (time.monotonic() - begin))
            time.sleep(pause_s)


def main() -> None:
    config = tomllib.loads(Path(__file__).with_name("models.toml").read_text())
    print("Starting: planning, then opening the simulated device …", flush=True)
    with eclip.serve(config, http_port=0, grpc_port=0) as server:
        print(f"Live page: {server.url}   gRPC: {server.grpc}   for {SECONDS:.0f} s", flush=True)
        until = time.monotonic() + SECONDS
        latencies: dict[str, list[float]] = {name: [] for name in REQUESTS}
        clients = [
            threading.Thread(target=ask, args=(name, server.url, until, latencies[name]))
            for name in REQUESTS
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    for name, times in latencies.items():
        times.sort()
        p50, p99 = times[len(times) // 2], times[int(0.99 * (len(times) - 1))]
        print(f"{name:8} {len(times):6} answers   p50 {p50:7.2f} ms   p99 {p99:7.2f} ms")


if __name__ == "__main__":
    main()
