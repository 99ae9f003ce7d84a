"""The CUDA driver, with every status checked, and the GPU that the rest of this folder works on.

Handles have owners: ``Gpu`` owns its hold on the primary context, slices their green contexts, a
lane pool its streams, an executable its graph. A failure becomes a DeviceError that names the
driver call.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from eclip.cuda.uuid import uuid_of
from eclip.errors import DeviceError
from eclip.gpu.entry_points import EntryPoints

try:
    from cuda.bindings import driver as cu
except ImportError:
    cu = None
__all__ = ["CONNECTIONS", "CONNECTIONS_VARIABLE", "Gpu", "call", "cu", "describe", "free_memory"]

# Hardware queues: the most there can be, so that lanes do not share a queue.
CONNECTIONS = 32
CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_WORD_BYTES = 4096


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the driver; return its results without the status. DeviceError: the call failed."""
    status, *values = function(*arguments)
    if status != cu.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{function.__name__} failed: {describe(status)}")
    if len(values) == 1:
        return values[0]
    return tuple(values) if values else None


def describe(status: Any) -> str:
    """``CUDA_ERROR_OUT_OF_MEMORY (out of memory)``"""
    status = cu.CUresult(int(status))
    known, text = cu.cuGetErrorString(status)
    words = text.decode() if known == cu.CUresult.CUDA_SUCCESS and text else "no description"
    return f"{status.name} ({words})"


def free_memory() -> int:
    """Bytes of free GPU memory, by the driver's count."""
    free_bytes, _ = call(cu.cuMemGetInfo)
    return int(free_bytes)


class Gpu:
    """One GPU and a hold on its primary context, which torch uses too."""

    entry_points = EntryPoints(
        library="libcuda.so.1",
        graph_launch="cuGraphLaunch",
        event_record="cuEventRecord",
        stream_wait="cuStreamWaitEvent",
        event_hold="cuEventSynchronize",
        synchronise="cuStreamSynchronize",
    )

    def __init__(
        self, index: int = 0, connections: int | None = CONNECTIONS, *, insist: bool = True
    ) -> None:
        """``connections=None`` leaves their number to the driver: one stream needs no more.

        Without ``insist``, the process goes on with another number where it is too late to choose.
        """
        if cu is None:
            raise DeviceError(
                "the Python package cuda-bindings is missing; install it: pip install cuda-bindings"
            )
        if connections is not None:
            with contextlib.nullcontext() if insist else contextlib.suppress(DeviceError):
                _ask_for_connections(connections)
        try:
            call(cu.cuInit, 0)
        except (DeviceError, RuntimeError) as error:
            raise DeviceError(f"there is no working CUDA driver here: {error}") from None
        count = call(cu.cuDeviceGetCount)
        if not 0 <= index < count:
            raise DeviceError(f"there is no GPU {index}; this host has {count}, counted from 0")
        self.index = index
        self.handle = call(cu.cuDeviceGet, index)
        self._spare: Any = None  # another context, and something to work on in it
        self._word: Any = None
        self._quickens = True
        try:
            self.context = call(cu.cuDevicePrimaryCtxRetain, self.handle)
        except DeviceError as error:
            if cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY.name not in str(error):
                raise
            raise DeviceError(
                f"there is no room for another process on GPU {index}: its memory or its channels "
                f"are taken, so end other processes with contexts or lanes there ({error})"
            ) from None
        self.make_current()

    def make_current(self) -> None:
        """For the calling thread; every thread that launches needs it."""
        call(cu.cuCtxSetCurrent, self.context)

    @contextlib.contextmanager
    def ready_to_close(self) -> Iterator[None]:
        relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        call(cu.cuCtxPushCurrent, self.context)
        try:
            before = call(cu.cuThreadExchangeStreamCaptureMode, relaxed)
            try:
                yield
            finally:
                cu.cuThreadExchangeStreamCaptureMode(before)
        finally:
            cu.cuCtxPopCurrent()

    def wait_for(self, stream: Any) -> None:
        call(cu.cuStreamSynchronize, stream)

    def quicken(self) -> None:
        """Let another context work for a moment; the first time takes a second to make it.

        After that the kernels of this process's graphs follow each other about 0.2 us sooner: 6%
        for a model of many short kernels (docs/results/lanes.md, two speeds). Why is not known, nor
        all that undoes it, so it is done before every run.
        """
        if not self._quickens:
            return
        try:
            if self._spare is None:
                self._spare = call(cu.cuCtxCreate, None, 0, self.handle)
                self._word = call(cu.cuMemAlloc, _WORD_BYTES)
            call(cu.cuCtxSetCurrent, self._spare)
            call(cu.cuMemsetD8, self._word, 0, _WORD_BYTES)
            call(cu.cuCtxSynchronize)
        except DeviceError:  # such as for want of memory: it goes on as fast as it was
            self._quickens = False
            self._drop_spare()
        finally:
            self.make_current()

    def _drop_spare(self) -> None:
        if self._spare is not None:
            cu.cuCtxDestroy(self._spare)  # which may have failed for good: nothing is done with it
            self._spare = None

    def free_memory(self) -> int:
        return free_memory()

    def describe(self, status: int) -> str:
        return describe(status)

    def attribute(self, name: str) -> int:
        wanted = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(cu.cuDeviceGetAttribute, wanted, self.handle))

    @property
    def name(self) -> str:
        text: bytes = call(cu.cuDeviceGetName, 128, self.handle)
        return text.split(b"\0")[0].decode()

    @property
    def compute(self) -> str:
        major = self.attribute("COMPUTE_CAPABILITY_MAJOR")
        return f"{major}.{self.attribute('COMPUTE_CAPABILITY_MINOR')}"

    @property
    def memory_bytes(self) -> int:
        return int(call(cu.cuDeviceTotalMem, self.handle))

    @property
    def uuid(self) -> str:
        return uuid_of(self.index)

    def close(self) -> None:
        self._drop_spare()
        if self.context is not None:
            self.context = None
            call(cu.cuDevicePrimaryCtxRelease, self.handle)


def _ask_for_connections(connections: int) -> None:
    """Ask for ``CONNECTIONS`` hardware queues. The driver reads the variable at initialisation."""
    chosen = os.environ.get(CONNECTIONS_VARIABLE)
    if chosen == str(connections):
        return
    if chosen is not None:
        raise DeviceError(
            f"{CONNECTIONS_VARIABLE} is {chosen}, but plans are made for {connections}; set it "
            f"so, or unset it, before the process starts"
        )
    try:
        status, _ = cu.cuDeviceGetCount()
    except RuntimeError:  # no driver at all: initialising it will say so
        return
    if status != cu.CUresult.CUDA_ERROR_NOT_INITIALIZED:
        raise DeviceError(
            f"CUDA was initialised before eclip could ask for {connections} hardware queues; set "
            f"{CONNECTIONS_VARIABLE}={connections} before the process starts"
        )
    os.environ[CONNECTIONS_VARIABLE] = str(connections)
