"""libeclip as a shared library: what it asks of the system, and how it is linked."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from native_build import Native

ROOT = Path(__file__).parents[2]


def read_elf(library: Path, *options: str) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is missing; install binutils")
    done = subprocess.run(
        ["readelf", "--wide", *options, str(library)], capture_output=True, text=True, check=True
    )
    return done.stdout


def load_wheel_tool() -> ModuleType:
    for package in ("hatchling", "ziglang"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is missing; `make wheel` installs it")
    spec = importlib.util.spec_from_file_location("wheel_tool", ROOT / "tools" / "wheel.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def assert_sealed(library: Path) -> None:
    dynamic = read_elf(library, "--dynamic")
    assert "BIND_NOW" in dynamic
    assert "NODELETE" in dynamic
    assert "GNU_RELRO" in read_elf(library, "--program-headers")


def test_the_library_is_bound_at_once_sealed_and_never_unloaded(native: Native) -> None:
    for library in (native.library, native.hip_library):
        assert_sealed(library)


def test_the_environment_of_privileged_programs_is_not_read(native: Native) -> None:
    """getenv is asked by the C++ library only, if at all: ours is secure_getenv everywhere."""
    for source in sorted(
        [*(ROOT / "native").glob("*.cpp"), *(ROOT / "native" / "hip").glob("*.cpp")]
    ):
        assert "getenv(" not in source.read_text().replace("secure_getenv(", ""), source.name
    assert "secure_getenv" in read_elf(native.library, "--dyn-syms")


@pytest.mark.long
def test_the_wheels_library_runs_on_glibc_2_28(native: Native, tmp_path: Path) -> None:
    tool = load_wheel_tool()
    compiler = tool.compiler()
    assert compiler.startswith(sys.executable)
    libraries = tool.build(ROOT / "native", compiler)
    for library, program in zip(libraries, ("plain/fuzz", "hip/fuzz"), strict=True):
        assert tool.needed_glibc(library) <= (2, 28)
        assert_sealed(library)
        assert "libstdc++" not in read_elf(library, "--dynamic")
        done = native.run(program, "--seed", 1, "--programs", 300, preload=library)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "no difference" in done.stdout
        assert "running unplanned" not in done.stderr


def test_needed_glibc_is_the_newest_that_is_named(tmp_path: Path) -> None:
    tool = load_wheel_tool()
    library = tmp_path / "library.so"
    library.write_bytes(b"\0GLIBC_2.9\0GLIBC_2.36\0GLIBC_2.2.5\0")
    assert tool.needed_glibc(library) == (2, 36)


@pytest.mark.parametrize("compiler", [["gcc", "-x", "c", "-std=c11"], ["g++", "-x", "c++"]])
def test_a_program_with_the_public_header_runs_with_and_without_the_library(
    native: Native, compiler: list[str], tmp_path: Path
) -> None:
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text(
        '#include <stdio.h>\n#include "eclip.h"\n'
        "int main(void) {\n"
        "    if (eclip_request) eclip_request(-1);\n"
        '    return puts(eclip_request ? "with" : "without") < 0;\n}\n'
    )
    command = [*compiler, "-Wall", "-Werror", "-I", str(ROOT / "native"), str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    for preload, said in ({}, "without"), ({"LD_PRELOAD": str(native.library)}, "with"):
        done = subprocess.run(
            [str(program)], env=os.environ | preload, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{said}\n"
