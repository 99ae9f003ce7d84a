"""Closing in any state: one order, everything tried, one error, and nothing a second time.

The driver is a stand-in that writes down what is asked of it; handles are numbers with names.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cuda_bench import RELEASERS, Bench, FakeWorkerLoop, Result
from eclip.cuda.lanes import LanePool
from eclip.errors import DeviceError
from eclip.gpu.closing import Belongings, Releases
from eclip.gpu.worker_loop import Runner
from logs import make_mix, make_plan
from waiting import PATIENCE_S, until


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


def test_closing_lets_a_request_go_on_that_yields_to_a_busy_service(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service may be another process's, and busy for ever."""

    def held(worker: Any, stop: Any, most_requests: int) -> Any:
        assert until(lambda: bool(stop[0]))
        return np.zeros((most_requests, 3), dtype=np.int64)

    monkeypatch.setattr(FakeWorkerLoop, "drive", held)
    session = bench.open()
    served = threading.Thread(target=session.request, args=(0,))
    served.start()
    assert until(lambda: bool(session._belongings._users))
    session.close()
    served.join()
    assert order(bench) == ORDER


def test_a_request_that_closing_kept_from_beginning_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = np.zeros((0, 3), dtype=np.int64)
    monkeypatch.setattr(FakeWorkerLoop, "drive", lambda worker, **given: nothing)
    with pytest.raises(DeviceError, match="closed before the request began"):
        bench.open().request(0)


@pytest.mark.parametrize("closer", ["another thread", "the run itself"])
def test_closing_in_the_middle_of_a_run_ends_its_loops_first(bench: Bench, closer: str) -> None:
    session = bench.open()
    stop = np.zeros(1, dtype=np.int64)
    runners = [
        Runner(lambda one=one: one.drive(stop=stop), stop)  # type: ignore[misc]
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

    def interrupted(stream: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bench.gpu, "wait_for", interrupted)
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
        from eclip.gpu.closing import never_free
        class Loud:
            def __del__(self): print("destroyed", flush=True)
        never_free((Loud(),))
        """)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_open_sessions_are_closed_when_the_interpreter_ends() -> None:
    done = in_a_child("""
        import contextlib, types, weakref
        from eclip.gpu import closing
        def say(*words): print(*words, flush=True)
        gpu = types.SimpleNamespace(
            ready_to_close=contextlib.nullcontext, wait_for=lambda stream: say("waited for", stream)
        )
        class Session: pass
        session = Session()
        belongings = closing.Belongings(gpu, None)
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
