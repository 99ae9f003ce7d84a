#!/usr/bin/env python3
"""Run the tests that need a GPU, part by part: tools/gpu_test.py [PART]

Each part is a pytest process of its own, so that one which is aborted does not hide the others. No
virtual environment and no network: the host's own Python, with what .gpu-deps brings along.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GPU = ROOT / "tests" / "gpu"
# By what takes long on an H200 (docs/results.md); a part should end within eight minutes. The last
# part is all the others.
PARTS = (
    ("test_execution.py", "test_choice.py", "test_tracer.py"),
    (
        *("test_varout.py", "test_varout_operations.py", "test_compiled.py", "test_colocate.py"),
        *("test_footprint.py", "test_lanes.py", "test_errors.py"),
    ),
    ("test_processes.py", "test_compare.py", "test_transparent.py", "test_api.py"),
    (),
)
NAMED = {name for part in PARTS for name in part}


def targets_of(part: int) -> list[str]:
    """What pytest is to run of the part with this number, from 1."""
    named = PARTS[part - 1]
    if named:
        return [str(GPU / name) for name in named]
    others = sorted(path for path in GPU.glob("test_*.py") if path.name not in NAMED)
    return [*map(str, others), str(ROOT / "tests" / "conformance")]


def run(arguments: list[str]) -> tuple[int, str]:
    """The exit status and the last line of pytest, whose output is passed on as it comes."""
    path = [str(ROOT / folder) for folder in ("src", "tests/support", "tests/oracles", ".gpu-deps")]
    environment = {
        **os.environ,
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "PYTHONPATH": os.pathsep.join(filter(None, [*path, os.environ.get("PYTHONPATH")])),
    }
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default"),
    ]
    last = "it said nothing"
    with subprocess.Popen(
        [*command, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            last = line.strip() or last
    return process.returncode, last


def main(words: list[str]) -> int:
    if words == ["transparent"]:
        return run(["-s", str(GPU / "test_transparent.py")])[0]
    numbers = range(1, len(PARTS) + 1)
    wanted = [number for number in numbers if not words or str(number) in words]
    if not wanted or len(words) > 1:
        sys.exit(
            f"gpu-test: the parts are {', '.join(map(str, numbers))}; name one, or none for all"
        )
    lines, failed = [], False
    for number in wanted:
        began = time.monotonic()
        status, last = run(targets_of(number))
        failed = failed or status != 0
        how = "passed" if status == 0 else f"FAILED with status {status}"
        minutes = (time.monotonic() - began) / 60
        lines.append(f"part {number} of {len(PARTS)} {how} in {minutes:.1f} minutes: {last}")
        print(lines[-1], flush=True)
    if len(lines) > 1:
        print("", *lines, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
