"""Runs an unmodified command under libeclip and reads its processes' counters.

The libraries, one for each vendor's GPUs, come with the package (``make native``, or the wheel).
The vendor's library is preloaded and reads its orders from a table file. Counters are files that
the processes keep mapped, so that they survive any end of a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from eclip.core.mix import read_bound
from eclip.core.topology import Topology
from eclip.cuda.driver import CONNECTIONS, CONNECTIONS_VARIABLE
from eclip.errors import DeviceError, UsageError
from eclip.gpu import board
from eclip.hip.driver import QUEUES, QUEUES_VARIABLE

_SLOTS = 64
_BLANKS = re.compile(r"[\s:]")

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
    "cut_graphs",
    "graph_parts",
    "whole_graphs",
)


@dataclass(frozen=True)
class Vendor:
    """A vendor's library to preload, and its driver's variable for the number of queues."""

    library: str
    queues_variable: str
    queues: int


NVIDIA = Vendor("libeclip.so", CONNECTIONS_VARIABLE, CONNECTIONS)
AMD = Vendor("libeclip_hip.so", QUEUES_VARIABLE, QUEUES)


def vendor_of(topology: Topology) -> Vendor:
    return NVIDIA if topology.unit_name == "SM" else AMD


def vendor_here() -> Vendor:
    """The vendor by the drivers' device files; NVIDIA if there are both or neither."""
    return AMD if Path("/dev/kfd").exists() and not Path("/dev/nvidiactl").exists() else NVIDIA


@dataclass(frozen=True)
class Tier:
    """The tier of a command beside other processes on its GPU: native/giving.h."""

    service: bool  # else background
    bound_ns: int = 0  # of a service's requests; 0: none
    floor: float = 0.0  # least part of background's rate alone

    @property
    def variables(self) -> dict[str, str]:
        return {
            "ECLIP_TIER": "service" if self.service else "background",
            "ECLIP_BOUND_NS": str(self.bound_ns),
            "ECLIP_FLOOR": f"{self.floor:g}",
        }


def service_tier(bound: str | None) -> Tier:
    """A service that promises ``1.1x`` (times alone) or ``5ms``; without a bound, to be fast."""
    if bound is None:
        return Tier(service=True)
    try:
        asked = read_bound(bound)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Tier(service=True, bound_ns=0 if asked.ms is None else max(round(asked.ms * 1e6), 1))


def background_tier(floor: float | None) -> Tier:
    if floor is not None and not 0 <= floor < 1:
        raise UsageError(
            f"a floor is a part of the rate alone, from 0 to less than 1, not {floor:g}"
        )
    return Tier(service=False, floor=floor or 0.0)


# From a command and its environment to its exit status and the first signal that was passed on.
Runner = Callable[[Sequence[str], dict[str, str]], tuple[int, int | None]]


@dataclass(frozen=True)
class Cap:
    """The most that each process of a command may use of its GPU: native/cap.h."""

    sms: int | None = None  # or CUs; rounded down to the slices that the device splits into
    share: float | None = None  # of the device's SMs

    def __post_init__(self) -> None:
        if self.sms is not None and self.share is not None:
            raise UsageError("--sms and --share are two ways to say the same; leave one out")
        if self.sms is not None and self.sms < 1:
            raise UsageError(f"a cap is at least 1 SM, not {self.sms}")
        if self.share is not None and not 0 < self.share <= 1:
            raise UsageError(
                f"--share is a part of the GPU's SMs, more than 0 and at most 1, not {self.share:g}"
            )

    @property
    def variables(self) -> dict[str, str]:
        units = {} if self.sms is None else {"ECLIP_SMS": str(self.sms)}
        return units if self.share is None else {"ECLIP_SHARE": f"{self.share:g}"}


@dataclass(frozen=True)
class CommandOutcome:
    code: int  # of the command, as a shell would give it
    counters: dict[int, dict[str, int]]  # per process that met a plan
    signal: int | None = None  # the first that was passed on to the command

    @property
    def launches(self) -> int:
        """Kernels and graphs that libeclip saw."""
        return self._sum("launches") + self._sum("graph_launches") + self._sum("foreign_graphs")

    @property
    def placed(self) -> int:
        """Kernels that had a place in the plan, launched or in a graph."""
        return self._sum("planned") + self._sum("graph_planned")

    def _sum(self, counter: str) -> int:
        return sum(counts[counter] for counts in self.counters.values())


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


def library(vendor: Vendor = NVIDIA) -> Path:
    """Where libeclip is."""
    path = Path(str(resources.files("eclip") / "lib" / vendor.library))
    if not path.is_file():
        raise DeviceError("libeclip is not built; run `make native` (it needs g++) and try again")
    return path


def run_under(
    command: Sequence[str],
    table: bytes | None,
    gpu: int | None = 0,
    record_to: Path | None = None,
    tier: Tier | None = None,
    vendor: Vendor = NVIDIA,
    run: Runner | None = None,
    cap: Cap | None = None,
) -> CommandOutcome:
    """Run a command with this table and wait for its end; signals are passed on to the command.

    Without a table or a cap nothing is redirected, and only the tier counts. Without ``gpu``, the
    GPU of the command's first launch is meant. ``run`` starts the command in another way, such as
    replicas.
    """
    if not command:
        raise UsageError("no command given; write it after --, like: eclip exec … -- python app.py")
    wanted = str(vendor.queues)
    chosen = os.environ.get(vendor.queues_variable, wanted)
    if table is not None and chosen != wanted:
        raise UsageError(
            f"{vendor.queues_variable} is {chosen}, but plans are made for {wanted}; set it so, or "
            f"unset it"
        )
    built = library(vendor)
    with tempfile.TemporaryDirectory(prefix="eclip-") as folder:
        place = Path(folder)
        preload = [_without_blanks(built, place), *os.environ.get("LD_PRELOAD", "").split(":")]
        (place / "counters").mkdir()
        environment = {**os.environ, "LD_PRELOAD": ":".join(filter(None, preload))}
        if gpu is not None:
            environment["ECLIP_GPU"] = str(gpu)
        for kept in (tier, cap):
            environment |= {} if kept is None else kept.variables
        if shared := environment.get(board.VARIABLE):
            # The command may change its folder before it looks for the board.
            environment[board.VARIABLE] = str(Path(shared).absolute())
        if table is not None:
            (place / "table").write_bytes(table)
            environment |= {
                "ECLIP_TABLE": str(place / "table"),
                "ECLIP_STATS": str(place / "counters"),
                vendor.queues_variable: wanted,
            }
        if record_to is not None:
            environment["ECLIP_RECORD"] = str(record_to)
        code, passed_on = (run or _run)(command, environment)
        counters = {int(path.name): _read(path) for path in (place / "counters").iterdir()}
    met = {process: counts for process, counts in sorted(counters.items()) if any(counts.values())}
    return CommandOutcome(code if code >= 0 else 128 - code, met, passed_on)


def _without_blanks(path: Path, place: Path) -> str:
    """A path for LD_PRELOAD, which ends names at blanks and colons: by a link where it has some."""
    if not _BLANKS.search(str(path)):
        return str(path)
    link = place / path.name
    if _BLANKS.search(str(link)):
        raise UsageError(
            f"{path} cannot be preloaded, nor linked from {place}: both paths have blanks or "
            f"colons; set TMPDIR to a folder without them"
        )
    link.symlink_to(path.resolve())
    return str(link)


def _run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, int | None]:
    """The command's exit status, and the first signal that was passed on to it.

    A command in the foreground of a terminal stays in eclip's process group: the terminal sends it
    Ctrl-C, and the command may read from the terminal. Any other command gets its own group, and
    eclip passes its signals on to that group.
    """
    foreground = os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    passed_on: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def send(child: subprocess.Popen[bytes], number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if foreground:
                child.send_signal(number)
            else:
                os.killpg(child.pid, number)

    def pass_on(number: int, _: object) -> None:
        passed_on.append(number)
        if foreground and number == signal.SIGINT:
            return  # the command has it from the terminal
        for child in children:
            send(child, number)

    kept = {
        number: old
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if (old := signal.getsignal(number)) is not signal.SIG_IGN
    }
    for number in kept:
        signal.signal(number, pass_on)
    try:
        child = subprocess.Popen(command, env=environment, process_group=None if foreground else 0)
        children.append(child)
        for early in tuple(passed_on):  # while it was started
            send(child, early)
        code = child.wait()
    except OSError as error:
        raise UsageError(f"cannot run {command[0]}: {error.strerror or error}") from None
    finally:
        for number, old in kept.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
    return code, passed_on[0] if passed_on else None


def _read(path: Path) -> dict[str, int]:
    words = np.fromfile(path, dtype=np.uint64)
    if words.size == 0 or words.size % _SLOTS:
        return dict.fromkeys(COUNTERS, 0)
    totals = words.reshape(_SLOTS, -1).sum(axis=0).tolist()
    return dict(zip(COUNTERS, totals[: len(COUNTERS)], strict=True))
