"""The bench of unmodified programs, rehearsed with programs that only sleep: no GPU, no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from bench.gpu.programs import APPS, Measured, Scene, Set, measure, print_rows
from bench.support.programs import PLAIN, Way, start

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
def apps(tmp_path: Path) -> Path:
    folder = tmp_path / "apps"
    folder.mkdir()
    shutil.copy(APPS / "talk.py", folder)
    for name, text in {"service": SERVICE, "server": SERVER, "background": BACKGROUND}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_services_and_background_are_measured_alone_and_together(
    apps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.gpu.programs.ALONE_S", 0.1)
    monkeypatch.setattr("bench.gpu.programs.WARM_UP_S", 0.0)
    scene = Scene((("service.py",), ("server.py",)), ("background.py",), 0.5, 40, 20)
    rows = measure(scene, "x", tmp_path, [Way(PLAIN), Way("another")], apps)
    assert [(row["way"], row["service"]) for row in rows] == [
        (way, service) for way in (PLAIN, "another") for service in ("service.py", "server.py")
    ]
    for row in rows:
        assert row["requests"] == 20
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
    monkeypatch.setattr("bench.support.programs.END_S", 1.0)
    (tmp_path / "app.py").write_text(AROUND.replace("DEAF", str(deaf)))
    app = [str(tmp_path / "app.py")]
    board = tmp_path / "board"
    program = start(app, Way(PLAIN), "service", board=board, pipes=None, folder=tmp_path)
    program.wait()
    program.close()
    assert until(lambda: has_ended(program.pid))


def test_arrivals_keep_to_the_load(apps: Path, tmp_path: Path) -> None:
    scene = Scene((("service.py",),), ("background.py",), 0.5, 4000, 20)
    folder = tmp_path
    started = [
        start([str(apps / name)], Way(PLAIN), tier, board=folder / "b", pipes=None, folder=folder)
        for name, tier in (("service.py", "service"), ("background.py", "background"))
    ]
    try:
        for program in started:
            program.wait()
        one = Set(Way(PLAIN), folder / "b", started[:1], started[1])
        (arrivals,) = Measured("x", scene, folder, [one]).arrivals
    finally:
        for program in started:
            program.close()
    assert np.diff(arrivals).mean() == pytest.approx(REQUEST_MS * 1e6 / 0.5, rel=0.1)
