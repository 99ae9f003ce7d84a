"""Closing in any state: one order, everything tried, one error, and nothing a second time.

The driver is a stand-in that writes down what is asked of it; handles are numbers with names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import subprocess
import sys
import textwrap
import threading
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from eclip.devices.base import Closing
from eclip.devices.cuda import closing, driver, executables, graphs, lanes
from eclip.devices.cuda import device as device_module
from eclip.devices.cuda.closing import Belongings, Releases
from eclip.devices.cuda.device import CudaDevice, CudaSession, Execution
from eclip.devices.cuda.executables import Capture
from eclip.devices.cuda.lanes import LanePool, Slices
from eclip.devices.gpu import loop
from eclip.errors import DeviceError
from eclip.progress import Progress
from eclip.runtime.program import Route, program_of
from logs import KERNELS, make_mix, make_plan, make_profile
from waiting import PATIENCE_S, until


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class Handle(int):
    """A number that says what it is."""

    name: str

    def __new__(cls, value: int, name: str) -> Handle:
        made = super().__new__(cls, value)
        made.name = name
        return made

    def __repr__(self) -> str:
        return self.name


MAKERS = {
    "cuGreenCtxStreamCreate": "stream",
    "cuStreamCreateWithPriority": "stream",
    "cuGraphInstantiate": "executable",
    "cuGreenCtxCreate": "context",
    "cuEventCreate": "event",
}
RELEASERS = (
    "cuStreamSynchronize", "cuStreamDestroy", "cuGraphExecDestroy", "cuGreenCtxDestroy",
    "cuEventDestroy", "cuDevicePrimaryCtxRelease",
)  # fmt: skip


class RecordingDriver:
    """``failing`` maps a call to the status it answers with, from now on."""

    CUresult = Result

    def __init__(self) -> None:
        self.said: list[str] = []
        self.failing: dict[str, Result] = {}
        self._made = 0

    def released(self) -> list[str]:
        return [line for line in self.said if line.split()[0] in RELEASERS]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return types.SimpleNamespace(  # enums: any member will do
                CU_STREAM_NON_BLOCKING=1, CU_GREEN_CTX_DEFAULT_STREAM=1, CU_EVENT_DISABLE_TIMING=2,
                CU_STREAM_CAPTURE_MODE_RELAXED=2, __call__=None,
            )  # fmt: skip

        def function(*arguments: Any) -> tuple[Any, ...]:
            self.said.append(" ".join([name, *map(repr, arguments)]))
            if name == "cuGetErrorString":
                return (Result.CUDA_SUCCESS, b"as the test wants")
            if name in self.failing:
                return (self.failing[name], None)
            if name in MAKERS:
                self._made += 1
                return (Result.CUDA_SUCCESS, Handle(self._made, f"{MAKERS[name]}{self._made}"))
            if name in ("cuThreadExchangeStreamCaptureMode", "cuCtxFromGreenCtx"):
                return (Result.CUDA_SUCCESS, arguments[0])
            if name == "cuMemGetInfo":
                return (Result.CUDA_SUCCESS, 0, 0)
            return (Result.CUDA_SUCCESS,)

        function.__name__ = name
        return function

    @staticmethod
    def CUgraph(raw: int) -> int:  # noqa: N802
        return raw


class FakeSlices(Slices):
    """The slices of an H200, whose contexts cost nothing."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu
        self.fine = False
        self.resources = list(range(17))
        self._unused = {}


class FakeWorkerLoop:
    """A request lasts until the gate opens, if there is one."""

    gate: threading.Event | None = None

    def __init__(self, *arguments: Any) -> None:
        self.steps = None

    def drive(
        self, arrivals: Any = None, stop_at_ns: int = 0, stop: Any = None, most_requests: int = 0
    ) -> Any:
        if most_requests:
            if self.gate is not None:
                self.gate.wait(PATIENCE_S)
            return np.zeros((1, 3), dtype=np.int64)
        while not stop[0]:
            time.sleep(0.001)
        return np.zeros((0, 3), dtype=np.int64)


class FakeGraph(Closing):
    """What a recapture gives: says when it goes, and may refuse."""

    def __init__(self, fake: RecordingDriver, number: int, refuses: bool) -> None:
        self._fake, self._number, self._refuses = fake, number, refuses

    def close(self) -> None:
        self._fake.said.append(f"cuStreamDestroy? graph{self._number}")
        if self._refuses:
            raise DeviceError("a captured graph cannot be destroyed: refused")


class Bench:
    """A device and sessions on it, all on the recording driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = RecordingDriver()
        for module in (driver, closing, executables, lanes, graphs):
            monkeypatch.setattr(module, "cu", self.fake)
        monkeypatch.setattr(loop, "WorkerLoop", FakeWorkerLoop)
        monkeypatch.setattr(FakeWorkerLoop, "gate", None)
        monkeypatch.setattr(device_module, "check_clusters", lambda *given: None)
        monkeypatch.setattr(lanes, "cuda_priority", lambda wanted: 0)
        self.kept: list[Any] = []
        monkeypatch.setattr(closing, "never_free", self.kept.append)
        self.gpu = types.SimpleNamespace(
            context="primary", make_current=lambda: None, quicken=lambda: None, close=self._closer
        )
        self.device = object.__new__(CudaDevice)
        vars(self.device).update(
            execution=Execution.WHOLE,
            progress=Progress(),
            gpu=self.gpu,
            slices=FakeSlices(self.gpu),
            nvml=types.SimpleNamespace(close=lambda: self.fake.said.append("nvmlShutdown")),
            _sessions=weakref.WeakSet(),
            _releases=Releases(),
            _closed=False,
        )
        monkeypatch.setattr(FakeSlices, "take_context", self._take)
        for release in (self.gpu.close, self.device.nvml.close, self.device.slices.close):
            self.device._releases.callback(release)
        self.refuses = False
        self._graphs = 0

    def _closer(self) -> None:
        driver.call(self.fake.cuDevicePrimaryCtxRelease, "gpu")

    def _take(self, mask: Any) -> Any:
        slices = self.device.slices
        if unused := slices._unused.get(mask):
            return unused.pop()
        return driver.call(self.fake.cuGreenCtxCreate)

    def open(self) -> CudaSession:
        """Two workers with a loop in their graphs, each captured again on a lane of its own."""
        plan = make_plan("test", make_mix(2), (48,))
        trace = make_profile().trace
        routes = tuple(
            Route(worker, np.full(KERNELS, worker), np.full(KERNELS, -1)) for worker in range(2)
        )
        graph = types.SimpleNamespace(atomic=True, nodes=[])
        source = Capture(cast(Any, graph), trace, None, self._recapture)
        program = dataclasses.replace(program_of(plan), routes=(routes,))
        session = CudaSession(self.device, program, [source, source], (), self.device.execution)
        self.device._sessions.add(session)
        self.fake.said.clear()
        return session

    def _recapture(self, stream: Any) -> tuple[int, Closing]:
        self._graphs += 1
        return self._graphs, FakeGraph(self.fake, self._graphs, self.refuses)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.fake.failing.clear()
    for session in list(made.device._sessions):  # while the stand-ins are there
        with contextlib.suppress(DeviceError):
            session.close()
    gc.collect()


ORDER = [
    "cuStreamSynchronize stream2",
    "cuStreamSynchronize stream4",
    "cuGraphExecDestroy executable6",
    "cuStreamDestroy? graph2",
    "cuGraphExecDestroy executable5",
    "cuStreamDestroy? graph1",
    "cuStreamSynchronize stream4",
    "cuStreamDestroy stream4",
    "cuStreamSynchronize stream2",
    "cuStreamDestroy stream2",
]


def order(bench: Bench) -> list[str]:
    return [line for line in bench.fake.said if line.split()[0] in (*RELEASERS, "cuStreamDestroy?")]


def test_lanes_are_waited_for_then_executables_graphs_and_streams_go_in_this_order(
    bench: Bench,
) -> None:
    bench.open().close()
    assert order(bench) == ORDER


def test_the_context_is_current_while_a_session_closes_and_the_thread_as_before_after(
    bench: Bench,
) -> None:
    bench.open().close()
    assert bench.fake.said[:2] == [
        "cuCtxPushCurrent 'primary'",
        "cuThreadExchangeStreamCaptureMode 2",
    ]
    assert bench.fake.said[-2:] == ["cuThreadExchangeStreamCaptureMode 2", "cuCtxPopCurrent"]


def test_closing_twice_is_closing_once_and_a_closed_session_serves_nobody(bench: Bench) -> None:
    session = bench.open()
    session.close()
    said = len(bench.fake.said)
    session.close()
    assert len(bench.fake.said) == said
    with pytest.raises(DeviceError, match="the session is closed; open the plan again"):
        session.request(0)


def test_a_device_closes_its_sessions_before_itself(bench: Bench) -> None:
    first, second = bench.open(), bench.open()
    bench.device.close()
    released = bench.fake.released()
    last_stream = max(n for n, line in enumerate(released) if line.startswith("cuStreamDestroy"))
    contexts = [n for n, line in enumerate(released) if line.startswith("cuGreenCtxDestroy")]
    assert len(contexts) == 4 and min(contexts) > last_stream
    assert released[-1] == "cuDevicePrimaryCtxRelease 'gpu'"
    said = len(bench.fake.said)
    for thing in (first, second, bench.device):
        thing.close()
    assert len(bench.fake.said) == said
    with pytest.raises(DeviceError, match="the device is closed"):
        bench.device.open(first._program, [])


def test_a_session_that_nobody_closes_is_closed_when_it_is_collected(bench: Bench) -> None:
    session = bench.open()
    cycle: list[Any] = [session]
    cycle.append(cycle)
    del session, cycle
    gc.collect()
    assert order(bench) == ORDER
    assert not bench.device._sessions


@pytest.mark.parametrize("failing", ["cuGraphExecDestroy", "cuStreamDestroy"])
def test_a_release_that_fails_stops_no_other_and_all_failures_are_one_error(
    bench: Bench, failing: str
) -> None:
    session = bench.open()
    bench.fake.failing[failing] = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError) as caught:
        session.close()
    assert order(bench) == ORDER
    assert str(caught.value) == f"{failing} failed: CUDA_ERROR_INVALID_VALUE (as the test wants)"
    session.close()


def test_graphs_that_cannot_be_destroyed_do_not_keep_lanes_from_going(bench: Bench) -> None:
    bench.refuses = True
    session = bench.open()
    with pytest.raises(DeviceError, match="cannot be destroyed: refused"):
        session.close()
    assert order(bench) == ORDER


def test_what_cannot_be_waited_for_is_never_released_nor_handed_out_again(bench: Bench) -> None:
    session = bench.open()
    bench.fake.failing["cuStreamSynchronize"] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match=r"start the process again: .*ILLEGAL_ADDRESS"):
        session.close()
    assert order(bench) == ["cuStreamSynchronize stream2"]
    releases, captures = bench.kept
    assert releases and captures is session._captures
    session.close()
    assert bench.device.slices._unused == {}


def test_a_context_that_cannot_be_made_current_keeps_everything(bench: Bench) -> None:
    session = bench.open()
    bench.fake.failing["cuCtxPushCurrent"] = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError, match="cuCtxPushCurrent"):
        session.close()
    assert order(bench) == [] and len(bench.kept) == 2


def test_the_error_in_a_block_is_not_hidden_by_one_while_closing(bench: Bench) -> None:
    bench.fake.failing["cuStreamSynchronize"] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(ZeroDivisionError) as caught, bench.open():
        raise ZeroDivisionError
    assert "while closing: the session's lanes cannot be waited for" in caught.value.__notes__[0]


def test_a_session_that_cannot_be_opened_releases_what_it_has(bench: Bench) -> None:
    bench.fake.failing["cuGraphInstantiate"] = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError, match="cuGraphInstantiate"):
        bench.open()
    assert order(bench)[-5:] == ["cuStreamDestroy? graph1", *ORDER[-4:]]
    assert not bench.device._sessions


def test_another_session_works_after_one_that_failed(bench: Bench) -> None:
    test_a_session_that_cannot_be_opened_releases_what_it_has(bench)
    bench.fake.failing.clear()
    bench.open().close()
    assert [line.split()[0] for line in order(bench)] == [line.split()[0] for line in ORDER]


def test_closing_waits_for_a_request_of_another_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(FakeWorkerLoop, "gate", gate)
    session = bench.open()
    served = threading.Thread(target=session.request, args=(0,))
    served.start()
    assert until(lambda: bool(session._belongings._users))
    closer = threading.Thread(target=session.close)
    closer.start()
    assert until(session._belongings._closing.locked)
    time.sleep(0.05)  # in which it could release what is in use
    assert order(bench) == []
    gate.set()
    served.join()
    closer.join()
    assert order(bench) == ORDER


@pytest.mark.parametrize("closer", ["another thread", "the run itself"])
def test_closing_in_the_middle_of_a_run_ends_its_loops_first(bench: Bench, closer: str) -> None:
    session = bench.open()
    stop = np.zeros(1, dtype=np.int64)
    runners = [
        loop.Runner(lambda one=one: one.drive(stop=stop), stop)  # type: ignore[misc]
        for one in session._loops
    ]
    with session._belongings.running(runners, stop):
        if closer == "the run itself":
            session.close()
        else:
            thread = threading.Thread(target=session.close)
            thread.start()
            assert until(lambda: bool(stop[0]))
            assert order(bench) == []  # this block has not ended
    if closer == "another thread":
        thread.join()
    assert not any(runner.is_alive() for runner in runners)
    assert order(bench) == ORDER


def test_an_interrupt_while_releasing_comes_when_all_is_released() -> None:
    said: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    releases = Releases()
    releases.callback(said.append, "first made")
    releases.callback(interrupt)
    releases.callback(said.append, "last made")
    with pytest.raises(KeyboardInterrupt):
        releases.close()
    assert said == ["last made", "first made"]


def test_an_interrupt_while_waiting_leaves_the_rest_to_the_next_close(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = bench.open()

    def interrupted(function: Any, *arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(closing, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.close()
    assert order(bench) == []
    session.close()
    assert order(bench) == ORDER


def test_what_releases_hold_goes_one_by_one() -> None:
    """A torch graph must be gone before the stream below it is released."""

    class Thing:
        pass

    thing = Thing()
    alive = weakref.ref(thing)
    releases = Releases()
    seen: list[bool] = []
    releases.callback(lambda: seen.append(alive() is None))
    releases.callback(lambda held: None, thing)
    del thing
    releases.close()
    assert seen == [True]


def test_a_lane_that_cannot_be_waited_for_gives_its_stream_back_and_keeps_its_context(
    bench: Bench,
) -> None:
    slices = bench.device.slices
    mask = make_plan("test", make_mix(1), (48,)).lanes[0].mask
    pool = LanePool(slices, [mask, mask])
    bench.fake.said.clear()
    bench.fake.failing["cuStreamSynchronize"] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="cuStreamSynchronize failed"):
        pool.close()
    assert len([line for line in bench.fake.said if line.startswith("cuStreamDestroy")]) == 2
    assert slices._unused == {}


def in_a_child(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_what_is_never_freed_outlives_the_names_of_an_interpreter_that_ends() -> None:
    done = in_a_child("""
        from eclip.devices.cuda.closing import never_free
        class Loud:
            def __del__(self): print("destroyed", flush=True)
        never_free((Loud(),))
        """)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_open_sessions_are_closed_when_the_interpreter_ends() -> None:
    done = in_a_child("""
        import types, weakref
        from eclip.devices.cuda import closing
        closing.call = lambda function, *given: function(*given)
        def say(*words): print(*words, flush=True)
        closing.cu = types.SimpleNamespace(
            CUstreamCaptureMode=types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2),
            cuCtxPushCurrent=lambda context: None, cuCtxPopCurrent=lambda: None,
            cuThreadExchangeStreamCaptureMode=lambda mode: mode,
            cuStreamSynchronize=lambda stream: say("waited for", stream),
        )
        class Session: pass
        session = Session()
        belongings = closing.Belongings(types.SimpleNamespace(context=1), None)
        belongings.streams.append("lane")
        belongings.releases.callback(say, "released")
        weakref.finalize(session, belongings.close_quietly)
        """)
    assert (done.returncode, done.stdout) == (0, "waited for lane\nreleased\n"), done.stderr


def test_belongings_do_not_know_their_session(bench: Bench) -> None:
    """Otherwise it could never be collected."""
    session = bench.open()
    reached: set[int] = set()
    todo: list[Any] = [session._belongings]
    while todo:
        thing = todo.pop()
        if id(thing) in reached or isinstance(thing, type | types.ModuleType | types.FunctionType):
            continue
        reached.add(id(thing))
        assert thing is not session
        todo += gc.get_referents(thing)
    assert isinstance(session._belongings, Belongings)
