"""Stand-ins for a GPU where processes are tested: workloads, an energy counter, an MPS control.

A workload's model name says how it behaves; ``steady`` takes as many milliseconds per request as
its batch. Requests and energy are reckoned, not slept through: how many there are in a window
depends on when a process was told to begin, but not on how often this machine lets it run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from eclip.core.decide import decide
from eclip.core.model_key import ModelKey, parse_model
from eclip.core.requests import YIELDS, Ints
from eclip.core.rules import BUSY_SINCE, IDLE, YIELD
from eclip.core.trace import Kernel, Trace
from eclip.cuda.processes.child import Attached, Facts, now_ns
from eclip.errors import DeviceError
from eclip.gpu.energy import Tick
from served import served_rows

ENTRY = f"{__name__}:open_standin"
KERNELS = 3
POWER_W = 100
UNITS = 132
SERVING = "STANDIN_SERVING"  # a variable: a file that is made when a stand-in begins to serve
_TICK_NS = 10_000_000


def trace_of(model: str, batch: int, name: str = "k") -> Trace:
    kernel = Kernel(name=name, grid=(8, 1, 1), block=(128, 1, 1))
    return Trace(model=parse_model(f"{model}:{batch}"), kernels=(kernel,) * KERNELS)


class Standin:
    def __init__(self, key: ModelKey) -> None:
        model, batch = key.name, key.batch
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        listening = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "listening").exists()
        self._model = model
        self._request_ns = batch * 1_000_000
        self.facts = Facts(
            trace=trace_of(model, batch, "other" if model == "changed" else "k").digest,
            kernels=KERNELS,
            units=UNITS * int(share or 100) // 100,
            mps=listening and model != "unattached",
        )

    def serve(self, arrivals: Ints | None, stop_at_ns: int, stop: Ints) -> Ints:
        if self._model == "killed":
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._model == "breaks":
            raise DeviceError("a launch failed: CUDA_ERROR_ILLEGAL_ADDRESS")
        rows = []
        now, todo = now_ns(), None if arrivals is None else list(arrivals)
        if mark := os.environ.get(SERVING):
            Path(mark).touch()
        while not stop[0] and todo != []:
            arrival = now if todo is None else int(todo[0])
            start = max(now, arrival)
            if start >= stop_at_ns:
                break
            if start > now_ns():  # not ahead of the clock; behind it, at once
                time.sleep(0.001)
                continue
            if todo is not None:
                todo.pop(0)
            now = start + self._request_ns
            rows.append((arrival, start, now))
        return served_rows(rows)


class GivingStandin(Standin):
    """A service that is busy for as long as it serves, if it has requests, or a worker that looks
    at the board as often as it can and counts in its one request how often it would yield."""

    def __init__(self, key: ModelKey, attached: Attached) -> None:
        super().__init__(key)
        self._attached = attached
        self._choice()  # compiles

    def _choice(self) -> int:
        place = self._attached.place
        rules = self._attached.rules
        return decide(place.board, place.row, place.peers, *rules[:3], 0, now_ns())

    def serve(self, arrivals: Ints | None, stop_at_ns: int, stop: Ints) -> Ints:
        attached, place = self._attached, self._attached.place
        begin, yields = now_ns(), 0
        if attached.worker.promise is not None and (arrivals is None or len(arrivals) > 0):
            place.board[place.row, BUSY_SINCE] = begin
        while not stop[0] and now_ns() < stop_at_ns - self._request_ns:
            yields += self._choice() == YIELD
            time.sleep(0.001)
        place.board[place.row, BUSY_SINCE] = IDLE
        rows = served_rows([(begin, begin, stop_at_ns - 1)])
        rows[:, YIELDS] = yields
        return rows


@contextlib.contextmanager
def open_standin(key: ModelKey, attached: Attached | None = None) -> Iterator[Standin]:
    model = key.name
    if attached is not None:
        yield GivingStandin(key, attached)
        return
    if model == "refuses":
        raise DeviceError("refuses does not fit into the GPU's memory")
    if model == "raises":
        raise ValueError("a factory's mistake\nand more of it")
    if model == "tells":
        names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MPS_PIPE_DIRECTORY")
        raise DeviceError(" ".join(str(os.environ.get(name)) for name in names))
    if model == "dies":
        sys.stderr.write("some noise\nterminate called after throwing an instance\n\n")
        sys.stderr.flush()
        os._exit(3)
    if model == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield Standin(key)
    if model == "stubborn":
        time.sleep(600)


class SteadyCounter:
    """An energy counter of a device that always draws the same power; it ticks every 10 ms."""

    def __init__(self) -> None:
        self.ours: set[int] = set()

    def tick_before(self, end_ns: int) -> Tick | None:
        at_ns = (now_ns() // _TICK_NS + 1) * _TICK_NS
        time.sleep(max(0, min(at_ns, end_ns) - now_ns()) / 1e9)
        return Tick(at_ns, at_ns * POWER_W // 1_000_000) if at_ns < end_ns else None

    def other_processes(self) -> list[int]:
        return []


_CONTROL = """#!/bin/sh
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
case "{mode} $1" in
"silent -d") exit 7 ;;
"failing -d") printf 'starting\\nno such GPU %s\\n' "$CUDA_VISIBLE_DEVICES" >control.log; exit 1 ;;
"mute -d") exit 0 ;;
*" -d")
    touch listening
    (while [ ! -e quit ]; do sleep 0.02; done; rm listening) &
    exit 0 ;;
esac
read -r asked
[ -e listening ] || { echo "cannot find the daemon"; exit 1; }
case "$asked" in
get_server_list) echo 1 ;;
"get_client_list 1") [ ! -e clients ] || cat clients ;;
esac
[ "$asked" != quit ] || [ "{mode}" = deaf ] || touch quit
"""


def install_control(folder: Path, mode: str) -> None:
    """A control that works, or is silent, failing, mute (never listens) or deaf to ``quit``."""
    script = folder / "nvidia-cuda-mps-control"
    script.write_text(_CONTROL.replace("{mode}", mode))
    script.chmod(0o755)


def processes_with(variable: str) -> list[str]:
    """The environments of the live processes that have this ``NAME=value`` in theirs."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (process / "environ").read_text(errors="replace").split("\0")
            if variable in environment:
                found.append(" ".join(environment))
    return found
