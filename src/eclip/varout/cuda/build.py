"""The kernels, compiled once for every element type and consumer, and launched on any stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from importlib import resources
from typing import Any

from eclip.cuda.conditional import units_of
from eclip.cuda.driver import call, cu
from eclip.cuda.nvrtc import compile_source
from eclip.errors import DeviceError
from eclip.varout.gpu_model import MOST_THREADS

THREADS = 256
ITEMS = 16  # inputs a thread takes of a tile
_MORE_ITEMS = 32
# From this number of inputs on, tiles are larger: every unit still has several tiles, and a tile's
# time is mostly round trips to memory, which do not grow with its size.
_LARGE = 1 << 23
# Words of a stage's state, as in state.cu.
COUNT, CONSUMED, PRODUCED = 0, 1, 2
STATE_WORDS = 16
EVERYTHING, WINDOW, WINDOW_KEEP, REST = range(4)
STAY, ADVANCE, REWIND = range(3)

_RESIDENT = 4  # blocks a unit: they keep memory busy, and more would only lengthen every barrier
_WIDTHS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}


def pointer(address: int) -> tuple[int, Any]:
    return address, ctypes.c_void_p


def word(value: int) -> tuple[int, Any]:
    return value, ctypes.c_ulonglong


def small(value: int) -> tuple[int, Any]:
    return value, ctypes.c_int


def real(value: float) -> tuple[float, Any]:
    return value, ctypes.c_float


def source() -> str:
    """All kernels, in one piece."""
    folder = resources.files("eclip.varout.cuda")
    return "\n".join(
        (folder / f"{name}.cu").read_text() for name in ("state", "select", "operations")
    )


class Kernels:
    """One compiled variant; its library stays loaded as long as the process."""

    def __init__(self, compute: str, options: Sequence[str], items: int) -> None:
        self._items = items
        target = f"compute_{compute.replace('.', '')}"
        options = [*options, f"-DITEMS={items}"]
        code = compile_source(source().encode(), "varout.cu", target, options, ptx=True)
        self._library = call(cu.cuLibraryLoadData, code, [], [], 0, [], [], 0)

    def tiles_of(self, inputs: int) -> int:
        return max(1, -(-inputs // (self._items * THREADS)))

    @functools.cache  # noqa: B019 (variants live as long as the process)
    def _kernel(self, name: str) -> Any:
        return call(cu.cuLibraryGetKernel, self._library, f"eclip_{name}".encode())

    def launch(
        self,
        name: str,
        stream: Any,
        grid: int | tuple[int, int],
        arguments: Sequence[tuple[Any, Any]],
        threads: int = THREADS,
        shared_bytes: int = 0,
    ) -> None:
        across, down = grid if isinstance(grid, tuple) else (grid, 1)
        packed = (tuple(value for value, _ in arguments), tuple(kind for _, kind in arguments))
        # A CUkernel may stand for a function wherever one is launched: it belongs to no context.
        function = cu.CUfunction(int(self._kernel(name)))
        shape = (across, down, 1, threads, 1, 1, shared_bytes)
        call(cu.cuLaunchKernel, function, *shape, stream, packed, 0)

    def launch_resident(
        self,
        name: str,
        stream: Any,
        tiles: int,
        capacity: int,
        arguments: Sequence[tuple[Any, Any]],
    ) -> None:
        """All blocks at once on the stream's lane, which the driver refuses if they do not fit.

        A block for each tile. Where tiles are fewer than units, the consumer gets more blocks;
        beyond that, blocks without a tile only make every barrier longer (256 more took 2 us).
        """
        kernel = self._kernel(name)
        held = call(
            cu.cuOccupancyMaxActiveBlocksPerMultiprocessor,
            call(cu.cuKernelGetFunction, kernel),
            THREADS,
            0,
        )
        units = units_of(stream)
        wanted = max(tiles, min(blocks_for(capacity // 4), units))
        blocks = max(1, min(wanted, min(int(held), _RESIDENT) * units))
        packed = (tuple(value for value, _ in arguments), tuple(kind for _, kind in arguments))
        function = cu.CUfunction(int(kernel))
        shape = (blocks, 1, 1, THREADS, 1, 1, 0)
        call(cu.cuLaunchCooperativeKernel, function, *shape, stream, packed)


@functools.cache
def kernels_for(
    compute: str,
    flag_bytes: int,
    floating: bool,
    value_bytes: int = 0,
    apply: str = "",
    items: int = ITEMS,
) -> Kernels:
    """The kernels for flags of ``flag_bytes``. Outputs are indices, or values of ``value_bytes``;
    ``apply`` is the consumer's expression of ``v``; ``items`` is from ``items_for``."""
    for width in (flag_bytes, value_bytes or 8):
        if width not in _WIDTHS:
            raise DeviceError(f"elements of {width} bytes cannot be selected; use 1, 2, 4 or 8")
    options = [f"-DFLAG={_WIDTHS[flag_bytes]}", f"-DFLOATING={int(floating)}"]
    if value_bytes:
        options += [f"-DOUT={_WIDTHS[value_bytes]}", "-DVALUES=1"]
    else:
        options += ["-DOUT=long long", "-DVALUES=0"]
    if apply:
        options.append(f"-DAPPLY(v)=({apply})")
    return Kernels(compute, options, items)


def items_for(inputs: int, flag_bytes: int) -> int:
    """Items of a thread. All its flags are loaded at once, so wide flags need too many registers
    for more items."""
    return _MORE_ITEMS if inputs >= _LARGE and flag_bytes <= 4 else ITEMS


def blocks_for(items: int) -> int:
    """Blocks of a kernel with ``MOST_THREADS`` threads at most, about as many as an H200 holds at
    once; more blocks would only take time to start and to end."""
    return max(1, min(-(-items // THREADS), MOST_THREADS // THREADS))
