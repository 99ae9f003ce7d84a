"""The device contract. The unit of work is a request; the device owns the loop.

A device opens a program with one source per worker and gives a session that owns lanes and
executables. A session runs a load and returns a run log, or it serves: requests are submitted one
by one while it runs. Both feed the same loop; nothing steps through kernels in Python.
What a device can do beyond that is asked (``capabilities``), never guessed from its type. Every
device passes ``tests/conformance``, which has a tag for each capability.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from eclip.core.load import MAX_SECONDS, Load
from eclip.core.plan import Plan, Sharing
from eclip.core.program import Program
from eclip.core.runlog import RunLog
from eclip.core.topology import Topology
from eclip.core.trace import Trace
from eclip.errors import MismatchError, UsageError

if TYPE_CHECKING:  # it imports this module
    from eclip.core.requests import Doors, LoopGroup


class Capability(enum.Enum):
    """What a device may be able to do. A plan that needs it is refused where it is missing, except
    for priorities: there the plan runs without them, and its log says so."""

    PRIORITIES = "priorities"  # kernels of one lane go before those of another
    TURNS = "turns"  # workers take turns of the whole device
    PROCESSES = "processes"  # a process for every worker, with shares
    TRACE = "trace"  # the kernels of a run are recorded
    ENERGY = "energy"  # a run's energy is known
    CLUSTERS = "clusters"  # kernels whose thread blocks must be resident together
    JOINTS = "joints"  # workers give way while they run
    SUBMIT = "submit"  # requests are submitted while a session of lanes serves


class SourceKind(enum.Enum):
    """What a worker of a session runs from."""

    PROFILE = "profile"  # its profile: time is modelled
    CAPTURE = "capture"  # a capture of its model in this process
    JOB = "job"  # the name of its model, which another process builds


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
                f"change the seconds"
            )
        if not 0 <= self.warmup_seconds <= MAX_SECONDS:
            raise UsageError(
                f"warming up takes 0 to {MAX_SECONDS:.0f} s, not {self.warmup_seconds:g}; "
                f"change the warm-up"
            )
        # A hair of room: 1000 × seconds may round below the same time given in ms.
        if not 0 <= self.trace_ms <= 1000 * self.seconds * (1 + 1e-12):
            raise UsageError(
                f"kernels are recorded for 0 to {1000 * self.seconds:g} ms, which is the whole "
                f"run, not {self.trace_ms:g} ms; trace less"
            )


def check_sources(plan: Plan, traces: Sequence[Trace]) -> None:
    """Refuse to open a plan with sources that launch other kernels than it was made for."""
    if len(traces) != len(plan.workers):
        raise MismatchError(
            f"the plan has {len(plan.workers)} workers, {len(traces)} sources given"
        )
    for worker, trace in zip(plan.workers, traces, strict=True):
        if trace.digest != plan.fingerprint.traces[str(worker.model)]:
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


Bytes = npt.NDArray[np.uint8]
# Why a completed request has no result; any other reason is a line of the device's.
CANCELLED = "cancelled"
EXPIRED = "expired"
CLOSED = "the session was closed"
FOREVER_S = float("inf")


@dataclass(frozen=True, slots=True)
class Slot:
    """Host memory for one request: a flat buffer for every input and output of a worker's source,
    in their order. A device that models time has neither."""

    inputs: tuple[Bytes, ...] = ()
    outputs: tuple[Bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """How a submitted request ended. Times are CLOCK_MONOTONIC's; the arrival is its submission."""

    ticket: int
    worker: int
    slot: int  # free again, and with an error of None its outputs are written
    arrival_ns: int
    start_ns: int  # its end, where it never began
    end_ns: int
    error: str | None


class Session(Protocol):
    """It runs or serves, one at a time.

    Serving: every ticket is completed exactly once, a worker's tickets in the order in which they
    were submitted. All methods may be called from any thread.
    """

    def run(self, load: Load, window: Window) -> RunLog:
        """Run the load for the window. The log has no rates alone: who runs knows them."""
        ...

    def serve(
        self,
        slots: int | Sequence[Sequence[Slot]] = 1,
        background: Collection[int] = (),
        groups: Sequence[LoopGroup] | None = None,
    ) -> None:
        """Begin to take requests, until the session is closed.

        ``slots``: so many for every worker, made here; or those of each worker, in memory of the
        caller's that lives as long as the session. Workers in ``background`` run requests of their
        own, back to back, whenever they have no submitted one. ``groups``: of the workers of a
        group one runs at a time, in the order of submission; by default each is a group.
        """
        ...

    @property
    def doors(self) -> Doors:
        """Through which other processes submit, while it serves."""
        ...

    @property
    def failure(self) -> str:
        """Why a session that has failed serves no more; else nothing."""
        ...

    def slots(self, worker: int) -> Sequence[Slot]:
        """By number: inputs are written there before ``submit``, outputs read after ``poll``."""
        ...

    def submit(self, worker: int, slot: int, deadline_ns: int | None = None) -> int:
        """The ticket of a request that is accepted; never blocks.

        From here on others give way to its worker. A slot is taken until ``poll`` has given out its
        completion; one that is taken raises FullError. A request that is past its deadline when its
        turn comes is not run, and one that runs stops at its next joint: its error is EXPIRED.
        """
        ...

    def cancel(self, ticket: int) -> None:
        """Do not begin it, or stop it at its next joint: its error is CANCELLED. One that has no
        joint left ends with its result; one that has ended is left as it is."""
        ...

    def poll(self, timeout_s: float = 0.0) -> Sequence[Completion]:
        """What has ended since the last call; waits this long for something. After ``close`` it
        gives out what is left."""
        ...

    @property
    def wakeup(self) -> int:
        """A file descriptor that becomes readable when ``poll`` has something, and is reset by it.
        The session owns it. It may be readable for nothing."""
        ...

    def drain(self, worker: int | None = None, timeout_s: float = FOREVER_S) -> bool:
        """Wait until what was submitted so far, to a worker or to all, has ended. Nothing is
        dropped, and ``poll`` still gives it out. False if it takes longer."""
        ...

    @property
    def served(self) -> Sequence[int]:
        """Per worker: requests run to their end since it serves, background's own included."""
        ...

    @property
    def yielded(self) -> Sequence[int]:
        """Per worker: how often these requests gave way."""
        ...

    def close(self) -> None:
        """In any state. What runs ends; what is open and has not begun is completed with CLOSED."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class StartedSessions(Protocol):
    """Sessions whose workers are processes, all starting at once."""

    @property
    def sessions(self) -> Sequence[Session]: ...

    def wait(self) -> None:
        """Until every process is ready to run."""
        ...

    def close(self) -> None: ...


class Device(Protocol):
    @property
    def topology(self) -> Topology: ...

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    @property
    def title(self) -> str:
        """The device and its driver, for a person."""
        ...

    @property
    def modelled(self) -> bool:
        """Its time and energy are a simulator's."""
        ...

    @property
    def driver(self) -> str | None:
        """The driver's version, where it has one."""
        ...

    @property
    def index(self) -> int:
        """Which of the host's devices it is."""
        ...

    @property
    def uuid(self) -> str | None:
        """Which of all devices it is; None: it is modelled, and nobody else uses it."""
        ...

    def energy_mj(self) -> int | None:
        """What it has drawn since some moment; None: it does not tell. A simulator's is modelled,
        of sessions that serve."""
        ...

    def source_kind(self, sharing: Sharing) -> SourceKind:
        """What workers run from in a session of a plan that shares the device like this."""
        ...

    def open(self, program: Program, sources: Sequence[Any], *, brief: bool = False) -> Session:
        """A session of the program; ``brief``: for runs so short that to open it fast counts."""
        ...

    def start(self, plans: Sequence[Plan], jobs: Sequence[Sequence[Any]]) -> StartedSessions:
        """Sessions of plans whose workers are processes, not waited for yet."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...
