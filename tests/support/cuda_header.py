"""The driver's entry points as its header declares them, and as hooks.def classes them.

An entry point is a line: its symbol, how many parameters it has, and which of them are streams (s),
events (e) or executable graphs (x), by position: ``cuMemcpyAsync 4 s4``. Run as a program with the
header's path, this module prints them all; that is how ``tests/native/entry_points.txt`` was made.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_HANDLES = {"CUstream": "s", "CUevent": "e", "CUgraphExec": "x"}
_DECLARATION = re.compile(r"\bCUresult\s+(cu\w+)\s*\(([^;{}]*)\)\s*;")
_HOOK = re.compile(
    r"^([A-Z]+)\((cu\w+), (cu\w+), (\d+), (none|ptsz|ptds), (\d+),\s*"
    r"\(([^()]*)\),\s*\(([^()]*)\)\)",
    re.MULTILINE,
)
_KNOWN = re.compile(r"^KNOWN\((cu\w+)\)", re.MULTILINE)
_PASS = re.compile(r"^PASS\((cu\w+)\)", re.MULTILINE)


@dataclass(frozen=True)
class EntryPoint:
    symbol: str
    parameters: int
    handles: tuple[str, ...]  # s4: the fourth is a stream

    def __str__(self) -> str:
        return " ".join([self.symbol, str(self.parameters), *self.handles])

    @property
    def plain(self) -> str:
        """Without the suffix of the variant for a thread's own default stream."""
        return re.sub(r"_pt[sd][sz]$", "", self.symbol)


@dataclass(frozen=True)
class Hook:
    kind: str
    threaded: str
    since: int
    entry: EntryPoint


def find_header() -> Path | None:
    """cuda.h of a toolkit or of one of its Python packages, if there is one."""
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    homes += sorted(Path("/usr/local").glob("cuda-*"))
    places = [home / "include" / "cuda.h" for home in homes]
    places += [path for folder in sys.path for path in Path(folder).glob("nvidia/*/include/cuda.h")]
    return next((path for path in places if path.is_file()), None)


def read_header(path: Path) -> list[EntryPoint]:
    """Everything the header declares, the older interfaces that drivers still export too."""
    text = subprocess.run(
        ["g++", "-E", "-P", "-D__CUDA_API_VERSION_INTERNAL", str(path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = {name: _entry(name, parameters) for name, parameters in _DECLARATION.findall(text)}
    return [found[name] for name in sorted(found)]


def parse_line(line: str) -> EntryPoint:
    symbol, count, *handles = line.split()
    return EntryPoint(symbol, int(count), tuple(handles))


def read_hooks(path: Path) -> dict[str, Hook]:
    """The classes of hooks.def, by symbol."""
    text = path.read_text()
    hooks = {
        symbol: Hook(kind, threaded, int(since), _entry(symbol, parameters))
        for kind, symbol, _, since, threaded, _, parameters, _ in _HOOK.findall(text)
    }
    for symbol in _PASS.findall(text):
        hooks[symbol] = Hook("PASS", "none", 0, EntryPoint(symbol, 0, ()))
    return hooks


def read_known(path: Path) -> set[str]:
    """The names in known.def: of entry points that need nothing in any version."""
    return set(_KNOWN.findall(path.read_text()))


def without_version(symbol: str) -> str:
    """What cuGetProcAddress is asked for to get this symbol."""
    return re.sub(r"_v\d+$", "", re.sub(r"_pt[sd][sz]$", "", symbol))


def _entry(symbol: str, parameters: str) -> EntryPoint:
    words = " ".join(parameters.split())
    types = [] if words in ("", "void") else [one.strip() for one in words.split(",")]
    handles = []
    for position, declared in enumerate(types, 1):
        kind = declared.split()[0] if "*" not in declared else ""
        if kind in _HANDLES:
            handles.append(f"{_HANDLES[kind]}{position}")
    return EntryPoint(symbol, len(types), tuple(handles))


if __name__ == "__main__":
    sys.stdout.writelines(f"{entry}\n" for entry in read_header(Path(sys.argv[1])))
