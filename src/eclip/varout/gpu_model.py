"""Closed forms for a stage inside a captured graph: a producer, a consumer, a mechanism.

On a GPU the buffer is memory like any other, so a capacity costs bytes rather than shorter strips,
and time is made of kernels in a graph (``node_ns``), work per element, and what loops and barriers
take. ``fit`` turns measured times into the constants; every form is linear in them once the length
and the capacity are known, which is what makes the fit a small least-squares problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.errors import UsageError
from eclip.files.machine import GpuStage
from eclip.varout.mechanisms import Mechanism

Floats = npt.NDArray[np.float64]
MOST_THREADS = 1 << 18  # of a kernel that takes outputs; for longer buffers they take turns
_SECTOR = 8  # words of 4 bytes that memory moves at once


def time_ns(stage: GpuStage, mechanism: Mechanism, capacity: int, length: int) -> float | None:
    """Nanoseconds of one request whose producer writes ``length`` words, of which ``capacity``
    fit its buffer. None: the mechanism cannot serve it."""
    found = times_ns(stage, mechanism, capacity, np.array([length]))
    return None if found is None else float(found[0])


def times_ns(
    stage: GpuStage, mechanism: Mechanism, capacity: int, lengths: npt.ArrayLike
) -> Floats | None:
    """``time_ns`` for many lengths at once."""
    words = np.asarray(lengths, dtype=np.float64)
    if capacity < 1 or (words < 0).any():
        raise UsageError(
            f"a stage needs a capacity of at least 1 and lengths of at least 0, not {capacity} and "
            f"{words.min():g}"
        )
    return _FORMS[mechanism](stage, float(capacity), words)


def buffer_bytes(stage: GpuStage, mechanism: Mechanism, capacity: int, longest: int) -> int:
    """The memory that the mechanism allocates for this stage alone. An arena must hold the excess
    of the longest possible output over the capacity; without a limit, of the ``longest`` seen."""
    if mechanism is Mechanism.MERGE:
        return 0
    words = capacity
    if mechanism in (Mechanism.MAXIMUM, Mechanism.SPILL):
        bound = stage.largest_ratio
        most = longest if bound is None else math.ceil(bound * stage.inputs)
        words = max(capacity, most) if mechanism is Mechanism.SPILL else most
    return words * stage.word_bytes


def at_inputs(stages: Sequence[GpuStage], inputs: int) -> GpuStage:
    """The stage for ``inputs`` inputs, from measurements at other sizes.

    Between two sizes the time of a request with the same share of outputs and capacity is assumed
    linear in the inputs, so constants per element are weighted means. Beyond the measured sizes the
    constants of the nearest size hold.
    """
    ordered = sorted(stages, key=lambda one: one.inputs)
    above = next((at for at, one in enumerate(ordered) if one.inputs > inputs), len(ordered))
    if above in (0, len(ordered)):
        return msgspec.structs.replace(ordered[max(0, above - 1)], inputs=inputs)
    low, high = ordered[above - 1 : above + 1]
    share = (inputs - low.inputs) / (high.inputs - low.inputs)
    values = {}
    for name in GpuStage.__struct_fields__:
        if name in _NOT_TIMES:
            continue
        parts = [(1 - share) * getattr(low, name), share * getattr(high, name)]
        if name in _PER_ELEMENT:
            parts = [parts[0] * low.inputs / inputs, parts[1] * high.inputs / inputs]
        values[name] = sum(parts)
    return msgspec.structs.replace(low, inputs=inputs, **values)


_NOT_TIMES = ("inputs", "word_bytes", "largest_ratio")
_PER_ELEMENT = (
    "produce_ns", "write_ns", "consume_ns", "touch_ns", "idle_ns", "spill_ns", "resume_ns",
    "merge_produce_ns", "merge_consume_ns", "merge_touch_ns",
)  # fmt: skip


def _sectors(stage: GpuStage, length: Floats) -> Floats:
    """Sectors of the data that hold at least one output, with ``length`` outputs spread evenly: the
    first outputs touch a new sector each, the last outputs do not."""
    share = np.minimum(1.0, length / stage.inputs)
    found: Floats = stage.inputs / _SECTOR * (1 - (1 - share) ** _SECTOR)
    return found


def _work(stage: GpuStage, length: Floats) -> Floats:
    """The time of producer and consumer, with each output written and read once. For the first
    output the consumer waits for an index, a value and a store; later outputs share this wait."""
    each = (stage.write_ns + stage.consume_ns) * length + stage.first_ns * (length > 0)
    return stage.produce_ns * stage.inputs + each + stage.touch_ns * _sectors(stage, length)


def _idle(stage: GpuStage, room: float, length: Floats) -> Floats:
    """The time of the consumer's idle threads."""
    found: Floats = stage.idle_ns * np.maximum(0.0, min(room, MOST_THREADS) - length)
    return found


def _exact(stage: GpuStage, capacity: float, length: Floats) -> Floats | None:
    return 2 * stage.node_ns + _work(stage, length)


def _maximum(stage: GpuStage, capacity: float, length: Floats) -> Floats | None:
    if stage.largest_ratio is None:
        return None
    empty = _idle(stage, stage.largest_ratio * stage.inputs, length)
    return 2 * stage.node_ns + _work(stage, length) + empty


def _spill(stage: GpuStage, capacity: float, length: Floats) -> Floats | None:
    room = capacity if stage.largest_ratio is None else stage.largest_ratio * stage.inputs
    empty = _idle(stage, max(capacity, room), length)
    beyond: Floats = stage.spill_ns * np.maximum(0.0, length - capacity)
    return 2 * stage.node_ns + stage.spill_base_ns + _work(stage, length) + empty + beyond


def _reread(stage: GpuStage, first: float, length: Floats) -> Floats:
    """The time for reading inputs again for the outputs after the first ``first``."""
    again: Floats = np.maximum(0.0, 1 - first / np.maximum(length, 1.0))
    return stage.resume_ns * stage.inputs * again


def _swap(stage: GpuStage, capacity: float, length: Floats) -> Floats | None:
    turns: Floats = np.maximum(0.0, np.ceil(length / capacity) - 1)
    base = 2 * stage.node_ns + stage.guard_ns + turns * stage.round_ns
    empty = _idle(stage, capacity, length)
    return base + _work(stage, length) + empty + _reread(stage, capacity, length)


def _double(stage: GpuStage, half: float, first: float, length: Floats) -> Floats:
    """The time with two half-buffers. The first ``first`` words are produced before the loop; each
    turn drains one half while it fills the other; the last half is drained after the loop. If both
    halves are full when the loop begins, its first turn only drains."""
    fills = np.maximum(0.0, np.ceil((length - first) / half))
    turns = fills + (fills > 0) if first > half else fills
    base = 2 * stage.node_ns + stage.guard_ns + turns * stage.double_round_ns
    empty = _idle(stage, first, length)
    fill = stage.write_ns * half + stage.resume_ns * stage.inputs * half / np.maximum(length, 1.0)
    hidden = stage.overlap * fills * np.minimum(fill, stage.consume_ns * half)
    return base + _work(stage, length) + empty + _reread(stage, first, length) - hidden


def _double_symmetric(stage: GpuStage, capacity: float, length: Floats) -> Floats | None:
    half = max(1.0, capacity // 2)
    return _double(stage, half, half, length)


def _double_conditional(stage: GpuStage, capacity: float, length: Floats) -> Floats | None:
    half = max(1.0, capacity // 2)
    return _double(stage, half, 2 * half, length)


def _resident(stage: GpuStage, capacity: float, length: Floats) -> Floats | None:
    rounds = np.maximum(1.0, np.ceil(length / capacity))
    work = _work(stage, length) + _reread(stage, capacity, length)
    switches = 2 * rounds * stage.resident_switch_ns
    return stage.resident_base_ns + switches + stage.resident_slowdown * work


def _merge(stage: GpuStage, capacity: float, length: Floats) -> Floats | None:
    work = stage.merge_produce_ns * stage.inputs + stage.merge_consume_ns * length
    return stage.merge_base_ns + work + stage.merge_touch_ns * _sectors(stage, length)


_FORMS: dict[Mechanism, Callable[[GpuStage, float, Floats], Floats | None]] = {
    Mechanism.EXACT: _exact,
    Mechanism.MAXIMUM: _maximum,
    Mechanism.DOUBLE_SYMMETRIC: _double_symmetric,
    Mechanism.DOUBLE_CONDITIONAL: _double_conditional,
    Mechanism.SPILL: _spill,
    Mechanism.SWAP: _swap,
    Mechanism.RESIDENT: _resident,
    Mechanism.MERGE: _merge,
}


@dataclass(frozen=True)
class Sample:
    """A measured point of a stage."""

    mechanism: Mechanism
    capacity: int
    length: int
    time_ns: float


# The constants fitted to each group of samples, in this order. The producer's time without output
# and the node's own time cannot be separated at one size, so ``node_ns`` is measured separately,
# like a merged kernel's.
_STEPS: tuple[tuple[tuple[Mechanism, ...], tuple[str, ...]], ...] = (
    ((Mechanism.EXACT,), ("produce_ns", "first_ns", "write_ns", "touch_ns")),
    ((Mechanism.MAXIMUM,), ("idle_ns",)),
    ((Mechanism.SPILL,), ("spill_base_ns", "spill_ns")),
    ((Mechanism.SWAP,), ("guard_ns", "round_ns", "resume_ns")),
    (
        (Mechanism.DOUBLE_SYMMETRIC, Mechanism.DOUBLE_CONDITIONAL),
        ("double_round_ns", "overlap"),
    ),
    ((Mechanism.RESIDENT,), ("resident_base_ns", "resident_switch_ns", "resident_slowdown")),
    ((Mechanism.MERGE,), ("merge_produce_ns", "merge_consume_ns", "merge_touch_ns")),
)


def fit(
    samples: Sequence[Sample],
    inputs: int,
    word_bytes: int,
    node_ns: float,
    merge_base_ns: float,
    consume_share: float,
    largest_ratio: float | None,
) -> GpuStage:
    """Constants from measured points of every mechanism.

    ``consume_share`` is the consumer's part of the time per output, which matters only for overlap.
    Relative errors are minimised, so that short and long requests count equally.
    """
    nothing: dict[str, float | None] = dict.fromkeys(GpuStage.__struct_fields__, 0.0)
    known = {
        "inputs": inputs,
        "word_bytes": word_bytes,
        "largest_ratio": largest_ratio,
        "node_ns": node_ns,
        "merge_base_ns": merge_base_ns,
    }
    stage = msgspec.convert(nothing | known, GpuStage)
    for mechanisms, names in _STEPS:
        mine = [sample for sample in samples if sample.mechanism in mechanisms]
        if len(mine) < len(names):
            raise UsageError(
                f"{len(mine)} measured points of {mechanisms[0].value} cannot settle {len(names)} "
                f"constants; measure more lengths"
            )
        stage = _settle(stage, mine, names)
        if Mechanism.EXACT in mechanisms:
            stage = msgspec.structs.replace(
                stage,
                write_ns=stage.write_ns * (1 - consume_share),
                consume_ns=stage.write_ns * consume_share,
            )
    return stage


def _settle(stage: GpuStage, samples: Sequence[Sample], names: tuple[str, ...]) -> GpuStage:
    """Least squares for ``names`` within their limits; the other constants stay."""
    free = list(names)
    while free:
        base = [_predict(stage, one) for one in samples]
        columns = [
            [
                _predict(msgspec.structs.replace(stage, **{name: 1.0}), one) - at_zero
                for one, at_zero in zip(samples, base, strict=True)
            ]
            for name in free
        ]
        scale = 1 / np.array([one.time_ns for one in samples])
        matrix = np.array(columns).T * scale[:, None]
        wanted = 1 - np.array(base) * scale
        norms = np.linalg.norm(matrix, axis=0)
        norms[norms == 0] = 1
        found = np.linalg.lstsq(matrix / norms, wanted, rcond=None)[0] / norms
        values = dict(zip(free, found.tolist(), strict=True))
        # A constant beyond a limit stays at the limit, and the others are fitted again.
        if values.get("overlap", 0.0) > 1:
            stage = msgspec.structs.replace(stage, overlap=1.0)
            free.remove("overlap")
        elif (found < 0).any():
            free.pop(int(np.argmin(found * norms)))
        else:
            return msgspec.structs.replace(stage, **values)
    return stage


def _predict(stage: GpuStage, sample: Sample) -> float:
    found = time_ns(stage, sample.mechanism, sample.capacity, sample.length)
    if found is None:
        raise UsageError(f"{sample.mechanism.value} was measured but cannot serve this stage")
    return found
