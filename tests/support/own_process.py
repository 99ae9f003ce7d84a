"""A test in a process of its own: when it aborts, one test has failed and the others go on.

A test marked ``own_process`` is run by a child, with pytest, the same fixtures and the same
parameters. Its process may end in any way, at its exit too; all but a clean end is a failure that
shows what the child said last.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

MARKER = "own_process"
INSIDE = "ECLIP_TEST_OWN_PROCESS"  # set in the child
_SECONDS = 240.0  # less than a test may take, so that the child is ended and heard
_LINES = 80


def is_inside() -> bool:
    return INSIDE in os.environ


def failure_of(root: Path, test: str, seconds: float = _SECONDS) -> str | None:
    """Run one test, by its node id, in a child; how that ended if not well."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider",
        "-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default", test,
    ]  # fmt: skip
    environment = {
        **os.environ,
        INSIDE: "1",
        "PYTHONFAULTHANDLER": "1",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
    }
    child = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        said, _ = child.communicate(timeout=seconds)
        how = _how(child.returncode)
    except subprocess.TimeoutExpired:
        child.kill()
        said, _ = child.communicate()
        how = f"did not end within {seconds:g} s"
    if how is None and " passed" in said:
        return None
    tail = "\n".join(said.splitlines()[-_LINES:])
    return f"{test} {how or 'ran nothing'} in a process of its own:\n{tail}"


def _how(status: int) -> str | None:
    if status == 0:
        return None
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"failed (exit status {status})"
