"""Plant every fault of mutants.py in libeclip, and see which case or random program catches it.

    make -C native STRICT=1 tests
    python native/testing/mutate.py [--only TEXT] [--resume FILE] [--jobs N] [--table FILE]

Mutants of different places share a library, and ECLIP_MUTANT tells it which of them to be: few
builds are needed. The exit status is 1 where a mutant is not caught without a reason, or caught
in spite of one. Verdicts are kept in the file of --resume, a line of JSON each; what stands there
is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants import MUTANTS, Mutant

NATIVE = Path(__file__).resolve().parents[1]
BUILD = NATIVE / "build" / "plain"
LIBRARIES = {"cuda": "libeclip.so", "hip": "libeclip_hip.so"}
PROGRAMS_OF = {
    "cuda": (BUILD / "cases", BUILD / "fuzz"),
    "hip": (NATIVE / "build" / "hip" / "hip_cases", NATIVE / "build" / "hip" / "fuzz"),
}
PATIENCE_S = 120.0

# Few programs first: most mutants do not survive them. Those with a reason get no more.
PROGRAMS = (100, 1500)
MODES = (
    (),
    ("--by-thread", "1"),
    ("--record", "1"),
    ("--threads", "3"),
    ("--threads", "3", "--by-thread", "1"),
    ("--threads", "3", "--record", "1"),
    ("--cap", "1"),
)

# What every object of the mutants' library sees first.
CHOICE = """
#pragma once
#include <chrono>
#include <cstdlib>
#include <thread>
inline int eclip_mutant() {
    static const int chosen = getenv("ECLIP_MUTANT") ? atoi(getenv("ECLIP_MUTANT")) : -1;
    return chosen;
}
"""


def split(mutant: Mutant) -> tuple[str, str, str]:
    before, rest = mutant.text.split("«")
    old, after = rest.split("»")
    return before, old, after


def place(mutant: Mutant) -> tuple[int, int]:
    """Where in its file the part is that changes."""
    before, old, after = split(mutant)
    source = (NATIVE / mutant.file).read_text()
    if source.count(before + old + after) != 1:
        sys.exit(
            f"{mutant.file} does not have the text of “{mutant.name}” exactly once: {mutant.text}"
        )
    begin = source.index(before + old + after) + len(before)
    return begin, begin + len(old)


def group(numbers: list[int]) -> list[list[int]]:
    """Mutants that can share a library: one vendor's, and no two of them change the same text."""
    groups: list[list[int]] = []
    for number in numbers:
        begin, end = place(MUTANTS[number])
        for members in groups:
            if MUTANTS[members[0]].vendor != MUTANTS[number].vendor:
                continue
            spans = [
                place(MUTANTS[other])
                for other in members
                if MUTANTS[other].file == MUTANTS[number].file
            ]
            if all(end <= first or last <= begin for first, last in spans):
                members.append(number)
                break
        else:
            groups.append([number])
    return groups


def planted(number: int) -> str:
    _, old, _ = split(MUTANTS[number])
    new = MUTANTS[number].replacement
    if old.endswith(";"):
        return f"{{ if (eclip_mutant() == {number}) {{ {new} }} else {{ {old} }} }}"
    return f"(eclip_mutant() == {number} ? ({new}) : ({old}))"


def build(members: list[int], folder: Path) -> Path:
    """A library of these mutants; objects that none of them touches are those of the checkout."""
    native = folder / "native"
    shutil.copytree(NATIVE, native, ignore=shutil.ignore_patterns("build"))
    shutil.copytree(BUILD, native / "build" / "plain", ignore=shutil.ignore_patterns("testing"))
    (native / "mutant.h").write_text(CHOICE)
    for file in {MUTANTS[number].file for number in members}:
        source = (NATIVE / file).read_text()
        inside = [number for number in members if MUTANTS[number].file == file]
        for number in sorted(inside, key=lambda one: place(MUTANTS[one]), reverse=True):
            begin, end = place(MUTANTS[number])
            source = source[:begin] + planted(number) + source[end:]
        (native / file).write_text(source)
    compiler = f"CXX=g++ -include {native / 'mutant.h'}"
    target = Path("build", "plain", LIBRARIES[MUTANTS[members[0]].vendor])
    command = ["make", "-s", "-C", str(native), "-j2", compiler, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"the mutants do not build:\n{done.stderr[:4000]}")
    return native / target


def fails(library: Path, number: int, command: list[str]) -> bool:
    environment = {**os.environ, "LD_PRELOAD": str(library), "ECLIP_MUTANT": str(number)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def checks(vendor: str, sizes: tuple[int, ...]) -> Iterator[tuple[str, list[str]]]:
    cases, fuzz = PROGRAMS_OF[vendor]
    listed = subprocess.run([cases, "--list"], capture_output=True, text=True, check=True)
    for case in listed.stdout.split():
        yield f"case `{case}`", [str(cases), case]
    for programs in sizes:
        for seed, mode in enumerate(MODES, start=1):
            words = ["--seed", str(seed), "--programs", str(programs), "--patience", "30", *mode]
            said = " ".join(("random programs", *mode, "within", str(programs)))
            yield said, [str(fuzz), *words]


def find_catcher(library: Path, number: int, vendor: str) -> str | None:
    expected = number < 0 or not MUTANTS[number].reason
    for name, command in checks(vendor, PROGRAMS if expected else PROGRAMS[:1]):
        if fails(library, number, command):
            return name
    return None


def table(verdicts: dict[str, str | None]) -> str:
    lines = ["| mutant | file | what it breaks | caught by |", "|---|---|---|---|"]
    for mutant in MUTANTS:
        if mutant.name not in verdicts:
            continue
        verdict = verdicts[mutant.name] or f"nothing: {mutant.reason or 'MISSING'}"
        lines.append(f"| {mutant.name} | `{mutant.file}` | {mutant.breaks} | {verdict} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run mutants with this text in their name")
    parser.add_argument("--resume", type=Path, help="keep verdicts here, and run what has none yet")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--table", type=Path, help="write the table here")
    return parser.parse_args()


def main() -> int:
    options = parse()
    verdicts: dict[str, str | None] = {}
    if options.resume is not None and options.resume.exists():
        for line in options.resume.read_text().splitlines():
            verdicts.update(json.loads(line))
    numbers = [
        number
        for number, mutant in enumerate(MUTANTS)
        if options.only in mutant.name and mutant.name not in verdicts
    ]

    def judge(number: int, library: Path) -> None:
        name = MUTANTS[number].name
        verdicts[name] = find_catcher(library, number, MUTANTS[number].vendor)
        print(f"{name}: {verdicts[name] or 'not caught'}", flush=True)
        if options.resume is not None:
            with options.resume.open("a") as file:
                file.write(json.dumps({name: verdicts[name]}) + "\n")

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as jobs:
        for index, members in enumerate(group(numbers)):
            library = build(members, Path(scratch) / str(index))
            # Without a fault all must pass, or a catch says nothing.
            if (caught := find_catcher(library, -1, MUTANTS[members[0]].vendor)) is not None:
                sys.exit(f"libeclip fails without a mutant: {caught}")
            list(jobs.map(lambda number, built=library: judge(number, built), members))
    text = table(verdicts)
    if options.table is not None:
        options.table.write_text(text + "\n")
    print(text)
    wrong = [
        mutant.name
        for mutant in MUTANTS
        if mutant.name in verdicts and (verdicts[mutant.name] is None) != bool(mutant.reason)
    ]
    for name in wrong:
        print(f"wrong: {name} is {'caught' if verdicts[name] else 'not caught'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
