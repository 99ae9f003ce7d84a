"""HTTP clients that people have, in their default settings: each asks three times."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.grpc

from numpy_server import NumpyServer

CLIENTS = Path(__file__).parents[1] / "support/clients"
BODY = json.dumps(
    {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 3], "data": [1.5, 2.5, -1.0]}]}
)
long = pytest.mark.long


def program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; Debian's package {package} has it")
    return found


def run(*command: str | Path, **environment: str) -> list[str]:
    """Its lines: for each request the status and the body."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def check(lines: list[str]) -> None:
    assert len(lines) == 3
    for line in lines:
        status, body = line.split(" ", 1)
        assert status == "200", line
        assert json.loads(body)["outputs"][0]["data"] == [1.5, 2.5, -1.0]


@pytest.fixture
def url(server: NumpyServer) -> str:
    return f"http://{server.http}/v2/models/identity_fp32/infer"


@long
def test_java(url: str) -> None:
    java = program("java", "default-jdk-headless")
    program("javac", "default-jdk-headless")  # java compiles a file that it is given
    check(run(java, CLIENTS / "Ask.java", url, BODY))


@long
def test_go(url: str, tmp_path: Path) -> None:
    go = program("go", "golang-go")
    built = tmp_path / "ask"
    run(go, "build", "-o", built, CLIENTS / "ask.go", GOCACHE=str(tmp_path / "cache"))
    check(run(built, url, BODY))


def test_node(url: str) -> None:
    check(run(program("node", "nodejs"), CLIENTS / "ask.mjs", url, BODY))


@pytest.mark.parametrize(
    "more", [["--http2"], ["-H", "Transfer-Encoding: chunked"], ["-H", "Expect: 100-continue"]]
)
def test_curl(url: str, more: list[str]) -> None:
    command = [program("curl", "curl"), "-sS", "-w", "\n", "-d", BODY, *more, url, url, url]
    check([f"200 {line}" for line in run(*command)])


def test_requests_with_a_generator(url: str) -> None:
    def parts() -> Iterator[bytes]:
        for begin in range(0, len(BODY), 7):
            yield BODY[begin : begin + 7].encode()

    with requests.Session() as session:
        answers = [session.post(url, data=parts(), timeout=60) for _ in range(3)]
    check([f"{answer.status_code} {answer.text}" for answer in answers])


def test_triton_with_the_longest_timeout_that_there_is(server: NumpyServer) -> None:
    """What clients in Java, Go and C++ send for none."""
    sample = np.array([[1.5]], np.float32)
    given = tritonclient.grpc.InferInput("IN", sample.shape, "FP32")
    given.set_data_from_numpy(sample)
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        for _ in range(3):
            answer = client.infer("identity_fp32", [given], timeout=2**63 - 1)
            np.testing.assert_array_equal(answer.as_numpy("OUT"), sample)
