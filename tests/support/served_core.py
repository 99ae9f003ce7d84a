"""A server whose front is the test itself: everything is real but the protocols, which it does not
need to import."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.core.device import Closing
from eclip.server.config import ServingConfig, make_config
from eclip.server.control import Channel
from eclip.server.front.core import FrontCore, open_core
from eclip.server.log import ServerLog
from eclip.server.messages import InferRequest, InferResponse, Tensor
from eclip.server.supervisor.children import Child
from eclip.server.supervisor.server import Supervisor
from waiting import PATIENCE_S

T = TypeVar("T")

DIGITS: dict[str, Any] = {
    "name": "digits",
    "model": "numpy:eclip.server.demo_models:classify",
    "inputs": [{"name": "image", "datatype": "FP32", "shape": [64]}],
    "outputs": [
        {"name": "scores", "datatype": "FP32", "shape": [10]},
        {"name": "label", "datatype": "INT64", "shape": [1]},
    ],
    "batches": [1, 4, 8],
}
ADD: dict[str, Any] = {
    "name": "add",
    "model": "numpy:eclip.server.demo_models:add",
    "inputs": [
        {"name": "a", "datatype": "INT32", "shape": [4]},
        {"name": "b", "datatype": "INT32", "shape": [4]},
    ],
    "outputs": [{"name": "sum", "datatype": "INT32", "shape": [4]}],
    "batches": [1, 4],
}
SHOUT: dict[str, Any] = {
    "name": "shout",
    "model": "numpy:eclip.server.demo_models:shout",
    "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}],
    "outputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}],
    "batches": [1, 4],
}


_DATATYPES = {
    "float16": "FP16",
    "float32": "FP32",
    "int32": "INT32",
    "int64": "INT64",
    "object": "BYTES",
}


def config_of(*services: Mapping[str, Any], **server: Any) -> ServingConfig:
    settings = {"http_port": 0, "grpc_port": 0, "replan": False, "grace_seconds": 0.0}
    settings |= {"staged": False, **server}
    return make_config({"server": settings, "service": list(services)}, "the test")


class _NoProcess:
    """The test's own end of a channel: it never dies before the server."""

    pid = 0
    returncode: int | None = None

    def __init__(self) -> None:
        self._killed = asyncio.Event()

    async def wait(self) -> int:
        await self._killed.wait()
        return 0

    def kill(self) -> None:
        self.returncode = 0
        self._killed.set()


@dataclass
class Served:
    supervisor: Supervisor
    core: FrontCore
    log: io.StringIO

    @property
    def device_pid(self) -> int:
        child = self.supervisor.device.child
        assert child is not None
        return child.pid


@contextlib.asynccontextmanager
async def serving(config: ServingConfig) -> AsyncIterator[Served]:
    log = io.StringIO()
    supervisor = Supervisor(config, ServerLog(log), own_fronts=False)
    core: FrontCore | None = None
    try:
        await supervisor.start()
        core = await open_front(take_attachment(supervisor))
        yield Served(supervisor, core, log)
    finally:
        if core is not None:
            core.close()
        await supervisor.close()


def take_attachment(supervisor: Supervisor, place: int = 0) -> socket.socket:
    """A front's end of a channel to the server; called in the server's loop."""
    channel, theirs = Channel.pair()
    child = Child(channel, cast(Any, _NoProcess()))
    supervisor.fronts.take(supervisor.fronts.attachments[place], child)
    return theirs


async def open_front(theirs: socket.socket) -> FrontCore:
    """The front at this end, in the loop that runs this, when the device is up."""
    core, _ = await open_core(Channel(theirs))
    while not core.started:
        await asyncio.sleep(0.005)
    return core


class LoopThread(Closing):
    """An event loop in a thread of its own, and what others ask in it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __call__(self, work: Awaitable[T], patience_s: float = PATIENCE_S) -> T:
        return self.begin(work, patience_s).result()

    def begin(self, work: Awaitable[T], patience_s: float = PATIENCE_S) -> Future[T]:
        async def awaited() -> T:
            return await asyncio.wait_for(work, patience_s)

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Driver(LoopThread):
    """Servers, started at once in one loop; most tests have one."""

    def __init__(self, *configs: ServingConfig, patience_s: float = PATIENCE_S) -> None:
        super().__init__()
        self._stack = contextlib.AsyncExitStack()
        try:
            self.servers = self(self._start(configs), patience_s)
        except BaseException:
            super().close()
            raise

    @property
    def served(self) -> Served:
        return self.servers[0]

    async def _start(self, configs: Sequence[ServingConfig]) -> list[Served]:
        opening = [self._stack.enter_async_context(serving(config)) for config in configs]
        started: list[Served] = []
        try:
            for outcome in await asyncio.gather(*opening, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
                started.append(outcome)
        except BaseException:
            await self._stack.aclose()
            raise
        return started

    def close(self) -> None:
        self(self._stack.aclose())
        super().close()


def request(model: str, inputs: Mapping[str, npt.NDArray[Any]], **more: Any) -> InferRequest:
    tensors = [Tensor(name, _DATATYPES[str(data.dtype)], data) for name, data in inputs.items()]
    return InferRequest(model, tensors, time.monotonic_ns(), **more)


def image_request(seed: int, rows: int = 1, **more: Any) -> InferRequest:
    image = np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32)
    return request("digits", {"image": image}, **more)


def add_request(number: int, rows: int = 1, **more: Any) -> InferRequest:
    a = np.full((rows, 4), number, dtype=np.int32)
    return request("add", {"a": a, "b": a + 1}, **more)


def output(response: InferResponse, name: str) -> npt.NDArray[Any]:
    return next(tensor.data for tensor in response.outputs if tensor.name == name)


def named(asked: InferRequest, model: str) -> InferRequest:
    return msgspec.structs.replace(asked, model=model)


def held(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads, and MiB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    words = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return descriptors, int(words["Threads"]), int(words["VmRSS"].split()[0]) >> 10
