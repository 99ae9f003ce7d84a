"""The cost of joints, measured on a device for pairs of a service and background work.

Three sessions run in turns: plain streams, stretches launched one ahead (depth 2), and stretches
each launched after the end of the one before (depth 1). No worker yields there, so the extra time
of a background request is the cost of its joints. In a fourth session background yields, and its
kernel records show the time from the service's end to the next kernel of background.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from eclip.core.calibration import Costs
from eclip.core.device import Window
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.mix import Mix, parse_mix
from eclip.core.plan import Plan, unpartitioned
from eclip.core.profile import Profile
from eclip.core.runlog import RunLog
from eclip.errors import DeviceError
from eclip.files.observations import ObservedJoints
from eclip.planner.alone import alone_rate
from eclip.planner.case import Case
from eclip.planner.joints import JointRules, give_way, promise_of
from eclip.rig.rig import Rig
from eclip.rig.rounds import rotation

SERVICE, BACKGROUND = 0, 1  # workers of every pair
_ROUNDS = 3
_SECONDS = 0.3  # of one run
_ARRIVALS = 12  # of the service, so far apart that background is back at work before the next


def pair_of(case: Case) -> Mix:
    """The shortest request of a case as a service beside the longest as background. The service's
    rate and bound have no effect: the measurement uses its own arrivals."""
    ordered = sorted(case.profiles, key=lambda profile: profile.request_ns[-1])
    return parse_mix(f"{ordered[0].model}@1rps/9x,{ordered[-1].model}@background")


def observe_joints(rig: Rig) -> ObservedJoints:
    """Measure the cost of the joints of the pair's background."""
    profiles = rig.case.profiles
    plain = unpartitioned(rig.case.topology, profiles, rig.case.mix)
    yielding = _with_joints(plain, profiles, JointRules(depth=1))
    joints = yielding.workers[BACKGROUND].joints
    if joints is None or not joints.at:
        raise DeviceError(
            f"a request of {profiles[BACKGROUND].model} is shorter than a stretch, so it has no "
            f"joints; measure a mix with a longer request"
        )
    ignoring = [
        _with_joints(plain, profiles, JointRules(yields=None, depth=depth)) for depth in (2, 1)
    ]
    plain_ns, deep_ns, shallow_ns = _requests_ns(rig, [plain, *ignoring])
    return ObservedJoints(
        mix=rig.case.mix.name,
        joints=len(joints.at),
        plain_ns=plain_ns,
        deep_ns=deep_ns,
        shallow_ns=shallow_ns,
        gap_ns=float(np.mean(_gaps_ns(profiles[BACKGROUND])[np.array(joints.at) - 1])),
        resume_ns=_resume_ns(rig, yielding),
    )


def costs_with_joints(costs: Costs, observed: Sequence[ObservedJoints]) -> Costs:
    """The costs, with the observed costs of joints: the median over the pairs."""
    if not observed:
        return costs
    behind = [(pair.deep_ns - pair.plain_ns) / pair.joints for pair in observed]
    # The host does not wait for the gap after a stretch's last kernel.
    apart = [(pair.shallow_ns - pair.plain_ns) / pair.joints + pair.gap_ns for pair in observed]
    resumed = [pair.resume_ns for pair in observed]
    launch_ns = costs.launch_ns
    return replace(
        costs,
        joint_ns=_at_least_0(statistics.median(behind)),
        notice_ns=_at_least_0(statistics.median(apart) - launch_ns),
        hold_ns=_at_least_0(statistics.median(resumed) - launch_ns),
    )


def _at_least_0(cost_ns: float) -> int:
    return max(0, round(cost_ns))


def _with_joints(plain: Plan, profiles: Sequence[Profile], rules: JointRules) -> Plan:
    service = profiles[SERVICE]
    promise = promise_of(plain.mix.workers[SERVICE], service, service.request_ns[-1])
    return give_way(plain, profiles, {SERVICE: promise}, {BACKGROUND: rules})


def _requests_ns(rig: Rig, plans: Sequence[Plan]) -> list[float]:
    """The time of a background request in each plan while the service is idle."""
    profiles = rig.case.profiles
    rates: list[list[float]] = [[] for _ in plans]
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(rig.open(plan)) for plan in plans]
        for _, turn in rotation(len(sessions), _ROUNDS):
            rates[turn].append(alone_rate(sessions[turn], BACKGROUND, profiles, _SECONDS))
    return [1e9 / statistics.median(of_plan) for of_plan in rates]


def _resume_ns(rig: Rig, plan: Plan) -> float:
    """The time from the end of the service's request to the next kernel of yielding background."""
    service, background = rig.case.profiles
    apart_ns = 3 * (service.request_ns[-1] + background.request_ns[-1])
    arrivals = np.arange(_ARRIVALS, dtype=np.int64) * apart_ns + apart_ns
    load = Load("apart", 0, (arrivals, CLOSED_LOOP))
    seconds = (_ARRIVALS + 1) * apart_ns / 1e9
    window = Window(seconds=seconds, trace_ms=1000 * seconds)
    with rig.open(plan) as session:
        log = session.run(load, window)
    # A request ends after the gap that follows its last kernel.
    pauses = [pause - float(_gaps_ns(service)[-1]) for pause in _pauses_ns(log)]
    if not pauses:
        raise DeviceError(f"the background of {plan.mix.name} never yielded, so nothing resumed")
    return statistics.median(pauses)


def _gaps_ns(profile: Profile) -> npt.NDArray[np.float64]:
    return profile.gap_at(profile.sizes[-1])


def _pauses_ns(log: RunLog) -> Iterator[float]:
    """The pause of background after every request of the service."""
    kernels = log.kernels
    worker, position = np.array(kernels.worker), np.array(kernels.position)
    start, end = np.array(kernels.start_ns), np.array(kernels.end_ns)
    last = log.plan.workers[SERVICE].kernels - 1
    theirs = worker == BACKGROUND
    for done in end[(worker == SERVICE) & (position == last)].tolist():
        still_runs = theirs & (start < done) & (end > done)
        after = start[theirs & (start >= done)]
        if not still_runs.any() and after.size:
            yield float(after.min() - done)
