"""A session closed in any state releases everything and leaves the process alive.

Every test has a process of its own, whose end counts too: a destructor that aborts when the
interpreter ends is a failure. Sessions have two workers: one whose kernels change lanes, and one
with a loop in its graph, which is captured again on its lane.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.program import lower
from eclip.core.runlog import RunLog
from eclip.core.topology import Mask
from eclip.cuda.device import CudaDevice
from eclip.errors import DeviceError
from eclip.gpu.session import Execution, GpuSession

torch = pytest.importorskip("torch", reason="tests/gpu needs the Python package torch")

pytestmark = pytest.mark.own_process

LEAK_BYTES = 16 << 20
WORKERS = 2
LEFT_OPEN: list[Any] = []  # until the interpreter ends

PlanOf = Callable[..., Plan]
Held = Callable[[], tuple[int, int]]
RunClosed = Callable[..., RunLog]


def capture_both() -> list[Any]:
    from eclip.capture.torch import capture
    from eclip.varout.cuda.models import MoeBlock

    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(3)]
    module = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU())))
    small = capture(module.cuda(), [torch.randn(32, 256, device="cuda")], ModelKey("small", 32))
    block = MoeBlock(capacity=32).cuda().eval()
    with torch.no_grad():
        block.gate.bias[0] = 3.0  # the first expert overflows: the loop turns
    looping = capture(block, (torch.randn(256, 128, device="cuda"),), ModelKey("moe", 1))
    assert [one.capture.graph.atomic for one in (small, looping)] == [False, True]
    return [small, looping]


def open_session(
    device: CudaDevice,
    plan_of: PlanOf,
    execution: Execution = Execution.WHOLE,
    models: list[Any] | None = None,
) -> GpuSession:
    sources = [one.capture for one in models or capture_both()]
    traces = [source.trace for source in sources]
    masks = [[Mask([0, 1]), Mask([1, 2])], [Mask([3, 4])]]
    small, looping = (len(trace.kernels) for trace in traces)
    routes = [[kernel % 2 for kernel in range(small)], [0] * looping]
    plan = plan_of(device.topology, traces, masks, routes)
    device.execution = execution
    session = device.open(lower(plan, traces), sources)
    assert isinstance(session, GpuSession)
    return session


def request_all(session: GpuSession) -> None:
    for worker in range(WORKERS):
        session.request(worker)


def check_alive(device: CudaDevice, plan_of: PlanOf) -> None:
    """Another capture, another session: outputs are what eager gives."""
    models = capture_both()
    with open_session(device, plan_of, models=models) as session:
        request_all(session)
        for one in models:
            with torch.inference_mode():
                wanted = one.capture.keep[0](*one.inputs)
            torch.testing.assert_close(one.outputs, wanted, rtol=1e-3, atol=1e-3)


def break_the_gpu() -> None:
    """An error that stays: nothing can be done with the context any more."""
    beyond = torch.full((1,), 1_000_000, device="cuda")
    with pytest.raises(RuntimeError):
        torch.zeros(4, device="cuda")[beyond].cpu()
    with pytest.raises(RuntimeError):
        torch.cuda.synchronize()


def test_never_run(device: CudaDevice, plan_of: PlanOf) -> None:
    models = capture_both()
    for execution in Execution:
        open_session(device, plan_of, execution, models).close()
    check_alive(device, plan_of)


def test_after_a_run_and_twice(device: CudaDevice, plan_of: PlanOf, run_closed: RunClosed) -> None:
    models = capture_both()
    for execution in Execution:
        session = open_session(device, plan_of, execution, models)
        request_all(session)
        assert run_closed(session, WORKERS, seconds=0.2).requests.worker
        session.close()
        session.close()
        with pytest.raises(DeviceError, match="the session is closed"):
            session.request(0)
        with pytest.raises(DeviceError, match="the session is closed"):
            run_closed(session, WORKERS, seconds=0.2)
    check_alive(device, plan_of)


def test_in_the_middle_of_an_interrupted_run(
    device: CudaDevice, plan_of: PlanOf, run_closed: RunClosed
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    session = open_session(device, plan_of)
    threading.Timer(1.0, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt), session:
        run_closed(session, WORKERS, seconds=30)
    check_alive(device, plan_of)


def test_by_another_thread_in_the_middle_of_a_run(
    device: CudaDevice, plan_of: PlanOf, run_closed: RunClosed
) -> None:
    session = open_session(device, plan_of)
    run = threading.Thread(target=run_closed, args=(session, WORKERS, 30.0))
    run.start()
    time.sleep(1.5)
    session.close()
    run.join(10)
    assert not run.is_alive()
    check_alive(device, plan_of)


def test_while_another_thread_asks_for_requests(device: CudaDevice, plan_of: PlanOf) -> None:
    session = open_session(device, plan_of)
    done = 0

    def ask() -> None:
        nonlocal done
        with contextlib.suppress(DeviceError):
            while True:
                request_all(session)
                done += 1

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    session.close()
    asking.join(10)
    assert not asking.is_alive() and done > 0
    check_alive(device, plan_of)


def test_by_four_threads_at_once(device: CudaDevice, plan_of: PlanOf) -> None:
    session = open_session(device, plan_of)
    request_all(session)
    closers = [threading.Thread(target=session.close) for _ in range(4)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(20)
        assert not closer.is_alive()
    check_alive(device, plan_of)


def test_after_a_launch_failed_for_good(plan_of: PlanOf) -> None:
    own = CudaDevice()
    first = open_session(own, plan_of)
    second = open_session(own, plan_of, Execution.SEGMENTS)
    request_all(first)
    break_the_gpu()
    for worker in range(WORKERS):
        with pytest.raises(DeviceError, match="a launch failed"):
            first.request(worker)
    for session in (first, second):
        with pytest.raises(DeviceError, match="start the process again"):
            session.close()
        session.close()
    with contextlib.suppress(DeviceError):
        own.close()
    own.close()


def test_left_open_after_a_launch_failed_for_good(plan_of: PlanOf) -> None:
    own = CudaDevice()
    session = open_session(own, plan_of)
    break_the_gpu()
    with pytest.raises(DeviceError, match="a launch failed"):
        session.request(1)
    LEFT_OPEN.append((own, session))


def test_an_error_in_the_block_stays_the_error(plan_of: PlanOf) -> None:
    own = CudaDevice()
    with (
        pytest.raises(DeviceError, match="a launch failed") as caught,
        open_session(own, plan_of) as session,
    ):
        break_the_gpu()
        session.request(0)
    assert "while closing" in caught.value.__notes__[0]


def test_after_another_session_could_not_be_opened(
    device: CudaDevice, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eclip.cuda.placing import CudaPlacer

    models = capture_both()
    session = open_session(device, plan_of, models=models)

    def refuse(self: Any, executable: Any, stream: Any) -> None:
        raise DeviceError("refused by the test")

    with monkeypatch.context() as patch:
        patch.setattr(CudaPlacer, "upload", refuse)
        for execution in Execution:
            with pytest.raises(DeviceError, match="refused by the test"):
                open_session(device, plan_of, execution, models)
    request_all(session)
    session.close()
    check_alive(device, plan_of)


def test_after_a_capture_that_failed(device: CudaDevice, plan_of: PlanOf) -> None:
    """What made test_varout abort after test_errors: torch 2.11 leaves it on the allocator's list
    of captures under way, which torch.cuda.MemPool's destructor wants to be empty."""
    from eclip.capture.torch import capture

    with pytest.raises(DeviceError, match="picky:1 cannot be captured"):
        capture(lambda x: (x * 2)[x > 0], [torch.randn(1000, device="cuda")], ModelKey("picky", 1))
    check_alive(device, plan_of)
    torch.cuda.MemPool()  # and gone again: its destructor looks at the list


def test_after_a_capture_that_failed_outside_of_eclip(device: CudaDevice, plan_of: PlanOf) -> None:
    """Nobody takes this one off the list."""
    x = torch.randn(1000, device="cuda")
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.clone_state()
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x[x > 0]
    generator.graphsafe_set_state(state)
    with open_session(device, plan_of) as session:
        request_all(session)


def test_after_a_loop_whose_body_could_not_be_captured(device: CudaDevice, plan_of: PlanOf) -> None:
    from eclip import varout
    from eclip.capture.torch import capture

    turns = 0

    def waits(x: Any) -> Any:
        out = torch.zeros_like(x)

        def body(window: Any) -> None:
            nonlocal turns
            turns += torch.cuda.is_current_stream_capturing()
            if turns == 2:  # in the loop itself
                window.values.cpu()
            window.put(out, window.take(x))

        varout.nonzero(x > 0, capacity=16).each(body)
        return out

    with pytest.raises(DeviceError, match="waits:1 cannot be captured"):
        capture(waits, [torch.randn(1000, device="cuda")], ModelKey("waits", 1))
    gc.collect()
    check_alive(device, plan_of)
    torch.cuda.MemPool()


def test_device_closed_before_its_sessions(plan_of: PlanOf) -> None:
    own = CudaDevice()
    sessions = [open_session(own, plan_of, way) for way in (Execution.WHOLE, Execution.SEGMENTS)]
    request_all(sessions[0])
    own.close()
    for session in sessions:
        session.close()
        with pytest.raises(DeviceError, match="the session is closed"):
            session.request(0)
    own.close()
    with pytest.raises(DeviceError, match="the device is closed"):
        open_session(own, plan_of)
    with CudaDevice() as another:
        check_alive(another, plan_of)


@pytest.mark.alone
def test_collected_without_being_closed(device: CudaDevice, plan_of: PlanOf, held: Held) -> None:
    models = capture_both()

    def forget() -> None:
        session = open_session(device, plan_of, models=models)
        request_all(session)
        cycle: list[Any] = [session]
        cycle.append(cycle)
        gone = weakref.ref(session)
        del session, cycle
        gc.collect()
        assert gone() is None

    for _ in range(3):
        forget()
    torch.cuda.empty_cache()
    before, _ = held()
    for _ in range(10):
        forget()
    torch.cuda.empty_cache()
    after, _ = held()
    assert after - before <= LEAK_BYTES
    check_alive(device, plan_of)


def test_collected_by_another_thread_during_a_capture(device: CudaDevice, plan_of: PlanOf) -> None:
    """Which neither fails the capture nor is failed by it."""
    from eclip.capture.torch import capture

    holder = [open_session(device, plan_of)]

    def forward(_: Any, x: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            dropping = threading.Thread(target=holder.clear)
            dropping.start()
            dropping.join(20)
        return x * 2 + 1

    slow = type("Slow", (torch.nn.Module,), {"forward": forward})
    x = torch.randn(1000, device="cuda")
    captured = capture(slow(), [x], ModelKey("slow", 1))
    assert not holder
    captured.graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured.outputs, x * 2 + 1)
    check_alive(device, plan_of)


@pytest.mark.alone
def test_opened_and_closed_many_times_leaks_nothing(
    device: CudaDevice, plan_of: PlanOf, held: Held
) -> None:
    models = capture_both()

    def cycle() -> None:
        with open_session(device, plan_of, models=models) as session:
            request_all(session)

    for _ in range(5):
        cycle()
    torch.cuda.empty_cache()
    before, files_before = held()
    for _ in range(30):
        cycle()
    torch.cuda.empty_cache()
    after, files_after = held()
    assert after - before <= LEAK_BYTES
    assert files_after <= files_before


def test_open_when_the_interpreter_ends(plan_of: PlanOf) -> None:
    own = CudaDevice()
    session = open_session(own, plan_of)
    request_all(session)
    LEFT_OPEN.append((own, session))


def test_in_the_middle_of_a_run_when_the_interpreter_ends(
    plan_of: PlanOf, run_closed: RunClosed
) -> None:
    own = CudaDevice()
    session = open_session(own, plan_of)
    run = threading.Thread(target=run_closed, args=(session, WORKERS, 200.0), daemon=True)
    run.start()
    time.sleep(1.5)
    assert run.is_alive()
    LEFT_OPEN.append((own, session))
