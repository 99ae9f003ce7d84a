"""Synthetic kernels: heavy on DRAM, on L2 and on arithmetic, and a kernel that reports its SMs.

NVRTC compiles them for the GPU at hand. Their work is known, so interference can be measured by
class.
"""

from __future__ import annotations

import ctypes
from importlib import resources
from typing import Any

from eclip.cuda.driver import Gpu, call, cu
from eclip.cuda.nvrtc import compile_source

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
    source = (resources.files("eclip.cuda") / "stressors.cu").read_bytes()
    return compile_source(source, "stressors.cu", f"sm_{compute.replace('.', '')}")
