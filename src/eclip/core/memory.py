"""Memory: the device memory that a plan needs, and the refusal of plans that do not fit.

The sum has three parts: every worker's footprint, a context for every process, and the memory of
partitioned lanes. Workers with an unknown footprint (``eclip record`` cannot see a program's
memory) count as 0, and a refusal names them.

The sum leaves out the spare context that makes graphs faster (``Gpu.quicken``), which is not made
without room, and other plans with open sessions.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from eclip.core.footprint import Footprint
from eclip.core.plan import Lanes, Plan
from eclip.core.topology import Topology
from eclip.errors import UsageError

_SHOWN = 3  # workers that a refusal names
_GIB = 1 << 30


class WorkerMemory(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    footprint: Footprint | None  # None: not known
    variants: int = 1  # of the plan, with this worker active

    @property
    def total_bytes(self) -> int:
        return 0 if self.footprint is None else self.footprint.total_with(self.variants)


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    capacity_bytes: int
    workers: tuple[WorkerMemory, ...]
    contexts_bytes: int  # of all processes
    lanes_bytes: int

    @property
    def total_bytes(self) -> int:
        workers_bytes = sum(worker.total_bytes for worker in self.workers)
        return workers_bytes + self.contexts_bytes + self.lanes_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.capacity_bytes


def memory_of(
    topology: Topology,
    workers: Sequence[WorkerMemory],
    *,
    lanes: int,  # with fewer than all slices; a lane of all is a stream of the process's context
    processes: int = 1,
) -> MemoryNeed:
    return MemoryNeed(
        device=topology.title,
        capacity_bytes=topology.memory_bytes,
        workers=tuple(workers),
        contexts_bytes=processes * topology.context_bytes,
        lanes_bytes=lanes * topology.lane_bytes,
    )


def memory_of_plan(
    plan: Plan, topology: Topology | None = None, processes: int | None = None
) -> MemoryNeed:
    """The memory that a plan needs. The default device is the plan's; the default is one process
    for a plan with lanes, and a process for each worker otherwise."""
    workers = [
        WorkerMemory(
            name=worker.name,
            footprint=worker.footprint,
            variants=sum(index in variant.active for variant in plan.variants),
        )
        for index, worker in enumerate(plan.workers)
    ]
    if processes is None:
        processes = 1 if isinstance(plan.sharing, Lanes) else len(workers)
    return memory_of(
        topology or plan.topology,
        workers,
        lanes=sum(lane.mask != plan.topology.full for lane in plan.lanes),
        processes=processes,
    )


def check_memory(need: MemoryNeed, subject: str) -> None:
    """Raise UsageError with the sum if the need does not fit; ``subject`` begins the sentence."""
    if need.fits:
        return
    workers = sorted(need.workers, key=lambda worker: -worker.total_bytes)
    known = [worker for worker in workers if worker.footprint is not None]
    unknown = [worker.name for worker in workers if worker.footprint is None]
    parts = [_in_words(worker, detailed=worker is known[0]) for worker in known[:_SHOWN]]
    if rest := known[_SHOWN:]:
        rest_bytes = sum(worker.total_bytes for worker in rest)
        parts.append(f"{len(rest)} more {_gib(rest_bytes)}")
    parts += [f"contexts {_gib(need.contexts_bytes)}", f"lanes {_gib(need.lanes_bytes)}"]
    if unknown:
        parts.append(f"not known and not counted: {', '.join(unknown)}")
    raise UsageError(
        f"{subject} needs {_gib(need.total_bytes)} GiB of memory and {need.device} has "
        f"{_gib(need.capacity_bytes)}: {', '.join(parts)}; use smaller batches or fewer workers"
    )


def _in_words(worker: WorkerMemory, detailed: bool) -> str:
    text = f"{worker.name} {_gib(worker.total_bytes)}"
    footprint = worker.footprint
    if footprint is None or not detailed:
        return text
    return (
        f"{text} (weights {_gib(footprint.weights_bytes)}, "
        f"activations {_gib(footprint.activations_bytes)}, "
        f"workspaces {_gib(footprint.workspaces_bytes)}, "
        f"executables {_gib(worker.variants * footprint.executables_bytes)})"
    )


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f}"
