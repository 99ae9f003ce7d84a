"""Trace: a worker's kernels in launch order, for one input shape.

The digest covers what identifies a launch (name, grid, block, shared memory, cluster), so two
traces with one digest take the same plan.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import msgspec

from eclip.core.fingerprint import Fingerprint
from eclip.core.lengths import Lengths
from eclip.core.model_key import ModelKey

Dim3 = tuple[int, int, int]


class Kernel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One launch; its position in the request is its index in the trace."""

    name: str
    grid: Dim3
    block: Dim3
    shared_bytes: int = 0
    cluster: int = 1  # thread blocks that must be resident together

    def __post_init__(self) -> None:
        if min(*self.grid, *self.block, self.cluster) < 1 or self.shared_bytes < 0:
            raise ValueError(f"kernel {self.name!r} has an impossible launch shape")

    @property
    def blocks(self) -> int:
        return math.prod(self.grid)


class KernelLengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A variable-output kernel, with the lengths of its output over a sample of requests."""

    kernel: int  # position in the request
    lengths: Lengths


def with_traces(fingerprint: Fingerprint, traces: Iterable[Trace]) -> Fingerprint:
    """A device's fingerprint with the digests of these traces."""
    digests = {str(trace.model): trace.digest for trace in traces}
    return msgspec.structs.replace(fingerprint, traces=digests)


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kernels that a request of a model launches, in order."""

    model: ModelKey
    kernels: tuple[Kernel, ...]
    inputs: tuple[str, ...] = ()  # shapes and types a person can read, one per input
    libraries: dict[str, str] = {}
    lengths: tuple[KernelLengths, ...] = ()  # of variable-output kernels, by rising position

    def __post_init__(self) -> None:
        places = [one.kernel for one in self.lengths]
        if places != sorted(set(places)) or any(not 0 <= k < len(self.kernels) for k in places):
            raise ValueError("lengths must name kernels of the trace, each once, in order")
        if not self.kernels:
            raise ValueError("a trace needs at least one kernel")

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self.kernels)).hexdigest()
