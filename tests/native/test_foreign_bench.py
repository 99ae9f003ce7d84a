"""The bench of programs that nobody here wrote, rehearsed with programs on the stand-in driver."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest
from lab.gpu import foreign
from lab.gpu.foreign import Runner, counts_in, kept_rows, main

from native_build import Native
from unmodified import PRELUDE
from waiting import has_ended, until

ON_DRIVER = PRELUDE.replace(
    "mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)", "mmap.mmap(-1, 1 << 16)"
)
STEADY = """
for _ in range(300):
    launch(1000)
    synchronise()
print('{"digest": "0123456789abcdef"}')
"""
FAILS = "raise SystemExit('no such library')"
SERVICE = """
import numpy as np
import talk
heard = talk.orders()
talk.say_ready()
while (order := heard.get()) is not None:
    arrivals = np.load(order[1])
    begin = now()
    for at in arrivals.tolist():
        time.sleep(max(0, begin + at - now()) / 1e9)
        launch(2000)
        synchronise()
    np.save(order[2], arrivals)
    talk.say(served=len(arrivals))
"""
AROUND = """
import os, signal, subprocess, sys
child = subprocess.Popen(["sleep", "600"], process_group=0)
signal.signal(signal.SIGTERM, lambda number, _: os.killpg(child.pid, number))
open(sys.argv[1], "w").write(str(child.pid))
child.wait()
"""


@pytest.fixture
def programs(native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    apps, programs = tmp_path / "apps", tmp_path / "foreign"
    apps.mkdir()
    programs.mkdir()
    shutil.copy(foreign.HERE / "apps" / "talk.py", apps)
    (apps / "service.py").write_text(ON_DRIVER + SERVICE)
    (programs / "steady.py").write_text(ON_DRIVER + STEADY)
    (programs / "fails.py").write_text(FAILS)
    monkeypatch.setattr(foreign, "HERE", tmp_path)
    monkeypatch.setattr(foreign, "PROGRAMS", programs)
    monkeypatch.setattr(foreign, "BURST", 100)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(native.folder / "plain"))
    return tmp_path / "results"


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> None:
    monkeypatch.setattr(sys, "argv", ["foreign.py", str(folder), *more])
    main()


def test_every_program_is_run_in_every_way_and_told_in_a_table(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, programs, "--minutes", "0.00001")
    assert kept_rows(programs) == {}  # nothing is known of what was given up
    run(monkeypatch, programs)
    rows = kept_rows(programs)
    assert rows["fails"]["plainly"] == "no such library"
    steady = rows["steady"]
    assert steady["repeats"] is True
    assert steady["beside"] is True and steady["yields"] > 0
    assert steady["planned"] is True and 0.9 < steady["planned_share"] <= 1
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("steady "))
    assert line.split()[1:3] == ["equal", "equal"]
    before = (programs / "foreign.jsonl").read_bytes()
    run(monkeypatch, programs)
    assert (programs / "foreign.jsonl").read_bytes() == before  # what is done is not done again


def test_nothing_is_said_of_a_program_whose_service_has_ended(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (programs.parent / "apps" / "service.py").write_text(
        "import talk; talk.say_ready(); input(); raise SystemExit('no memory left')"
    )
    run(monkeypatch, programs, "steady")
    assert kept_rows(programs)["steady"].keys() == {"name", "digest", "repeats"}
    assert "no memory left" in capsys.readouterr().out


def test_a_command_that_takes_too_long_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ``eclip exec``: a child in a group of its own, to which signals are passed on."""
    monkeypatch.setattr(foreign, "LIMIT_S", 2.0)
    told = tmp_path / "pid"
    with pytest.raises(RuntimeError, match="more than 2 s"):
        Runner(time.monotonic() + 600)([sys.executable, "-c", AROUND, str(told)])
    assert until(lambda: has_ended(int(told.read_text())))


def test_counts_are_those_of_every_process() -> None:
    said = 'a line\n{"digest": "ab"}\n{\n  "code": 0,\n  "processes": {"7": {"launches": 3}}\n}\n'
    assert counts_in(said) == [{"launches": 3}]
