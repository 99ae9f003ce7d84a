"""A front over the NumPy core in a process of its own.

    python numpy_server.py SETTINGS IDLE_MODELS

SETTINGS is a ``FrontSettings`` as JSON; so many models are there that nobody asks for. It writes
its ports when it serves, and stops when its standard input ends or on SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from eclip.server.front.front import FrontSettings, Ports, open_front
from numpy_core import NumpyCore


async def serve(settings: FrontSettings, idle_models: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(sys.stdin.fileno(), stop.set)
    async with open_front(NumpyCore(idle_models), settings) as ports:
        print(msgspec.json.encode(ports).decode(), flush=True)
        await stop.wait()


class NumpyServer:
    """Starts it, knows its ports, and collects what it writes on standard error."""

    def __init__(self, log: Path, idle_models: int = 0, **settings: Any) -> None:
        given = {"http_port": 0, "grpc_port": 0, "grace_s": 0.5} | settings
        self._log = log
        self._file = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, __file__, msgspec.json.encode(given).decode(), str(idle_models)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        if self._process.stdout is None:
            raise RuntimeError("the server has no standard output")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start: {self.complaints()}")
        self.ports = msgspec.json.decode(line, type=Ports)
        self.pid = self._process.pid

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.ports.http}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports.grpc}"

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def complaints(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> int:
        """Its exit code; also when it has stopped before."""
        if self._file.closed:
            return self._process.returncode
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._file.close()
        return self._process.returncode


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    given = msgspec.json.decode(
        sys.argv[1], type=FrontSettings, dec_hook=lambda kind, value: kind(value)
    )
    uvloop.run(serve(given, int(sys.argv[2])))
