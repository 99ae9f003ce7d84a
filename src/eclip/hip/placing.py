"""Captured graphs on lanes of masked streams: a session's executables on HIP.

An executable is launched into a lane's stream, so no executable spans lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

from eclip.core.program import Program, Route
from eclip.gpu.closing import Releases
from eclip.gpu.executables import Capture
from eclip.gpu.pieces import Piece
from eclip.hip.api import EVENT_DISABLE_TIMING, Hip
from eclip.hip.graphs import instantiate, instantiate_piece


class HipPlacer:
    most_executables = 1024  # each has a queue in host memory

    def __init__(self, hip: Hip, streams: Sequence[int]) -> None:
        self.streams = streams
        self._hip = hip

    def check(self, program: Program, captures: Sequence[Capture]) -> None:
        """Without clusters every kernel fits every lane."""

    def place(self, capture: Capture, route: Route, pieces: Sequence[Piece]) -> list[int]:
        made: list[int] = []
        try:
            made.extend(instantiate_piece(self._hip, capture.graph, piece) for piece in pieces)
        except BaseException:
            for executable in made:
                self.destroy_executable(executable)
            raise
        return made

    def place_whole(self, capture: Capture, route: Route, owner: Releases) -> int:
        """As it was captured: it is asked for where a graph cannot be cut, and that is linear."""
        return instantiate(self._hip, capture.graph.graph)

    def upload(self, executable: int, stream: int) -> None:
        if self._hip.has("hipGraphUpload"):
            self._hip.call("hipGraphUpload", executable, stream)

    def destroy_executable(self, executable: int) -> None:
        self._hip.call("hipGraphExecDestroy", executable)

    def make_event(self) -> int:
        return self._hip.made("hipEventCreateWithFlags", EVENT_DISABLE_TIMING)

    def destroy_event(self, event: int) -> None:
        self._hip.call("hipEventDestroy", event)
