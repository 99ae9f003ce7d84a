"""What goes wrong on a GPU says why, releases everything, and leaves the next run unaffected."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import eclip
from chains import enqueue_cluster
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.program import lower
from eclip.core.runlog import RunLog
from eclip.core.topology import Mask, Topology
from eclip.core.trace import Kernel, Trace
from eclip.cuda import device as device_module
from eclip.cuda import graphs, lanes, placing
from eclip.cuda.device import CudaDevice
from eclip.cuda.lanes import LanePool, Slices
from eclip.cuda.stressors import Stressors
from eclip.errors import DeviceError, MismatchError
from eclip.files import store
from eclip.gpu.executables import Capture
from eclip.gpu.session import Execution, GpuSession

torch = pytest.importorskip("torch", reason="tests/gpu needs the Python package torch")

MODEL = "small"
LEAK_BYTES = 8 << 20
PAIRS = {  # what makes a handle → what releases it
    "cuGreenCtxCreate": "cuGreenCtxDestroy",
    "cuGreenCtxStreamCreate": "cuStreamDestroy",
    "cuGraphClone": "cuGraphDestroy",
    "cuGraphInstantiate": "cuGraphExecDestroy",
    "cuEventCreate": "cuEventDestroy",
}

Held = Callable[[], tuple[int, int]]
Opened = Callable[..., AbstractContextManager[GpuSession]]
PlanOf = Callable[..., Plan]
RunClosed = Callable[..., RunLog]


def small_capture() -> Any:
    """Six kernels and more; the last gives something else for every input."""
    from eclip.capture.torch import capture

    layers = [torch.nn.Linear(256, 256) for _ in range(3)]
    module = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU())))
    return capture(module.cuda(), [torch.randn(32, 256, device="cuda")], ModelKey(MODEL, 32))


def plan_in_turns(topology: Topology, trace: Trace, plan_of: PlanOf) -> Plan:
    """Every kernel on another lane than the one before it."""
    route = [kernel % 2 for kernel in range(len(trace.kernels))]
    plan: Plan = plan_of(topology, [trace], [[Mask([0, 1]), Mask([1, 2])]], [route])
    return plan


def assert_gpu_works(device: CudaDevice) -> None:
    """A capture, its replay and ordinary work are as they should be."""
    captured = small_capture()
    captured.graph.replay()
    torch.cuda.synchronize()
    with torch.inference_mode():
        module = captured.capture.keep[0]
        torch.testing.assert_close(captured.outputs, module(*captured.inputs))
    assert torch.isfinite(torch.randn(1000, device="cuda")).all()
    torch.cuda.synchronize()


def test_a_model_that_does_not_fit_into_memory_is_named(device: CudaDevice) -> None:
    from eclip.capture.torch import capture

    def hungry(x: Any) -> Any:
        return x.expand(1 << 20, 1 << 20).contiguous() + 1  # 4 TB

    with pytest.raises(DeviceError, match="hungry:1 does not fit into the GPU's memory"):
        capture(hungry, [torch.ones(1, device="cuda")], ModelKey("hungry", 1))
    assert_gpu_works(device)


def test_an_input_that_does_not_fit_twice_is_an_error_of_ours(device: CudaDevice) -> None:
    """The static buffers are copies: the example fits and its copy does not."""
    from eclip.capture.torch import capture

    free, _ = torch.cuda.mem_get_info()
    example = torch.empty(int(free * 0.6), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(DeviceError, match="greedy:1 does not fit into the GPU's memory"):
            capture(lambda x: x[:10] + 1, [example], ModelKey("greedy", 1))
    finally:
        del example
        torch.cuda.empty_cache()
    assert_gpu_works(device)


def test_a_model_that_cannot_be_captured_is_told_by_its_operation(device: CudaDevice) -> None:
    from eclip.capture.torch import capture

    def keep_positive(x: Any) -> Any:
        return (x * 2)[x > 0]

    with pytest.raises(
        DeviceError, match=r"picky:1 cannot be captured: it stopped at aten\.(index|nonzero)"
    ):
        capture(keep_positive, [torch.randn(1000, device="cuda")], ModelKey("picky", 1))
    assert_gpu_works(device)


@pytest.mark.parametrize("other", ["mi50", "fine"])
def test_a_plan_for_another_gpu_is_refused_before_anything_is_made(
    other: str, device: CudaDevice, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = (
        Slices(device.gpu, fine=True).topology()
        if other == "fine"
        else store.load_builtin(other, Topology)
    )

    def make_nothing(*arguments: Any) -> None:
        raise AssertionError("a lane pool was made for a plan that does not fit")

    monkeypatch.setattr(device_module, "LanePool", make_nothing)
    kernel = Kernel(name="k", grid=(1, 1, 1), block=(32, 1, 1))
    trace = Trace(model=ModelKey(MODEL, 1), kernels=(kernel, kernel))
    program = lower(plan_of(topology, [trace], [[Mask([0])]], [[0, 0]]), [trace])
    with pytest.raises(MismatchError, match="different devices"):
        device.open(program, [])


class Ledger:
    """Counts the driver calls that make and release handles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls: collections.Counter[str] = collections.Counter()
        for module in (graphs, lanes, placing):
            monkeypatch.setattr(module, "call", self._counting(vars(module)["call"]))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(function: Any, *arguments: Any) -> Any:
            given = call(function, *arguments)
            self._calls[function.__name__] += 1
            return given

        return counted

    def made(self, name: str) -> int:
        return self._calls[name]

    def balances(self) -> dict[str, int]:
        """What is still held, by the call that made it; empty when all is released."""
        left = {make: self._calls[make] - self._calls[release] for make, release in PAIRS.items()}
        for make in ("cuStreamCreate", "cuStreamCreateWithPriority"):
            left["cuGreenCtxStreamCreate"] += self._calls[make]
        return {make: count for make, count in left.items() if count}


@pytest.mark.parametrize("execution", [Execution.WHOLE, Execution.SEGMENTS, Execution.AUTO])
@pytest.mark.parametrize("failing", ["Executable", "upload"])
@pytest.mark.alone
def test_an_executable_that_fails_releases_clones_lanes_and_events(
    failing: str,
    execution: Execution,
    device: CudaDevice,
    plan_of: PlanOf,
    opened: Opened,
    run_closed: RunClosed,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = small_capture().capture
    plan = plan_in_turns(device.topology, source.trace, plan_of)
    last = 1 if execution is Execution.WHOLE else 3  # fails at the first, or after some went well
    made = 0

    def fail_at_last() -> None:
        nonlocal made
        made += 1
        if made >= last:
            raise DeviceError("refused by the test")

    class Failing(graphs.Executable):
        def __init__(self, graph: Any) -> None:
            if failing == "Executable":
                fail_at_last()
            super().__init__(graph)

    class FailingPlacer(placing.CudaPlacer):
        def upload(self, executable: Any, stream: Any) -> None:
            if failing == "upload":
                fail_at_last()
            super().upload(executable, stream)

    def attempt() -> None:
        nonlocal made
        made = 0
        with (
            pytest.raises(DeviceError, match="refused by the test"),
            opened(device, plan, [source], execution),
        ):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(graphs, "Executable", Failing)
        patch.setattr(device_module, "CudaPlacer", FailingPlacer)
        for _ in range(3):
            attempt()  # contexts are kept for the next pool that wants their masks
        ledger = Ledger(patch)
        memory, files = held()
        for _ in range(20):
            attempt()
        memory_after, files_after = held()
        assert ledger.made("cuGraphClone") >= 20
        assert ledger.balances() == {}
    assert memory_after - memory <= LEAK_BYTES
    assert files_after <= files
    with opened(device, plan, [source], execution) as session:
        assert run_closed(session, 1, seconds=0.05).requests.worker


def test_a_session_releases_all_it_made(
    device: CudaDevice, plan_of: PlanOf, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small_capture().capture
    plan = plan_in_turns(device.topology, source.trace, plan_of)
    with opened(device, plan, [source], Execution.WHOLE):
        pass  # the lanes' contexts are made once and kept
    ledger = Ledger(monkeypatch)
    for execution in Execution:
        with opened(device, plan, [source], execution) as session:
            session.request(0)
    assert ledger.made("cuEventCreate") >= 2 * plan.main.assignments[0].switches
    assert ledger.balances() == {}


def test_a_kernel_whose_clusters_fit_no_place_on_its_lane_is_named_before_anything_is_built(
    device: CudaDevice,
    stressors: Stressors,
    captured_from: Callable[..., AbstractContextManager[Any]],
    plan_of: PlanOf,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "H200" not in device.gpu.name:
        pytest.skip("which clusters fit the odd slice is known of an H200")

    def enqueue(stream: Any) -> None:
        for _ in range(2):
            stressors.launch("fma", stream, 8, 128, 0, 0, 1)
            enqueue_cluster(stressors, stream, 8)

    odd = len(device.topology.slice_units) - 1
    with captured_from(enqueue) as graph:
        trace = Trace(model=ModelKey(MODEL, 1), kernels=graph.kernels())
        assert [kernel.cluster for kernel in trace.kernels] == [1, 8, 1, 8]
        source = Capture(graph, trace, None)
        masks = [Mask([0]), Mask([odd])]
        good = plan_of(device.topology, [trace], [masks], [[1, 0, 1, 0]])
        bad = plan_of(device.topology, [trace], [masks], [[0, 0, 0, 1]])
        LanePool(device.slices, masks).close()  # their contexts are made once and kept
        ledger = Ledger(monkeypatch)
        words = (
            rf"kernel 3 of {MODEL} \(eclip_fma\).* clusters of 8 .*lane 1 \(12 SMs, slices {odd}\)"
        )
        for execution in Execution:
            with (
                pytest.raises(DeviceError, match=words),
                opened(device, bad, [source], execution),
            ):
                pass
        assert ledger.made("cuGraphInstantiate") == 0
        assert ledger.balances() == {}
        with opened(device, good, [source], Execution.SEGMENTS) as session:
            session.request(0)


# The child uses this folder's builders as the tests do. SIGINT may come ignored from a shell that
# started the tests in the background.
SCRIPT = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import torch
from eclip.cuda.device import CudaDevice
from eclip.gpu.session import Execution
from eclip.core.model_key import ModelKey
from eclip.core.topology import Mask
tools = runpy.run_path(sys.argv[1])
device = CudaDevice()
from eclip.capture.torch import capture
module = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
source = capture(module, [torch.randn(64, 1024, device="cuda")], ModelKey("linear", 64)).capture
masks = [Mask([0, 1]), Mask([1, 2])]
route = [kernel % 2 for kernel in range(len(source.trace.kernels))]
plan = tools["plan_of"](device.topology, [source.trace], [masks], [route])
seconds = float(sys.argv[2])

def serve(seconds):
    with tools["opened"](device, plan, [source], Execution.WHOLE) as session:
        if seconds > 1:
            print("READY", flush=True)
        return len(tools["run_closed"](session, 1, seconds).requests.worker)

serve(0.2)
memory, files = tools["held"]()
try:
    print("done", serve(seconds), flush=True)
except KeyboardInterrupt:
    more = tools["held"]()
    print("stopped cleanly", more[0] - memory, more[1] - files, flush=True)
print("again", serve(0.2), flush=True)
"""


@contextlib.contextmanager
def child_of(arguments: Sequence[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    source = str(Path(eclip.__file__).parents[1])
    support = str(Path(__file__).parents[1] / "support")
    path = os.pathsep.join(filter(None, [source, support, os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **variables},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def read_until(child: subprocess.Popen[str], word: str) -> list[str]:
    """Lines of the child up to the one that begins with this word; its words."""
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line)
        if line.startswith(word):
            return line.split()
    raise AssertionError(f"the child ended before {word!r}:\n{''.join(lines)}")


@pytest.mark.alone
def test_an_interrupt_in_mid_run_releases_everything_and_the_next_run_works() -> None:
    script = ["-c", SCRIPT, str(Path(__file__).with_name("conftest.py"))]
    with child_of([*script, "30"]) as child:
        read_until(child, "READY")
        time.sleep(2.0)
        interrupted = time.monotonic()
        child.send_signal(signal.SIGINT)
        _, _, memory, files = read_until(child, "stopped cleanly")
        assert time.monotonic() - interrupted < 5.0
        assert int(memory) <= LEAK_BYTES
        assert int(files) <= 0
        assert int(read_until(child, "again")[1]) > 0
        assert child.wait(timeout=30) == 0
    with child_of([*script, "1.5"]) as child:
        assert int(read_until(child, "done")[1]) > 0
        assert child.wait(timeout=30) == 0


OPEN = """
from eclip.cuda.device import CudaDevice
from eclip.errors import DeviceError
try:
    CudaDevice()
except DeviceError as error:
    print("refused", error, flush=True)
"""


def test_too_few_connections_in_the_environment_are_refused_with_what_to_set() -> None:
    with child_of(["-c", OPEN], CUDA_DEVICE_MAX_CONNECTIONS="1") as child:
        said = " ".join(read_until(child, "refused"))
    assert "CUDA_DEVICE_MAX_CONNECTIONS is 1" in said
    assert "32" in said


def test_a_context_made_before_the_connections_were_set_is_refused() -> None:
    """Setting the variable now would change nothing: the context has its queues already."""
    early = "import os\nos.environ.pop('CUDA_DEVICE_MAX_CONNECTIONS', None)\n"
    early += "import torch\ntorch.zeros(1, device='cuda')\n"
    with child_of(["-c", early + OPEN]) as child:
        said = " ".join(read_until(child, "refused"))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in said
    assert "32" in said
