"""The bench of unmodified programs, rehearsed with programs that only sleep: no GPU, no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from lab.gpu import programs
from lab.gpu.programs import APPS, TURNS, Scene, draw_arrivals, measure, print_rows, run
from lab.support.kept import read_rows
from lab.support.programs import PLAIN, Way, start

from waiting import has_ended, until

REQUEST_MS, STEP_MS = 2.0, 1.0
SERVICE = f"""
import sys, time
import numpy as np
from talk import orders, say, say_ready
heard = orders()
say_ready()
print("a library prints this")
while (order := heard.get()) is not None:
    arrivals, free, found = np.load(order[1]), 0, []
    for at in arrivals.tolist():
        free = max(at, free) + {round(REQUEST_MS * 1e6)}
        found.append(free - at)
    np.save(order[2], found)
    say(served=len(found))
"""
SERVER = f"""
import asyncio
from aiohttp import web
from talk import orders, say_ready
async def handle(request):
    assert len(await request.read()) == 8
    await asyncio.sleep({REQUEST_MS / 1e3})
    return web.Response(body=b"1")
async def run():
    app = web.Application()
    app.router.add_post("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    say_ready(port=runner.addresses[0][1], bytes=8)
    heard = orders()
    while await asyncio.get_running_loop().run_in_executor(None, heard.get) is not None:
        pass
asyncio.run(run())
"""
BACKGROUND = f"""
import time
from talk import orders, say, say_ready
heard = orders()
say_ready()
while heard.get() is not None:
    say(running=True)
    steps, begin = 0, time.perf_counter()
    while heard.empty():
        time.sleep({STEP_MS / 1e3})
        steps += 1
    heard.get()
    say(steps=steps, seconds=time.perf_counter() - begin)
"""

AROUND = """
import os, signal, subprocess, sys
INSIDE = '''
import json, os, signal, sys, time
if DEAF: signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdin.read()
print(json.dumps({"pid": os.getpid()}), flush=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", INSIDE], stdin=subprocess.PIPE, process_group=0)
signal.signal(signal.SIGTERM, lambda number, _: os.killpg(child.pid, number))
child.stdin.close()  # now it may say that it is there
child.wait()
"""


@pytest.fixture
def apps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(programs, "ALONE_S", 0.1)
    monkeypatch.setattr(programs, "WARM_UP_S", 0.0)
    folder = tmp_path / "apps"
    folder.mkdir()
    shutil.copy(APPS / "talk.py", folder)
    for name, text in {"service": SERVICE, "server": SERVER, "background": BACKGROUND}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_services_and_background_are_measured_alone_and_together(
    apps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene((("service.py",), ("server.py",)), ("background.py",), 0.5, 40, 20)
    found = measure(scene, "x", tmp_path, [Way(PLAIN), Way("another")], apps)
    rows = [row for of_way in found for row in of_way]
    assert [(row["way"], row["service"]) for row in rows] == [
        (way, service) for way in (PLAIN, "another") for service in ("service.py", "server.py")
    ]
    for row in rows:
        # Both have arrivals over the same time; the server answers several requests at once.
        assert row["requests"] == 20 if row["service"] == "service.py" else row["requests"] >= 20
        assert row["latency"]["p50_ms"] >= REQUEST_MS
        assert 0 < row["background_rps"] <= 1e3 / STEP_MS
        assert row["busy_share"] is None  # without a board nobody knows
    assert rows[0]["ratio"][0] == pytest.approx(1)  # these requests do not disturb each other
    print_rows(rows)
    assert "x: service.py" in capsys.readouterr().out


def test_a_program_that_ends_is_told_by_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("raise SystemExit('no GPU here')")
    app = [str(tmp_path / "app.py")]
    board = tmp_path / "board"
    program = start(app, Way(PLAIN), "service", board=board, pipes=None, folder=tmp_path)
    with pytest.raises(RuntimeError, match="ended: no GPU here"):
        program.wait()
    program.close()


@pytest.mark.parametrize("deaf", [False, True])
def test_what_a_program_has_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: bool
) -> None:
    """As ``eclip exec`` does it: a child in a group of its own, to which signals are passed on."""
    monkeypatch.setattr("lab.support.programs.END_S", 1.0)
    (tmp_path / "app.py").write_text(AROUND.replace("DEAF", str(deaf)))
    app = [str(tmp_path / "app.py")]
    board = tmp_path / "board"
    program = start(app, Way(PLAIN), "service", board=board, pipes=None, folder=tmp_path)
    program.wait()
    program.close()
    assert until(lambda: has_ended(program.pid))


ENDLESS = """
import time
from talk import orders, say_ready
heard = orders()
say_ready()
while True:
    time.sleep(1)
"""
BENCH = """
import sys
from pathlib import Path
from lab.support.programs import PLAIN, Way, start
folder = Path(sys.argv[1])
program = start([str(folder / "endless.py")], Way(PLAIN), "service", board=folder / "b", pipes=None,
                folder=folder)
program.wait()
print(program.pid, flush=True)
sys.stdin.read()
"""


def test_programs_end_when_their_bench_is_killed(apps: Path) -> None:
    """Also one in the middle of something: it would disturb whoever is measured next."""
    (apps / "endless.py").write_text(ENDLESS)
    command = [sys.executable, "-c", BENCH, str(apps)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bench:
        assert bench.stdout is not None
        pid = int(bench.stdout.readline())
        bench.kill()
    assert until(lambda: has_ended(pid))


def test_arrivals_keep_to_the_load_and_all_services_have_them_over_the_same_time() -> None:
    quick, slow = draw_arrivals([1e6, 4e6], 4000)
    assert sum(map(len, slow)) == 4000 and sum(map(len, quick)) == 16_000
    for turns, mean_ns in ((quick, 1e6), (slow, 4e6)):
        assert len(turns) == TURNS
        for times in turns:
            assert np.diff(times).mean() == pytest.approx(mean_ns, rel=0.1)
    assert quick[0][:9].tolist() != quick[1][:9].tolist()  # every turn has its own


def test_a_call_goes_on_with_the_ways_that_are_left(apps: Path, tmp_path: Path) -> None:
    """With the arrivals of the first call, whose plain programs do not run again."""
    scene = Scene((("service.py",),), ("background.py",), 0.5, 40, 20)
    for name in (PLAIN, "another"):
        run(tmp_path, {"x": scene}, [Way(PLAIN), Way(name)], time.monotonic() + 600, apps)
    rows = read_rows(tmp_path / "programs.jsonl")
    assert [row["way"] for row in rows] == [PLAIN, "another"]
    # These latencies follow from the arrivals alone.
    assert rows[1]["alone"] == rows[1]["alone_time_sliced"] == rows[0]["alone_time_sliced"]


def test_nothing_begins_that_would_end_too_late(
    apps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene((("service.py",),), ("background.py",), 0.5, 1_000_000, 20)
    run(tmp_path, {"x": scene}, [Way(PLAIN)], time.monotonic() + 1, apps)
    assert "x: left out" in capsys.readouterr().out
    run(tmp_path, {"x": scene}, [Way(PLAIN)], time.monotonic() + 600, apps)
    assert f"x, {PLAIN}: left out" in capsys.readouterr().out
    assert read_rows(tmp_path / "programs.jsonl") == []


def test_a_scene_that_fails_does_not_end_the_others(apps: Path, tmp_path: Path) -> None:
    broken = Scene((("missing.py",),), ("background.py",), 0.5, 40, 20)
    scene = Scene((("service.py",),), ("background.py",), 0.5, 40, 20)
    run(tmp_path, {"x": broken, "y": scene}, [Way(PLAIN)], time.monotonic() + 600, apps)
    assert [row["scene"] for row in read_rows(tmp_path / "programs.jsonl")] == ["y"]


ODD = """
from talk import orders, say, say_ready
heard = orders()
say_ready()
runs = 0
while heard.get() is not None:
    say(running=True)
    heard.get()
    runs += 1
    say(steps=1000 if runs % 2 else 1, seconds=1.0)
"""


def test_steps_that_only_warm_the_background_up_do_not_count(apps: Path, tmp_path: Path) -> None:
    """They are undisturbed: it would look faster beside services than it is."""
    (apps / "background.py").write_text(ODD)
    scene = Scene((("service.py",),), ("background.py",), 0.5, 40, 40)
    ((row,),) = measure(scene, "x", tmp_path, [Way(PLAIN)], apps)
    assert row["background_rps"] == row["background_alone_rps"] == 1
