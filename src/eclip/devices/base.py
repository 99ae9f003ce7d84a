"""The device contract. The unit of work is a request; the device owns the loop.

A device opens a program with one source per worker and gives a session that owns lanes and
executables. A session runs a load and returns a run log; nothing steps through kernels in Python.
Every device passes ``tests/conformance``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from eclip.artefacts.plan import Plan
from eclip.artefacts.runlog import RunLog
from eclip.artefacts.topology import Topology
from eclip.artefacts.trace import Trace
from eclip.devices.load import MAX_SECONDS, Load
from eclip.errors import MismatchError, UsageError
from eclip.runtime.program import Program

Source = TypeVar("Source", contravariant=True)  # what a worker runs from: a Profile, a capture


MIN_SECONDS = 0.001  # of a run: less holds no request, and its power would be a guess


@dataclass(frozen=True)
class Window:
    """How long to run, how long to warm up before, and how much of it to trace kernel by kernel."""

    seconds: float = 2.0
    warmup_seconds: float = 0.1
    trace_ms: float = 20.0

    def __post_init__(self) -> None:
        if not MIN_SECONDS <= self.seconds <= MAX_SECONDS:
            raise UsageError(
                f"a run takes {MIN_SECONDS:g} to {MAX_SECONDS:.0f} s, not {self.seconds:g}; "
                f"change --seconds"
            )
        if not 0 <= self.warmup_seconds <= MAX_SECONDS:
            raise UsageError(
                f"warming up takes 0 to {MAX_SECONDS:.0f} s, not {self.warmup_seconds:g}; "
                f"change --warmup"
            )
        # A hair of room: 1000 × seconds may round below the same time given in ms.
        if not 0 <= self.trace_ms <= 1000 * self.seconds * (1 + 1e-12):
            raise UsageError(
                f"kernels are recorded for 0 to {1000 * self.seconds:g} ms, which is the whole "
                f"run, not {self.trace_ms:g} ms; change --trace-ms"
            )


def check_sources(plan: Plan, traces: Sequence[Trace]) -> None:
    """Refuse to open a plan with sources that launch other kernels than it was made for."""
    if len(traces) != len(plan.workers):
        raise MismatchError(
            f"the plan has {len(plan.workers)} workers, {len(traces)} sources given"
        )
    for worker, trace in zip(plan.workers, traces, strict=True):
        if trace.digest != plan.fingerprint.traces[worker.model]:
            raise MismatchError(
                f"the source of worker {worker.name} launches other kernels than its plan was made "
                f"for; plan again from its profile"
            )


def check_load(plan: Plan, load: Load) -> None:
    if len(load.arrivals) != len(plan.workers):
        raise UsageError(f"the load is for {len(load.arrivals)} workers, not {len(plan.workers)}")


class Closing:
    """Something with a ``close`` that a ``with`` block calls at its end."""

    def close(self) -> None:
        """Release everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Session(Protocol):
    def run(self, load: Load, window: Window, alone_rps: Sequence[float]) -> RunLog:
        """Run the load for the window. ``alone_rps`` (see alone.py) goes into the log as it is."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class Device(Protocol[Source]):
    @property
    def topology(self) -> Topology: ...

    def open(self, program: Program, sources: Sequence[Source]) -> Session: ...
