"""The live page in a real browser: it draws, asks nobody else, and stays small."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from html import unescape
from importlib import resources
from pathlib import Path

import pytest

from browser import started_browser
from numpy_server import NumpyServer
from waiting import PATIENCE_S

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PAGE = resources.files("eclip.server.protocol").joinpath("page/index.html")


def visit(server: NumpyServer, folder: Path) -> tuple[str, list[str]]:
    """What the page looks like after some seconds, and what it said on the console."""
    browser = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(
            f"none of {', '.join(_BROWSERS)} is on the PATH; get one with: apt-get install chromium"
        )
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={folder / 'browser'}",
            "--virtual-time-budget=5000",
            "--enable-logging=stderr",
            "--v=0",
            "--dump-dom",
            f"http://{server.http}/",
        ],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PATIENCE_S,
        check=True,
    )
    shown = re.sub(r"<script>.*</script>|<style>.*</style>", "", done.stdout, flags=re.DOTALL)
    return shown, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_page_shows_services_slices_and_the_plan(server: NumpyServer, tmp_path: Path) -> None:
    shown, console = visit(server, tmp_path)
    assert console == []
    assert 'class="state good"' in shown
    for words in ("searched for 20 s", "321 W", "a new plan is being searched", "image"):
        assert words in shown
    assert "<script>pairs" in unescape(shown) and "<script>pairs" not in shown
    assert shown.count("<i ") + shown.count("<i>") == 3 * 16
    assert shown.count('class="mine"') == 6 + 8 + 16
    assert re.search(r'<td class="(kept|missed)" data-label="p99 ms">\d', shown)
    assert len(re.findall(r'<path d="M[\d. ]+L', shown)) == 2  # it has asked more than once


def test_a_locked_server_asks_for_its_token(
    start: Callable[..., NumpyServer], tmp_path: Path
) -> None:
    shown, _ = visit(start(token="secret"), tmp_path)
    assert ">locked<" in shown
    assert '<form id="door">' in shown  # not hidden any more
    assert "image" not in shown


def test_a_page_that_is_hidden_and_shown_asks_no_more_often(server: NumpyServer) -> None:
    with started_browser() as browser:
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"http://{server.http}/")
        page.wait_for_selector(".state.good")
        for _ in range(5):  # faster than the page asks
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        asked.clear()
        begin = time.monotonic()
        page.wait_for_timeout(3000)
        assert 1 <= len(asked) <= time.monotonic() - begin + 2  # once a second, not five times


def test_the_page_is_small_and_brings_everything_along() -> None:
    text = _PAGE.read_text()
    assert len(text) < 60_000
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|document\.write|insertAdjacent|eval\(", text)
