"""Sources: profiles, captures and jobs from which a device runs its workers.

The device names the kind that it needs. Captures need torch, which is heavy and imported when used.
"""

from __future__ import annotations

import os
from typing import Any

from eclip.core.device import Device, SourceKind
from eclip.core.profile import Profile
from eclip.cuda.processes.child import Job
from eclip.errors import DeviceError

_ENTRY = "eclip.capture.served:open_model"  # called by a process that runs one worker


def make_source(kind: SourceKind, profile: Profile, device: Device) -> Any:
    if kind is SourceKind.PROFILE:
        return profile
    if kind is SourceKind.JOB:
        return Job(_ENTRY, profile.model)
    # Read when torch is imported, which warns that choosing kernels for fewer units is
    # experimental. Not for the whole command line: `exec` would pass it on.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        from eclip.capture.named import capture_worker
    except ModuleNotFoundError as error:
        raise DeviceError(f"the package {error.name} is missing; see `eclip doctor`") from None
    return capture_worker(profile, device.index)
