"""A real browser for our pages: what they say on its console, whom they ask, how fast they open."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab.support.pages import BROWSERS, started
from playwright.sync_api import Browser, Page

import eclip
from eclip.models.library import file_of
from eclip.models.synthetic import synthetic_profile
from waiting import PATIENCE_S

_VISITS = 5
_FIRST_PAINT = """() => new Promise((done) => {
  const painted = () => performance.getEntriesByName("first-contentful-paint")[0];
  if (painted()) return done(painted().startTime);
  new PerformanceObserver(() => painted() && done(painted().startTime)).observe({type: "paint"});
})"""
_TIMELINE = "document.querySelector('[role=tabpanel]:not([hidden]) .lanes')"


@contextlib.contextmanager
def started_browser() -> Iterator[Browser]:
    """The one that is installed; without one the test is skipped."""
    with started(PATIENCE_S) as browser:
        if browser is None:
            pytest.skip(
                f"none of {', '.join(BROWSERS)} is on the PATH; get one with: "
                f"apt-get install chromium"
            )
        yield browser


class Visit:
    """A page as a reader sees it, with every word on its console and every request it makes."""

    def __init__(
        self, browser: Browser, file: Path, *, width: int = 1280, fragment: str = "", **how: Any
    ) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, **how)  # type: ignore[arg-type]
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE_S)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri() + fragment)
        self.asked.remove(file.as_uri())

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def look_through(self) -> None:
        """Scroll to the end, so that everything is drawn that waits to be seen."""
        self.page.evaluate(
            """async () => {
              for (let y = 0; y < document.documentElement.scrollHeight; y += 600) {
                scrollTo(0, y);
                await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
              }
            }"""
        )
        self.wait_until_drawn()

    def wait_until_drawn(self) -> None:
        """All timelines of open panels, seen or not."""
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('[role=tabpanel]:not([hidden]) .lanes')]"
            ".every((box) => box.classList.contains('drawn'))"
        )

    def pictures(self) -> list[str]:
        """What the visible timeline and the occupancy below it show."""
        found: list[str] = self.page.evaluate(
            "[...document.querySelectorAll('[role=tabpanel]:not([hidden]) .lanes canvas')]"
            ".map((canvas) => canvas.toDataURL())"
        )
        return found


@dataclass(frozen=True)
class Opening:
    """Medians over fresh visits, since the navigation began."""

    first_paint_ms: float  # first contentful paint
    drawn_ms: float  # until the first timeline, scrolled to at once, is drawn


def measure_opening(browser: Browser, path: Path) -> Opening:
    painted, drawn = [], []
    for _ in range(_VISITS):
        with contextlib.closing(browser.new_context()) as context:
            page = context.new_page()
            page.goto(path.as_uri())
            painted.append(float(page.evaluate(_FIRST_PAINT)))
            page.evaluate(f"{_TIMELINE}.scrollIntoView()")
            page.wait_for_function(f"() => {_TIMELINE}.classList.contains('drawn')")
            drawn.append(float(page.evaluate("performance.now()")))
    return Opening(statistics.median(painted), statistics.median(drawn))


def large_report(folder: Path, workers: int = 8, kernels: int = 2000) -> Path:
    """Of workers with many kernels each, under three ways of sharing."""
    topology = eclip.load_builtin("h200", eclip.Topology)
    for number in range(workers):
        profile = synthetic_profile(number, kernels, topology, f"m{number}", 1)
        eclip.save(profile, file_of(folder, profile.model))
    mix = ",".join(f"m{number}:1" for number in range(workers))
    case = eclip.case(mix, topology, profiles=folder)
    logs = [
        eclip.run(eclip.plan(case, policy), seconds=0.3, trace_ms=300.0, case=case)
        for policy in ("shared", "kernel", "eclip")
    ]
    return eclip.report(logs, folder / "large.html", case=case)
