"""The search finds what its evaluation likes, repeatably, and deploys nothing worse than plain."""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eclip.core.calibration import Calibration
from eclip.core.device import Window
from eclip.core.load import load_of_mix
from eclip.core.measures import measure
from eclip.core.mix import mix_of, parse_mix
from eclip.core.plan import MOST_VARIANTS, Plan, Promise
from eclip.core.program import lower
from eclip.core.topology import Topology
from eclip.errors import EclipError, UsageError
from eclip.files import store
from eclip.models.synthetic import synthetic_profile
from eclip.planner.evaluate import SimEvaluator
from eclip.planner.policies import PolicyOptions, make_plan
from eclip.planner.problem import Problem
from eclip.planner.search import candidates
from eclip.planner.search.candidates import Found, search
from eclip.planner.search.decision import PLAIN, STATIC, Finalist, decide, shortlist
from eclip.planner.search.objective import Objective, Score
from eclip.planner.search.placement import Home, Placer, groups_of
from eclip.planner.search.variants import with_variants
from eclip.sim.device import SimDevice
from heard import Heard
from simulations import options_for

MakeProblem = Callable[..., Problem]
H200 = store.load_builtin("h200", Topology)


def problem_of(workers: int) -> Problem:
    profiles = tuple(
        synthetic_profile(index, 12 + index, H200, name=f"m{index}") for index in range(workers)
    )
    return Problem(mix_of(one.model for one in profiles), H200, profiles)


_PROBLEMS = {workers: problem_of(workers) for workers in range(1, 10)}
PLAIN_SCORE = Score(ratios=(0.8, 0.4), power_w=400.0, p99_ms=(2.0, 4.0))


def likes(units: int) -> Callable[[Sequence[Plan]], list[Score]]:
    """An evaluation that wants every worker's largest lane to have so many units."""

    def evaluate(plans: Sequence[Plan]) -> list[Score]:
        scores = []
        for plan in plans:
            largest = [
                max(plan.units(group.lane) for group in part.groups)
                for part in plan.main.assignments
            ]
            ratios = tuple(1 - abs(size - units) / 1000 for size in largest)
            scores.append(Score(ratios=ratios, power_w=300.0, p99_ms=(1.0,) * len(ratios)))
        return scores

    return evaluate


# Objectives


@given(
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
)
def test_what_keeps_the_fairness_floor_beats_what_does_not(
    fair: tuple[float, float], unfair: tuple[float, float]
) -> None:
    objective = Objective()
    floor = objective.fairness_floor(PLAIN_SCORE)
    scores = [Score(ratios=ratios, power_w=400.0, p99_ms=(1.0, 1.0)) for ratios in (fair, unfair)]
    if scores[0].fairness >= floor > scores[1].fairness + 0.05:
        first, second = (objective.value(score, PLAIN_SCORE) for score in scores)
        assert first > second


@pytest.mark.parametrize(("plain", "floor"), [(0.3, 0.7), (0.8, 0.75), (0.99, 0.9)])
def test_fairness_floor_follows_plain_streams_between_its_ends(plain: float, floor: float) -> None:
    score = Score(ratios=(plain, 1.0), power_w=1.0, p99_ms=(1.0, 1.0))
    assert Objective().fairness_floor(score) == pytest.approx(floor)


def test_energy_objective_takes_the_frugal_plan_only_if_it_is_as_fast_as_plain_streams() -> None:
    def score(ratio: float, power_w: float) -> Score:
        return Score(ratios=(ratio, ratio), power_w=power_w, p99_ms=(1.0, 1.0))

    plain, frugal, slow = score(0.6, 400), score(0.6, 300), score(0.5, 150)
    energy, throughput = Objective("energy"), Objective()
    assert energy.value(frugal, plain) > energy.value(plain, plain) > energy.value(slow, plain)
    assert throughput.value(frugal, plain) == throughput.value(plain, plain)


SLO = Objective("slo", weights=(0.0, 1.0), bounds_ms=(3.0, None), floors=(0.0, 0.2))


def test_slo_wants_bounds_and_floors_kept_first_then_background_then_short_tails() -> None:
    scores = [
        Score(ratios=(0.1, 0.7), power_w=1.0, p99_ms=(2.9, 99.0)),
        Score(ratios=(0.1, 0.6), power_w=1.0, p99_ms=(2.0, 99.0)),
        Score(ratios=(0.9, 0.6), power_w=1.0, p99_ms=(2.9, 1.0)),  # only tails of services count
        Score(ratios=(0.1, 0.19), power_w=1.0, p99_ms=(1.0, 99.0)),
        Score(ratios=(0.1, 0.9), power_w=1.0, p99_ms=(3.5, 1.0)),
        Score(ratios=(0.1, 0.9), power_w=1.0, p99_ms=(math.inf, 1.0)),
    ]
    values = [SLO.value(score, PLAIN_SCORE) for score in scores]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(values)
    words = [miss.sentence(["a", "b"]) for miss in SLO.shortfalls(scores[3], PLAIN_SCORE)]
    assert words == ["b: 19.0% of its rate alone, at least 20.0% wanted"]


def test_slo_takes_bounds_floors_and_weights_from_the_mix() -> None:
    mix = parse_mix("a:1@9rps/4ms,b:1@background/weight=3/floor=0.1,c:1")
    promise = Promise(bound_ns=4_000_000, request_ns=1_000_000, some_ns=0, none_ns=0)
    aim = Objective("slo").for_mix(mix, {0: promise})
    assert (aim.bounds_ms, aim.floors) == ((4.0, None, None), (0.0, 0.1, 0.0))
    assert aim.background(Score((0.9, 0.4, 0.8), 1.0, (1.0,) * 3)) == pytest.approx(0.5)
    with pytest.raises(UsageError, match="objective slo needs a service"):
        Objective("slo").for_mix(parse_mix("a:1@9rps,b:1"), {})
    for wrong in ({"weights": (1.0, 1.0)}, {"fairness": 0.5}):
        with pytest.raises(UsageError, match="stand in the mix"):
            Objective("slo", **wrong)


def test_nobody_is_held_to_fairness_where_rates_are_given() -> None:
    arriving = parse_mix("a:1@9rps,b:1")
    assert Objective().for_mix(arriving, {}).fairness == 0.0
    assert Objective(fairness=0.8).for_mix(arriving, {}).fairness == 0.8
    assert Objective().for_mix(parse_mix("a:1,b:1"), {}).fairness is None


def test_weights_say_whose_rate_counts() -> None:
    first = Score(ratios=(0.8, 0.6), power_w=1.0, p99_ms=(1.0, 1.0))
    second = Score(ratios=(0.6, 0.8), power_w=1.0, p99_ms=(1.0, 1.0))
    weighted = Objective(weights=(1.0, 3.0))
    assert weighted.value(second, PLAIN_SCORE) > weighted.value(first, PLAIN_SCORE)
    assert Objective().value(second, PLAIN_SCORE) == Objective().value(first, PLAIN_SCORE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "speed"},
        {"weights": (-1.0, 1.0)},
        {"weights": (0.0, 0.0)},
        {"fairness": 1.5},
        {"fairness": -0.1},
        {"kind": "latency"},
    ],
)
def test_impossible_objectives_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(EclipError):
        Objective(**wrong)  # type: ignore[arg-type]


def test_objective_of_another_number_of_workers_is_refused(
    h200: Topology, make_problem: MakeProblem
) -> None:
    with pytest.raises(UsageError, match="3 weights given for a mix of 2 workers"):
        search(make_problem(h200, 2), likes(40), Objective(weights=(1.0, 1.0, 1.0)), batches=0)


# Placement


@given(st.integers(0, 15), st.sampled_from([-1, 1]), st.integers(1, 16), st.integers(1, 7))
def test_lanes_of_a_placement_are_nested_and_hold_clusters(
    first: int, step: int, most: int, workers: int
) -> None:
    topology = H200
    problem = _PROBLEMS[workers]
    home = Home(first, step, most, 1.0, 14)
    plan = Placer(problem).plan([home] * workers, "search", "")
    assert len(plan.lanes) + workers <= topology.hardware_queues - 1  # room for variants
    for worker in range(workers):
        masks = [lane.mask for lane in plan.lanes if lane.owner == worker]
        assert all(topology.holds_clusters(mask) for mask in masks)
        assert all(one <= two or two <= one for one, two in itertools.combinations(masks, 2))


def test_dearer_units_are_used_less_and_a_switch_that_does_not_pay_is_not_made(
    h200: Topology, make_problem: MakeProblem
) -> None:
    problem = make_problem(h200, 1, kernels=60)

    def used(price: float, switch_ns: float) -> tuple[float, int]:
        plan = Placer(problem, switch_ns).plan([Home(0, 1, 16, price, 14)], "search", "")
        (part,) = plan.main.assignments
        held = sum(plan.units(group.lane) * group.predicted_ns for group in part.groups)
        return held, part.switches

    areas = [used(price, 0.0)[0] for price in (0.0, 0.5, 2.0, 8.0)]
    assert areas == sorted(areas, reverse=True)
    assert areas[0] > areas[-1]
    switches = [used(1.0, cost)[1] for cost in (0.0, 1000.0, 1e9)]
    assert switches == sorted(switches, reverse=True)
    assert switches[0] > switches[-1] == 0


# Search


def test_search_finds_what_the_evaluation_likes(h200: Topology, make_problem: MakeProblem) -> None:
    found = search(make_problem(h200, 3), likes(40), batches=25, seed=1)
    best = found.candidates[0]
    assert min(best.score.ratios) >= 0.996  # 40 units, or 36 with the odd slice
    assert best.value == max(one.value for one in found.candidates)
    assert found.evaluated == len(found.candidates) > 300


def test_same_seed_and_batches_give_the_same_candidates(
    h200: Topology, make_problem: MakeProblem
) -> None:
    problem = make_problem(h200, 2)
    once, again = (search(problem, likes(72), batches=4, seed=5) for _ in range(2))
    assert once == again
    other = search(problem, likes(72), batches=4, seed=6)
    assert [one.homes for one in other.candidates] != [one.homes for one in once.candidates]


def test_search_without_time_still_has_a_result_and_progress_rises_to_one(
    h200: Topology, make_problem: MakeProblem
) -> None:
    assert search(make_problem(h200, 2), likes(40), seconds=1e-9).candidates
    progress = Heard()
    search(make_problem(h200, 2), likes(40), seconds=0.2, progress=progress)
    assert progress.parts == sorted(progress.parts)
    assert progress.parts[-1] == pytest.approx(1.0)


def test_stop_request_in_the_middle_of_a_search_gives_the_best_so_far(
    h200: Topology, make_problem: MakeProblem
) -> None:
    problem = make_problem(h200, 3)
    stopped = search(problem, likes(40), batches=20, seed=1, progress=Heard(stop_at=0.1))
    # The batch that was being evaluated counts; nothing begins after the request.
    assert stopped == search(problem, likes(40), batches=3, seed=1)
    assert stopped.candidates[0].value >= search(problem, likes(40), batches=0).candidates[0].value


def test_plan_of_a_search_that_was_stopped_is_a_plan_like_any_other(
    h200: Topology, make_problem: MakeProblem
) -> None:
    problem = make_problem(h200, 2)
    options = dataclasses.replace(options_for(problem), batches=500, progress=Heard(stop_at=0.0))
    plan = make_plan("search", problem, options)
    assert plan.evidence is not None
    assert plan.evidence.batches == 1
    assert sum(trial.chosen for trial in plan.evidence.trials) == 1


def test_what_the_first_evaluation_compiles_is_not_taken_from_the_time(
    h200: Topology, make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = likes(40)
    now = [0.0]
    monkeypatch.setattr(candidates, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def evaluate(plans: Sequence[Plan]) -> list[Score]:
        now[0] += 0.25 if now[0] else 1.1
        return known(plans)

    # A second in steps of a quarter: the starts, and three batches.
    assert search(make_problem(h200, 2), evaluate, seconds=1.0).batches == 3


def test_frontier_holds_what_nothing_beats_in_both(
    h200: Topology, h200_calibration: Calibration, make_problem: MakeProblem
) -> None:
    problem = make_problem(h200, 2)
    found = search(problem, SimEvaluator(h200, problem.profiles, h200_calibration), batches=2)
    points = [(one.score.stp, one.score.efficiency) for one in found.candidates]
    for stp, efficiency in found.frontier:
        assert not any(a > stp and b > efficiency for a, b in points)
    assert (max(points)[0]) == found.frontier[0][0]


def test_finalists_are_not_all_alike(h200: Topology, make_problem: MakeProblem) -> None:
    found = search(make_problem(h200, 2), likes(40), batches=3)
    finalists = found.finalists(5)
    assert finalists[0] == found.candidates[0]
    for one, two in itertools.combinations(finalists, 2):
        apart = np.abs(np.array(one.score.ratios) / np.array(two.score.ratios) - 1)
        assert apart.max() > 0.02


# Decision


def scores(*stp: float) -> list[Score]:
    return [Score(ratios=(each / 2, each / 2), power_w=400.0, p99_ms=(1.0, 1.0)) for each in stp]


def finalists_of(problem: Problem, found: Found) -> list[Finalist]:
    """A shortlist of three plans, each with less than the one before."""
    placer = Placer(problem)
    plans = [placer.plan([Home(0, 1, n, 0.0, 0)] * 2, "x", "") for n in (16, 8, 4)]
    labels = (PLAIN, STATIC, "search 1")
    return [Finalist(label, plan, found.plain) for label, plan in zip(labels, plans, strict=True)]


@pytest.mark.parametrize(("measured", "wins"), [((1.3, 1.2, 1.25), 0), ((1.2, 1.3, 1.25), 1)])
def test_a_plan_that_measured_worse_than_a_baseline_is_not_deployed(
    measured: tuple[float, ...], wins: int, h200: Topology, make_problem: MakeProblem
) -> None:
    problem = make_problem(h200, 2)
    found = search(problem, likes(40), batches=1)
    entries = finalists_of(problem, found)
    plan = decide(
        entries, scores(*measured), found, Objective(), seed=3, device="a GPU", modelled=False
    )
    assert plan.policy == "search"
    assert plan.main == entries[wins].plan.main
    assert plan.evidence is not None
    assert [trial.chosen for trial in plan.evidence.trials] == [n == wins for n in range(3)]
    assert (plan.evidence.seed, plan.evidence.batches) == (3, found.batches)
    assert "measured on a GPU" in plan.why


@pytest.mark.parametrize("kind", ["throughput", "energy"])
@pytest.mark.parametrize(("fairness", "kept"), [(0.705, True), (0.70, True), (0.695, False)])
def test_what_finds_and_what_decides_hold_plans_to_one_fairness_floor(
    kind: str, fairness: float, kept: bool, h200: Topology, make_problem: MakeProblem
) -> None:
    """Just above the floor is above it: a search that may propose a plan may deploy it, too."""
    problem, aim = make_problem(h200, 2), Objective(kind)
    found = search(problem, likes(40), aim, batches=0)
    plain = Score(ratios=(0.5, 1.0), power_w=400.0, p99_ms=(1.0, 1.0))
    better = Score(ratios=(1.0, fairness), power_w=400.0, p99_ms=(1.0, 1.0))
    assert aim.fairness_floor(plain) == 0.7
    assert (aim.shortfalls(better, plain) == []) == kept
    finalists = finalists_of(problem, found)
    plan = decide(
        finalists, [plain, plain, better], found, aim, seed=3, device="a GPU", modelled=False
    )
    assert plan.evidence is not None
    trial = plan.evidence.trials[2]
    words = f"fairness {fairness:.4f}, at least 0.7000 wanted"
    assert trial.refused == (() if kept else (words,))
    assert trial.chosen
    assert plan.evidence.missed == trial.refused


def test_explicit_fairness_is_exactly_the_floor() -> None:
    plain = Score(ratios=(0.9, 1.0), power_w=400.0, p99_ms=(1.0, 1.0))
    unfair = Score(ratios=(0.01, 1.9), power_w=400.0, p99_ms=(1.0, 1.0))
    for fairness in (0.0, 0.35, 0.95, 1.0):
        assert Objective(fairness=fairness).fairness_floor(plain) == fairness
    assert Objective(fairness=0.0).shortfalls(unfair, plain) == []
    assert Objective().shortfalls(unfair, plain) != []


def test_trial_that_misses_floors_says_each_in_words(
    h200: Topology, make_problem: MakeProblem
) -> None:
    problem, aim = make_problem(h200, 2), Objective("energy")
    found = search(problem, likes(40), aim, batches=0)
    given = [
        Score((0.6, 0.6), 400.0, (1.0, 1.0)),
        Score((0.6, 0.55), 200.0, (1.0, 1.0)),
        Score((0.2, 0.8), 100.0, (1.0, 1.0)),
    ]
    plan = decide(
        finalists_of(problem, found), given, found, aim, seed=3, device="a GPU", modelled=False
    )
    assert plan.evidence is not None
    assert [trial.chosen for trial in plan.evidence.trials] == [True, False, False]
    assert [trial.refused for trial in plan.evidence.trials] == [
        (),
        ("STP 1.1500, at least plain streams' 1.2000 wanted",),
        (
            "fairness 0.2500, at least 0.9000 wanted",
            "STP 1.0000, at least plain streams' 1.2000 wanted",
        ),
    ]
    assert plan.evidence.missed == ()


def test_bounds_on_the_p99_that_nothing_keeps_are_missed_in_words(
    h200: Topology, make_problem: MakeProblem
) -> None:
    problem = make_problem(h200, 2)
    aim = Objective("slo", weights=(0.0, 0.0), bounds_ms=(3.0, 9.0), floors=(0.0, 0.0))
    found = search(problem, likes(40), aim, batches=0)
    given = [Score((0.5, 0.5), 400.0, tails) for tails in ((8.0, 8.0), (5.0, 8.0), (4.0, 8.5))]
    plan = decide(
        finalists_of(problem, found), given, found, aim, seed=3, device="a GPU", modelled=False
    )
    assert plan.evidence is not None
    assert plan.evidence.bounds_ms == (3.0, 9.0)
    assert plan.evidence.missed == ("m0: p99 4.00 ms, at most 3.00 wanted",)
    assert plan.evidence.trials[2].chosen


def test_shortlist_has_both_baselines_and_the_finalists_once_each(
    h200: Topology, h200_calibration: Calibration, make_problem: MakeProblem
) -> None:
    problem = make_problem(h200, 2)
    evaluate = SimEvaluator(h200, problem.profiles, h200_calibration)
    found = search(problem, evaluate, batches=2)
    entries = shortlist(found, problem, 3, Objective())
    assert [entry.label for entry in entries[:2]] == [PLAIN, STATIC]
    assert [entry.label for entry in entries[2:]] == ["search 1", "search 2", "search 3"]
    ran = {(entry.plan.lanes, groups_of(entry.plan)) for entry in entries}
    assert len(ran) == len(entries)
    assert all(part.switches == 0 for part in entries[1].plan.main.assignments)


# Variants


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 6, 8, 9])
def test_alone_a_worker_has_the_whole_device_and_no_worker_has_too_many_variants(
    workers: int, h200: Topology
) -> None:
    problem = _PROBLEMS[workers]
    home = Home(0, 1, 4, 0.0, 0)
    plan = Placer(problem).plan([home] * workers, "search", "")

    def evaluate(plans: Sequence[Plan], active: tuple[int, ...]) -> list[Score]:
        return [Score((0.5,) * len(active), 100.0, (1.0,) * len(active)) for _ in plans]

    full = with_variants(plan, problem, evaluate)
    for worker in range(workers):
        mine = [variant for variant in full.variants if worker in variant.active]
        assert len(mine) <= MOST_VARIANTS
        if workers > 1:
            (alone,) = (variant for variant in mine if variant.active == (worker,))
            (group,) = alone.assignments[0].groups
            assert full.lanes[group.lane].mask == h200.full
    assert full.main == plan.main
    assert not full.aliased


def test_plan_without_room_for_more_lanes_stays_as_it_is(h200: Topology) -> None:
    problem = _PROBLEMS[2]
    plan = Placer(problem).plan([Home(0, 1, 4, 1.0, 14)] * 2, "search", "")
    tight = msgspec.structs.replace(
        plan, topology=msgspec.structs.replace(h200, hardware_queues=len(plan.lanes) + 1)
    )
    assert with_variants(tight, problem, lambda plans, active: []) == tight


def test_at_low_load_variants_keep_the_tail_near_plain_streams(
    h200: Topology, h200_calibration: Calibration, make_problem: MakeProblem
) -> None:
    """A third of the device each at 15% load: most requests find nobody else there."""
    problem = make_problem(h200, 3, kernels=60)
    evaluate = SimEvaluator(h200, problem.profiles, h200_calibration)
    narrow = Placer(problem).plan([Home(5 * w, 1, 5, 0.0, 0) for w in range(3)], "search", "")
    plans = {
        "plain": make_plan("shared", problem),
        "narrow": narrow,
        "variants": with_variants(narrow, problem, evaluate),
    }
    rates = [0.15e9 / profile.request_ns[-1] for profile in problem.profiles]
    mix = msgspec.structs.replace(
        problem.mix,
        workers=tuple(
            msgspec.structs.replace(worker, rate_rps=rate)
            for worker, rate in zip(problem.mix.workers, rates, strict=True)
        ),
    )
    load = load_of_mix(mix, 0.5, 0.05, seed=2)
    p99 = {}
    for name, plan in plans.items():
        program = lower(plan, [profile.trace for profile in problem.profiles])
        with SimDevice(h200, h200_calibration).open(program, problem.profiles) as session:
            log = session.run(load, Window(seconds=0.5, warmup_seconds=0.05, trace_ms=0.0))
            log = msgspec.structs.replace(log, alone_rps=(1.0,) * 3)
        p99[name] = max(one.p99_ms or 0.0 for one in measure(log).workers)
    assert p99["variants"] < 0.7 * p99["narrow"]
    assert p99["variants"] < 1.3 * p99["plain"]


# The policy


def test_policy_search_without_an_evaluator_says_so(
    h200: Topology, make_problem: MakeProblem
) -> None:
    with pytest.raises(UsageError, match="needs something that evaluates plans"):
        make_plan("search", make_problem(h200, 2))


def test_policy_search_is_by_simulation_no_worse_than_plain_streams_and_says_how_it_knows(
    h200: Topology, make_problem: MakeProblem
) -> None:
    problem = make_problem(h200, 3, kernels=40)
    plan = make_plan("search", problem, options_for(problem))
    assert plan.evidence is not None
    assert plan.evidence.modelled
    plain, *_, best = (sum(trial.ratios) for trial in plan.evidence.trials)
    chosen = [trial for trial in plan.evidence.trials if trial.chosen]
    assert len(chosen) == 1
    assert plan.evidence.trials[0].label == PLAIN
    assert best >= plain or chosen[0].label == PLAIN


@pytest.mark.parametrize("wrong", [{"seconds": 0.0}, {"seconds": float("nan")}, {"batches": -1}])
def test_impossible_search_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        PolicyOptions(**wrong)  # type: ignore[arg-type]
