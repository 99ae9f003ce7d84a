"""Sessions of plans with joints: a graph for every stretch and lane, shared and released.

The driver is a stand-in that keeps account of what was made and what each executable holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from cuda_bench import Bench, Handle, RecordingDriver, Result
from eclip.core.copies import PART_BYTES
from eclip.core.plan import (
    Assignment,
    Group,
    Joints,
    Plan,
    Promise,
    Rule,
    Slack,
    Variant,
)
from eclip.core.program import program_of
from eclip.core.rules import TIER, Rules
from eclip.cuda import placing
from eclip.cuda.placing import CudaPlacer
from eclip.errors import DeviceError, EclipError, UsageError
from eclip.gpu import board as boards
from eclip.gpu import worker_loop
from eclip.gpu.executables import Capture
from eclip.gpu.pieces import CapturedGraph, Node
from eclip.gpu.session import Execution, GpuSession
from eclip.gpu.steps import LAUNCH, Steps, Stretches
from eclip.gpu.worker_loop import Place
from logs import KERNELS, make_mix, make_plan, make_profile

JOINTS = (15, 30, 45)
STRETCHES = [range(15), range(15, 30), range(30, 45), range(45, 60)]
# The plan's groups of ten kernels go round two lanes; joints cut some of them.
SERVICE = [(range(at, at + 10), at // 10 % 2) for at in range(0, KERNELS, 10)]
BACKGROUND = [
    (range(10), 2), (range(10, 15), 3), (range(15, 20), 3), (range(20, 30), 2),
    (range(30, 40), 3), (range(40, 45), 2), (range(45, 50), 2), (range(50, 60), 3),
]  # fmt: skip
MOVED = [(kernels, lane) for lane in (2, 3) for kernels in STRETCHES]
COPIED = 5 * PART_BYTES // 2  # of every copy: three parts
OWNED = {
    "cuGraphClone": "cuGraphDestroy",
    "cuGraphInstantiate": "cuGraphExecDestroy",
    "cuEventCreate": "cuEventDestroy",
    "cuGreenCtxStreamCreate": "cuStreamDestroy",
}


@dataclass(frozen=True)
class Twin:
    """A node of a graph."""

    place: int  # in the graph that was captured
    graph: int


class GraphDriver(RecordingDriver):
    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, str] = {}  # what was made and not released, by its maker
        self.graphs: dict[int, dict[int, Any]] = {}  # nodes and their contexts
        self.copied: dict[tuple[int, int], tuple[int, int]] = {}  # graph, node: bytes of a copy
        self.holds: dict[int, dict[int, Any]] = {}  # the same of executables

    def __getattr__(self, name: str) -> Any:
        known = super().__getattr__(name)
        if name not in (*OWNED, *OWNED.values()):
            return known

        def function(*arguments: Any) -> tuple[Any, ...]:
            status, *given = known(*arguments)
            if status is Result.CUDA_SUCCESS and name in OWNED:
                self.live[int(given[0])] = name
            elif status is Result.CUDA_SUCCESS:
                assert OWNED[self.live.pop(int(arguments[0]))] == name
            return (status, *given)

        function.__name__ = name
        return function

    @staticmethod
    def CUfunction(raw: int) -> int:  # noqa: N802
        return raw

    def _new(self, name: str) -> Handle:
        self._made += 1
        return Handle(self._made, f"{name}{self._made}")

    def _cuGraphClone(self, graph: int) -> tuple[Any, ...]:  # noqa: N802
        clone = self._new("graph")
        self.graphs[clone] = dict(self.graphs[graph])
        return (clone,)

    def _cuGraphNodeFindInClone(self, node: Twin, clone: int) -> tuple[Any, ...]:  # noqa: N802
        assert node.place in self.graphs[clone]
        return (Twin(node.place, clone),)

    def _cuGraphDestroyNode(self, node: Twin) -> tuple[Any, ...]:  # noqa: N802
        del self.graphs[node.graph][node.place]
        return ()

    def _cuGraphKernelNodeGetParams(self, node: Twin) -> tuple[Any, ...]:  # noqa: N802
        return (types.SimpleNamespace(kern=1),)

    def _cuGraphKernelNodeSetParams(self, node: Twin, params: Any) -> tuple[Any, ...]:  # noqa: N802
        self.graphs[node.graph][node.place] = params.ctx
        return ()

    CUgraphNodeType = types.SimpleNamespace(
        CU_GRAPH_NODE_TYPE_MEMSET="memset", CU_GRAPH_NODE_TYPE_MEMCPY="memcpy"
    )

    @staticmethod
    def CUgraphNodeParams() -> Any:  # noqa: N802
        return types.SimpleNamespace(
            memset=types.SimpleNamespace(), memcpy=types.SimpleNamespace(copyParams=None)
        )

    def _cuGraphMemsetNodeGetParams(self, node: Twin) -> tuple[Any, ...]:  # noqa: N802
        fields = ("dst", "pitch", "value", "elementSize", "width", "height")
        return (types.SimpleNamespace(**dict.fromkeys(fields, 0)),)

    def _cuGraphMemcpyNodeGetParams(self, node: Twin) -> tuple[Any, ...]:  # noqa: N802
        fields = types.SimpleNamespace(srcXInBytes=0, dstXInBytes=0, WidthInBytes=COPIED)
        return (fields,)

    def _cuGraphNodeSetParams(self, node: Twin, given: Any) -> tuple[Any, ...]:  # noqa: N802
        copy = given.memcpy.copyParams
        context = given.memset.ctx if copy is None else given.memcpy.copyCtx
        self.graphs[node.graph][node.place] = context
        if copy is not None:
            assert copy.srcXInBytes == copy.dstXInBytes
            part = copy.srcXInBytes, copy.srcXInBytes + copy.WidthInBytes
            self.copied[node.graph, node.place] = part
        return ()

    def _cuGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        made = self._new("executable")
        self.holds[made] = self.graphs[graph]
        for place in self.graphs[graph]:
            if (graph, place) in self.copied:
                self.copied[made, place] = self.copied[graph, place]
        return (made,)

    def kinds_alive(self) -> dict[str, int]:
        found = list(self.live.values())
        return {name: found.count(name) for name in set(found)}


class RecordedLoop:
    """What a session makes a loop of."""

    def __init__(self, gpu: object, stretches: Stretches, place: Place, rules: Rules) -> None:
        self.stretches, self.place, self.rules = stretches, place, rules


class Stage:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, board: Path) -> None:
        monkeypatch.setenv(boards.VARIABLE, str(board))
        self._board = board
        self.driver = GraphDriver()
        self.bench = Bench(monkeypatch, self.driver)
        monkeypatch.setattr(worker_loop, "WorkerLoop", RecordedLoop)
        self.obstacle = ""
        self.nodes = [Node(None, "KERNEL", kernel) for kernel in range(KERNELS)]

    def capture(self, number: int) -> Capture:
        self.driver.graphs[-number] = dict.fromkeys(range(len(self.nodes)))
        nodes = [
            dataclasses.replace(node, handle=Twin(place, -number))
            for place, node in enumerate(self.nodes)
        ]
        graph = CapturedGraph(-number, nodes, self.obstacle)
        return Capture(graph, make_profile().trace, None)

    def launched(self, stretches: Sequence[Steps]) -> list[tuple[int, tuple[int, int] | None]]:
        """The nodes of a request in the order of its launches, with the bytes of copies."""
        return [
            (place, self.driver.copied.get((handle, place)))
            for parts in handles(stretches)
            for handle in parts
            for place in sorted(self.driver.holds[handle])
        ]

    def open(self, plan: Plan) -> GpuSession:
        captures = [self.capture(1), self.capture(2)]
        session = GpuSession(self.bench.device, program_of(plan), captures, (), Execution.AUTO)
        self.bench.device._sessions.add(session)
        return session

    def left(self) -> dict[str, int]:
        """What was made and not released, rows of the board included."""
        with contextlib.closing(boards.open_board(self._board)) as board:
            rows = int(np.count_nonzero(board.words[:, TIER]))
        return self.driver.kinds_alive() | ({"rows": rows} if rows else {})

    def held(self) -> list[tuple[range, Any]]:
        """Kernels and the one context of every executable that lives."""
        found = []
        for handle, kernels in self.driver.holds.items():
            if handle in self.driver.live:
                (context,) = set(kernels.values())
                found.append((range(min(kernels), max(kernels) + 1), context))
        return found


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(monkeypatch, tmp_path / "board")
    yield made
    for session in list(made.bench.device._sessions):
        session.close()


def make_giving(depth: int = 2) -> Plan:
    """A service, and background that yields to it or moves to one of its lanes, by how much slack
    there is, and has the second lane to itself while it is alone."""
    plan = make_plan("test", make_mix(2), (48, 96))
    service, background = plan.workers
    alone = Variant(
        active=(1,),
        assignments=(
            Assignment(worker=1, groups=(Group(lane=3, kernels=KERNELS, predicted_ns=9),)),
        ),
    )
    joints = Joints(
        at=JOINTS,
        depth=depth,
        rules=(
            Rule(to=(0,), slack=Slack.NONE),
            Rule(to=(0,), slack=Slack.SOME, lane=2),
            Rule(to=(0,), lane=3),
        ),
        stretch_ns=(400, 300, 200, 100),
    )
    promise = Promise(bound_ns=5_000_000, request_ns=1_000_000, some_ns=200, none_ns=100)
    return msgspec.structs.replace(
        plan,
        workers=(
            msgspec.structs.replace(service, promise=promise),
            msgspec.structs.replace(background, joints=joints, floor=0.25),
        ),
        variants=(*plan.variants, alone),
    )


def handles(stretches: Sequence[Steps]) -> list[list[int]]:
    return [steps.first[steps.kind == LAUNCH].tolist() for steps in stretches]


def test_a_session_has_a_graph_for_every_stretch_and_lane(stage: Stage) -> None:
    session = stage.open(make_giving())
    contexts = [lane.context for lane in cast(Any, session._placer).lanes]
    assert len(set(contexts)) == 4
    expected = [(kernels, contexts[lane]) for kernels, lane in (*SERVICE, *BACKGROUND, *MOVED)]
    assert sorted(stage.held(), key=str) == sorted(expected, key=str)
    assert session.prepared.executables == len(expected)


def test_loops_get_their_stretches_in_every_variant_and_move(stage: Stage) -> None:
    session = stage.open(make_giving())
    service, background = cast(list[RecordedLoop], session._loops)
    streams = [int(lane.stream) for lane in cast(Any, session._placer).lanes]
    assert [active for active, _ in service.stretches.variants] == [0b11]
    assert [active for active, _ in background.stretches.variants] == [0b11, 0b10]
    ((_, whole),) = service.stretches.variants
    assert [len(parts) for parts in handles(whole)] == [6]
    assert whole[0].barriers == 5
    (_, together), (_, alone) = background.stretches.variants
    assert [len(parts) for parts in handles(together)] == [2, 2, 2, 2]
    assert [steps.entry for steps in together] == [streams[lane] for lane in (2, 3, 3, 2)]
    assert [steps.stream for steps in together] == [streams[lane] for lane in (3, 2, 2, 3)]
    assert [steps.barriers for steps in together] == [1, 1, 1, 1]
    first, second = background.stretches.moves
    assert handles(alone) == handles(second)  # the same graphs on the same lane
    for moved, lane in (first, 2), (second, 3):
        assert {(steps.entry, steps.stream, steps.barriers) for steps in moved} == {
            (streams[lane], streams[lane], 0)
        }


@pytest.mark.parametrize("depth", [1, 2])
def test_loops_get_their_rules(stage: Stage, depth: int) -> None:
    session = stage.open(make_giving(depth))
    service, background = cast(list[RecordedLoop], session._loops)
    assert not service.stretches.events and service.rules.bound_ns == 5_000_000
    assert len(set(background.stretches.events)) == depth
    assert background.stretches.done_ns == [400, 700, 900, 1000]
    assert background.rules.floor == 0.25
    assert background.rules.choice.tolist() == [-1, 1, 2]
    assert all(one.place.board is session.board for one in cast(Any, session._loops))


def test_closing_releases_all_of_it(stage: Stage) -> None:
    session = stage.open(make_giving())
    assert stage.left() == {
        "cuGraphInstantiate": len(SERVICE) + len(BACKGROUND) + len(MOVED),
        "cuEventCreate": 5 + 4 + 2,  # barriers inside, and stretches in flight
        "cuGreenCtxStreamCreate": 4,
        "rows": 2,
    }
    session.close()
    assert stage.left() == {}
    assert session._executables.placed == {} and session._executables._cut == {}


def with_copies() -> list[Node]:
    """A long copy before the first kernel, behind the last, and one in the middle of a group, with
    a memset on both sides."""
    nodes = [Node(None, "KERNEL", kernel) for kernel in range(KERNELS)]
    copy = Node(None, "MEMCPY", 0, copy_bytes=COPIED)
    memset = Node(None, "MEMSET", 5)
    middle = [memset, dataclasses.replace(copy, kernel=5), memset]
    return [copy, *nodes[:5], *middle, *nodes[5:], dataclasses.replace(copy, kernel=KERNELS - 1)]


def test_every_node_is_launched_once_and_in_order_with_long_copies_in_parts(stage: Stage) -> None:
    stage.nodes = with_copies()
    session = stage.open(make_giving())
    service, background = cast(list[RecordedLoop], session._loops)
    ends = [COPIED * part // 3 for part in range(4)]
    whole: list[Any] = []
    cut: list[Any] = []
    for place, node in enumerate(stage.nodes):
        copy = node.kind == "MEMCPY"
        whole.append((place, (0, COPIED) if copy else None))
        cut += [(place, part) for part in itertools.pairwise(ends)] if copy else [(place, None)]
    for worker, expected in (service, whole), (background, cut):
        for stretches in (
            *(taken for _, taken in worker.stretches.variants),
            *worker.stretches.moves,
        ):
            assert stage.launched(stretches) == expected
            assert len(stretches) == len(worker.stretches.done_ns)
    assert len(background.stretches.done_ns) == len(STRETCHES) + 3 * 3 + 1
    assert background.stretches.done_ns[-1] == 1000
    session.close()
    assert stage.left() == {}


@pytest.mark.parametrize(
    ("name", "call"),
    [("cuGraphInstantiate", call) for call in (1, 4, 7, 11, 15, 22)]
    + [("cuGraphClone", call) for call in (1, 9, 20)]
    + [("cuGraphUpload", call) for call in (1, 10, 22)]
    + [("cuEventCreate", call) for call in (1, 7, 11)]
    + [("cuGraphKernelNodeSetParams", call) for call in (1, 100)],
)
def test_a_session_that_fails_on_the_way_leaves_nothing(stage: Stage, name: str, call: int) -> None:
    stage.driver.fails_at[name] = call
    with pytest.raises(DeviceError, match=f"^{name} failed"):
        stage.open(make_giving())
    assert stage.driver._calls[name] >= call
    assert stage.left() == {}
    stage.driver.fails_at.clear()
    stage.open(make_giving()).close()
    assert stage.left() == {}


def refused(stage: Stage, error: type[EclipError], words: str) -> None:
    with pytest.raises(error, match=words):
        stage.open(make_giving())
    assert stage.left() == {}


def test_a_plan_of_too_many_executables_is_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaPlacer, "most_executables", 21)
    refused(stage, UsageError, "more than 21 executables; plan it with a larger grain")
    monkeypatch.setattr(CudaPlacer, "most_executables", 22)
    stage.open(make_giving())


def test_kernels_that_do_not_fit_their_lanes_are_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*given: object) -> None:
        raise DeviceError("clusters do not fit lane 0")

    monkeypatch.setattr(placing, "check_clusters", check)
    refused(stage, DeviceError, "do not fit lane 0")
    assert "cuGraphInstantiate" not in stage.driver._calls  # asked before anything is built


def test_a_graph_with_a_loop_cannot_be_cut_at_joints(stage: Stage) -> None:
    stage.obstacle = "a loop"
    refused(stage, DeviceError, "has a loop in its graph")
