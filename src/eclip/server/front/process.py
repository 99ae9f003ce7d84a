"""A front as a process: the protocols before its core."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from pathlib import Path

import uvloop

from eclip.errors import UsageError
from eclip.server.access import Tls
from eclip.server.config import ServerSettings, read_token
from eclip.server.control import Channel, Listening, Said
from eclip.server.front.core import open_core
from eclip.server.front.front import FrontSettings, open_front
from eclip.server.limits import MIB, Limits

_DRAIN_S = 20.0  # for what is open when the server stops


def main(descriptor: int) -> None:
    """The whole life of the process, which hears from the server through this descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(channel))
    os._exit(0)


async def _serve(channel: Channel) -> None:
    core, welcome = await open_core(channel)
    with core:
        try:
            async with open_front(
                core, settings_of(welcome.server, Path(welcome.regions))
            ) as ports:
                gc.collect()  # or what starting left behind would stay, too
                gc.freeze()  # modules stay: looking at them again stops all requests for long
                channel.send(Listening(ports.http, ports.grpc))
                await core.behind.leaving.wait()
                if core.live:
                    async with asyncio.timeout(_DRAIN_S):
                        await core.behind.drain()
        except UsageError as error:
            channel.send(Said(str(error)))
        except TimeoutError:
            channel.send(Said(f"not all requests were answered within {_DRAIN_S:.0f} s"))


def settings_of(server: ServerSettings, regions: Path | None) -> FrontSettings:
    tls = None
    if server.tls_cert is not None and server.tls_key is not None:
        tls = Tls(Path(server.tls_cert), Path(server.tls_key))
    return FrontSettings(
        host=server.host,
        http_port=server.http_port,
        grpc_port=server.grpc_port,
        token=None if server.token_file is None else read_token(server.token_file),
        tls=tls,
        limits=Limits(body_bytes=round(server.max_body_mb * MIB)),
        reuse_port=True,
        regions=regions,
        grace_s=1.0,
    )
