"""A fleet that runs in processes of its own, and clients that ask it, with an account of every
request. Tests and a benchmark break it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from eclip.fleet.config import load_fleet_file
from eclip.fleet.ray import cluster
from fleet_functions import JOURNAL

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
FLEET = """
replan = false

[ray]
{ray}

[router]
http_port = {http}
grpc_port = {grpc}
count = {routers}
shared_memory = {near}

[server]
replan = false
grace_seconds = 0.0

[[service]]
name = "double"
model = "squeezenet:1"
rate = 100
bound = "2000ms"
instances = {instances}
[service.serve]
model = "numpy:fleet_functions:double"
inputs = [{{ name = "number", datatype = "INT64", shape = [1] }}]
outputs = [{{ name = "twice", datatype = "INT64", shape = [1] }}]
"""
GPUS = """
[[gpus]]
machine = "{machine}"
kind = "h200"
count = {count}
"""
CLIENTS, RATE_RPS = 12, 120
PATH = f"{ROOT / 'src'}{os.pathsep}{SUPPORT}"  # where processes find their code
PATIENCE_S = 300.0  # machines may be busy


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def write_fleet(
    file: Path, machines: dict[str, int], routers: int, near: bool, where: tuple[str, int, int]
) -> None:
    """``where``: a key of [ray], and the routers' ports."""
    ray, http, grpc = where
    text = FLEET.format(
        ray=ray,
        http=http,
        grpc=grpc,
        routers=routers,
        near=str(near).lower(),
        instances=sum(machines.values()),
    )
    for machine, count in machines.items():
        text += GPUS.format(machine=machine, count=count)
    file.write_text(text)


class RunningFleet:
    """``eclip fleet up`` in a process of its own, and a look at it through Ray."""

    def __init__(self, folder: Path, machines: dict[str, int], routers: int, near: bool) -> None:
        ray, self.http_port, self.grpc_port = free_ports(3)
        self.journal = folder / "journal"
        self.journal.touch()
        self.file = folder / "fleet.toml"
        where = (f"port = {ray}", self.http_port, self.grpc_port)
        write_fleet(self.file, machines, routers, near, where)
        os.environ |= {JOURNAL: str(self.journal), "PYTHONPATH": PATH}
        self.ray_folder = folder / "ray"  # Ray's for the whole machine, where it never ran before
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "eclip", "fleet", "up", str(self.file), "--seconds", "1"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"RAY_TMPDIR": str(self.ray_folder)},
            )
        self.settings = load_fleet_file(self.file).ray

    def wait_for(self, words: str) -> float:
        """Until the command has said this; in seconds."""
        began_s = time.monotonic()
        while words not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > began_s + PATIENCE_S:
                raise SystemExit(f"the fleet said: {self.log.read_text()}")
            time.sleep(0.05)
        return time.monotonic() - began_s

    def change(self, old: str, new: str) -> None:
        """In the file."""
        self.file.write_text(self.file.read_text().replace(old, new))

    def status(self) -> Any:
        controller = cluster.find_controller()
        return None if controller is None else cluster.ask(controller.status)

    def children(self, words: str) -> list[int]:
        """Processes of Ray that the command has started."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if parent == self.process.pid and words in line:
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


@contextlib.contextmanager
def fleet(machines: dict[str, int], routers: int, near: bool) -> Iterator[RunningFleet]:
    with tempfile.TemporaryDirectory() as folder:
        running = RunningFleet(Path(folder), machines, routers, near)
        try:
            running.wait_for("is up")
            yield running
        finally:
            running.close()


class Load:
    """Clients that ask for doubles, each number once, and what came of every one."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.outcomes: list[tuple[float, str, int]] = []  # when answered, how, which number
        self.lines: collections.Counter[str] = collections.Counter()
        self.stopped = False
        self._numbers = iter(range(1, 1 << 40))

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    async def _client(self) -> None:
        module = tritonclient.http.aio
        while not self.stopped:
            async with module.InferenceServerClient(self.address, conn_limit=1) as client:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    while not self.stopped:
                        await self._ask(client, next(self._numbers))
                        await asyncio.sleep(CLIENTS / RATE_RPS)
            await asyncio.sleep(0.05)

    async def _ask(self, client: Any, number: int) -> None:
        given = tritonclient.http.aio.InferInput("number", (1, 1), "INT64")
        given.set_data_from_numpy(np.array([[number]]))
        try:
            answer = await client.infer("double", [given])
            right = answer.as_numpy("twice").tolist() == [[2 * number]]
            self._note("answered" if right else "wrong", number)
        except InferenceServerException as error:
            line = str(error.message())
            self.lines[line] += 1
            lost = "before it was answered" in line or "before its answer came" in line
            self._note("lost" if lost else "refused", number)
        except (aiohttp.ClientConnectorError, ConnectionRefusedError):
            self._note("nobody there", number)
            raise
        except (aiohttp.ClientError, OSError):
            self._note("connection broken", number)
            raise

    def _note(self, how: str, number: int) -> None:
        self.outcomes.append((time.monotonic(), how, number))
