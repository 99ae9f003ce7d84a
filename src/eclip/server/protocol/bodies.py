"""Reading and writing HTTP bodies within limits, compressed or not."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Mapping

from starlette.exceptions import HTTPException
from starlette.types import Receive

from eclip.server.limits import Limits
from eclip.server.messages import Reason, RefusedError
from eclip.server.tensors import bad_request

Headers = Mapping[bytes, bytes]

# zlib's word for each: its format and the largest window. Deflate means zlib's format, as browsers
# and Triton's clients understand it.
_WINDOWS = {b"gzip": zlib.MAX_WBITS | 16, b"deflate": zlib.MAX_WBITS}
# Above this, (de)compressing goes to a thread: at about 200 MB/s it takes a millisecond or more.
_IN_THREAD_BYTES = 256 * 1024


class ClientGoneError(Exception):
    """The client has gone: no answer is needed."""


class Bodies:
    """Reads bodies; knows how many bytes are held for all requests together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held_bytes = 0

    @contextlib.asynccontextmanager
    async def read(self, headers: Headers, receive: Receive) -> AsyncIterator[memoryview]:
        """The body, decompressed. Its bytes count as held from their arrival to the context's
        end."""
        if int(headers.get(b"content-length", 0)) > self._limits.body_bytes:
            raise self._too_large()
        held = _Held(self)
        try:
            body = await self._receive(receive, held)
            coding = headers.get(b"content-encoding", b"identity").strip().lower()
            if coding != b"identity":
                body = await self._decompress(body, coding)
                held.take(len(body))
            yield memoryview(body)
        finally:
            self._held_bytes -= held.size

    def hold(self, size: int) -> None:
        """Count so many bytes as held, or refuse."""
        if self._held_bytes + size > self._limits.bodies_bytes:
            raise RefusedError(
                Reason.OVERLOADED, "too many large requests at once; try again later", 1.0
            )
        self._held_bytes += size

    async def _receive(self, receive: Receive, held: _Held) -> bytes:
        """How long it may take is the connection's business (connections.py)."""
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message["body"])
            held.take(len(parts[-1]))
            if held.size > self._limits.body_bytes:
                raise self._too_large()
            if not message["more_body"]:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _decompress(self, body: bytes, coding: bytes) -> bytes:
        if coding not in _WINDOWS:
            raise HTTPException(
                501, "send the body as gzip, deflate or plain", {"accept-encoding": "gzip, deflate"}
            )
        if len(body) > _IN_THREAD_BYTES:
            plain = await asyncio.to_thread(self._inflate, body, coding)
        else:
            plain = self._inflate(body, coding)
        if len(plain) > self._limits.body_bytes:
            raise self._too_large()
        return plain

    def _inflate(self, body: bytes, coding: bytes) -> bytes:
        """Stops one byte after the limit."""
        stream = zlib.decompressobj(_WINDOWS[coding])
        try:
            plain = stream.decompress(body, self._limits.body_bytes + 1)
        except zlib.error as error:
            raise bad_request(f"the body is not {coding.decode()}: {error}") from None
        if len(plain) <= self._limits.body_bytes and (not stream.eof or stream.unused_data):
            raise bad_request(f"the body is not one whole {coding.decode()} stream")
        return plain

    def _too_large(self) -> HTTPException:
        line = f"a request's body may have {self._limits.body_bytes} bytes"
        return HTTPException(413, line, {"connection": "close"})  # the rest of it is not read


class _Held:
    """The bytes that one request holds."""

    def __init__(self, bodies: Bodies) -> None:
        self.size = 0
        self._bodies = bodies

    def take(self, size: int) -> None:
        self._bodies.hold(size)
        self.size += size


def choose_coding(accepted: bytes) -> bytes:
    """The best weighted of what the client accepts, the first of equals; as Triton chooses."""
    best, best_weight = b"identity", 0.0
    for choice in accepted.split(b","):
        coding, _, quality = choice.strip().partition(b";q=")
        try:
            weight = float(quality) if quality else 1.0
        except ValueError:
            continue
        if (coding in _WINDOWS or coding == b"identity") and weight > best_weight:
            best, best_weight = coding, weight
    return best


async def compress(body: bytes, coding: bytes) -> bytes:
    if len(body) > _IN_THREAD_BYTES:
        return await asyncio.to_thread(_deflate, body, coding)
    return _deflate(body, coding)


def _deflate(body: bytes, coding: bytes) -> bytes:
    stream = zlib.compressobj(1, zlib.DEFLATED, _WINDOWS[coding])  # tensors gain little by more
    return stream.compress(body) + stream.flush()
