"""Memory: the sum is that of its parts, grows with the work, and refuses what does not fit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.calibration import Calibration
from eclip.core.footprint import Footprint
from eclip.core.memory import (
    MemoryNeed,
    WorkerMemory,
    check_memory,
    memory_of,
    memory_of_plan,
)
from eclip.core.mix import mix_of
from eclip.core.model_key import ModelKey, parse_model
from eclip.core.plan import Processes, Variant, unpartitioned
from eclip.core.profile import Profile
from eclip.core.program import lower
from eclip.core.topology import Topology
from eclip.core.trace import with_traces
from eclip.errors import UsageError
from eclip.files import store
from eclip.models.library import find_profile
from eclip.models.modelled import model_names, model_profile
from eclip.planner.policies import make_plan
from eclip.planner.problem import Problem
from eclip.sim.device import SimDevice

MIB, GIB = 1 << 20, 1 << 30
H200 = store.load_builtin("h200", Topology)
CALIBRATION = store.load_builtin("h200", Calibration)
# Parameters and statistics as torchvision and transformers count them, in millions.
PARAMETERS = {
    "albert": 11.68,
    "alexnet": 61.10,
    "bert": 109.48,
    "convnext": 28.59,
    "densenet121": 8.06,
    "gpt2": 124.44,
    "resnet50": 25.61,
    "vgg19": 143.67,
    "vit_b_16": 86.57,
}

counts = st.integers(0, 1 << 40)
footprints = st.builds(
    Footprint,
    weights_bytes=counts,
    activations_bytes=counts,
    workspaces_bytes=counts,
    executables_bytes=counts,
    modelled=st.booleans(),
)
workers = st.builds(
    WorkerMemory,
    name=st.sampled_from("abc"),
    footprint=st.none() | footprints,
    variants=st.integers(1, 16),
)


def footprint(activations_bytes: int = 0, executables_bytes: int = 0) -> Footprint:
    return Footprint(
        weights_bytes=0,
        activations_bytes=activations_bytes,
        workspaces_bytes=0,
        executables_bytes=executables_bytes,
        modelled=True,
    )


def modelled(model: str, batch: int) -> Profile:
    return model_profile(ModelKey(model, batch), H200, CALIBRATION)


def footprint_in(profile: Profile) -> Footprint:
    assert profile.footprint is not None
    return profile.footprint


def problem_of(profiles: Sequence[Profile], topology: Topology = H200) -> Problem:
    mix = mix_of(profile.model for profile in profiles)
    return Problem(mix, topology, tuple(profiles))


def refusal(need: MemoryNeed) -> str:
    with pytest.raises(UsageError) as caught:
        check_memory(need, "the mix")
    return str(caught.value)


# The sum


@settings(deadline=None)
@given(st.lists(workers, max_size=6), st.integers(0, 64), st.integers(1, 6))
def test_total_is_the_sum_of_workers_contexts_and_lanes(
    given_workers: list[WorkerMemory], lanes: int, processes: int
) -> None:
    need = memory_of(H200, given_workers, lanes=lanes, processes=processes)
    parts = [
        one.footprint.weights_bytes
        + one.footprint.activations_bytes
        + one.footprint.workspaces_bytes
        + one.variants * one.footprint.executables_bytes
        for one in given_workers
        if one.footprint is not None
    ]
    expected = sum(parts) + processes * H200.context_bytes + lanes * H200.lane_bytes
    assert need.total_bytes == expected
    assert need.fits == (expected <= H200.memory_bytes)


@settings(deadline=None)
@given(st.lists(workers, max_size=6), workers)
def test_another_worker_never_needs_less(
    given_workers: list[WorkerMemory], another: WorkerMemory
) -> None:
    fewer, more = (
        memory_of(H200, some, lanes=0).total_bytes
        for some in (given_workers, [*given_workers, another])
    )
    assert more == fewer + another.total_bytes


def test_footprint_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="activations_bytes must be at least 0"):
        footprint(-1)


@pytest.mark.parametrize("change", [{"memory_bytes": 0}, {"context_bytes": -1}, {"lane_bytes": -1}])
def test_topology_with_impossible_memory_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="memory_bytes"):
        msgspec.structs.replace(H200, **change)


# Modelled footprints


@pytest.mark.parametrize("model", PARAMETERS)
def test_modelled_weights_are_the_models_parameters_in_half_precision(model: str) -> None:
    found = footprint_in(modelled(model, 8))
    assert found.weights_bytes / 2e6 == pytest.approx(PARAMETERS[model], rel=0.001)
    assert found.modelled


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(model_names()), st.integers(1, 400), st.integers(1, 400))
def test_bigger_batch_never_needs_less_and_the_weights_stay(model: str, a: int, b: int) -> None:
    small, big = (footprint_in(modelled(model, batch)) for batch in sorted((a, b)))
    assert small.total_bytes <= big.total_bytes
    assert small.weights_bytes == big.weights_bytes


@pytest.mark.parametrize("model", model_names())
def test_activations_grow_in_proportion_to_large_batches(model: str) -> None:
    few, many = (footprint_in(modelled(model, batch)).activations_bytes for batch in (512, 1024))
    assert many / few == pytest.approx(2, rel=0.1)


def test_largest_live_set_of_vgg19_is_between_its_first_two_convolutions() -> None:
    # 64 channels of 224x224 in, as many out, and the image, for each of 100 images.
    live_bytes = 100 * 2 * 224 * 224 * (64 + 64 + 3)
    found = footprint_in(modelled("vgg19", 100)).activations_bytes
    assert live_bytes < found <= live_bytes + 22 * MIB


def test_residual_of_resnet50_is_alive_beside_the_branch() -> None:
    # At the end of a block of the first stage: what came in, into and out of a normalisation.
    live_bytes = 100 * 2 * (3 * 256 * 56 * 56 + 3 * 224 * 224)
    assert footprint_in(modelled("resnet50", 100)).activations_bytes >= live_bytes


@pytest.mark.parametrize("key", ["albert:8", "albert~66:8", "bert~44:32", "resnet50:1"])
def test_shipped_profiles_have_a_footprint(key: str) -> None:
    found = find_profile(parse_model(key), H200, CALIBRATION, [])
    own = footprint_in(found)
    assert not found.modelled
    assert own.weights_bytes > 0
    assert own.activations_bytes > 0


# Plans


def test_every_variant_of_a_worker_has_an_executable_of_its_own() -> None:
    profiles = [
        msgspec.structs.replace(modelled("alexnet", 8), footprint=footprint(executables_bytes=size))
        for size in (1000, 10)
    ]
    plan = unpartitioned(H200, profiles)
    alone = Variant(active=(0,), assignments=plan.main.assignments[:1])
    twice = msgspec.structs.replace(plan, variants=(*plan.variants, alone))
    first, second = memory_of_plan(twice).workers
    assert (first.total_bytes, second.total_bytes) == (2000, 10)


def test_lane_of_all_slices_has_no_context_of_its_own() -> None:
    problem = problem_of([modelled("alexnet", 8), modelled("vgg19", 8)])
    assert memory_of_plan(make_plan("shared", problem)).lanes_bytes == 0
    masked = make_plan("model", problem)
    partial = sum(lane.mask != H200.full for lane in masked.lanes)
    assert partial > 0
    assert memory_of_plan(masked).lanes_bytes == partial * H200.lane_bytes


def test_every_process_has_a_context() -> None:
    problem = problem_of([modelled("alexnet", 8)] * 3)
    shared, turns = (make_plan(policy, problem) for policy in ("shared", "timeslice"))
    assert memory_of_plan(shared).contexts_bytes == H200.context_bytes
    assert memory_of_plan(turns).contexts_bytes == 3 * H200.context_bytes
    under_mps = msgspec.structs.replace(shared, sharing=Processes((50, 50, 50)))
    assert memory_of_plan(under_mps).contexts_bytes == 3 * H200.context_bytes


def test_plan_keeps_its_workers_footprints() -> None:
    profile = modelled("alexnet", 8)
    for policy in ("shared", "model", "eclip"):
        plan = make_plan(policy, problem_of([profile, profile]))
        assert [worker.footprint for worker in plan.workers] == [profile.footprint] * 2


# Refusals


def test_refusal_shows_the_sum_and_the_three_largest() -> None:
    needs = [10, 90, 20, 30, 40]
    need = memory_of(
        H200,
        [
            WorkerMemory(name=f"w{size}", footprint=footprint(size * GIB, executables_bytes=GIB))
            for size in needs
        ],
        lanes=512,
        processes=2,
    )
    assert refusal(need) == (
        "the mix needs 198.0 GiB of memory and NVIDIA H200 has 140.4: w90 91.0 (weights 0.0, "
        "activations 90.0, workspaces 0.0, executables 1.0), w40 41.0, w30 31.0, 2 more 32.0, "
        "contexts 1.0, lanes 2.0; use smaller batches or fewer workers"
    )


def test_refusal_names_workers_that_could_not_be_counted() -> None:
    big = WorkerMemory(name="big", footprint=footprint(200 * GIB))
    text = refusal(memory_of(H200, [big, WorkerMemory(name="program", footprint=None)], lanes=0))
    assert "not known and not counted: program" in text


def test_mix_that_just_fits_is_not_refused() -> None:
    room = H200.memory_bytes - H200.context_bytes
    check_memory(
        memory_of(H200, [WorkerMemory(name="a", footprint=footprint(room))], lanes=0), "it"
    )
    refusal(memory_of(H200, [WorkerMemory(name="a", footprint=footprint(room + 1))], lanes=0))


def test_problem_that_does_not_fit_is_refused_before_anybody_plans() -> None:
    with pytest.raises(UsageError, match=r"resnet50:40000,vgg19:8 needs \d+\.\d GiB.*: resnet50 "):
        problem_of([modelled("resnet50", 40_000), modelled("vgg19", 8)])


def test_problem_counts_the_largest_kernels_that_a_worker_may_choose() -> None:
    own = modelled("alexnet", 8)
    trace = msgspec.structs.replace(own.trace, model=own.model.with_kernels_for(66))
    other = msgspec.structs.replace(
        own,
        trace=trace,
        fingerprint=with_traces(own.fingerprint, [trace]),
        footprint=footprint(200 * GIB),
    )
    Problem(mix_of([own.model]), H200, (own,))
    with pytest.raises(UsageError, match="needs 200"):
        Problem(mix_of([own.model]), H200, (own,), (other,))


def test_processes_that_do_not_fit_are_refused_though_one_would() -> None:
    profile = modelled("alexnet", 8)
    contexts_bytes = 2 * H200.context_bytes  # room for one context, not for three
    need = 3 * footprint_in(profile).total_bytes + H200.hardware_queues * H200.lane_bytes
    small = msgspec.structs.replace(H200, memory_bytes=need + contexts_bytes)
    problem = problem_of([profile] * 3, small)
    make_plan("shared", problem)
    with pytest.raises(UsageError, match=r"the timeslice plan of .* needs"):
        make_plan("timeslice", problem)


def test_plan_is_not_opened_on_a_device_with_less_memory_than_it_needs() -> None:
    profiles = [modelled("vgg19", 1024)] * 8
    plan = make_plan("shared", problem_of(profiles))
    program = lower(plan, [profile.trace for profile in profiles])
    SimDevice(H200, CALIBRATION).open(program, profiles).close()
    small = msgspec.structs.replace(H200, title="a smaller GPU", memory_bytes=80 * GIB)
    with pytest.raises(UsageError, match=r"the plan needs 103\.\d GiB .* a smaller GPU has 80\.0"):
        SimDevice(small, CALIBRATION).open(program, profiles)


def test_recorded_programs_are_planned_without_a_footprint() -> None:
    profile = msgspec.structs.replace(modelled("alexnet", 8), footprint=None)
    plan = make_plan("shared", problem_of([profile]))
    assert memory_of_plan(plan).total_bytes == H200.context_bytes
