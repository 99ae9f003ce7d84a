"""Compiling CUDA source at run time for the GPU at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eclip.errors import DeviceError


def compile_source(
    source: bytes, name: str, target: str, options: Sequence[str] = (), ptx: bool = False
) -> bytes:
    """Machine code for ``sm_90``, or PTX for ``compute_90``, of which the driver resolves builtins
    such as cudaGraphSetConditional."""
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

    program = check(nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], []))
    try:
        given = [option.encode() for option in (f"--gpu-architecture={target}", *options)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            raise DeviceError(f"NVRTC cannot compile {name}: {log.decode().strip()}")
        if ptx:
            return fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        return fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        check(nvrtc.nvrtcDestroyProgram(program))
