"""A service whose requests are eager calls behind HTTP, or launches of a captured graph.

    python service.py eager|graph MODEL

``eager`` is an aiohttp server, and says its port. ``graph`` serves arrivals from a file in this
process: ``serve ARRIVALS OUT`` reads times in ns and writes every request's latency in ns.
"""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from aiohttp import web
from networks import example, network, outcome
from talk import orders, say, say_ready

WARM_UP = 10
AHEAD_NS = 50_000_000  # from the order to the first arrival


def serve_http(name: str) -> None:
    model, given = network(name).eval().half(), example(name, 1)
    stream, thread = torch.cuda.Stream(), ThreadPoolExecutor(1)
    dtype = torch.float16 if given.is_floating_point() else given.dtype

    def answer(body: bytes) -> bytes:
        inputs = torch.frombuffer(bytearray(body), dtype=dtype).reshape(given.shape)
        with torch.inference_mode(), torch.cuda.stream(stream):
            found = outcome(model(inputs.cuda(non_blocking=True)))
            stream.synchronize()
            made: bytes = found.float().cpu().numpy().tobytes()
            return made

    async def handle(request: web.Request) -> web.Response:
        body = await request.read()
        loop = asyncio.get_running_loop()
        return web.Response(body=await loop.run_in_executor(thread, answer, body))

    async def run() -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        body = given.to(dtype).cpu().numpy().tobytes()
        for _ in range(WARM_UP):
            answer(body)
        say_ready(port=runner.addresses[0][1], bytes=len(body))
        heard = orders()
        while await asyncio.get_running_loop().run_in_executor(None, heard.get) is not None:
            pass

    asyncio.run(run())


class Captured:
    def __init__(self, name: str) -> None:
        model, self.given = network(name).eval().half(), example(name, 1)
        if self.given.is_floating_point():
            self.given = self.given.half()
        self.sent = self.given.cpu().pin_memory()
        self.stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for _ in range(WARM_UP):
                model(self.given)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.found = outcome(model(self.given))
        self.got = torch.empty(self.found.shape, dtype=self.found.dtype).pin_memory()

    def request(self) -> None:
        with torch.cuda.stream(self.stream):
            self.given.copy_(self.sent, non_blocking=True)
            self.graph.replay()
            self.got.copy_(self.found, non_blocking=True)
            self.stream.synchronize()


def serve_graph(name: str) -> None:
    captured, heard = Captured(name), orders()
    for _ in range(WARM_UP):
        captured.request()
    say_ready()
    while (order := heard.get()) is not None:
        verb, *names = order
        if verb != "serve":
            raise SystemExit(f"a service does not know the order {verb}")
        arrivals = np.load(names[0])
        np.save(names[1], latencies(captured.request, arrivals))
        say(served=len(arrivals))


def latencies(request: Any, arrivals: Any) -> Any:
    """First come, first served; a late request's wait counts."""
    found = np.zeros(len(arrivals), dtype=np.int64)
    begin = time.perf_counter_ns() + AHEAD_NS
    for index, at in enumerate(arrivals.tolist()):
        due = begin + at
        while (left := due - time.perf_counter_ns()) > 0:
            if left > 2_000_000:
                time.sleep((left - 1_000_000) / 1e9)
        request()
        found[index] = time.perf_counter_ns() - due
    return found


if __name__ == "__main__":
    {"eager": serve_http, "graph": serve_graph}[sys.argv[1]](sys.argv[2])
