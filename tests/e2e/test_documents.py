"""The site: it builds without a warning, loads nothing from elsewhere, and anybody can read it."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe

from browser import Visit, started_browser
from waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
# What a browser loads by itself; a link in <a href> is for people.
_LOADED = {"href": ("link",), "src": ("audio", "embed", "iframe", "img", "script", "source")}
_IN_STYLE = re.compile(r"(?:@import\s*|url\()[\"']?(https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: a warning is an error.

    Not with --quiet, which hides warnings from --strict, too.
    """
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install 'eclip[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


class Loaded(HTMLParser):
    """Addresses that a browser asks for when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev"):
            return
        self.addresses += [
            address
            for name, tags in _LOADED.items()
            if tag in tags and (address := given.get(name))
        ]


@pytest.mark.slow
def test_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        loaded = Loaded()
        text = page.read_text()
        loaded.feed(text)
        assert len(loaded.addresses) > 3
        for address in loaded.addresses:
            assert "//" not in address, f"{page.name} loads {address}"
            there = (page.parent / address.partition("?")[0].partition("#")[0]).resolve()
            assert there.exists() or page.name == "404.html", f"{page.name}: no {address}"
        assert not _IN_STYLE.search(text)
        assert "```" not in text, f"{page.name} has a block that nobody can read"
    for style in site.rglob("*.css"):
        assert not _IN_STYLE.search(style.read_text()), style.name


@pytest.mark.slow
def test_reference_has_every_command_name_and_kind_of_file(site: Path) -> None:
    import eclip
    from eclip.cli import COMMANDS
    from eclip.files.store import _KINDS

    options, names, files = (
        (site / "reference" / f"{page}.html").read_text() for page in ("options", "python", "files")
    )
    assert [name for name in COMMANDS if f'id="eclip-{name}"' not in options] == []
    assert [name for name in eclip.__all__ if f"eclip.{name}" not in names] == []
    assert [kind for kind in _KINDS if f'id="{kind}"' not in files] == []


@pytest.mark.slow
def test_search_works_from_disk_without_a_network(site: Path, tmp_path: Path) -> None:
    """Browsers refuse the theme's worker there; docs/site/iframe-worker.js stands in for it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser is on the PATH; get one with: apt-get install chromium")
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path}"),
            *("--virtual-time-budget=20000", "--enable-logging=stderr", "--v=0", "--dump-dom"),
            f"{(site / 'index.html').as_uri()}?q=joint",
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert "explanation/joints.html?h=joint" in done.stdout
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "pages",
    [
        ("index", "tutorials/without-a-gpu", "commands", "guides/add-policy", "results"),
        pytest.param(("reference/python", "results/comparisons"), marks=pytest.mark.long),  # large
    ],
    ids=["small", "large"],
)
def test_pages_are_accessible_in_light_and_dark(site: Path, pages: tuple[str, ...]) -> None:
    with started_browser() as browser:
        for page, scheme in itertools.product(pages, ("light", "dark")):
            with Visit(browser, site / f"{page}.html", color_scheme=scheme) as visit:
                visit.page.wait_for_selector(".md-search[aria-label]")
                found = Axe().run(visit.page, options={"preload": False})  # no requests of its own
                assert found.violations_count == 0, f"{page}, {scheme}: {found.generate_report()}"
                assert visit.said == []


@pytest.mark.slow
def test_pages_fit_a_phone_and_wide_tables_scroll_beside_their_first_column(site: Path) -> None:
    """A page that is wider than its window cannot be read there."""
    scrolled = """async () => {
      const box = [...document.querySelectorAll(".md-typeset__scrollwrap")]
        .find((one) => one.scrollWidth > one.clientWidth + 100);
      box.scrollLeft = 100;
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      const [first, second] = box.querySelectorAll("tbody td");
      const left = (one) => one.getBoundingClientRect().left;
      return [left(first) - left(box), left(second) - left(box)];
    }"""
    with started_browser() as browser:
        for page in ("index", "results", "commands", "reference/options", "services-measured"):
            with Visit(browser, site / f"{page}.html", width=390) as visit:
                visit.page.wait_for_selector(".md-search[aria-label]", state="attached")
                assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390, page
                if page == "services-measured":
                    visit.page.wait_for_selector(".md-typeset__scrollwrap")
                    first, second = visit.page.evaluate(scrolled)
                    assert -30 <= first <= 30 and second < 100
