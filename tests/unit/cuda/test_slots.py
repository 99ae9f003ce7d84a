"""Slots of a session on CUDA: host memory, copies recorded once for each, all of it released.

The driver is a stand-in that keeps account of what was made.
"""

from __future__ import annotations

import gc
import mmap
import threading
import types
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cuda_bench import Bench, FakeWorkerLoop, RecordingDriver
from eclip.core.device import CLOSED, Closing, Completion, Slot
from eclip.errors import DeviceError, UsageError
from eclip.gpu.executables import Buffer, Staging
from eclip.gpu.session import GpuSession
from waiting import until

INPUTS = (Buffer(0x10000, 1000), Buffer(0x20000, 6))
OUTPUTS = (Buffer(0x30000, 300),)
PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Copied:
    source: int
    target: int
    size_bytes: int
    context: Any


class CopyDriver(RecordingDriver):
    CUmemorytype = types.SimpleNamespace(CU_MEMORYTYPE_HOST="host", CU_MEMORYTYPE_DEVICE="device")

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, Any] = {}  # pinned, by address
        self.pages: dict[int, int] = {}  # registered
        self.graphs: dict[int, list[Copied | int]] = {}  # copies and child graphs
        self.executables: dict[int, list[Copied | int]] = {}

    @staticmethod
    def CUDA_MEMCPY3D() -> Any:  # noqa: N802
        return types.SimpleNamespace()

    @staticmethod
    def CUdeviceptr(raw: int) -> int:  # noqa: N802
        return raw

    def _cuMemHostAlloc(self, size: int, flags: int) -> tuple[int]:  # noqa: N802
        memory = np.zeros(size, dtype=np.uint8)
        self.memory[memory.ctypes.data] = memory
        return (memory.ctypes.data,)

    def _cuMemFreeHost(self, address: int) -> tuple[()]:  # noqa: N802
        del self.memory[address]
        return ()

    def _cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[()]:  # noqa: N802
        assert address % PAGE == size % PAGE == 0
        for start, length in self.pages.items():
            assert address >= start + length or start >= address + size
        self.pages[address] = size
        return ()

    def _cuMemHostUnregister(self, address: int) -> tuple[()]:  # noqa: N802
        del self.pages[address]
        return ()

    def _cuGraphCreate(self, flags: int) -> tuple[int]:  # noqa: N802
        self._made += 1
        self.graphs[self._made] = []
        return (self._made,)

    def _cuGraphDestroy(self, graph: int) -> tuple[()]:  # noqa: N802
        self.graphs.pop(graph, None)
        return ()

    def _cuGraphAddMemcpyNode(  # noqa: N802
        self, graph: int, after: list[Any], count: int, copy: Any, context: Any
    ) -> tuple[int]:
        assert (after, count, copy.Height, copy.Depth) == ([], 0, 1, 1)
        source = copy.srcHost if copy.srcMemoryType == "host" else copy.srcDevice
        target = copy.dstHost if copy.dstMemoryType == "host" else copy.dstDevice
        self.graphs[graph].append(Copied(source, target, copy.WidthInBytes, context))
        return (0,)

    def _cuGraphAddChildGraphNode(  # noqa: N802
        self, graph: int, after: list[Any], count: int, child: int
    ) -> tuple[int]:
        assert len(after) == count == 1  # what joins the copies
        self.graphs[graph].append(child)
        return (0,)

    def _cuGraphInstantiate(self, graph: int, flags: int) -> tuple[int]:  # noqa: N802
        self._made += 1
        if graph in self.graphs:
            self.executables[self._made] = self.graphs[graph]
        return (self._made,)

    def _cuGraphExecDestroy(self, executable: int) -> tuple[()]:  # noqa: N802
        self.executables.pop(executable, None)
        return ()

    def left(self) -> list[Any]:
        return [self.memory, self.pages, self.graphs, self.executables]


class Stage:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = CopyDriver()
        self.bench = Bench(monkeypatch, self.driver)

    def open(self, outputs: tuple[Buffer, ...] | None = OUTPUTS) -> GpuSession:
        return self.bench.open(INPUTS, outputs)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def wanted_copies(slots: list[Slot]) -> list[list[Copied]]:
    found = []
    for slot in slots:
        hosts = [part.ctypes.data for part in (*slot.inputs, *slot.outputs)]
        found.append([Copied(hosts[0], 0x10000, 1000, "primary"),
                      Copied(hosts[1], 0x20000, 6, "primary")])  # fmt: skip
        found.append([Copied(0x30000, hosts[2], 300, "primary")])
    return found


def test_each_slot_has_its_memory_and_two_graphs(stage: Stage) -> None:
    with stage.open() as session:
        session.serve(slots=3)
        slots = [slot for worker in range(2) for slot in session.slots(worker)]
        assert [[part.nbytes for part in slot.inputs] for slot in slots] == [[1000, 6]] * 6
        assert [[part.nbytes for part in slot.outputs] for slot in slots] == [[300]] * 6
        assert list(stage.driver.executables.values()) == wanted_copies(slots)
        for number, slot in enumerate(slots):  # none overlap
            for part in (*slot.inputs, *slot.outputs):
                part[:] = number
        assert all(set(part) == {number} for number, slot in enumerate(slots)
                   for part in (*slot.inputs, *slot.outputs))  # fmt: skip
        assert stage.driver.graphs == {}
    assert stage.driver.left() == [{}, {}, {}, {}]


def shared_slots(memory: Any, count: int) -> list[Slot]:
    """One after another in memory of the caller's."""
    words = np.frombuffer(memory, dtype=np.uint8)
    sizes = [1000, 6, 300]
    found = []
    at = 100
    for _ in range(count):
        parts = []
        for size in sizes:
            parts.append(words[at : at + size])
            at += size
        found.append(Slot(tuple(parts[:2]), tuple(parts[2:])))
    return found


def test_memory_of_the_callers_is_registered_page_by_page_once(stage: Stage) -> None:
    memory = mmap.mmap(-1, 4 * PAGE)
    slots = shared_slots(memory, 6)
    with stage.open() as session:
        session.serve(slots=[slots[:4], slots[4:]])
        assert session.slots(1) == tuple(slots[4:])
        assert sum(stage.driver.pages.values()) == 2 * PAGE
        assert list(stage.driver.executables.values()) == wanted_copies(slots)
        assert stage.driver.memory == {}
    assert stage.driver.left() == [{}, {}, {}, {}]


def test_sessions_beside_each_other_may_have_slots_in_the_same_pages(stage: Stage) -> None:
    slots = shared_slots(mmap.mmap(-1, 4 * PAGE), 4)
    first = stage.open()
    first.serve(slots=[slots[:2], slots[2:]])
    with stage.open() as second:
        second.serve(slots=[slots[:2], slots[2:]])
        first.close()
        assert sum(stage.driver.pages.values()) == 2 * PAGE
    assert stage.driver.pages == {}


def test_slots_go_with_their_session_and_wait_for_no_collection(stage: Stage) -> None:
    """The device process tells the collector to leave what it has alone."""
    slots = [Slot((np.zeros(1000, np.uint8), np.zeros(6, np.uint8)), (np.zeros(300, np.uint8),))]
    seen = weakref.ref(slots[0].inputs[0])
    gc.collect()
    gc.disable()
    try:
        with stage.open() as session:
            session.serve(slots=[slots, slots])
        del session, slots
        assert seen() is None
    finally:
        gc.enable()


def test_slots_of_other_sizes_are_refused(stage: Stage) -> None:
    short = Slot((np.zeros(1000, np.uint8), np.zeros(5, np.uint8)), (np.zeros(300, np.uint8),))
    with stage.open() as session:
        with pytest.raises(UsageError, match=r"needs flat buffers of \[1000, 6\] bytes"):
            session.serve(slots=[[short], [short]])
        assert stage.driver.left() == [{}, {}, {}, {}]
        session.serve()


def test_outputs_that_are_not_contiguous_are_refused(stage: Stage) -> None:
    with stage.open(None) as session, pytest.raises(DeviceError, match="contiguous"):
        session.serve()


class Staged(Closing):
    """Two inputs elsewhere, and a graph that brings them to where the model reads them."""

    GRAPH = 77
    INPUTS = (Buffer(0x40000, 1000), Buffer(0x50000, 6))

    def __init__(self) -> None:
        self.open = 0

    def __call__(self) -> Staging:
        self.open += 1
        return Staging(self.INPUTS, self.GRAPH, self)

    def close(self) -> None:
        self.open -= 1


def test_inputs_in_another_order_are_brought_into_it_behind_the_copies(stage: Stage) -> None:
    staged = Staged()
    with stage.bench.open(INPUTS, OUTPUTS, staged) as session:
        session.serve(slots=2)
        assert staged.open == 2  # once for each worker
        inward = [made for made in stage.driver.executables.values() if made[-1] == Staged.GRAPH]
        outward = [made for made in stage.driver.executables.values() if Staged.GRAPH not in made]
        assert (len(inward), len(outward)) == (4, 4)
        for *copies, _ in inward:
            targets = [copy.target for copy in copies if isinstance(copy, Copied)]
            assert targets == [buffer.address for buffer in Staged.INPUTS]
    assert staged.open == 0
    assert stage.driver.left() == [{}, {}, {}, {}]


@pytest.mark.parametrize(
    "name", ["cuMemHostAlloc", "cuGraphCreate", "cuGraphAddMemcpyNode", "cuGraphInstantiate"]
)
@pytest.mark.parametrize("at", [1, 4])
def test_a_failure_on_the_way_leaves_nothing_and_can_be_tried_again(
    stage: Stage, name: str, at: int
) -> None:
    with stage.open() as session:
        stage.driver.fails_at[name] = stage.driver._calls.get(name, 0) + at
        with pytest.raises(DeviceError, match=name):
            session.serve(slots=4)
        assert stage.driver.left() == [{}, {}, {}, {}]
        session.serve(slots=4)
    assert stage.driver.left() == [{}, {}, {}, {}]


def test_a_session_closed_while_it_serves_answers_everything(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(FakeWorkerLoop, "gate", gate)
    before = threading.active_count()
    session = stage.open()
    session.serve(slots=2)
    first = session.submit(0, 0)
    gate.set()
    done: list[Completion] = []

    def ended() -> bool:
        done.extend(session.poll(0.01))
        return bool(done)

    assert until(ended, pause_s=0.0)
    gate.clear()
    others = [session.submit(0, 0), session.submit(1, 1)]
    session.close()
    rest = session.poll()
    assert [one.ticket for one in done] == [first]
    assert sorted(one.ticket for one in rest) == sorted(others)
    assert {one.error for one in rest} == {CLOSED}
    assert threading.active_count() == before
    with pytest.raises(DeviceError, match="closed"):
        session.submit(0, 1)
    session.close()


def test_a_session_that_serves_runs_nothing_else(stage: Stage) -> None:
    with stage.open() as session:
        session.serve()
        with pytest.raises(UsageError, match="serves"):
            session.request(0)
