"""Pages of ours in a browser, and pictures of them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


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


def take_picture(browser: Browser, page_file: Path, into: Path, *, scheme: str) -> None:
    """The top of a page, on a wide screen."""
    size = {"width": 1280, "height": 1250}
    context = browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    with contextlib.closing(context):
        page = context.new_page()
        page.goto(page_file.as_uri())
        page.screenshot(path=into)
