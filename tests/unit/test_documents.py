"""What the documents promise about themselves."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from eclip import CompareOptions
from eclip.cli import COMMANDS, make_app
from eclip.contest.contest import known_policies

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "src/eclip/core/README.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)]*)?\)")
# Made when the site is built, from the code and from CONTRIBUTING.md.
_MADE = re.compile(r"reference/(options|python|files)\.md|contributing\.md")
_CODE = re.compile(r"```.*?```", re.DOTALL)
# A command of eclip in a block or between backticks, up to where the shell or a sentence goes on.
_CALL = re.compile(r"(?:^|[`\s])eclip((?: +[^`\s#|&>]+)+)")
_TABLE_MARK = re.compile(r"^<!-- made: (?!header).* -->$", re.MULTILINE)
# A page of a room is read in one sitting; the core's has the walks, too.
MOST_LINES = {"design.md": 60, "core.md": 250, "design": 100}


def test_readme_is_short_and_starts_with_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 140
    assert "make demo" in text and "make test" in text


@functools.cache
def page_of(document: Path) -> str:
    """With the tables that ``make docs`` puts there."""
    tools = str(ROOT / "tools")
    if tools not in sys.path:
        sys.path.append(tools)
    tables: Any = importlib.import_module("tables")
    return str(tables.filled(document.read_text()))


def anchors_of(document: Path) -> set[str]:
    """As GitHub and the site make them of headings."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", page_of(document)), re.MULTILINE)
    return {
        "#" + re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).with_suffix("").as_posix()
)
def test_links_lead_somewhere(document: Path) -> None:
    """The site's builder does not see README.md."""
    links = sorted(set(_LINK.findall(_CODE.sub("", document.read_text()))))
    missing = []
    for link, anchor in links:
        there = document.parent / link if link else document
        if "://" in link or _MADE.search(link):
            continue
        if not there.exists() or (
            anchor and there.suffix == ".md" and anchor not in anchors_of(there)
        ):
            missing.append(link + anchor)
    assert missing == []


def test_tables_are_made_from_data_and_not_kept() -> None:
    marked = [document for document in DOCUMENTS if _TABLE_MARK.search(document.read_text())]
    assert {document.stem for document in marked} == {"comparisons", "mutants", "services-measured"}
    for document in marked:
        made = page_of(document)
        assert "<!-- made:" not in made
        assert made.count("\n|") > document.read_text().count("\n|") + 50


@pytest.mark.parametrize(
    "document",
    [document for document in DOCUMENTS if {document.name, document.parent.name} & {*MOST_LINES}],
    ids=lambda path: path.stem,
)
def test_pages_of_rooms_are_short(document: Path) -> None:
    most = MOST_LINES.get(document.name) or MOST_LINES[document.parent.name]
    assert len(document.read_text().splitlines()) <= most


def test_every_command_and_policy_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in (*COMMANDS, *known_policies()) if f"`{name}`" not in text] == []


def wrong_options(text: str, app: Any) -> list[str]:
    """Options that a text gives to a command of eclip which does not have them."""
    wrong = []
    for call in _CALL.findall(text.replace("\\\n", " ")):
        command, words = app, call.split()
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        if command is app:
            continue
        known = {name for option in command.params for name in option.opts + option.secondary_opts}
        own = words[: words.index("--")] if "--" in words else words
        given = {word.partition("=")[0] for word in own if re.match(r"--?[a-z]", word)}
        wrong += [f"eclip{call}: {name}" for name in sorted(given - known - {"--help"})]
    return wrong


def test_every_option_in_the_documents_exists() -> None:
    """Blocks that need a GPU do not run, so nobody else would notice."""
    app = typer.main.get_command(make_app())
    for document in DOCUMENTS:
        assert wrong_options(document.read_text(), app) == [], document.name


def test_wrong_options_are_found() -> None:
    app = typer.main.get_command(make_app())
    text = "`eclip run plan.json --fast -o log` and\neclip fleet plan x \\\n    --stepz 2 # --no\n"
    assert [line.rpartition(" ")[2] for line in wrong_options(text, app)] == ["--fast", "--stepz"]
    assert wrong_options("eclip exec --stats -- python a.py --fast", app) == []


def test_settings_in_the_reference_are_those_of_a_comparison() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    listed = text.partition("### Settings")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*?) \|", listed, re.MULTILINE))
    own = {"seed", "search-seconds", "verify", "refine", "command"}  # have options, or none
    fields = {
        field.name.replace("_", "-"): field.default for field in dataclasses.fields(CompareOptions)
    }
    assert rows.keys() == (fields.keys() - own) | {"tail", "usual-kernels"}
    for name, default in fields.items():
        if name in rows and type(default) in (int, float) and name != "trace-ms":
            assert rows[name] == f"{default:g}", name


# --- libeclip's header and variables --------------------------------------------------------------

# Functions that libeclip exports for tests: decisions by themselves, to compare them with Python's.
_FOR_TESTS = {"eclip_frontier", "eclip_record"}
_OURS = re.compile(r"\"(ECLIP_[A-Z_]+)\"")


def test_every_variable_of_eclip_has_a_row() -> None:
    sources = [
        *(ROOT / "src" / "eclip").rglob("*.py"),
        *(ROOT / "native").glob("*.cpp"),
        *(ROOT / "native" / "hip").glob("*.cpp"),
    ]
    read = {name for path in sources for name in _OURS.findall(path.read_text())}
    rows = re.findall(
        r"^\| `(ECLIP_\w+)` \|", (ROOT / "docs/libeclip.md").read_text(), re.MULTILINE
    )
    assert sorted(rows) == sorted(read)


def test_every_exported_function_is_in_the_public_header() -> None:
    sources = [*(ROOT / "native").glob("*.cpp"), *(ROOT / "native" / "hip").glob("*.cpp")]
    exported = {
        name
        for path in sources
        for name in re.findall(
            r"^ECLIP_API [\w ]+?\*? ?(eclip_\w+)\(", path.read_text(), re.MULTILINE
        )
    }
    header = (ROOT / "native" / "eclip.h").read_text()
    declared = re.findall(r"^ECLIP_OPTIONAL [\w ]+?\*? ?(eclip_\w+)\(", header, re.MULTILINE)
    assert exported - _FOR_TESTS == set(declared)
    assert len(header.splitlines()) <= 80  # a page
