"""An aiohttp server of ResNet-50 and BERT, a thread and a stream each, and clients of its own.

    python server.py OUT REQUESTS

Serves REQUESTS concurrent requests to each model over HTTP and writes every answer to OUT (.npz).
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from aiohttp import ClientSession, web
from serving import MODELS, Model, Where

AT_ONCE = 8


class Served:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.thread = ThreadPoolExecutor(1)

    def answer(self, body: bytes) -> bytes:
        given = torch.frombuffer(bytearray(body), dtype=self.model.inputs.dtype)
        with torch.inference_mode(), torch.cuda.stream(self.model.stream):
            inputs = given.reshape(self.model.inputs.shape).cuda(non_blocking=True)
            output = self.model(inputs)
            self.model.stream.synchronize()
            answer: bytes = output.float().cpu().numpy().tobytes()
            return answer

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        loop = asyncio.get_running_loop()
        return web.Response(body=await loop.run_in_executor(self.thread, self.answer, body))


async def serve(out: str, requests: int) -> None:
    where = Where()
    served = {name: Served(Model(name, where)) for name in MODELS}
    torch.cuda.synchronize()
    app = web.Application(client_max_size=1 << 28)
    for name, one in served.items():
        app.router.add_post(f"/{name}", one.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    answers: dict[str, Any] = {}
    room = asyncio.Semaphore(AT_ONCE)

    async with ClientSession() as session:

        async def ask(name: str, number: int) -> None:
            inputs = served[name].model.inputs.roll(number, 0).cpu().numpy()
            async with (
                room,
                session.post(f"http://127.0.0.1:{port}/{name}", data=inputs.tobytes()) as reply,
            ):
                assert reply.status == 200
                data = await reply.read()
                answers[f"{name}_{number}"] = np.frombuffer(data, dtype=np.float32)

        for name in MODELS:  # one after another, so that they are met in this order
            await ask(name, 0)
        where.counts.zero_()  # from here on every place is told anew
        torch.cuda.synchronize()
        await asyncio.gather(*(ask(name, n) for n in range(requests) for name in MODELS))
    await runner.cleanup()
    torch.cuda.synchronize()
    np.savez(out, where=where.counts.cpu().numpy(), **answers)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
