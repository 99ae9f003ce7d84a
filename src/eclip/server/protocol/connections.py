"""HTTP connections that end when a client sends too slowly, too much, or does not read.

uvicorn limits only the pause between two requests. Here a request's head has a size and a request
a time to arrive, from its first byte to its last; and an answer a time to be read.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState as UvicornState

from eclip.server.limits import Limits

_LARGE_HEAD = (431, "the request's headers are too large")


CONNECTION = "eclip.connection"  # in the scope of a request: the connection that it came by


class _ParsingEndedError(Exception):
    """The parser stops, and ``send_400_response`` says why."""


class GuardedConnection(HttpToolsProtocol):
    def __init__(
        self,
        limits: Limits,
        config: Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._head_bytes = 0
        self._in_head = True
        self._fault: tuple[int, str] | None = None
        self._unanswered: list[RequestResponseCycle] = []
        self._arriving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._watched: set[asyncio.Task[Any]] = set()
        self.lost = False  # the client has gone

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Cancel the task when the client goes. A task of its own that waits for that would cost
        a request more than all of its reading."""
        self.flow.resume_reading()  # a connection that is not read does not end
        self._watched.add(task)

    def unwatch(self, task: asyncio.Task[Any]) -> None:
        self._watched.discard(task)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self._limits.idle_s, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._arriving, self._unread, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        # uvicorn tells only the last of several requests that were sent at once.
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)
        self.lost = True
        for task in self._watched:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._limits.header_bytes:
            self._refuse(*_LARGE_HEAD)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        if self._arriving is not None:
            self._arriving.cancel()
        self._arriving = self.loop.call_later(self._limits.read_s, self._too_slow)

    def on_headers_complete(self) -> None:
        self._in_head = False
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.header_bytes:
            self._fault = _LARGE_HEAD
            raise _ParsingEndedError
        super().on_headers_complete()
        self._unanswered = [one for one in self._unanswered if not one.response_complete]
        self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Whenever the parser gives up."""
        if not self._in_head and self.cycle is not None and self.cycle.response_started:
            self.transport.close()  # what followed an answer was no HTTP
        else:
            self._refuse(*(self._fault or (400, msg)))

    def _too_slow(self) -> None:
        if self.pipeline:  # this server is not reading: an earlier request is being answered
            self._arriving = self.loop.call_later(self._limits.read_s, self._too_slow)
        elif self.cycle is not None and not self._in_head and self.cycle.response_started:
            self.transport.abort()
        else:
            self._refuse(408, f"the request took longer than {self._limits.read_s:g} s to arrive")

    def _refuse(self, status: int, line: str) -> None:
        """Answer without the application, and end the connection."""
        if self.transport.is_closing():
            return
        body = msgspec.json.encode({"error": line})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()
