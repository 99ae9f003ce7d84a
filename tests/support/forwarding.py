"""Drivers that forward every call to another library, as WSL's libcuda does, built for a test."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# Reads no argument and leaves all registers alone that may hold one; the first call finds the rest.
_TRAMPOLINE = """
__attribute__((naked)) void {name}(void) {{ __asm__(
    "cmpq $0, %0; jne 1f;"
    "push %%rdi; push %%rsi; push %%rdx; push %%rcx; push %%r8; push %%r9; push %%rbx;"
    "mov %%rsp, %%rbx; and $-16, %%rsp; call find_all; mov %%rbx, %%rsp;"
    "pop %%rbx; pop %%r9; pop %%r8; pop %%rcx; pop %%rdx; pop %%rsi; pop %%rdi;"
    "1: jmp *%0" :: "m"(p_{name})); }}
"""


def symbols_of(library: Path) -> list[tuple[str, str]]:
    """Functions that a library exports, each with its version or an empty text."""
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    )
    found = []
    for line in listed.stdout.splitlines():
        _, kind, name = line.split()
        plain, _, version = name.partition("@@")
        if kind in "TW" and plain.startswith(("cu", "hip", "standin", "_Z24hip")):
            found.append((plain, version))
    return found


def build(folder: Path, soname: str, real: Path, own: Mapping[str, str] | None = None) -> Path:
    """A library under this name that finds each function in ``real`` by dlsym and jumps there.

    ``own`` has functions of C source instead, which reach the real one as ``p_NAME``.
    """
    own = own or {}
    symbols = symbols_of(real)
    names = sorted({name for name, _ in symbols} | set(own))
    known = {name for name, _ in symbols}
    source = ["#include <dlfcn.h>", "#include <stdint.h>", "#include <stdio.h>"]
    source += [f"static void* p_{name};" for name in names]
    source += ["__attribute__((used)) static void find_all(void) {"]
    source += [f'    void* real = dlopen("{real}", RTLD_NOW | RTLD_LOCAL);']
    source += [f'    p_{name} = dlsym(real, "{name}");' for name in names if name in known]
    source += ["}"]
    source += [own.get(name) or _TRAMPOLINE.format(name=name) for name in names]
    versions: dict[str, list[str]] = {}
    for name, version in symbols:
        versions.setdefault(version, []).append(name)
    options: list[str] = []
    if set(versions) != {""}:
        before = ""
        script = []
        for version in sorted(versions):
            script.append(f"{version} {{ global: {'; '.join(versions[version])}; }} {before};")
            before = version
        (folder / "exports.map").write_text("\n".join(script))
        options = [f"-Wl,--version-script={folder / 'exports.map'}"]
    (folder / "forwarding.c").write_text("\n".join(source))
    return compiled(
        folder, soname, (folder / "forwarding.c").read_text(),
        ["-shared", f"-Wl,-soname,{soname}", *options],
    )  # fmt: skip


def compiled(folder: Path, name: str, source: str, options: Sequence[str] = ()) -> Path:
    """A program or library of C source in this folder."""
    place = folder / f"{name}.c"
    place.write_text(source)
    command = ["gcc", "-O1", "-w", "-fPIC", "-o", str(folder / name), str(place), *options]
    subprocess.run([*command, "-pthread", "-ldl"], check=True)
    return folder / name
