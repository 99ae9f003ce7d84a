"""A GPU session's runs with stand-ins for what needs a GPU: the loops, NVML and the tracer.

Time passes only where the session sleeps or waits for a tick, and only after its loops have done
what they do, so that a busy machine changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import types
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from eclip.core.device import Window
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.program import Route, program_of
from eclip.errors import DeviceError, TracingError
from eclip.gpu import energy
from eclip.gpu import session as session_module
from eclip.gpu.closing import Belongings
from eclip.gpu.energy import Tick
from eclip.gpu.recording import Placed, Span
from eclip.gpu.session import GpuSession
from eclip.gpu.steps import AHEAD, HOLD, LAUNCH, WAIT, chained
from eclip.gpu.worker_loop import Runner
from eclip.progress import Progress
from logs import make_mix, make_plan
from served import served_rows

REQUEST_NS = 1_000_000
REQUESTS = 50  # of a closed loop, the last before the end
TICK_NS = 10_000_000


class Clock:
    """Stands for the module ``time``."""

    CLOCK_MONOTONIC = time.CLOCK_MONOTONIC

    def __init__(self) -> None:
        self.now_ns = 0

    def clock_gettime_ns(self, _: int) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.wait(self.now_ns + round(seconds * 1e9))

    def wait(self, until_ns: int) -> None:
        for thread in threading.enumerate():
            if isinstance(thread, Runner):
                thread.join()
        self.now_ns = max(self.now_ns, until_ns)


class FakeLoop:
    """Requests of a millisecond each; ``ran`` says when, for the tracer to tell."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ran: list[int] = []
        self.given: list[Any] = []
        self._error = error

    def drive(self, arrivals: Any, stop_at_ns: int, stop: Any) -> Any:
        self.given.append(arrivals)
        if self._error is not None:
            raise self._error
        first = stop_at_ns - REQUESTS * REQUEST_NS
        starts = list(range(first, stop_at_ns, REQUEST_NS)) if arrivals is None else []
        self.ran += starts
        rows = [(start, start, start + REQUEST_NS) for start in starts]
        return served_rows(rows)


class FakeNvml:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def tick_before(self, end_ns: int) -> Tick | None:
        at_ns = (self._clock.now_ns // TICK_NS + 1) * TICK_NS
        self._clock.wait(min(at_ns, end_ns))
        return Tick(at_ns, at_ns // 10_000) if at_ns < end_ns else None  # 100 W

    def other_processes(self) -> list[int]:
        return []

    def driver(self) -> str:
        return "1.2"


class Stage(contextlib.ExitStack):
    """A session of one worker, whose tracer tells of the loop's requests since it began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        super().__init__()
        self.clock = Clock()
        for module in (session_module, energy):
            monkeypatch.setattr(module, "time", self.clock)
        plan = make_plan("eclip", make_mix(1), (48, 96))
        self.kernels = plan.workers[0].kernels
        groups = plan.main.assignments[0].groups
        lane = np.repeat([group.lane for group in groups], [group.kernels for group in groups])
        route = Route(worker=0, lane=lane, wait_on=np.full(self.kernels, -1))
        self.loop = FakeLoop(error)
        self.session = object.__new__(GpuSession)
        self.quickened_ns: list[int] = []
        gpu = types.SimpleNamespace(
            make_current=lambda: None,
            quicken=lambda: self.quickened_ns.append(self.clock.now_ns),
        )
        vars(self.session).update(
            _device=types.SimpleNamespace(
                counter=FakeNvml(self.clock),
                gpu=gpu,
                title="a GPU",
                progress=Progress(),
                tracer=self._tracer,
            ),
            _captures=[],
            _program=dataclasses.replace(program_of(plan), routes=((route,),)),
            _warnings=("from before",),
            _executables=types.SimpleNamespace(placed={40: Placed(route, range(self.kernels))}),
            _loops=[self.loop],
            _rows=(0,),
            prepared=None,
            _belongings=Belongings(cast(Any, gpu), None),
        )
        self.seen_by_tracer = True

    @contextlib.contextmanager
    def _tracer(self, names: object) -> Iterator[Any]:
        self.loop.ran.clear()
        found = types.SimpleNamespace(spans=[], executable_id=lambda handle: handle + 1)
        yield found
        step = REQUEST_NS // self.kernels
        if self.seen_by_tracer:
            found.spans += [
                Span(start + k * step, start + k * step + step // 2, 41, launch)
                for launch, start in enumerate(self.loop.ran)
                for k in range(self.kernels)
            ]

    def run(self, load: Load | None = None, **window: float) -> Any:
        load = load or Load(label="closed loop", seed=4, arrivals=(CLOSED_LOOP,))
        given = {"seconds": 0.4, "warmup_seconds": 0.02, "trace_ms": 100.0, **window}
        return self.session.run(load, Window(**given))


def test_kernels_come_from_a_run_of_their_own_after_the_measured_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch)
    log = stage.run()
    assert len(stage.loop.given) == 2
    assert stage.quickened_ns == [0]  # once, before anything is measured
    assert len(log.requests.worker) == REQUESTS - 1  # of the measured run alone; one ends with it
    assert log.kernels.own_run and log.kernels.window_ns == 100_000_000
    assert len(log.kernels.worker) == REQUESTS * stage.kernels
    assert log.kernels.end_ns[-1] < 100_000_000
    assert log.energy_uj == pytest.approx(100 * 0.4e6)
    counters = log.counters[0]
    assert counters.kernels == len(log.requests.worker) * stage.kernels
    assert (counters.lane_waits, counters.false_waits, counters.false_wait_ns) == (None,) * 3
    assert log.warnings[0] == "from before"
    assert len(log.warnings) == 2 and "energy is measured over" in log.warnings[1]


def test_no_trace_window_means_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    log = stage.run(trace_ms=0.0)
    assert len(stage.loop.given) == 1
    assert (log.kernels.window_ns, log.kernels.worker) == (0, ())


def test_what_cannot_be_traced_is_a_warning_and_the_measured_run_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch)

    def refuse(names: object) -> None:
        raise TracingError("cupti-python is missing")

    monkeypatch.setattr(stage.session._device, "tracer", refuse)
    log = stage.run()
    assert len(log.requests.worker) == REQUESTS - 1
    assert log.kernels.worker == () and log.kernels.window_ns == 0
    assert log.warnings[-1] == "kernels are not recorded: cupti-python is missing"


def test_a_tracer_that_saw_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    stage.seen_by_tracer = False
    assert "no kernel of" in stage.run().warnings[-1]


def test_traced_run_takes_the_load_from_its_start_without_the_long_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch)
    times = np.array([-50_000_000, -10_000_000, 0, 5_000_000])
    stage.run(Load(label="", seed=0, arrivals=(times,)), warmup_seconds=0.06)
    measured, traced = stage.loop.given
    assert np.diff(measured).tolist() == np.diff(times).tolist()
    assert np.diff(traced).tolist() == [10_000_000, 5_000_000]
    assert traced[0] >= measured[2] + 400_000_000  # after the measured run


def test_worker_that_fails_ends_the_run_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, DeviceError("a launch failed"))
    with pytest.raises(DeviceError, match="a launch failed"):
        stage.run(seconds=5.0)
    assert stage.clock.now_ns < 100_000_000


@pytest.mark.parametrize("segments", [1, 2, 3, 4, 15])
def test_host_holds_so_that_few_segments_are_queued(segments: int) -> None:
    """Event n, recorded before segment n waits for it, tells that segment n - 1 is done."""
    parts = [(100 + n, n % 3, (200 + n, (n - 1) % 3) if n else None) for n in range(segments)]
    steps = chained(parts)
    done, launched = 0, 0
    for kind, first, _ in zip(steps.kind, steps.first, steps.second, strict=True):
        if kind == HOLD:
            done = int(first) - 200  # so many segments are complete
        elif kind == LAUNCH:
            launched += 1
            assert launched - done <= AHEAD + 1  # one runs, the others wait
    assert launched == segments
    assert np.count_nonzero(steps.kind == HOLD) == max(0, segments - 1 - AHEAD)
    assert np.count_nonzero(steps.kind == WAIT) == segments - 1
    assert steps.stream == (segments - 1) % 3
