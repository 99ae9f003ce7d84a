"""The bench of programs that die, rehearsed with programs on the stand-in driver."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from lab.gpu import shots
from lab.gpu.shots import RESULTS, drawn, print_rows, run
from lab.support.kept import read_rows

from native_build import Native
from unmodified import PRELUDE

ON_DRIVER = PRELUDE.replace(
    "mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)", "mmap.mmap(-1, 1 << 16)"
)
BUSY = """
import talk
heard = talk.orders()
talk.say_ready()
heard.get()
while True:
    launch(1000)
    SYNCHRONISE
"""


def test_whoever_is_left_goes_on_and_a_second_call_has_nothing_to_do(
    native: Native,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    apps = tmp_path / "apps"
    apps.mkdir()
    shutil.copy(shots.APPS / "talk.py", apps)
    (apps / "service.py").write_text(ON_DRIVER + BUSY.replace("SYNCHRONISE", "synchronise()"))
    (apps / "infer.py").write_text(ON_DRIVER + BUSY.replace("SYNCHRONISE", ""))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(native.folder / "plain"))
    run(tmp_path, 4, time.monotonic() + 600, apps)
    rows = read_rows(tmp_path / RESULTS)
    assert {(row["victim"], row["shot"]) for row in rows} == {
        (victim, shot) for victim in shots.ROLES for shot in ("SIGKILL", "SIGSTOP")
    }
    assert all(row["stood_ms"] is not None for row in rows)  # and how long depends on the machine
    run(tmp_path, 4, time.monotonic() + 600, tmp_path / "no apps")
    print_rows(rows)
    assert len([line for line in capsys.readouterr().out.splitlines() if " SIGKILL " in line]) == 2


def test_rounds_are_the_same_in_every_call_and_one_without_an_end_has_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert drawn(20) == drawn(20)
    print_rows([{"victim": "service", "shot": "SIGKILL", "stood_ms": None}])
    assert capsys.readouterr().out.split()[-3:] == ["inf", "inf", "1"]
