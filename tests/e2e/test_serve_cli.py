"""``eclip serve`` as a person runs it: a process, its signals, and clients over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http

import eclip
from eclip.server.config import read_config, with_settings
from serve_process import CONFIG, ServeProcess
from waiting import PATIENCE_S, until

# A server that is told to stop serves on for five seconds by default.
AT_ONCE = with_settings(read_config("alexnet:1"), {"grace_seconds": 0.0})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServeProcess]:
    process = ServeProcess(tmp_path, fronts=2)
    yield process
    process.process.kill()
    process.process.wait()


class Client(threading.Thread):
    """Asks one thing after another over one connection; connects again when it is closed."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.seen: Counter[str] = Counter()
        self.over = False
        self._port = port
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        number = 0
        while not self.over:
            number += 1
            try:
                self.seen[self._ask(connection, number)] += 1
            except (OSError, http.client.HTTPException):  # closed, or not there yet
                self.seen["no connection"] += 1
                connection.close()
                time.sleep(0.02)
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection, number: int) -> str:
        def tensor(name: str) -> dict[str, Any]:
            return {"name": name, "datatype": "INT32", "shape": [1, 4], "data": [number] * 4}

        body = json.dumps({"inputs": [tensor("a"), tensor("b")]})
        connection.request("POST", "/v2/models/add/infer", body)
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            return str(answer.status)
        right = json.loads(data)["outputs"][0]["data"] == [2 * number] * 4
        return "right" if right else "wrong"

    def end(self) -> Counter[str]:
        self.over = True
        self.join()
        return self.seen


def test_a_server_lives_through_its_signals_and_the_death_of_its_parts(
    server: ServeProcess,
) -> None:
    assert server.get("/v2/health/ready")[0] == 200
    assert b"eclip" in server.get("/")[1]
    clients = [Client(server.port) for _ in range(3)]
    assert until(lambda: all(client.seen["right"] > 5 for client in clients))

    server.write("nonsense")
    server.process.send_signal(signal.SIGHUP)
    assert until(lambda: "the configuration stays as it was" in server.said)
    server.write("4s")
    server.process.send_signal(signal.SIGHUP)
    assert until(lambda: '"generation":' in server.said and "deployed" in server.said)
    state = json.loads(server.get("/eclip/state")[1])
    assert state["devices"][0]["services"][0]["bound_ms"] == 4000

    front, _ = (pid for pid, part in server.children().items() if part == "front.process")
    os.kill(front, signal.SIGKILL)
    assert until(lambda: "front ended" in server.said)
    before = [client.seen["right"] for client in clients]
    assert until(
        lambda: all(c.seen["right"] > seen for c, seen in zip(clients, before, strict=True))
    )
    parts = server.children()

    server.process.send_signal(signal.SIGTERM)
    assert until(lambda: server.get("/v2/health/ready")[0] != 200)
    before = [client.seen["right"] for client in clients]
    assert until(  # not ready, but it serves on
        lambda: any(c.seen["right"] > seen for c, seen in zip(clients, before, strict=True))
    )
    assert server.process.wait(PATIENCE_S) == 0
    for client in clients:
        seen = client.end()
        assert set(seen) <= {"right", "no connection", "503"}, seen
    for pid in parts:
        assert not Path(f"/proc/{pid}").exists()


UNLOADED = '[[service]]\nname = "b"\nmodel = "brt"\nload = false\n'


@pytest.mark.parametrize(
    ("bound", "server", "more", "words"),
    [
        ("1us", "", "", "service 'add': bound 0.001ms cannot be kept"),
        ("5s", "", UNLOADED, "service 'b': inputs and outputs are needed"),
        ("5s", 'token_file = "nosuch"', "", "token_file: cannot read nosuch"),
        ("5s", 'tls_cert = "nosuch"\ntls_key = "nosuch"', "", "tls_cert: cannot read nosuch"),
        ("5s", f'tls_cert = "{__file__}"\ntls_key = "{__file__}"', "", "are no certificate and"),
        ("5s", 'host = "no.such.invalid"', "", "give another host or http_port"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    tmp_path: Path, bound: str, server: str, more: str, words: str
) -> None:
    file = tmp_path / "models.toml"
    text = CONFIG.format(bound=bound, fronts=1, server="", services="").replace(
        "[server]", f"[server]\n{server}"
    )
    file.write_text(text + more)
    done = subprocess.run(
        [sys.executable, "-m", "eclip", "serve", str(file)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("", 2, "service 'add': cannot find the function mine:add: "),
        ("def add(_): raise ValueError('one\\ntwo')", 2, "mine:add failed: ValueError, fault "),
        (
            "import os\ndef add(_): os._exit(3)",
            1,
            "eclip: the device process ended with status 3 while it loaded add; what it said",
        ),
    ],
)
def test_a_server_of_which_nothing_can_be_loaded_ends(
    tmp_path: Path, body: str, code: int, words: str
) -> None:
    (tmp_path / "mine.py").write_text(body)
    file = tmp_path / "models.toml"
    config = CONFIG.format(bound="5s", fronts=1, server="", services="")
    file.write_text(config.replace("eclip.server.demo_models:add", "mine:add"))
    done = subprocess.run(
        [sys.executable, "-m", "eclip", "serve", str(file)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == code
    assert "Serving" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("eclip: ") and words in last
    if "ValueError" in body:
        assert r"ValueError: one\ntwo" in done.stderr  # once, and not for clients


def test_a_server_whose_front_never_listens_ends(tmp_path: Path) -> None:
    """It does not start it again and again."""
    (tmp_path / "uvloop.py").write_text("raise RuntimeError('broken')\n")
    file = tmp_path / "models.toml"
    file.write_text(CONFIG.format(bound="5s", fronts=1, server="", services=""))
    done = subprocess.run(
        [sys.executable, "-m", "eclip", "serve", str(file)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "Serving" not in done.stdout
    *said, last = done.stderr.splitlines()
    assert '"line":"RuntimeError: broken"' in said[-1]
    assert "a front ended with status 1 before it listened" in last


def test_shared_memory_of_a_server_holds_regions_and_nothing_else() -> None:
    with eclip.serve(AT_ONCE, http_port=0, grpc_port=0) as server:
        client = tritonclient.http.InferenceServerClient(server.url.removeprefix("http://"))
        with contextlib.closing(client):
            assert client.get_system_shared_memory_status() == []
            client.unregister_system_shared_memory()  # all: the plan is not among them
            assert client.is_server_ready()


def test_the_api_serves_until_its_block_ends() -> None:
    with eclip.serve(AT_ONCE, http_port=0, grpc_port=0) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/v2/models/alexnet")
            told = json.loads(connection.getresponse().read())
    assert [output["name"] for output in told["outputs"]] == ["simulated_ms"]


def test_a_missing_package_is_said_at_once(tmp_path: Path) -> None:
    """Not by a front that cannot start, again and again."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class NoPackage:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'uvloop':\n"
        "            raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, NoPackage())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "eclip", "serve", "paper/3", "--http-port", "0"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 2
    assert "the package uvloop is missing; install" in ended.stderr and "[serve]" in ended.stderr
