"""Captures that fail leave torch's allocator and generator as they were; on a stand-in for torch.

The stand-in has the fault of torch 2.11: a capture that fails stays on the allocator's list.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from eclip.cuda.conditional import keep_alive
from eclip.errors import DeviceError


class Generator:
    def __init__(self) -> None:
        self.capturing = False

    def clone_state(self) -> bool:
        return self.capturing

    def graphsafe_set_state(self, state: bool) -> None:
        self.capturing = state


class Graph:
    def __init__(self, refuses: bool = False) -> None:
        self.resets = 0
        self._refuses = refuses

    def reset(self) -> None:
        self.resets += 1
        if self._refuses:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class FakeTorch(types.ModuleType):
    __version__ = "2.11"

    def __init__(self, mended: bool = False) -> None:
        super().__init__("torch")
        self.underway: list[tuple[int, Any]] = []
        self.users: dict[Any, int] = {}
        self.workspaces: set[str] = set()  # streams that torch keeps one for
        self.generator = Generator()
        self._mended = mended
        self._pools = 0
        self.cuda = types.SimpleNamespace(
            current_device=lambda: 3,
            default_generators=[None, None, None, self.generator],
            graph_pool_handle=self._new_pool,
            graph=self._graph,
        )
        self._C = types.SimpleNamespace(
            _cuda_beginAllocateCurrentThreadToPool=self._begin,
            _cuda_endAllocateToPool=self._end,
            _cuda_releasePool=self._release,
            _cuda_clearCublasWorkspaces=self.workspaces.clear,
        )

    def _new_pool(self) -> tuple[int, int]:
        self._pools += 1
        return (0, self._pools)

    def _begin(self, device: int, pool: Any) -> None:
        self.underway.append((device, pool))
        self.users[pool] = self.users.get(pool, 0) + 1

    def _end(self, device: int, pool: Any) -> None:
        if (device, pool) not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove((device, pool))

    def _release(self, device: int, pool: Any) -> None:
        self.users[pool] -= 1

    @contextlib.contextmanager
    def _graph(
        self, graph: Graph, pool: Any, stream: Any, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"  # others may serve meanwhile
        self._begin(3, pool)
        self.generator.capturing = True
        try:
            yield
        except BaseException:
            if self._mended:
                self._end(3, pool)
            raise RuntimeError("CUDA error: operation failed due to a capture error") from None
        self._end(3, pool)
        self.generator.capturing = False


@pytest.fixture(params=[False, True], ids=["torch 2.11", "torch 2.12"])
def fake(request: pytest.FixtureRequest) -> FakeTorch:
    return FakeTorch(mended=request.param)


@pytest.fixture
def module(fake: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module under test, imported for the stand-in alone."""
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.delitem(sys.modules, "eclip.capture.capturing", raising=False)
    made = importlib.import_module("eclip.capture.capturing")
    monkeypatch.delitem(sys.modules, "eclip.capture.capturing")
    never_freed: list[Any] = []
    monkeypatch.setattr(made, "never_free", never_freed.append)
    made.never_freed = never_freed  # type: ignore[attr-defined]
    return made


def test_a_capture_that_works_keeps_its_pool_and_what_it_asked_to_keep(
    module: Any, fake: FakeTorch
) -> None:
    graph = Graph()
    with module.capturing(graph, "stream") as kept:
        keep_alive("memory")
    assert kept == ["memory"]
    assert fake.underway == [] and fake.users == {(0, 1): 1}
    assert graph.resets == 0 and not fake.generator.capturing


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_capture_that_fails_is_no_longer_under_way(
    module: Any, fake: FakeTorch, error: type[BaseException]
) -> None:
    graph = Graph()
    with pytest.raises(RuntimeError, match="capture error"), module.capturing(graph, "stream"):
        raise error
    assert fake.underway == []
    assert not fake.generator.capturing
    assert graph.resets == 1
    if not fake._mended:  # where torch ends it, torch also gives the pool back with the graph
        assert fake.users == {(0, 1): 0}
        assert module.never_freed == [graph]


def test_a_capture_takes_its_own_workspaces_and_torch_keeps_none(
    module: Any, fake: FakeTorch
) -> None:
    fake.workspaces.add("of the warm-up, outside of the capture's memory")
    with module.capturing(Graph(), "stream"):
        assert not fake.workspaces
        fake.workspaces.add("in the capture's memory")
    assert not fake.workspaces
    with contextlib.suppress(RuntimeError), module.capturing(Graph(), "stream"):
        fake.workspaces.add("in the memory of a capture that fails")
        raise ValueError
    assert not fake.workspaces


def test_nothing_is_collected_during_a_capture(module: Any, fake: FakeTorch) -> None:
    assert gc.isenabled()
    with module.capturing(Graph(), "stream"):
        assert not gc.isenabled()
    assert gc.isenabled()
    with contextlib.suppress(RuntimeError), module.capturing(Graph(), "stream"):
        raise ValueError
    assert gc.isenabled()


def test_memory_of_a_body_is_given_back_with_its_owner_and_never_before(
    module: Any, fake: FakeTorch
) -> None:
    memory = module.BodyMemory(3)
    with memory.used():
        assert fake.underway == [(3, (0, 1))]
    assert fake.underway == [] and fake.users == {(0, 1): 1}
    del memory
    assert fake.users == {(0, 1): 0}


def test_memory_of_a_body_goes_even_while_a_capture_is_under_way(
    module: Any, fake: FakeTorch
) -> None:
    """What ends the process where it is a MemPool."""
    memory = module.BodyMemory(3)
    with memory.used():
        pass
    fake.underway.append((3, (9, 0)))
    del memory
    assert fake.users == {(0, 1): 0}


def test_a_body_that_fails_allocates_here_no_longer(module: Any, fake: FakeTorch) -> None:
    memory = module.BodyMemory(3)
    with pytest.raises(ZeroDivisionError), memory.used():
        raise ZeroDivisionError
    assert fake.underway == []


def test_a_torch_that_cannot_keep_memory_is_named(module: Any, fake: FakeTorch) -> None:
    del fake._C._cuda_beginAllocateCurrentThreadToPool
    with pytest.raises(DeviceError, match=r"torch 2\.11 cannot keep memory for a loop"):
        module.BodyMemory(3).used().__enter__()


def test_an_owned_graph_is_destroyed_once(module: Any) -> None:
    graph = Graph()
    owned = module.OwnedGraph(graph, ("tensors",))
    owned.close()
    owned.close()
    assert graph.resets == 1 and module.never_freed == []


def test_a_graph_that_cannot_be_destroyed_is_never_tried_again(module: Any) -> None:
    graph = Graph(refuses=True)
    owned = module.OwnedGraph(graph, ("tensors",))
    with pytest.raises(DeviceError, match="a captured graph cannot be destroyed: CUDA error"):
        owned.close()
    assert module.never_freed == [(graph, ("tensors",))]
    owned.close()
    assert graph.resets == 1
