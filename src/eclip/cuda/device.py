"""An NVIDIA GPU as a device: captures in, run logs out.

Sessions are those of every GPU (``gpu/``); this room gives them lanes of green contexts,
slots in pinned memory, kernels recorded by CUPTI, and energy by NVML.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from eclip.core.device import Capability, Slot, SourceKind
from eclip.core.plan import Lane, Lanes, Plan, Sharing
from eclip.core.program import Program
from eclip.core.topology import Topology
from eclip.cuda.driver import CONNECTIONS, Gpu
from eclip.cuda.energy import Nvml
from eclip.cuda.lanes import LanePool, Slices
from eclip.cuda.placing import CudaPlacer
from eclip.cuda.processes.child import Job
from eclip.cuda.processes.session import Host, LoneSession, ProcessSets
from eclip.cuda.slots import PinnedPages, prepare_slots
from eclip.cuda.tracer import Tracer
from eclip.gpu.closing import Releases
from eclip.gpu.device import KernelTracer, SessionOwner, check_plan
from eclip.gpu.executables import Capture
from eclip.gpu.session import Execution, GpuSession
from eclip.gpu.steps import Words
from eclip.progress import Progress


class CudaDevice(SessionOwner):
    capabilities = frozenset(Capability)
    modelled = False

    def __init__(
        self,
        gpu: int = 0,
        fine: bool = False,
        execution: Execution = Execution.AUTO,
        connections: int = CONNECTIONS,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self.execution = execution
        self.progress = progress or Progress()  # whose stop request ends a run early
        self.gpu = Gpu(gpu, connections)
        self._pinned = PinnedPages()
        try:
            self.slices = Slices(self.gpu, fine)
            self.topology: Topology = self.slices.topology()
            self.nvml = Nvml(self.gpu.uuid)
        except BaseException:
            self.gpu.close()
            raise
        for release in (self.gpu.close, self.nvml.close, self.slices.close):
            self._releases.callback(release)

    @property
    def title(self) -> str:
        return f"{self.gpu.name}, driver {self.nvml.driver()}"

    @property
    def driver(self) -> str:
        return self.nvml.driver()

    @property
    def index(self) -> int:
        return self.gpu.index

    @property
    def uuid(self) -> str:
        return self.gpu.uuid

    def energy_mj(self) -> int:
        return self.nvml.energy_mj()

    def source_kind(self, sharing: Sharing) -> SourceKind:
        return SourceKind.CAPTURE if isinstance(sharing, Lanes) else SourceKind.JOB

    def start(self, plans: Sequence[Plan], jobs: Sequence[Sequence[Job]]) -> ProcessSets:
        self._check_open()
        sets = ProcessSets(self._host, plans, jobs)
        self._sessions.add(sets)
        return sets

    @property
    def _host(self) -> Host:
        return Host(self.gpu.uuid, self.title, self.topology, self.nvml)

    def open(
        self, program: Program, sources: Sequence[Any], *, brief: bool = False
    ) -> GpuSession | LoneSession:
        self._check_open()
        plan = program.plan
        if not isinstance(plan.sharing, Lanes):
            lone = LoneSession(self._host, plan, sources)
            self._sessions.add(lone)
            return lone
        warnings = check_plan(plan, sources, self.topology)
        # To find the faster way of a plan with switches takes longer than a brief run.
        way = Execution.SEGMENTS if brief else self.execution
        session = GpuSession(self, program, sources, warnings, way)
        self._sessions.add(session)
        return session

    # --- What sessions ask ----------------------------------------------------------------------

    @property
    def counter(self) -> Nvml:
        return self.nvml

    def place_lanes(self, lanes: Sequence[Lane], owner: Releases) -> CudaPlacer:
        pool = LanePool(
            self.slices, [lane.mask for lane in lanes], [lane.priority for lane in lanes]
        )
        owner.callback(pool.close)
        return CudaPlacer(pool.lanes)

    def prepare_slots(
        self,
        captures: Sequence[Capture],
        slots: int | Sequence[Sequence[Slot]],
        owner: Releases,
    ) -> tuple[Sequence[Sequence[Slot]], Sequence[Words]]:
        return prepare_slots(captures, slots, self.gpu.context, self._pinned, owner)

    def tracer(self, names: Iterable[str]) -> AbstractContextManager[KernelTracer]:
        return Tracer(names)
