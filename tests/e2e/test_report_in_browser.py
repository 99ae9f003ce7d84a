"""The report in a real browser: charts are drawn, tabs switch, nothing fetches or throws."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest

from eclip.artefacts.model_key import ModelKey
from eclip.artefacts.profile import Profile
from eclip.artefacts.runlog import KernelRecords, Requests, RunLog
from eclip.reports import page
from waiting import PATIENCE_S

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Milliseconds of the page's own clock, which runs as fast as the page lets it.
_VIRTUAL_TIME_MS = 20_000
_CHARTS_ALWAYS = 5  # throughput, fairness, energy, latency, one heat map
_CHARTS_PER_TAB = 3  # plan, timeline, occupancy


class Visit:
    """A page as the browser left it: its DOM and every line it wrote to the console."""

    def __init__(self, html: str, tmp_path: Path, fragment: str = "") -> None:
        browser = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
        if browser is None:
            pytest.skip(
                f"none of {', '.join(_BROWSERS)} is on the PATH; get one with: "
                f"apt-get install chromium"
            )
        tmp_path = Path(tempfile.mkdtemp(dir=tmp_path))  # a fresh profile for every visit
        path = tmp_path / "report.html"
        path.write_text(html, encoding="utf-8")
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
                f"--user-data-dir={tmp_path / 'browser'}",
                "--window-size=1300,2000",
                f"--virtual-time-budget={_VIRTUAL_TIME_MS}",
                "--enable-logging=stderr",
                "--v=0",
                "--dump-dom",
                f"{path.as_uri()}{fragment}",
            ],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=PATIENCE_S,
            check=True,
        )
        # Scripts stay in the dumped DOM as they were written; what was drawn is outside them.
        self.dom = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)
        # Chromium logs what a page says at one level only, so any word of it counts.
        self.console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    @property
    def charts(self) -> int:
        return len(re.findall(r'class="plot js-plotly-plot"', self.dom))

    def panel(self, number: int) -> str:
        match = re.search(
            rf'<div role="tabpanel" id="panel-{number}".*?(?=<div role="tabpanel"|</section>)',
            self.dom,
            re.DOTALL,
        )
        assert match is not None
        return match[0]


def test_charts_are_drawn_without_a_word_on_the_console(
    report_logs: list[RunLog], report_profiles: dict[ModelKey, Profile], tmp_path: Path
) -> None:
    visit = Visit(page.render(report_logs, report_profiles), tmp_path)
    assert visit.console == []
    assert visit.charts == _CHARTS_ALWAYS + _CHARTS_PER_TAB
    assert visit.dom.count('class="main-svg"') >= visit.charts
    for words in (
        "STP (sum of the ratios)",
        "fairness (smallest ÷ largest ratio)",
        "energy per request (mJ)",
        "latency (ms)",
        "lane size",
        "time (ms)",
        "lane 0: 132 SMs, slices 0-15",
    ):
        assert re.search(rf"<text[^>]*>{re.escape(words)}</text>", visit.dom), words
    assert len(re.findall(r'<g class="point">', visit.panel(1))) > 100  # groups and kernels


def test_a_link_to_a_policy_opens_its_tab_and_draws_it(
    report_logs: list[RunLog], report_profiles: dict[ModelKey, Profile], tmp_path: Path
) -> None:
    html = page.render(report_logs, report_profiles)
    for number, policy in ((2, "eclip"), (3, "</script>")):
        visit = Visit(html, tmp_path, f"#policy={quote(policy, safe='')}")
        assert visit.console == []
        assert 'aria-selected="true"' in re.findall(r"<button[^>]*>", visit.dom)[number - 1]
        panel = visit.panel(number)
        assert " hidden" not in panel[: panel.index(">")]
        assert panel.count("js-plotly-plot") == _CHARTS_PER_TAB
        # Drawn at the page's width, not at the 700 px Plotly falls back to when it cannot measure.
        widths = [int(width) for width in re.findall(r'class="main-svg"[^>]* width="(\d+)', panel)]
        assert min(widths) > 1000


def test_a_click_draws_the_hidden_tab(
    report_logs: list[RunLog], report_profiles: dict[ModelKey, Profile], tmp_path: Path
) -> None:
    """Also by key: an arrow goes on to the third tab."""
    html = page.render(report_logs, report_profiles)
    press = 'dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}))'
    steps = f"""<script>
      document.getElementById("tab-2").click();
      document.getElementById("tab-2").{press};
      document.title = location.hash + " " + document.activeElement.id;
    </script></body>"""
    visit = Visit(html.replace("</body>", steps), tmp_path)
    assert visit.console == []
    assert visit.charts == _CHARTS_ALWAYS + 3 * _CHARTS_PER_TAB
    assert "<title>#policy=%3C%2Fscript%3E tab-3</title>" in visit.dom


def test_a_page_of_nothing_draws_what_it_has(report_logs: list[RunLog], tmp_path: Path) -> None:
    empty = msgspec.structs.replace(
        report_logs[1],
        requests=Requests(worker=(), arrival_ns=(), start_ns=(), end_ns=()),
        kernels=KernelRecords(window_ns=0, worker=(), position=(), lane=(), start_ns=(), end_ns=()),
    )
    visit = Visit(page.render([empty], {}), tmp_path)
    assert visit.console == []
    assert visit.charts == 4  # throughput, fairness, energy, plan


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("<script>throw new Error('boom')</script>", "Uncaught Error: boom"),
        ("<script src='http://localhost:9/a.js'></script>", "Content Security Policy"),
    ],
)
def test_the_check_notices_a_page_that_throws_or_fetches(
    fault: str, words: str, report_logs: list[RunLog], tmp_path: Path
) -> None:
    html = page.render(report_logs[:1], {})
    visit = Visit(html.replace("</body>", f"{fault}</body>"), tmp_path)
    assert any(words in line for line in visit.console)
