"""Services in processes of their own, to be stopped and killed in the middle of a request.

    python loop_owner.py LIBRARY BOARD

It compiles the loop once. For every line that it reads it forks a process with a service that is
always busy, and prints that one's pid and row. A line that says ``submitted``: its requests are
submitted one by one.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eclip.core.plan import Promise
from eclip.gpu.board import open_board
from eclip.gpu.steps import LAUNCH, whole_request
from eclip.gpu.worker_loop import Place, WorkerLoop
from standin_desk import StandinDesk, served
from standin_gpu import StandinGpu, make_worker

SUBMITTED = "submitted"
BOUND_NS = 1000 * 1_000_000_000


def serve(gpu: StandinGpu, path: Path, submitted: bool) -> None:
    board = open_board(path)
    row = board.claim(Promise(bound_ns=BOUND_NS, request_ns=1, some_ns=0, none_ns=0))
    worker = make_worker(
        gpu,
        0,
        [[[(0, [2000])]] * 5],
        streams=[gpu.stream()],
        place=Place(board.words, row, np.array([row])),
        depth=2,
        bound_ns=BOUND_NS,
    )
    print(os.getpid(), row, flush=True)
    if not submitted:
        worker.loop.drive()
    with served([worker], slots=2) as desk:
        for slot in itertools.chain([0, 1], completed_slots(desk)):
            desk.submit(slot=slot)


def completed_slots(desk: StandinDesk) -> Iterator[int]:
    while True:
        for completion in desk.desk.poll(1.0):
            yield completion.slot


def main(library: str, path: str) -> None:
    gpu = StandinGpu(Path(library))
    WorkerLoop(gpu, whole_request((LAUNCH, 0, 0)))  # compiles
    children = []
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            serve(gpu, Path(path), line.strip() == SUBMITTED)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
