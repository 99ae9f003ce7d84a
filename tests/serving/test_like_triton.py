"""Every answer equals that of a real Triton, field by field but for texts of errors.

The stored answers are made by ``tests/support/triton_answers.py``. What Triton blames on itself
(500, INTERNAL) although a client made the mistake is 400 or INVALID_ARGUMENT here.
"""

from __future__ import annotations

import gzip
import json
import os

import pytest

import triton_answers
from golden_requests import Answer, Asked, golden_requests
from numpy_server import NumpyServer

# What Triton's grpc server and HTTP server call a fault of their own, and whose it is.
_OURS = {"500": "400", "INTERNAL": "INVALID_ARGUMENT", "UNKNOWN": "INVALID_ARGUMENT"}
# Messages to those who look for fields of Triton that mean nothing here.
_GOOD = ("200", "OK")


def expected(asked: Asked, triton: Answer) -> Answer:
    if asked.instead is not None:
        assert triton["status"] != asked.instead, "it does not differ any more"
        return {"status": asked.instead}
    return triton | {"status": _OURS.get(triton["status"], triton["status"])}


def compare(server: NumpyServer, triton: dict[str, Answer]) -> None:
    ours = triton_answers.answers(server.http, server.grpc)
    wrong = {
        asked.name: {"eclip": ours[asked.name], "triton": triton[asked.name]}
        for asked in golden_requests()
        if ours[asked.name] != expected(asked, triton[asked.name])
    }
    assert wrong == {}


def test_answers_are_those_of_triton(server: NumpyServer) -> None:
    stored = json.loads(gzip.decompress(triton_answers.STORED.read_bytes()))
    requests = {asked.name: triton_answers.digest(asked) for asked in golden_requests()}
    assert {name: line["request"] for name, line in stored.items()} == requests, (
        "requests have changed: make their answers anew with tests/support/triton_answers.py"
    )
    assert len(stored) >= 300
    compare(server, {name: line["answer"] for name, line in stored.items()})


@pytest.mark.long
def test_answers_are_those_of_a_triton_that_runs(server: NumpyServer) -> None:
    python = os.environ.get("ECLIP_PYTRITON")
    if python is None:
        pytest.skip("ECLIP_PYTRITON names no Python with nvidia-pytriton 0.7")
    compare(server, triton_answers.triton_answers(python))
