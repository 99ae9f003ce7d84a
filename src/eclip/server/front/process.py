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
from eclip.server.access import Access, Tls
from eclip.server.config import ServerSettings, read_token
from eclip.server.control import Channel, Listening, Said
from eclip.server.counters import beat
from eclip.server.front.core import open_core
from eclip.server.front.front import FrontSettings, open_front
from eclip.server.limits import MIB, Limits
from eclip.server.log import log_to_server

_BEAT_S = 0.5
_LEAST_DRAIN_S = 1.0  # for what is open when the server stops; else the grace time


def main(descriptor: int) -> None:
    """The whole life of the process, which hears from the server through this descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_to_server()
    channel = Channel(socket.socket(fileno=descriptor))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(channel))
    os._exit(0)


async def _serve(channel: Channel) -> None:
    core, welcome = await open_core(channel)
    drain_s = max(_LEAST_DRAIN_S, welcome.server.grace_seconds)
    with core:
        try:
            settings = settings_of(welcome.server, Path(welcome.regions))
            access = Access(settings.token, settings.tls, settings.hosts)
            core.behind.take_access = lambda: _take_access(access, welcome.server, channel)
            async with open_front(core, settings, access=access) as ports:
                gc.collect()  # or what starting left behind would stay, too
                gc.freeze()  # modules stay: looking at them again stops all requests for long
                _beat(core.behind.front_queue.row)
                channel.send(Listening(ports.http, ports.grpc))
                await core.behind.leaving.wait()
                if core.live:
                    try:
                        async with asyncio.timeout(drain_s):
                            await core.behind.drain()
                    except TimeoutError:
                        line = f"not all requests were answered within {drain_s:g} s"
                        channel.send(Said(line))
                        core.behind.give_up()
        except UsageError as error:
            channel.send(Said(str(error)))


def _take_access(access: Access, server: ServerSettings, channel: Channel) -> None:
    try:
        access.change(None if server.token_file is None else read_token(server.token_file))
    except (UsageError, OSError) as error:
        channel.send(Said(f"the old token and certificate stay: {error}"))
    else:
        channel.send(Said("the token and the certificate are those of the files now"))


def _beat(row: memoryview) -> None:
    """Say again and again that this loop goes round; the server ends a front that is silent."""
    beat(row)
    asyncio.get_running_loop().call_later(_BEAT_S, _beat, row)


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
        hosts=server.hosts,
        limits=Limits(body_bytes=round(server.max_body_mb * MIB)),
        reuse_port=True,
        regions=regions,
        grace_s=1.0,
    )
