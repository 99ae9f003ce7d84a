"""The stand-in driver behind the names of cuda-bindings, as far as lanes need them.

cuda-bindings is not installed where these tests run; the driver's C functions are called by ctypes.
"""

from __future__ import annotations

import ctypes
import enum
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SMS = 132
_WORD = ctypes.c_uint64


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100


class _Sm(ctypes.Structure):
    _fields_ = (("smCount", ctypes.c_uint), ("rest", ctypes.c_uint * 11))


class _Resource(ctypes.Structure):
    """CUdevResource of native/cuda_abi.h."""

    _fields_ = (("type", ctypes.c_int), ("internal", ctypes.c_ubyte * 92), ("sm", _Sm))


class StandinDriver:
    """``cuda.bindings.driver`` on the stand-in; ``said`` lists the calls that make or release."""

    CUresult = Result
    CUdevResourceType = types.SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = types.SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = types.SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self, library: Path, devices: int = 1) -> None:
        self.library = ctypes.CDLL(str(library))
        self.devices = devices
        self.initialised = False
        self.said: list[str] = []
        self._pushed: list[int] = []

    def _call(self, name: str, *arguments: object) -> Result:
        words = [_WORD(one) if isinstance(one, int) else one for one in arguments]
        return Result(getattr(self.library, name)(*words))

    def _made(self, name: str, *arguments: object) -> tuple[Result, int]:
        handle = _WORD()
        self.said.append(name)
        return self._call(name, ctypes.byref(handle), *arguments), handle.value

    def __getattr__(self, name: str) -> Any:
        """Enums that only name things."""
        if name == "CUdevice_attribute":
            return types.SimpleNamespace(
                CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9,
                CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0,
            )
        raise AttributeError(name)

    def cuInit(self, flags: int) -> tuple[Result]:  # noqa: N802
        self.initialised = True
        return (self._call("cuInit", flags),)

    def cuDeviceGetCount(self) -> tuple[Result, int]:  # noqa: N802
        known = Result.CUDA_SUCCESS if self.initialised else Result.CUDA_ERROR_NOT_INITIALIZED
        return known, self.devices

    def cuDeviceGet(self, index: int) -> tuple[Result, int]:  # noqa: N802
        return Result.CUDA_SUCCESS, index

    def cuDeviceGetAttribute(self, wanted: int, device: int) -> tuple[Result, int]:  # noqa: N802
        return Result.CUDA_SUCCESS, wanted

    def cuDeviceGetName(self, room: int, device: int) -> tuple[Result, bytes]:  # noqa: N802
        return Result.CUDA_SUCCESS, b"NVIDIA Stand-in\0"

    def cuDeviceTotalMem(self, device: int) -> tuple[Result, int]:  # noqa: N802
        return Result.CUDA_SUCCESS, 1 << 30

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Result, int]:  # noqa: N802
        return self._made("cuDevicePrimaryCtxRetain", device)

    def cuCtxSetCurrent(self, context: int) -> tuple[Result]:  # noqa: N802
        return (self._call("cuCtxSetCurrent", context),)

    def cuCtxPushCurrent(self, context: int) -> tuple[Result]:  # noqa: N802
        before = _WORD()
        self._call("cuCtxGetCurrent", ctypes.byref(before))
        self._pushed.append(before.value)
        return self.cuCtxSetCurrent(context)

    def cuCtxPopCurrent(self) -> tuple[Result]:  # noqa: N802
        return self.cuCtxSetCurrent(self._pushed.pop())

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[Result, int]:  # noqa: N802
        word = ctypes.c_int(mode)
        status = self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(word))
        return status, word.value

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[Result, _Resource]:  # noqa: N802
        found = _Resource()
        return self._call("cuDeviceGetDevResource", device, ctypes.byref(found), kind), found

    def cuDevSmResourceSplitByCount(  # noqa: N802
        self, most: int, whole: _Resource, flags: int, least: int
    ) -> tuple[Result, Any, int, _Resource]:
        groups, rest, count = (_Resource * most)(), _Resource(), ctypes.c_uint(most)
        status = self._call(
            "cuDevSmResourceSplitByCount", groups, ctypes.byref(count), ctypes.byref(whole),
            ctypes.byref(rest), flags, least,
        )  # fmt: skip
        return status, groups, count.value, rest

    def cuDevResourceGenerateDesc(  # noqa: N802
        self, resources: Sequence[_Resource], count: int
    ) -> tuple[Result, int]:
        return self._made("cuDevResourceGenerateDesc", (_Resource * count)(*resources), count)

    def cuGreenCtxCreate(self, described: int, device: int, flags: int) -> tuple[Result, int]:  # noqa: N802
        return self._made("cuGreenCtxCreate", described, device, flags)

    def cuCtxFromGreenCtx(self, green: int) -> tuple[Result, int]:  # noqa: N802
        return Result.CUDA_SUCCESS, green

    def cuGreenCtxStreamCreate(  # noqa: N802
        self, green: int, flags: int, priority: int
    ) -> tuple[Result, int]:
        return self._made("cuGreenCtxStreamCreate", green, flags, priority)

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[Result, int]:  # noqa: N802
        return self._made("cuStreamCreateWithPriority", flags, priority)

    def cuStreamSynchronize(self, stream: int) -> tuple[Result]:  # noqa: N802
        return (self._call("cuStreamSynchronize", stream),)

    def cuStreamDestroy(self, stream: int) -> tuple[Result]:  # noqa: N802
        self.said.append("cuStreamDestroy")
        return (self._call("cuStreamDestroy_v2", stream),)

    def cuGetErrorString(self, status: Result) -> tuple[Result, bytes]:  # noqa: N802
        return Result.CUDA_SUCCESS, b"as the stand-in says"

    # --- What programs do there ---------------------------------------------------------------

    def slices_under(self, stream: int, graph: bool = False) -> int:
        """The slices, as bits, that a kernel launched on this stream runs on.

        ``graph``: captured there, and replayed on a stream of its own.
        """
        seen = (_WORD * 2)()

        def look(arguments: Any) -> None:
            self.library.standin_mask(seen)

        kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(look)
        make = self.library.standin_function
        make.restype = _WORD
        function = make(b"look", kernel, 0, 1)
        shape = (1, 1, 1, 1, 1, 1, 0)
        if not graph:
            assert self._call("cuLaunchKernel", function, *shape, stream, None, None) == 0
            assert self._call("cuStreamSynchronize", stream) == 0
            return int(seen[0])
        assert self._call("cuStreamBeginCapture_v2", stream, 1) == 0
        assert self._call("cuLaunchKernel", function, *shape, stream, None, None) == 0
        captured, executable = _WORD(), _WORD()
        assert self._call("cuStreamEndCapture", stream, ctypes.byref(captured)) == 0
        made = self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), captured, 0)
        assert made == 0
        _, elsewhere = self.cuStreamCreateWithPriority(1, 0)
        assert self._call("cuGraphLaunch", executable, elsewhere) == 0
        assert self._call("cuStreamSynchronize", elsewhere) == 0
        return int(seen[0])
