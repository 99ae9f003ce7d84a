"""What a session asks of a vendor's device, and what all such devices share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from eclip.core.device import Closing, Slot, check_sources
from eclip.core.memory import check_memory, memory_of_plan
from eclip.core.plan import MOST_VARIANTS, Lane, Plan, account_warnings
from eclip.core.topology import Topology
from eclip.errors import DeviceError, UsageError
from eclip.gpu.closing import Owner, Releases, WaitingGpu
from eclip.gpu.energy import EnergyCounter
from eclip.gpu.executables import Capture, LanePlacer
from eclip.gpu.recording import Span
from eclip.gpu.steps import Words
from eclip.gpu.worker_loop import LoopGpu
from eclip.progress import Progress


class SessionGpu(LoopGpu, WaitingGpu, Protocol):
    """What a session asks of a GPU."""

    @property
    def uuid(self) -> str: ...

    def free_memory(self) -> int:
        """Bytes of free memory."""
        ...

    def quicken(self) -> None:
        """Bring the GPU into the state in which sessions are measured."""
        ...


class KernelTracer(Protocol):
    """Records kernels while its block lasts."""

    @property
    def spans(self) -> Sequence[Span]:
        """In order of start; there when the block has ended."""
        ...

    def executable_id(self, handle: int) -> int:
        """What spans call this executable."""
        ...


class SessionDevice(Protocol):
    """What a session asks of its device: all that differs from one vendor to another."""

    progress: Progress  # whose stop request ends a run early

    @property
    def gpu(self) -> SessionGpu: ...

    @property
    def title(self) -> str: ...

    @property
    def counter(self) -> EnergyCounter | None:
        """None: there is nothing to measure energy with."""
        ...

    def place_lanes(self, lanes: Sequence[Lane], owner: Releases) -> LanePlacer:
        """Make these lanes, which ``owner`` releases."""
        ...

    def prepare_slots(
        self,
        captures: Sequence[Capture],
        slots: int | Sequence[Sequence[Slot]],  # so many for each, or these
        owner: Releases,
    ) -> tuple[Sequence[Sequence[Slot]], Sequence[Words]]:
        """The slots of every capture, and the executables that copy them (``loop.drive``)."""
        ...

    def tracer(self, names: Iterable[str]) -> AbstractContextManager[KernelTracer]:
        """For kernels of these names; a TracingError where none are recorded."""
        ...


class SessionOwner(Owner):
    """A device that closes its sessions before itself: what they own lives in it."""

    def __init__(self) -> None:
        self._sessions: weakref.WeakSet[Closing] = weakref.WeakSet()
        self._releases = Releases()
        self._closed = False

    def close(self) -> None:
        self._closed = True
        for session in list(self._sessions):
            self._releases.callback(session.close)
        self._releases.close()

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError("the device is closed; make another one")


def check_plan(plan: Plan, captures: Sequence[Capture], topology: Topology) -> tuple[str, ...]:
    """Refuse what cannot run on a GPU of this topology; what differs and does no harm."""
    warnings = plan.fingerprint.check(topology.fingerprint, "the plan", topology.title)
    warnings += account_warnings(plan)
    check_sources(plan, [capture.trace for capture in captures])
    check_memory(memory_of_plan(plan, topology), "the plan")
    if any(_variants_of(plan, worker) > MOST_VARIANTS for worker in plan.everyone):
        raise UsageError(f"a worker can have at most {MOST_VARIANTS} variants of a plan")
    return warnings


def _variants_of(plan: Plan, worker: int) -> int:
    return sum(worker in variant.active for variant in plan.variants)
