"""What a real Triton answers to the golden requests.

    python tests/support/triton_answers.py PYTHON

PYTHON has nvidia-pytriton 0.7 (Triton 2.51). The answers are written to
``tests/serving/triton_answers.json.gz``, with which eclip's answers are compared.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from golden_requests import REGION_BYTES, Answer, Asked, Asker, golden_requests

STORED = Path(__file__).parents[1] / "serving" / "triton_answers.json.gz"


def digest(asked: Asked) -> str:
    """Changes with the request; says whether a stored answer still belongs to it."""
    parts = (asked.method, asked.path, json.dumps(asked.headers), asked.body.hex())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def memory_objects() -> Iterator[str]:
    """What the keys of both begin with; they hold the same numbers every time."""
    key = f"golden{secrets.token_hex(8)}"
    paths = [Path("/dev/shm") / f"{key}{letter}" for letter in "ab"]
    numbers = np.arange(REGION_BYTES // 4, dtype=np.float32)
    for path in paths:
        path.write_bytes(numbers.tobytes())
    try:
        yield key
    finally:
        for path in paths:
            path.unlink()


def answers(http_address: str, grpc_address: str) -> dict[str, Answer]:
    with memory_objects() as key:
        asker = Asker(http_address, grpc_address, key)
        try:
            return {asked.name: asker.ask(asked) for asked in golden_requests()}
        finally:
            asker.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def triton_answers(python: str) -> dict[str, Answer]:
    http_port, grpc_port = free_port(), free_port()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [python, str(Path(__file__).with_name("triton_server.py")), str(http_port), str(grpc_port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        if process.stdout is None or not any(line == b"ready\n" for line in process.stdout):
            raise RuntimeError(f"{python} could not serve with pytriton")
        return answers(f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}")
    finally:
        process.communicate()


def store(found: dict[str, Answer]) -> None:
    digests = {asked.name: digest(asked) for asked in golden_requests()}
    lines = {name: {"request": digests[name], "answer": found[name]} for name in found}
    text = json.dumps(lines, indent=0, sort_keys=True)
    STORED.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    store(triton_answers(sys.argv[1]))
