#!/usr/bin/env python3
"""Run the tests that need a GPU: tools/gpu_test.py [PART]

Part 1 runs several files beside each other. Tests with the mark ``alone`` time something, count the
device's memory or look for other processes: parts 2 and 3 run them, one file at a time. PART may
also be a file: ``transparent`` is all of tests/gpu/test_transparent.py, alone. Each file has a
pytest process of its own, so that one which is aborted does not hide the others; what it said is
printed when it ends. A process that hangs is stopped at its time limit; it prints where it was.
No virtual environment and no network: the host's own Python, with what .gpu-deps brings along.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GPU = ROOT / "tests" / "gpu"
PARTS = ("1", "2", "3")
AT_ONCE = 5  # with seven, driver 580 on an H200 has no channels left for another context
# Files of part 1 that take long on an H200 go first, in so many pieces (docs/results/tests.md).
PIECES = {
    "test_closing.py": 4,
    "test_serving.py": 1,
    "test_transparent.py": 1,
    "test_execution.py": 2,
}
# Part 2; part 3 has all other tests that run alone. Each should end within eight minutes.
SECOND = ("test_api.py", "test_processes.py", "test_compare.py", "test_execution.py")
LIMIT_S = 300.0  # of a pytest process; the longest one took 179 s on an H200
LEAVE_S = 10.0  # for a process that is interrupted to say where it was, and to end what it started
NOTHING_TO_RUN = 5  # pytest's exit status where all tests were left out

Job = list[str]  # pytest's arguments


def jobs_of(part: str) -> list[Job]:
    """The pytest runs of a part, or the one of a file."""
    if part not in PARTS:
        return [[str(GPU / f"test_{part}.py"), "-s"]]
    files = {path: path.read_text() for path in sorted(GPU.glob("test_*.py"))}
    if part == "1":
        mixed = [
            path for path, text in files.items() if "pytestmark = pytest.mark.alone" not in text
        ]
        mixed.sort(key=lambda path: -PIECES.get(path.name, 0))
        return [
            [str(path), "-m", "not alone", "--piece", f"{piece}/{pieces}"]
            for path in mixed
            for pieces in [PIECES.get(path.name, 1)]
            for piece in range(1, pieces + 1)
        ]
    alone = [path for path, text in files.items() if "mark.alone" in text]
    jobs = [[str(path), "-m", "alone"] for path in alone if (path.name in SECOND) == (part == "2")]
    return jobs if part == "2" else [*jobs, [str(ROOT / "tests" / "conformance")]]


def limit_of(job: Job) -> float:
    """Seconds that it may take: a file as a whole as long as all its pieces."""
    return LIMIT_S * (1 if "--piece" in job else PIECES.get(Path(job[0]).name, 1))


def ends_in_time(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for its end. At the limit it is interrupted, as by Ctrl-C; a process that waits for the
    driver does not hear that and is aborted, whereupon pytest prints where its threads were."""
    for patience_s, number in ((limit_s, signal.SIGINT), (LEAVE_S, signal.SIGABRT)):
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        else:
            return number == signal.SIGINT
    process.wait()
    return False


def environment() -> dict[str, str]:
    folders = ("src", "tests/support", "tests/fakes", "tests/oracles", ".gpu-deps")
    path = [str(ROOT / folder) for folder in folders]
    return {
        **os.environ,
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "PYTHONPATH": os.pathsep.join(filter(None, [*path, os.environ.get("PYTHONPATH")])),
    }


def missing() -> str:
    """What this host lacks: without it, pytest would leave every test out and be content."""
    ask = [sys.executable, "-c", "from gpu_host import missing; print(missing() or '')"]
    asked = subprocess.run(ask, env=environment(), capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        return asked.stdout.strip()
    return (asked.stderr.strip().splitlines() or ["the host's Python does not start"])[-1]


def run(job: Job) -> tuple[bool, str]:
    """Whether all went well, and a line that says so; the output is printed at the end."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-ra", "--durations=5", "-p", "no:cacheprovider"),
        *("-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default"),
    ]
    name = " ".join([Path(job[0]).name, *job[1:]])
    print(f"begins: {name}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [*command, *job], cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT
        )
        in_time = ends_in_time(process, limit_of(job))
        output.seek(0)
        said = output.read()
    well = in_time and process.returncode in (0, NOTHING_TO_RUN)
    how = "ends" if well else f"FAILED with status {process.returncode}"
    last = (said.strip().splitlines() or ["it said nothing"])[-1].strip("= ")
    if not in_time:
        how, last = f"STOPPED at its limit of {limit_of(job):.0f} s", "it prints above where it was"
    line = f"{how}: {name}, {time.monotonic() - began:.0f} s: {last}"
    print(f"\n{said}\n{line}\n", flush=True)
    return well, line


def main(words: list[str]) -> int:
    named = [path.stem.removeprefix("test_") for path in GPU.glob("test_*.py")]
    if len(words) > 1 or not set(words) <= {*PARTS, *named}:
        sys.exit(f"gpu-test: name a part (1, 2, 3), a file ({', '.join(sorted(named))}), or none")
    if lacks := missing():
        print(f"gpu-test: {lacks}; put missing packages into .gpu-deps", file=sys.stderr)
        return 2
    results: list[tuple[bool, str]] = []
    for part in words or PARTS:
        began = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE if part == "1" else 1) as pool:
            results += pool.map(run, jobs_of(part))
        results.append((True, f"part {part}: {(time.monotonic() - began) / 60:.1f} minutes"))
    print(*(line for _, line in results), sep="\n")
    return int(not all(well for well, _ in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
