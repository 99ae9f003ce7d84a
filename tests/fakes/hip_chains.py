"""Kernels of our own on a real AMD GPU, compiled by hiprtc, for `make amd-test`.

Nobody here has run this on an AMD GPU (docs/amd.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from eclip.core.mix import mix_of
from eclip.core.profile import Profile
from eclip.core.trace import Trace, with_traces
from eclip.gpu.executables import Capture
from eclip.hip.device import HipDevice
from eclip.hip.driver import HipGpu
from eclip.hip.graphs import HipGraph
from eclip.models.synthetic import synthetic_profile
from eclip.planner.problem import Problem
from hip_bench import captured_from, slower

_ROUNDS = 20_000
_SOURCE = b"""
extern "C" __global__ void spin(int rounds, float* out) {
    float value = threadIdx.x;
    for (int round = 0; round < rounds; ++round) value = value * 0.999f + 1.0f;
    if (value < 0.0f) *out = value;
}
// The shader engine that every block runs in: bits 13 to 15 of HW_ID on gfx9.
extern "C" __global__ void where(unsigned* engines) {
    unsigned id = __builtin_amdgcn_s_getreg((31 << 11) | 4);
    for (int wait = 0; wait < 2000; ++wait) __builtin_amdgcn_s_sleep(1);
    if (threadIdx.x == 0) engines[blockIdx.x] = (id >> 13) & 7;
}
"""


def missing() -> str | None:
    return None if Path("/dev/kfd").exists() else "needs an AMD GPU: there is no /dev/kfd"


class Kernels:
    """The module, loaded on a GPU."""

    def __init__(self, gpu: HipGpu) -> None:
        self._gpu = gpu
        self._library = ctypes.CDLL(gpu.hip.path)
        self._code = _compile(self._library, gpu.build.compute)
        module = c_void_p()
        self._ask("hipModuleLoadData", ctypes.byref(module), self._code)
        self._functions = {name: self._find(module, name) for name in (b"spin", b"where")}
        self._scratch = self.memory(4)

    def _find(self, module: c_void_p, name: bytes) -> c_void_p:
        function = c_void_p()
        self._ask("hipModuleGetFunction", ctypes.byref(function), module, name)
        return function

    def _ask(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        assert status == 0, f"{name} returned {status}"

    def memory(self, size: int) -> c_void_p:
        address = c_void_p()
        self._ask("hipMalloc", ctypes.byref(address), c_size_t(size))
        return address

    def launch(self, name: bytes, stream: int, blocks: int, values: Sequence[Any]) -> Any:
        """What it gives must live as long as the kernel may run."""
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._ask(
            "hipModuleLaunchKernel", self._functions[name], c_uint(blocks), 1, 1, 256, 1, 1, 0,
            c_void_p(stream), pointers, None,
        )  # fmt: skip
        return values, pointers

    def spin(self, stream: int, blocks: int) -> Any:
        return self.launch(b"spin", stream, blocks, (ctypes.c_int(_ROUNDS), self._scratch))

    def engines(self, stream: int, blocks: int) -> set[int]:
        """Those that the blocks of a kernel on this stream ran in."""
        found = np.zeros(blocks, dtype=np.uint32)
        memory = self.memory(found.nbytes)
        kept = self.launch(b"where", stream, blocks, (memory,))
        self._gpu.wait_for(stream)
        address = c_void_p(found.ctypes.data)
        self._ask("hipMemcpy", address, memory, c_size_t(found.nbytes), 2)
        self._ask("hipFree", memory)
        assert kept
        return set(found.tolist())


def _compile(library: ctypes.CDLL, compute: str) -> ctypes.Array[ctypes.c_char]:
    def ask(name: str, *arguments: Any) -> None:
        status = getattr(library, name)(*arguments)
        assert status == 0, f"{name} returned {status}"

    program, size = c_void_p(), c_size_t()
    ask("hiprtcCreateProgram", ctypes.byref(program), _SOURCE, b"eclip.hip", 0, None, None)
    options = (c_char_p * 1)(f"--offload-arch={compute}".encode())
    ask("hiprtcCompileProgram", program, 1, options)
    ask("hiprtcGetCodeSize", program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    ask("hiprtcGetCode", program, code)
    return code


def make_sources(device: HipDevice, workers: int) -> tuple[Problem, list[Capture]]:
    """Chains of kernels that want the whole device in turn with small ones. Their profiles' times
    are made up: plans are to switch lanes, not to be good."""
    kernels = Kernels(device.gpu)
    sources, profiles = [], []
    for worker in range(workers):
        plan = synthetic_profile(worker, 12 + worker, device.topology, name=f"m{worker}")
        wide = 4 * device.topology.units

        def enqueue(stream: int, count: int = 12 + worker, wide: int = wide) -> list[Any]:
            return [kernels.spin(stream, wide if at // 3 % 2 == 0 else 8) for at in range(count)]

        raw, kept = captured_from(device.gpu, enqueue)
        graph = HipGraph(device.gpu.hip, raw)
        trace = Trace(model=plan.trace.model, kernels=graph.kernels(device.gpu.hip))
        sources.append(Capture(graph, trace, (kernels, kept)))
        profiles.append(_for_trace(plan, trace))
    mix = mix_of(profile.model for profile in profiles)
    return Problem(mix, device.topology, tuple(profiles)), sources


def _for_trace(profile: Profile, trace: Trace) -> Profile:
    fingerprint = with_traces(profile.fingerprint, [trace])
    return slower(msgspec.structs.replace(profile, trace=trace, fingerprint=fingerprint))
