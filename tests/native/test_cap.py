"""Programs under a cap: ``eclip exec --sms``, on the stand-in device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from native_build import Native
from waiting import PATIENCE_S, until

MARKS_BYTES = 512
SLICES = 16  # of the stand-in: 15 of 8 SMs and one of 12


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    path = tmp_path / "marks"
    path.write_bytes(bytes(MARKS_BYTES))
    return path


@pytest.fixture
def shared(tmp_path: Path) -> dict[str, str]:
    """Variables of programs that meet on a board of the test's own."""
    return {**os.environ, "ECLIP_BOARD": str(tmp_path / "board")}


def eclip(shared: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eclip", *map(str, arguments)],
        env=shared,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def move(
    native: Native, shared: dict[str, str], marks: Path, changes: int, most: int, processes: int
) -> list[str]:
    """Programs that change their caps all the time; what each said at the end."""
    variables = {**shared, "ECLIP_SMS": "8", "LD_PRELOAD": str(native.library)}
    started = [
        subprocess.Popen(
            [native.folder / "plain/moves", str(changes), str(most), str(seed), marks],
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(processes)
    ]
    said = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes, said
    return said


@pytest.mark.parametrize(("processes", "most"), [(1, 112), (2, 56), (3, 40)])
def test_caps_that_change_keep_processes_apart(
    native: Native, shared: dict[str, str], marks: Path, processes: int, most: int
) -> None:
    for said in move(native, shared, marks, 100, most, processes):
        assert re.match(r"100 changes, .* late 0, wrong 0, meetings 0", said)


@pytest.mark.long
def test_ten_thousand_changes(native: Native, shared: dict[str, str], marks: Path) -> None:
    for said in move(native, shared, marks, 10_000, 56, 2):
        print(said)
        assert re.match(r"10000 changes, .* wrong 0, meetings 0", said)


@pytest.fixture
def capped(native: Native, shared: dict[str, str], marks: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that runs under ``eclip exec --sms 24`` until the test ends."""
    program = [sys.executable, "-m", "eclip", "exec", "--sms", "24", "--"]
    program += [str(native.folder / "plain/moves"), "-1", "8", "1", str(marks)]
    with subprocess.Popen(program, env=shared, stderr=subprocess.PIPE, text=True) as started:
        assert until(lambda: workers(shared) != [])
        yield started
        started.terminate()


def workers(shared: dict[str, str]) -> list[dict[str, object]]:
    done = eclip(shared, "top", "--json")
    return json.loads(done.stdout)[0]["workers"] if done.returncode == 0 else []


def test_a_running_program_gets_another_cap(
    capped: subprocess.Popen[str], shared: dict[str, str]
) -> None:
    (worker,) = workers(shared)
    assert (worker["tier"], worker["units_held"], worker["units_wanted"]) == ("plain", 24, 24)
    done = eclip(shared, "exec", "--pid", worker["pid"], "--sms", 50)
    assert done.returncode == 0, done.stderr
    assert re.search(r"24 → 48 SMs; launches went there after .* ms", done.stdout)
    (worker,) = workers(shared)
    assert (worker["units_held"], worker["moving"]) == (48, False)
    # The pid that a person knows is that of eclip exec.
    done = eclip(shared, "exec", "--pid", capped.pid, "--sms", 9999, "--json")
    assert json.loads(done.stdout)[0]["held"] == 132
    table = eclip(shared, "top", "--once").stdout
    assert "132" in table


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sms", "0", "--", "true"], "a cap is at least 1 SM, not 0"),
        (["--sms", "x", "--", "true"], "invalid value for '--sms'"),
        (["--share", "1.5", "--", "true"], "at most 1, not 1.5"),
        (["--sms", "8", "--share", "0.5", "--", "true"], "leave one out"),
        (["--sms", "8", "--plan", "plan.json", "--", "true"], "a plan has lanes of its own"),
        (["--pid", "1", "--", "true"], "give --sms and no more"),
        (["--pid", "1"], "say how many SMs process 1 is to have"),
        (["--pid", "4194305", "--sms", "8"], "there is no process 4194305"),
        (["--pid", str(os.getpid()), "--sms", "8"], "has no cap"),
    ],
)
def test_bad_values_give_one_line(shared: dict[str, str], arguments: list[str], said: str) -> None:
    done = eclip(shared, "exec", *arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


def test_a_cap_larger_than_the_device_is_the_device(
    native: Native, shared: dict[str, str], marks: Path
) -> None:
    variables = {**shared, "ECLIP_SMS": "9999", "LD_PRELOAD": str(native.library)}
    program = [str(native.folder / "plain/moves"), "0", "8", "1", str(marks)]
    done = subprocess.run(program, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line == "eclip: 9999 SMs are 132 in slices of this GPU, which has 132"
