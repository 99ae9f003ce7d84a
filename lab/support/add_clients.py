"""Cheap clients of a server with the service ``add``: prepared bytes, no library's objects.

They ask as fast as they are answered, many at a time, and check every answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc.aio
import numpy as np
from lab.support.served import ServeProcess

from eclip.server.protocol import inference_pb2 as pb

CONNECTIONS = 16  # of HTTP, each with a request in flight; and as many calls of gRPC
ADD = """
[[service]]
name = "add"
model = "numpy:eclip.server.demo_models:add"
inputs = [
    { name = "a", datatype = "INT32", shape = [4] },
    { name = "b", datatype = "INT32", shape = [4] },
]
outputs = [{ name = "sum", datatype = "INT32", shape = [4] }]
batches = [1, 8, 32]
instances = 2
bound = "10s"
"""


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


def infer_bytes(number: int, model: str = "add") -> bytes:
    """A request over HTTP whose sum begins with twice the number."""
    values = f"{number},0,1,{number}"
    tensors = ",".join(
        f'{{"name":"{name}","datatype":"INT32","shape":[1,4],"data":[{values}]}}' for name in "ab"
    )
    body = f'{{"inputs":[{tensors}]}}'.encode()
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def over_http(address: str, first: int, requests: Requests) -> None:
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def ask(number: int) -> bool:
        writer.write(infer_bytes(number))
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
