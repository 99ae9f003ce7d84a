"""Stand-ins for a GPU where processes are tested: workloads, an energy counter, an MPS control.

A workload's model name says how it behaves; ``steady`` takes as many milliseconds per request as
its batch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eclip.artefacts.model_key import ModelKey, parse_model
from eclip.artefacts.trace import Kernel, Trace
from eclip.devices.cuda.energy import Tick
from eclip.devices.gpu.loop import Ints
from eclip.devices.remote_child import Facts, now_ns
from eclip.errors import DeviceError

ENTRY = f"{__name__}:open_standin"
KERNELS = 3
POWER_W = 100
UNITS = 132


def trace_of(model: str, batch: int, name: str = "k") -> Trace:
    kernel = Kernel(name=name, grid=(8, 1, 1), block=(128, 1, 1))
    return Trace(model=parse_model(f"{model}:{batch}"), kernels=(kernel,) * KERNELS)


class Standin:
    def __init__(self, key: ModelKey) -> None:
        model, batch = key.name, key.batch
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        listening = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "listening").exists()
        self._model = model
        self._seconds = batch / 1000
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
        todo = None if arrivals is None else list(arrivals)
        while not stop[0] and (now := now_ns()) < stop_at_ns and todo != []:
            arrival = now if todo is None else int(todo[0])
            if arrival > now:
                time.sleep(0.0002)
                continue
            if todo is not None:
                todo.pop(0)
            time.sleep(self._seconds)
            rows.append((arrival, now, now_ns()))
        return np.array(rows, dtype=np.int64).reshape(-1, 3)


@contextlib.contextmanager
def open_standin(key: ModelKey) -> Iterator[Standin]:
    model = key.name
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
        time.sleep(0.01)
        now = now_ns()
        return Tick(now, now * POWER_W // 1_000_000) if now < end_ns else None

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
