"""What a submitted request costs here: to submit and to poll, and how late the simulator is.

Nothing but this may run on the machine, or the tails are those of the others.
"""

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from eclip.core.calibration import Calibration
from eclip.core.mix import mix_of
from eclip.core.program import lower
from eclip.core.topology import Topology
from eclip.files import store
from eclip.models.synthetic import synthetic_profile
from eclip.planner.policies import make_plan
from eclip.planner.problem import Problem
from eclip.sim.device import SimDevice

REQUESTS = 1_000
GAP_S = 0.002


def main() -> None:
    topology = store.load_builtin("h200", Topology)
    profiles = [synthetic_profile(seed, 100, topology, name=f"m{seed}") for seed in range(3)]
    problem = Problem(mix_of(profile.model for profile in profiles), topology, tuple(profiles))
    program = lower(make_plan("shared", problem), [profile.trace for profile in profiles])
    device = SimDevice(topology, store.load_builtin("h200", Calibration))
    for background in ((), (2,)):
        submit_ns, poll_ns = [], []
        with device.open(program, profiles) as session:
            session.serve(slots=1, background=background)
            for _ in range(REQUESTS):
                began = time.perf_counter_ns()
                session.submit(0, 0)
                submit_ns.append(time.perf_counter_ns() - began)
                session.drain()
                began = time.perf_counter_ns()
                session.poll()
                poll_ns.append(time.perf_counter_ns() - began)
                time.sleep(GAP_S)
            rows = (("submit", submit_ns), ("poll", poll_ns), ("late", session.lateness_ns))
            print(f"background: {background or 'none'}; microseconds at p50, p99, worst")
            for name, times in rows:
                print(f"  {name:8}", *np.percentile(times, [50, 99, 100]).round(-2) / 1e3)


if __name__ == "__main__":
    main()
