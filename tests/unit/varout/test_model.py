"""Closed forms against a simulation that shares nothing with them, and against plain sense."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.errors import UsageError
from eclip.files import store
from eclip.files.machine import Machine, StreamProcessor
from eclip.varout import growth, model
from eclip.varout.mechanisms import Mechanism, StreamKernel, why_not_merge
from varout_cycles import simulate

TOLERANCE = 0.02


def number(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


@st.composite
def machines(draw: st.DrawFn) -> tuple[StreamProcessor, float]:
    """A machine and an actual A. Strips are long enough that a cycle is not two percent."""
    allocated = draw(number(0.5, 8))
    bound = draw(st.one_of(st.none(), number(1, 6)))
    machine = StreamProcessor(
        inputs=draw(st.integers(256, 2048)),
        width=draw(st.sampled_from([1, 4, 8, 16])),
        producer_startup=draw(number(0, 300)),
        producer_loop=draw(number(4, 40)),
        consumer_startup=draw(number(0, 300)),
        consumer_loop=draw(number(2, 40)),
        consumer_ratio=draw(number(0, 2)),
        allocated_ratio=allocated,
        largest_ratio=None if bound is None else bound * allocated,
        latency=draw(number(0, 500)),
        words_per_cycle=draw(number(0.2, 8)),
        suspend=draw(number(0, 100)),
        resume=draw(number(0, 100)),
        resident_switch=draw(number(0, 50)),
        resident_slowdown=draw(number(1, 1.5)),
        merge_slowdown=draw(number(1, 1.5)),
        spill_words=draw(st.integers(0, 20_000)),
        spill_block=draw(st.integers(64, 1024)),
    )
    reach = 6 * allocated if machine.largest_ratio is None else machine.largest_ratio
    return machine, draw(number(0, 1)) * reach


@pytest.mark.slow
@given(machines())
@settings(max_examples=400)
def test_closed_forms_agree_with_the_simulation(drawn: tuple[StreamProcessor, float]) -> None:
    machine, ratio = drawn
    for mechanism in Mechanism:
        predicted = model.interval(machine, mechanism, ratio)
        simulated = simulate(machine, mechanism, ratio)
        if predicted is None or simulated is None:
            assert predicted is simulated, mechanism
        else:
            assert simulated == pytest.approx(predicted, rel=TOLERANCE), mechanism


@pytest.fixture(scope="module")
def imagine() -> StreamProcessor:
    stream = store.load_builtin("imagine", Machine).stream
    assert stream is not None
    return stream


def test_the_documents_example_parameters(imagine: StreamProcessor) -> None:
    assert (imagine.suspend, imagine.resume) == (10, 10)
    assert (imagine.latency, imagine.words_per_cycle) == (100, 2)
    assert (imagine.producer_startup, imagine.consumer_startup) == (50, 50)
    assert (imagine.producer_loop, imagine.consumer_loop) == (16, 16)
    assert (imagine.allocated_ratio, imagine.consumer_ratio) == (5, 0.5)


def test_intervals_of_the_example_by_hand(imagine: StreamProcessor) -> None:
    """At A = 10: 512 cycles to produce 2,560 words from 256 inputs, 5,120 to consume them."""
    exact = 50 + 512 + 50 + 5120
    assert model.interval(imagine, Mechanism.EXACT, 10) == exact
    # Buffers of 1,280 words: the producer is suspended once.
    assert model.interval(imagine, Mechanism.SWAP, 10) == exact + 10 + 10 + 50
    assert model.interval(imagine, Mechanism.RESIDENT, 10) == exact
    assert model.interval(imagine, Mechanism.MERGE, 10) == exact - 50
    # A quarter of the inputs at a time, so that A = 20 fits.
    assert model.interval(imagine, Mechanism.MAXIMUM, 10) == exact + 3 * 100
    # Five blocks of 256 words leave and come back.
    assert model.interval(imagine, Mechanism.SPILL, 10) == exact + 2 * 1280 / 2 + 100


def test_no_mechanism_but_the_maximum_costs_anything_within_half_the_allocation(
    imagine: StreamProcessor,
) -> None:
    for mechanism in set(Mechanism) - {Mechanism.MAXIMUM, Mechanism.MERGE}:
        assert model.growth(imagine, mechanism, 2.5) == pytest.approx(0)
    assert model.growth(imagine, Mechanism.DOUBLE_SYMMETRIC, 2.6) != pytest.approx(0)
    assert model.growth(imagine, Mechanism.DOUBLE_CONDITIONAL, 5) == pytest.approx(0)
    assert model.growth(imagine, Mechanism.DOUBLE_CONDITIONAL, 5.01) != pytest.approx(0)


def test_double_buffering_waits_for_memory_and_swapping_does_not(imagine: StreamProcessor) -> None:
    slow = msgspec.structs.replace(imagine, words_per_cycle=0.5)
    for mechanism in (Mechanism.DOUBLE_SYMMETRIC, Mechanism.DOUBLE_CONDITIONAL):
        fast_time, slow_time = (model.interval(one, mechanism, 15) for one in (imagine, slow))
        assert fast_time is not None
        assert slow_time is not None
        assert slow_time > 1.5 * fast_time
    dear = msgspec.structs.replace(imagine, suspend=2000, resume=2000)
    swapped = model.interval(dear, Mechanism.SWAP, 15)
    doubled = model.interval(dear, Mechanism.DOUBLE_SYMMETRIC, 15)
    assert swapped is not None
    assert doubled is not None
    assert swapped > doubled  # the choice depends on the application, as the document says


def test_an_unbounded_output_cannot_be_allocated_for(imagine: StreamProcessor) -> None:
    unbounded = msgspec.structs.replace(imagine, largest_ratio=None)
    assert model.interval(unbounded, Mechanism.MAXIMUM, 3) is None
    assert model.interval(unbounded, Mechanism.SWAP, 500) is not None
    assert model.interval(unbounded, Mechanism.SPILL, 500) is None  # nothing is left to spill


@pytest.mark.parametrize("ratio", [-1.0, math.inf, math.nan, 20.5])
def test_ratios_that_cannot_be_are_refused(imagine: StreamProcessor, ratio: float) -> None:
    with pytest.raises(UsageError):
        model.interval(imagine, Mechanism.SWAP, ratio)


def test_growth_names_the_best_that_can_serve() -> None:
    machine = store.load_builtin("imagine", Machine)
    found = growth.compare(machine, ratios=[1.0, 6.0, 19.0])
    assert [point.ratio for point in found.points] == [1.0, 6.0, 19.0]
    for point in found.points:
        able = [time for time in point.interval.values() if time is not None]
        assert point.interval[point.best] == min(able)
    assert found.percent("swap")[0] == pytest.approx(0)


def test_growth_of_every_built_in_machine_is_there() -> None:
    for name in store.builtin_names(Machine):
        found = growth.compare(store.load_builtin(name, Machine))
        assert len(found.points) == growth.RATIOS
        assert found.points[-1].ratio >= 4 * found.allocated_ratio * (1 - 1e-9)


# Merging


A = StreamKernel("a", ("in",), ("s",), varies=frozenset(["s"]))
B = StreamKernel("b", ("s",), ("out",))


def test_a_producer_and_its_only_consumer_merge() -> None:
    assert why_not_merge((A, B), "a", "b") == ()


@pytest.mark.parametrize(
    ("kernels", "word"),
    [
        ((A, StreamKernel("b", ("other",), ("out",))), "reads nothing"),
        ((A, StreamKernel("b", ("s",), ("out",), whole=frozenset(["s"]))), "complete"),
        ((A, B, StreamKernel("c", ("s",), ("more",))), "c reads s too"),
        (
            (
                StreamKernel("a", ("in",), ("s", "t"), varies=frozenset(["s"])),
                StreamKernel("c", ("t",), ("u",)),
                StreamKernel("b", ("s", "u"), ("out",)),
            ),
            "through c",
        ),
        (
            (
                A,
                StreamKernel("d", ("in2",), ("v",), varies=frozenset(["v"])),
                StreamKernel("b", ("s", "v"), ("out",)),
            ),
            "both rates",
        ),
        (
            (
                StreamKernel("a", ("in",), ("s",), varies=frozenset(["s"]), registers=200),
                StreamKernel("b", ("s",), ("out",), registers=100),
            ),
            "300 registers",
        ),
    ],
)
def test_what_cannot_be_merged_says_why(kernels: tuple[StreamKernel, ...], word: str) -> None:
    reasons = why_not_merge(kernels, "a", "b")
    assert len(reasons) == 1
    assert word in reasons[0]


def test_a_detour_is_found_however_long() -> None:
    chain = [StreamKernel(f"k{index}", (f"t{index}",), (f"t{index + 1}",)) for index in range(5)]
    first = StreamKernel("a", ("in",), ("s", "t0"), varies=frozenset(["s"]))
    last = StreamKernel("b", ("s", "t5"), ("out",))
    (reason,) = why_not_merge((first, *chain, last), "a", "b")
    assert all(f"k{index}" in reason for index in range(5))
    for missing in range(5):
        cut = tuple(kernel for index, kernel in enumerate(chain) if index != missing)
        assert why_not_merge((first, *cut, last), "a", "b") == ()
