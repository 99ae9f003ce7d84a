"""Processes on so many SMs, under MPS and without, with a change while they run.

    PYTHONPATH=.:src:.gpu-deps python3 lab/gpu/sms.py FOLDER     (`make native` first)

Two copies of an eager PyTorch program that multiplies matrices run alone, beside each other, beside
each other on SMs of their own (`eclip exec --sms`), and while one shrinks and the other grows. Each
prints how many steps it has done. A row for each scene is in FOLDER/sms.jsonl at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.kept import read_rows
from lab.support.mps import gpu_uuid
from lab.support.tables import print_table

from eclip.cuda.processes.mps import PIPES, MpsDaemon

RUN_S = 3.0
PROGRAM = """
import sys, time, torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
b = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
for _ in range(20):
    a @ b
torch.cuda.synchronize()
print("begin", flush=True)
steps = 0
while True:
    for _ in range(5):
        c = torch.relu(a @ b)
    torch.cuda.synchronize()
    steps += 5
    print(steps, time.monotonic(), flush=True)
"""


class Program:
    """A copy of the program, maybe with a cap; its lines are read when they are asked for."""

    def __init__(self, folder: Path, name: str, sms: int | None, environment: dict[str, str]):
        exec_words = ["-m", "eclip", "exec", "--sms", str(sms), "--", sys.executable]
        words = [*(exec_words if sms else []), "-c", PROGRAM]
        self._said = folder / f"{name}.err"
        self.out = folder / f"{name}.out"
        with self.out.open("w") as out, self._said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, *words], env=environment, stdout=out, stderr=said
            )

    def await_begin(self) -> None:
        until = time.monotonic() + 60
        while "begin" not in self.out.read_text():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the program did not begin: {self._said.read_text()[-2000:]}")
            time.sleep(0.05)

    def rate(self, begin_s: float, end_s: float) -> float:
        """Steps a second between two moments."""
        lines = [line.split() for line in self.out.read_text().splitlines()[1:]]
        points = [(int(line[0]), float(line[1])) for line in lines if len(line) == 2]
        inside = [point for point in points if begin_s <= point[1] <= end_s]
        if len(inside) < 2:
            return 0.0
        return (inside[-1][0] - inside[0][0]) / (inside[-1][1] - inside[0][1])

    @property
    def said(self) -> list[str]:
        return self._said.read_text().splitlines()

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()


def scenes(folder: Path, mps: bool, environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    where = "MPS" if mps else "time-sliced"
    alone = {}
    for sms in (None, 64, 32):
        program = Program(folder, f"{where}-alone-{sms}", sms, environment)
        try:
            program.await_begin()
            begin = time.monotonic()
            time.sleep(RUN_S / 2)
            alone[sms] = program.rate(begin, time.monotonic())
        finally:
            program.stop()
        yield {"where": where, "scene": f"alone, {sms or 132} SMs", "rates": [alone[sms]],
               "of_alone": [alone[sms] / alone[None]], "said": program.said}  # fmt: skip
    for caps in ((None, None), (64, 64)):
        with two(folder, where, caps, environment) as programs:
            begin = time.monotonic()
            time.sleep(RUN_S)
            yield row(where, f"two, {caps[0] or 'no cap'}", programs, begin, alone[None])
            if caps[0] is None:
                continue
            for which, sms in ((0, 32), (1, 96)):
                began = time.monotonic()
                pid = str(programs[which].process.pid)
                done = subprocess.run(
                    [sys.executable, "-m", "eclip", "exec", "--pid", pid, "--sms", str(sms)],
                    env=environment, capture_output=True, text=True, timeout=60,
                )  # fmt: skip
                yield {"where": where, "scene": f"change {which} to {sms}", "rates": [],
                       "of_alone": [], "seconds": time.monotonic() - began,
                       "said": (done.stdout + done.stderr).splitlines()}  # fmt: skip
            begin = time.monotonic()
            time.sleep(RUN_S)
            yield row(where, "two, 32 and 96", programs, begin, alone[None])


@contextlib.contextmanager
def two(
    folder: Path, where: str, caps: Sequence[int | None], environment: dict[str, str]
) -> Iterator[list[Program]]:
    programs = [
        Program(folder, f"{where}-{caps[0]}-{index}", cap, environment)
        for index, cap in enumerate(caps)
    ]
    try:
        for program in programs:
            program.await_begin()
        yield programs
    finally:
        for program in programs:
            program.stop()


def row(
    where: str, scene: str, programs: Sequence[Program], begin_s: float, alone: float
) -> dict[str, Any]:
    rates = [program.rate(begin_s, time.monotonic()) for program in programs]
    return {
        "where": where,
        "scene": scene,
        "rates": rates,
        "of_alone": [rate / alone for rate in rates],
        "said": [line for program in programs for line in program.said],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    uuid = gpu_uuid()
    kept = folder / "sms.jsonl"
    for mps in (True, False):
        with contextlib.ExitStack() as stack, kept.open("a") as file:
            environment = dict(os.environ)
            if mps:
                daemon = stack.enter_context(MpsDaemon(uuid))
                environment |= {PIPES: str(daemon.pipes), "CUDA_VISIBLE_DEVICES": uuid}
            outputs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for scene in scenes(outputs, mps, environment):
                file.write(json.dumps(scene) + "\n")
                file.flush()
    lines = [
        [
            f"{one['where']}: {one['scene']}",
            ", ".join(f"{part:.2f}" for part in one["of_alone"]),
            " / ".join(one["said"])[:160],
        ]
        for one in read_rows(kept)
    ]
    print_table("Programs on so many SMs", ["scene", "rate ÷ alone on all", "said"], lines)


if __name__ == "__main__":
    main()
