"""HIP's entry points: a table of our own, each with the ROCm version that introduced it.

ROCm 5.2 has all functions that a plan needs. The table holds each function's parameter types, so
that ctypes converts arguments and a test can compare every line with the installed headers. No
struct here has changed since 5.2, but the numbers of node kinds have. Every status passes through
``Hip.call``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eclip.errors import DeviceError

SUCCESS = 0
NO_DEVICE = 100
STATUSES = {"hipSuccess": SUCCESS, "hipErrorNoDevice": NO_DEVICE}

STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED = 1, 2
# Kinds of nodes as ROCm 5.2 counts them. Newer ones count from 0: ``Hip.node_kind`` translates.
NODE_KERNEL, NODE_MEMSET, NODE_EMPTY = 1, 3, 6

# Newest first; a library that torch has loaded is found by these names, too.
LIBRARIES = (
    *(f"libamdhip64.so.{major}" for major in (7, 6, 5)),
    *("libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"),
)
NO_LIBRARY = "no AMD GPU: libamdhip64 is not installed; install ROCm, 5.2 or newer"


class Dim3(ctypes.Structure):
    _fields_ = (("x", c_uint), ("y", c_uint), ("z", c_uint))


class Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 16),)


class KernelNodeParams(ctypes.Structure):
    _fields_ = (
        ("block", Dim3),
        ("extra", POINTER(c_void_p)),
        ("func", c_void_p),
        ("grid", Dim3),
        ("arguments", POINTER(c_void_p)),
        ("shared_bytes", c_uint),
    )


class MemsetParams(ctypes.Structure):
    _fields_ = (
        ("target", c_void_p),
        ("element_bytes", c_uint),
        ("height", c_size_t),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("width", c_size_t),
    )


@dataclass(frozen=True)
class EntryPoint:
    since: str  # the version of ROCm that introduced it
    takes: tuple[Any, ...]
    gives: Any = c_int  # a status, unless it says otherwise


_HANDLE = c_void_p  # of a stream, event, graph, node or executable
_HANDLES = POINTER(c_void_p)

ENTRY_POINTS = {
    "hipInit": EntryPoint("4.2", (c_uint,)),
    "hipRuntimeGetVersion": EntryPoint("4.2", (POINTER(c_int),)),
    "hipGetErrorName": EntryPoint("4.2", (c_int,), c_char_p),
    "hipGetErrorString": EntryPoint("4.2", (c_int,), c_char_p),
    "hipGetDeviceCount": EntryPoint("4.2", (POINTER(c_int),)),
    "hipSetDevice": EntryPoint("4.2", (c_int,)),
    "hipDeviceGetName": EntryPoint("4.2", (c_char_p, c_int, c_int)),
    "hipDeviceGetUuid": EntryPoint("5.1", (POINTER(Uuid), c_int)),
    "hipDeviceGetPCIBusId": EntryPoint("4.2", (c_char_p, c_int, c_int)),
    "hipDeviceTotalMem": EntryPoint("4.2", (POINTER(c_size_t), c_int)),
    "hipMemGetInfo": EntryPoint("4.2", (POINTER(c_size_t), POINTER(c_size_t))),
    "hipExtStreamCreateWithCUMask": EntryPoint("4.2", (_HANDLES, c_uint, POINTER(c_uint))),
    "hipExtStreamGetCUMask": EntryPoint("4.2", (_HANDLE, c_uint, POINTER(c_uint))),
    "hipStreamCreateWithFlags": EntryPoint("4.2", (_HANDLES, c_uint)),
    "hipStreamSynchronize": EntryPoint("4.2", (_HANDLE,)),
    "hipStreamWaitEvent": EntryPoint("4.2", (_HANDLE, _HANDLE, c_uint)),
    "hipStreamDestroy": EntryPoint("4.2", (_HANDLE,)),
    "hipEventCreateWithFlags": EntryPoint("4.2", (_HANDLES, c_uint)),
    "hipEventRecord": EntryPoint("4.2", (_HANDLE, _HANDLE)),
    "hipEventSynchronize": EntryPoint("4.2", (_HANDLE,)),
    "hipEventElapsedTime": EntryPoint("4.2", (POINTER(c_float), _HANDLE, _HANDLE)),
    "hipEventDestroy": EntryPoint("4.2", (_HANDLE,)),
    "hipThreadExchangeStreamCaptureMode": EntryPoint("5.0", (POINTER(c_int),)),
    "hipKernelNameRef": EntryPoint("4.2", (_HANDLE,), c_char_p),
    "hipKernelNameRefByPtr": EntryPoint("4.2", (c_void_p, _HANDLE), c_char_p),
    "hipGraphCreate": EntryPoint("4.3", (_HANDLES, c_uint)),
    "hipGraphDestroy": EntryPoint("4.3", (_HANDLE,)),
    "hipGraphGetNodes": EntryPoint("4.4", (_HANDLE, _HANDLES, POINTER(c_size_t))),
    "hipGraphGetEdges": EntryPoint("4.5", (_HANDLE, _HANDLES, _HANDLES, POINTER(c_size_t))),
    "hipGraphNodeGetType": EntryPoint("4.5", (_HANDLE, POINTER(c_int))),
    "hipGraphKernelNodeGetParams": EntryPoint("4.4", (_HANDLE, POINTER(KernelNodeParams))),
    "hipGraphMemsetNodeGetParams": EntryPoint("4.4", (_HANDLE, POINTER(MemsetParams))),
    "hipGraphAddKernelNode": EntryPoint(
        "4.3", (_HANDLES, _HANDLE, _HANDLES, c_size_t, POINTER(KernelNodeParams))
    ),
    "hipGraphAddMemsetNode": EntryPoint(
        "4.3", (_HANDLES, _HANDLE, _HANDLES, c_size_t, POINTER(MemsetParams))
    ),
    "hipGraphAddEmptyNode": EntryPoint("4.4", (_HANDLES, _HANDLE, _HANDLES, c_size_t)),
    "hipGraphInstantiateWithFlags": EntryPoint("4.5", (_HANDLES, _HANDLE, c_ulonglong)),
    "hipGraphUpload": EntryPoint("5.3", (_HANDLE, _HANDLE)),
    "hipGraphLaunch": EntryPoint("4.3", (_HANDLE, _HANDLE)),
    "hipGraphExecDestroy": EntryPoint("4.3", (_HANDLE,)),
}
LEAST = (5, 2)


class Hip:
    """The library, loaded; functions newer than it are missing, and ``has`` says so."""

    def __init__(self, library: Path | None = None) -> None:
        self._library = _load(library)
        for name, entry in ENTRY_POINTS.items():
            function = getattr(self._library, name, None)
            if function is not None:
                function.argtypes, function.restype = entry.takes, entry.gives
            elif tuple(map(int, entry.since.split("."))) <= LEAST:
                raise DeviceError(
                    f"{self.path} has no {name}, which came with ROCm {entry.since}; install ROCm "
                    f"5.2 or newer"
                )

    @property
    def path(self) -> str:
        return str(self._library._name)

    def has(self, name: str) -> bool:
        return hasattr(self._library, name)

    def status(self, name: str, *arguments: Any) -> int:
        return int(getattr(self._library, name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function whose status must be success."""
        status = self.status(name, *arguments)
        if status != SUCCESS:
            raise DeviceError(f"{name} failed: {self.describe(status)}")

    def made(self, name: str, *arguments: Any) -> int:
        """The handle that a function gives through its first argument."""
        handle = c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return int(handle.value or 0)

    def number(self, name: str, kind: type[Any], *arguments: Any) -> int:
        """A number given likewise."""
        value = kind()
        self.call(name, ctypes.byref(value), *arguments)
        return int(value.value)

    def elapsed_ns(self, begin: int, end: int) -> float:
        """Between two events that have happened, and were made with times."""
        milliseconds = c_float()
        self.call("hipEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        return milliseconds.value * 1e6

    def text(self, name: str, index: int) -> str:
        """The text that a function writes into a buffer for the device ``index``."""
        buffer = ctypes.create_string_buffer(256)
        self.call(name, buffer, len(buffer), index)
        return buffer.value.decode()

    def describe(self, status: int) -> str:
        """``hipErrorOutOfMemory (out of memory)``"""
        name, words = (
            (getattr(self._library, asked)(status) or b"?").decode()
            for asked in ("hipGetErrorName", "hipGetErrorString")
        )
        return name if words == name else f"{name} ({words})"

    def kernel_name(self, function: int) -> str:
        """The name of a node's kernel; ``function`` is a host symbol or a module's function."""
        found = self._library.hipKernelNameRefByPtr(function, None)
        return (found or self._library.hipKernelNameRef(function) or b"?").decode()

    def node_kind(self, node: int) -> int:
        return self.number_of_node(node) + self._counted_less

    def number_of_node(self, node: int) -> int:
        kind = c_int()
        self.call("hipGraphNodeGetType", node, ctypes.byref(kind))
        return kind.value

    @functools.cached_property
    def _counted_less(self) -> int:
        """ROCm 5.2's number of a node kind minus this library's, seen on an empty node."""
        graph = self.made("hipGraphCreate", 0)
        try:
            empty = self.made("hipGraphAddEmptyNode", graph, None, 0)
            less = NODE_EMPTY - self.number_of_node(empty)
        finally:
            self.call("hipGraphDestroy", graph)
        if less not in (0, 1):
            raise DeviceError(f"{self.path} numbers graph nodes in a way unknown to eclip")
        return less

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """Calls of this thread in the block neither break a capture nor are refused for one."""
        mode = c_int(CAPTURE_RELAXED)
        self.call("hipThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self.status("hipThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _load(library: Path | None) -> ctypes.CDLL:
    names = LIBRARIES if library is None else (str(library),)
    for mode in (os.RTLD_NOW | os.RTLD_NOLOAD, os.RTLD_NOW):
        for name in names:
            with contextlib.suppress(OSError):
                return ctypes.CDLL(name, mode=mode)
    raise DeviceError(NO_LIBRARY)
