"""The report in a real browser: at every width and scheme, by keyboard, printed, and how fast.

One report of two real comparisons serves all tests; names that look like markup have their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

import eclip
from browser import Visit, large_report, measure_opening, started_browser
from eclip.reports import page
from eclip.reports.chapters import Named, chapters_of
from logs import make_log, make_mix, make_profile

WIDTHS = (390, 768, 1280)
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = eclip.CompareOptions(batches=1, trials=3, trial_seconds=0.1, trace_ms=5.0)
    outcomes = [
        eclip.compare(mix, policies, seconds=0.2, repeats=3, options=options)
        for mix, policies in (
            ("alexnet:8,vgg19:8", ["shared", "model", "masks", "eclip", "search"]),
            ("alexnet:1@300rps/5ms,vgg19:8@background", ["shared", "masks", "yield", "search"]),
        )
    ]
    return eclip.report(outcomes, tmp_path_factory.mktemp("report") / "report.html")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_says_nothing_asks_nobody_and_is_accessible(
    browser: Browser, report: Path, width: int, scheme: str
) -> None:
    with Visit(browser, report, width=width, color_scheme=scheme) as visit:
        visit.look_through()
        for summary in visit.page.locator("summary:visible").all():
            summary.click()
        visit.look_through()
        wide = "document.documentElement.scrollWidth"
        assert visit.page.evaluate(wide) <= width
        cells = "[...document.querySelectorAll('.ways td')].map((one) => one.clientWidth)"
        if width < 820:  # bars and words in two or three columns
            assert min(visit.page.evaluate(cells)) > width / 4
        paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(19, 23, 28)")
        found = Axe().run(visit.page)
        assert found.violations_count == 0, found.generate_report()
        assert (visit.said, visit.asked) == ([], [])


def test_axe_notices_what_is_wrong(browser: Browser, report: Path, tmp_path: Path) -> None:
    faulty = tmp_path / "faulty.html"
    text = report.read_text().replace(
        "<main>", '<main><button></button><p style="color:#ddd">some words</p>'
    )
    faulty.write_text(text)
    with Visit(browser, faulty) as visit:
        assert Axe().run(visit.page).violations_count >= 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("<script>throw new Error('boom')</script>", "boom"),
        ("<script src='http://localhost:9/a.js'></script>", "Content Security Policy"),
    ],
)
def test_a_page_that_throws_or_fetches_is_noticed(
    browser: Browser, report: Path, tmp_path: Path, fault: str, words: str
) -> None:
    faulty = tmp_path / "faulty.html"
    faulty.write_text(report.read_text().replace("</body>", f"{fault}</body>"))
    with Visit(browser, faulty) as visit:
        assert any(words in line for line in visit.said)


def test_everything_is_reached_by_keyboard(browser: Browser, report: Path) -> None:
    with Visit(browser, report) as visit:
        keys = visit.page.keyboard
        focused = "document.activeElement"

        def tab_to(wanted: str) -> None:
            for _ in range(200):
                if visit.page.evaluate(f"{focused}.matches({wanted!r})"):
                    return
                keys.press("Tab")
            raise AssertionError(f"Tab never came to {wanted}")

        tab_to("[role=tab]")
        assert visit.page.evaluate(f"{focused}.ariaSelected") == "true"
        keys.press("End")
        last = visit.page.evaluate(f"{focused}.dataset.link")
        assert visit.page.evaluate(f"{focused}.ariaSelected") == "true"
        assert visit.page.url.endswith("#plan=" + last.replace(":", "%3A"))
        tab_to(".lanes .view")
        visit.look_through()
        whole = visit.pictures()
        keys.press("+")
        closer = visit.pictures()
        assert closer[0] != whole[0] and closer[1] != whole[1]  # timeline and occupancy together
        keys.press("ArrowRight")
        assert visit.pictures()[1] != closer[1]
        keys.press("0")
        assert visit.pictures() == whole
        keys.press(".")
        readout = visit.page.locator("[role=tabpanel]:not([hidden]) .lanes .readout").first
        readout.get_by_text("kernel").wait_for()
        assert " µs from " in readout.inner_text()
        tab_to(".cost summary")
        keys.press("Enter")
        tab_to(".cost .view")
        keys.press("ArrowRight")
        costs = visit.page.locator(".cost[open] .readout")
        costs.get_by_text("Whole device").wait_for()
        assert "Kernel 0: " in costs.inner_text()
        assert (visit.said, visit.asked) == ([], [])


def test_a_link_opens_the_plan_that_it_names_and_draws_it(browser: Browser, report: Path) -> None:
    with Visit(browser, report, fragment="#plan=2%3Ashared") as visit:
        shown = visit.page.locator("#chapter-2 [role=tabpanel]:not([hidden])")
        assert shown.count() == 1
        chosen = shown.get_attribute("aria-labelledby")
        assert visit.page.locator(f"#{chosen}").inner_text() == "shared"
        visit.look_through()
        blank = (
            "(canvas) => !canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)"
        )
        for canvas in shown.locator("canvas").all():
            assert not canvas.evaluate(f"{blank}.data.some(Boolean)")


def test_the_best_plan_is_open_and_pointing_names_a_kernel(browser: Browser, report: Path) -> None:
    with Visit(browser, report) as visit:
        visit.look_through()
        first = visit.page.locator("#chapter-1 [role=tab][aria-selected=true]")
        best = visit.page.locator("#chapter-1 .ways tbody .label").first
        assert first.inner_text() == best.inner_text()
        canvas = visit.page.locator("#chapter-1 [role=tabpanel]:not([hidden]) .timeline")
        canvas.hover(position={"x": 300, "y": 40})
        readout = visit.page.locator("#chapter-1 [role=tabpanel]:not([hidden]) .readout").first
        readout.get_by_text(" µs from ").wait_for()
        assert readout.inner_text().startswith("alexnet, kernel ")
        assert "_ZN" not in readout.inner_text()


def test_it_prints_light_and_without_what_paper_cannot_do(browser: Browser, report: Path) -> None:
    with Visit(browser, report, color_scheme="dark") as visit:
        visit.wait_until_drawn()  # also of who does not scroll
        before = visit.pictures()
        visit.page.emulate_media(media="print")
        assert not visit.page.locator(".tools").first.is_visible()
        paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper in ("rgb(255, 255, 255)", "rgba(0, 0, 0, 0)")
        visit.page.wait_for_function("() => matchMedia('print').matches")
        assert visit.pictures() != before
        assert len(visit.page.pdf()) > 50_000


def test_names_that_look_like_markup_are_shown_as_they_are(
    browser: Browser, tmp_path: Path
) -> None:
    mix = make_mix(2, "albert<script>ä")
    logs = [make_log("shared", sizes=(132,), mix=mix), make_log("</script>", mix=mix)]
    profile = make_profile("albert<script>ä", name="<b>gemm")
    path = tmp_path / "report.html"
    path.write_text(
        page.render(chapters_of(Named(log) for log in logs), {profile.model: profile}),
        encoding="utf-8",
    )
    with Visit(browser, path, fragment="#plan=1%3A%3C%2Fscript%3E") as visit:
        visit.look_through()
        assert visit.page.locator("[role=tab][aria-selected=true]").inner_text() == "</script>"
        visit.page.locator(".lanes:visible [data-do=next]").click()
        readout = visit.page.locator(".lanes:visible .readout")
        readout.get_by_text("<b>gemm<").wait_for()
        assert (visit.said, visit.asked) == ([], [])


@pytest.mark.long
def test_the_first_paint_comes_within_a_second(browser: Browser, report: Path) -> None:
    assert measure_opening(browser, report).first_paint_ms < 1000


@pytest.mark.long
def test_eight_workers_of_2000_kernels_open_within_three_seconds(
    browser: Browser, tmp_path: Path
) -> None:
    path = large_report(tmp_path)
    assert path.stat().st_size < 4_000_000
    opening = measure_opening(browser, path)
    assert opening.first_paint_ms < 1000
    assert opening.drawn_ms < 3000
    with Visit(browser, path) as visit:
        visit.look_through()
        assert (visit.said, visit.asked) == ([], [])
