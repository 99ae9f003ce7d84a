"""Names of files that are no UTF-8, links that lead nowhere, and screens that have ASCII only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Cli, assert_refused
from eclip.core.runlog import RunLog
from eclip.files import store

ODD = os.fsdecode(b"odd\xff")  # as Python holds a name with a byte that is no UTF-8
SHORT = ("--seconds", 0.005, "--set", "warmup=0")


def test_result_under_a_name_that_is_no_utf8_is_kept_and_read(cli: Cli) -> None:
    assert cli("plan", "squeezenet:1", "-o", f"{ODD}.json").code == 0
    ran = cli("run", f"{ODD}.json", "--seconds", 0.005, "-o", f"{ODD}-run.json")
    assert ran.code == 0
    log = store.load(f"{ODD}-run.json", RunLog)
    assert log.made is not None
    assert "odd\\udcff.json" in log.made.command
    assert cli("inspect", f"{ODD}-run.json").code == 0
    assert cli("report", f"{ODD}-run.json", "-o", f"{ODD}.html", "--trace", f"{ODD}.gz").code == 0
    assert cli("inspect", f"{ODD}.html").code == 0


def test_comparison_with_files_that_are_no_utf8_is_kept_and_printed(cli: Cli) -> None:
    cli("plan", "squeezenet:1", "-o", "mine.json")
    Path(f"{ODD}.csv").write_text("time_s,worker\n0.001,squeezenet\n")
    files = ("--results", f"{ODD}.json", "--report", f"{ODD}.html", "-o", ODD)
    outcome = cli(
        *("compare", "squeezenet:1", "--policies", "shared", "--load", f"{ODD}.csv"),
        *("--plan", "mine.json", *files, *SHORT, "--json"),
    )
    assert outcome.code == 0, outcome.err
    assert "odd\\udcff.csv" in outcome.data["load"]
    assert cli("results", f"{ODD}.json").code == 0
    assert cli("report", f"{ODD}.json", "-o", f"{ODD}.html").code == 0


@pytest.mark.parametrize("target", ["/nowhere/file.json", "missing/file.json"])
def test_link_into_a_folder_that_does_not_exist_is_named(cli: Cli, target: str) -> None:
    Path("link.json").symlink_to(target)
    folder = str(Path(target).resolve().parent)
    for command in (
        ("plan", "squeezenet:1", "-o", "link.json"),
        ("compare", "squeezenet:1", "--policies", "shared", "--results", "link.json", *SHORT),
        ("compare", "squeezenet:1", "--policies", "shared", "--report", "link.json", *SHORT),
    ):
        assert_refused(cli(*command), "link.json", "is a link to", folder)


def test_link_to_a_file_that_does_not_exist_yet_stays_a_link(cli: Cli) -> None:
    Path("link.json").symlink_to("later.json")
    assert cli("plan", "squeezenet:1", "-o", "link.json").code == 0
    assert Path("link.json").is_symlink()
    assert Path("later.json").is_file()


def test_links_in_a_circle_and_folders_behind_links_to_nothing_are_named(cli: Cli) -> None:
    Path("circle.json").symlink_to("circle.json")
    Path("folder").symlink_to("nothing")
    assert_refused(cli("plan", "squeezenet:1", "-o", "circle.json"), "circle.json")
    refused = cli("compare", "squeezenet:1", "--policies", "shared", "-o", "folder", *SHORT)
    assert_refused(refused, "folder is a link to nothing")


@pytest.mark.parametrize(
    "settings", [{"LC_ALL": "C"}, {"LC_ALL": "", "LANG": "", "PYTHONIOENCODING": "ascii"}]
)
def test_screen_with_ascii_only_gets_ascii_bars(cli: Cli, settings: dict[str, str]) -> None:
    cli("plan", "squeezenet:1,alexnet:1", "-o", "plan.json")
    command = [sys.executable, "-m", "eclip", "explain", "plan.json"]
    shown = subprocess.run(command, env=os.environ | settings, capture_output=True, check=True)
    text = shown.stdout.decode("ascii")
    assert "?" not in text
    bars = [line for line in text.splitlines() if line.endswith("size over the kernels")]
    assert len(bars) == 2
    assert all(set(line.split()[0]) <= set("_-~=+*%#") for line in bars)
    command[-2:] = ["topology", "mi50", "--json"]  # µ and · stay what they are in JSON
    data = subprocess.run(command, env=os.environ | settings, capture_output=True, check=True)
    assert data.stdout == subprocess.run(command, capture_output=True, check=True).stdout
