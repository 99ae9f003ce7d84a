"""Guests: processes of this machine that use a front's attachment and are no child of the server.

A router uses a deployment as a front does, through shared memory. It comes through the server's
door, a Unix socket in a folder that only the server's user may enter, and keeps its attachment as
long as its connection lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from eclip.errors import DeviceError
from eclip.server.bell import Bell
from eclip.server.control import Channel, Message
from eclip.server.front.core import FrontCore, open_core


class Guest:
    """At the server: what a ``Child`` is, without a process of ours. A closed connection is its
    end."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.ended = asyncio.Event()

    def listen(self, hear: Callable[[Message, list[int]], None], bell: Bell) -> None:
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                while (received := self.channel.receive()) is not None:
                    hear(*received)
                    bell.ring()
            except EOFError:
                loop.remove_reader(self.channel.fileno())
                self.ended.set()
                bell.ring()

        loop.add_reader(self.channel.fileno(), read)

    async def end(self, seconds: float) -> None:
        """Wait until it goes; then show it the door."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ended.wait()
        self.close()

    async def kill(self) -> None:
        self.close()

    def close(self) -> None:
        self.ended.set()
        if self.channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.channel.fileno())
            self.channel.close()


async def visitors(door: Path) -> AsyncIterator[Guest]:
    """At the server: everybody who comes."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.setblocking(False)
        listener.bind(str(door))
        listener.listen()
        while True:
            connection, _ = await loop.sock_accept(listener)
            yield Guest(Channel(connection))


async def enter(door: Path) -> FrontCore:
    """At the guest: a core on the deployment behind the door."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(connection)
    try:
        connection.connect(str(door))
        core, _ = await open_core(channel)
    except (OSError, EOFError) as error:
        channel.close()
        raise DeviceError(f"the server behind {door} lets nobody in: {error}") from None
    return core
