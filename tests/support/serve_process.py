"""``eclip serve`` as a process, with a file of one model that adds."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from waiting import PATIENCE_S, until

CONFIG = """
[server]
http_port = 0
grpc_port = 0
fronts = {fronts}
grace_seconds = 1.0
{server}

[[service]]
name = "add"
model = "numpy:eclip.server.demo_models:add"
inputs = [
    {{ name = "a", datatype = "INT32", shape = [4] }},
    {{ name = "b", datatype = "INT32", shape = [4] }},
]
outputs = [{{ name = "sum", datatype = "INT32", shape = [4] }}]
batches = [1, 8]
bound = "{bound}"

{services}
"""


_SCREEN = "Serving "  # what is told to a person


def service(name: str, function: str, more: str = "") -> str:
    """Another ``[[service]]`` that adds."""
    lines = CONFIG.partition("[[service]]")[2].format(bound="60s", services=more)
    lines = lines.replace('"add"', f'"{name}"').replace("eclip.server.demo_models:add", function)
    return f"[[service]]{lines}"


class ServeProcess:
    """Its log is read from a file, or, where ``stalled``, by nobody until ``read_log``."""

    def __init__(
        self,
        folder: Path,
        fronts: int = 1,
        server: str = "",
        services: str = "",
        *,
        stalled: bool = False,
    ) -> None:
        self.file = folder / "models.toml"
        self._settings = {"fronts": fronts, "server": server, "services": services}
        self.write("5s")
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "eclip", "serve", str(self.file)],
                stdout=log,
                stderr=subprocess.PIPE if stalled else log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "500"},
            )
        assert until(lambda: "Serving" in self.said or self.process.poll() is not None)
        found = re.search(r"https?://127\.0\.0\.1:(\d+)", self.said)
        assert found, self.said
        self.port = int(found[1])

    @property
    def said(self) -> str:
        return self.log.read_text()

    def write(self, bound: str) -> None:
        self.file.write_text(CONFIG.format(bound=bound, **self._settings))

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def lines(self) -> list[dict[str, Any]]:
        """Of the log: each of them is an object."""
        said = self.said.splitlines()
        return [json.loads(line) for line in said if not line.startswith(_SCREEN)]

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")

    def add(self, number: int, model: str = "add") -> tuple[int, dict[str, Any]]:
        """Ask a model for a sum."""
        tensors = [
            {"name": name, "datatype": "INT32", "shape": [1, 4], "data": [number] * 4}
            for name in ("a", "b")
        ]
        return self.post(f"/v2/models/{model}/infer", {"inputs": tensors})

    def children(self) -> dict[int, str]:
        """What it runs: pids, and which part of it they are."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    line = (stat.parent / "cmdline").read_text()
                    part = re.search(r"eclip\.server\.([\w.]+)", line)
                    found[int(stat.parent.name)] = part[1] if part else line
        return found

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)
