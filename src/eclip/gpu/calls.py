"""Calls: the C functions that the compiled loop calls, as addresses."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from eclip.errors import DeviceError
from eclip.gpu.entry_points import EntryPoints
from eclip.gpu.steps import Words


def _address(library: str, name: str) -> int:
    """Of a C function, as compiled code calls it."""
    try:
        function = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError):
        raise DeviceError(
            f"{library} has no {name}: the GPU's driver is missing or too old"
        ) from None
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


# Places in what ``addresses_of`` gives.
GRAPH_LAUNCH, EVENT_RECORD, STREAM_WAIT, EVENT_HOLD, SYNCHRONISE = range(5)
CLOCK, SLEEP, CONTROL, POLL, READ, WRITE = range(5, 11)
NOTHING = np.uint64(0)  # where a function takes fewer words


@functools.cache
def addresses_of(table: EntryPoints) -> Words:
    """The functions that ``drive`` calls."""
    named = (
        *(table.graph_launch, table.event_record, table.stream_wait),
        *(table.event_hold, table.synchronise),
    )
    system = ("clock_gettime", "usleep", "prctl", "poll", "read", "write")
    return np.array(
        [
            *(_address(table.library, name) for name in named),
            *(_address("libc.so.6", name) for name in system),
        ],
        dtype=np.uint64,
    )
