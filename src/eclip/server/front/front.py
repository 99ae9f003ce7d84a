"""A front: both protocols of one core, on their ports."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.routing import Route

from eclip.errors import UsageError
from eclip.server.access import Access, Tls
from eclip.server.folder import own_folder
from eclip.server.limits import Limits
from eclip.server.messages import Core
from eclip.server.protocol import rpc
from eclip.server.protocol.http import HttpServer, make_app
from eclip.server.shared_memory import Regions


@dataclass(frozen=True, slots=True)
class FrontSettings:
    host: str = "127.0.0.1"
    http_port: int = 8000  # 0: a free one
    grpc_port: int = 8001
    token: str | None = None
    tls: Tls | None = None
    hosts: tuple[str, ...] = ()  # names by which clients may change what it serves
    limits: Limits = field(default_factory=Limits)
    reuse_port: bool = False  # several fronts on the same ports
    regions: Path | None = None  # where all fronts keep names of shared memory; None: only here
    grace_s: float = 5.0  # for requests under way when it stops


@dataclass(frozen=True, slots=True)
class Ports:
    http: int
    grpc: int


@contextlib.asynccontextmanager
async def open_front(
    core: Core,
    settings: FrontSettings,
    routes: Sequence[Route] = (),
    access: Access | None = None,
) -> AsyncIterator[Ports]:
    """Serves until the context ends; then nothing new is accepted and what runs may end.
    ``routes`` are those of HTTP that only this core has. Through ``access`` the caller changes the
    token and the certificate."""
    access = access or Access(settings.token, settings.tls, settings.hosts)
    async with contextlib.AsyncExitStack() as stack:
        folder = settings.regions
        if folder is None:
            folder = stack.enter_context(own_folder())
        limits = settings.limits
        regions = Regions(folder, limits)
        stack.callback(regions.close)
        listener = _listen(settings)
        app = make_app(core, regions, limits, access, routes)
        http = HttpServer(app, listener, core, limits, access)
        grpc_server = rpc.make_server(core, regions, limits, access, settings.reuse_port)
        try:
            address = f"{_bracketed(settings.host)}:{settings.grpc_port}"
            grpc_port = rpc.add_port(grpc_server, address, access)
        except RuntimeError:
            listener.close()
            raise _port_in_use(settings.host, settings.grpc_port) from None
        await http.start()
        await grpc_server.start()
        try:
            yield Ports(listener.getsockname()[1], grpc_port)
        finally:
            await asyncio.gather(http.stop(settings.grace_s), grpc_server.stop(settings.grace_s))


def _listen(settings: FrontSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((settings.host, settings.http_port))
    except OSError:
        listener.close()
        raise _port_in_use(settings.host, settings.http_port) from None
    return listener


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _port_in_use(host: str, port: int) -> UsageError:
    return UsageError(f"cannot listen on {host}:{port}; is another server running there?")
