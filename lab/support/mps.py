"""Servers under MPS, as a user without eclip would run them: one process a model, one daemon.

eclip refuses a second server on a GPU unless all are on one board. So these are, on a board of
their own. Their plans are plain streams, which have no joints: each says on the board when it is
busy, and nobody gives way.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from unittest import mock

from eclip.cuda.processes.mps import CONTROL, PIPES, PRIORITY, SHARE, MpsDaemon
from eclip.gpu.board import VARIABLE

_ANSWER_S = 10.0


def gpu_uuid() -> str:
    """Of the first GPU. Asked of a program: a context of our own would take turns with MPS."""
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()[0]


@contextlib.contextmanager
def under_mps(uuid: str) -> Iterator[MpsDaemon]:
    """Servers that are started in the block are the daemon's clients."""
    with MpsDaemon(uuid) as daemon, tempfile.TemporaryDirectory(prefix="eclip-board-") as board:
        variables = {
            PIPES: str(daemon.pipes),
            "CUDA_VISIBLE_DEVICES": uuid,
            VARIABLE: board,
            # All build their models at once: with threads for all cores each, they would thrash.
            "OMP_NUM_THREADS": "1",
        }
        with mock.patch.dict(os.environ, variables):
            for variable in (SHARE, PRIORITY):
                os.environ.pop(variable, None)
            yield daemon


def client_pids(daemon: MpsDaemon) -> set[int]:
    """A process that does not reach its daemon runs on without MPS, so it is worth a look."""
    servers = _ask(daemon, "get_server_list")
    return {pid for server in servers for pid in _ask(daemon, f"get_client_list {server}")}


def _ask(daemon: MpsDaemon, question: str) -> list[int]:
    """The numbers in the daemon's answer; none, if it gives none."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=f"{question}\n",
            capture_output=True,
            text=True,
            env=os.environ | {PIPES: str(daemon.pipes)},
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return []
    return [int(word) for word in done.stdout.split() if word.isdigit()]
