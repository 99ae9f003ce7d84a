"""Programs of lab/gpu/apps as processes: plain, under MPS or under libeclip; their requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from eclip.cuda.processes.mps import BELOW_NORMAL, PIPES, PRIORITY
from eclip.gpu.board import VARIABLE

Times = npt.NDArray[np.int64]

START_S, ANSWER_S, END_S = 180.0, 300.0, 10.0
AHEAD_NS = 50_000_000  # from the call to the first arrival


@dataclass(frozen=True)
class Way:
    """How two programs share the GPU."""

    name: str
    eclip: bool = False
    mps: bool = False
    background: Mapping[str, str] = field(default_factory=dict)  # variables of background


PLAIN, ECLIP, ECLIP_MPS = "time-sliced", "eclip", "eclip, MPS"
# What claims need first: time may end before the list does.
WAYS = (
    Way(PLAIN),
    Way(ECLIP, eclip=True),
    Way(ECLIP_MPS, eclip=True, mps=True),
    Way("launches 16/8", eclip=True, background={"ECLIP_LAUNCHES": "8"}),
    Way("MPS, priority", mps=True, background={PRIORITY: str(BELOW_NORMAL)}),
    Way("MPS", mps=True),
)
OURS = (ECLIP, ECLIP_MPS)


class Program:
    """A process that takes an order a line and gives an answer a line."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self.command = list(command)
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | dict(variables),
                start_new_session=True,
            )
        self._heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.about: dict[str, Any] = {}

    def wait(self) -> None:
        self.about = self.answer(START_S)

    @property
    def pid(self) -> int:
        """Of the program itself, not of ``eclip exec`` around it."""
        return int(self.about["pid"])

    def order(self, *words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()

    def answer(self, seconds: float = ANSWER_S) -> dict[str, Any]:
        try:
            found = self._heard.get(timeout=seconds)
        except queue.Empty:
            raise RuntimeError(f"{self.command} said nothing for {seconds:g} s") from None
        if found is None:
            words = self._log.read_text(errors="replace").strip().splitlines()
            last = words[-1] if words else "without a word"
            raise RuntimeError(f"{self.command} ended: {last}")
        return found

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        """``eclip exec`` passes on what ends it: its program has a process group of its own."""
        try:
            self._end(signal.SIGTERM)
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            if self.about:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            self._end(signal.SIGKILL)
            self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _end(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # libraries may print, too
                self._heard.put(json.loads(line))
        self._heard.put(None)


def start(
    app: Sequence[str], way: Way, tier: str, *, board: Path, pipes: Path | None, folder: Path
) -> Program:
    """``app``: a program's file and its arguments. ``tier``: service or background."""
    command = [sys.executable, *app]
    variables = {VARIABLE: str(board)}
    if way.eclip:
        bound = ["--bound", "1.1x"] if tier == "service" else []
        command = [sys.executable, "-m", "eclip", "exec", f"--{tier}", *bound, "--", *command]
    if way.mps:
        assert pipes is not None
        variables[PIPES] = str(pipes)
    if tier == "background":
        variables |= way.background
    name = "-".join([Path(app[0]).stem, *app[1:], way.name]).replace("/", "-").replace(", ", "-")
    return Program(command, variables, folder / f"{name.replace(' ', '-')}.log")


def serve(program: Program, arrivals: Times, folder: Path) -> dict[str, Any]:
    """A service's latencies, from the arrivals on, and what else it tells."""
    if "port" in program.about:
        return {"latency": ask_http(program.about, arrivals)}
    name = f"{program.pid}-{time.monotonic_ns()}"
    source, target = folder / f"{name}-arrivals.npy", folder / f"{name}-found"
    np.save(source, arrivals)
    program.order("serve", str(source), str(target))
    program.answer(arrivals[-1] / 1e9 + ANSWER_S)
    source.unlink()
    if target.with_suffix(".npy").exists():
        return {"latency": np.load(target.with_suffix(".npy"))}
    found = np.load(target.with_suffix(".npz"))
    return {"latency": found["first"], "between": found["between"], "tokens": found["tokens"]}


def ask_http(about: Mapping[str, Any], arrivals: Times) -> Times:
    """Open loop: a request is sent when it is due, whatever became of those before."""
    found = np.zeros(len(arrivals), dtype=np.int64)
    body, url = bytes(about["bytes"]), f"http://127.0.0.1:{about['port']}/"

    async def run() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            begin = time.perf_counter_ns() + AHEAD_NS

            async def ask(index: int, due: int) -> None:
                async with session.post(url, data=body) as reply:
                    await reply.read()
                    if reply.status != 200:
                        raise RuntimeError(f"a request was answered with {reply.status}")
                found[index] = time.perf_counter_ns() - due

            asked = []
            for index, at in enumerate(arrivals.tolist()):
                due = begin + at
                while (left := due - time.perf_counter_ns()) > 0:
                    await asyncio.sleep(left / 1e9 - 1e-3 if left > 2_000_000 else 0)
                asked.append(asyncio.ensure_future(ask(index, due)))
            await asyncio.gather(*asked)

    asyncio.run(run())
    return found
