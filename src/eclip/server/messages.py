"""What the protocols (HTTP, gRPC) and the core of a front say to each other.

A protocol turns bytes into an ``InferRequest`` and an ``InferResponse`` into bytes. The core
answers every accepted request exactly once: with its result, or with a ``RefusedError`` that says
why. A protocol has checked a request against its model's ``ModelInfo``: every input is there, once,
with its datatype, a shape that fits and a batch that is neither empty nor too large. Inputs may be
read-only and unaligned: the core copies them into its slots. A protocol has written a response's
arrays out before it awaits anything again, so they may be views of a slot until then. What is made
for every request is a struct of msgspec: a frozen dataclass takes eight times as long to make.

The second half is what a server shows of itself: counters for ``/metrics`` and a state for the
live page.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.errors import EclipError

# Moments are 64-bit nanoseconds, so a timeout has an end: clients write 2^62 and more for "none".
LONGEST_TIMEOUT_NS = 10 * 365 * 24 * 3600 * 10**9

Array = npt.NDArray[np.generic]  # BYTES: one object array of ``bytes``; BF16: uint16 bit patterns


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A model's input or output. A dimension of -1 is free; batched models leave out the batch."""

    name: str
    datatype: str  # the protocol's word: FP32, INT64, BYTES, ...
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    max_batch: int  # 0: requests have no batch dimension
    platform: str = "eclip"
    version: str = "1"


class Tensor(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    data: Array  # its shape is the tensor's, batch included


class InferRequest(msgspec.Struct, frozen=True):
    model: str
    inputs: Sequence[Tensor]
    arrival_ns: int  # monotonic: when its last byte was read
    id: str = ""
    outputs: Sequence[str] = ()  # none: all
    timeout_ns: int | None = None  # from arrival
    priority: int = 0  # 0: the service's own; 1 is the highest


class InferResponse(msgspec.Struct, frozen=True):
    model: str
    outputs: Sequence[Tensor]
    id: str = ""
    version: str = "1"
    queue_ns: int = 0  # until the device began
    device_ns: int = 0


def bounded_timeout(asked_ns: float) -> int | None:
    """A request's timeout, or None where ``asked_ns`` is 0 or less, or longer than ten years."""
    return int(asked_ns) if 0 < asked_ns <= LONGEST_TIMEOUT_NS else None


class Reason(enum.Enum):
    """Why a request has no result; each protocol has a status for each."""

    BAD_REQUEST = "bad request"  # 400, INVALID_ARGUMENT
    UNKNOWN_MODEL = "unknown model"  # 404, NOT_FOUND
    ALREADY_EXISTS = "already exists"  # 400 (as Triton), ALREADY_EXISTS
    UNKNOWN_REGION = "unknown shared memory region"  # 404, NOT_FOUND
    OVERLOADED = "overloaded"  # 429 with Retry-After, RESOURCE_EXHAUSTED
    NOT_READY = "not ready"  # 503 with Retry-After, UNAVAILABLE
    EXPIRED = "expired"  # 504, DEADLINE_EXCEEDED
    CANCELLED = "cancelled"  # 499, CANCELLED
    UNSUPPORTED = "not supported"  # 501, UNIMPLEMENTED
    FAILED = "failed"  # 500, INTERNAL
    LOST = "lost"  # 503, UNAVAILABLE, no Retry-After: it was accepted, and its server ended


class RefusedError(EclipError):
    """A request without a result: one line for the client."""

    def __init__(self, reason: Reason, line: str, retry_after_s: float | None = None) -> None:
        super().__init__(line)
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Phase:
    """How often something happened, and how long it took in all."""

    count: int = 0
    ns: int = 0


@dataclass(slots=True)
class Statistics:
    """Of one model since it was loaded, in the words of the protocol's statistics extension."""

    success: Phase = field(default_factory=Phase)
    fail: Phase = field(default_factory=Phase)
    queue: Phase = field(default_factory=Phase)
    compute_input: Phase = field(default_factory=Phase)
    compute_infer: Phase = field(default_factory=Phase)
    compute_output: Phase = field(default_factory=Phase)
    inferences: int = 0  # rows
    executions: int = 0  # batches
    last_ms: int = 0  # of the last inference, in ms since the epoch


# --- What a server shows of itself ------------------------------------------------------------

# Upper ends of the histograms' buckets, in seconds; one more bucket takes all above.
BUCKETS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)


def _no_buckets() -> list[int]:
    return [0] * (len(BUCKETS_S) + 1)


@dataclass(slots=True)
class Durations:
    """A histogram: how many fell into each bucket of ``BUCKETS_S``, and their sum."""

    buckets: Sequence[int] = field(default_factory=_no_buckets)
    total_s: float = 0.0


@dataclass(slots=True)
class ServiceCounters:
    """Of one model, over all fronts. What is a share or a gauge is that of now."""

    statistics: Statistics = field(default_factory=Statistics)
    latency: Durations = field(default_factory=Durations)  # last byte read to answer handed back
    queue: Durations = field(default_factory=Durations)  # until the device began
    refused: Mapping[Reason, int] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    bound_s: float | None = None  # the promise on p99
    slack_s: float | None = None  # the least of the requests in hand; None without any or a bound
    busy_share: float = 0.0  # of the time, how much this model was running
    late: int = 0  # requests answered after the bound
    yields: int = 0
    run_again: int = 0  # requests, because the device process died


@dataclass(slots=True)
class DeviceCounters:
    busy_share: float = 0.0
    power_w: float | None = None  # None: the device does not tell
    restarts: int = 0


@dataclass(slots=True)
class ProcessCounters:
    cpu_s: float
    memory_bytes: int  # resident
    descriptors: int


@dataclass(slots=True)
class Counters:
    """What ``/metrics`` prints, keyed by the names of models and devices."""

    services: Mapping[str, ServiceCounters]
    devices: Mapping[str, DeviceCounters]
    connections: int = 0  # of HTTP, now
    connected: int = 0  # connections of HTTP since the start
    processes: Mapping[str, ProcessCounters] = field(default_factory=dict)
    failed: Collection[str] = ()  # models that should be loaded and could not be


@dataclass(slots=True)
class ServiceState:
    """A service on the live page. Rates and percentiles are those of the last few seconds."""

    name: str
    tier: str  # service or background
    ready: bool
    rate_rps: float
    goodput_rps: float  # answered within the bound; without a bound: all
    p50_ms: float | None
    p99_ms: float | None
    bound_ms: float | None
    waiting: int
    running: int
    refused_rps: float
    yields_rps: float
    slices: tuple[int, ...]  # where it runs now, or would
    active: bool  # something of it runs right now


@dataclass(slots=True)
class DeviceState:
    name: str
    slices: int
    busy_share: float
    power_w: float | None
    restarts: int
    plan: str  # in a few words: name, policy, since when
    services: tuple[ServiceState, ...]


@dataclass(slots=True)
class ServerState:
    """What the live page shows: ``GET /eclip/state``."""

    version: str
    uptime_s: float
    ready: bool
    note: str  # one line worth a person's attention (re-planning, draining), or nothing
    devices: tuple[DeviceState, ...]


class Core(Protocol):
    """What stands behind the protocols in a front."""

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        """Every configured model, loaded or not."""
        ...

    @property
    def live(self) -> bool: ...

    @property
    def started(self) -> bool:
        """It was ready once. A startup probe asks for this."""
        ...

    @property
    def ready(self) -> bool:
        """Every model that should be loaded is ready, and the server is not stopping."""
        ...

    def why_not_ready(self, name: str) -> str | None:
        """None: the model is loaded, and every batch bucket is warm."""
        ...

    def statistics(self, name: str) -> Statistics: ...

    def slack_ns(self, name: str) -> float | None:
        """What a request that came now would have left of its bound; without a bound, less what it
        would take. None: it would be refused."""
        ...

    async def infer(self, request: InferRequest) -> InferResponse:
        """Its result, or ``RefusedError``. Cancelling the task cancels the request."""
        ...

    def refuse(self, model: str, reason: Reason) -> None:
        """Count a request that a protocol refused before the core saw it. No such model: ``""``."""
        ...

    def count_connections(self, change: int) -> None:
        """A client's HTTP connection begins (1) or ends (-1)."""
        ...

    def counters(self) -> Counters: ...

    def state(self) -> ServerState: ...

    async def load(self, name: str) -> None:
        """Returns when the model is ready; ``RefusedError`` if it is unknown or cannot be."""
        ...

    async def unload(self, name: str) -> None:
        """Returns when its requests are answered and it is gone."""
        ...
