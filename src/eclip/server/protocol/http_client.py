"""A deployment on another machine, as a router uses it: HTTP to its front.

Only what was certainly not accepted there may be tried elsewhere. That is a request for which there
was no connection, or which the front refused with ``Retry-After``. A connection that breaks while
an answer is due leaves open whether the request ran: it is lost.

gRPC's asyncio client was here before: 0.4 ms more on a CPU for every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec

from eclip.server.messages import InferRequest, InferResponse, Reason, RefusedError
from eclip.server.protocol.http import SLACK, STATUSES
from eclip.server.protocol.http_infer import JSON_LENGTH
from eclip.server.tensors import DATATYPES, from_raw, to_raw

_AGAIN_S = (0.02, 0.1, 0.2, 0.5, 1.0)  # between attempts to connect
_IDLE_S = 30.0  # a front ends connections after 75 s: one of ours must not meet that
_REASONS = {
    status: reason
    for reason, status in STATUSES.items()
    if reason not in (Reason.UNKNOWN_REGION, Reason.ALREADY_EXISTS, Reason.LOST)
}  # those left out have another one's status


class _AnswerParameters(msgspec.Struct):
    binary_data_size: int


class _AnswerTensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: _AnswerParameters


class _AnswerHead(msgspec.Struct):
    model_name: str
    model_version: str
    outputs: list[_AnswerTensor]
    id: str = ""


class _ErrorBody(msgspec.Struct):
    error: str = ""


_answers = msgspec.json.Decoder(_AnswerHead)
_errors = msgspec.json.Decoder(_ErrorBody)


@dataclass(slots=True)
class _HttpReply:
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.used_s = time.monotonic()
        self.closed = asyncio.get_running_loop().create_future()
        self._parser: Any = None
        self._reply = _HttpReply()
        self._waiting: asyncio.Future[_HttpReply] | None = None
        self._transport: asyncio.Transport | None = None

    async def ask(self, request: bytes) -> _HttpReply:
        if self._transport is None:
            raise ConnectionError
        self._reply = _HttpReply()
        self._parser = httptools.HttpResponseParser(self)
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waiting
        except asyncio.CancelledError:
            self.close()  # the front takes that for a client that is gone
            raise
        finally:
            self._waiting = None
            self.used_s = time.monotonic()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ConnectionError())

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, AttributeError):  # no HTTP, or no request is open
            self.close()

    # --- What the parser finds -------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._reply.body += body

    def on_message_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(self._reply)


class RemoteFront:
    """``connected``: the front listens there. ``slack`` is what the last answer said, and when."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address = address
        self.connected = False
        self.slack: dict[str, tuple[float, int]] = {}  # by model: ns, and when it was said
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        authorization = "" if token is None else f"authorization: Bearer {token}\r\n"
        self._head = f"host: {address}\r\n{authorization}{SLACK.decode()}: ?\r\n".encode()
        self._free: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._keeping = asyncio.create_task(self._keep_connected())

    async def infer(self, request: InferRequest) -> InferResponse:
        try:
            connection = self._take_free() or await self._connect()
        except OSError:
            line = f"there is no connection to {self.address}"
            raise RefusedError(Reason.NOT_READY, line, 1.0) from None
        self._busy.add(connection)
        try:
            reply = await connection.ask(self._write(request))
        except ConnectionError:
            line = f"the connection to {self.address} ended before its answer came; it may have run"
            raise RefusedError(Reason.LOST, line) from None
        finally:
            self._busy.discard(connection)
            if not connection.closed.done():
                self._free.append(connection)
        if reply.status != 200:
            raise _refusal(reply)
        said = reply.headers.get(SLACK)
        if said is not None:
            self.slack[request.model] = (float(said), time.monotonic_ns())
        return _read(reply)

    async def close(self) -> None:
        self.connected = False
        self._keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeping
        for connection in (*self._free, *self._busy):
            connection.close()
        self._free.clear()

    def _write(self, request: InferRequest) -> bytes:
        raws = [to_raw(tensor) for tensor in request.inputs]
        asked: dict[str, Any] = {
            "inputs": [
                {
                    "name": tensor.name,
                    "datatype": tensor.datatype,
                    "shape": tensor.data.shape,
                    "parameters": {"binary_data_size": len(raw)},
                }
                for tensor, raw in zip(request.inputs, raws, strict=True)
            ],
            "parameters": {"binary_data_output": True, "priority": request.priority},
        }
        if request.id:
            asked["id"] = request.id
        if request.outputs:
            wish = {"binary_data": True}
            asked["outputs"] = [{"name": name, "parameters": wish} for name in request.outputs]
        if request.timeout_ns is not None:
            left_ns = request.arrival_ns + request.timeout_ns - time.monotonic_ns()
            asked["parameters"]["timeout"] = max(1, left_ns // 1000)
        text = msgspec.json.encode(asked)
        size = len(text) + sum(map(len, raws))
        head = b"POST /v2/models/%s/infer HTTP/1.1\r\n%s%s: %d\r\ncontent-length: %d\r\n\r\n" % (
            (request.model.encode(), self._head, JSON_LENGTH, len(text), size)
        )
        return b"".join([head, text, *raws])

    def _take_free(self) -> _Connection | None:
        while self._free:
            connection = self._free.pop()
            if not connection.closed.done():
                return connection
        return None

    async def _connect(self) -> _Connection:
        if self._keeping.done():
            raise ConnectionError  # it is closed
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection

    async def _keep_connected(self) -> None:
        """One connection at least, so that the other end's death is noticed at once."""
        attempt = 0
        while True:
            now_s = time.monotonic()
            alive = [one for one in self._free if not one.closed.done()]
            self._free = [one for one in alive if now_s - one.used_s < _IDLE_S]
            for idle in alive:
                if idle not in self._free:
                    idle.close()
            if not self._free and not self._busy:
                try:
                    self._free.append(await self._connect())
                except OSError:
                    self.connected = False
                    await asyncio.sleep(_AGAIN_S[min(attempt, len(_AGAIN_S) - 1)])
                    attempt += 1
                    continue
            attempt = 0
            self.connected = True
            closed = [one.closed for one in (*self._free, *self._busy)]
            await asyncio.wait(closed, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            if any(one.closed.done() for one in (*self._free, *self._busy)):
                self.connected = False  # until a new connection says otherwise


def _read(reply: _HttpReply) -> InferResponse:
    size = int(reply.headers.get(JSON_LENGTH, len(reply.body)))
    body = memoryview(bytes(reply.body))
    answer = _answers.decode(body[:size])
    tensors = []
    for output in answer.outputs:
        end = size + output.parameters.binary_data_size
        datatype = DATATYPES[output.datatype]
        tensors.append(from_raw(output.name, datatype, tuple(output.shape), body[size:end]))
        size = end
    return InferResponse(answer.model_name, tensors, answer.id, answer.model_version)


def _refusal(reply: _HttpReply) -> RefusedError:
    try:
        line = _errors.decode(bytes(reply.body)).error
    except msgspec.MsgspecError:
        line = f"status {reply.status}"
    reason: Reason = _REASONS.get(reply.status, Reason.FAILED)
    after = reply.headers.get(b"retry-after")
    if reason is Reason.NOT_READY and after is None:
        reason = Reason.LOST
    return RefusedError(reason, line, None if after is None else float(after))
