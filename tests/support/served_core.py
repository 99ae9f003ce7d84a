"""A server whose front is the test itself: everything is real but the protocols."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from eclip.serving.children import Child
from eclip.serving.config import ServingConfig, make_config
from eclip.serving.control import Channel
from eclip.serving.core import FrontCore, open_core
from eclip.serving.log import ServerLog
from eclip.serving.messages import InferRequest, InferResponse, Tensor
from eclip.serving.server import Supervisor

DIGITS: dict[str, Any] = {
    "name": "digits",
    "model": "numpy:eclip.serving.demo_models:classify",
    "inputs": [{"name": "image", "datatype": "FP32", "shape": [64]}],
    "outputs": [
        {"name": "scores", "datatype": "FP32", "shape": [10]},
        {"name": "label", "datatype": "INT64", "shape": [1]},
    ],
    "batches": [1, 4, 8],
}
ADD: dict[str, Any] = {
    "name": "add",
    "model": "numpy:eclip.serving.demo_models:add",
    "inputs": [
        {"name": "a", "datatype": "INT32", "shape": [4]},
        {"name": "b", "datatype": "INT32", "shape": [4]},
    ],
    "outputs": [{"name": "sum", "datatype": "INT32", "shape": [4]}],
    "batches": [1, 4],
}
SHOUT: dict[str, Any] = {
    "name": "shout",
    "model": "numpy:eclip.serving.demo_models:shout",
    "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}],
    "outputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}],
    "batches": [1, 4],
}


def config_of(*services: Mapping[str, Any], **server: Any) -> ServingConfig:
    settings = {"http_port": 0, "grpc_port": 0, "replan": False, "grace_seconds": 0.0, **server}
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
        channel, theirs = Channel.pair()
        child = Child(channel, cast(Any, _NoProcess()))
        supervisor.fronts.take(supervisor.fronts.seats[0], child)
        core, _ = await open_core(Channel(theirs))
        while not core.started:
            await asyncio.sleep(0.005)
        yield Served(supervisor, core, log)
    finally:
        if core is not None:
            core.close()
        await supervisor.close()


def request(model: str, inputs: Mapping[str, npt.NDArray[Any]], **more: Any) -> InferRequest:
    datatypes = {"float32": "FP32", "int32": "INT32", "object": "BYTES", "int64": "INT64"}
    tensors = [Tensor(name, datatypes[str(data.dtype)], data) for name, data in inputs.items()]
    return InferRequest(model, tensors, time.monotonic_ns(), **more)


def image_request(seed: int, rows: int = 1, **more: Any) -> InferRequest:
    image = np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32)
    return request("digits", {"image": image}, **more)


def add_request(number: int, rows: int = 1, **more: Any) -> InferRequest:
    a = np.full((rows, 4), number, dtype=np.int32)
    return request("add", {"a": a, "b": a + 1}, **more)


def output(response: InferResponse, name: str) -> npt.NDArray[Any]:
    return next(tensor.data for tensor in response.outputs if tensor.name == name)
