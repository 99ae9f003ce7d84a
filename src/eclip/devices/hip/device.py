"""An AMD GPU as a device: captures in, run logs out.

Plans run as segments, linear graphs launched into streams with CU masks (``devices/gpu``). Not
offered: priorities (masked streams have none), turns and processes (no MPS), clusters, kernel
records. What was shown without an AMD GPU at hand, and what was not, is in docs/amd.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from eclip.artefacts.memory import check_memory, memory_of_plan
from eclip.artefacts.plan import MOST_VARIANTS, Lanes, Plan, Sharing
from eclip.devices.base import Capability, SourceKind, check_sources
from eclip.devices.gpu.session import Post, SegmentSession, SessionOwner
from eclip.devices.hip.driver import HipGpu, check_version
from eclip.devices.hip.energy import RocmSmi
from eclip.devices.hip.lanes import MaskedLanes, MaskedStreams, read_topology
from eclip.errors import DeviceError, UsageError
from eclip.progress import Progress
from eclip.runtime.program import Program


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
        self._counter = self._find_counter(library)
        self._progress = progress or Progress()  # whose stop request ends a run early

    @property
    def capabilities(self) -> frozenset[Capability]:
        energy = {Capability.ENERGY} if self._counter is not None else set()
        return frozenset({Capability.JOINTS, *energy})

    @property
    def title(self) -> str:
        return f"{self.topology.title}, HIP {self.driver}"

    def source_kind(self, sharing: Sharing) -> SourceKind:
        return SourceKind.GRAPH

    def open(
        self, program: Program, sources: Sequence[Any], *, brief: bool = False
    ) -> SegmentSession:
        self._check_open()
        plan = program.plan
        if not isinstance(plan.sharing, Lanes):
            self._refuse_processes()
        warnings = plan.fingerprint.check(
            self.topology.fingerprint, "the plan", self.topology.title
        )
        check_sources(plan, [source.trace for source in sources])
        check_memory(memory_of_plan(plan, self.topology), "the plan")
        for worker in plan.everyone:
            if sum(worker in variant.active for variant in plan.variants) > MOST_VARIANTS:
                raise UsageError(f"a worker can have at most {MOST_VARIANTS} variants of a plan")
        session = SegmentSession(
            Post(
                gpu=self.gpu,
                make_lanes=lambda lanes: MaskedLanes(self._streams, lanes),
                counter=self._counter,
                progress=self._progress,
                title=self.title,
            ),
            program,
            sources,
            [*warnings, *_priority_warnings(plan)],
        )
        self._sessions.add(session)
        return session

    def start(self, plans: Sequence[Plan], jobs: Sequence[Sequence[Any]]) -> NoReturn:
        self._refuse_processes()

    def _refuse_processes(self) -> NoReturn:
        raise UsageError(
            "an AMD GPU is shared by lanes only: there is no MPS, and turns of processes are not "
            "offered; choose another policy"
        )

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
