"""Machine: constants for the cost of variable-output stages.

There are two kinds. ``StreamProcessor`` is the machine and the application of the 2004 document
(clusters, a stream register file, a memory behind it), in cycles. ``GpuStage`` is a producer and a
consumer inside a captured graph on a GPU, in nanoseconds; its numbers are fitted to measurements.
``varout/model.py`` and ``varout/gpu_model.py`` turn them into times.
"""

from __future__ import annotations

import math

import msgspec

from eclip.core.fingerprint import Fingerprint


class StreamProcessor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Producer and consumer of one strip; words and elements are one and the same."""

    inputs: int  # elements the producer reads in one iteration
    width: int  # clusters: elements that one pass of a main loop takes
    producer_startup: float
    producer_loop: float  # cycles of one pass of the main loop
    consumer_startup: float
    consumer_loop: float
    consumer_ratio: float  # B: words the consumer writes per word it reads
    allocated_ratio: float  # the A that the buffer between the kernels was allocated for
    largest_ratio: float | None = None  # the largest A there can be; None: unbounded
    latency: float
    words_per_cycle: float
    suspend: float
    resume: float
    resident_switch: float = 0.0  # from one resident kernel to the other
    resident_slowdown: float = 1.0  # of kernels that share the clusters' registers
    merge_slowdown: float = 1.0  # of a merged main loop against the two it replaces
    spill_words: int  # of other streams that may be moved to memory
    spill_block: int  # words moved at once

    def __post_init__(self) -> None:
        _check_finite(self)
        positive = ("inputs", "width", "producer_loop", "consumer_loop", "allocated_ratio")
        for name in (*positive, "words_per_cycle", "spill_block"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0")
        for name in ("resident_slowdown", "merge_slowdown"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.largest_ratio is not None and self.largest_ratio < self.allocated_ratio:
            raise ValueError("allocated_ratio is more than largest_ratio: nothing could overflow")


class GpuStage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nanoseconds; the number of inputs is static, only the length varies."""

    inputs: int
    word_bytes: int  # of one output in the buffer between producer and consumer
    largest_ratio: float | None = None  # None: unbounded
    node_ns: float  # one kernel in a graph, apart from its work
    produce_ns: float  # per input
    write_ns: float  # per output, by the producer
    consume_ns: float  # per output, by the consumer
    first_ns: float = 0.0  # of the first output, which waits for memory where others overlap
    touch_ns: float  # per memory sector of the data that the consumer touches
    idle_ns: float  # per allocated word that stays empty
    spill_ns: float  # per word beyond the capacity, through the arena instead of the buffer
    spill_base_ns: float  # of a stage that could spill, whether it does or not
    guard_ns: float  # of a loop node that may not be entered
    round_ns: float  # of one turn of the loop, apart from its kernels' work
    resume_ns: float  # per input read again when a producer goes on at its cursor
    double_round_ns: float  # of one turn whose producer and consumer run side by side
    overlap: float  # share of the shorter kernel that disappears beside the longer one
    resident_base_ns: float  # one kernel that holds both, apart from its work
    resident_switch_ns: float  # a barrier between its phases
    resident_slowdown: float
    merge_base_ns: float
    merge_produce_ns: float  # per input
    merge_consume_ns: float  # per output
    merge_touch_ns: float  # per sector

    def __post_init__(self) -> None:
        _check_finite(self)
        if self.inputs < 1 or self.word_bytes < 1:
            raise ValueError("inputs and word_bytes must be at least 1")
        if self.overlap > 1:
            raise ValueError("overlap must be at most 1")


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of ``stream`` and ``gpu`` is there."""

    name: str
    title: str
    modelled: bool
    source: str  # how the numbers came about, for a person
    fingerprint: Fingerprint | None = None  # of the device they were measured on
    stream: StreamProcessor | None = None
    gpu: GpuStage | None = None
    sizes: tuple[GpuStage, ...] = ()  # the same GPU's stage at other numbers of inputs

    def __post_init__(self) -> None:
        if (self.stream is None) == (self.gpu is None):
            raise ValueError("a machine is either a stream processor or a GPU stage")
        if self.gpu is not None and self.fingerprint is None:
            raise ValueError("a GPU stage needs the fingerprint of its device")
        inputs = [one.inputs for one in (*self.sizes, *filter(None, [self.gpu]))]
        if self.sizes and (self.gpu is None or len(set(inputs)) < len(inputs)):
            raise ValueError("other sizes need a GPU stage, and each its own number of inputs")

    @property
    def parameters(self) -> StreamProcessor | GpuStage:
        found = self.stream or self.gpu
        if found is None:
            raise ValueError("a machine is either a stream processor or a GPU stage")
        return found

    @property
    def unit(self) -> str:
        return "cycles" if self.stream is not None else "ns"


def _check_finite(part: StreamProcessor | GpuStage) -> None:
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number of at least 0")
