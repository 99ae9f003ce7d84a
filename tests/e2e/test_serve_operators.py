"""``eclip serve`` for who runs it: its log, what hangs, and access that changes."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import os
import select
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from serve_process import ServeProcess, service
from waiting import until

Start = Callable[..., ServeProcess]
BROKEN = service("broken", "serving_functions:broken")
HANGS = service("hangs", "serving_functions:hang")
WRONG = service("wrong", "serving_functions:wrong")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[ServeProcess] = []

    def start(*given: Any, **settings: Any) -> ServeProcess:
        servers.append(ServeProcess(tmp_path, *given, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.communicate()


def moment(line: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(line["time"]).timestamp()


def found(server: ServeProcess, event: str) -> dict[str, Any] | None:
    return next((line for line in server.lines() if line["event"] == event), None)


# --- The log ----------------------------------------------------------------------------------


def test_a_log_that_nobody_reads_stops_nothing(start: Start) -> None:
    server = start(services=BROKEN, stalled=True)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.add(13, "broken")[0], range(300)))
    assert set(answers) == {500}
    for _ in range(2000):  # as many as stopped all fronts once
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"nonsense\r\n\r\n")
    assert server.get("/v2/health/live")[0] == 200
    assert b"eclip_requests_refused_total" in server.get("/metrics")[1]
    assert server.add(7)[1]["outputs"][0]["data"] == [14] * 4

    stream = server.process.stderr
    assert stream is not None
    told = b""
    while not told.endswith(b"}\n") or select.select([stream], [], [], 0.2)[0]:
        told += os.read(stream.fileno(), 65536)
    lines = [json.loads(line) for line in told.splitlines()]  # each of them is an object
    assert {"ready", "model broken failed"} <= {line["event"] for line in lines}
    server.add(13, "broken")
    assert select.select([stream], [], [], 60)[0]
    lost = json.loads(os.read(stream.fileno(), 65536).splitlines()[0])
    assert lost["event"] == "log lines were lost: nobody read them" and lost["lost"] > 0


def test_a_fault_has_a_number_for_the_client_and_its_text_in_the_log(start: Start) -> None:
    server = start(services=BROKEN)
    status, answer = server.add(13, "broken")
    assert status == 500 and "luck" not in answer["error"]
    number = answer["error"].split("fault ")[1].split()[0]
    assert until(lambda: number in server.said, patience_s=60)
    (line,) = [line for line in server.lines() if line.get("fault") == number]
    assert line["process"] == "device" and line["event"] == "model broken failed"
    assert "ValueError: 13 brings\nbad luck" in line["error"] and "Traceback" in line["error"]
    assert server.end() == 0


def test_a_model_that_is_wrong_leaves_the_server_ready_unless_it_is_strict(start: Start) -> None:
    assert start(services=WRONG).get("/v2/health/ready")[0] == 200


def test_a_strict_server_is_not_ready_with_a_model_that_is_wrong(start: Start) -> None:
    server = start(server="strict_readiness = true", services=WRONG)
    assert server.get("/v2/health/ready")[0] == 400
    assert server.add(1)[0] == 200


# --- What hangs -------------------------------------------------------------------------------


def test_a_front_that_hangs_is_replaced_within_five_seconds(start: Start) -> None:
    server = start(fronts=2)
    hanging = next(pid for pid, part in server.children().items() if part == "front.process")
    os.kill(hanging, signal.SIGSTOP)
    stopped = time.time()
    assert until(lambda: found(server, "front ended") is not None, patience_s=60)
    line = found(server, "front does not go on; it is ended")
    assert line is not None and line["pid"] == hanging
    # The server looks twice a second; a busy machine may let it look later.
    assert moment(line) - stopped < 10.0
    assert until(lambda: list(server.children().values()).count("front.process") == 2)
    for _ in range(20):
        assert server.add(3)[0] == 200
    assert server.end() == 0


def test_what_hangs_keeps_no_change_and_no_end_waiting(start: Start) -> None:
    server = start(services=HANGS + service("other", "eclip.server.demo_models:add"))
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(server.add(13, "hangs")[0]))
    asking.start()
    assert until(lambda: b'{model_name="hangs"} 1.0' in server.get("/metrics")[1])
    assert server.post("/v2/repository/models/other/unload", {})[0] == 200
    assert server.add(2)[0] == 200
    assert "hangs for" not in server.said  # the device process has not given it up yet
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert time.monotonic() - begin < 15.0  # one second of grace, one for what is open
    asking.join()
    assert answers == [503]


# --- Access that changes ----------------------------------------------------------------------


def certificate(folder: Path, name: str) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", folder / "key.pem", "-out", folder / "certificate.pem"],
        check=True, capture_output=True,
    )  # fmt: skip


def shown_certificate(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port))


@pytest.mark.parametrize("watch", [False, True])
def test_token_and_certificate_change_while_it_serves(
    start: Start, tmp_path: Path, watch: bool
) -> None:
    certificate(tmp_path, "first")
    first = (tmp_path / "certificate.pem").read_text()
    (tmp_path / "token").write_text("old")
    server = start(
        server=f'token_file = "{tmp_path}/token"\ntls_cert = "{tmp_path}/certificate.pem"\n'
        f'tls_key = "{tmp_path}/key.pem"\nwatch = {str(watch).lower()}'
    )

    def status(token: str) -> int:
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=context)
        with contextlib.closing(connection):
            connection.request("GET", "/v2", headers={"Authorization": f"Bearer {token}"})
            return connection.getresponse().status

    (line,) = [line for line in server.lines() if line["event"] == "ready"]
    assert (status("old"), status("new")) == (200, 401)
    assert shown_certificate(server.port) == first
    (tmp_path / "token").write_text("")  # a file that is just being written
    server.process.send_signal(signal.SIGHUP)
    assert until(lambda: "token_file:" in server.said, patience_s=60)
    assert status("old") == 200

    certificate(tmp_path, "second")
    second = (tmp_path / "certificate.pem").read_text()
    (tmp_path / "token").write_text("new")
    if not watch:
        server.process.send_signal(signal.SIGHUP)
    assert until(lambda: "are those of the files now" in server.said, patience_s=60)
    assert (status("old"), status("new")) == (401, 200)
    assert shown_certificate(server.port) == second != first
    credentials = grpc.ssl_channel_credentials(second.encode())
    with grpc.secure_channel(f"127.0.0.1:{line['grpc']}", credentials) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=60) == b"\x08\x01"
    assert server.end() == 0
