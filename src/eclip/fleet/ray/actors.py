"""The Ray actors of a fleet: one for each GPU in use and one for each router.

Ray restarts an actor whose process dies, finds actors by name, and reports nodes that are gone. A
GPU's actor runs the same server as ``eclip serve``. At its start the actor asks the controller for
its order, so an actor has no state to restore.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import ray
import uvloop

from eclip.fleet.backends import Backends
from eclip.fleet.config import RouterSettings
from eclip.fleet.orders import GpuOrder, GpuPlace, RoutingTable
from eclip.fleet.place.spec import GpuId
from eclip.fleet.rates import RouterReport
from eclip.fleet.ray.cluster import CONTROLLER
from eclip.fleet.router import RouterCore, choice_route
from eclip.server.config import read_token
from eclip.server.front.front import FrontSettings, Ports, open_front
from eclip.server.log import ServerLog
from eclip.server.supervisor.running import RunningServer

T = TypeVar("T")


def gpu_actor_name(gpu: GpuId | str) -> str:
    return f"gpu {gpu}"


def router_name(number: int) -> str:
    return f"router {number}"


class GpuActor:
    """The server of one GPU; there is a server only while there is an order."""

    def __init__(self, gpu: GpuId) -> None:
        self._gpu = gpu
        self._host = ray.util.get_node_ip_address()
        self._changing = threading.Lock()
        self._server: RunningServer | None = None
        self._order: GpuOrder | None = None
        controller = ray.get_actor(CONTROLLER)
        order: GpuOrder | None = ray.get(controller.order_for.remote(gpu))
        if order is not None:
            controller.arrived.remote(self.deploy(order))

    def deploy(self, order: GpuOrder) -> GpuPlace:
        """Serve this order from now on; new copies are ready before old copies go."""
        with self._changing:
            server = msgspec.structs.replace(order.config.server, host=self._host)
            config = msgspec.structs.replace(order.config, server=server)
            if self._server is None:
                self._server = RunningServer(config, ServerLog(), guests=order.guests)
            else:
                self._server.change(config)
            self._order = order
            return self._place(self._server)

    def running(self) -> tuple[GpuOrder, GpuPlace] | None:
        """The order being served, and its address; None while nothing is served."""
        order, server = self._order, self._server
        return None if order is None or server is None else (order, self._place(server))

    def leave(self) -> None:
        """Answer open requests, then serve nothing."""
        with self._changing:
            if self._server is not None:
                self._server.close()
            self._server = self._order = None

    def _place(self, server: RunningServer) -> GpuPlace:
        return GpuPlace(
            gpu=self._gpu,
            host=self._host,
            http=server.url.partition("//")[2],
            grpc=server.grpc,
            door=None if server.door is None else str(server.door),
            models=server.models(),
            failed=server.failed(),
            pid=os.getpid(),
        )


class RouterActor:
    """A router. Its event loop runs in a separate thread."""

    def __init__(self, number: int, settings: RouterSettings) -> None:
        self._number = number
        self._settings = settings
        self._address = ray.util.get_node_ip_address()
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        token = None if settings.token_file is None else read_token(settings.token_file)
        self._backends = Backends(self._address, shared_memory=settings.shared_memory, token=token)
        self._core = RouterCore(self._backends)
        self.take(ray.get(ray.get_actor(CONTROLLER).table.remote()))
        self._front = FrontSettings(
            host=settings.host or self._address,
            http_port=settings.http_port,
            grpc_port=settings.grpc_port,
            token=token,
            reuse_port=True,
            grace_s=5.0,
        )
        listening: asyncio.Future[Ports] = self._call(self._make_future())
        self._served = asyncio.run_coroutine_threadsafe(self._serve(listening), self._loop)
        self._ports = self._call(_result(listening))

    def take(self, table: RoutingTable) -> None:
        """Route by this table from now on."""
        self._call(self._take(table))

    def report(self) -> RouterReport:
        return self._call(self._report())

    def leave(self) -> None:
        """Refuse new connections, and answer open requests."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._served.result(30.0)

    async def _serve(self, listening: asyncio.Future[Ports]) -> None:
        try:
            async with open_front(self._core, self._front, [choice_route(self._backends)]) as ports:
                listening.set_result(ports)
                await self._stop.wait()
                self._core.leaving = True
            await self._backends.close()
        except BaseException as error:
            if not listening.done():
                listening.set_exception(error)
            raise

    async def _take(self, table: RoutingTable) -> None:
        self._backends.take(table)

    async def _report(self) -> RouterReport:
        near = sum(one.near for one in self._backends.here.values())
        host = self._front.host
        return RouterReport(
            number=self._number,
            http=f"{host}:{self._ports.http}",
            grpc=f"{host}:{self._ports.grpc}",
            ready=self._core.ready,
            near=near,
            far=len(self._backends.here) - near,
            arrived=dict(self._core.arrived),
            pid=os.getpid(),
        )

    async def _make_future(self) -> asyncio.Future[Ports]:
        return self._loop.create_future()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _result(future: asyncio.Future[T]) -> T:
    return await future
