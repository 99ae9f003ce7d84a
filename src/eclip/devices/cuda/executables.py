"""Executables of a session: a worker's route on its lanes, as steps that the loop takes.

A route is one graph whose nodes live in several contexts, or one graph per group chained by events.
Whoever asks for steps owns what they launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eclip.artefacts.trace import Trace
from eclip.devices.base import Closing
from eclip.devices.cuda.closing import Releases
from eclip.devices.cuda.driver import call, cu
from eclip.devices.cuda.graphs import CapturedGraph, Executable, place_segments, place_whole
from eclip.devices.cuda.lanes import GpuLane
from eclip.devices.gpu import loop
from eclip.devices.gpu.recording import Placed
from eclip.errors import DeviceError
from eclip.runtime.program import NO_WAIT, Route


@dataclass(frozen=True)
class Capture:
    """A captured model: the graph, its trace, and whatever must live as long as it.

    A graph with a loop cannot be moved; ``recapture`` captures the model again on a lane's stream
    and gives the raw graph and its owner, to be closed before that stream is.
    """

    graph: CapturedGraph
    trace: Trace
    keep: Any
    recapture: Callable[[Any], tuple[int, Closing]] | None = None


class Executables:
    def __init__(self, captures: Sequence[Capture], lanes: Sequence[GpuLane]) -> None:
        self.placed: dict[int, Placed] = {}  # by the executable's handle, while it lives
        self._captures = captures
        self._lanes = lanes

    def whole(self, route: Route, owner: Releases) -> loop.Steps:
        """One graph; its own edges are the barriers."""
        first = self._lanes[route.lane[0]]
        source = self._captures[route.worker]
        if source.graph.atomic:
            executable = self._captured_on(first, source, route, owner)
        else:
            executable = place_whole(source.graph, self._contexts(route), self._priorities(route))
        self._keep(executable, Placed(route, range(len(route.lane))), owner)
        executable.upload(first.stream)
        return loop.steps_of([(loop.LAUNCH, executable.handle, first.stream)])

    def _captured_on(
        self, lane: GpuLane, source: Capture, route: Route, owner: Releases
    ) -> Executable:
        """A graph that cannot be moved, captured again on the one lane it is to run on."""
        if len(set(route.lane)) > 1 or source.recapture is None:
            raise DeviceError(
                f"{source.trace.model} has a loop in its graph, so it runs whole on one lane; plan "
                f"it with a policy that does not switch lanes: shared or model"
            )
        raw, graph = source.recapture(lane.stream)
        owner.callback(graph.close)  # after the executable, and while the lane is there
        return Executable(cu.CUgraph(raw))

    def segments(self, route: Route, owner: Releases) -> loop.Steps:
        """A graph for every segment; an event for every barrier."""
        if self._captures[route.worker].graph.atomic:
            return self.whole(route, owner)
        segments = route.segments()
        executables = place_segments(
            self._captures[route.worker].graph,
            self._contexts(route),
            segments,
            self._priorities(route),
        )
        for kernels, executable in zip(segments, executables, strict=True):
            self._keep(executable, Placed(route, kernels), owner)  # before anything can fail
        parts = []
        for kernels, executable in zip(segments, executables, strict=True):
            lane = self._lanes[route.lane[kernels.start]]
            waits_on = route.wait_on[kernels.start]
            barrier = None
            if waits_on != NO_WAIT:
                event = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
                owner.callback(call, cu.cuEventDestroy, event)
                barrier = (event, self._lanes[waits_on].stream)
            executable.upload(lane.stream)
            parts.append((executable.handle, lane.stream, barrier))
        return loop.chained(parts)

    def _keep(self, executable: Executable, part: Placed, owner: Releases) -> None:
        owner.callback(executable.close)
        handle = int(executable.handle)
        self.placed[handle] = part
        owner.callback(self.placed.pop, handle)

    def _contexts(self, route: Route) -> list[Any]:
        return [self._lanes[lane].context for lane in route.lane]

    def _priorities(self, route: Route) -> list[int]:
        return [self._lanes[lane].priority for lane in route.lane]
