"""What is counted under ncu, and how its table is read."""

from __future__ import annotations

import pytest

from eclip.artefacts.model_key import ModelKey
from eclip.artefacts.trace import Kernel, Trace
from eclip.errors import DeviceError
from eclip.frontends.traffic import _parse, distinct_kernels

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
