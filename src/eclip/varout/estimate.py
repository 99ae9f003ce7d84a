"""Choosing a capacity: the one whose expected cost under the model is least, for a distribution.

On a stream processor the buffer is fixed, and a larger allocation per input means shorter strips;
the cost is cycles per input. On a GPU a capacity costs bytes, so a price per byte turns memory into
time. Between the lengths of the sample and their whole fractions every cost is linear in the
capacity, so only those are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.core.lengths import Floats, Lengths
from eclip.errors import PlanningError, UsageError
from eclip.files.machine import GpuStage, Machine, StreamProcessor
from eclip.varout import gpu_model, model
from eclip.varout.mechanisms import Mechanism

Array = npt.NDArray[Any]

CHOICES = tuple(one for one in Mechanism if one is not Mechanism.EXACT)
TAIL = 0.99
_ROUNDS = 16  # capacities down to this fraction of a length are tried
_MOST_VALUES = 64  # of a distribution's lengths, to make capacities from
DEFAULT_PRICE = 1e-6  # ns per byte: a gigabyte is worth a millisecond of every request


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    mechanism: str
    capacity: int  # words
    expected: float  # time of a request, in the machine's unit (a stream processor: per input)
    tail: float  # the same at the length that 99% do not exceed
    overflow: float  # share of requests longer than the capacity
    memory_bytes: int
    cost: float  # the minimised sum of expected time and the price of the memory


def choose(
    machine: Machine,
    lengths: Lengths,
    mechanisms: Iterable[Mechanism] = CHOICES,
    price_ns_per_byte: float = DEFAULT_PRICE,
    most_bytes: int | None = None,
    inputs: int | None = None,
) -> Choice:
    """The cheapest mechanism and capacity among those that can serve every length seen. ``inputs``
    is of the stage to choose for, if the machine was measured with another one."""
    wanted = tuple(mechanisms)
    if Mechanism.EXACT in wanted:
        raise UsageError("exact allocation is the baseline and cannot be chosen")
    if machine.stream is not None:
        found = _stream_choices(machine.stream, lengths, wanted)
    elif machine.gpu is not None:
        stage = machine.gpu
        if inputs is not None:
            stage = gpu_model.at_inputs([stage, *machine.sizes], inputs)
        found = _gpu_choices(stage, lengths, wanted, price_ns_per_byte)
    if most_bytes is not None:
        found = [one for one in found if one.memory_bytes <= most_bytes]
    if not found:
        raise PlanningError(
            f"none of {', '.join(one.value for one in wanted)} can serve lengths up to "
            f"{lengths.longest}"
            + (f" in {most_bytes} bytes" if most_bytes is not None else "")
            + "; allow another mechanism or more memory"
        )
    return min(found, key=lambda one: (one.cost, one.memory_bytes))


def candidates(lengths: Lengths) -> list[int]:
    """Capacities worth trying: lengths, their whole fractions, and twice those for two halves."""
    values = _thinned(np.array([value for value in lengths.values if value > 0], dtype=np.int64))
    tried = [np.array([1])]
    for rounds in range(1, _ROUNDS + 1):
        part = -(-values // rounds)
        tried += [part, 2 * part]
    return [int(capacity) for capacity in np.unique(np.concatenate(tried))]


def _check_bound(lengths: Lengths, inputs: int, largest_ratio: float | None) -> None:
    if largest_ratio is not None and lengths.longest > largest_ratio * inputs:
        raise UsageError(
            f"a length of {lengths.longest} was seen, but {inputs} inputs give at most "
            f"{largest_ratio * inputs:g}"
        )


def _thinned(values: Array) -> Array:
    """At most ``_MOST_VALUES`` of the rising values, evenly spaced, including the last."""
    count = len(values)
    kept = np.unique(np.linspace(0, count - 1, min(count, _MOST_VALUES)).astype(np.int64))
    return values[kept]


def _gpu_choices(
    stage: GpuStage, lengths: Lengths, mechanisms: Iterable[Mechanism], price: float
) -> list[Choice]:
    weights = lengths.weights
    values = np.array([*lengths.values, lengths.quantile(TAIL)])
    _check_bound(lengths, stage.inputs, stage.largest_ratio)
    found = []
    for mechanism in mechanisms:
        fixed = mechanism in (Mechanism.MAXIMUM, Mechanism.MERGE)  # no capacity to choose
        for capacity in [max(1, lengths.longest)] if fixed else candidates(lengths):
            times = gpu_model.times_ns(stage, mechanism, capacity, values)
            if times is None:
                continue
            memory = gpu_model.buffer_bytes(stage, mechanism, capacity, lengths.longest)
            held = memory // stage.word_bytes
            expected = float(times[:-1] @ weights)
            found.append(
                Choice(
                    mechanism=mechanism.value,
                    capacity=held if mechanism is Mechanism.MAXIMUM else capacity,
                    expected=expected,
                    tail=float(times[-1]),
                    overflow=0.0 if fixed else float(weights[values[:-1] > capacity].sum()),
                    memory_bytes=memory,
                    cost=expected + price * memory,
                )
            )
    return found


def _stream_choices(
    machine: StreamProcessor, lengths: Lengths, mechanisms: Iterable[Mechanism]
) -> list[Choice]:
    """Lengths are words per ``machine.inputs`` inputs; the buffer stays as large as it is."""
    _check_bound(lengths, machine.inputs, machine.largest_ratio)
    words = machine.allocated_ratio * machine.inputs
    ratios = np.array(lengths.values) / machine.inputs
    kept = _thinned(ratios)
    tail = lengths.quantile(TAIL) / machine.inputs
    tried = {
        max(1, min(int(words), int(words / (ratio / rounds))))
        for ratio in kept[kept > 0]
        for rounds in (1, 2, 3, 4)
    } or {machine.inputs}
    found = []
    for inputs in sorted(tried):
        strip = msgspec.structs.replace(
            machine,
            inputs=inputs,
            allocated_ratio=words / inputs,
            largest_ratio=None
            if machine.largest_ratio is None
            else max(machine.largest_ratio, words / inputs),
        )
        for mechanism in mechanisms:
            times = _per_input(strip, mechanism, ratios)
            at_tail = _per_input(strip, mechanism, np.array([tail]))
            if times is None or at_tail is None:
                continue
            expected = float(times @ lengths.weights)
            ratio = words / inputs
            if mechanism is Mechanism.MAXIMUM and strip.largest_ratio is not None:
                ratio = strip.largest_ratio
            over = 0.0 if mechanism is Mechanism.MERGE else lengths.weights[ratios > ratio].sum()
            found.append(
                Choice(
                    mechanism=mechanism.value,
                    capacity=round(ratio * machine.inputs),
                    expected=expected,
                    tail=float(at_tail[0]),
                    overflow=float(over),
                    memory_bytes=0,
                    cost=expected,
                )
            )
    return found


def _per_input(strip: StreamProcessor, mechanism: Mechanism, ratios: Floats) -> Floats | None:
    times = []
    for ratio in ratios.tolist():
        time = model.interval(strip, mechanism, ratio)
        if time is None:
            return None
        times.append(time / strip.inputs)
    return np.array(times)


Decide = Callable[[Lengths], Choice]
