"""What the protocols (HTTP, gRPC) and the core of a front say to each other.

A protocol turns bytes into an ``InferRequest`` and an ``InferResponse`` into bytes. The core
answers every accepted request exactly once: with its result, or with a ``RefusedError`` that says
why.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eclip.errors import EclipError

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


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    datatype: str
    data: Array  # its shape is the tensor's, batch included


@dataclass(frozen=True, slots=True)
class InferRequest:
    model: str
    inputs: Sequence[Tensor]
    arrival_ns: int  # monotonic: when its last byte was read
    id: str = ""
    outputs: Sequence[str] = ()  # none: all
    timeout_ns: int | None = None  # from arrival
    priority: int = 0  # 0: the service's own; 1 is the highest


@dataclass(frozen=True, slots=True)
class InferResponse:
    model: str
    outputs: Sequence[Tensor]
    id: str = ""
    version: str = "1"


class Reason(enum.Enum):
    """Why a request has no result; each protocol has a status for each."""

    BAD_REQUEST = "bad request"  # 400, INVALID_ARGUMENT
    UNKNOWN_MODEL = "unknown model"  # 404, NOT_FOUND
    OVERLOADED = "overloaded"  # 429 with Retry-After, RESOURCE_EXHAUSTED
    NOT_READY = "not ready"  # 503 with Retry-After, UNAVAILABLE
    EXPIRED = "expired"  # 504, DEADLINE_EXCEEDED
    CANCELLED = "cancelled"  # 499, CANCELLED
    FAILED = "failed"  # 500, INTERNAL


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


class Core(Protocol):
    """What stands behind the protocols in a front."""

    @property
    def models(self) -> Mapping[str, ModelInfo]:
        """Every configured model, loaded or not."""
        ...

    @property
    def live(self) -> bool: ...

    @property
    def ready(self) -> bool:
        """Every model that should be loaded is ready, and nobody asked the server to stop."""
        ...

    def model_ready(self, name: str) -> bool:
        """Loaded, and every batch bucket is warm."""
        ...

    def statistics(self, name: str) -> Statistics: ...

    async def infer(self, request: InferRequest) -> InferResponse:
        """Its result, or ``RefusedError``. Cancelling the task cancels the request."""
        ...

    async def load(self, name: str) -> None: ...

    async def unload(self, name: str) -> None: ...
