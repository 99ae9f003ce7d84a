"""Executables of a session: a worker's route on its lanes, as steps that the loop takes.

A route is one graph per group, chained by events, or one graph of everything, where a vendor's
graphs may span lanes. A worker with joints has a graph for every stretch, and for every lane that
it may move to; they are cut once and shared by all variants. The caller owns the steps and what
they launch. Only the vendor knows how a graph comes onto a lane (``LanePlacer``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from eclip.core.device import Closing
from eclip.core.plan import PlannedWorker
from eclip.core.program import Program, Route
from eclip.core.rules import Rules
from eclip.core.trace import Trace
from eclip.errors import DeviceError, UsageError
from eclip.gpu.closing import Releases
from eclip.gpu.pieces import CapturedGraph, Piece
from eclip.gpu.recording import Placed
from eclip.gpu.steps import LAUNCH, Steps, chained, steps_of


@dataclass(frozen=True)
class Buffer:
    """Device memory of an input or an output, the same in every request."""

    address: int
    size_bytes: int


@dataclass(frozen=True)
class Staging:
    """Memory for inputs in row-major order, and the raw graph that brings them into the model's."""

    inputs: Sequence[Buffer]
    graph: int
    owner: Closing


@dataclass(frozen=True)
class Capture:
    """A captured model: the graph, its trace, and whatever must live as long as it.

    A graph with a loop cannot be moved; ``recapture`` captures the model again on a lane's stream
    and gives the raw graph and its owner, to be closed before that stream is. Requests have their
    tensors in row-major order. ``stage`` is for models with an input in another order. ``outputs``
    are None where one is in another order: it cannot be copied in one piece.
    """

    graph: CapturedGraph
    trace: Trace
    keep: Any = None
    recapture: Callable[[Any], tuple[int, Closing]] | None = None
    inputs: Sequence[Buffer] = ()
    outputs: Sequence[Buffer] | None = ()
    stage: Callable[[], Staging] | None = None


class LanePlacer(Protocol):
    """How captured graphs become executables on a session's lanes. Handles are the vendor's own."""

    @property
    def streams(self) -> Sequence[Any]:
        """Of every lane, in the plan's order."""
        ...

    @property
    def most_executables(self) -> int:
        """Of a session."""
        ...

    def check(self, program: Program, captures: Sequence[Capture]) -> None:
        """Refuse a plan whose kernels cannot run on their lanes."""
        ...

    def place(self, capture: Capture, route: Route, pieces: Sequence[Piece]) -> list[Any]:
        """An executable for each piece, or none of them."""
        ...

    def place_whole(self, capture: Capture, route: Route, owner: Releases) -> Any:
        """One of all that was captured; ``owner`` gets what must outlive it. A graph that cannot
        be moved has one lane."""
        ...

    def upload(self, executable: Any, stream: Any) -> None: ...

    def destroy_executable(self, executable: Any) -> None: ...

    def make_event(self) -> Any: ...

    def destroy_event(self, event: Any) -> None: ...


class Executables:
    def __init__(self, captures: Sequence[Capture], placer: LanePlacer) -> None:
        self.placed: dict[int, Placed] = {}  # by the executable's handle, while it lives
        self._cut: dict[tuple[int, ...], Any] = {}  # executables of pieces, while they live
        self._captures = captures
        self._placer = placer

    def whole(self, route: Route, owner: Releases) -> Steps:
        """One graph; its own edges are the barriers."""
        capture = self._captures[route.worker]
        if capture.graph.atomic and len(set(route.lane)) > 1:
            raise cannot_be_moved(capture)
        executable = self._placer.place_whole(capture, route, owner)
        self._keep(executable, Placed(route, range(len(route.lane))), owner)
        stream = self._placer.streams[route.lane[0]]
        self._placer.upload(executable, stream)
        return steps_of([(LAUNCH, executable, stream)], barriers=route.barriers)

    def segments(self, route: Route, owner: Releases) -> Steps:
        """A graph for every segment; an event for every barrier."""
        graph = self._captures[route.worker].graph
        if graph.atomic:
            return self.whole(route, owner)
        cut = [graph.piece(kernels) for kernels in route.segments()]
        self._place(route, cut, owner)
        return self._chain(route, cut, owner)

    def stretches(self, route: Route, stretches: Sequence[range], owner: Releases) -> list[Steps]:
        """The same for every stretch of a worker with joints. Long copies are stretches of their
        own, in parts. What comes between two stretches is the loop's to say."""
        capture = self._captures[route.worker]
        graph = capture.graph
        if graph.atomic:
            if len(stretches) > 1:
                raise DeviceError(
                    f"{capture.trace.model} has {graph.obstacle} in its graph, so it cannot be cut "
                    f"into stretches; plan it without joints"
                )
            return [self.whole(route, owner)]
        cuts = [
            graph.at_barriers(piece, route)
            for within in stretches
            for piece in graph.pieces(within)
        ]
        self._place(route, [piece for cut in cuts for piece in cut], owner)
        return [self._chain(route, cut, owner) for cut in cuts]

    def _chain(self, route: Route, pieces: Sequence[Piece], owner: Releases) -> Steps:
        streams = self._placer.streams
        parts = []
        for index, piece in enumerate(pieces):
            barrier = None
            if index > 0:
                event = self.event(owner)
                barrier = (event, streams[route.wait_on[piece.kernels.start]])
            parts.append((self._cut[_key(route, piece)], streams[piece.lane(route)], barrier))
        return chained(parts)

    def event(self, owner: Releases) -> Any:
        event = self._placer.make_event()
        owner.callback(self._placer.destroy_event, event)
        return event

    def progress(
        self, worker: int, planned: PlannedWorker, rules: Rules, owner: Releases
    ) -> tuple[list[Any], list[int]]:
        """Events, one for each stretch in flight where there are several; and how far a request
        alone is at the end of every stretch, parts of copies included: they count with what follows
        them."""
        graph = self._captures[worker].graph
        done_ns: list[int] = rules.done_ns.tolist()
        if planned.joints is not None and not graph.atomic:
            ends, done_ns = done_ns, []
            for within, after_ns in zip(rules.stretches(planned.kernels), ends, strict=True):
                before_ns = done_ns[-1] if done_ns else 0
                done_ns += [before_ns] * (len(graph.pieces(within)) - 1) + [after_ns]
        in_flight = rules.depth if len(done_ns) > 1 else 0
        return [self.event(owner) for _ in range(in_flight)], done_ns

    def _place(self, route: Route, pieces: Sequence[Piece], owner: Releases) -> None:
        """Instantiate each piece on its first request."""
        missing = [piece for piece in pieces if _key(route, piece) not in self._cut]
        if not missing:
            return
        most = self._placer.most_executables
        if len(self._cut) + len(missing) > most:
            raise UsageError(
                f"the plan needs more than {most} executables; plan it with a larger grain or "
                f"fewer lanes to move to"
            )
        executables = self._placer.place(self._captures[route.worker], route, missing)
        for piece, executable in zip(missing, executables, strict=True):
            self._keep(executable, Placed(route, piece.kernels), owner)  # before anything can fail
            key = _key(route, piece)
            self._cut[key] = executable
            owner.callback(self._cut.pop, key)
        for piece, executable in zip(missing, executables, strict=True):
            self._placer.upload(executable, self._placer.streams[piece.lane(route)])

    def _keep(self, executable: Any, part: Placed, owner: Releases) -> None:
        owner.callback(self._placer.destroy_executable, executable)
        handle = int(executable)
        self.placed[handle] = part
        owner.callback(self.placed.pop, handle)


def cannot_be_moved(capture: Capture) -> DeviceError:
    return DeviceError(
        f"{capture.trace.model} has {capture.graph.obstacle} in its graph, so it runs whole on one "
        f"lane; plan it with a policy that does not switch lanes: shared or model"
    )


def _key(route: Route, piece: Piece) -> tuple[int, ...]:
    return route.worker, piece.lane(route), *piece.place
