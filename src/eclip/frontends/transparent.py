"""Running an unmodified command under libeclip, and what its processes counted.

The library comes with the package (``make native``, or the wheel) and is preloaded; a table file
tells it what to do. Counters are files that the processes keep mapped, so that they are there
however a process ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from eclip.devices.cuda.driver import CONNECTIONS, CONNECTIONS_VARIABLE
from eclip.errors import DeviceError, UsageError

_SLOTS = 64

# In the order of native/stats.h.
COUNTERS = (
    "launches",
    "planned",
    "redirected",
    "contended",
    "misfits",
    "switches",
    "barriers",
    "skipped",
    "requests",
    "graphs",
    "graph_kernels",
    "graph_planned",
    "graph_launches",
    "updates",
    "reinstantiations",
    "foreign_graphs",
)


@dataclass(frozen=True)
class Outcome:
    code: int  # of the command, as a shell would give it
    counters: dict[int, dict[str, int]]  # per process that met a plan


def mark_request(worker: int = -1) -> None:
    """Say that this thread's next launch begins a request, under libeclip; otherwise do nothing."""
    mark = _marker()
    if mark is not None:
        mark(worker)


@functools.cache
def _marker() -> Callable[[int], None] | None:
    try:
        function = ctypes.CDLL(None).eclip_request
    except AttributeError:
        return None
    function.argtypes, function.restype = [ctypes.c_int], None
    return function


def library() -> Path:
    """Where libeclip is."""
    path = Path(str(resources.files("eclip") / "lib" / "libeclip.so"))
    if not path.is_file():
        raise DeviceError("libeclip is not built; run `make native` (it needs g++) and try again")
    return path


def run_under(
    command: Sequence[str], table: bytes, gpu: int = 0, record_to: Path | None = None
) -> Outcome:
    """Run a command with this table and wait for it; signals go on to it."""
    if not command:
        raise UsageError("no command given; write it after --, like: eclip exec … -- python app.py")
    wanted = str(CONNECTIONS)
    chosen = os.environ.get(CONNECTIONS_VARIABLE, wanted)
    if chosen != wanted:
        raise UsageError(
            f"{CONNECTIONS_VARIABLE} is {chosen}, but plans are made for {wanted}; set it so, or "
            f"unset it"
        )
    preload = [str(library()), *os.environ.get("LD_PRELOAD", "").split(":")]
    with tempfile.TemporaryDirectory(prefix="eclip-") as folder:
        place = Path(folder)
        (place / "table").write_bytes(table)
        (place / "counters").mkdir()
        environment = {
            **os.environ,
            "LD_PRELOAD": ":".join(filter(None, preload)),
            "ECLIP_TABLE": str(place / "table"),
            "ECLIP_STATS": str(place / "counters"),
            "ECLIP_GPU": str(gpu),
            CONNECTIONS_VARIABLE: wanted,
        }
        if record_to is not None:
            environment["ECLIP_RECORD"] = str(record_to)
        try:
            child = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise UsageError(f"cannot run {command[0]}: {error.strerror or error}") from None
        with _signals_to(child):
            code = child.wait()
        counters = {int(path.name): _read(path) for path in (place / "counters").iterdir()}
    met = {process: counts for process, counts in sorted(counters.items()) if any(counts.values())}
    return Outcome(code if code >= 0 else 128 - code, met)


@contextlib.contextmanager
def _signals_to(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """What asks us to stop asks the command, whose end is then ours."""

    def pass_on(number: int, _: object) -> None:
        child.send_signal(number)

    kept = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGHUP)}
    # The terminal sends its interrupt to the command too.
    kept[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _read(path: Path) -> dict[str, int]:
    words = np.fromfile(path, dtype=np.uint64)
    if words.size == 0 or words.size % _SLOTS:
        return dict.fromkeys(COUNTERS, 0)
    totals = words.reshape(_SLOTS, -1).sum(axis=0).tolist()
    return dict(zip(COUNTERS, totals[: len(COUNTERS)], strict=True))
