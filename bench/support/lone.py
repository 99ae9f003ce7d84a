"""A service that has nobody beside it, in a session and in a process of its own.

In a process of its own a service's tail was three times as long as in a session. Here nothing else
can be the cause: one worker, the same arrivals, and where the time of its requests went.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from bench.support import sharing
from bench.support.workshop import Bench, KeptStand

from eclip.artefacts.measures import busy_share
from eclip.artefacts.mix import parse_mix
from eclip.artefacts.plan import Plan, Turns, unpartitioned
from eclip.artefacts.runlog import RunLog
from eclip.devices.base import Session, Window
from eclip.devices.load import closed_loop, load_of_mix
from eclip.lab.case import Case
from eclip.planning.policies import with_shares

MODEL = "bert:1"
LOAD = 0.35
WINDOW = Window(1.5, 0.15, trace_ms=0.0)
ROUNDS = 2
EXPECTED_S = 45.0
HERE, TURNS, MPS = "a session", "a process", "a process under MPS"


def run_lone(bench: Bench, model: str = MODEL) -> None:
    """A line for each: back to back, and with arrivals."""
    profile = bench.profile(model, 0)
    mix = parse_mix(f"{profile.model}@1rps")
    case = Case(mix, bench.shelf.topology, bench.shelf.calibration, (profile,))
    stand = KeptStand(case, bench.device, bench.made)
    plain = unpartitioned(case.topology, case.profiles, mix)
    plans = {TURNS: msgspec.structs.replace(plain, sharing=Turns()), MPS: with_shares(plain, [100])}
    rate = LOAD * 1e9 / profile.request_ns[-1]
    with contextlib.ExitStack() as stack:
        sessions = {HERE: stack.enter_context(stand.open(plain))}
        sessions |= _in_processes(bench, stand, plans, stack)
        for where, session in sessions.items():
            bench.keep(_row(bench, where, session, rate, plain))


def _in_processes(
    bench: Bench, stand: KeptStand, plans: dict[str, Plan], stack: contextlib.ExitStack
) -> dict[str, Session]:
    if bench.device.modelled:  # which has no processes
        return {}
    sets = stand.start(list(plans.values()))
    stack.callback(sets.close)
    sets.wait()
    return dict(zip(plans, sets.sessions, strict=True))


def _row(
    bench: Bench, where: str, session: Session, rate_rps: float, plain: Plan
) -> dict[str, Any]:
    closed = session.run(closed_loop(1), WINDOW)
    (worker,) = plain.mix.workers
    asked = msgspec.structs.replace(worker, rate_rps=rate_rps)
    mix = msgspec.structs.replace(plain.mix, workers=(asked,))
    loads = [
        load_of_mix(mix, WINDOW.seconds, WINDOW.warmup_seconds, number) for number in range(ROUNDS)
    ]
    logs: list[RunLog] = [session.run(load, WINDOW) for load in loads]
    latencies = sharing.Latencies.of(logs, loads, 0)
    found = {
        "requests": len(latencies.ns),
        "latency": sharing.percentiles_ms(latencies.ns),
        "busy_share": busy_share(logs, 0),
        "back_to_back_ms": 1e3 / max(sharing.rate_of([closed], 0), 1e-9),
        **sharing.where_time_went(logs, 0),
    }
    bench.say(f"alone in {where}: {found}")
    row = {"stage": "lone", "pair": str(plain.models[0]), "load": LOAD, "shape": "poisson"}
    row |= {"floor": 0.0, "busy_cores": False, "device": bench.device.title}
    return row | {"way": f"alone in {where}, nobody beside", "alone": [found]}
