"""Op and Tape: the kernels an eager fp16 forward pass launches, and what each one does.

A Tape tracks the tensor that flows (batch, channels, rows, columns; a token sequence has one
column, a vector one row and one column) and appends the kernels of every layer, unfused, as PyTorch
launches them for channels-first tensors. Launch shapes depend on the model and the batch alone,
never on the device, and the sequence of kernels on the model alone.

A Tape also counts memory. ``parameters`` are the distinct elements of the model's weights.
``live_bytes`` is the size of the largest set of tensors alive at once: while a kernel runs, the
model's input, the output of the previous kernel, the kernel's own output, and tensors held for
later kernels (a residual, the parts of a concatenation). No kernel is assumed to run in place.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from eclip.core.trace import Dim3

Kind = Literal["gemm", "conv", "depthwise", "attention", "pointwise", "reduction", "transpose"]

HALF = 2  # bytes of an element
SINGLE = 4
_ALIGNMENT = 8  # channels; matrix units read 16 bytes at a time
_POINTWISE_THREADS = 128
_POINTWISE_ELEMENTS = 512  # a block's: 4 a thread, one vector load
_STAGES, _STAGE_DEPTH = 3, 32  # of the pipeline that feeds the matrix units through shared memory
# A product with few columns of tiles and a long inner dimension is cut in two along the latter. The
# library looks at the rows too; leaving them out keeps one sequence of kernels for every batch.
_SPLIT_COLUMNS, _SPLIT_DEPTH = 1024, 512


class Op(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel: its launch shape and its work."""

    name: str
    kind: Kind
    grid: Dim3
    threads: int
    blocks_per_unit: int
    shared_bytes: int
    # As executed, here and below: a block works through its whole tile where the tensor ends.
    flops: int
    weight_bytes: int  # read, and not in any cache yet
    read_bytes: int  # activations
    written_bytes: int

    @property
    def blocks(self) -> int:
        return math.prod(self.grid)


class Tape:
    """The kernels launched so far and the shape of the tensor the last one wrote."""

    def __init__(
        self, batch: int, channels: int, rows: int, columns: int, input_bytes: int | None = None
    ) -> None:
        """``input_bytes`` where the input is not the tensor that flows first."""
        self.ops: list[Op] = []
        self.batch = batch
        self.channels = channels
        self.rows = rows
        self.columns = columns
        self.parameters = 0
        self.weights_shared = False  # with a layer before: they are in ``parameters`` already
        # A capture's input stays where it is, for the next request.
        self._held_bytes = self.tensor_bytes if input_bytes is None else input_bytes
        self._flowing_bytes = 0  # of the last kernel's output, unless it is held
        self.live_bytes = self._held_bytes

    @property
    def positions(self) -> int:
        return self.rows * self.columns

    @property
    def elements(self) -> int:
        return self.batch * self.channels * self.positions

    @property
    def tensor_bytes(self) -> int:
        return self.elements * HALF

    def _launch(self, op: Op, parameters: int = 0) -> None:
        self.ops.append(op)
        self.live_bytes = max(
            self.live_bytes, self._held_bytes + self._flowing_bytes + op.written_bytes
        )
        self._flowing_bytes = op.written_bytes
        if not self.weights_shared:
            self.parameters += parameters

    @contextlib.contextmanager
    def holding(self, held_bytes: int | None = None) -> Iterator[None]:
        """Hold the flowing tensor, or ``held_bytes``, until the end of the block."""
        if held_bytes is None:
            held_bytes = self.tensor_bytes
            self._flowing_bytes = 0
        self._held_bytes += held_bytes
        yield
        self._held_bytes -= held_bytes

    def resume(self, channels: int, side: int) -> None:
        """Go on from an image that is held."""
        self.channels = channels
        self.rows = self.columns = side
        self._flowing_bytes = 0

    # Elementwise work

    def pointwise(
        self,
        name: str,
        *,
        flops: int = 1,
        operands: int = 1,
        elements: int = 0,
        read_width: int = HALF,
        written_width: int = HALF,
        weights: int = 0,
        parameters: int | None = None,
        kind: Kind = "pointwise",
    ) -> None:
        """A kernel with one output element per input element. ``elements``: if not those of the
        flowing tensor. ``parameters``: if the model keeps more weights than are read."""
        elements = elements or self.elements
        self._launch(
            Op(
                name=name,
                kind=kind,
                grid=(_ceil_div(elements, _POINTWISE_ELEMENTS), 1, 1),
                threads=_POINTWISE_THREADS,
                blocks_per_unit=16,
                shared_bytes=0,
                flops=flops * elements,
                weight_bytes=weights * HALF,
                read_bytes=operands * elements * read_width,
                written_bytes=elements * written_width,
            ),
            weights if parameters is None else parameters,
        )

    def relu(self) -> None:
        self.pointwise("relu")

    def gelu(self) -> None:
        self.pointwise("gelu", flops=10)

    def gelu_in_steps(self) -> None:
        """The tanh form as ALBERT and GPT-2 write it out, a kernel per operation."""
        for step in ("pow", "mul", "add", "mul", "tanh", "add", "mul", "mul"):
            self.pointwise(
                step, operands=2 if step == "add" else 1, flops=6 if step == "tanh" else 1
            )

    def add(self) -> None:
        self.pointwise("add", operands=2)

    def batch_norm(self) -> None:
        self.pointwise("batch_norm", flops=4, weights=4 * self.channels)

    def copy(self, name: str) -> None:
        """A copy that changes the order of elements, so that reads or writes are not contiguous."""
        self.pointwise(name, flops=0, kind="transpose")

    def concat(self, channels: int) -> None:
        """Joins tensors along their channels; ``channels`` is the total. Images alternate in it."""
        self.channels = channels
        self.pointwise("concat", flops=0, kind="transpose")

    def embedding(self, name: str, rows: int) -> None:
        """``rows``: of the table, of which a request reads a few."""
        self.pointwise(
            name,
            flops=0,
            weights=self.elements,
            parameters=rows * self.channels,
            operands=0,
        )

    # Reductions

    def _reduce(self, name: str, read: int, written: int, *, flops: int, weights: int = 0) -> None:
        self._launch(
            Op(
                name=name,
                kind="reduction",
                grid=(_ceil_div(max(read // 4, written), 256), 1, 1),
                threads=256,
                blocks_per_unit=8,
                shared_bytes=1024,
                flops=flops * read,
                weight_bytes=weights * HALF,
                read_bytes=read * HALF,
                written_bytes=written * HALF,
            ),
            weights,
        )

    def layer_norm(self) -> None:
        self._reduce("layer_norm", self.elements, self.elements, flops=8, weights=2 * self.channels)

    def pool(self, kernel: int, stride: int, *, padding: int = 0, name: str = "max_pool") -> None:
        read = self.elements
        self.rows = (self.rows + 2 * padding - kernel) // stride + 1
        self.columns = (self.columns + 2 * padding - kernel) // stride + 1
        self._reduce(name, read, self.elements, flops=1)

    def adaptive_pool(self, size: int = 1) -> None:
        read = self.elements
        self.rows = self.columns = size
        self._reduce("adaptive_avg_pool", read, self.elements, flops=1)

    # Matrix products

    def _product(
        self,
        name: str,
        kind: Kind,
        m: int,
        n: int,
        k: int,
        *,
        count: int = 1,
        split: int = 1,
        weights: int,
        read: int,
        cached: bool = False,
    ) -> None:
        """A product of m rows and k columns by k rows and n columns, ``count`` times."""
        tile_m = 128 if m > 64 else 64 if m > 16 else 16
        tile_n = 128 if n > 64 else 64 if n > 32 else 32
        if tile_m == 16:
            tile_n = 32  # all of the work is reading weights, which takes many units
        grid = (_ceil_div(n, tile_n), _ceil_div(m, tile_m), count * split)
        rows = grid[1] * tile_m
        self._launch(
            Op(
                name=f"{name}_{tile_m}x{tile_n}",
                kind=kind,
                grid=grid,
                threads=256 if tile_m == 128 else 128,
                # Accumulators fill the registers; a 128x128 tile leaves room for no second block.
                blocks_per_unit=min(4, 128 * 128 // (tile_m * tile_n)),
                shared_bytes=_STAGES * _STAGE_DEPTH * (tile_m + tile_n) * HALF,
                flops=2 * tile_m * tile_n * k * math.prod(grid) // split,
                weight_bytes=0 if cached else weights * HALF,
                read_bytes=(read * rows // m + (weights if cached else 0)) * HALF,
                written_bytes=count * rows * n * (HALF if split == 1 else split * SINGLE),
            ),
            weights,
        )

    def linear(self, out: int, *, bias: bool = True, cached: bool = False) -> None:
        """``cached``: its weights were used a moment ago and count as activations."""
        m, n, k = self.batch * self.positions, out, self.channels
        split = 2 if n <= _SPLIT_COLUMNS and k >= _SPLIT_DEPTH else 1
        self._product(
            "gemm", "gemm", m, n, k, split=split, weights=n * k, read=m * k, cached=cached
        )
        self.channels = out
        if split > 1:
            self.pointwise("split_k_reduce", operands=split, read_width=SINGLE, flops=split)
        if bias:
            self.pointwise("bias", weights=out)

    def batched_matmul(self, count: int, m: int, n: int, k: int) -> None:
        self._product("bmm", "gemm", m, n, k, count=count, weights=0, read=count * (m + n) * k)

    def conv(
        self,
        out: int,
        kernel: int,
        stride: int = 1,
        *,
        padding: int | None = None,
        groups: int = 1,
        bias: bool = False,
        transposes: bool = True,
    ) -> None:
        """``transposes``: the kernel wants channels last, so tensors are turned there and back."""
        into, read = self.channels, self.elements
        depthwise = groups == into == out
        turned = transposes and not depthwise
        if turned:
            self.copy("nchw_to_nhwc")
            if into % _ALIGNMENT:
                self.pointwise("pad_channels", flops=0)
        padding = (kernel - 1) // 2 if padding is None else padding
        self.rows = (self.rows + 2 * padding - kernel) // stride + 1
        self.columns = (self.columns + 2 * padding - kernel) // stride + 1
        self.channels = out
        if depthwise:
            self.pointwise(
                f"conv_depthwise_{kernel}x{kernel}",
                kind="depthwise",
                flops=2 * kernel * kernel,
                operands=stride * stride,
                weights=out * kernel * kernel,
            )
        else:
            aligned = _ceil_div(into // groups, _ALIGNMENT) * _ALIGNMENT
            self._product(
                f"conv_{kernel}x{kernel}",
                "conv",
                self.batch * self.positions,
                out // groups,
                aligned * kernel * kernel,
                count=groups,
                weights=out * into // groups * kernel * kernel,
                read=read,
            )
        if turned:
            self.copy("nhwc_to_nchw")
        if bias:
            self.pointwise("bias", weights=out)

    # Attention over the flowing token sequence

    def fused_attention(self, heads: int) -> None:
        """One kernel that never writes the scores; a block takes 64 queries of one head."""
        tokens, depth = self.positions, self.channels // heads
        grid = (_ceil_div(tokens, 64), heads, self.batch)
        self._launch(
            Op(
                name="fused_attention",
                kind="attention",
                grid=grid,
                threads=128,
                blocks_per_unit=2,
                shared_bytes=3 * 64 * depth * HALF,
                flops=4 * 64 * tokens * depth * math.prod(grid),
                weight_bytes=0,
                read_bytes=3 * self.elements * HALF,
                written_bytes=self.elements * HALF,
            )
        )

    def attention(self, heads: int) -> None:
        """Attention written out: heads to the front, scores, mask, fp32 softmax, weighted sum."""
        tokens, depth, count = self.positions, self.channels // heads, self.batch * heads
        scores = count * tokens * tokens
        for name in ("query", "key", "value"):
            self.copy(f"{name}_to_heads")
        with self.holding(3 * self.tensor_bytes):  # query, key and value
            self.batched_matmul(count, tokens, tokens, depth)
            self.pointwise("scale", elements=scores)
            self.pointwise("add_mask", elements=scores)
            self.pointwise("to_float32", elements=scores, written_width=SINGLE)
            self._reduce("softmax", 2 * scores, 2 * scores, flops=6)  # twice the bytes: fp32
            self.pointwise("to_float16", elements=scores, read_width=SINGLE)
            self.batched_matmul(count, tokens, depth, tokens)
        self.copy("heads_to_channels")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
