"""HTTP connections: ended when a client sends too slowly, too much, or does not read.

uvicorn limits only the pause between two requests. Here a request's head has a size and a request
a time to arrive, from its first byte to its last; and an answer a time to be read.

The number of connections is limited, too. Beyond the limit the connection that has been idle the
longest ends. Where none is idle, a further connection may ask for health and metrics only.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState as UvicornState

from eclip.server.limits import Limits
from eclip.server.messages import Reason

_LARGE_HEAD = (431, "the request's headers are too large")
_NO_PROXY = (405, "this server is no proxy")
_FULL = (503, "too many connections have requests open; ask again")
_TCP_CLOSE = 7  # a state of the kernel: nobody is at the other end
_LOOK_S = 0.01  # after a client has ended its sending, whether it has gone
_MOST_LOOK_S = 1.0

# Probes and metrics: they are answered however many connections there are.
ALWAYS_PATHS = frozenset({"/v2/health/live", "/v2/health/ready", "/v2/health/startup", "/metrics"})
CONNECTION = "eclip.connection"  # in the scope of a request: the connection that it came by


class _ParsingEndedError(Exception):
    """The parser stops, and ``send_400_response`` says why."""


class Connections:
    """The connections of a front. ``changed`` is told of each that begins (1) or ends (-1);
    ``refused`` counts what is answered without the application."""

    def __init__(
        self, limits: Limits, changed: Callable[[int], None], refused: Callable[[Reason], None]
    ) -> None:
        self.limits = limits
        self.refused = refused
        self._changed = changed
        self._open: set[GuardedConnection] = set()
        self._idle: dict[GuardedConnection, None] = {}  # the longest first

    def begin(self, connection: GuardedConnection) -> bool:
        """False: there are too many, and none is idle."""
        self._open.add(connection)
        self._changed(1)
        fits = len(self._open) <= self.limits.connections
        if not fits and self._idle:
            next(iter(self._idle)).transport.abort()
            fits = True
        self._idle[connection] = None
        return fits

    def work(self, connection: GuardedConnection) -> None:
        """It has a request now."""
        self._idle.pop(connection, None)

    def rest(self, connection: GuardedConnection) -> None:
        """It has none any more."""
        if connection in self._open:
            self._idle[connection] = None

    def end(self, connection: GuardedConnection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._changed(-1)


class Client:
    """The client of a connection, as those see it who answer it."""

    def __init__(self, connection: GuardedConnection) -> None:
        self._connection = connection
        self._watched: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.sends_no_more = False
        self.gone = False

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Cancel the task when the client goes. A task of its own that waits for that would cost
        a request more than all of its reading."""
        self._connection.flow.resume_reading()  # a connection that is not read does not end
        self._watched.add(task)

    def unwatch(self, task: asyncio.Task[Any]) -> None:
        self._watched.discard(task)

    def look(self, after_s: float = _LOOK_S) -> None:
        """The client sends no more. Look from now on whether it has gone."""
        self.sends_no_more = True
        transport = self._connection.transport
        tcp: socket.socket = transport.get_extra_info("socket")
        if tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            transport.abort()
            return
        next_s = min(2 * after_s, _MOST_LOOK_S)
        self._timer = asyncio.get_running_loop().call_later(after_s, self.look, next_s)

    def abort(self) -> None:
        self._connection.transport.abort()

    def leave(self) -> None:
        self.gone = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._watched:
            task.cancel()


class GuardedConnection(HttpToolsProtocol):
    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all = connections
        self._limits = connections.limits
        self._surplus = False  # only for what is always answered
        self._head_bytes = 0
        self.in_head = True
        self._fault: tuple[int, str] | None = None
        self._unanswered: list[RequestResponseCycle] = []
        self._arriving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._client = Client(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._surplus = not self._all.begin(self)
        self.timeout_keep_alive_task = self.loop.call_later(
            self._limits.idle_s, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.end(self)
        for timer in (self._arriving, self._unread, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        # uvicorn tells only the last of several requests that were sent at once.
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)
        self._client.leave()

    def data_received(self, data: bytes) -> None:
        if self.in_head:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Java's client offers h2c each time, after which the parser takes no body.
            again = _without_offer(self.parser.get_method(), self.url, self.headers)
            self._head_bytes = 0
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.data_received(again + data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("this is not a valid HTTP request")
            return
        if self.in_head and self._head_bytes > self._limits.header_bytes:
            self._refuse(*_LARGE_HEAD)

    def eof_received(self) -> bool:  # type: ignore[override]
        """True: the client only ends its sending, and waits for the answer. A client that has gone
        looks the same until something is sent to it, so it is told to continue, which says
        nothing; its system then refuses that. TLS has no half of a connection."""
        cycle = self.cycle
        if not self.in_head or cycle is None or (cycle.response_complete and not self.pipeline):
            return False
        if self.transport.get_extra_info("ssl_object") is not None:
            return False
        if not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._client.look()
        return True

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self.scope[CONNECTION] = self._client  # type: ignore[literal-required]
        if self._arriving is not None:
            self._arriving.cancel()
        self._arriving = self.loop.call_later(self._limits.read_s, self._too_slow)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.header_bytes:
            self._fault = _LARGE_HEAD
            raise _ParsingEndedError
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._fault = _NO_PROXY
                raise _ParsingEndedError
            return
        self.in_head = False
        self._all.work(self)
        if self._surplus and self.url.partition(b"?")[0].decode("latin-1") not in ALWAYS_PATHS:
            self._fault = _FULL
            raise _ParsingEndedError
        super().on_headers_complete()
        self._unanswered = [one for one in self._unanswered if not one.response_complete]
        self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None
        self.in_head = True
        self._head_bytes = 0
        super().on_message_complete()
        if _is_idle(self):  # it was answered before all of it had arrived
            self._all.rest(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if _is_idle(self):
            self._all.rest(self)
        if self._client.sends_no_more and not self.pipeline and self.cycle.response_complete:
            self.transport.close()

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
        if not self.in_head and self.cycle is not None and self.cycle.response_started:
            self.transport.close()  # what followed an answer was no HTTP
        else:
            self._refuse(*(self._fault or (400, msg)))

    def _too_slow(self) -> None:
        if self.pipeline:  # this server is not reading: an earlier request is being answered
            self._arriving = self.loop.call_later(self._limits.read_s, self._too_slow)
        elif self.cycle is not None and not self.in_head and self.cycle.response_started:
            self.transport.abort()
        else:
            self._refuse(408, f"the request took longer than {self._limits.read_s:g} s to arrive")

    def _refuse(self, status: int, line: str) -> None:
        """Answer without the application, and end the connection."""
        if self.transport.is_closing():
            return
        self._all.refused(Reason.OVERLOADED if status == _FULL[0] else Reason.BAD_REQUEST)
        body = msgspec.json.encode({"error": line})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
        if status == _FULL[0]:
            head += b"retry-after: 1\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + b"\r\n" + body)
        self.transport.close()


def _is_idle(connection: GuardedConnection) -> bool:
    answered = connection.cycle.response_complete and not connection.pipeline
    return bool(connection.in_head and answered)


def _without_offer(method: bytes, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A request's head without its offer to speak another protocol."""
    lines = [b"%s %s HTTP/1.1" % (method, url)]
    for name, value in headers:
        if name == b"connection":
            tokens = [token.strip() for token in value.lower().split(b",")]
            value = b", ".join(token for token in tokens if token != b"upgrade")
        if name != b"upgrade":
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join([*lines, b"", b""])
