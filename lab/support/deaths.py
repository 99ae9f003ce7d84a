"""A service that is stopped or killed holds nobody; a background that is killed is not missed.

Two sessions in two processes, one board between them, also with a PID namespace for each. The
background runs back to back, then beside a service that is always busy. The service is stopped,
continued and killed. Then a service with requests at a fixed distance sees its background die.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eclip.gpu.board import VARIABLE

Times = npt.NDArray[np.int64]

CHILD = Path(__file__).with_name("mortal.py")
SERVICE, BACKGROUND = "bert:1", "resnet50:8"
APART_MS = 4.0  # between two requests of the service that sees its background die
LOOK_S = 0.05  # full rate again: from then on it has it for so long
FULL = 0.9
LIMIT_MS = 200.0
# With a /proc of their own: the CUDA driver looks itself up there.
NAMESPACES = ("unshare", "-p", "-f", "--mount-proc", "--kill-child")
DRIVER_WORKS = "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0))"
EXPECTED_S = 50.0


class Mortal:
    """The parent's end of a process."""

    def __init__(self, role: str, device: str, board: Path, folder: Path, *, apart: bool) -> None:
        model = SERVICE if role == "service" else BACKGROUND
        self._process = subprocess.Popen(
            [*(NAMESPACES if apart else ()), sys.executable, CHILD, role, model, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {VARIABLE: str(board), "MORTAL_FOLDER": str(folder)},
        )
        self._apart = apart
        self.pid = 0

    def wait(self) -> None:
        """Until it is ready; its process id is the one that we see."""
        self._answer()
        self.pid = self._process.pid
        if self._apart:
            listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
            self.pid = int(listed.split()[0])

    def run(self, every_ms: float = 0.0) -> None:
        self._say(f"run {every_ms:g}")
        self._answer()

    def halt(self) -> Times:
        """Arrival and end of every request."""
        self._say("halt")
        return np.array(self._answer(), dtype=np.int64).reshape(-1, 2)

    def send(self, number: signal.Signals) -> int:
        """When it was sent."""
        at = now_ns()
        os.kill(self.pid, number)
        return at

    def close(self) -> None:
        for pid in {self.pid, self._process.pid} - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _say(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # libraries may print, too
                return json.loads(line)
        raise RuntimeError(f"a process ended with status {self._process.wait()}")


def run_deaths(device: str, folder: Path) -> list[dict[str, Any]]:
    """A line for one namespace and for two, if the host allows them."""
    with contextlib.ExitStack() as stack:
        sets = [
            (apart, stack.enter_context(_started(device, folder, apart=apart)))
            for apart in (False, *([True] if namespaces_work(device) else []))
        ]
        for _, mortals in sets:
            for one in mortals:
                one.wait()
        return [
            {"stage": "deaths", "pid_namespaces": 2 if apart else 1, **_play(*mortals)}
            for apart, mortals in sets
        ]


def namespaces_work(device: str) -> bool:
    if shutil.which(NAMESPACES[0]) is None:
        return False
    check = [sys.executable, "-c", DRIVER_WORKS] if device.startswith("cuda") else ["true"]
    return subprocess.run([*NAMESPACES, *check], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def _started(device: str, folder: Path, *, apart: bool) -> Iterator[list[Mortal]]:
    """Background, and two services: each dies once."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place, contextlib.ExitStack() as stack:
        mortals = []
        for role in ("background", "service", "service"):
            one = Mortal(role, device, Path(place, "board"), folder, apart=apart)
            stack.callback(one.close)
            mortals.append(one)
        yield mortals


def _play(background: Mortal, first: Mortal, second: Mortal) -> dict[str, Any]:
    begin = now_ns()
    background.run()
    time.sleep(0.8)
    served = now_ns()
    first.run()
    time.sleep(0.8)
    stopped = first.send(signal.SIGSTOP)
    time.sleep(0.8)
    continued = first.send(signal.SIGCONT)
    time.sleep(0.8)
    killed = first.send(signal.SIGKILL)
    time.sleep(0.8)
    ends = background.halt()[:, 1]
    full = rate_in(ends, begin + 300_000_000, served)
    found = {
        "full_rps": full,
        "beside_service": rate_in(ends, served + 200_000_000, stopped) / full,
        "stopped_ms": recovery_ms(ends, stopped, full),
        "beside_continued": rate_in(ends, continued + 200_000_000, killed) / full,
        "killed_ms": recovery_ms(ends, killed, full),
    }
    return found | _background_dies(background, second)


def _background_dies(background: Mortal, service: Mortal) -> dict[str, Any]:
    service.run(APART_MS)
    time.sleep(0.8)
    joined = now_ns()
    background.run()
    time.sleep(1.0)
    killed = background.send(signal.SIGKILL)
    time.sleep(1.5)
    served = service.halt()
    return {
        "service_alone": tail_ms(served, 0, joined),
        "service_beside": tail_ms(served, joined + 100_000_000, killed),
        "service_as_it_dies": tail_ms(served, killed - 20_000_000, killed + 500_000_000),
        "service_after": tail_ms(served, killed + 500_000_000, now_ns()),
    }


def rate_in(ends: Times, begin: int, end: int) -> float:
    inside = np.count_nonzero((ends >= begin) & (ends < end))
    return float(inside) * 1e9 / (end - begin)


def recovery_ms(ends: Sequence[int] | Times, event: int, full_rps: float) -> float | None:
    """From the event to the first completion from which on the rate is full; None: never."""
    after = np.array([end for end in ends if end >= event], dtype=np.int64)
    wanted = max(1, int(FULL * full_rps * LOOK_S))
    for index in range(len(after) - wanted):
        if after[index + wanted] - after[index] <= LOOK_S * 1e9:
            return float(after[index] - event) / 1e6
    return None


def tail_ms(served: Times, begin: int, end: int) -> dict[str, float]:
    inside = served[(served[:, 0] >= begin) & (served[:, 0] < end)]
    if not len(inside):
        return {}
    latency = (inside[:, 1] - inside[:, 0]) / 1e6
    p50, p99 = np.percentile(latency, [50, 99])
    return {"p50_ms": float(p50), "p99_ms": float(p99), "max_ms": float(latency.max())}


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
