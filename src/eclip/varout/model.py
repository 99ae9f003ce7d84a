"""Closed forms: the iteration interval of a software-pipelined loop under every mechanism.

One iteration runs the producer and the consumer of a strip on the clusters, one after the other,
while the memory loads the next strip's input and stores the previous strip's output; it ends when
both have ended. A transfer of k words holds the memory for k / words_per_cycle and has arrived a
latency later; a mechanism's own transfers go before the loads and stores of the loop. A result of
None means that the mechanism cannot serve this length.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from eclip.errors import UsageError
from eclip.files.machine import StreamProcessor
from eclip.varout.mechanisms import Mechanism

_ROUNDING = 1e-9  # relative; lengths are whole words, their ratios are not exact


def interval(machine: StreamProcessor, mechanism: Mechanism, ratio: float) -> float | None:
    """Cycles of one iteration whose producer writes ``ratio`` words per input."""
    if not (ratio >= 0 and math.isfinite(ratio)):
        raise UsageError(f"an output ratio is a finite number of at least 0, not {ratio}")
    if machine.largest_ratio is not None and ratio > machine.largest_ratio:
        raise UsageError(f"A = {ratio:g} exceeds the largest there can be, {machine.largest_ratio}")
    return _FORMS[mechanism](machine, ratio)


def growth(machine: StreamProcessor, mechanism: Mechanism, ratio: float) -> float | None:
    """By which share the interval is longer than with exact allocation."""
    mine = interval(machine, mechanism, ratio)
    exact = interval(machine, Mechanism.EXACT, ratio)
    return None if mine is None or exact is None else mine / exact - 1


def _whole(parts: float) -> int:
    """The number of whole parts, with a tolerance for rounding errors."""
    return math.ceil(parts * (1 - _ROUNDING))


def _loop(machine: StreamProcessor, ratio: float, compute: float, extra_words: float) -> float:
    """The iteration of a strip: the longer of the times of clusters and memory."""
    words = machine.inputs * (1 + ratio * machine.consumer_ratio) + extra_words
    return max(compute, machine.latency + words / machine.words_per_cycle)


def _produce(machine: StreamProcessor) -> float:
    return machine.inputs * machine.producer_loop / machine.width


def _consume(machine: StreamProcessor, ratio: float) -> float:
    return ratio * machine.inputs * machine.consumer_loop / machine.width


def _exact_compute(machine: StreamProcessor, ratio: float) -> float:
    startups = machine.producer_startup + machine.consumer_startup
    return startups + _produce(machine) + _consume(machine, ratio)


def _exact(machine: StreamProcessor, ratio: float) -> float | None:
    return _loop(machine, ratio, _exact_compute(machine, ratio), 0.0)


def _maximum(machine: StreamProcessor, ratio: float) -> float | None:
    """The same buffer must hold the longest output, so strips are shorter and start-ups more."""
    if machine.largest_ratio is None:
        return None
    strips = max(1, _whole(machine.largest_ratio / machine.allocated_ratio))
    startups = machine.producer_startup + machine.consumer_startup
    compute = startups + (_produce(machine) + _consume(machine, ratio)) / strips
    words = machine.inputs * (1 + ratio * machine.consumer_ratio) / strips
    return strips * max(compute, machine.latency + words / machine.words_per_cycle)


def _rounds(machine: StreamProcessor, ratio: float) -> int:
    return max(1, _whole(ratio / machine.allocated_ratio))


def _swap(machine: StreamProcessor, ratio: float) -> float | None:
    once = machine.suspend + machine.resume + machine.consumer_startup
    swaps = _rounds(machine, ratio) - 1
    return _loop(machine, ratio, _exact_compute(machine, ratio) + swaps * once, 0.0)


def _resident(machine: StreamProcessor, ratio: float) -> float | None:
    """The consumer is started once; after that a full or empty buffer only switches between
    producer and consumer."""
    startups = machine.producer_startup + machine.consumer_startup
    work = (_produce(machine) + _consume(machine, ratio)) * machine.resident_slowdown
    switches = 2 * (_rounds(machine, ratio) - 1) * machine.resident_switch
    return _loop(machine, ratio, startups + work + switches, 0.0)


def _merge(machine: StreamProcessor, ratio: float) -> float | None:
    startup = max(machine.producer_startup, machine.consumer_startup)
    work = (_produce(machine) + _consume(machine, ratio)) * machine.merge_slowdown
    return _loop(machine, ratio, startup + work, 0.0)


def _spill(machine: StreamProcessor, ratio: float) -> float | None:
    """Blocks of another stream leave while the producer waits, and return after the consumer."""
    if _rounds(machine, ratio) == 1:
        return _exact(machine, ratio)
    excess = (ratio - machine.allocated_ratio) * machine.inputs
    moved = _whole(excess / machine.spill_block) * machine.spill_block
    if moved > machine.spill_words:
        return None
    stall = 2 * moved / machine.words_per_cycle + machine.latency
    return _loop(machine, ratio, _exact_compute(machine, ratio) + stall, 2.0 * moved)


def _double_symmetric(machine: StreamProcessor, ratio: float) -> float | None:
    half = machine.allocated_ratio * machine.inputs / 2
    total = ratio * machine.inputs
    halves = _whole(total / half)
    if halves <= 1:
        return _exact(machine, ratio)
    fill, move = _half_times(machine, ratio, half)
    before_last = fill + (halves - 2) * max(fill, move)
    return _through_memory(machine, ratio, half, before_last)


def _double_conditional(machine: StreamProcessor, ratio: float) -> float | None:
    half = machine.allocated_ratio * machine.inputs / 2
    total = ratio * machine.inputs
    halves = _whole(total / half)
    if halves <= 2:
        return _exact(machine, ratio)
    fill, move = _half_times(machine, ratio, half)
    # Both halves are full before the first leaves, which the producer must wait for.
    before_last = 2 * fill + move + (halves - 3) * max(fill, move)
    return _through_memory(machine, ratio, half, before_last)


def _half_times(machine: StreamProcessor, ratio: float, half: float) -> tuple[float, float]:
    """To fill a half-buffer, and to move it between buffer and memory."""
    words = ratio * machine.inputs
    return half * _produce(machine) / words, half / machine.words_per_cycle


def _through_memory(
    machine: StreamProcessor, ratio: float, half: float, before_last: float
) -> float:
    """An iteration whose stream goes to memory and back. The last half is filled from time
    ``before_last`` on, counted from the end of the producer's start-up."""
    words = ratio * machine.inputs
    halves = _whole(words / half)
    last = words - (halves - 1) * half
    _, move = _half_times(machine, ratio, half)
    last_fill = last * _produce(machine) / words
    last_move = last / machine.words_per_cycle
    written = before_last + max(last_fill, move) + last_move
    compute = machine.producer_startup + written + _read_back(machine, half, halves, last)
    return _loop(machine, ratio, compute, 2 * words)


def _read_back(machine: StreamProcessor, half: float, halves: int, last: float) -> float:
    """The time from the first read to the last consumed word, through two half-buffers.

    Read i needs the memory after read i - 1 and the buffer that half i - 2 leaves; half i is
    consumed after half i - 1 and its own arrival. The time is that of the longest path through
    these waits. A path stays on the reads or on the consumption for a while, and each change from
    consumption to reads skips one half and costs a whole ``turn``; being linear in the number of
    changes, the longest path has none, one, or as many as there can be.
    """
    move = half / machine.words_per_cycle
    eat = half * machine.consumer_loop / machine.width
    turn = move + machine.latency + eat
    start = machine.consumer_startup
    slower = max(move, eat)

    def changes(count: int) -> set[int]:
        return {1, (count - 1) // 2} if count > 2 else set()

    def eaten(count: int) -> float:
        paths = [(count - 1) * slower + turn, start + (count - 1) * eat + turn]
        paths += [
            start + (count - 1 - 2 * turns) * slower + (turns + 1) * turn
            for turns in changes(count)
        ]
        return max(paths)

    def issued(count: int) -> float:
        paths = [(count - 1) * move]
        paths += [
            start + (count - 1 - 2 * turns) * slower + turns * turn for turns in changes(count)
        ]
        return max(paths)

    arrived = issued(halves) + last / machine.words_per_cycle + machine.latency
    return max(eaten(halves - 1), arrived) + last * machine.consumer_loop / machine.width


_FORMS: dict[Mechanism, Callable[[StreamProcessor, float], float | None]] = {
    Mechanism.EXACT: _exact,
    Mechanism.MAXIMUM: _maximum,
    Mechanism.DOUBLE_SYMMETRIC: _double_symmetric,
    Mechanism.DOUBLE_CONDITIONAL: _double_conditional,
    Mechanism.SPILL: _spill,
    Mechanism.SWAP: _swap,
    Mechanism.RESIDENT: _resident,
    Mechanism.MERGE: _merge,
}
