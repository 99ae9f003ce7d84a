"""The same machine, cycle by cycle: clusters, two half-buffers, a memory with a queue.

Nothing here knows the closed forms of ``model.py``: every cycle the memory moves its words and the
running kernel reads, writes or waits, and time is what the clock shows when the strip is done.
"""

from __future__ import annotations

import math

import numpy as np

from eclip.files.machine import StreamProcessor
from eclip.jit import compiled, inlined
from eclip.varout.mechanisms import Mechanism

# How the producer's output is held.
_PLAIN, _SWAP, _RESIDENT, _MERGE, _SPILL, _SYMMETRIC, _CONDITIONAL = range(7)
_KINDS = {
    Mechanism.EXACT: _PLAIN,
    Mechanism.MAXIMUM: _PLAIN,
    Mechanism.DOUBLE_SYMMETRIC: _SYMMETRIC,
    Mechanism.DOUBLE_CONDITIONAL: _CONDITIONAL,
    Mechanism.SPILL: _SPILL,
    Mechanism.SWAP: _SWAP,
    Mechanism.RESIDENT: _RESIDENT,
    Mechanism.MERGE: _MERGE,
}
_UNBOUNDED = 1e300
# Phases of the clusters.
_PAUSE, _PRODUCE, _AWAIT, _CONSUME, _RELOAD, _END = range(6)
# What a transfer of the memory's queue is for; 0 and 1 are writes of that half-buffer.
_READ, _SPILLED, _RELOADED = 2, 4, 5  # reads into half-buffer b are _READ + b
_NEVER = 1 << 62
_SHORT = 20_000  # cycles
_QUEUE = 64  # a strip has at most a few transfers waiting at once

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


def simulate(machine: StreamProcessor, mechanism: Mechanism, ratio: float) -> float | None:
    """Cycles of one iteration, or None where the mechanism cannot serve this length."""
    strips, inputs = 1, float(machine.inputs)
    capacity = machine.allocated_ratio * inputs
    if mechanism is Mechanism.MAXIMUM:
        if machine.largest_ratio is None:
            return None
        while machine.largest_ratio * inputs > capacity * (1 + 1e-12):
            strips += 1
            inputs = machine.inputs / strips
    if mechanism in (Mechanism.EXACT, Mechanism.MAXIMUM, Mechanism.MERGE):
        capacity = _UNBOUNDED
    startups = (machine.producer_startup, machine.consumer_startup)
    loops = (machine.producer_loop, machine.consumer_loop)
    change = (machine.suspend, machine.resume)
    if mechanism is Mechanism.RESIDENT:
        startups = (sum(startups), 0.0)
        loops = (loops[0] * machine.resident_slowdown, loops[1] * machine.resident_slowdown)
        change = (machine.resident_switch, machine.resident_switch)
    if mechanism is Mechanism.MERGE:
        one = ratio * loops[1] + loops[0]
        startups, loops = (max(startups), 0.0), (one * machine.merge_slowdown, 0.0)

    def run(ticks: int) -> float:
        """One strip, in cycles, with a clock of so many ticks a cycle."""
        done = _strip(
            _KINDS[mechanism],
            inputs,
            ratio,
            machine.width / loops[0] / ticks,
            (machine.width / loops[1] if loops[1] else _UNBOUNDED) / ticks,
            np.array([*startups, *change]) * ticks,
            capacity,
            inputs * (1 + ratio * machine.consumer_ratio),
            machine.latency * ticks,
            machine.words_per_cycle / ticks,
            float(machine.spill_words),
            float(machine.spill_block),
        )
        return done / ticks

    cycles = run(1)
    if cycles < _SHORT:  # every wait is rounded up to a tick, which a short strip would feel
        cycles = run(math.ceil(_SHORT / cycles))
    return None if math.isinf(cycles) else strips * cycles


@inlined
def _enqueue(
    use: int, words: float, tail: int, queue_use: Ints, queue_left: Floats, queue_words: Floats
) -> int:
    queue_use[tail % _QUEUE] = use
    queue_left[tail % _QUEUE] = words
    queue_words[tail % _QUEUE] = words
    return tail + 1


@compiled
def _strip(
    kind: int,
    inputs: float,
    ratio: float,
    produce_rate: float,  # inputs per cycle
    consume_rate: float,  # words per cycle
    pauses: Floats,  # two start-ups, suspend, resume
    capacity: float,
    background: float,  # words the loop itself loads and stores during this strip
    latency: float,
    words_per_cycle: float,
    spill_words: float,
    spill_block: float,
) -> float:
    """The cycle in which a strip is done; infinite if nothing is left to spill."""
    tiny = 1e-9 * (inputs + 1)
    late = int(np.ceil(latency))
    half = capacity / 2
    room = half if kind in (_SYMMETRIC, _CONDITIONAL) else capacity
    held = np.zeros(2)  # words in each half-buffer; only the first one of an undivided buffer
    busy = np.zeros(2, dtype=np.bool_)  # half-buffers that the memory writes out or reads into
    arrives = np.full(2, _NEVER, dtype=np.int64)
    queue_use = np.zeros(_QUEUE, dtype=np.int64)
    queue_left = np.zeros(_QUEUE)
    queue_words = np.zeros(_QUEUE)
    head = tail = 0
    written = unread = 0.0  # words of the stream that went out, and that must come back
    through_memory = consumer_started = spilling = False
    cursor = spilled = 0.0  # inputs the producer has read; words of other streams moved out
    current = read_into = 0  # half-buffers in use by the clusters, and next to be read into
    background_done = reload_done = _NEVER
    phase, after, pause = _PAUSE, _PRODUCE, pauses[0]
    now = 0
    while phase != _END or now < background_done:
        now += 1
        credit = words_per_cycle
        budget = 1.0
        while credit > 0 and head < tail:
            step = min(credit, queue_left[head % _QUEUE])
            credit -= step
            queue_left[head % _QUEUE] -= step
            if queue_left[head % _QUEUE] > 1e-12:
                break
            use, words = queue_use[head % _QUEUE], queue_words[head % _QUEUE]
            head += 1
            if use < _READ:
                busy[use] = False
                held[use] = 0.0
            elif use < _SPILLED:
                arrives[use - _READ] = now + late
                held[use - _READ] = words
            elif use == _SPILLED:
                room += words
                spilling = False
                budget = credit / words_per_cycle  # the producer waited until now
            else:
                reload_done = now + late
        if background > 0:
            background -= credit
            if background <= 0:
                background_done = now + late
        while budget > 1e-12 and phase != _END:
            if phase == _PAUSE:
                step = min(budget, pause)
                pause -= step
                budget -= step
                if pause <= 1e-12:
                    phase = after
            elif phase == _PRODUCE:
                if busy[current] or spilling:
                    break
                if room - held[current] > tiny or ratio == 0 or inputs - cursor <= tiny:
                    step = min(budget * produce_rate, inputs - cursor)
                    if ratio > 0:
                        step = min(step, (room - held[current]) / ratio)
                    cursor += step
                    held[current] += step * ratio
                    budget -= step / produce_rate
                    if inputs - cursor > tiny:
                        continue
                    if through_memory:
                        tail = _enqueue(
                            current, held[current], tail, queue_use, queue_left, queue_words
                        )
                        busy[current] = True
                        unread = written + held[current]
                        current = read_into = 1 - current
                        phase = _AWAIT
                    else:
                        current = 0
                        phase, after, pause = _PAUSE, _CONSUME, pauses[1]
                elif kind == _SWAP:
                    phase, after, pause = _PAUSE, _CONSUME, pauses[2] + pauses[1]
                elif kind == _RESIDENT:
                    phase, after, pause = _PAUSE, _CONSUME, pauses[2]
                elif kind == _SPILL:
                    if spilled + spill_block > spill_words:
                        return np.inf
                    spilled += spill_block
                    spilling = True
                    tail = _enqueue(_SPILLED, spill_block, tail, queue_use, queue_left, queue_words)
                elif kind == _CONDITIONAL and not through_memory and current == 0:
                    current = 1
                else:
                    # A half is full and leaves; the first time of a conditional one, both do.
                    for which in range(2):
                        both = kind == _CONDITIONAL and not through_memory
                        if which == current or both:
                            tail = _enqueue(
                                which, held[which], tail, queue_use, queue_left, queue_words
                            )
                            written += held[which]
                            busy[which] = True
                    through_memory = True
                    current = 1 - current
            elif phase == _AWAIT:
                if arrives[current] > now:
                    break
                if consumer_started:
                    phase = _CONSUME
                else:
                    consumer_started = True
                    phase, after, pause = _PAUSE, _CONSUME, pauses[1]
            elif phase == _CONSUME:
                step = min(budget * consume_rate, held[current])
                held[current] -= step
                budget -= step / consume_rate
                if held[current] > tiny:
                    continue
                held[current] = 0.0
                if through_memory:
                    arrives[current] = _NEVER
                    busy[current] = False
                    current = 1 - current
                    phase = _AWAIT if unread > tiny or busy[current] else _END
                elif held[1] > tiny:
                    current = 1
                elif inputs - cursor > tiny:
                    phase, after, pause = _PAUSE, _PRODUCE, pauses[3]
                elif spilled > 0:
                    tail = _enqueue(_RELOADED, spilled, tail, queue_use, queue_left, queue_words)
                    phase = _RELOAD
                else:
                    phase = _END
            elif now >= reload_done:
                phase = _END
            else:
                break
        # Reads go to the half-buffers in turn, as soon as each is free.
        while unread > tiny and not busy[read_into]:
            words = min(half, unread)
            tail = _enqueue(_READ + read_into, words, tail, queue_use, queue_left, queue_words)
            busy[read_into] = True
            unread -= words
            read_into = 1 - read_into
    return float(now)
