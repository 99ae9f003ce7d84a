"""Executables of a session: a worker's route on its lanes, as steps that the loop takes.

A route is one graph whose nodes live in several contexts, or one graph per group chained by events.
A worker with joints has a graph for every stretch, and for every lane that it may move to; they are
cut once and shared by all variants. Whoever asks for steps owns what they launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eclip.artefacts.plan import PlannedWorker
from eclip.artefacts.trace import Trace
from eclip.devices.base import Closing
from eclip.devices.cuda.driver import call, cu
from eclip.devices.cuda.graphs import CapturedGraph, Executable, Piece, place_pieces, place_whole
from eclip.devices.cuda.lanes import GpuLane
from eclip.devices.gpu import loop
from eclip.devices.gpu.closing import Releases
from eclip.devices.gpu.recording import Placed
from eclip.errors import DeviceError, UsageError
from eclip.runtime.program import Conduct, Route

MOST_EXECUTABLES = 8192  # of a session: instantiating more takes minutes


@dataclass(frozen=True)
class Buffer:
    """Device memory of an input or an output, the same in every request."""

    address: int
    size_bytes: int


@dataclass(frozen=True)
class Capture:
    """A captured model: the graph, its trace, and whatever must live as long as it.

    A graph with a loop cannot be moved; ``recapture`` captures the model again on a lane's stream
    and gives the raw graph and its owner, to be closed before that stream is. ``outputs`` are None
    where one is not contiguous: it cannot be copied in one piece.
    """

    graph: CapturedGraph
    trace: Trace
    keep: Any
    recapture: Callable[[Any], tuple[int, Closing]] | None = None
    inputs: Sequence[Buffer] = ()
    outputs: Sequence[Buffer] | None = ()


class Executables:
    def __init__(self, captures: Sequence[Capture], lanes: Sequence[GpuLane]) -> None:
        self.placed: dict[int, Placed] = {}  # by the executable's handle, while it lives
        self._cut: dict[tuple[int, ...], Executable] = {}  # segments, while they live
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
        launch = (loop.LAUNCH, executable.handle, first.stream)
        return loop.steps_of([launch], barriers=route.barriers)

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
        graph = self._captures[route.worker].graph
        if graph.atomic:
            return self.whole(route, owner)
        cut = [graph.piece(kernels) for kernels in route.segments()]
        self._place(route, cut, owner)
        return self._chain(route, cut, owner)

    def stretches(
        self, route: Route, stretches: Sequence[range], owner: Releases
    ) -> list[loop.Steps]:
        """The same for every stretch of a worker with joints. Long copies are stretches of their
        own, in parts. What comes between two stretches is the loop's to say."""
        source = self._captures[route.worker]
        if source.graph.atomic:
            if len(stretches) > 1:
                raise DeviceError(
                    f"{source.trace.model} has a loop in its graph, so it cannot be cut into "
                    f"stretches; plan it without joints"
                )
            return [self.whole(route, owner)]
        cuts = [
            _at_barriers(source.graph, piece, route)
            for within in stretches
            for piece in source.graph.pieces(within)
        ]
        self._place(route, [piece for cut in cuts for piece in cut], owner)
        return [self._chain(route, cut, owner) for cut in cuts]

    def _chain(self, route: Route, pieces: Sequence[Piece], owner: Releases) -> loop.Steps:
        parts = []
        for index, piece in enumerate(pieces):
            barrier = None
            if index > 0:
                event = self.event(owner)
                barrier = (event, self._lanes[route.wait_on[piece.kernels.start]].stream)
            executable = self._cut[_key(route, piece)]
            parts.append((executable.handle, self._lane(route, piece).stream, barrier))
        return loop.chained(parts)

    def event(self, owner: Releases) -> Any:
        event = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        owner.callback(call, cu.cuEventDestroy, event)
        return event

    def behaviour(
        self, worker: int, planned: PlannedWorker, conduct: Conduct, owner: Releases
    ) -> loop.Behaviour:
        done_ns = self._done_ns(worker, conduct, planned)
        in_flight = conduct.depth if len(done_ns) > 1 else 0
        return loop.Behaviour(
            rules=conduct.rules,
            events=tuple(int(self.event(owner)) for _ in range(in_flight)),
            done_ns=tuple(done_ns),
            bound_ns=planned.promise.bound_ns if planned.promise else 0,
            floor=planned.floor,
        )

    def _done_ns(self, worker: int, conduct: Conduct, planned: PlannedWorker) -> list[int]:
        """How far a request alone is at the end of every stretch, parts of copies included: they
        count with what follows them."""
        graph = self._captures[worker].graph
        if planned.joints is None or graph.atomic:
            return [int(done_ns) for done_ns in conduct.done_ns]
        done: list[int] = []
        for within, after_ns in zip(
            conduct.stretches(planned.kernels), conduct.done_ns.tolist(), strict=True
        ):
            before_ns = done[-1] if done else 0
            done += [before_ns] * (len(graph.pieces(within)) - 1) + [after_ns]
        return done

    def _place(self, route: Route, pieces: Sequence[Piece], owner: Releases) -> None:
        """Instantiate what nobody has asked for before."""
        missing = [piece for piece in pieces if _key(route, piece) not in self._cut]
        if not missing:
            return
        if len(self._cut) + len(missing) > MOST_EXECUTABLES:
            raise UsageError(
                f"the plan needs more than {MOST_EXECUTABLES} executables; plan it with a larger "
                f"grain or fewer lanes to move to"
            )
        executables = place_pieces(
            self._captures[route.worker].graph,
            self._contexts(route),
            missing,
            self._priorities(route),
        )
        for piece, executable in zip(missing, executables, strict=True):
            self._keep(executable, Placed(route, piece.kernels), owner)  # before anything can fail
            key = _key(route, piece)
            self._cut[key] = executable
            owner.callback(self._cut.pop, key)
        for piece, executable in zip(missing, executables, strict=True):
            executable.upload(self._lane(route, piece).stream)

    def _keep(self, executable: Executable, part: Placed, owner: Releases) -> None:
        owner.callback(executable.close)
        handle = int(executable.handle)
        self.placed[handle] = part
        owner.callback(self.placed.pop, handle)

    def _lane(self, route: Route, piece: Piece) -> GpuLane:
        return self._lanes[_lane_of(route, piece)]

    def _contexts(self, route: Route) -> list[Any]:
        return [self._lanes[lane].context for lane in route.lane]

    def _priorities(self, route: Route) -> list[int]:
        return [self._lanes[lane].priority for lane in route.lane]


def _at_barriers(graph: CapturedGraph, piece: Piece, route: Route) -> list[Piece]:
    """A piece cut where its route changes lanes."""
    if not piece.kernels:
        return [piece]
    last = piece.kernels[-1]  # what goes with a kernel behind a long copy may be before that copy
    return [
        Piece(
            kernels,
            frozenset(
                place for place in piece.nodes if min(graph.nodes[place].kernel, last) in kernels
            ),
        )
        for kernels in route.segments(piece.kernels)
    ]


def _lane_of(route: Route, piece: Piece) -> int:
    """A copy goes with the kernel behind it, or with the last."""
    return int(route.lane[min(piece.kernels.start, len(route.lane) - 1)])


def _key(route: Route, piece: Piece) -> tuple[int, ...]:
    return route.worker, _lane_of(route, piece), *piece.place
