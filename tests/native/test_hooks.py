"""Every entry point of the driver that could touch the order of streams has a class."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cuda_header import (
    EntryPoint,
    find_header,
    parse_line,
    read_header,
    read_hooks,
    read_known,
    without_version,
)

ROOT = Path(__file__).parents[2]
LISTED = Path(__file__).parent / "entry_points.txt"

# Besides what takes a stream, an event or an executable graph: what runs in the default stream, or
# waits for the device because it takes something away that kernels may use.
IMPLICIT = re.compile(
    r"cu(Memcpy|Memset|Launch|MemFree|MemUnmap|MemHostUnregister|MemPoolDestroy|CtxSynchronize"
    r"|CtxDestroy|CtxDetach|DevicePrimaryCtxRe(set|lease)|ModuleUnload|LibraryUnload"
    r"|ArrayDestroy|MipmappedArrayDestroy)"
)


# Of other headers than the driver's main one.
PROFILER = {"cuProfilerInitialize", "cuProfilerStart", "cuProfilerStop"}


@pytest.fixture(scope="module")
def entry_points() -> list[EntryPoint]:
    return [parse_line(line) for line in LISTED.read_text().splitlines()]


def unclassed(entry_points: list[EntryPoint]) -> list[str]:
    hooks = read_hooks(ROOT / "native" / "hooks.def")
    missing = []
    for entry in entry_points:
        if not entry.handles and not IMPLICIT.match(entry.symbol):
            continue
        hook = hooks.get(entry.plain)
        suffix = entry.symbol.removeprefix(f"{entry.plain}_")
        threaded = entry.symbol == entry.plain or (
            hook is not None and (hook.kind == "PASS" or hook.threaded == suffix)
        )
        if hook is None or not threaded:
            missing.append(entry.symbol)
    return missing


def test_every_entry_point_that_orders_has_a_class(entry_points: list[EntryPoint]) -> None:
    assert len(entry_points) > 600
    assert unclassed(entry_points) == []


def test_an_unclassed_one_is_found() -> None:
    new = [EntryPoint("cuStreamLeap", 2, ("s1",)), EntryPoint("cuEventRecord_ptds", 2, ("s2",))]
    assert unclassed(new) == ["cuStreamLeap", "cuEventRecord_ptds"]


def test_what_needs_no_class_is_known_by_name(entry_points: list[EntryPoint]) -> None:
    hooks = read_hooks(ROOT / "native" / "hooks.def")
    hooked = {without_version(symbol) for symbol, hook in hooks.items() if hook.kind != "PASS"}
    named = {without_version(entry.symbol) for entry in entry_points} - {"cuGetProcAddress"}
    assert read_known(ROOT / "native" / "known.def") == named - hooked | PROFILER


def test_hooks_have_the_parameters_of_what_they_stand_for(entry_points: list[EntryPoint]) -> None:
    known = {entry.symbol: entry for entry in entry_points}
    for symbol, hook in read_hooks(ROOT / "native" / "hooks.def").items():
        assert symbol in known
        if hook.kind != "PASS":
            assert hook.entry == known[symbol]
        if hook.threaded != "none":
            assert known[f"{symbol}_{hook.threaded}"].parameters == hook.entry.parameters


def test_every_class_that_takes_a_stream_has_one() -> None:
    for symbol, hook in read_hooks(ROOT / "native" / "hooks.def").items():
        streams = [handle for handle in hook.entry.handles if handle.startswith("s")]
        if hook.kind in ("FOLLOW", "COPY", "HOME"):
            assert len(streams) == 1, symbol
        if hook.kind in ("DEFAULT", "DRAIN", "END"):
            assert not streams, symbol


def test_the_list_is_that_of_the_header(entry_points: list[EntryPoint]) -> None:
    header = find_header()
    if header is None or shutil.which("g++") is None:
        pytest.skip("no CUDA header or no compiler here: the list in the repository counts")
    declared = read_header(header)
    assert unclassed(declared) == []
    text = header.read_text(errors="replace")
    if "#define CUDA_VERSION 13000" in text:
        assert declared == entry_points


def test_structures_are_those_of_the_header() -> None:
    header = find_header()
    if header is None or shutil.which("g++") is None:
        pytest.skip("no CUDA header or no compiler here")
    checked = subprocess.run(
        [
            "g++",
            "-std=c++20",
            "-fsyntax-only",
            f"-I{header.parent}",
            str(ROOT / "native" / "testing" / "abi.cpp"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
