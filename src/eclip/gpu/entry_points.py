"""The names of the driver's functions that the driving loop calls.

Apart from the loop, which is compiled, so that `eclip exec` need not load a compiler.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EntryPoints:
    """The functions of a GPU's driver that the loop calls, by their names in its library. All their
    arguments are 64-bit words; they return 0 or a bad status."""

    library: str
    graph_launch: str  # executable, stream
    event_record: str  # event, stream
    stream_wait: str  # stream, event, flags
    event_hold: str  # event: the host waits for it
    synchronise: str  # stream: the host waits for it
