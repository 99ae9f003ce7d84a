"""Priorities of lanes: what the policy gives, a file keeps and CUDA is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from eclip.core.copies import PART_BYTES
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.core.topology import Mask
from eclip.cuda import driver, graphs, lanes
from eclip.errors import DeviceError
from eclip.files import store
from eclip.gpu.pieces import CapturedGraph, Node
from eclip.planner.policies import make_plan
from simulations import MI50, flat_profile, problem_of


def lasting(*milliseconds: int) -> list[Profile]:
    return [flat_profile(f"m{n}", [time * 1_000_000]) for n, time in enumerate(milliseconds)]


def priorities(*milliseconds: int) -> list[int]:
    plan = make_plan("priority", problem_of(lasting(*milliseconds), MI50))
    return [lane.priority for lane in plan.lanes]


def test_shorter_request_has_higher_priority_on_all_units() -> None:
    assert priorities(5, 1, 3) == [0, 2, 1]
    plan = make_plan("priority", problem_of(lasting(5, 1, 3), MI50))
    assert {lane.mask for lane in plan.lanes} == {MI50.full}
    assert "priority 2" in plan.workers[1].why


def test_requests_of_one_length_have_one_priority() -> None:
    assert priorities(2, 2) == [0, 0]
    assert priorities(2, 7, 2) == [1, 0, 1]


def test_no_more_levels_than_streams_have() -> None:
    assert priorities(8, 7, 6, 5, 4, 3, 2, 1) == [0, 0, 1, 2, 3, 3, 4, 5]


def test_file_without_priorities_is_as_before_and_one_with_them_keeps_them(tmp_path: Path) -> None:
    problem = problem_of(lasting(5, 1), MI50)
    for policy, expected in (("shared", [None, None]), ("priority", [None, 1])):
        plan = make_plan(policy, problem)
        path = tmp_path / f"{policy}.json"
        store.save(plan, path)
        written = json.loads(path.read_text())["body"]["lanes"]
        assert [lane.get("priority") for lane in written] == expected
        assert store.load(path, Plan) == plan


def test_negative_priority_is_no_plan() -> None:
    plan = make_plan("shared", problem_of(lasting(5), MI50))
    wrong = msgspec.structs.replace(plan.lanes[0], priority=-1)
    with pytest.raises(ValueError, match="priority -1; 0 is the lowest"):
        msgspec.structs.replace(plan, lanes=(wrong,))


class FakeCuda:
    """Streams and nodes that remember the priority they were given; an H200's range."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUkernelNodeAttrID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PRIORITY=8)
    CUkernelNodeAttrValue = SimpleNamespace

    def __init__(self) -> None:
        self.streams: list[tuple[str, int]] = []
        self.nodes: dict[str, int] = {}

    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int, int]:  # noqa: N802
        return 0, 0, -5

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[int, int]:  # noqa: N802
        self.streams.append(("primary", priority))
        return 0, len(self.streams)

    def cuGreenCtxStreamCreate(self, green: Any, flags: int, priority: int) -> tuple[int, int]:  # noqa: N802
        self.streams.append((green, priority))
        return 0, len(self.streams)

    def cuCtxFromGreenCtx(self, green: Any) -> tuple[int, Any]:  # noqa: N802
        return 0, green

    def cuStreamSynchronize(self, stream: int) -> tuple[int]:  # noqa: N802
        return (0,)

    cuStreamDestroy = cuStreamSynchronize  # noqa: N815

    def cuGraphClone(self, graph: Any) -> tuple[int, str]:  # noqa: N802
        return 0, "clone"

    def cuGraphNodeFindInClone(self, node: str, clone: str) -> tuple[int, str]:  # noqa: N802
        return 0, node

    def cuGraphDestroyNode(self, node: str) -> tuple[int]:  # noqa: N802
        return (0,)

    cuGraphDestroy = cuGraphDestroyNode  # noqa: N815

    def cuGraphKernelNodeSetAttribute(self, node: str, what: int, value: Any) -> tuple[int]:  # noqa: N802
        assert what == 8
        self.nodes[node] = value.priority
        return (0,)

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, str]:  # noqa: N802
        return 0, "executable"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for module in (driver, lanes, graphs):
        monkeypatch.setattr(module, "cu", fake)
    return fake


def slices() -> Any:
    return SimpleNamespace(
        gpu=SimpleNamespace(context="primary"),
        resources=["a", "b"],
        take_context=lambda mask: f"green {mask}",
        give_back_context=lambda mask, green: None,
    )


def test_streams_are_made_with_the_lanes_priorities(cuda: FakeCuda) -> None:
    pool = lanes.LanePool(slices(), [Mask([0, 1]), Mask([0]), Mask([1])], [0, 5, 2])
    assert cuda.streams == [("primary", 0), ("green 0", -5), ("green 1", -2)]
    assert [lane.priority for lane in pool.lanes] == [0, -5, -2]
    pool.close()
    lanes.LanePool(slices(), [Mask([0])]).close()
    assert cuda.streams[-1] == ("green 0", 0)


def test_priority_that_the_device_does_not_have_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(DeviceError, match="priority 6, but streams here have 6 levels"):
        lanes.LanePool(slices(), [Mask([0])], [6])


def test_kernel_nodes_get_the_priority_of_their_lane(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_home", lambda node, twin, context, part: None)
    kinds = {"memset": 0, "k0": 0, "k1": 1, "k2": 2}
    nodes = [
        Node(name, "KERNEL" if name.startswith("k") else "MEMSET", kernel)
        for name, kernel in kinds.items()
    ]
    captured = CapturedGraph("graph", nodes)
    graphs.place_whole(captured, ["c"] * 3, [-4, 0, -1])
    assert cuda.nodes == {"k0": -4, "k2": -1}
    cuda.nodes.clear()
    graphs.place_segment(captured, ["c"] * 3, range(1, 3), [-4, 0, -1])
    assert cuda.nodes == {"k2": -1}
    cuda.nodes.clear()
    graphs.place_whole(captured, ["c"] * 3)
    assert cuda.nodes == {}


def test_graph_is_cut_into_its_segments_in_order(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs here are lists of their nodes; a node in a clone names the clone it is in."""
    open_graphs: list[list[str]] = []

    def clone(graph: list[str]) -> tuple[int, list[str]]:
        open_graphs.append([f"{node}'" for node in graph])
        return 0, open_graphs[-1]

    def find(node: str, graph: list[str]) -> tuple[int, str]:
        assert f"{node}'" in graph, "the node is not of the graph that was cloned"
        return 0, f"{node}'"

    def destroy(node: str) -> tuple[int]:
        open_graphs[-1].remove(node)
        return (0,)

    def forget(graph: list[str]) -> tuple[int]:
        assert open_graphs.pop() is graph
        return (0,)

    replaced = {"Clone": clone, "NodeFindInClone": find, "DestroyNode": destroy, "Destroy": forget}
    for name, function in replaced.items():
        monkeypatch.setattr(cuda, f"cuGraph{name}", function, raising=False)
    made: list[list[str]] = []
    monkeypatch.setattr(
        graphs, "Executable", lambda graph: made.append([one.rstrip("'") for one in graph])
    )
    homes: list[tuple[int, str]] = []
    monkeypatch.setattr(
        graphs, "_home", lambda node, twin, context, part: homes.append((node.kernel, context))
    )
    nodes = [Node(f"k{kernel}", "KERNEL", kernel) for kernel in range(7)]
    captured = CapturedGraph([node.handle for node in nodes], nodes)
    segments = [range(1), range(1, 4), range(4, 5), range(5, 6), range(6, 7)]
    graphs.place_segments(captured, list("abcdefg"), segments)
    assert made == [["k0"], ["k1", "k2", "k3"], ["k4"], ["k5"], ["k6"]]
    assert homes == list(enumerate("abcdefg"))
    assert open_graphs == []


LONG = 2 * PART_BYTES + 1  # three parts


def copying() -> CapturedGraph:
    """A copy in, two kernels, a copy and a memset between them, and a copy out."""
    kinds = [
        ("in", "MEMCPY", 0, LONG),
        ("k0", "KERNEL", 0, 0),
        ("short", "MEMCPY", 1, PART_BYTES),
        ("memset", "MEMSET", 1, 0),
        ("k1", "KERNEL", 1, 0),
        ("out", "MEMCPY", 1, LONG),
    ]
    nodes = [Node(*kind[:3], copy_bytes=kind[3]) for kind in kinds]
    return CapturedGraph([node.handle for node in nodes], nodes)


def test_long_copies_are_cut_into_parts_between_the_kernels_around_them() -> None:
    pieces = copying().pieces(range(2))
    names = [[copying().nodes[place].handle for place in sorted(piece.nodes)] for piece in pieces]
    assert names == [["in"]] * 3 + [["k0", "short", "memset", "k1"]] + [["out"]] * 3
    assert [piece.kernels for piece in pieces] == [range(0)] * 3 + [range(2)] + [range(2, 2)] * 3
    for copy in (pieces[:3], pieces[4:]):
        parts = [piece.part for piece in copy]
        assert [byte for part in parts if part for byte in (part.start, part.stop)] == [
            *(0, LONG // 3),
            *(LONG // 3, 2 * LONG // 3),
            *(2 * LONG // 3, LONG),
        ]
        assert max(len(part) for part in parts if part) <= PART_BYTES
    assert len({piece.place for piece in pieces}) == len(pieces)


def test_a_stretch_in_the_middle_takes_only_its_own_copies() -> None:
    captured = copying()
    first, second = captured.pieces(range(1)), captured.pieces(range(1, 2))
    assert [piece.kernels for piece in first] == [range(0)] * 3 + [range(1)]
    assert [piece.kernels for piece in second] == [range(1, 2)] + [range(2, 2)] * 3
    every = [place for piece in (*first, *second) for place in piece.nodes]
    assert set(every) == set(range(6))


def test_without_long_copies_a_stretch_is_one_piece() -> None:
    nodes = [Node("k0", "KERNEL", 0), Node("k1", "KERNEL", 1)]
    captured = CapturedGraph([], nodes)
    assert captured.pieces(range(2)) == [captured.piece(range(2))]
