"""What runs on a GPU becomes a run log, with stand-ins for the driver and for CUPTI."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.model_key import ModelKey
from eclip.core.program import Program, Route, lower
from eclip.core.trace import Kernel, Trace, with_traces
from eclip.cuda import legality, tracer
from eclip.cuda.tracer import Tracer
from eclip.errors import DeviceError, TracingError
from eclip.gpu.recording import Placed, Span, record_kernels, record_requests
from logs import make_mix, make_plan
from served import served_rows

WAIT = np.full(4, -1)
KERNEL = 10  # CUPTI's number of this kind of record


class FakeCupti(types.ModuleType):
    """Records nothing by itself: a test hands the records over; notes what was called."""

    class cuptiError(Exception):  # noqa: N801
        pass

    class ActivityKind:
        CONCURRENT_KERNEL = KERNEL

    def __init__(
        self, clock: Callable[[], int], pending: list[Any], refuses: tuple[str, ...] = ()
    ) -> None:
        super().__init__("cupti.cupti")
        self.said: list[str] = []
        self._clock, self._pending, self._refuses = clock, pending, refuses

    def _note(self, name: str) -> None:
        self.said.append(name)
        if name in self._refuses:
            raise self.cuptiError("ERROR_UNKNOWN")

    def activity_register_callbacks(self, wanted: Any, completed: Any) -> None:
        self._note("register")
        assert wanted()[0] > 1 << 20
        self._completed = completed

    def activity_enable(self, kind: int) -> None:
        self._note("enable")

    def activity_flush_all(self, flag: int) -> None:
        self._note("flush")
        self._completed(self._pending)

    def activity_disable(self, kind: int) -> None:
        self._note("disable")

    def finalize(self) -> None:
        self._note("finalize")

    def get_timestamp(self) -> int:
        return self._clock()

    def get_graph_exec_id(self, handle: int) -> int:
        return handle + 1000


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeCupti]:
    def put(**options: Any) -> FakeCupti:
        fake = FakeCupti(**options)
        monkeypatch.setitem(sys.modules, "cupti", types.ModuleType("cupti"))
        monkeypatch.setitem(sys.modules, "cupti.cupti", fake)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "cupti" or None)
        monkeypatch.setattr(tracer, "cu", types.SimpleNamespace(cuCtxSynchronize=None))
        monkeypatch.setattr(tracer, "call", lambda function: fake.said.append("synchronise"))
        return fake

    return put


def activity(start: int, end: int, **fields: Any) -> Any:
    known: dict[str, Any] = {"kind": KERNEL, "graph_id": 7, "correlation_id": 3, "name": "gemm"}
    return types.SimpleNamespace(start=start, end=end, **{**known, **fields})


def test_tracer_gives_spans_on_our_clock_and_detaches(
    attach: Callable[..., FakeCupti],
) -> None:
    shift = 1_700_000_000_000_000_000  # as far as CLOCK_REALTIME is from CLOCK_MONOTONIC

    def clock() -> int:
        return tracer._now_ns() + shift

    pending: list[Any] = []
    cupti = attach(clock=clock, pending=pending)
    before = tracer._now_ns()
    with Tracer(["gemm"]) as tracing:
        assert tracing.executable_id(5) == 1005
        middle = tracer._now_ns()
        pending += [
            activity(clock() + 100, clock() + 900, graph_id=2),
            activity(middle + shift, middle + shift + 50),
            activity(0, 1, kind=KERNEL + 1),
            activity(0, 1, name="memset32"),
        ]
    assert cupti.said == [
        *("synchronise", "register", "enable", "synchronise", "flush", "disable", "finalize")
    ]
    first, second = tracing.spans
    assert (first.executable, first.launch, second.executable) == (7, 3, 2)
    assert abs(first.start_ns - middle) < 20_000
    assert first.end_ns - first.start_ns == pytest.approx(50, abs=2)
    assert before < first.start_ns < second.start_ns < second.end_ns < tracer._now_ns()


def test_clocks_that_drift_are_mapped_in_a_line() -> None:
    raw = [Span(1000, 2000, 1, 1)]
    (mapped,) = tracer._on_our_clock(raw, (0, 5000), (2000, 5020))
    assert (mapped.start_ns, mapped.end_ns) == (1000 + 5010, 2000 + 5020)


@pytest.mark.parametrize("refused", ["enable", "flush"])
def test_tracer_detaches_when_cupti_refuses(refused: str, attach: Callable[..., FakeCupti]) -> None:
    cupti = attach(clock=lambda: 0, pending=[], refuses=(refused, "disable"))
    with pytest.raises(TracingError, match=f"{refused}.* failed: ERROR_UNKNOWN"), Tracer([]):
        pass
    assert cupti.said[-2:] == ["disable", "finalize"]


def test_tracer_detaches_and_lets_an_error_of_the_block_through(
    attach: Callable[..., FakeCupti],
) -> None:
    cupti = attach(clock=lambda: 0, pending=[])
    with pytest.raises(ZeroDivisionError), Tracer([]):
        raise ZeroDivisionError
    assert cupti.said[-2:] == ["disable", "finalize"]
    assert "flush" not in cupti.said


def test_missing_cupti_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        TracingError, match=r"cupti-python is missing.*pip install 'cupti-python>=13.0,<13.1'"
    ):
        Tracer([])


@pytest.mark.parametrize(("loaded", "tried"), [(True, 1), (False, 3)])
def test_libcupti_is_torchs_whether_torch_was_imported_or_not(
    loaded: bool, tried: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded already, or in the second of two folders with wheels of NVIDIA's."""
    asked: list[tuple[str, bool]] = []

    def library(name: str, mode: int) -> None:
        only_if_loaded = bool(mode & os.RTLD_NOLOAD)
        asked.append((name, only_if_loaded))
        if not (name.startswith(str(tmp_path / "two")) or (only_if_loaded and loaded)):
            raise OSError

    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    wheels = types.SimpleNamespace(submodule_search_locations=folders)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: wheels)
    monkeypatch.setattr("ctypes.CDLL", library)
    tracer._load_library()
    assert asked[0] == ("libcupti.so.13", True)
    assert len(asked) == tried
    assert loaded or asked[-1] == (f"{tmp_path}/two/cu13/lib/libcupti.so.13", False)


def spans(launch: int, executable: int, starts: list[int], each: int = 10) -> list[Span]:
    return [Span(start, start + each, executable, launch) for start in starts]


def test_kernels_are_told_by_executable_and_order_of_start() -> None:
    """Two workers, one as a whole graph and one in segments; another process's is left out."""
    whole = Route(worker=0, lane=np.array([0, 0, 1]), wait_on=WAIT[:3])
    cut = Route(worker=1, lane=np.array([2, 3, 3]), wait_on=WAIT[:3])
    placed = {
        11: Placed(whole, range(3)),
        12: Placed(cut, range(1)),
        13: Placed(cut, range(1, 3)),
    }
    zero = 1_000_000
    seen = [
        *spans(5, 11, [zero + 30, zero + 10, zero + 50]),
        *spans(6, 12, [zero + 15]),
        *spans(7, 13, [zero + 26, zero + 41]),
        *spans(8, 11, [zero - 35, zero - 20, zero - 5]),  # begun in the warm-up
        *spans(9, 99, [zero + 20]),
        *spans(10, 12, [zero + 95]),  # ends after the window
    ]
    records = record_kernels(seen, placed, zero, 100)
    assert records.own_run and records.window_ns == 100
    assert list(records.rows()) == [
        (0, 2, 1, -5, 5),
        (0, 0, 0, 10, 20),
        (1, 0, 2, 15, 25),
        (1, 1, 3, 26, 36),
        (0, 1, 0, 30, 40),
        (1, 2, 3, 41, 51),
        (0, 2, 1, 50, 60),
    ]


def test_launch_recorded_in_part_is_refused() -> None:
    route = Route(worker=0, lane=np.zeros(3, dtype=np.int64), wait_on=WAIT[:3])
    with pytest.raises(TracingError, match="2 of the 3 kernels"):
        record_kernels(spans(1, 4, [0, 20]), {4: Placed(route, range(3))}, 0, 100)


def test_requests_outside_the_run_are_counted_not_recorded() -> None:
    arrivals = np.array([0, 10, 20, 95, 200])
    load = Load(label="", seed=0, arrivals=(CLOSED_LOOP, arrivals))
    closed = served_rows([[-20, -20, -1], [-1, -1, 30], [30, 30, 100]])
    served = served_rows([[0, 5, 20], [10, 20, 40]])
    requests, unfinished = record_requests([closed, served], load, 100)
    assert requests.worker == (1, 0, 1)
    assert requests.arrival_ns == (0, -1, 10)
    assert requests.start_ns == (5, -1, 20)
    assert requests.end_ns == (20, 30, 40)
    assert unfinished == (1, 2)


def clustered_program(cluster: int) -> tuple[Program, list[Any], list[Trace]]:
    """A plan of one worker whose kernel 1 and 3 are equal and have clusters."""
    plan = make_plan("eclip", make_mix(1), (48, 96))
    count = plan.workers[0].kernels
    kernels = tuple(
        Kernel(name="gemm", grid=(8, 1, 1), block=(64, 1, 1), cluster=cluster)
        if index in (1, 3)
        else Kernel(name=f"k{index}", grid=(8, 1, 1), block=(64, 1, 1))
        for index in range(count)
    )
    trace = Trace(model=ModelKey("albert", 8), kernels=kernels)
    plan = msgspec.structs.replace(
        plan,
        fingerprint=with_traces(plan.fingerprint, [trace]),
    )
    nodes = [types.SimpleNamespace(kind="KERNEL", index=index) for index in range(count)]
    nodes.insert(0, types.SimpleNamespace(kind="MEMSET", index=-1))
    return lower(plan, [trace]), [types.SimpleNamespace(nodes=nodes)], [trace]


def test_clusters_are_asked_once_per_kernel_and_lane_and_a_misfit_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []
    legal = True

    def fits(node: Any, stream: int) -> bool:
        asked.append((node.index, stream))
        return legal

    monkeypatch.setattr(legality, "fits", fits)
    program, graphs, traces = clustered_program(cluster=4)
    lanes: list[Any] = [
        types.SimpleNamespace(stream=100 + index) for index in range(len(program.plan.lanes))
    ]
    lane = int(program.routes[0][0].lane[1])
    assert lane == program.routes[0][0].lane[3]
    legality.check_clusters(program, graphs, traces, lanes)
    assert asked == [(1, 100 + lane)]
    legal = False
    with pytest.raises(DeviceError) as caught:
        legality.check_clusters(program, graphs, traces, lanes)
    for words in ("kernel 1 of albert", "(gemm)", "clusters of 4", f"lane {lane} (48 SMs, slices"):
        assert words in str(caught.value)


def test_kernels_without_clusters_are_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legality, "fits", None)
    program, graphs, traces = clustered_program(cluster=1)
    legality.check_clusters(program, graphs, traces, [])
