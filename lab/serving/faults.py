"""Faults under load: what clients of a server see while its parts die and others misbehave.

    PYTHONPATH=src:tests/support python lab/serving/faults.py [--rounds N] [--seed N] [--out FILE]
        [--device cuda] [--minutes N]
    PYTHONPATH=src:tests/support python lab/serving/faults.py --sum FILE...

A server (`eclip serve`, two fronts, simulated device) answers a steady stream of Triton's clients.
On a GPU its model is a kernel. One that hangs is left out there, and so is a model that is too
large, which would have to be measured first. Rounds go on in ``--out`` where an earlier call
stopped, and none begins after so many minutes.
Every round has one fault, chosen at random. Every request must be answered, rightly or with an
error: a wrong answer, none at all, or a server that ends is said and makes the exit code 1. The
table says when p99 was within the bound again, counted from the end of the fault. A full disk needs
the right to mount a small one; without it that fault is left out, and said.

Of every round that took longer than the goal, what was in it is printed: answers of every kind, the
latest of them, how long this program itself was kept from running (then the machine was slow), and
what the server's log said. ``--sum`` prints all this for the rounds that were written before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import tritonclient.grpc.aio
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.add_clients import infer_bytes
from lab.support.kept import Row, add_rows, read_rows
from lab.support.processes import children
from lab.support.served import PATIENCE_S, ServeProcess, wait_for
from lab.support.tables import print_table

RATE_RPS = 60.0
BOUND_MS = 100.0
GOAL_S = 2.0
PROBE_S = 0.01
SERVICE = """
[[service]]
name = "{name}"
model = "{model}"
inputs = [
    {{ name = "a", datatype = "INT32", shape = [4] }},
    {{ name = "b", datatype = "INT32", shape = [4] }},
]
outputs = [{{ name = "sum", datatype = "INT32", shape = [4] }}]
batches = [1, 8]
bound = "{bound_ms}ms"
queue = 64
"""
SERVER = """
[server]
device = "{device}"
http_port = 0
grpc_port = 0
fronts = 2
grace_seconds = 1.0
"""
MODELS = {  # of the services, by device
    "sim": {
        "add": "numpy:eclip.server.demo_models:add",
        "hangs": "numpy:serving_functions:hang",
    },
    "cuda": {"add": "lab.gpu.workloads:add"},
}
TOO_LARGE = """
[[service]]
name = "toolarge"
model = "vgg19"
batches = [1024]
instances = 20
"""
REFUSED = "the configuration stays as it was"


def settings_of(device: str, bound_ms: float = BOUND_MS) -> str:
    """A server's file."""
    services = [
        SERVICE.format(name=name, model=model, bound_ms=bound_ms)
        for name, model in MODELS[device].items()
    ]
    return "".join([SERVER.format(device=device), *services])


class Server(ServeProcess):
    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        self.file = folder / "models.toml"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.small_disk = not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "eclip", str(self.temporary)],
            stderr=subprocess.DEVNULL,
        ).returncode
        self.write()
        super().__init__(self.file, folder / "log", {"TMPDIR": str(self.temporary)})

    def write(self, bound_ms: float = BOUND_MS, more: str = "") -> None:
        self.file.write_text(settings_of(self.device, bound_ms) + more)

    def part(self, name: str) -> int | None:
        """The process of one of its parts; the oldest, since a spare one may wait."""
        return next((pid for pid, command in children(self.process.pid) if name in command), None)

    def reload(self, bound_ms: float = BOUND_MS, more: str = "") -> None:
        self.write(bound_ms, more)
        self.process.send_signal(signal.SIGHUP)


@dataclass
class Traffic:
    """A steady stream, half of it over HTTP and half over gRPC."""

    server: Server
    asked: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    # when a request was due, and how long its answer took from then on
    late: list[tuple[float, float]] = field(default_factory=list)
    open: set[asyncio.Task[None]] = field(default_factory=set)

    async def ask(self, module: Any, client: Any, due_s: float) -> None:
        self.asked += 1
        a = np.random.default_rng().integers(0, 1 << 20, (1, 4), np.int32)
        inputs = []
        for name in ("a", "b"):
            given = module.InferInput(name, (1, 4), "INT32")
            given.set_data_from_numpy(a)
            inputs.append(given)
        try:
            result = await client.infer("add", inputs)
            right = bool((result.as_numpy("sum") == 2 * a).all())
            self.seen["right" if right else "WRONG"] += 1
            self.late.append((due_s, time.monotonic() - due_s))
        except InferenceServerException as error:
            self.seen[f"refused {error.status() or error.message()}"] += 1
        except (OSError, aiohttp.ClientError) as error:  # aiohttp's own come through the client
            self.seen[f"no connection {type(error).__name__}"] += 1

    async def run(self) -> None:
        http, grpc = tritonclient.http.aio, tritonclient.grpc.aio
        async with (
            http.InferenceServerClient(self.server.http, conn_limit=32) as over_http,
            grpc.InferenceServerClient(self.server.grpc) as over_grpc,
        ):
            number = 0
            due_s = time.monotonic()
            try:
                while True:
                    due_s += random.expovariate(RATE_RPS)
                    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                    number += 1
                    chosen = (http, over_http) if number % 2 else (grpc, over_grpc)
                    task = asyncio.create_task(self.ask(*chosen, due_s))
                    self.open.add(task)
                    task.add_done_callback(self.open.discard)
            finally:  # the clients, which are about to close, would give up what is open
                if self.open:
                    await asyncio.wait(self.open, timeout=PATIENCE_S)


# --- Faults --------------------------------------------------------------------------------------


class MissedError(Exception):
    """A fault had not the effect that it must have."""


async def see_refusal(server: Server, before: int) -> None:
    if not await asyncio.to_thread(wait_for, lambda: server.said.count(REFUSED) > before):
        raise MissedError("a change that cannot be made was not refused")


async def kill_device(server: Server) -> None:
    if (pid := server.part("device.process")) is not None:
        os.kill(pid, signal.SIGKILL)


async def kill_planner(server: Server) -> None:
    server.reload(BOUND_MS * random.uniform(1, 2))
    end = time.monotonic() + 10
    while (pid := server.part("planner_process")) is None and time.monotonic() < end:
        await asyncio.sleep(0.005)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.http.partition(":")
    return await asyncio.open_connection(host, int(port))


async def client_gone(server: Server) -> None:
    for _ in range(20):
        _, writer = await connect(server)
        whole = infer_bytes(1)
        writer.write(whole[: random.randint(1, len(whole))])
        await asyncio.sleep(random.uniform(0, 0.01))
        writer.transport.abort()


async def garbage(server: Server) -> None:
    for address in (server.http, server.grpc):
        host, _, port = address.partition(":")
        for _ in range(5):
            _, writer = await asyncio.open_connection(host, int(port))
            with contextlib.suppress(OSError):
                writer.write(
                    random.choice((os.urandom(2000), b"GET / HTTP/9.9\r\n\r\n", b"\0" * 99))
                )
                await writer.drain()
            writer.close()


async def overload(server: Server) -> None:
    """Ten times the rate that the device could serve, for a while."""

    async def ask() -> None:
        reader, writer = await connect(server)
        writer.write(infer_bytes(1))
        await reader.readline()
        writer.close()

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(ask() for _ in range(600)))


async def slow_reader(server: Server) -> None:
    host, _, port = server.http.partition(":")
    for _ in range(5):
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        await asyncio.to_thread(slow.connect, (host, int(port)))
        with contextlib.suppress(BlockingIOError):
            slow.setblocking(False)
            slow.send(infer_bytes(1) * 20)
        asyncio.get_running_loop().call_later(random.uniform(0.1, 2), slow.close)


async def full_disk(server: Server) -> None:
    """Nothing can be written where the server keeps its plans, while it is told to plan anew."""
    refusals = server.said.count(REFUSED)
    filler = server.temporary / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    server.reload(BOUND_MS * 1.5)
    try:
        await see_refusal(server, refusals)
    finally:
        filler.unlink()


async def out_of_memory(server: Server) -> None:
    refusals = server.said.count(REFUSED)
    server.reload(BOUND_MS, TOO_LARGE)
    try:
        await see_refusal(server, refusals)
    finally:
        server.write()


async def model_hangs(server: Server) -> None:
    _, writer = await connect(server)
    writer.write(infer_bytes(13, "hangs"))
    await writer.drain()
    await asyncio.sleep(0.3)
    writer.close()


async def reload_under_load(server: Server) -> None:
    for _ in range(3):
        server.reload(BOUND_MS * random.uniform(1, 3))
        await asyncio.sleep(random.uniform(0, 0.3))


FAULTS: dict[str, Callable[[Server], Awaitable[None]]] = {
    "device process killed": kill_device,
    "planner killed": kill_planner,
    "clients gone": client_gone,
    "garbage": garbage,
    "overload": overload,
    "slow readers": slow_reader,
    "disk full": full_disk,
    "out of device memory at load": out_of_memory,
    "a model that hangs": model_hangs,
    "reload under load": reload_under_load,
}


# --- Rounds --------------------------------------------------------------------------------------


async def recover(traffic: Traffic) -> float | None:
    """Seconds until a second of requests begins that is served with p99 within the bound."""
    since_s = time.monotonic()
    while (now_s := time.monotonic()) < since_s + PATIENCE_S:
        begin_s = now_s - 1.0 - BOUND_MS / 1000
        window = [late for due, late in traffic.late if begin_s < due < begin_s + 1.0]
        enough = len(window) > 0.7 * RATE_RPS
        if begin_s > since_s and enough and np.percentile(window, 99) < BOUND_MS / 1000:
            return begin_s - since_s
        await asyncio.sleep(0.05)
    return None


@contextlib.asynccontextmanager
async def running(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Probe:
    """How long this program was kept from running: by a busy machine, for nothing else is here."""

    worst_s: float = 0.0
    lost_s: float = 0.0  # in all

    async def run(self) -> None:
        while True:
            begin_s = time.monotonic()
            await asyncio.sleep(PROBE_S)
            over_s = time.monotonic() - begin_s - PROBE_S
            self.worst_s = max(self.worst_s, over_s)
            self.lost_s += over_s


class Round:
    """What happens from here on, for whoever looks into it later."""

    def __init__(self, number: int, fault: str, traffic: Traffic, probe: Probe) -> None:
        self.number, self.fault = number, fault
        self._traffic, self._probe = traffic, probe
        self._seen = traffic.seen.copy()
        self._said = len(traffic.server.said)
        probe.worst_s = probe.lost_s = 0.0
        traffic.late.clear()

    def describe(self, back_s: float | None) -> Row:
        """Latenesses are of requests that were answered."""
        late = sorted((took for _, took in self._traffic.late), reverse=True)
        log = self._traffic.server.said[self._said :].splitlines()
        return {
            "round": self.number,
            "fault": self.fault,
            "back_s": back_s,
            "seen": dict(self._traffic.seen - self._seen),
            "latest_ms": [round(1e3 * took) for took in late[:5]],
            "beyond_bound": sum(took > BOUND_MS / 1e3 for took in late),
            "kept_from_running_ms": round(1e3 * self._probe.worst_s),
            "kept_from_running_in_all_ms": round(1e3 * self._probe.lost_s),
            "load_average": os.getloadavg()[0],
            "log": log,
        }


def print_rounds(title: str, rounds: list[Row]) -> None:
    rows = []
    for fault in FAULTS:
        back_s = [one["back_s"] for one in rounds if one["fault"] == fault]
        if back_s:
            ends = [PATIENCE_S if took_s is None else took_s for took_s in back_s]
            shares = [f"{np.percentile(ends, share):.1f}" for share in (50, 99, 100)]
            beyond = sum(took_s > GOAL_S for took_s in ends)
            rows.append([fault, str(len(ends)), *shares, str(beyond)])
    columns = ["fault", "rounds", "back after s, p50", "p99", "worst", f"beyond {GOAL_S:g} s"]
    print_table(title, columns, rows)
    seen: Counter[str] = Counter()
    for one in rounds:
        seen.update(one["seen"])
    print(", ".join(f"{count} {what}" for what, count in seen.most_common()))
    slow = [one for one in rounds if one["back_s"] is None or one["back_s"] > GOAL_S]
    print(f"{len(slow)} rounds beyond {GOAL_S:g} s")
    for one in slow:
        rest = dict(one)
        number, fault, back, log = (rest.pop(key) for key in ("round", "fault", "back_s", "log"))
        print(f"round {number}, {fault}: back after {back} s")
        print("   ", ", ".join(f"{name} {value}" for name, value in rest.items()))
        for line in log:
            print("   ", line)


def left_out(server: Server) -> list[str]:
    """Faults that cannot be made here."""
    no_disk = [] if server.small_disk else ["disk full"]
    on_gpu = ["out of device memory at load", "a model that hangs"]
    return [*no_disk, *([] if server.device == "sim" else on_gpu)]


async def run(
    rounds: int, seed: int, out: Path | None, device: str = "sim", until_s: float = math.inf
) -> bool:
    """``until_s``: of time.monotonic(); no round begins later."""
    described: list[Row] = [] if out is None else read_rows(out)
    random.seed(seed + len(described))
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), device)
        faults = [name for name in FAULTS if name not in left_out(server)]
        traffic, probe = Traffic(server), Probe()
        async with running(traffic.run(), probe.run()):
            await recover(traffic)
            for number in range(len(described), rounds):
                if time.monotonic() > until_s:
                    break
                name = random.choice(faults)
                this = Round(number, name, traffic, probe)
                try:
                    await FAULTS[name](server)
                except MissedError as error:
                    broken.append(f"round {number}, {name}: {error}")
                took_s = await recover(traffic)
                wrong = traffic.seen["WRONG"]
                if took_s is None or wrong or server.process.poll() is not None:
                    broken.append(f"round {number}, {name}: back {took_s}, wrong {wrong}")
                described.append(this.describe(took_s))
                if out is not None:
                    add_rows(out, described[-1:])
                if server.process.poll() is not None:
                    break
        unanswered = traffic.asked - traffic.seen.total()
        if unanswered:
            broken.append(f"{unanswered} requests without an answer")
        if status := server.stop():
            broken.append(f"exit code {status}: {server.said[-2000:]}")
        if out is not None:
            out.with_suffix(".log").write_text(server.said)
        if server.small_disk:
            subprocess.run(["umount", str(server.temporary)], check=True)
        for name in left_out(server):
            print(f"left out, since it cannot be made here: {name}")
    print_rounds(
        f"{len(described)} rounds on {device}, seed {seed}, {RATE_RPS:.0f} requests/s", described
    )
    for reason in broken:
        print("BROKEN", reason)
    return not broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a line for every round")
    parser.add_argument("--sum", type=Path, nargs="+", help="such files, to be printed together")
    parser.add_argument("--device", choices=list(MODELS), default="sim")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no round later")
    given = parser.parse_args()
    if given.sum:
        rows = [row for path in given.sum for row in read_rows(path)]
        print_rounds(f"{len(rows)} rounds", rows)
        return
    until_s = time.monotonic() + 60 * given.minutes
    well = asyncio.run(run(given.rounds, given.seed, given.out, given.device, until_s))
    sys.exit(not well)


if __name__ == "__main__":
    main()
