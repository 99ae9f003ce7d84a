"""Tests that run in processes of their own: whatever they do there is told here."""

from __future__ import annotations

from pathlib import Path

import pytest

from own_process import failure_of

FILE = """
import atexit, os, sys, time, pytest

@pytest.mark.parametrize("how", ["well", "assert", "abort", "exit", "late", "sleep", "skip"])
def test_ends(how):
    if how == "abort":
        sys.stderr.write("terminate called after throwing an instance of 'c10::Error'\\\\n")
        os.abort()
    if how == "exit":
        os._exit(0)
    if how == "late":
        atexit.register(os.abort)
    if how == "sleep":
        time.sleep(60)
    if how == "skip":
        pytest.skip("no GPU")
    assert how != "assert"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_child.py").write_text(FILE)
    return tmp_path


def test_a_test_that_passes_is_no_failure(folder: Path) -> None:
    assert failure_of(folder, "test_child.py::test_ends[well]") is None


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("assert", ["failed (exit status 1)", "assert 'assert' != 'assert'"]),
        ("abort", ["ended by SIGABRT", "c10::Error", "Fatal Python error: Aborted"]),
        ("exit", ["ran nothing"]),
        ("late", ["ended by SIGABRT", "1 passed"]),
        ("skip", ["ran nothing", "1 skipped"]),
    ],
)
def test_every_other_end_is_told(folder: Path, how: str, words: list[str]) -> None:
    told = failure_of(folder, f"test_child.py::test_ends[{how}]")
    assert told is not None
    for word in words:
        assert word in told


def test_a_test_that_does_not_end_is_ended(folder: Path) -> None:
    told = failure_of(folder, "test_child.py::test_ends[sleep]", seconds=3)
    assert told is not None and "did not end within 3 s" in told
