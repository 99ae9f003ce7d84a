"""Builds libeclip and compiled code into a wheel. An editable install leaves it to `make native`.

With ziglang (`make wheel`) the library needs no newer C library than glibc 2.28. The wheel's tag
says what the library really needs, whoever compiled it.

Compiled code (src/eclip/jit.py) is for this version of Python and numba; with others a server
compiles at its first start. Compiling needs eclip's requirements, which an isolated build lacks.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GLIBC = (2, 28)
# The architecture to build for, if it is not this machine's: aarch64 or x86_64. Needs ziglang.
MACHINE = os.environ.get("ECLIP_WHEEL_MACHINE", platform.machine())


def needed_glibc(library: Path) -> tuple[int, int]:
    """The newest glibc whose symbols the library asks for, by the names of their versions."""
    versions = re.findall(rb"\bGLIBC_(\d+)\.(\d+)", library.read_bytes())
    return max((int(major), int(minor)) for major, minor in versions)


def compiler() -> str | None:
    """The one that builds for an old glibc, or g++, or none."""
    if shutil.which("make") is None or shutil.which("strip") is None:
        return None
    if importlib.util.find_spec("ziglang") is not None:
        target = f"{MACHINE}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
        return f"{sys.executable} -m ziglang c++ -target {target}"
    if platform.machine() != MACHINE:
        raise SystemExit(f"a wheel for {MACHINE} needs ziglang: pip install ziglang")
    return shutil.which("g++")


def build(native: Path, compiler: str) -> list[Path]:
    """Build libeclip beside the one that `make native` builds; where it is, for each vendor."""
    folder = native / "build" / f"wheel-{MACHINE}"
    libraries = [folder / "libeclip.so", folder / "libeclip_hip.so"]
    foreign = platform.machine() != MACHINE  # which strip does not know
    variables = [f"CXX={compiler}{' -s' if foreign else ''}", f"STRIPPED={'1' if foreign else ''}"]
    variables += [f"BUILD={folder}", f"LIBRARY={libraries[0]}"]
    subprocess.run(["make", "-C", str(native), "library", *variables], check=True)
    return libraries


def precompile(source: Path, folder: Path) -> bool:
    """Fill the folder with compiled code; False: what eclip needs to run is not here."""
    if any(importlib.util.find_spec(name) is None for name in ("numba", "msgspec", "numpy")):
        return False
    command = [sys.executable, "-m", "eclip.server.device.precompile", str(folder)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(source)}, check=True)
    return True


class LibeclipHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        compiled = Path(self.root) / "native" / "build" / "wheel" / "compiled"
        if platform.machine() != MACHINE:
            self.app.display_warning(f"compiled code is not made for {MACHINE}; a server compiles")
        elif precompile(Path(self.root) / "src", compiled):
            build_data["force_include"][str(compiled)] = "eclip/lib/compiled"
        else:
            self.app.display_warning(
                "numba is not here: the wheel is built without compiled code; after the "
                "installation call python -m eclip.server.device.precompile"
            )
        found = compiler()
        if found is None:
            self.app.display_warning(
                "no compiler here: the wheel is built without libeclip; install ziglang, make "
                "and strip"
            )
            return
        libraries = build(Path(self.root) / "native", found)
        major, minor = max(GLIBC, *map(needed_glibc, libraries))
        if (major, minor) > GLIBC:
            self.app.display_warning(
                f"libeclip needs glibc {major}.{minor}; with ziglang installed it would need "
                f"{GLIBC[0]}.{GLIBC[1]}"
            )
        for library in libraries:
            build_data["force_include"][str(library)] = f"eclip/lib/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{major}_{minor}_{MACHINE}"
