"""Executables of a session whose plans run as segments: a graph for every group or stretch,
launched into its lane's stream, and an event for every barrier.

They are cut once and shared by all variants. Whoever asks for steps owns what they launch. Only the
vendor knows how a piece becomes an executable (``GraphPlacer``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from eclip.artefacts.plan import PlannedWorker
from eclip.artefacts.trace import Trace
from eclip.devices.gpu import loop
from eclip.devices.gpu.closing import Releases
from eclip.devices.gpu.pieces import NodeRow, RowPiece
from eclip.devices.gpu.recording import Placed
from eclip.errors import DeviceError, UsageError
from eclip.runtime.program import Conduct, Route


@dataclass(frozen=True)
class GraphSource:
    """A captured model: its graph, its trace, and whatever must live as long as it."""

    graph: NodeRow
    trace: Trace
    keep: Any = None


class GraphPlacer(Protocol):
    most_executables: int  # of a session

    def make_event(self) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    def instantiate(self, graph: NodeRow, piece: RowPiece | None, stream: int) -> int:
        """An executable of a piece, to be launched on this stream; None: of the graph as it is."""
        ...

    def destroy_executable(self, handle: int) -> None: ...


class Segments:
    def __init__(
        self, placer: GraphPlacer, sources: Sequence[GraphSource], streams: Sequence[int]
    ) -> None:
        self.placed: dict[int, Placed] = {}  # by the executable's handle, while it lives
        self._cut: dict[tuple[int, ...], int] = {}  # executables, while they live
        self._placer = placer
        self._sources = sources
        self._streams = streams  # of every lane

    def segments(self, route: Route, owner: Releases) -> loop.Steps:
        """A graph for every segment; an event for every barrier."""
        graph = self._sources[route.worker].graph
        if graph.atomic:
            return self._whole(route, owner)
        return self._chain(route, [graph.piece(kernels) for kernels in route.segments()], owner)

    def stretches(
        self, route: Route, stretches: Sequence[range], owner: Releases
    ) -> list[loop.Steps]:
        """The same for every stretch of a worker with joints. Long copies are stretches of their
        own, in parts. What comes between two stretches is the loop's to say."""
        source = self._sources[route.worker]
        graph = source.graph
        if graph.atomic:
            if len(stretches) > 1:
                raise DeviceError(
                    f"{source.trace.model} has a part in its graph that cannot be moved, so it "
                    f"cannot be cut into stretches; plan it without joints"
                )
            return [self._whole(route, owner)]
        return [
            self._chain(route, graph.at_barriers(piece, route), owner)
            for within in stretches
            for piece in graph.pieces(within)
        ]

    def _whole(self, route: Route, owner: Releases) -> loop.Steps:
        """A graph that cannot be cut, on the one lane of its route."""
        source = self._sources[route.worker]
        if len(set(route.lane)) > 1:
            raise DeviceError(
                f"{source.trace.model} has a part in its graph that cannot be moved, so it runs "
                f"whole on one lane; plan it with a policy that does not switch lanes: shared or "
                f"model"
            )
        stream = self._streams[route.lane[0]]
        handle = self._placer.instantiate(source.graph, None, stream)
        self._keep(handle, Placed(route, range(len(route.lane))), owner)
        return loop.steps_of([(loop.LAUNCH, handle, stream)])

    def _chain(self, route: Route, pieces: Sequence[RowPiece], owner: Releases) -> loop.Steps:
        parts = []
        for index, piece in enumerate(pieces):
            barrier = None
            if index > 0:
                before = self._streams[route.wait_on[piece.kernels.start]]
                barrier = (self.event(owner), before)
            stream = self._streams[piece.lane(route)]
            parts.append((self._executable(route, piece, owner), stream, barrier))
        return loop.chained(parts)

    def event(self, owner: Releases) -> int:
        event = self._placer.make_event()
        owner.callback(self._placer.destroy_event, event)
        return event

    def behaviour(
        self, worker: int, planned: PlannedWorker, conduct: Conduct, owner: Releases
    ) -> loop.Behaviour:
        done_ns = self._done_ns(worker, conduct, planned)
        in_flight = conduct.depth if len(done_ns) > 1 else 0
        return loop.Behaviour(
            rules=conduct.rules,
            events=tuple(self.event(owner) for _ in range(in_flight)),
            done_ns=tuple(done_ns),
            bound_ns=planned.promise.bound_ns if planned.promise else 0,
            floor=planned.floor,
        )

    def _done_ns(self, worker: int, conduct: Conduct, planned: PlannedWorker) -> list[int]:
        """How far a request alone is at the end of every stretch, parts of copies included: they
        count with what follows them."""
        graph = self._sources[worker].graph
        if planned.joints is None or graph.atomic:
            return [int(done_ns) for done_ns in conduct.done_ns]
        done: list[int] = []
        for within, after_ns in zip(
            conduct.stretches(planned.kernels), conduct.done_ns.tolist(), strict=True
        ):
            before_ns = done[-1] if done else 0
            done += [before_ns] * (len(graph.pieces(within)) - 1) + [after_ns]
        return done

    def _executable(self, route: Route, piece: RowPiece, owner: Releases) -> int:
        """The one that somebody asked for before, or a new one."""
        key = (route.worker, piece.lane(route), *piece.place)
        if key in self._cut:
            return self._cut[key]
        if len(self._cut) >= self._placer.most_executables:
            raise UsageError(
                f"the plan needs more than {self._placer.most_executables} executables; plan it "
                f"with a larger grain or fewer lanes to move to"
            )
        graph = self._sources[route.worker].graph
        handle = self._placer.instantiate(graph, piece, self._streams[piece.lane(route)])
        self._keep(handle, Placed(route, piece.kernels), owner)
        self._cut[key] = handle
        owner.callback(self._cut.pop, key)
        return handle

    def _keep(self, handle: int, part: Placed, owner: Releases) -> None:
        owner.callback(self._placer.destroy_executable, handle)
        self.placed[handle] = part
        owner.callback(self.placed.pop, handle)
