"""Records of kernels, made by CUPTI during a block.

CUPTI is attached during the block only: left attached, it slows every later graph launch of the
process (cuGraphLaunch of albert's 498 nodes on an H200: 7 µs before, 223 µs with CUPTI left
attached). Launches in the block are slow, so only the kernels' times are valid. Times are
CLOCK_MONOTONIC, as everywhere on a GPU. A process has one tracer at a time, and no launch of
another thread may be under way when the block ends. Failures of CUPTI raise TracingError.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

from eclip.cuda.driver import call, cu
from eclip.errors import TracingError
from eclip.gpu.recording import Span

PACKAGE = "cupti"
REMEDY = "pip install 'cupti-python>=13.0,<13.1'"
_LIBRARY = "libcupti.so.13"
_BUFFER_BYTES = 8 << 20
_FORCED = 1  # CUPTI_ACTIVITY_FLAG_FLUSH_FORCED: buffers that are not full, too
_CLOCK_SAMPLES = 25


class Tracer:
    """``spans``, in order of start, are there when the block has ended.

    Only kernels of these names: some memory nodes of a graph are recorded as kernels, too.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self.spans: list[Span] = []
        self._cupti = _load()
        self._raw: list[Span] = []  # in CUPTI's time
        self._errors: tuple[type[Exception], ...] = (self._cupti.cuptiError, RuntimeError)

    def __enter__(self) -> Self:
        call(cu.cuCtxSynchronize)  # nothing that was launched before may be recorded in part
        cupti = self._cupti
        self._ask(cupti.activity_register_callbacks, _buffer_wanted, self._take)
        try:
            self._ask(cupti.activity_enable, cupti.ActivityKind.CONCURRENT_KERNEL)
            self._began = self._clock()
        except BaseException:
            self._detach_quietly()
            raise
        return self

    def executable_id(self, handle: Any) -> int:
        """The executable's id in spans. Valid inside the block only."""
        return int(self._ask(self._cupti.get_graph_exec_id, int(handle)))

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self._detach_quietly()
            return
        try:
            call(cu.cuCtxSynchronize)
            ended = self._clock()
            self._ask(self._cupti.activity_flush_all, _FORCED)
        except BaseException:
            self._detach_quietly()
            raise
        self._detach()
        self.spans = sorted(_on_our_clock(self._raw, self._began, ended))

    def _detach_quietly(self) -> None:
        """After an error, which says more than what follows from it."""
        with contextlib.suppress(TracingError):
            self._detach()

    def _detach(self) -> None:
        cupti = self._cupti
        with contextlib.ExitStack() as stack:
            stack.callback(self._ask, cupti.finalize)
            stack.callback(self._ask, cupti.activity_disable, cupti.ActivityKind.CONCURRENT_KERNEL)

    def _take(self, activities: list[Any]) -> None:
        """Called by CUPTI; the records are gone when it returns."""
        kernel = int(self._cupti.ActivityKind.CONCURRENT_KERNEL)
        self._raw += [
            Span(
                int(one.start),
                int(one.end),
                int(one.graph_id),
                int(one.correlation_id),
            )
            for one in activities
            if int(one.kind) == kernel and one.name in self._names
        ]

    def _clock(self) -> tuple[int, int]:
        """CUPTI's time, and what to add to it for ours: the closest of some pairs of readings."""
        pairs = []
        for _ in range(_CLOCK_SAMPLES):
            before = _now_ns()
            theirs = int(self._ask(self._cupti.get_timestamp))
            after = _now_ns()
            pairs.append((after - before, theirs, (before + after) // 2 - theirs))
        _, theirs, offset = min(pairs)
        return theirs, offset

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._errors as error:
            raise TracingError(f"CUPTI's {function.__name__} failed: {error}") from None


def _load() -> Any:
    if importlib.util.find_spec(PACKAGE) is None:
        raise TracingError(f"the Python package cupti-python is missing; install it: {REMEDY}")
    _load_library()
    try:
        return importlib.import_module("cupti.cupti")
    except (ImportError, RuntimeError) as error:
        raise TracingError(f"cupti-python does not load: {error}; install it: {REMEDY}") from None


def _load_library() -> None:
    """Load the libcupti that cupti-python will find by its name, which is torch's wherever it is.

    By itself it would not look into NVIDIA's wheels of another folder than its own, and two of them
    in one process would not know of each other.
    """
    wheels = importlib.util.find_spec("nvidia")
    folders = (wheels.submodule_search_locations or []) if wheels is not None else []
    inside = [str(Path(folder) / "cu13" / "lib" / _LIBRARY) for folder in folders]
    tries = [(_LIBRARY, os.RTLD_NOLOAD), *((path, 0) for path in inside), (_LIBRARY, 0)]
    for name, mode in tries:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name, mode=mode | os.RTLD_NOW)
            return


def _buffer_wanted() -> tuple[int, int]:
    return _BUFFER_BYTES, 0  # as many records as fit


def _on_our_clock(raw: list[Span], began: tuple[int, int], ended: tuple[int, int]) -> list[Span]:
    """Two clocks drift apart: the difference goes in a line from the first pair to the last."""
    (first, offset), (last, offset_then) = began, ended
    slope = (offset_then - offset) / max(1, last - first)

    def ours(theirs: int) -> int:
        return theirs + offset + round((theirs - first) * slope)

    return [one._replace(start_ns=ours(one.start_ns), end_ns=ours(one.end_ns)) for one in raw]


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
