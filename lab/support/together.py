"""All workers are background, and yet have joints: what that costs a mix.

Each mix runs back to back under plain streams and under the plan of a search, with and without
joints at which everybody looks for services of other processes. The throughput may not differ.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from lab.support.workshop import Bench, KeptStand

from eclip.contest.confirm.plans import make_plan
from eclip.core.device import Window
from eclip.core.load import closed_loop
from eclip.core.measures import measure_together
from eclip.core.mix import parse_mix
from eclip.core.plan import Plan
from eclip.core.runlog import RunLog
from eclip.planner.case import Case
from eclip.planner.joints import JointRules, give_way
from eclip.planner.policies import PolicyOptions
from eclip.rig.rounds import rotation

MIXES = ("albert:8,densenet201:8,vgg19:8", "vgg19:8,shufflenet:8")
POLICIES = ("shared", "search")
ROUNDS = 4
WINDOW = Window(1.0, 0.15, trace_ms=0.0)
EXPECTED_S = 2 * len(POLICIES) * ROUNDS * 1.2 + 20.0  # of a mix: runs, captures, search


def run_mix(bench: Bench, text: str, window: Window = WINDOW) -> None:
    """A line for every policy, with the throughput both ways."""
    mix = parse_mix(text)
    profiles = tuple(bench.profile(str(model), index) for index, model in enumerate(mix.models))
    shelf = bench.shelf
    case = Case(mix, shelf.topology, shelf.calibration, profiles, usual_kernels=True)
    stand = KeptStand(case, bench.device, bench.made)
    plans = _plans(case, bench.search_s)
    with contextlib.ExitStack() as stack:
        sessions = {key: stack.enter_context(stand.open(plan)) for key, plan in plans.items()}
        keys = list(plans)
        logs: dict[tuple[str, bool], list[RunLog]] = {key: [] for key in keys}
        for _, index in rotation(len(keys), ROUNDS):
            key = keys[index]
            load = closed_loop(len(mix.workers))
            logs[key].append(stand.run(sessions[key], plans[key], load, window))
        for policy in POLICIES:
            bench.keep(_row(bench, text, policy, logs))


def _plans(case: Case, seconds: float) -> dict[tuple[str, bool], Plan]:
    """By policy, and whether with joints."""
    plans: dict[tuple[str, bool], Plan] = {}
    for policy in POLICIES:
        plain = make_plan(case, policy, PolicyOptions(seconds=seconds))
        rules = {worker: JointRules() for worker in plain.everyone}
        joined = give_way(plain, case.profiles, {}, rules)
        plans |= {(policy, False): plain, (policy, True): joined}
    return plans


def _row(
    bench: Bench, text: str, policy: str, logs: dict[tuple[str, bool], list[RunLog]]
) -> dict[str, Any]:
    alone_rps = logs[policy, False][-1].alone_rps  # the same for all
    stp = {
        joints: measure_together(
            [msgspec.structs.replace(log, alone_rps=alone_rps) for log in logs[policy, joints]]
        ).stp
        for joints in (False, True)
    }
    row = {"stage": "together", "mix": text, "policy": policy, "device": bench.device.title}
    cost = 1 - stp[True] / stp[False]
    bench.say(f"{text}, {policy}: STP {stp[False]:.3f}, with joints {stp[True]:.3f}")
    return row | {"stp": stp[False], "stp_with_joints": stp[True], "cost": cost}
