"""What the documents promise about themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eclip.cli import COMMANDS
from eclip.lab.contest import known_policies

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
_CODE = re.compile(r"```.*?```", re.DOTALL)


def test_readme_is_short_and_starts_with_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "make demo" in text and "make test" in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = _CODE.sub("", document.read_text())
    links = {link for link, _ in _LINK.findall(text) if "://" not in link}
    missing = [link for link in sorted(links) if not (document.parent / link).exists()]
    assert missing == []


def test_every_module_is_named_in_its_room() -> None:
    """A room is what the list of the design begins a line with, its modules what follows."""
    text = (ROOT / "docs" / "design.md").read_text()
    listed = text.partition("## Rooms")[2].partition("Imports go one way")[0]
    rooms = dict(re.findall(r"^(\S+/) +(.*(?:\n {2}.*)*)", listed, re.MULTILINE))
    top = "; ".join(re.findall(r"^(\S+, \S+) ", listed, re.MULTILINE))
    package = ROOT / "src" / "eclip"
    missing = []
    for path in sorted(package.rglob("*.py")):
        room = path.parent.relative_to(package).as_posix()
        own = path.stem != "__init__" and not (room == "cli" and path.stem in COMMANDS)
        where = top if room == "." else rooms.get(f"{room}/", "")
        if own and not re.search(rf"(^|[,;:]\s+){path.stem}\b", where):
            missing.append(f"{room}/{path.stem}")
    assert missing == []


def test_every_command_and_policy_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in (*COMMANDS, *known_policies()) if f"`{name}`" not in text] == []
