"""An AMD GPU as a device: captures in, run logs out.

Plans run as segments, linear graphs launched into streams with CU masks (``eclip/gpu``). Not
offered: priorities (masked streams have none), turns and processes (no MPS), clusters, kernel
records. docs/amd.md lists the tests, which all ran without an AMD GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from eclip.core.device import Capability, Slot, SourceKind
from eclip.core.plan import Lane, Lanes, Plan, Sharing
from eclip.core.program import Program
from eclip.errors import DeviceError, TracingError, UsageError
from eclip.gpu.closing import Releases
from eclip.gpu.device import SessionOwner, check_plan
from eclip.gpu.executables import Capture
from eclip.gpu.session import Execution, GpuSession
from eclip.hip.driver import HipGpu, check_version
from eclip.hip.energy import RocmSmi
from eclip.hip.lanes import MaskedLanes, MaskedStreams, read_topology
from eclip.hip.placing import HipPlacer
from eclip.progress import Progress


class HipDevice(SessionOwner):
    modelled = False

    def __init__(
        self,
        index: int = 0,
        progress: Progress | None = None,
        library: Path | None = None,
        nodes: Path | None = None,
    ) -> None:
        """``library`` and ``nodes`` stand in for ROCm's libraries and the kernel driver's files."""
        super().__init__()
        self.index = index
        self.gpu = HipGpu(index, library, nodes)
        check_version(self.gpu.version)
        self.topology = read_topology(self.gpu)
        self.driver: str = self.gpu.version
        self._streams = MaskedStreams(self.gpu)
        self._releases.callback(self._streams.close)
        self.counter = self._find_counter(library)
        self.progress = progress or Progress()  # whose stop request ends a run early

    @property
    def capabilities(self) -> frozenset[Capability]:
        energy = {Capability.ENERGY} if self.counter is not None else set()
        return frozenset({Capability.JOINTS, *energy})

    @property
    def title(self) -> str:
        return f"{self.topology.title}, HIP {self.driver}"

    @property
    def uuid(self) -> str:
        return self.gpu.uuid

    def energy_mj(self) -> int | None:
        return None if self.counter is None else self.counter.energy_mj()

    def source_kind(self, sharing: Sharing) -> SourceKind:
        return SourceKind.CAPTURE

    def open(self, program: Program, sources: Sequence[Any], *, brief: bool = False) -> GpuSession:
        self._check_open()
        plan = program.plan
        if not isinstance(plan.sharing, Lanes):
            self._refuse_processes()
        warnings = [*check_plan(plan, sources, self.topology), *_priority_warnings(plan)]
        session = GpuSession(self, program, sources, warnings, Execution.SEGMENTS)
        self._sessions.add(session)
        return session

    def start(self, plans: Sequence[Plan], jobs: Sequence[Sequence[Any]]) -> NoReturn:
        self._refuse_processes()

    def _refuse_processes(self) -> NoReturn:
        raise UsageError(
            "an AMD GPU is shared by lanes only: there is no MPS, and turns of processes are not "
            "offered; choose another policy"
        )

    # --- What sessions ask ----------------------------------------------------------------------

    def place_lanes(self, lanes: Sequence[Lane], owner: Releases) -> HipPlacer:
        pool = MaskedLanes(self._streams, lanes)
        owner.callback(pool.close)
        return HipPlacer(self.gpu.hip, pool.streams)

    def prepare_slots(
        self,
        captures: Sequence[Capture],
        slots: int | Sequence[Sequence[Slot]],
        owner: Releases,
    ) -> NoReturn:
        raise DeviceError("requests cannot be submitted on this kind of GPU yet; use run")

    def tracer(self, names: Iterable[str]) -> NoReturn:
        raise TracingError("nothing here records kernels of an AMD GPU yet")

    def _find_counter(self, library: Path | None) -> RocmSmi | None:
        with contextlib.suppress(DeviceError):
            counter = RocmSmi(self.gpu.bus_place, library)
            self._releases.callback(counter.close)
            return counter
        return None


def _priority_warnings(plan: Plan) -> list[str]:
    if any(lane.priority for lane in plan.lanes):
        return ["priorities do nothing here: HIP gives streams with a CU mask none"]
    return []
