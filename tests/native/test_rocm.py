"""Torch for ROCm without an AMD GPU: a stand-in for torch that captures on the stand-in for HIP,
and traces as torch.profiler writes them (docs/amd.md says where that was read)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import hip_bench
from eclip.capture import rocm
from eclip.capture.rocm import KernelRecord, measure_profile, read_records, spans_of
from eclip.core.device import Window
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.mix import mix_of
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.core.program import lower
from eclip.core.topology import Topology
from eclip.core.trace import Kernel
from eclip.errors import DeviceError
from eclip.hip.api import Hip
from eclip.hip.device import HipDevice
from eclip.models.synthetic import synthetic_profile
from eclip.planner.policies import make_plan
from eclip.planner.problem import Problem
from hip_bench import BEGIN, END, WHO, StandIn, standing_in
from native_build import Native

MODEL = ModelKey("m0", 1)


@pytest.fixture
def hip(native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """By its own clock: what is measured does not depend on the host."""
    with standing_in(tmp_path, own=True) as stand_in:
        stand_in.use_its_clock(monkeypatch)
        yield stand_in


# --- Traces -------------------------------------------------------------------------------------


def event(name: str, start_us: float, micros: float, cat: str = "kernel", **args: Any) -> Any:
    """A line of a trace, as kineto writes it for ROCm."""
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 0, "ts": start_us, "dur": micros,
        "args": {"device": 0, "stream": 0, "correlation": 7, "kind": "Dispatch Kernel", **args},
    }  # fmt: skip


def trace_of(*events: Any) -> str:
    meta = {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "py"}}
    return json.dumps({"schemaVersion": 1, "traceEvents": [meta, *events], "traceName": "t.json"})


def test_kernels_of_a_trace_are_read_in_order_and_to_the_nanosecond() -> None:
    later = 1_763_280_000_000_000  # microseconds since 1970, which a float cannot add 0.001 to
    trace = trace_of(
        event("second", 0, 1.25),
        event("hipGraphLaunch", 1, 2, cat="cuda_runtime", cid=180),
        event("__amd_rocclr_fillBufferAligned", 2, 1),
        event("Memset (Device)", 2, 1, cat="gpu_memset"),
        event("first", 0, 0.5, grid=[8, 1, 1], block=[256, 1, 1]),
    ).replace('"ts": 0, "dur": 1.25', f'"ts": {later}.004, "dur": 1.25')
    assert read_records(trace) == [
        KernelRecord(0, 500, "first", (8, 1, 1)),
        KernelRecord(later * 1000 + 4, later * 1000 + 1254, "second", None),
    ]


KERNELS = tuple(
    Kernel(name=f"_Z{name}", grid=(blocks, 1, 1), block=(256, 1, 1))
    for name, blocks in (("gemm", 8), ("relu", 4))
)


def records(*names: str, grid: tuple[int, ...] | None = None) -> list[KernelRecord]:
    return [KernelRecord(10 * at, 10 * at + 7, name, grid) for at, name in enumerate(names)]


def test_records_become_launches_of_kernels() -> None:
    spans = spans_of(records("gemm()", "relu()", "gemm()", "relu()"), KERNELS, launches=2)
    assert spans.tolist() == [[[0, 7], [10, 17]], [[20, 27], [30, 37]]]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (records("gemm()", "relu()", "gemm()"), "recorded 3 kernels instead of 4"),
        (records("gemm()", "relu()", "relu()", "gemm()"), r"recorded relu\(\) where .* _Zgemm"),
        (records(*["gemm()", "relu()"] * 2, grid=(9, 1, 1)), "profile again"),
        ([], "recorded 0 kernels"),
    ],
)
def test_records_of_something_else_are_refused(found: list[KernelRecord], words: str) -> None:
    with pytest.raises(DeviceError, match=words):
        spans_of(found, KERNELS, launches=2)


# --- Profiles -----------------------------------------------------------------------------------


def recorded_on(hip: StandIn) -> Callable[[Callable[[], None]], list[KernelRecord]]:
    """What torch.profiler would write of the kernels that the stand-in ran."""

    def record(work: Callable[[], None]) -> list[KernelRecord]:
        with hip.watched() as lines:
            work()
            ran = lines()
        zero = ran[0, BEGIN]
        events = [
            event(f"k{line[WHO]}()", (line[BEGIN] - zero) / 1000, (line[END] - line[BEGIN]) / 1000)
            for line in ran.tolist()
        ]
        return read_records(trace_of(*events))

    return record


def made_up(topology: Topology, name: str = MODEL.name) -> Profile:
    return hip_bench.slower(synthetic_profile(3, 6, topology, name=name))


def test_a_measured_profile_has_the_times_of_its_kernels(hip: StandIn) -> None:
    with hip.device() as device:
        truth = made_up(device.topology)
        capture = hip.capture(device.gpu, 0, truth)
        before = hip.alive()[1:]
        profile = measure_profile(
            device,
            capture,
            None,
            energy_seconds=0.0,
            sizes=truth.sizes[-2:],
            record=recorded_on(hip),
        )
        assert hip.alive()[1:] == before
    assert profile.trace == truth.trace and profile.sizes == truth.sizes[-2:]
    assert profile.fingerprint.driver == device.driver
    assert not profile.modelled
    assert np.array(profile.busy_ns) == pytest.approx(np.array(truth.busy_ns)[:, -2:], rel=1e-3)


def test_blocks_of_a_unit_go_by_the_threads_that_it_holds(hip: StandIn) -> None:
    """Ten waves a SIMD, as on an MI50: 2560 threads a unit."""
    properties = hip.nodes / "1" / "properties"
    properties.write_text(
        properties.read_text().replace("max_waves_per_simd 8", "max_waves_per_simd 10")
    )
    with hip.device() as device:
        truth = made_up(device.topology)
        assert {kernel.block for kernel in truth.trace.kernels} == {(256, 1, 1)}
        capture = hip.capture(device.gpu, 0, truth)
        profile = measure_profile(
            device, capture, None, energy_seconds=0.0, sizes=truth.sizes[-1:],
            record=recorded_on(hip),
        )  # fmt: skip
    assert set(profile.blocks_per_unit) == {10}


# --- Captures -----------------------------------------------------------------------------------


class Tensor:
    """Of memory that nobody looks into."""

    is_cuda, dtype, shape, nbytes = True, "torch.float32", (1, 4), 16

    def detach(self) -> Tensor:
        return self

    def clone(self) -> Tensor:
        return Tensor()

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return id(self)

    def untyped_storage(self) -> Any:
        return types.SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: 16)


class Graph:
    def __init__(self, keep_graph: bool) -> None:
        assert keep_graph
        self.raw = 0

    def raw_cuda_graph(self) -> int:
        return self.raw

    def reset(self) -> None:
        pass


class RocmTorch(types.ModuleType):
    """A torch for ROCm, as far as captures ask, whose ``cuda`` is the stand-in for HIP."""

    __version__ = "2.9.1+rocm6.4"
    OutOfMemoryError = MemoryError
    Tensor = Tensor

    def __init__(self, hip: Hip) -> None:
        super().__init__("torch")
        self._hip = hip
        self._library = ctypes.CDLL(hip.path)
        self.version = types.SimpleNamespace(hip="6.4.43482", cuda=None)
        self.backends = types.SimpleNamespace(cudnn=types.SimpleNamespace(version=lambda: 3004000))
        self.inference_mode = contextlib.nullcontext
        self.nn = types.SimpleNamespace(Module=object)
        self._C = types.SimpleNamespace(_cuda_clearCublasWorkspaces=lambda: None)
        generator = types.SimpleNamespace(clone_state=lambda: None)
        self.cuda = types.SimpleNamespace(
            CUDAGraph=Graph,
            Stream=self._stream,
            stream=contextlib.nullcontext,
            graph=self._graph,
            graph_pool_handle=lambda: (0, 1),
            current_device=lambda: 0,
            default_generators=[generator],
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
            empty_cache=lambda: None,
            is_available=lambda: True,
            set_device=lambda index: None,
            set_sync_debug_mode=lambda mode: None,
        )

    def _stream(self) -> Any:
        handle = self._hip.made("hipStreamCreateWithFlags", 1)
        return types.SimpleNamespace(handle=handle, synchronize=lambda: None)

    @contextlib.contextmanager
    def _graph(
        self, graph: Graph, pool: Any, stream: Any, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        handle, captured = ctypes.c_void_p(stream.handle), ctypes.c_void_p()
        assert self._library.hipStreamBeginCapture(handle, 1) == 0
        self.under_capture = stream.handle
        try:
            yield
        finally:
            self.under_capture = 0
            assert self._library.hipStreamEndCapture(handle, ctypes.byref(captured)) == 0
        graph.raw = int(captured.value or 0)

    under_capture = 0


class Module:
    """Launches the kernels of a profile, on the stream that is captured."""

    def __init__(self, torch: RocmTorch, device: HipDevice, profile: Profile) -> None:
        self._torch, self._gpu, self._profile = torch, device.gpu, profile
        self.kept: list[Any] = []

    def __call__(self, *inputs: Tensor) -> Tensor:
        for number, kernel in enumerate(self._profile.trace.kernels):
            if self._torch.under_capture:
                table = hip_bench.by_units(self._profile, number, self._gpu.build.units)
                stream = self._torch.under_capture
                self.kept.append(
                    hip_bench.launch(self._gpu, stream, kernel.name, number, table, kernel.grid)
                )
        return Tensor()

    def parameters(self) -> Sequence[Tensor]:
        return [Tensor()]

    def buffers(self) -> Sequence[Tensor]:
        return []


@pytest.fixture
def torch(hip: StandIn, monkeypatch: pytest.MonkeyPatch) -> RocmTorch:
    made = RocmTorch(Hip(hip.path))
    dispatch = types.ModuleType("torch.utils._python_dispatch")
    dispatch.TorchDispatchMode = object  # type: ignore[attr-defined]
    utils = types.ModuleType("torch.utils")
    leaves = types.SimpleNamespace(tree_leaves=lambda tree: [tree])
    utils._pytree = leaves  # type: ignore[attr-defined]
    for name, module in (
        ("torch", made), ("torch.utils", utils), ("torch.utils._python_dispatch", dispatch),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(rocm, "Hip", lambda: made._hip)
    return made


@pytest.fixture
def frontend(torch: RocmTorch, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``eclip.capture.torch``, imported for the stand-in alone."""
    names = ("eclip.capture.capturing", "eclip.capture.torch")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module(names[-1])
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    return found


def test_a_model_is_captured_profiled_planned_and_run(
    hip: StandIn, torch: RocmTorch, frontend: Any
) -> None:
    with hip.device() as device:
        truth = made_up(device.topology)
        module = Module(torch, device, truth)
        captured = frontend.capture(module, [Tensor()], MODEL)
        capture = captured.capture
        assert capture.trace.kernels == truth.trace.kernels
        assert capture.trace.libraries == {
            "torch": "2.9.1+rocm6.4", "hip": "6.4.43482", "miopen": "3004000",
        }  # fmt: skip
        assert capture.outputs and capture.inputs and capture.recapture is None
        profile = measure_profile(
            device, capture, captured.memory, energy_seconds=0.0, record=recorded_on(hip)
        )
        assert profile.footprint is not None and profile.footprint.weights_bytes == 16
        problem = Problem(mix_of([profile.model]), device.topology, (profile,))
        program = lower(make_plan("eclip", problem), [capture.trace])
        load = Load(label="closed loop", seed=0, arrivals=(CLOSED_LOOP,))
        with device.open(program, [capture]) as session:
            log = session.run(load, Window(seconds=0.1, warmup_seconds=0, trace_ms=5))
        assert log.requests.worker
        assert any("kernels are not recorded" in warning for warning in log.warnings)


def test_kernels_for_fewer_units_are_refused_on_rocm(hip: StandIn, frontend: Any) -> None:
    model = msgspec.structs.replace(MODEL, kernels_for=30)
    with pytest.raises(DeviceError, match="torch for ROCm cannot choose kernels for 30 units"):
        frontend.capture(None, [], model)


def test_torch_without_a_gpu_is_named(
    frontend: Any, torch: RocmTorch, hip: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.is_available = lambda: False
    monkeypatch.setitem(sys.modules, "eclip.capture.torch", frontend)
    zoo = types.ModuleType("eclip.capture.torch_zoo")
    monkeypatch.setitem(sys.modules, "eclip.capture.torch_zoo", zoo)
    monkeypatch.delitem(sys.modules, "eclip.capture.named", raising=False)
    models = importlib.import_module("eclip.capture.named")
    monkeypatch.delitem(sys.modules, "eclip.capture.named")
    with hip.device() as device, pytest.raises(DeviceError, match="finds no GPU here"):
        models.capture_worker(made_up(device.topology), 0)
