"""Imports go one way, folder by folder: what each may import is written here and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import eclip

ROOT = Path(eclip.__file__).parent

# A folder may import itself, its sub-folders unless they have a line of their own, and these.
DEVICES = "sim gpu cuda hip devices"
RIG = "rig planner models sim files core"
MAY_IMPORT = {
    folder: {*below.split(), *(() if folder in ("server.queue", "core") else ("errors",))}
    for folder, below in {
        "core": "errors jit",
        "files": "core",
        "desk": "core",
        "sim": "desk core jit progress",
        "gpu": "desk core jit progress",
        "cuda": "gpu desk core progress",
        "hip": "gpu core progress",
        "devices": "sim gpu cuda hip core progress",  # the door: opens them by name
        "models": "files core",
        "planner": "models sim files core jit progress",
        "capture": f"models {DEVICES} files core progress",
        "programs": f"models {DEVICES} files core",
        "pytorch": f"{DEVICES} core",
        "varout": f"capture {DEVICES} files core",
        "rig": "planner capture files core progress",
        "tune": f"{RIG} progress",
        "contest.confirm": f"{RIG} tune progress",
        "contest": f"{RIG} contest.confirm tune capture devices progress",
        "server": "core",  # what its processes say to each other
        "server.queue": "core",
        "server.protocol": "server core",
        "server.front": "server server.protocol server.queue core",
        "server.device": "server planner capture devices models gpu files core jit progress",
        "server.supervisor": "server server.device server.front cuda files core",
        "fleet.place": "planner sim files core jit progress",
        "fleet": "fleet.place fleet.ray server server.protocol server.front server.supervisor "
        "planner models files core progress",
        "fleet.ray": "fleet fleet.place server server.front server.supervisor core progress",
    }.items()
}
MAY_IMPORT |= {module: set() for module in ("errors", "jit", "progress")}  # they know nothing
for top in ("reports", "api", "cli"):  # each may import all above it, and everything below
    MAY_IMPORT[top] = {*MAY_IMPORT}
DOORS = {("__main__",), ("__init__",)}  # they open onto every room


def folder_of(module: str) -> str:
    """The longest name with a line of its own; ``eclip`` itself is the API."""
    parts = module.split(".")[1:]
    for length in range(min(len(parts), 2), 0, -1):
        if ".".join(parts[:length]) in MAY_IMPORT:
            return ".".join(parts[:length])
    return "api"


def imports_of(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name == "eclip" or name.startswith("eclip."))


def offences(module: str, source: str) -> list[str]:
    folder = folder_of(module)
    return [
        f"{module} imports {name}"
        for name in sorted(set(imports_of(source)))
        if folder_of(name) not in {folder, *MAY_IMPORT[folder]}
    ]


def test_imports_go_one_way() -> None:
    found: list[str] = []
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT.parent).with_suffix("")
        if relative.parts[1:] not in DOORS:
            found += offences(".".join(relative.parts), path.read_text())
    assert found == []


def test_no_folder_imports_one_that_imports_it() -> None:
    """But for fleets: Ray's actors and the fleet that starts them know each other."""
    both = {
        frozenset((one, other))
        for one, below in MAY_IMPORT.items()
        for other in below
        if one != other and one in MAY_IMPORT.get(other, set())
    }
    assert both == {frozenset(("fleet", "fleet.ray"))}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("eclip.core.plan", "def f() -> None:\n    import eclip.cli.screen\n"),
        ("eclip.core.plan", "from eclip.files import store"),
        ("eclip.core.device", "import eclip"),
        ("eclip.planner.policies", "from eclip.cuda.device import CudaDevice"),
        ("eclip.planner.search.candidates", "from eclip.rig.trials import Trial"),
        ("eclip.sim.device", "from eclip import planner"),
        ("eclip.contest.confirm.finals", "from eclip.contest.contest import hold"),
        ("eclip.contest.contest", "from eclip.varout import growth"),
        ("eclip.server.queue.batching", "from eclip.server.messages import InferRequest"),
        ("eclip.server.front.core", "from eclip.server.supervisor.server import Supervisor"),
        ("eclip.fleet.place.packing", "from eclip.server.config import ServingConfig"),
        ("eclip.cuda.device", "from eclip.hip import api"),
        ("eclip.errors", "from eclip.core.mix import Mix"),
    ],
)
def test_an_import_against_the_order_is_found(module: str, source: str) -> None:
    assert offences(module, source)


def test_every_folder_and_module_has_its_line() -> None:
    names = {path.stem for path in ROOT.glob("*.py")} | {
        path.parent.name for path in ROOT.glob("*/__init__.py")
    }
    assert names - {"__init__", "__main__"} == {name for name in MAY_IMPORT if "." not in name}


def test_the_core_is_read_in_an_hour() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "core").glob("*.py"))
    assert lines <= 4000
