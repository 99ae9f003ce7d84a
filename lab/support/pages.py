"""Pages of ours in a browser: how fast they open, by its own clock, and pictures of them."""

from __future__ import annotations

import contextlib
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

import eclip
from eclip.models.library import file_of
from eclip.models.synthetic import synthetic_profile

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_VISITS = 5
_FIRST_PAINT = """() => new Promise((done) => {
  const painted = () => performance.getEntriesByName("first-contentful-paint")[0];
  if (painted()) return done(painted().startTime);
  new PerformanceObserver(() => painted() && done(painted().startTime)).observe({type: "paint"});
})"""
_TIMELINE = "document.querySelector('[role=tabpanel]:not([hidden]) .lanes')"


@dataclass(frozen=True)
class Opening:
    """Medians over fresh visits, since the navigation began."""

    first_paint_ms: float  # first contentful paint
    drawn_ms: float  # until the first timeline, scrolled to at once, is drawn


@contextlib.contextmanager
def started(timeout_s: float = 60.0) -> Iterator[Browser | None]:
    """The browser that is installed, or None."""
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        yield None
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
            timeout=1000 * timeout_s,
        )
        try:
            yield browser
        finally:
            browser.close()


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


def take_picture(browser: Browser, page_file: Path, into: Path, *, scheme: str) -> None:
    """The top of a page, on a wide screen."""
    size = {"width": 1280, "height": 1250}
    context = browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    with contextlib.closing(context):
        page = context.new_page()
        page.goto(page_file.as_uri())
        page.screenshot(path=into)


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
