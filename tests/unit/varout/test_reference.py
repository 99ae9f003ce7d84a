"""Every mechanism on real data gives the plain result, for every length, or fails with numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import varout_reference as reference
import varout_reference_ops as reference_ops
from eclip.errors import ArenaError, UsageError
from eclip.varout.mechanisms import Mechanism
from varout_reference import Cursor

GENERAL = [one for one in Mechanism if one is not Mechanism.MAXIMUM]  # serve any bound
Ints = npt.NDArray[np.int64]


def adversarial(capacity: int, inputs: int) -> dict[str, list[int]]:
    """Lengths per input that end where buffers do, or nowhere near."""
    spread = [capacity // inputs + (index < capacity % inputs) for index in range(inputs)]
    return {
        "empty": [0] * inputs,
        "exactly full": spread,
        "one over": [*spread[:-1], spread[-1] + 1],
        "one short": [max(0, spread[0] - 1), *spread[1:]],
        "exactly two buffers": [2 * length for length in spread],
        "two buffers and one": [*(2 * length for length in spread[:-1]), 2 * spread[-1] + 1],
        "exactly half": [length // 2 for length in spread],
        "all at the end": [0] * (inputs - 1) + [3 * capacity + 1],
        "all at the start": [3 * capacity + 1] + [0] * (inputs - 1),
        "one endless input": [0] * (inputs // 2) + [977] + [1] * (inputs - inputs // 2 - 1),
        "every input overflows": [capacity + 1] * inputs,
    }


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", GENERAL, ids=lambda one: one.value)
@pytest.mark.parametrize("capacity", [2, 3, 7, 64, 65])
@pytest.mark.parametrize("inputs", [1, 5, 130])
def test_adversarial_lengths(mechanism: Mechanism, capacity: int, inputs: int) -> None:
    for name, lengths in adversarial(capacity, inputs).items():
        values = np.arange(inputs) * 3 + 1
        wanted = np.repeat(values, lengths)
        got = reference_ops.expand(values, np.array(lengths), capacity, mechanism)
        assert np.array_equal(got, wanted), name


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=200),
    capacity=st.integers(2, 300),
    seed=st.integers(0, 99),
)
@settings(max_examples=150)
def test_random_lengths(lengths: list[int], capacity: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 1000, len(lengths))
    wanted = np.repeat(values, lengths)
    for mechanism in GENERAL:
        got = reference_ops.expand(values, np.array(lengths), capacity, mechanism)
        assert np.array_equal(got, wanted), mechanism
    bounded = reference_ops.Expand(values, np.array(lengths), largest=40)
    (got,), _ = reference_ops.collect(Mechanism.MAXIMUM, bounded, capacity)
    assert np.array_equal(got, wanted)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    capacity=st.integers(2, 80),
    seed=st.integers(0, 999),
)
@settings(max_examples=80)
def test_compaction_is_numpys(shape: list[int], share: float, capacity: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x = random.normal(size=shape) * (random.random(shape) < share)
    for mechanism in Mechanism:
        found = reference_ops.nonzero(x, capacity, mechanism)
        assert np.array_equal(found, np.argwhere(x)), mechanism
        picked = reference_ops.masked_select(x, x > 0, capacity, mechanism)
        assert np.array_equal(picked, x[x > 0]), mechanism


def plain_nms(boxes: Any, scores: Any, threshold: float) -> list[int]:
    """By definition, one box at a time."""
    kept: list[int] = []
    for box in np.argsort(-scores, kind="stable").tolist():
        if all(reference_ops.iou(boxes[box], boxes[[k]])[0] <= threshold for k in kept):
            kept.append(box)
    return kept


@pytest.mark.slow
@given(
    count=st.integers(0, 60),
    capacity=st.integers(2, 40),
    threshold=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    seed=st.integers(0, 999),
)
@settings(max_examples=60)
def test_suppression_is_the_definition(
    count: int, capacity: int, threshold: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    corner = random.random((count, 2)) * 4
    boxes = np.concatenate([corner, corner + random.random((count, 2))], axis=1)
    scores = np.round(random.random(count), 1)  # with ties
    wanted = plain_nms(boxes, scores, threshold)
    for mechanism in Mechanism:
        got = reference_ops.nms(boxes, scores, threshold, capacity, mechanism)
        assert got.tolist() == wanted, mechanism


@given(
    tokens=st.integers(1, 150),
    experts=st.integers(1, 8),
    skew=st.sampled_from([0.0, 1.0, 50.0]),
    capacity=st.integers(2, 60),
    seed=st.integers(0, 999),
)
@settings(max_examples=60)
def test_routing_drops_no_token(
    tokens: int, experts: int, skew: float, capacity: int, seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(size=(tokens, experts))
    logits[:, 0] += skew  # at 50 every token chooses the first expert
    choices = min(2, experts)
    chosen = reference_ops.choose_experts(logits, choices).reshape(-1)
    for mechanism in Mechanism:
        got = reference_ops.route(logits, choices, capacity, mechanism)
        for expert in range(experts):
            assert got[expert].tolist() == np.flatnonzero(chosen == expert).tolist(), mechanism


@pytest.mark.parametrize("excess", [0, 1, 7, 64])
def test_spilling_another_stream_brings_it_back(excess: int) -> None:
    other = np.random.default_rng(0).integers(0, 1000, 64)
    before = other.copy()
    lengths = np.array([5, 0, 5 + excess])
    wanted = np.repeat(np.arange(3), lengths)
    producer = reference_ops.Expand(np.arange(3), lengths)
    (got,), done = reference_ops.collect(Mechanism.SPILL, producer, 10, other=other)
    assert np.array_equal(got, wanted)
    assert np.array_equal(other, before)
    assert (done.outside_words > 0) == (excess > 0)
    assert done.outside_words < excess + 64 // 8


def test_too_little_to_spill_is_an_error_with_the_numbers_and_leaves_the_other_stream() -> None:
    other = np.arange(64)
    producer = reference_ops.Expand(np.arange(2), np.array([10, 65]))
    with pytest.raises(ArenaError, match=r"needed 65 words .* has 64") as caught:
        reference_ops.collect(Mechanism.SPILL, producer, 10, other=other)
    assert (caught.value.needed, caught.value.words) == (65, 64)
    assert np.array_equal(other, np.arange(64))


@pytest.mark.parametrize(
    ("mechanism", "fits"),
    [
        (Mechanism.SPILL, 90),
        (Mechanism.DOUBLE_SYMMETRIC, 100),
        (Mechanism.DOUBLE_CONDITIONAL, 100),
    ],
    ids=lambda one: str(one),
)
def test_an_exhausted_arena_is_an_error_never_a_shorter_result(
    mechanism: Mechanism, fits: int
) -> None:
    lengths = np.array([100])
    got = reference_ops.expand(np.array([7]), lengths, 10, mechanism, arena_words=fits)
    assert len(got) == 100
    with pytest.raises(ArenaError, match="larger arena"):
        reference_ops.expand(np.array([7]), lengths, 10, mechanism, arena_words=fits - 1)


def test_an_unbounded_output_has_no_maximum() -> None:
    with pytest.raises(UsageError, match="unbounded"):
        reference_ops.expand(np.array([1]), np.array([3]), 4, Mechanism.MAXIMUM)


@pytest.mark.parametrize("mechanism", [Mechanism.SWAP, Mechanism.RESIDENT])
def test_the_consumer_runs_once_for_every_full_buffer(mechanism: Mechanism) -> None:
    for length, rounds in ((0, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3)):
        producer = reference_ops.Expand(np.array([4]), np.array([length]))
        _, done = reference_ops.collect(mechanism, producer, 10)
        assert done.rounds == rounds


def test_conditional_double_buffering_leaves_memory_alone_until_the_buffer_is_full() -> None:
    def outside(mechanism: Mechanism, length: int) -> int:
        producer = reference_ops.Expand(np.array([4]), np.array([length]))
        return reference_ops.collect(mechanism, producer, 10)[1].outside_words

    assert outside(Mechanism.DOUBLE_CONDITIONAL, 10) == 0
    assert outside(Mechanism.DOUBLE_SYMMETRIC, 10) == 10
    assert outside(Mechanism.DOUBLE_SYMMETRIC, 5) == 0
    assert outside(Mechanism.DOUBLE_CONDITIONAL, 11) == 11


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=150),
    most=st.integers(1, 50),
    jump=st.integers(0, 10**6),
)
def test_a_producer_goes_on_at_any_cursor(lengths: list[int], most: int, jump: int) -> None:
    producer = reference_ops.Expand(np.arange(len(lengths)), np.array(lengths))
    whole = np.repeat(np.arange(len(lengths)), lengths)
    taken = 0
    cursor = Cursor(0, 0)
    while len(batch := producer.emit(cursor, most)):
        stop = 1 + jump % len(batch)  # the buffer was full before the batch ended
        assert np.array_equal(batch.value[:stop], whole[taken : taken + stop])
        taken += stop
        cursor = batch.cursor(stop)
    assert taken == len(whole)


def test_buffers_refuse_capacities_that_cannot_be() -> None:
    producer: Callable[[], reference.Producer] = lambda: reference_ops.Expand(  # noqa: E731
        np.array([1]), np.array([3])
    )
    for mechanism, capacity in ((Mechanism.SWAP, 0), (Mechanism.DOUBLE_SYMMETRIC, 1)):
        with pytest.raises(UsageError, match="at least"):
            reference_ops.collect(mechanism, producer(), capacity)
