"""What tests of several rooms share: devices, problems, and how hypothesis runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from eclip.core.calibration import Calibration
from eclip.core.mix import mix_of
from eclip.core.topology import Topology
from eclip.files import store
from eclip.models.synthetic import synthetic_profile
from eclip.planner.problem import Problem

# Ray reads this when it is imported: clusters of tests are on this machine only.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

# The first call of compiled code may compile it, which no deadline foresees; and on a busy machine
# drawing examples is slow without anything being wrong with them.
settings.register_profile(
    "eclip",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("eclip")

# A shell starts background jobs with interrupts ignored, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def h200() -> Topology:
    return store.load_builtin("h200", Topology)


@pytest.fixture(scope="session")
def mi50() -> Topology:
    return store.load_builtin("mi50", Topology)


@pytest.fixture(scope="session")
def h200_calibration() -> Calibration:
    return store.load_builtin("h200", Calibration)


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    """A problem of synthetic profiles: ``make_problem(topology, workers, kernels=12, seed=0)``."""

    def make(topology: Topology, workers: int, kernels: int = 12, seed: int = 0) -> Problem:
        profiles = tuple(
            synthetic_profile(seed + index, kernels + index, topology, name=f"m{index}")
            for index in range(workers)
        )
        mix = mix_of(profile.model for profile in profiles)
        return Problem(mix, topology, profiles)

    return make
