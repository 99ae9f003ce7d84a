"""Captured graphs on lanes of green contexts: a session's executables on CUDA.

A graph's nodes may live in several contexts, so one executable can span lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eclip.core.program import Program, Route
from eclip.cuda.driver import call, cu
from eclip.cuda.graphs import Executable, place_pieces, place_whole
from eclip.cuda.lanes import GpuLane
from eclip.cuda.legality import check_clusters
from eclip.gpu.closing import Releases
from eclip.gpu.executables import Capture, cannot_be_moved
from eclip.gpu.pieces import Piece


class CudaPlacer:
    most_executables = 8192  # instantiating more takes minutes

    def __init__(self, lanes: Sequence[GpuLane]) -> None:
        self.lanes = lanes
        self.streams = [lane.stream for lane in lanes]

    def check(self, program: Program, captures: Sequence[Capture]) -> None:
        graphs = [capture.graph for capture in captures]
        check_clusters(program, graphs, [capture.trace for capture in captures], self.lanes)

    def place(self, capture: Capture, route: Route, pieces: Sequence[Piece]) -> list[Any]:
        placed = place_pieces(capture.graph, self._contexts(route), pieces, self._priorities(route))
        return [executable.handle for executable in placed]

    def place_whole(self, capture: Capture, route: Route, owner: Releases) -> Any:
        """A graph that cannot be moved is captured again on the one lane it is to run on."""
        if not capture.graph.atomic:
            contexts, priorities = self._contexts(route), self._priorities(route)
            return place_whole(capture.graph, contexts, priorities).handle
        if capture.recapture is None:
            raise cannot_be_moved(capture)
        raw, graph = capture.recapture(self.streams[route.lane[0]])
        owner.callback(graph.close)  # after the executable, and while the lane is there
        return Executable(cu.CUgraph(raw)).handle

    def upload(self, executable: Any, stream: Any) -> None:
        call(cu.cuGraphUpload, executable, stream)

    def destroy_executable(self, executable: Any) -> None:
        call(cu.cuGraphExecDestroy, executable)

    def make_event(self) -> Any:
        return call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def destroy_event(self, event: Any) -> None:
        call(cu.cuEventDestroy, event)

    def _contexts(self, route: Route) -> list[Any]:
        return [self.lanes[lane].context for lane in route.lane]

    def _priorities(self, route: Route) -> list[int]:
        return [self.lanes[lane].priority for lane in route.lane]
