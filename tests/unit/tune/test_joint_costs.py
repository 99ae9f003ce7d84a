"""What joints cost is found again on a device whose costs are known: the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from eclip.core.mix import parse_mix
from eclip.files import store
from eclip.files.observations import Observations, ObservedJoints
from eclip.models.synthetic import synthetic_profile
from eclip.planner.case import make_case
from eclip.progress import Progress
from eclip.rig.rig import Rig
from eclip.sim.device import SimDevice
from eclip.tune.calibrate import cases_on, measure
from eclip.tune.joint_costs import costs_with_joints, observe_joints, pair_of
from heard import Heard
from simulations import CALIBRATIONS, H200, case_of

BASE = CALIBRATIONS["h200"]


def device(joint_ns: int, notice_ns: int, hold_ns: int) -> SimDevice:
    costs = replace(BASE.costs, joint_ns=joint_ns, notice_ns=notice_ns, hold_ns=hold_ns)
    return SimDevice(H200, replace(BASE, costs=costs))


@pytest.mark.parametrize("true", [(1_500, 5_500, 8_000), (4_000, 12_000, 30_000), (0, 900, 2_000)])
@pytest.mark.parametrize("mix", ["bert:8,vgg19:8", "squeezenet:8,gpt2:8,resnet50:8"])
def test_costs_of_joints_are_found_again(mix: str, true: tuple[int, int, int]) -> None:
    pair = make_case(pair_of(make_case(mix, H200)), H200)
    observed = observe_joints(Rig(pair, device(*true)))
    wrong = replace(BASE.costs, joint_ns=77_777, notice_ns=77_777, hold_ns=77_777)
    found = costs_with_joints(wrong, [observed])
    assert (found.joint_ns, found.notice_ns, found.hold_ns) == pytest.approx(true, rel=0.05, abs=60)


def test_a_pair_is_the_shortest_beside_the_longest_of_its_case() -> None:
    case = make_case("bert:8,vgg19:8,alexnet:8", H200)
    requests = {profile.model: profile.request_ns[-1] for profile in case.profiles}
    service, background = pair_of(case).models
    assert requests[service] == min(requests.values())
    assert requests[background] == max(requests.values())


def test_without_observed_joints_costs_stay_as_they_were() -> None:
    assert costs_with_joints(BASE.costs, []) == BASE.costs


def test_noise_does_not_make_costs_less_than_nothing() -> None:
    noisy = ObservedJoints(
        mix="a:1",
        joints=10,
        plain_ns=1e6,
        deep_ns=0.9e6,
        shallow_ns=0.9e6,
        gap_ns=0.0,
        resume_ns=-5.0,
    )
    found = costs_with_joints(BASE.costs, [noisy])
    assert (found.joint_ns, found.notice_ns, found.hold_ns) == (0, 0, 0)


def test_a_request_too_short_for_joints_is_left_out_with_the_reason(tmp_path: Path) -> None:
    profiles = [synthetic_profile(seed, 1, H200, name=name) for seed, name in enumerate("ab")]
    mix = parse_mix(f"{profiles[0].model}@1rps/9x,{profiles[1].model}@background")
    opened, heard = device(1_500, 5_500, 8_000), Heard()
    path = tmp_path / "observations.json.gz"
    pair = case_of(profiles, mix=mix)
    kept = measure(opened, [], path, [pair], runs=1, budget_s=60.0, seed=0, progress=heard)
    assert kept.joints == ()
    assert "so it has no joints" in heard.warnings[0]


def test_pairs_are_measured_once_and_kept_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "observations.json.gz"
    opened = device(1_500, 5_500, 8_000)
    pairs = cases_on(opened, ["alexnet:8@1rps/9x,bert:8@background"], None, [])
    first = measure(opened, [], path, pairs, runs=1, budget_s=60.0, seed=0, progress=Progress())
    assert [one.mix for one in first.joints] == [pairs[0].mix.name]
    again = measure(opened, [], path, pairs, runs=1, budget_s=60.0, seed=0, progress=Progress())
    assert again.joints == first.joints == store.load(path, Observations).joints
