"""`eclip serve` as a process of its own, for scripts that ask it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lab.support.processes import children

from eclip.core.device import Closing

PATIENCE_S = 60.0
_START_S = 300.0  # the first time, when code is compiled
_PARTS = {"front.process": "front", "device.process": "device process"}


class ServeProcess(Closing):
    """Of a file; ready when this is made. What it says is in ``log``."""

    def __init__(self, file: Path, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "eclip", "serve", str(file)],
                stdout=output,
                stderr=output,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(sys.path)}
                | dict(environment or {}),
            )
        wait_for(lambda: "Serving" in self.said or self.process.poll() is not None, _START_S)
        found = re.search(r"http://(\S+) .*gRPC (\S+)\. ", self.said)
        if found is None:
            self.close()
            raise RuntimeError(f"the server did not start: {self.said}")
        self.http, self.grpc = found[1], found[2]

    @property
    def said(self) -> str:
        return self._log.read_text()

    def parts(self) -> dict[str, int]:
        """Its processes by name; a second device process is the spare."""
        found = {"server": self.process.pid}
        for pid, command in children(self.process.pid):
            for word, name in _PARTS.items():
                if word in command:
                    count = sum(one.startswith(name) for one in found)
                    found[f"{name} {count + 1}"] = pid
        return found

    def stop(self) -> int:
        """Its exit code, when it has answered what is open."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """At once, if it runs still."""
        self.process.kill()
        self.process.wait(PATIENCE_S)


def wait_for(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    end = time.monotonic() + patience_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()
