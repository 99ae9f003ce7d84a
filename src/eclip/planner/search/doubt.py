"""Doubt: other arrivals, and devices that differ from the calibration, to try a shortlist on.

A search compares hundreds of plans by the same few arrivals on one simulated device. The best of
them is good there, by luck too. So the shortlist is tried once more: with other arrivals, and on
two devices on which kernels take longer, neighbours disturb more and the host is slower. How far
off devices are was measured on an H200 (docs/results/promises.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from eclip.core.calibration import Calibration
from eclip.core.profile import Profile

REQUESTS = 1_100  # of the service with the fewest, in each setting


@dataclass(frozen=True)
class Setting:
    """How far a device is from the calibration."""

    longer: float = 1.0  # every kernel, in times
    disturbed: float = 0.0  # more by every neighbour, as a part of a kernel's time
    host: float = 1.0  # launching, noticing and waking, in times

    def calibration(self, calibration: Calibration) -> Calibration:
        costs, sharing = calibration.costs, calibration.interference
        times = {
            name: round(self.host * getattr(costs, name))
            for name in ("launch_ns", "joint_ns", "notice_ns", "hold_ns")
        }
        return msgspec.structs.replace(
            calibration,
            costs=msgspec.structs.replace(costs, **times),
            interference=msgspec.structs.replace(
                sharing, presence=sharing.presence + self.disturbed
            ),
        )

    def profile(self, profile: Profile) -> Profile:
        if self.longer == 1:
            return profile
        busy = np.maximum(np.rint(np.array(profile.busy_ns) * self.longer), 1).astype(np.int64)
        whole = busy.sum(axis=0) + np.array(profile.gap_ns).sum(axis=0)
        return msgspec.structs.replace(
            profile,
            busy_ns=tuple(map(tuple, busy.tolist())),
            request_ns=tuple(whole.tolist()),
            energy_uj=(),
            tail_ns=(),
        )


# The calibration itself comes first: its scores are the plan's evidence.
SETTINGS = (
    Setting(),
    Setting(longer=1.05, disturbed=0.14, host=1.5),
    Setting(longer=1.05, disturbed=0.5, host=2.0),
)
