"""What is counted under ncu, how its table is read, and which launches get what was counted.

No Nsight Compute is here: where it would run, a stand-in on the PATH prints a table as it does.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from eclip.capture.traffic import _parse, distinct_kernels, with_traffic
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.core.trace import Kernel, Trace, with_traces
from eclip.errors import DeviceError
from simulations import flat_profile
from waiting import PATIENCE_S

US = 1_000
CSV = """==PROF== Connected to process 7
some output of the program
"ID","Kernel Name","dram__bytes.sum","lts__t_bytes.sum"
"","","Mbyte","byte"
"0","first","1.5","2,048"
"1","second","0","32"
"""


def test_bytes_are_scaled_by_their_units() -> None:
    assert _parse(CSV) == [(1_500_000, 2048), (0, 32)]


def test_an_unknown_unit_is_not_guessed() -> None:
    with pytest.raises(DeviceError, match="furlong"):
        _parse(CSV.replace("Mbyte", "furlong"))


def test_output_without_a_table_is_refused() -> None:
    with pytest.raises(DeviceError):
        _parse("==ERROR== nothing was profiled\n")


def test_launches_with_one_name_grid_and_block_are_counted_once() -> None:
    def kernel(name: str, blocks: int) -> Kernel:
        return Kernel(name=name, grid=(blocks, 1, 1), block=(128, 1, 1))

    kernels = (kernel("a", 1), kernel("b", 1), kernel("a", 1), kernel("a", 2), kernel("b", 1))
    assert distinct_kernels(Trace(model=ModelKey("m", 1), kernels=kernels)) == [0, 1, 3]


# --- From the counted launch to all others ----------------------------------------------------


def profile_of(name: str, names: str, busy_us: Sequence[float]) -> Profile:
    """Launches of kernels with these names of one letter, all of one grid and block."""
    flat = flat_profile(name, [round(time * US) for time in busy_us])
    kernels = tuple(
        msgspec.structs.replace(kernel, name=letter)
        for letter, kernel in zip(names, flat.trace.kernels, strict=True)
    )
    trace = Trace(model=flat.model, kernels=kernels)
    fingerprint = with_traces(flat.fingerprint, [trace])
    return msgspec.structs.replace(flat, trace=trace, fingerprint=fingerprint)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, counted: Sequence[str]) -> Path:
    """An ``ncu`` on the PATH that runs nothing and prints these rows of DRAM and L2 bytes; gives
    the file in which it notes its arguments."""
    table = CSV[: CSV.index('"0"')] + "".join(
        f'"{number}","any","{row}"\n'.replace(" ", '","') for number, row in enumerate(counted)
    )
    (folder / "table.csv").write_text(table)
    told = folder / "arguments"
    ncu = folder / "ncu"
    words = [shlex.quote(str(path)) for path in (told, folder / "table.csv")]
    ncu.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {words[0]}\nexec cat {words[1]}\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return told


def test_launches_alike_get_bytes_in_proportion_to_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = stand_in(tmp_path, monkeypatch, ["1.5 3000", "2 4000", "0.5 100"])
    first = profile_of("first", "abaa", [10, 7, 20, 5])
    second = profile_of("second", "aa", [10, 10])
    found = with_traffic([first, second], gpu=3, timeout_s=PATIENCE_S)
    assert found[0].dram_bytes == (1_500_000, 2_000_000, 3_000_000, 750_000)
    assert found[0].l2_bytes == (3000, 4000, 6000, 1500)
    # The second model's kernels are counted anew, whatever their names.
    assert found[1].dram_bytes == (500_000, 500_000)
    assert found[1].l2_bytes == (100, 100)
    arguments = told.read_text().splitlines()
    assert "dram__bytes.sum,lts__t_bytes.sum" in arguments
    assert arguments[-3:] == ["3", "first:1", "second:1"]


def test_no_launch_gets_more_than_four_times_what_was_counted_or_less_than_a_quarter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, ["1 800"])
    (found,) = with_traffic([profile_of("m", "aaa", [10, 90, 1])], gpu=0, timeout_s=PATIENCE_S)
    assert found.dram_bytes == (1_000_000, 4_000_000, 250_000)
    assert found.l2_bytes == (800, 3200, 200)


def test_table_with_too_few_kernels_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, ["1 800"])
    with pytest.raises(DeviceError, match="too few kernels of m:1; profile it again"):
        with_traffic([profile_of("m", "ab", [10, 10])], gpu=0, timeout_s=PATIENCE_S)
