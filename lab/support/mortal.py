"""A service or background in a process of its own, to be stopped and killed (deaths.py).

    python mortal.py ROLE MODEL DEVICE

It opens a session, which takes a row of the board that ECLIP_BOARD names, and prints its process
id. Then it reads orders: ``run MS`` begins requests, back to back or one every so many ms, and
``halt`` ends them and prints arrival and end of each, in ns of CLOCK_MONOTONIC. Everything that
needs a GPU is imported when it is asked for; ``sim`` imitates a session on the real board.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from eclip.core.decide import decide
from eclip.core.mix import parse_mix
from eclip.core.plan import Plan, unpartitioned
from eclip.core.profile import Profile
from eclip.core.rules import BUSY_SINCE, IDLE, YIELD, rules_of
from eclip.gpu.board import open_board
from eclip.planner.case import Case, find_calibration, find_profiles, find_topology
from eclip.planner.joints import JointRules, give_way, promise_of

BOUND_MS = 1000.0
PART_S = 0.0002  # of an imitated request
PARTS = 5


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def plan_for(role: str, case: Case) -> Plan:
    """One worker: a service with a wide bound, or background that yields to any service."""
    profiles = case.profiles
    plain = unpartitioned(case.topology, profiles, case.mix)
    if role == "service":
        promise = promise_of(case.mix.workers[0], profiles[0], 0.0)
        return give_way(plain, profiles, {0: promise}, {})
    return give_way(plain, profiles, {}, {0: JointRules(depth=2)})


def case_for(role: str, model: str, profiles: tuple[Profile, ...] | None = None) -> Case:
    tier = f"1rps/{BOUND_MS:g}ms" if role == "service" else "background"
    topology = find_topology("h200")
    calibration = find_calibration(None, topology)
    mix = parse_mix(f"{model}@{tier}")
    if profiles is None:
        profiles = find_profiles(mix, topology, calibration, ())
    return Case(mix, topology, calibration, profiles)


def open_request(role: str, model: str, device: str) -> Callable[[], None]:
    """What serves one request, and waits for it."""
    if device == "sim":
        return imitated(role, model)
    from lab.gpu.services import open_bench
    from lab.support.workshop import KeptStand

    bench = open_bench(Path(os.environ["MORTAL_FOLDER"]), device)
    case = case_for(role, model, (bench.profile(model, 0),))
    session = KeptStand(case, bench.device, bench.made).open(plan_for(role, case))
    session.request(0)  # type: ignore[attr-defined]
    return lambda: session.request(0)  # type: ignore[attr-defined]


def imitated(role: str, model: str) -> Callable[[], None]:
    """A session that sleeps where a GPU would work; what it says and sees on the board is real."""
    plan = plan_for(role, case_for(role, model))
    board = open_board(Path(os.environ["ECLIP_BOARD"]))
    (row,) = board.claim_all(plan.workers)
    columns = rules_of(plan, 0)[:3]
    peers = np.array([row], dtype=np.int64)

    def request() -> None:
        board.words[row, BUSY_SINCE] = now_ns()
        for _ in range(PARTS):
            while (
                columns[0].size and decide(board.words, row, peers, *columns, 0, now_ns()) == YIELD
            ):
                time.sleep(2e-5)
            time.sleep(PART_S)
        board.words[row, BUSY_SINCE] = IDLE

    request()
    return request


class Server:
    def __init__(self, request: Callable[[], None]) -> None:
        self._request = request
        self._halt = threading.Event()
        self._served: list[tuple[int, int]] = []
        self._thread: threading.Thread | None = None

    def run(self, every_ms: float) -> None:
        """0: back to back."""
        self._halt.clear()
        self._served = []
        self._thread = threading.Thread(target=self._serve, args=(round(1e6 * every_ms),))
        self._thread.start()

    def _serve(self, every_ns: int) -> None:
        arrival = now_ns()
        while not self._halt.is_set():
            if every_ns == 0:
                arrival = now_ns()
            else:
                arrival += every_ns
                time.sleep(max(0, arrival - now_ns()) / 1e9)
            self._request()
            self._served.append((arrival, now_ns()))

    def halt(self) -> list[tuple[int, int]]:
        self._halt.set()
        if self._thread is not None:
            self._thread.join()
        return self._served


def main(role: str, model: str, device: str) -> None:
    server = Server(open_request(role, model, device))
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        order, _, number = line.strip().partition(" ")
        if order == "run":
            server.run(float(number))
            print("{}", flush=True)
        elif order == "halt":
            print(json.dumps(np.array(server.halt()).reshape(-1, 2).tolist()), flush=True)
    server.halt()
    os._exit(0)  # without waiting for a GPU's own threads


if __name__ == "__main__":
    main(*sys.argv[1:])
