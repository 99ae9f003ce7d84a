"""Builds libeclip, the stand-in driver and the programs on it, once for all test processes."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest

from native_build import Native

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def native() -> Native:
    for tool in ("g++", "make", "strip"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing, so libeclip cannot be built here")
    folder = ROOT / "native" / "build"
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes: the first builds
        built = subprocess.run(
            ["make", "-C", str(ROOT / "native"), "-j2", "tests", "library"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert built.returncode == 0, built.stderr[-4000:]
    assert "warning:" not in built.stderr, built.stderr[-4000:]
    return Native(folder)
