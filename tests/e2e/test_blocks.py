"""Every block of the documents runs.

Blocks of a page run in the order in which they stand, in one folder. A block with a title is
written to that file, a `diff` is applied, `text` shows something. A mark behind the language says
what a block needs: `gpu`, `network` and `cluster` do not run here, `long` runs in `make test-long`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eclip.server.config import read_config
from waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGES = [
    Path("README.md"),
    Path("CONTRIBUTING.md"),
    *sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")),
]
TAUGHT = [page for page in PAGES if page.parts[1:-1] in (("tutorials",), ("guides",))]
# Pages that change the code begin with this, and run in a copy of what they need of the checkout.
_CHANGES_CODE = "add-"
_COPIED = ("src", "tests", "pyproject.toml")
_BLOCK = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_INFO = re.compile(
    r"(?P<language>text|sh|python|toml|diff)"
    r"(?: title=\"(?P<file>[\w./-]+)\")?"
    r"(?: (?P<mark>gpu|network|cluster|long))?"
)


class Block(NamedTuple):
    language: str
    file: str  # that holds it; empty: none
    mark: str  # what it needs; empty: nothing
    text: str

    @property
    def runs(self) -> bool:
        return self.language != "text" and self.mark in ("", "long")


def blocks_of(page: Path) -> list[Block]:
    found = []
    for match in _BLOCK.finditer((ROOT / page).read_text()):
        info = _INFO.fullmatch(match["info"])
        assert info, f"{page}: what is ```{match['info']}?"
        found.append(Block(info["language"], info["file"] or "", info["mark"] or "", match["text"]))
    return found


def pages_with(mark: str) -> list[Path]:
    """Pages with a block that runs and has this mark."""
    return [
        page
        for page in PAGES
        if any(block.runs and block.mark == mark for block in blocks_of(page))
    ]


def copy_checkout(folder: Path) -> None:
    """With what numba has compiled: it goes by the times of files, which are kept."""

    def copy(source: str, target: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # of another process, which has renamed it
            shutil.copy2(source, target)

    for name in _COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, copy_function=copy)
        else:
            copy(str(ROOT / name), str(folder / name))


def write_tools(folder: Path) -> Path:
    """What blocks call: the checkout's own eclip, whatever is installed; and a make that only says
    what it would do, since these tests are among it."""
    tools = folder / ".bin"
    tools.mkdir()
    for name, command in (
        ("eclip", f'"{sys.executable}" -m eclip "$@"'),
        ("make", f'"{shutil.which("make")}" --dry-run --directory "{ROOT}" "$@"'),
    ):
        (tools / name).write_text(f"#!/bin/sh\nexec {command}\n")
        (tools / name).chmod(0o755)
    return tools


class Runner:
    """Runs the blocks of a page in a folder."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page = page
        self.folder = folder
        self.names: dict[str, Any] = {}  # that Python blocks have made
        source = ROOT / "src"
        if page.name.startswith(_CHANGES_CODE):
            copy_checkout(folder)
            source = folder / "src"
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / ".venv").symlink_to(sys.prefix)
        path = (write_tools(folder), Path(sys.executable).parent, os.environ["PATH"])
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join(map(str, path)),
            "PYTHONPATH": str(source),
        }

    def run(self, block: Block) -> None:
        if block.file:
            (self.folder / block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, str(self.page), "exec"), self.names)
        elif block.language == "diff":
            self._call("git", "apply", "-", given=block.text)
        else:
            self._call("bash", "-euo", "pipefail", "-c", block.text)

    def _call(self, *command: str, given: str = "") -> None:
        said = self.folder / ".said"
        with (
            said.open("w+") as output,
            subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            ) as process,
        ):
            try:
                process.communicate(given, timeout=PATIENCE_S)
            finally:
                with contextlib.suppress(ProcessLookupError):  # usually it has left nothing
                    os.killpg(process.pid, signal.SIGTERM)
        assert process.returncode == 0, f"{self.page}: {command}\n{said.read_text()}"


def run_blocks(page: Path, folder: Path, *, long: bool) -> None:
    runner = Runner(page, folder)
    for block in blocks_of(page):
        if block.runs and (long or block.mark != "long"):
            runner.run(block)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(""), ids=str)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(page, tmp_path, long=False)


@pytest.mark.long
@pytest.mark.parametrize("page", pages_with("long"), ids=str)
def test_long_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the others of their page, from which they may take something."""
    monkeypatch.chdir(tmp_path)
    run_blocks(page, tmp_path, long=True)


def test_tutorials_and_guides_have_blocks_to_run() -> None:
    assert len(TAUGHT) >= 9
    assert [page for page in TAUGHT if page not in pages_with("")] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_block_is_left_out(page: Path) -> None:
    """Blocks that are indented, with or without a fence, would not be found."""
    text = _BLOCK.sub("", (ROOT / page).read_text())
    assert re.findall(r"\n\n {4,}.*|^.*```.*", text, re.MULTILINE) == []


def test_the_servers_file_in_its_page_is_right(tmp_path: Path) -> None:
    """No block reads it here: it is for a GPU."""
    (text,) = (b.text for b in blocks_of(Path("docs/serving.md")) if b.file == "models.toml")
    (tmp_path / "models.toml").write_text(text)
    services = read_config(tmp_path / "models.toml").services
    assert [service.name for service in services] == ["bert", "nightly"]
