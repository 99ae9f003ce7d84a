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
_MOST_SMS = 1024
# More blocks than all SMs hold at once, and long enough that every SM gets some.
_LOOKS, _THREADS, _STAY_CYCLES = 4000, 128, 20_000


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

    def sms_of(self, stream: Any) -> frozenset[int]:
        """The SMs of a stream's lane by %smid, as the blocks of a kernel there find them."""
        seen = (ctypes.c_uint32 * _MOST_SMS)()
        size = ctypes.sizeof(seen)
        data = int(call(cu.cuMemAlloc, size))
        try:
            call(cu.cuMemsetD32Async, data, 0, _MOST_SMS, stream)
            self.launch("where", stream, _LOOKS, _THREADS, data, _STAY_CYCLES, 0)
            call(cu.cuStreamSynchronize, stream)
            call(cu.cuMemcpyDtoH, ctypes.addressof(seen), data, size)
        finally:
            call(cu.cuMemFree, data)
        return frozenset(number for number, blocks in enumerate(seen) if blocks)

    def close(self) -> None:
        call(cu.cuLibraryUnload, self._library)


def _compile(compute: str) -> bytes:
    source = (resources.files("eclip.cuda") / "stressors.cu").read_bytes()
    return compile_source(source, "stressors.cu", f"sm_{compute.replace('.', '')}")
