"""Imports go one way through the rooms; the order is that of docs/design.md."""

from __future__ import annotations

import ast
from pathlib import Path

import eclip

ROOT = Path(eclip.__file__).parent

# A room may import itself and rooms on earlier lines; two rooms on one line do not mix.
ORDER = [
    {"errors", "jit", "progress"},  # modules, not rooms: they know nothing of eclip's
    {"artefacts"},
    {"planning", "runtime"},
    {"devices"},
    {"frontends"},
    {"varout", "lab"},
    {"serving"},
    {"fleet"},
    {"reports"},
    {"api"},
    {"cli"},
]


def room_of(module: str) -> str:
    """``eclip`` itself is the last: whoever imports it may be served by any of them."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in set.union(*ORDER) else "api"


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
    assert offences("eclip.devices.base", "import eclip\n")
    assert offences("eclip.lab.contest", "from eclip.varout import growth\n")
    assert offences("eclip.frontends.torch", "from eclip.lab.case import Case\n")
    assert offences("eclip.lab.compare", "from eclip.reports.write import write_report\n")
    assert offences("eclip.errors", "from eclip.artefacts.mix import Mix\n")
    assert offences("eclip.progress", "from eclip.jit import compiled\n")
    assert not offences("eclip.cli.run", "import eclip\nfrom eclip.devices.base import Window\n")
    assert not offences("eclip.artefacts.plan", "from eclip.errors import UsageError\n")


def test_every_room_and_module_has_its_place() -> None:
    """A new folder or file beside the rooms must be put into the order."""
    names = {path.stem for path in ROOT.glob("*.py")} | {
        path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()
    }
    assert names - {"__init__", "__main__"} == set.union(*ORDER)
