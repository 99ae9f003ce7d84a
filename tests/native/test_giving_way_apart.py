"""A service and a background worker in two processes, over the board of their set: the loop on the
stand-in driver, a stand-in for each.

The machine may be busy, and a service that it keeps from running for 100 ms counts as idle. So
where something is promised, the best of several attempts counts.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from eclip.core.device import Window
from eclip.core.load import CLOSED_LOOP, Load, closed_loop
from eclip.core.mix import mix_of
from eclip.core.model_key import ModelKey
from eclip.core.plan import (
    Assignment,
    Group,
    Joints,
    Lane,
    Plan,
    PlannedWorker,
    Promise,
    Rule,
    Turns,
    Variant,
)
from eclip.core.runlog import RunLog
from eclip.core.topology import Topology
from eclip.core.trace import with_traces
from eclip.cuda.processes.child import Job, now_ns
from eclip.cuda.processes.session import Host, ProcessSession, ProcessSets
from eclip.files import store
from native_build import Native
from punctual import run_in_time
from standin_children import ENTRY, LIBRARY
from standins import KERNELS, SteadyCounter, trace_of

MS = 1_000_000
SERVICE, BACKGROUND = 0, 1
ATTEMPTS = 8
WINDOW = Window(seconds=0.5, warmup_seconds=0.2, trace_ms=0.0)


def plan_of_two() -> Plan:
    h200 = store.load_builtin("h200", Topology)
    models = [ModelKey("service", 1), ModelKey("background", 1)]
    mix = mix_of(models)
    service, background = (
        PlannedWorker(name=worker.name, model=worker.model, kernels=KERNELS, why="")
        for worker in mix.workers
    )
    # So large a bound that no request hangs, and yet nobody has slack in a closed loop.
    promise = Promise(bound_ns=10**12, request_ns=600_000, some_ns=0, none_ns=0)
    joints = Joints(at=(1, 2), depth=1, rules=(Rule(to=(0,)),), stretch_ns=(1, 1, 1))
    return Plan(
        mix=mix,
        policy="timeslice",
        topology=h200,
        fingerprint=with_traces(h200.fingerprint, [trace_of(one.name, 1) for one in models]),
        modelled=False,
        workers=(
            msgspec.structs.replace(service, promise=promise),
            msgspec.structs.replace(background, joints=joints),
        ),
        lanes=(Lane(0, h200.full), Lane(1, h200.full)),
        variants=(Variant((0, 1), tuple(Assignment(n, (Group(n, KERNELS, 3),)) for n in (0, 1))),),
        why="",
        sharing=Turns(),
    )


@pytest.fixture(scope="module")
def session(native: Native) -> Iterator[ProcessSession]:
    plan = plan_of_two()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LIBRARY, str(native.standin))
        host = Host(f"GPU-apart-{os.getpid()}", "a GPU", plan.topology, SteadyCounter())
        with ProcessSets(host, [plan], [[Job(ENTRY, model) for model in plan.models]]) as sets:
            sets.wait()
            yield sets.sessions[0]


def ends_of(log: RunLog, worker: int) -> list[int]:
    rows = zip(log.requests.worker, log.requests.end_ns, strict=True)
    return [end for who, end in rows if who == worker]


def some_attempt(succeeds: Callable[[], bool]) -> bool:
    return any(succeeds() for _ in range(ATTEMPTS))


def test_background_gives_way_to_a_service_in_another_process(session: ProcessSession) -> None:
    nobody = Load(label="", seed=0, arrivals=(np.empty(0, dtype=np.int64), CLOSED_LOOP))

    def succeeds() -> bool:
        beside = run_in_time(session, closed_loop(2), WINDOW)
        alone = run_in_time(session, nobody, WINDOW)
        assert beside.counters[SERVICE].yields == alone.counters[BACKGROUND].yields == 0
        left = len(ends_of(beside, BACKGROUND))
        return left <= 0.05 * len(ends_of(alone, BACKGROUND)) and len(ends_of(beside, SERVICE)) > 50

    assert some_attempt(succeeds)


def test_background_goes_on_when_the_service_is_stopped(session: ProcessSession) -> None:
    service = session.children[SERVICE].pid
    stopped_at = []

    def stop_for_a_while() -> None:
        os.kill(service, signal.SIGSTOP)
        stopped_at.append(now_ns())
        threading.Timer(0.6, os.kill, (service, signal.SIGCONT)).start()

    def succeeds() -> bool:
        window = Window(seconds=1.5, warmup_seconds=0.2, trace_ms=0.0)
        begun = now_ns()
        threading.Timer(0.6, stop_for_a_while).start()
        log = session.run(closed_loop(2), window)
        # The measured part began somewhat later than this.
        stop_ns = stopped_at[-1] - begun - 220 * MS
        pauses = [end - stop_ns for end in ends_of(log, BACKGROUND) if end > stop_ns]
        before = [end for end in ends_of(log, BACKGROUND) if 100 * MS < end < stop_ns - 20 * MS]
        soon = [after for after in pauses if after < 200 * MS]
        print(f"{len(before)} before, first after {min(pauses, default=0) / MS:.0f} ms")
        return len(before) <= 5 and len(soon) > 5

    assert some_attempt(succeeds)
