"""Every policy gives a valid plan on every device, and the plan that it promises."""

from __future__ import annotations

import itertools
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np
import pytest

from commands import Cli
from eclip.core.mix import mix_of
from eclip.core.plan import ALL_WORKERS, Lanes, Plan, Processes, Turns
from eclip.core.profile import Profile, Times
from eclip.core.program import lower
from eclip.core.topology import Topology
from eclip.errors import MismatchError, PlanningError, UsageError
from eclip.files import store
from eclip.models.synthetic import synthetic_profile
from eclip.planner.exact import allocate
from eclip.planner.policies import POLICIES, PolicyOptions, make_plan, with_shares
from eclip.planner.pool import build_pool
from eclip.planner.problem import Problem
from eclip.planner.tiers import FOR_SERVICES
from simulations import options_for

TOPOLOGIES = {name: store.load_builtin(name, Topology) for name in store.builtin_names(Topology)}
every_policy = pytest.mark.parametrize(
    "policy", [policy for policy in POLICIES if policy not in FOR_SERVICES]
)
every_device = pytest.mark.parametrize("device", TOPOLOGIES)
# Every device and every number of workers; the other pairs of them are for `make test-long`.
every_device_and_number = pytest.mark.parametrize(
    ("device", "workers"),
    [
        pytest.param(device, workers, marks=[pytest.mark.long] if (workers - place) % 5 else [])
        for place, device in enumerate(TOPOLOGIES)
        for workers in range(1, 9)
    ],
)
UNLIMITED = 1_000_000
PACK = Path(str(resources.files("eclip") / "data" / "profiles" / "h200"))


def problem_of(device: str, workers: int, kernels: int = 25, seed: int = 0) -> Problem:
    topology = TOPOLOGIES[device]
    profiles = tuple(
        synthetic_profile(seed + index, kernels + index, topology, name=f"m{index}")
        for index in range(workers)
    )
    mix = mix_of(profile.model for profile in profiles)
    return Problem(mix, topology, profiles)


def lanes_of(plan: Plan, worker: int) -> list[int]:
    """Per kernel the lane that it takes."""
    groups = plan.main.assignments[worker].groups
    return [group.lane for group in groups for _ in range(group.kernels)]


def slowdown_on(problem: Problem, worker: int, units: int) -> float:
    times = problem.times(worker, [units])
    return float(times.sum()) / problem.profiles[worker].request_ns[-1]


def objective_of(plan: Plan, problem: Problem) -> float:
    """(1 + α)·T of a plan, from the definitions."""
    alpha = total = 0.0
    for worker in plan.everyone:
        units = [plan.units(lane) for lane in lanes_of(plan, worker)]
        times = {size: problem.times(worker, [size])[:, 0] for size in set(units)}
        alpha += sum(units) / len(units) / plan.topology.units
        total += sum(float(times[size][kernel]) for kernel, size in enumerate(units))
    return (1 + alpha) * total


@pytest.mark.slow
@every_policy
@every_device_and_number
def test_plan_is_valid_and_predicts_the_profiled_times(
    policy: str, device: str, workers: int
) -> None:
    problem = problem_of(device, workers)
    plan = make_plan(policy, problem, options_for(problem))
    assert (plan.policy, plan.topology, plan.mix) == (policy, problem.topology, problem.mix)
    assert plan.modelled
    assert plan.why and all(worker.why for worker in plan.workers)
    lower(plan, [profile.trace for profile in problem.profiles])
    used = {
        group.lane
        for variant in plan.variants
        for part in variant.assignments
        for group in part.groups
    }
    assert used == set(range(len(plan.lanes)))
    for part in plan.main.assignments:
        position = 0
        for group in part.groups:
            times = problem.times(part.worker, [plan.units(group.lane)])[:, 0]
            here = times[position : position + group.kernels]
            assert group.predicted_ns == pytest.approx(here.sum(), abs=0.51)
            position += group.kernels


@every_policy
def test_equal_problems_get_equal_plans(policy: str) -> None:
    first, second = problem_of("h200", 3), problem_of("h200", 3)
    plan = make_plan(policy, first, options_for(first))
    assert plan == make_plan(policy, second, options_for(second))


def test_unknown_policy_lists_the_right_ones() -> None:
    with pytest.raises(UsageError, match="shared, priority, priority-segments, timeslice, mps"):
        make_plan("fastest", problem_of("mi50", 1))


def test_shared_and_timeslice_give_everybody_a_lane_of_all_units() -> None:
    problem = problem_of("h200", 4)
    for policy, sharing in (("shared", Lanes()), ("timeslice", Turns())):
        plan = make_plan(policy, problem)
        assert [(lane.owner, lane.mask) for lane in plan.lanes] == [
            (worker, problem.topology.full) for worker in range(4)
        ]
        assert plan.sharing == sharing
        assert [part.switches for part in plan.main.assignments] == [0] * 4


# --- Processes --------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "shares"), [((), (60, 60)), ((40,), (40, 40)), ((75, 25),) * 2])
def test_mps_gives_every_worker_its_share_or_all_the_same(
    given: tuple[int, ...], shares: tuple[int, ...]
) -> None:
    plan = make_plan("mps", problem_of("h200", 2), PolicyOptions(shares=given))
    assert plan.sharing == Processes(shares)
    assert f"{shares[1]}% of the SMs" in plan.workers[1].why
    assert [lane.mask for lane in plan.lanes] == [plan.topology.full] * 2


@every_device
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_shares_of_mps_model_are_never_smaller_than_the_masks_of_model(
    device: str, workers: int
) -> None:
    problem = problem_of(device, workers)
    masks, plan = make_plan("model", problem), make_plan("mps-model", problem)
    assert isinstance(plan.sharing, Processes)
    for worker, share in enumerate(plan.sharing.shares):
        units = masks.units(lanes_of(masks, worker)[0])
        assert share / 100 >= units / problem.topology.units > (share - 1) / 100


def test_shares_are_percentages_one_for_each_worker() -> None:
    shared = make_plan("shared", problem_of("h200", 2))
    assert [
        with_shares(shared, shares).why.rpartition(" ")[2] for shares in ((60, 60), (60, 25))
    ] == ["60%", "60/25%"]
    with pytest.raises(UsageError, match="3 shares given for 2 workers"):
        with_shares(shared, (60, 60, 60))
    with pytest.raises(UsageError, match="3 shares given for 2 workers"):
        make_plan("mps", problem_of("h200", 2), PolicyOptions(shares=(60, 60, 60)))
    for wrong in ((0, 50), (50, 101)):
        with pytest.raises(UsageError, match=r"1 to 100 percent, not \d+/\d+%"):
            with_shares(shared, wrong)


def test_clients_of_mps_may_have_less_priority(tmp_path: Path) -> None:
    shared = make_plan("shared", problem_of("h200", 2))
    plan = with_shares(shared, (100, 100), below_normal=(1,))
    assert plan.why.endswith("shares 100%, 2 below normal")
    store.save(plan, tmp_path / "plan.json")
    assert store.load(tmp_path / "plan.json", Plan) == plan
    with pytest.raises(UsageError, match="worker 2 has less priority, and does not exist"):
        with_shares(shared, (100, 100), below_normal=(2,))


@pytest.mark.parametrize(
    ("policy", "sharing", "words"),
    [
        ("mps", Processes((70, 30)), "shares 70/30%"),
        ("timeslice", Turns(), "take turns"),
    ],
)
def test_plan_of_processes_or_turns_is_saved_loaded_and_explained_like_others(
    policy: str,
    sharing: Processes | Turns,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = make_plan(policy, problem_of("h200", 2), PolicyOptions(shares=(70, 30)))
    path = tmp_path / "plan.json"
    store.save(plan, path)
    assert store.load(path, Plan) == plan
    assert plan.sharing == sharing
    cli = Cli(monkeypatch, capsys)
    assert words in " ".join(cli("explain", path).out.split())
    data = cli("explain", path, "--json").data
    assert data["policy"] == policy
    assert msgspec.convert(data["sharing"], Processes | Turns) == sharing


@every_device
@pytest.mark.parametrize("workers", range(1, 9))
def test_model_masks_are_disjoint_while_slices_suffice(device: str, workers: int) -> None:
    problem = problem_of(device, workers)
    plan = make_plan("model", problem)
    slices = len(problem.topology.slice_units)
    assert [lane.owner for lane in plan.lanes] == list(range(workers))
    assert [part.switches for part in plan.main.assignments] == [0] * workers
    if workers <= slices:
        for one, other in itertools.combinations(plan.lanes, 2):
            assert not one.mask & other.mask
    else:
        assert all(len(lane.mask) == 1 for lane in plan.lanes)
        assert len({lane.mask for lane in plan.lanes}) == slices


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.5])
def test_model_masks_make_the_worst_slowdown_least(
    workers: int, seed: int, tolerance: float
) -> None:
    problem = problem_of("mi50", workers, seed=100 * seed)
    plan = make_plan("model", problem, PolicyOptions(tolerance=tolerance))
    counts = [len(lane.mask) for lane in plan.lanes]

    def worst(parts: tuple[int, ...] | list[int]) -> float:
        return max(slowdown_on(problem, worker, 15 * part) for worker, part in enumerate(parts))

    best = min(
        worst(parts) for parts in itertools.product(range(1, 5), repeat=workers) if sum(parts) <= 4
    )
    assert worst(counts) <= max(best, 1 + tolerance) * (1 + 1e-12)
    for worker, count in enumerate(counts):
        if count > 1:
            assert slowdown_on(problem, worker, 15 * (count - 1)) > 1 + tolerance


@every_device
@pytest.mark.parametrize("tolerance", [0.0, 0.05, 1.0])
def test_kernel_takes_the_smallest_lane_within_the_tolerance(device: str, tolerance: float) -> None:
    problem = problem_of(device, 2)
    plan = make_plan("kernel", problem, PolicyOptions(tolerance=tolerance))
    sizes = build_pool(problem.topology, 2).sizes
    for worker in plan.everyone:
        times = problem.times(worker, sizes)
        for kernel, lane in enumerate(lanes_of(plan, worker)):
            enough = [
                size
                for size, time in zip(sizes, times[kernel], strict=True)
                if time <= times[kernel, -1] * (1 + tolerance)
            ]
            assert plan.units(lane) == enough[0]


@every_device
@pytest.mark.parametrize("switch_max", [0, 1, 3, 14])
def test_eclip_keeps_to_its_switch_budget(device: str, switch_max: int) -> None:
    plan = make_plan("eclip", problem_of(device, 3, 60), PolicyOptions(switch_max=switch_max))
    switches = [part.switches for part in plan.main.assignments]
    assert max(switches) <= switch_max


def test_kernel_switches_more_often_than_eclip() -> None:
    for seed in range(3):
        problem = problem_of("mi50", 2, 120, seed=10 * seed)
        by_policy = {
            policy: sum(part.switches for part in make_plan(policy, problem).main.assignments)
            for policy in ("kernel", "eclip")
        }
        assert by_policy["kernel"] > by_policy["eclip"]


@every_device
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_eclip_is_the_optimum_over_its_pool(device: str, workers: int) -> None:
    problem = problem_of(device, workers)
    plan = make_plan("eclip", problem, PolicyOptions(switch_max=5))
    pool = build_pool(problem.topology, workers)
    times = [problem.times(worker, pool.sizes) for worker in range(workers)]
    best = allocate(times, pool.sizes, problem.topology.units, 5)
    assert objective_of(plan, problem) == pytest.approx(best.objective, rel=1e-12)


@every_device
def test_eclip_without_a_budget_is_no_worse_than_any_other_choice_from_its_pool(
    device: str,
) -> None:
    problem = problem_of(device, 2)
    best = objective_of(make_plan("eclip", problem, PolicyOptions(switch_max=UNLIMITED)), problem)
    others = [make_plan("shared", problem)] + [
        make_plan("kernel", problem, PolicyOptions(tolerance=tolerance))
        for tolerance in (0.0, 0.02, 0.1, 0.3, 1.0, 5.0)
    ]
    assert best <= min(objective_of(plan, problem) for plan in others) * (1 + 1e-12)


@every_device
@pytest.mark.parametrize("policy", ["kernel", "eclip"])
def test_lanes_of_pooled_policies_fit_the_hardware_queues(policy: str, device: str) -> None:
    for workers in (1, 3, 8):
        plan = make_plan(policy, problem_of(device, workers))
        assert len(plan.lanes) <= plan.topology.hardware_queues
        assert not plan.aliased
        owned_by_all = [lane for lane in plan.lanes if lane.owner == ALL_WORKERS]
        assert all(lane.mask == plan.topology.full for lane in owned_by_all)


def with_illegal(problem: Problem, largest: int, every: int) -> Problem:
    """Every so many kernels of every worker fit only lanes of more than ``largest`` units."""
    profiles = tuple(
        msgspec.structs.replace(
            profile,
            illegal=tuple(
                (kernel, index)
                for kernel in range(0, len(profile.trace.kernels), every)
                for index, size in enumerate(profile.sizes)
                if size <= largest
            ),
        )
        for profile in problem.profiles
    )
    return Problem(problem.mix, problem.topology, profiles)


@every_policy
@pytest.mark.parametrize("workers", [1, 2])
def test_kernel_never_goes_to_a_lane_it_does_not_fit(policy: str, workers: int) -> None:
    problem = with_illegal(problem_of("h200", workers), largest=48, every=3)
    plan = make_plan(policy, problem, options_for(problem, switch_max=4, tolerance=3.0))
    anywhere = problem_of("h200", workers)
    free = make_plan(policy, anywhere, options_for(anywhere, switch_max=4, tolerance=3.0))
    for worker in plan.everyone:
        units = [plan.units(lane) for lane in lanes_of(plan, worker)]
        assert min(units[::3]) > 48
    if policy in ("kernel", "eclip"):
        assert min(free.units(lane) for lane in range(len(free.lanes))) <= 48


def test_model_that_fits_no_part_of_the_device_is_refused() -> None:
    problem = with_illegal(problem_of("mi50", 2), largest=30, every=5)
    with pytest.raises(PlanningError, match="m1 has a kernel that fits no mask of 1 slices"):
        make_plan("model", problem)


@pytest.mark.parametrize(
    ("switch_max", "tolerance"),
    [(-1, 0.05), (14, -0.01), (14, float("nan")), (14, float("inf")), (14, 100.0)],
)
def test_impossible_options_are_refused(switch_max: int, tolerance: float) -> None:
    with pytest.raises(UsageError):
        PolicyOptions(switch_max=switch_max, tolerance=tolerance)


def test_profile_of_another_model_is_refused() -> None:
    problem = problem_of("mi50", 2)
    with pytest.raises(MismatchError, match="m0 needs a profile of m0:1, not m1:1"):
        Problem(problem.mix, problem.topology, problem.profiles[::-1])


@every_policy
@pytest.mark.parametrize(("made_on", "used_on"), [("mi50", "h200"), ("h200", "mi50")])
def test_profile_of_another_device_is_refused(policy: str, made_on: str, used_on: str) -> None:
    foreign = problem_of(made_on, 2)
    with pytest.raises(MismatchError, match="different devices"):
        make_plan(policy, Problem(foreign.mix, TOPOLOGIES[used_on], foreign.profiles))


@pytest.mark.parametrize("rising", [False, True])
def test_size_that_was_not_profiled_is_on_the_line_through_its_neighbours(rising: bool) -> None:
    """A model's lane may have any number of slices; profiles have the sizes lanes come in."""
    profile = problem_of("h200", 1).profiles[0]
    if rising:  # as measured gaps may be
        backwards = tuple(row[::-1] for row in profile.busy_ns)
        profile = msgspec.structs.replace(
            profile,
            busy_ns=backwards,
            request_ns=tuple(
                int(column.sum()) for column in np.transpose([*backwards, *profile.gap_ns])
            ),
        )
    low, between, high = (profile.busy_at(units) for units in (32, 40, 48))
    x32, x40, x48 = (counted_waves(profile, units) for units in (32, 40, 48))
    weight = (x40 - x48) / (x32 - x48)
    assert low.tolist() == [row[profile.sizes.index(32)] for row in profile.busy_ns]
    assert between == pytest.approx(low * weight + high * (1 - weight))
    low, between, high = (profile.gap_at(units) for units in (32, 40, 48))
    part = (1 / 40 - 1 / 48) / (1 / 32 - 1 / 48)
    assert between == pytest.approx(low * part + high * (1 - part))


def counted_waves(profile: Profile, units: int) -> Times:
    """A last wave counts three quarters as a full one, and one quarter by its blocks."""
    blocks = np.array([kernel.blocks for kernel in profile.trace.kernels])
    waves = blocks / np.array(profile.blocks_per_unit) / units
    counted: Times = (3 * np.ceil(waves) + waves) / 4
    return counted


def test_kernel_takes_a_step_where_it_needs_one_wave_more() -> None:
    """66 blocks of one per unit: two waves on 64 units, one on 68, as on 80 and more."""
    profile = store.load(PACK / "vit_b_16~66-8.json.gz", Profile)
    step = [
        index
        for index, kernel in enumerate(profile.trace.kernels)
        if (kernel.blocks, profile.blocks_per_unit[index]) == (66, 1)
    ]
    assert len(step) > 20
    at64, at68, at72, at80 = (profile.busy_at(units)[step].sum() for units in (64, 68, 72, 80))
    assert at64 > 1.7 * at80
    assert at80 < at72 < at68 < 1.12 * at80


def test_kernel_on_a_lane_smaller_than_any_profiled_takes_longer_by_its_waves() -> None:
    """As products of 12,288 on an H200: 132 blocks of one per unit, 8.1 ms on 64 units; on 32 and
    16 they took 16.0 and 32.2 ms. Kernels whose blocks all find room take no longer."""
    profile = store.load(PACK / "alexnet-1.json.gz", Profile)
    filling = profile.waves_at(16) >= 1
    fitting = profile.waves_at(8) <= 1
    assert filling.any() and fitting.any() and not (filling | fitting).all()
    growth = profile.busy_at(8) / profile.busy_at(16)
    assert growth[filling] == pytest.approx(2)
    assert growth[fitting] == pytest.approx(1)
    between = ~filling & ~fitting
    assert growth[between] == pytest.approx(profile.waves_at(8)[between])
    assert profile.gap_at(8).tolist() == profile.gap_at(16).tolist()
    with pytest.raises(ValueError, match="up to 132 units, not 133"):
        profile.busy_at(133)
