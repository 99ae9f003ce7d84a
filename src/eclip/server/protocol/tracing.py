"""What a caller learns of a request's time, and finds of it in the log.

Answers say how long a request waited, ran and took, as ``Server-Timing``. A request whose
``traceparent`` asks for a record (its last field is odd) has a line in the log; a front writes at
most so many a second, since callers decide.
"""

from __future__ import annotations

import re
import time

from eclip.server.log import note
from eclip.server.messages import InferRequest, InferResponse

_TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MOST_A_SECOND = 50


def trace_fields(trace: str | bytes | None) -> dict[str, str]:
    """A field of the log, if this is a ``traceparent``."""
    text = trace.decode("latin-1") if isinstance(trace, bytes) else trace
    return {} if text is None or not _TRACE.fullmatch(text) else {"traceparent": text}


class Tracing:
    """Of one front and protocol."""

    def __init__(self) -> None:
        self._second = self._written = 0

    def timing(
        self, request: InferRequest, response: InferResponse, trace: str | bytes | None
    ) -> str:
        """Milliseconds as ``Server-Timing`` has them; those of the device where it is known."""
        now_ns = time.monotonic_ns()
        spans = {"total": now_ns - request.arrival_ns}
        if response.device_ns:
            spans = {"queue": response.queue_ns, "device": response.device_ns, **spans}
        if trace is not None:
            self._note(request.model, spans, trace_fields(trace), now_ns // 10**9)
        return ", ".join(f"{name};dur={ns / 1e6:.3f}" for name, ns in spans.items())

    def _note(self, model: str, spans: dict[str, int], fields: dict[str, str], second: int) -> None:
        if not fields or not int(fields["traceparent"][-1], 16) & 1:
            return
        if second != self._second:
            self._second, self._written = second, 0
        self._written += 1
        if self._written <= _MOST_A_SECOND:
            times = {f"{name}_ms": round(ns / 1e6, 3) for name, ns in spans.items()}
            note("request", model=model, **fields, **times)
