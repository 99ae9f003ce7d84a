"""Excess: on logs made by hand, and its intervals on queues whose truth is known."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.mix import parse_mix
from eclip.core.plan import Plan, Promise, unpartitioned
from eclip.core.runlog import OTHERS_IDLE, KernelRecords, Requests, RunLog, WorkerCounters
from eclip.core.topology import Topology
from eclip.errors import UsageError
from eclip.files import excess as module
from eclip.files import store
from eclip.files.excess import Excess, Floats, measure_excess, paired_ratios
from eclip.models.synthetic import synthetic_profile

H200 = store.load_builtin("h200", Topology)
PROFILES = tuple(synthetic_profile(seed, 3, H200, name=name) for seed, name in enumerate("ab"))
US = 1000  # ns


def plan_of(mix: str = "a:1@100rps/2ms,b:1") -> Plan:
    """Of plain streams, with the promise of a bound in ms."""
    plan = unpartitioned(H200, PROFILES, parse_mix(mix))
    bound = plan.mix.workers[0].bound
    if bound is None or bound.ms is None:
        return plan
    promise = Promise(bound_ns=round(1e6 * bound.ms), request_ns=1, some_ns=0, none_ns=0)
    first = msgspec.structs.replace(plan.workers[0], promise=promise)
    return msgspec.structs.replace(plan, workers=(first, *plan.workers[1:]))


def log_of(
    requests: Sequence[tuple[int, int]],  # of worker 0: arrival and latency in µs
    load: str = "Poisson",
    seed: int = 0,
    plan: Plan | None = None,
    offered: int | None = None,
) -> RunLog:
    arrival = [at * US for at, _ in requests]
    end = [(at + latency) * US for at, latency in requests]
    counters = WorkerCounters(kernels=0, barriers=0, lane_waits=0, false_waits=0, false_wait_ns=0)
    return RunLog(
        plan=plan or plan_of(),
        device="by hand",
        modelled=True,
        load=load,
        seed=seed,
        duration_ns=1_000_000_000,
        energy_uj=0,
        requests=Requests(
            worker=(0,) * len(requests),
            arrival_ns=tuple(arrival),
            start_ns=tuple(arrival),
            end_ns=tuple(end),
        ),
        kernels=KernelRecords(window_ns=0, worker=(), position=(), lane=(), start_ns=(), end_ns=()),
        counters=(counters,) * 2,
        unfinished=(0, 0),
        offered=(len(requests) if offered is None else offered, None),
        lag_ns=(0, 0),
    )


def excess_of(shared: list[int], alone: list[int], mix: str = "a:1@100rps/2ms,b:1") -> Excess:
    """Of requests a millisecond apart with these latencies."""
    plan = plan_of(mix)
    return measure_excess(
        [
            (
                log_of([(1000 * at, each) for at, each in enumerate(shared)], plan=plan),
                log_of([(1000 * at, each) for at, each in enumerate(alone)], plan=plan),
            )
        ],
        0,
    )


# --- What is measured -------------------------------------------------------------------------


def test_excess_is_of_the_same_request_and_not_of_the_percentiles() -> None:
    found = excess_of([900, 300, 500, 700], [800, 100, 500, 300])
    assert found.name == "a"
    assert (found.requests, found.left_out) == (4, 0)
    assert found.excess_us.p50 == pytest.approx(np.median([100, 200, 0, 400]))
    assert found.excess_us.longest == pytest.approx(400)
    assert found.excess_us.p99 == pytest.approx(np.percentile([100, 200, 0, 400], 99))
    assert found.shared_ms.p50 == pytest.approx(0.6)
    assert found.alone_ms.longest == pytest.approx(0.8)
    assert found.p50_ratio.value == pytest.approx(0.6 / 0.4)
    assert found.busy == pytest.approx(1.7e-3)


def test_requests_that_ended_in_one_run_only_are_left_out_and_counted() -> None:
    arrivals = [-500, 100, 1_000, 2_000, 3_000]
    shared = log_of([(at, 600) for at in arrivals[:4]])
    alone = log_of([(at, 500) for at in arrivals[1:]])
    found = measure_excess([(shared, alone)], 0)
    assert (found.requests, found.left_out) == (3, 2)
    assert found.excess_us.p50 == found.excess_us.longest == pytest.approx(100)


def test_pairs_may_have_different_arrivals() -> None:
    pairs = [
        (log_of([(0, 300)], seed=seed), log_of([(0, 100 * seed)], seed=seed)) for seed in (1, 2)
    ]
    found = measure_excess(pairs, 0)
    assert found.requests == 2
    assert found.excess_us.longest == pytest.approx(200)
    assert found.excess_us.p50 == pytest.approx(150)


def test_p999_needs_twenty_thousand_requests() -> None:
    latencies = list(range(1, 20_001))
    assert excess_of(latencies[1:], latencies[1:]).shared_ms.p999 is None
    found = excess_of(latencies, latencies)
    assert found.shared_ms.p999 == pytest.approx(np.percentile(latencies, 99.9) / 1000)


def test_bound_is_kept_by_the_p99_and_goodput_counts_what_is_within_it() -> None:
    kept = excess_of([1000] * 399 + [9000], [500] * 400)
    assert (kept.bound_ms, kept.kept, kept.goodput_rps) == (2, True, 399)
    broken = excess_of([1000] * 390 + [9000] * 10, [500] * 400)
    assert (broken.kept, broken.goodput_rps) == (False, 390)


def test_bound_is_the_promise_of_the_plan_whatever_the_run_alone_gave() -> None:
    for alone in (800, 1500):
        found = excess_of([1000] * 10, [alone] * 10)
        assert (found.bound_ms, found.kept) == (2, True)
    free = excess_of([1000], [900], "a:1@100rps,b:1")
    assert free.bound_ms is free.kept is free.goodput_rps is None


def test_goodput_counts_requests_that_the_run_alone_did_not_end() -> None:
    shared = log_of([(at, 100) for at in range(0, 50_000, 1000)])
    alone = log_of([(at, 100) for at in range(0, 40_000, 1000)])
    assert measure_excess([(shared, alone)], 0).goodput_rps == 50


def test_growing_queue_keeps_no_bound() -> None:
    requests = [(1000 * at, 100) for at in range(100)]
    late = log_of(requests, offered=200)
    assert measure_excess([(late, log_of(requests))], 0).kept is False
    assert measure_excess([(log_of(requests), log_of(requests))], 0).kept is True


# --- What is refused --------------------------------------------------------------------------

GIVEN = [(0, 100), (1000, 100), (2000, 100)]


def test_the_load_of_a_worker_alone_is_the_same_load() -> None:
    measure_excess([(log_of(GIVEN), log_of(GIVEN, load=f"Poisson{OTHERS_IDLE}"))], 0)


@pytest.mark.parametrize(
    ("alone", "fault"),
    [
        (log_of(GIVEN, seed=1), "different arrivals: 'Poisson' with seed 0 and 'Poisson' with s"),
        (log_of(GIVEN, load="bursts"), "different arrivals: 'Poisson' with seed 0 and 'bursts'"),
        (log_of([(0, 100), (999, 100), (2000, 100)]), "different arrivals of a"),
        (log_of([(0, 100), (2000, 100)]), "different arrivals of a"),
        (log_of([(5000, 100)]), "different arrivals of a"),
        (log_of([]), "no request of a ended both"),
        (log_of(GIVEN, plan=unpartitioned(H200, PROFILES[:1] * 2)), "different mixes"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_in_one_line(alone: RunLog, fault: str) -> None:
    with pytest.raises(UsageError) as refusal:
        measure_excess([(log_of(GIVEN), alone)], 0)
    assert fault in str(refusal.value) and "\n" not in str(refusal.value)


def test_closed_loop_has_no_excess() -> None:
    log = log_of(GIVEN)
    with pytest.raises(UsageError, match="b runs back to back"):
        measure_excess([(log, log)], 1)


# --- Intervals --------------------------------------------------------------------------------


def queue(random: np.random.Generator, count: int, load: float) -> tuple[Floats, Floats]:
    """Latencies of one server beside others and alone. Who finds it free waits up to a fifth of a
    service time when it is shared: the stretch of another worker that runs."""
    arrived = np.cumsum(random.exponential(1 / load, count))

    def latency(service: Floats) -> Floats:
        before = np.cumsum(service) - service
        waited: Floats = np.maximum.accumulate(arrived - before) + before + service - arrived
        return waited

    alone = latency(random.normal(1.0, 0.02, count))
    free = np.concatenate([[True], arrived[1:] > (arrived + alone)[:-1]])
    return latency(random.normal(1.0, 0.02, count) + free * random.uniform(0, 0.2, count)), alone


def coverage(load: float, count: int, trials: int) -> Floats:
    """How often the intervals of the ratios of p50 and p99 hold the truth."""
    quantiles = (0.5, 0.99)
    long_shared, long_alone = queue(np.random.default_rng(1), 1_000_000, load)
    truth = np.quantile(long_shared, quantiles) / np.quantile(long_alone, quantiles)
    random = np.random.default_rng(2)
    hits = []
    for seed in range(trials):
        found = paired_ratios(*queue(random, count, load), quantiles, seed)
        hits.append([one.low <= true <= one.high for one, true in zip(found, truth, strict=True)])
    means: Floats = np.mean(hits, axis=0)
    return means


def test_interval_holds_the_truth_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESAMPLES", 200)
    assert (coverage(load=0.6, count=1000, trials=40) >= 0.9).all()
    p50, p99 = coverage(load=0.9, count=1000, trials=40)
    assert p50 >= 0.85
    assert p99 >= 0.55
    # Drawing requests one by one would promise much more than it keeps.
    monkeypatch.setattr(module, "_BLOCKS", 10**9)
    assert coverage(load=0.9, count=1000, trials=40)[1] < p99 - 0.1


@pytest.mark.long
@pytest.mark.parametrize("load", [0.2, 0.35, 0.6])
@pytest.mark.parametrize("count", [1000, 4000])
def test_interval_holds_the_truth_at_every_load(
    monkeypatch: pytest.MonkeyPatch, load: float, count: int
) -> None:
    monkeypatch.setattr(module, "RESAMPLES", 300)
    assert (coverage(load, count, trials=150) >= 0.84).all()


def test_the_same_arrivals_make_the_interval_narrow() -> None:
    shared, alone = queue(np.random.default_rng(0), 1000, 0.35)
    _, other = queue(np.random.default_rng(1), 1000, 0.35)
    (paired,), (unpaired,) = (paired_ratios(shared, each, [0.99]) for each in (alone, other))
    assert paired.high - paired.low < (unpaired.high - unpaired.low) / 2
    assert paired.low <= paired.value <= paired.high


def test_twice_as_slow_is_twice_as_slow_in_every_resample() -> None:
    _, alone = queue(np.random.default_rng(0), 500, 0.6)
    for found in paired_ratios(2 * alone, alone, (0.5, 0.99)):
        assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))


def test_intervals_are_the_same_again_with_their_seed_only() -> None:
    pair = queue(np.random.default_rng(0), 300, 0.6)
    assert paired_ratios(*pair, [0.99], seed=1) == paired_ratios(*pair, [0.99], seed=1)
    assert paired_ratios(*pair, [0.99], seed=1) != paired_ratios(*pair, [0.99], seed=2)


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 60),
    length=st.integers(1, 60),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_times_drawn_are_those_of_the_blocks(
    count: int, length: int, blocks: int, seed: int
) -> None:
    length = min(length, count)
    starts = np.random.default_rng(seed).integers(count, size=(3, blocks))
    found = module._times_drawn(starts, length, count)
    for row, times in zip(starts, found, strict=True):
        drawn = (row[:, None] + np.arange(length)) % count
        assert times.tolist() == np.bincount(drawn.ravel(), minlength=count).tolist()


def test_quantiles_are_those_of_the_requests_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against drawing and sorting, and in several portions."""
    monkeypatch.setattr(module, "RESAMPLES", 20)
    sample = np.random.default_rng(0).exponential(size=110)
    quantiles = (0.5, 0.9, 0.99)
    starts = np.random.default_rng(5).integers(110, size=(20, 28))  # blocks of 4
    drawn = sample[(starts[:, :, None] + np.arange(4)) % 110].reshape(20, -1)
    expected = np.quantile(drawn, quantiles, axis=1).T
    for at_once in (10**7, 330):
        monkeypatch.setattr(module, "_MOST_WEIGHTS", at_once)
        found = module._resampled([sample, -sample], quantiles, seed=5)
        np.testing.assert_allclose(found[0], expected)


def test_intervals_of_four_thousand_requests_take_less_than_half_a_second() -> None:
    pair = queue(np.random.default_rng(0), 4000, 0.6)
    spent = []
    for _ in range(3):
        begin = time.process_time()
        paired_ratios(*pair, (0.5, 0.99))
        spent.append(time.process_time() - begin)
    assert min(spent) < 0.5


def test_excess_can_be_stored() -> None:
    found = excess_of([900, 300], [800, 100])
    assert msgspec.json.decode(msgspec.json.encode(found), type=Excess) == found
