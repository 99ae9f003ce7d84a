"""A real browser for our pages: what they say on its console, and whom they ask for anything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.support.pages import BROWSERS, started
from playwright.sync_api import Browser, Page

from waiting import PATIENCE_S


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
