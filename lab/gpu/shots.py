"""Claims of docs/results/programs.md about programs that die: whoever is left goes on.

    PYTHONPATH=.:src:.gpu-deps python3 lab/gpu/shots.py FOLDER [--rounds 20] [--minutes 9]

A service that is always busy and a background program share a board, as in scene b of programs.py.
In every round one of them, by chance, is stopped or killed (-9) at a random moment, and the board
tells when the other goes on. A program that was killed is replaced by one that has waited: all
start at once. A round is in FOLDER as soon as it is done; the next call goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.kept import Row, add_rows, read_rows
from lab.support.programs import ECLIP, WAYS, Program, start
from lab.support.tables import print_table

from eclip.gpu.board_view import look

APPS = Path(__file__).with_name("apps")
ROLES = {"service": ("service.py", "graph", "bert"), "background": ("infer.py", "vgg19", "32")}
SHOTS = (signal.SIGKILL, signal.SIGSTOP)
RESULTS = "shots.jsonl"
REQUESTS = 1_000_000  # more than a service has time for
GOAL_MS = 200.0
PATIENCE_S = 20.0
SEED = 1


class Stage:
    """The programs that run, and those that wait to replace them."""

    def __init__(self, folder: Path, apps: Path, stack: contextlib.ExitStack) -> None:
        self.board, self._folder, self._apps, self._stack = folder / "board", folder, apps, stack
        self._waiting: dict[str, list[Program]] = {role: [] for role in ROLES}
        self.running: dict[str, Program] = {}

    def start(self, role: str) -> None:
        (way,) = (way for way in WAYS if way.name == ECLIP)
        file, *more = ROLES[role]
        app = [str(self._apps / file), *more]
        program = start(app, way, role, board=self.board, pipes=None, folder=self._folder)
        self._stack.callback(program.close)
        self._waiting[role].append(program)

    def wait(self) -> None:
        for programs in self._waiting.values():
            for program in programs:
                program.wait()

    def put_on(self, role: str) -> None:
        """The next one that waits begins."""
        program = self.running[role] = self._waiting[role].pop(0)
        if role == "service":
            arrivals = self._folder / "arrivals.npy"
            np.save(arrivals, np.zeros(REQUESTS, dtype=np.int64))
            program.order("serve", str(arrivals), str(self._folder / "found"))
        else:
            program.order("run")

    def progress(self, role: str) -> int:
        """What it has done, as the board counts it: stretches that it launched."""
        pid = self.running[role].pid
        if not self.board.exists():  # nobody has launched yet
            return 0
        return sum(one.stretches for one in look(self.board).workers if one.pid == pid)

    def goes_on_ms(self, role: str, since_ns: int) -> float | None:
        """From then on, until it does more than what was under way; None: it does not."""
        wanted = self.progress(role) + 2
        if not _until(lambda: self.progress(role) >= wanted):
            return None
        return (time.monotonic_ns() - since_ns) / 1e6


def _until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.0005)
    return found


def shoot(stage: Stage, victim: str, shot: signal.Signals, after_s: float) -> float | None:
    """How long the other one stood still."""
    (other,) = ROLES.keys() - {victim}
    if stage.goes_on_ms("service", time.monotonic_ns()) is None:
        raise RuntimeError("the service does not serve")
    time.sleep(after_s)
    shot_ns = time.monotonic_ns()
    stage.running[victim].send(shot)
    stood_ms = stage.goes_on_ms(other, shot_ns)
    if shot == signal.SIGSTOP:
        stage.running[victim].send(signal.SIGCONT)
    else:
        stage.put_on(victim)
    return stood_ms


def drawn(rounds: int) -> list[tuple[str, signal.Signals, float]]:
    """Victim, shot and moment of every round, as many of each kind."""
    dice = random.Random(SEED)
    kinds = [(victim, shot) for victim in ROLES for shot in SHOTS]
    every = [kinds[number % len(kinds)] for number in range(rounds)]
    dice.shuffle(every)
    return [(victim, shot, dice.uniform(0.05, 0.5)) for victim, shot in every]


def run(folder: Path, rounds: int, until_s: float, apps: Path = APPS) -> None:
    results = folder / RESULTS
    left = drawn(rounds)[len(read_rows(results)) :]
    if not left:
        return
    with contextlib.ExitStack() as stack:
        stage = Stage(folder, apps, stack)
        for role in ROLES:
            stage.start(role)
        for victim, shot, _ in left:
            if shot == signal.SIGKILL:
                stage.start(victim)
        stage.wait()
        for role in ROLES:
            stage.put_on(role)
        for victim, shot, after_s in left:
            if time.monotonic() + PATIENCE_S > until_s:
                break
            stood_ms = shoot(stage, victim, shot, after_s)
            add_rows(results, [{"victim": victim, "shot": shot.name, "stood_ms": stood_ms}])


def print_rows(rows: Sequence[Row]) -> None:
    lines = []
    for victim, shot in dict.fromkeys((row["victim"], row["shot"]) for row in rows):
        found = [row["stood_ms"] for row in rows if (row["victim"], row["shot"]) == (victim, shot)]
        stood = [float("inf") if one is None else one for one in found]
        late = sum(one > GOAL_MS for one in stood)
        numbers = [f"{np.median(stood):.1f}", f"{max(stood):.1f}", str(late)]
        lines.append([victim, shot, str(len(stood)), *numbers])
    columns = ["whom", "shot", "rounds", "the other goes on after ms, p50", "worst"]
    print_table("Programs that die", [*columns, f"beyond {GOAL_MS:g} ms"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=9.0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    try:
        run(given.folder, given.rounds, time.monotonic() + 60 * given.minutes)
    finally:
        print_rows(read_rows(given.folder / RESULTS))


if __name__ == "__main__":
    main()
