"""What a package promises: lowest versions, completion, and commands where packages are missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from eclip.core.made import version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Hides packages, as if they were not installed, and runs eclip.
_WITHOUT = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.partition(".")[0])
sys.meta_path.insert(0, Hidden())
from eclip.__main__ import main
main()
"""
HEAVY = ("jinja2", "llvmlite", "numba")


def without(hidden: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    script = _WITHOUT.format(hidden=hidden)
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_lowest_versions_that_are_tested_are_those_of_the_project() -> None:
    declared = {re.sub(">=", "==", one) for one in PROJECT["dependencies"]}
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    pinned = {re.sub(r"(\.0)+$", "", line) for line in lines if line and line[0] != "#"}
    assert pinned == {re.sub(r"(\.0)+$", "", one) for one in declared}


def test_release_is_the_same_everywhere() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert {PROJECT["version"], cited[1], version()} == {"0.1.0"}


@pytest.mark.parametrize("arguments", [("--background", "--", "true"), ("--help",)])
def test_exec_needs_no_compiler_for_python(arguments: tuple[str, ...]) -> None:
    done = without(HEAVY, "exec", *arguments)
    assert done.returncode == 0, done.stderr


def test_other_commands_name_the_package_that_is_missing() -> None:
    done = without(HEAVY, "plan", "albert:8")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("eclip: this command needs the package ")
    assert line.endswith("pip install eclip")


def test_shell_is_told_how_a_line_may_go_on() -> None:
    asked = {"_ECLIP_COMPLETE": "complete_bash", "COMP_WORDS": "eclip com", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "eclip"]
    done = subprocess.run(
        command, env=os.environ | asked, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["compare"]
