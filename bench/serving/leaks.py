"""Whether a server leaks: what each of its processes holds, before, during and after many requests.

    PYTHONPATH=src python bench/serving/leaks.py [--requests N] [--seconds S]

A server (`eclip serve`, two fronts, simulated device) answers as fast as it can, half over HTTP and
half over gRPC, with many requests in flight; every answer is checked. The table has three rows for
every process (private memory, file handles, threads) and a column for every look. The first look is
after a warm-up. Handles or threads that grow, or memory that grows by more than 16 MiB from the
first look to the last, make the exit code 1. After ``--seconds`` it stops, and says how far it
came. Plans stay as they are: a planner process that runs at a look would be counted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.support.processes import Held, children, held
from bench.support.served import ServeProcess
from bench.support.tables import print_table

from eclip.serving import inference_pb2 as pb

CONNECTIONS = 16  # of HTTP, each with a request in flight; and as many calls of gRPC
LOOKS = 6
WARM_UP = 0.05  # of all requests
MOST_KIB = 16 << 10
CONFIG = """
[server]
http_port = 0
grpc_port = 0
fronts = 2
grace_seconds = 0
replan = false

[[service]]
name = "add"
model = "numpy:eclip.serving.demo_models:add"
inputs = [
    { name = "a", datatype = "INT32", shape = [4] },
    { name = "b", datatype = "INT32", shape = [4] },
]
outputs = [{ name = "sum", datatype = "INT32", shape = [4] }]
batches = [1, 8, 32]
instances = 2
bound = "10s"
"""
PARTS = {"front_process": "front", "device_process": "device process"}


class Requests:
    """How many were answered, and whether more are wanted."""

    def __init__(self) -> None:
        self.answered = 0
        self.wanted = 0
        self.end_s = float("inf")

    def more(self) -> bool:
        return self.answered < self.wanted and time.monotonic() < self.end_s

    def check(self, right: bool) -> None:
        if not right:
            raise RuntimeError(f"answer {self.answered} is wrong")
        self.answered += 1


Ask = Callable[[int], Awaitable[bool]]


async def ask_in_turn(ask: Ask, first: int, requests: Requests) -> None:
    number = first
    while requests.more():
        number = (number + 1) % (1 << 20)
        requests.check(await ask(number))


async def over_http(address: str, first: int, requests: Requests) -> None:
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def ask(number: int) -> bool:
        values = f"{number},0,1,{number}"
        tensors = ",".join(
            f'{{"name":"{name}","datatype":"INT32","shape":[1,4],"data":[{values}]}}'
            for name in "ab"
        )
        body = f'{{"inputs":[{tensors}]}}'.encode()
        head = (
            f"POST /v2/models/add/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer_head = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(answer_head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        answer = await reader.readexactly(size)
        return f'"data":[{2 * number},0,2,{2 * number}]'.encode() in answer.replace(b" ", b"")

    try:
        await ask_in_turn(ask, first, requests)
    finally:
        writer.close()


async def over_grpc(channel: grpc.aio.Channel, first: int, requests: Requests) -> None:
    call: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

    async def ask(number: int) -> bool:
        values = np.array([number, 0, 1, number], np.int32)
        request = pb.ModelInferRequest(model_name="add", raw_input_contents=[values.tobytes()] * 2)
        for name in "ab":
            request.inputs.add(name=name, datatype="INT32", shape=[1, 4])
        answer = pb.ModelInferResponse.FromString(await call(request.SerializeToString()))
        return bool(answer.raw_output_contents[0] == (2 * values).tobytes())

    await ask_in_turn(ask, first, requests)


def parts_of(server: ServeProcess) -> dict[str, int]:
    """Its processes by name; a second device process is the spare."""
    found = {"server": server.process.pid}
    for pid, command in children(server.process.pid):
        for word, name in PARTS.items():
            if word in command:
                count = sum(one.startswith(name) for one in found)
                found[f"{name} {count + 1}"] = pid
    return found


async def answer_up_to(server: ServeProcess, requests: Requests, wanted: int) -> None:
    requests.wanted = wanted
    channels = [
        grpc.aio.insecure_channel(server.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(4)
    ]
    clients: list[Coroutine[Any, Any, None]] = []
    for number in range(CONNECTIONS):
        clients.append(over_http(server.http, 1000 * number, requests))
        clients.append(over_grpc(channels[number % 4], 1000 * number, requests))
    try:
        await asyncio.gather(*clients)
    finally:
        for channel in channels:
            await channel.close()


def run(count: int, seconds: float) -> bool:
    looks: list[dict[str, Held]] = []
    columns = ["process"]
    requests = Requests()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.toml"
        file.write_text(CONFIG)
        server = ServeProcess(file, Path(folder) / "log")
        parts = parts_of(server)
        begin_s = time.monotonic()
        requests.end_s = begin_s + seconds
        for wanted in np.linspace(WARM_UP * count, count, LOOKS).astype(int).tolist():
            asyncio.run(answer_up_to(server, requests, wanted))
            time.sleep(1.0)  # connections of the last look have ended
            looks.append({name: held(pid) for name, pid in parts.items()})
            columns.append(f"{requests.answered:,}")
            print(f"{requests.answered:,} of {count:,} requests", file=sys.stderr, flush=True)
            if not requests.more() and requests.answered < wanted:
                break
        took_s = time.monotonic() - begin_s
        same = parts_of(server) == parts
        status = server.stop()
    rows = []
    for name in parts:
        of_looks = [look[name] for look in looks]
        rows.append([f"{name}, MiB", *(f"{one.private_kib / 1024:.1f}" for one in of_looks)])
        rows.append([f"{name}, handles", *(str(one.handles) for one in of_looks)])
        rows.append([f"{name}, threads", *(str(one.threads) for one in of_looks)])
    title = f"{requests.answered:,} requests in {took_s:.0f} s, half over HTTP and half over gRPC"
    print_table(title, columns, rows)
    grown = [
        name
        for name, now in looks[-1].items()
        for before in [looks[0][name]]
        if now.handles > before.handles
        or now.threads > before.threads
        or now.private_kib > before.private_kib + MOST_KIB
    ]
    print(
        f"grown: {', '.join(grown) or 'none'}; processes {'the same' if same else 'NOT THE SAME'}"
    )
    return not grown and same and status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    arguments = parser.parse_args()
    sys.exit(not run(arguments.requests, arguments.seconds))


if __name__ == "__main__":
    main()
