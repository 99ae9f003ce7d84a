"""The CUDA kernels of variable-output stages, run thread by thread on the CPU.

What the graphs of ``varout/cuda/stage.py`` do is done here by hand: the same kernels in the same
order, loops while the condition holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import varout_reference_ops as reference_ops
from eclip.varout.cuda import build
from eclip.varout.mechanisms import Mechanism
from simt import COMPILER, Emulated

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU")

TILE = build.ITEMS * 64  # inputs a block takes, with the emulation's 64 threads
COUNT, CONSUMED, PRODUCED, EPOCH, TICKET, FINISHED, BARRIER = range(7)
EVERYTHING, WINDOW, WINDOW_KEEP, REST = range(4)
MECHANISMS = [one for one in Mechanism if one is not Mechanism.EXACT]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated(build.source(), tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def large_tiles(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """As for large inputs: twice as many items a thread."""
    items = build.items_for(1 << 26, 4)
    assert items == 2 * build.ITEMS
    return Emulated(build.source(), tmp_path_factory.mktemp("large"), [f"-DITEMS={items}"])


def words(count: int) -> npt.NDArray[np.int64]:
    return np.zeros(max(1, count), dtype=np.int64)


class Stage:
    """Buffers that stay from request to request, as on the GPU."""

    def __init__(
        self, kernels: Emulated, inputs: int, capacity: int, arena: int, tile: int = TILE
    ) -> None:
        self.kernels, self.inputs, self.capacity, self.arena_words = (
            kernels, inputs, capacity, arena,
        )  # fmt: skip
        self.tiles = max(1, -(-inputs // tile))
        self.buffer, self.arena = words(capacity), words(arena)
        self.sums, self.state = words(self.tiles), words(16)

    def select(self, x: Any, first: int, arena: int = 0, loops: int = 0) -> None:
        self.kernels(
            "select", self.tiles, x, 0, self.inputs, self.buffer, first, self.arena,
            arena, self.sums, self.state, 0, loops,
        )  # fmt: skip

    def resume(self, x: Any, window: int) -> None:
        self.kernels(
            "resume", self.tiles, x, 0, self.inputs, self.buffer, self.capacity, window,
            self.sums, self.state,
        )  # fmt: skip

    def consume(self, x: Any, y: Any, what: int, window: int, arena: int = 0) -> None:
        self.kernels(
            "consume", 2, x, y, self.buffer, self.capacity, self.arena, arena, what, window,
            self.state, 0,
        )  # fmt: skip

    def resident(self, blocks: int, x: Any, y: Any) -> None:
        self.kernels(
            "resident", blocks, x, 0, self.inputs, x, y, self.buffer, self.capacity, self.sums,
            self.state,
        )  # fmt: skip

    def request(self, mechanism: Mechanism, x: Any, y: Any, backwards: bool) -> None:
        half = self.capacity // 2
        if mechanism is Mechanism.MERGE:
            self.kernels("merged", 3, x, self.inputs, x, y, self.state)
        elif mechanism is Mechanism.RESIDENT:
            self.resident(3, x, y)
        elif mechanism is Mechanism.SWAP:
            self.select(x, self.capacity)
            self.consume(x, y, WINDOW, self.capacity)
            while self.kernels.condition:
                self.resume(x, self.capacity)
                self.consume(x, y, WINDOW, self.capacity)
        elif mechanism in (Mechanism.DOUBLE_SYMMETRIC, Mechanism.DOUBLE_CONDITIONAL):
            symmetric = mechanism is Mechanism.DOUBLE_SYMMETRIC
            self.select(x, half if symmetric else self.capacity, loops=1)
            while self.kernels.condition:
                # Side by side on the GPU, so that either may come first.
                steps: list[Callable[[], None]] = [
                    lambda: self.resume(x, half),
                    lambda: self.consume(x, y, WINDOW_KEEP, half),
                ]
                for step in reversed(steps) if backwards else steps:
                    step()
                self.kernels("advance", 1, self.capacity, half, self.state, 0, threads=1)
            self.consume(x, y, REST, self.capacity)
        else:
            self.select(x, self.capacity, self.arena_words)
            self.consume(x, y, EVERYTHING, self.capacity, self.arena_words)


def data(inputs: int, length: int, seed: int) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(seed)
    x = np.where(random.random(inputs) < 0.5, np.float32(0.0), np.float32(-0.0))
    if seed % 3 == 0:
        x[inputs - length :] = 3.0  # all at the end
    else:
        x[random.choice(inputs, length, replace=False)] = random.integers(1, 99, length)
    return x.astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda one: one.value)
@pytest.mark.parametrize(("inputs", "capacity"), [(1, 2), (TILE, 64), (3 * TILE + 77, 500)])
@pytest.mark.parametrize("large", [False, True], ids=["tiles", "large tiles"])
def test_every_length_under_every_mechanism(
    request: pytest.FixtureRequest, mechanism: Mechanism, inputs: int, capacity: int, large: bool
) -> None:
    kernels = request.getfixturevalue("large_tiles" if large else "kernels")
    wanted = {0, 1, capacity // 2, capacity, capacity + 1, 2 * capacity, 2 * capacity + 1, inputs}
    held = inputs if mechanism is Mechanism.MAXIMUM else capacity
    arena = inputs if mechanism is Mechanism.SPILL else 0
    stage = Stage(kernels, inputs, held, arena, 2 * TILE if large else TILE)
    for seed, length in enumerate(sorted(length for length in wanted if length <= inputs)):
        x = data(inputs, length, seed)
        y = np.full(inputs, -7, dtype=np.float32)
        stage.request(mechanism, x, y, backwards=seed % 2 == 1)
        assert stage.state[COUNT] == length
        assert np.array_equal(y, np.where(x != 0, 2 * x + 1, np.float32(-7))), length


def test_outputs_are_in_the_order_of_the_inputs(kernels: Emulated) -> None:
    x = data(5 * TILE, 2000, 1)
    stage = Stage(kernels, len(x), 700, len(x))
    stage.select(x, 700, len(x))
    got = np.concatenate([stage.buffer[:700], stage.arena[:1300]])
    assert np.array_equal(got, np.flatnonzero(x))


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 4])
def test_tiles_look_back_further_than_a_warp(
    kernels: Emulated, tmp_path: Path, at_once: int
) -> None:
    """In one look and in several, which so few blocks would not need."""
    text = build.source()
    assert "BACK_AT_ONCE = 4" in text
    if at_once != 4:
        kernels = Emulated(text.replace("BACK_AT_ONCE = 4", f"BACK_AT_ONCE = {at_once}"), tmp_path)
    x = data(60 * TILE, 5000, 1)
    stage = Stage(kernels, len(x), len(x), 0)
    for blocks in (None, None, 5, 40):  # fewer find the sums of all tiles before, not each's own
        stage.buffer[:] = -5
        if blocks is None:
            stage.select(x, len(x))
        else:
            stage.resident(blocks, x, np.zeros_like(x))
        assert np.array_equal(stage.buffer[:5000], np.flatnonzero(x))


def test_sums_carry_the_number_of_their_request(kernels: Emulated) -> None:
    """So that a tile which runs early does not take the last request's sums for this one's."""
    stage = Stage(kernels, 3 * TILE, 64, 0)
    for request in range(4):
        assert stage.state[EPOCH] == request
        stage.select(data(3 * TILE, 100 + request, request), 64)
        assert [int(one) >> 34 for one in stage.sums] == [request] * 3
        assert [int(one) >> 32 & 3 for one in stage.sums] == [2] * 3  # all tiles up to it
        assert int(stage.sums[-1]) & 0xFFFFFFFF == 100 + request


@pytest.mark.slow
def test_the_last_tile_closes_the_request(kernels: Emulated) -> None:
    """Whatever the order in which blocks get on: every request finds the state as it needs it."""
    inputs = 20 * TILE + 5
    stage = Stage(kernels, inputs, 500, 0)
    for request, length in enumerate([0, 499, 500, 501, inputs] * 3):
        x = data(inputs, length, request)
        stage.buffer[:] = -5
        stage.select(x, 500, loops=1)
        assert kernels.condition == (length > 500)
        held = min(length, 500)
        assert stage.state[[COUNT, CONSUMED, PRODUCED]].tolist() == [length, 0, held]
        assert stage.state[[EPOCH, TICKET, FINISHED]].tolist() == [request + 1, 0, 0]
        assert np.array_equal(stage.buffer[:held], np.flatnonzero(x)[:held])
        assert (stage.buffer[held:] == -5).all()


def test_an_arena_that_is_too_small_is_not_written_beyond(kernels: Emulated) -> None:
    x = data(2 * TILE, 900, 1)
    stage = Stage(kernels, len(x), 100, 400)
    stage.arena[300:] = -1
    stage.select(x, 100, 300)
    assert stage.state[COUNT] == 900  # the host knows what was needed
    assert (stage.arena[300:] == -1).all()
    y = np.full(len(x), -7, dtype=np.float32)
    stage.consume(x, y, EVERYTHING, 100, 300)
    assert np.count_nonzero(y != -7) == 400


class Seen:
    """What ``Window`` hands to a body, written when it is asked for."""

    def __init__(self, kernels: Emulated, state: Any, size: int, slots: Any, listed: int) -> None:
        self._kernels, self._state, self._size = kernels, state, size
        self._slots, self._listed = slots, listed

    @property
    def valid(self) -> Any:
        valid = np.full(8 * -(-self._size // 8), 7, dtype=np.uint8)
        self._kernels("valid", 3, self._size, valid, self._state)
        assert set(valid[: self._size].tolist()) <= {0, 1}
        return valid[: self._size].astype(bool)

    @property
    def values(self) -> Any:
        if not self._listed:
            self._kernels("values", 3, self._size, self._slots, 0, self._state)
            return self._slots[: self._size]
        copied = np.full(self._size, -5, dtype=np.int64)
        self._kernels("values", 3, self._size, copied, self._slots, self._state)
        return copied

    def take(self, x: Any, rows: Any) -> None:
        self._move("take", x, rows, rows)

    def put(self, rows: Any, y: Any) -> None:
        self._move("put", rows, y, rows)

    def _move(self, name: str, source: Any, target: Any, rows: Any) -> None:
        row = int(np.prod(rows.shape[1:], dtype=int))
        self._kernels(
            name, 3, source, target, self._slots, self._listed, self._size, row, rows.itemsize,
            self._state,
        )  # fmt: skip


def windows(
    kernels: Emulated,
    state: Any,
    size: int,
    slots: Any,
    resume: Callable[[], None] | None = None,
    first: int = build.STAY,
) -> Iterator[Seen]:
    """What ``Ragged.each`` does in a graph. Without anything to resume, the slots are a list of all
    outputs: the first window is its beginning, and others begin where the state says."""

    def move(where: int) -> None:
        kernels("next", 1, where, size, state, 0, 1, threads=1)
        if where != build.STAY and resume:
            resume()

    move(first)
    yield Seen(kernels, state, size, slots, 0)
    while kernels.condition:
        move(build.ADVANCE)
        yield Seen(kernels, state, size, slots, int(resume is None))


LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 1000]


@pytest.mark.parametrize("length", LENGTHS)
def test_windows_for_somebody_elses_consumer(kernels: Emulated, length: int) -> None:
    x = data(2 * TILE, length, 2)
    stage = Stage(kernels, len(x), 64, 0)
    for request in range(4):
        if request != 1:  # the second consumer of the first request begins again
            stage.buffer[:] = -5  # what was never written is no position
            stage.select(x, 64)
        first = build.REWIND if request == 1 else build.STAY
        got: list[int] = []
        turns = 0
        for seen in windows(
            kernels, stage.state, 64, stage.buffer, lambda: stage.resume(x, 64), first
        ):
            slots, valid = seen.values, seen.valid
            left = min(64, length - 64 * turns)
            assert valid.tolist() == [slot < left for slot in range(64)]
            assert (slots[~valid] == 0).all()
            got += slots[valid].tolist()
            turns += 1
        assert got == np.flatnonzero(x).tolist()
        assert turns == max(1, -(-length // 64))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", [61, 64])
def test_windows_of_a_list_of_all_outputs(kernels: Emulated, length: int, window: int) -> None:
    """The list stays whole, and what it was selected from may change meanwhile."""
    given = data(2 * TILE, length, 2)
    wanted = np.flatnonzero(given).tolist()
    stage = Stage(kernels, len(given), len(given), 0)
    stage.buffer[:] = -5
    x = given.copy()
    stage.select(x, len(x))
    for first in (build.STAY, build.REWIND):
        got: list[int] = []
        for seen in windows(kernels, stage.state, window, stage.buffer, first=first):
            held, valid = seen.values, seen.valid
            assert (held[~valid] == 0).all()
            got += held[valid].tolist()
            x[held[valid]] = 0
        assert got == wanted
        assert stage.buffer[:length].tolist() == wanted
    kernels("clear", 2, stage.buffer, len(x), stage.state)
    assert stage.buffer.tolist() == wanted + [0] * (len(x) - length)


@pytest.mark.parametrize("kind", [np.uint8, np.float16, np.float32, np.int64])
@pytest.mark.parametrize("row", [(), (3,), (2, 5)], ids=str)
@pytest.mark.parametrize("length", [0, 1, 59, 64, 150])
@pytest.mark.parametrize("listed", [False, True], ids=["again", "listed"])
def test_rows_are_taken_from_and_put_to_positions(
    kernels: Emulated, kind: Any, row: tuple[int, ...], length: int, listed: bool
) -> None:
    """What ``2 * x[positions] + 1`` is to be, in windows of 64; nothing else is touched, and the
    positions that a body does not look at are written for nobody."""
    flags = data(TILE, length, 2)
    random = np.random.default_rng(length)
    x = random.integers(1, 50, (TILE, *row)).astype(kind)
    y = np.full_like(x, 99)
    stage = Stage(kernels, TILE, TILE if listed else 64, 0)
    stage.buffer[:] = -(1 << 40)  # what was never written is no position
    stage.select(flags, stage.capacity)
    rows = np.full((64, *row), 77, dtype=kind)
    got = []
    resume = None if listed else lambda: stage.resume(flags, 64)
    for seen in windows(kernels, stage.state, 64, stage.buffer, resume):
        seen.take(x, rows)
        got.append(rows[seen.valid])
        assert (rows[~seen.valid] == 0).all()
        seen.put((2 * rows + 1).astype(kind), y)
    chosen = flags != 0
    assert np.array_equal(np.concatenate(got), x[chosen])
    wide = chosen.reshape(-1, *(1 for _ in row))
    assert np.array_equal(y, np.where(wide, 2 * x + 1, np.full_like(x, 99)))
    assert (stage.buffer[min(length, stage.capacity) :] == -(1 << 40)).all()


def test_a_request_with_all_kernels_resident_leaves_the_state_for_any_grid(
    kernels: Emulated,
) -> None:
    """Another lane has another number of blocks, and takes over the state as it is."""
    inputs, capacity = 3 * TILE, 50
    stage = Stage(kernels, inputs, capacity, 0)
    for request, (blocks, length) in enumerate(
        [(1, 0), (3, 50), (2, 51), (5, 500), (3, 7), (1, 120), (4, 0)]
    ):
        x = data(inputs, length, request)
        y = np.full(inputs, -7, dtype=np.float32)
        stage.resident(blocks, x, y)
        assert stage.state[[COUNT, CONSUMED, PRODUCED]].tolist() == [length, 0, length]
        assert stage.state[EPOCH] == request + 1
        assert stage.state[[TICKET, FINISHED, BARRIER]].tolist() == [0, 0, 0]
        assert np.array_equal(y, np.where(x != 0, 2 * x + 1, np.float32(-7)))


@pytest.mark.parametrize(("count", "capacity"), [(1, 1), (64, 5), (65, 200), (150, 7)])
def test_suppression(kernels: Emulated, count: int, capacity: int) -> None:
    random = np.random.default_rng(count)
    corner = random.random((count, 2)) * 6
    boxes = np.concatenate([corner, corner + 0.5 + random.random((count, 2))], axis=1)
    boxes = boxes.astype(np.float32)
    scores = random.random(count).astype(np.float32)
    wanted = reference_ops.nms(boxes, scores, 0.3, count + 1, Mechanism.SWAP)
    order = np.argsort(-scores, kind="stable")
    rows = -(-count // 64)
    masks, buffer, arena, state = words(count * rows), words(capacity), words(count), words(16)
    kernels("overlaps", (rows, rows), boxes[order].copy(), count, 0.3, masks, threads=64)

    def walk(opens: int) -> None:
        kernels(
            "suppress", 1, masks, order, scores[order].copy(), count, -np.inf, buffer, capacity,
            arena, count, state, opens,
        )  # fmt: skip

    walk(1)
    assert state[COUNT] == len(wanted)
    kept = np.concatenate([buffer[:capacity], arena])[: len(wanted)]
    assert np.array_equal(kept, wanted)
    got: list[int] = []
    for seen in windows(kernels, state, capacity, buffer, lambda: walk(0)):
        got += seen.values[seen.valid].tolist()
    assert got == wanted.tolist()


@pytest.mark.parametrize(("tokens", "experts", "capacity"), [(1, 1, 1), (130, 4, 9), (200, 3, 200)])
def test_routing(kernels: Emulated, tokens: int, experts: int, capacity: int) -> None:
    logits = np.random.default_rng(tokens).normal(size=(tokens, experts))
    logits[:, 0] += 2
    choices = min(2, experts)
    wanted = reference_ops.route(logits, choices, 1 << 20, Mechanism.SWAP)
    chosen = reference_ops.choose_experts(logits, choices).copy()
    buffer, counts, state = words(experts * capacity), words(experts), words(16)

    def deal(opens: int) -> None:
        kernels("route", experts, chosen, chosen.size, buffer, capacity, counts, state, opens)

    deal(1)
    got: list[list[int]] = [[] for _ in range(experts)]
    for _ in windows(kernels, state, capacity, buffer, lambda: deal(0)):
        for expert, row in enumerate(buffer.reshape(experts, capacity)):
            got[expert] += row[row >= 0].tolist()
    assert got == [pairs.tolist() for pairs in wanted]
    assert counts.tolist() == [len(pairs) for pairs in wanted]


@pytest.mark.parametrize("capacity", [1, 7, 64, 500])
@pytest.mark.parametrize("kind", ["empty", "mixed", "one endless", "all at the end"])
def test_expansion_without_bound(kernels: Emulated, capacity: int, kind: str) -> None:
    random = np.random.default_rng(capacity)
    lengths = {
        "empty": np.zeros(9, dtype=np.int64),
        "mixed": random.integers(0, 6, 50),
        "one endless": np.array([0, 0, 700, 0]),
        "all at the end": np.array([0] * 40 + [2 * capacity + 1]),
    }[kind]
    if lengths.sum() > 60 * capacity:
        lengths = lengths // 16
    wanted = np.repeat(np.arange(len(lengths)), lengths)
    ends, buffer, arena, state = np.cumsum(lengths), words(capacity), words(2000), words(16)

    def fill(opens: int) -> None:
        kernels("expand", 2, ends, len(ends), buffer, capacity, arena, 2000, state, opens)

    fill(1)
    assert state[COUNT] == len(wanted)
    assert np.array_equal(np.concatenate([buffer, arena])[: len(wanted)], wanted)
    got: list[int] = []
    for seen in windows(kernels, state, capacity, buffer, lambda: fill(0)):
        got += seen.values[seen.valid].tolist()
    assert got == wanted.tolist()
