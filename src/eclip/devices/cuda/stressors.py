"""Kernels of our own: hogs of DRAM, of L2 and of arithmetic, and one that says where it ran.

NVRTC compiles them for the GPU at hand. What they do is known, so interference can be told by
class.
"""

from __future__ import annotations

import ctypes
from importlib import resources
from typing import Any

from eclip.devices.cuda.driver import Gpu, call, cu
from eclip.errors import DeviceError

NAMES = ("dram", "l2", "fma", "where")


class Stressors:
    """The compiled kernels; owns the library they are in."""

    def __init__(self, gpu: Gpu) -> None:
        self._library = call(cu.cuLibraryLoadData, _compile(gpu.compute), [], [], 0, [], [], 0)
        self.kernels: dict[str, Any] = {
            name: call(cu.cuLibraryGetKernel, self._library, f"eclip_{name}".encode())
            for name in NAMES
        }

    def launch(
        self, name: str, stream: Any, blocks: int, threads: int, data: int, size: int, rounds: int
    ) -> None:
        arguments = ((data, size, rounds), (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_int))
        # A CUkernel may stand for a function wherever one is launched: it belongs to no context.
        function = cu.CUfunction(int(self.kernels[name]))
        call(cu.cuLaunchKernel, function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, 0)

    def close(self) -> None:
        call(cu.cuLibraryUnload, self._library)


def _compile(compute: str) -> bytes:
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        status, *values = result
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise DeviceError(f"NVRTC failed with {status.name}")
        return values[0] if values else None

    def fetch(size: Any, content: Any) -> bytes:
        text = b" " * int(check(size(program)))
        check(content(program, text))
        return text

    source = (resources.files("eclip.devices.cuda") / "stressors.cu").read_bytes()
    program = check(nvrtc.nvrtcCreateProgram(source, b"stressors.cu", 0, [], []))
    try:
        target = f"--gpu-architecture=sm_{compute.replace('.', '')}".encode()
        (status,) = nvrtc.nvrtcCompileProgram(program, 1, [target])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            raise DeviceError(f"NVRTC cannot compile the stressors: {log.decode().strip()}")
        return fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        check(nvrtc.nvrtcDestroyProgram(program))
