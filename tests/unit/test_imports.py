"""Imports go one way through the rooms; the order is that of docs/design.md."""

from __future__ import annotations

import ast
from pathlib import Path

import eclip

ROOT = Path(eclip.__file__).parent

# A room may import itself and rooms on earlier lines; two rooms on one line do not mix.
ORDER = [
    {"artefacts"},
    {"planning", "runtime"},
    {"devices"},
    {"frontends"},
    {"varout", "lab"},
    {"reports"},
    {"api"},
    {"cli"},
]


def room_of(module: str) -> str:
    parts = module.split(".")
    rooms = set.union(*ORDER)
    return parts[1] if len(parts) > 1 and parts[1] in rooms else "artefacts"


def may_import(importer: str, imported: str) -> bool:
    rank = {room: index for index, rooms in enumerate(ORDER) for room in rooms}
    return importer == imported or rank[imported] < rank[importer]


def imports_of(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in found if name == "eclip" or name.startswith("eclip.")}


def offences(module: str, source: str) -> list[str]:
    return [
        f"{module} imports {name}"
        for name in sorted(imports_of(source))
        if not may_import(room_of(module), room_of(name))
    ]


def test_imports_go_one_way() -> None:
    found: list[str] = []
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT.parent).with_suffix("")
        if relative.parts[1:] in (("__main__",), ("__init__",)):
            continue  # the doors: they open onto every room
        found += offences(".".join(relative.parts), path.read_text())
    assert found == []


def test_an_import_against_the_order_is_found() -> None:
    assert offences("eclip.planning.search.candidates", "from eclip.devices.base import Device\n")
    assert offences("eclip.runtime.program", "from eclip import planning\n")
    assert offences("eclip.artefacts.plan", "def f() -> None:\n    import eclip.cli.screen\n")
    assert not offences("eclip.cli.run", "from eclip.devices.base import Window\n")
