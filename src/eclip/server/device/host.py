"""The device that services run on, as planning sees it, and the profiles that it has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eclip.capture.measuring import measure_profiles
from eclip.core.calibration import Calibration
from eclip.core.device import Device
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.devices import open_device
from eclip.errors import DeviceError, UsageError
from eclip.files import store
from eclip.models.files import find_file
from eclip.models.library import find_profile, has_file
from eclip.planner.case import find_calibration, find_topology
from eclip.progress import Progress
from eclip.server.config import ServerSettings
from eclip.server.log import ServerLog

_KEPT = "profiles"  # where new profiles go unless a folder is given
_QUICK = "quick"  # in it: those that a server measured


@dataclass(frozen=True)
class ServingHost:
    topology: Topology
    calibration: Calibration
    computes: bool  # it computes what models compute; a simulator only takes the time
    folders: tuple[Path, ...]  # of profiles; on a GPU the first is where new ones are kept
    title: str
    gpu: int = 0
    uuid: str | None = None  # None: modelled, nobody else uses it
    log: ServerLog | None = None  # told of models that are measured; none: they are refused

    def profile(self, model: ModelKey) -> Profile:
        """What runs on a GPU needs a measured one. A model without is measured once, and kept."""
        self.measure([model])
        return find_profile(model, self.topology, self.calibration, self._searched)

    def has(self, model: ModelKey) -> bool:
        """Whether its profile was measured, or need not be."""
        return not self.computes or has_file(model, self.topology, self._searched)

    @property
    def quick(self) -> Path:
        """Where profiles are kept that a server measured: times only. One of ``eclip profile`` in a
        folder before it counts more."""
        return self.folders[0] / _QUICK

    @property
    def _searched(self) -> Sequence[Path]:
        """All folders; those for new profiles only once they hold some."""
        if not self.computes:
            return self.folders
        first, *others = self.folders
        return [*filter(Path.is_dir, [first]), *others, *filter(Path.is_dir, [self.quick])]

    def measure(self, models: Sequence[ModelKey]) -> None:
        """Measure quickly those that have no profile: all in one process, which takes seconds to
        start and less than one for each."""
        missing = [model for model in dict.fromkeys(models) if not self.has(model)]
        if not missing:
            return
        names = ", ".join(map(str, missing))
        if self.log is None:
            remedy = f"measure it first: eclip profile {missing[0]} -o {self.folders[0]}"
            if find_file(missing[0].name) is not None:
                remedy = "start the server again, which measures it"
            raise UsageError(
                f"{missing[0]} has no profile, and measuring it would disturb what runs; {remedy}"
            )
        store.make_folder(self.folders[0])
        store.make_folder(self.quick)
        self.log.write("profiling quickly, once", models=names)
        begin_s = time.monotonic()
        measure_profiles(missing, self.quick, gpu=self.gpu, quick=True, progress=_Logged(self.log))
        for model in missing:
            if not self.has(model):
                raise DeviceError(f"{model} could not be profiled; the log says why")
        self.log.write(
            "profiled",
            models=names,
            seconds=round(time.monotonic() - begin_s, 1),
            folder=str(self.quick),
            guessed=f"memory traffic; eclip profile -o {self.folders[0]} measures it, too",
        )


class _Logged(Progress):
    def __init__(self, log: ServerLog) -> None:
        super().__init__()
        self._log = log

    def warn(self, message: str) -> None:
        self._log.write("profiling says", line=message)


def find_host(server: ServerSettings, log: ServerLog | None = None) -> ServingHost:
    topology = find_topology(server.topology)
    with open_device(server.device, topology, find_calibration(None, topology)) as device:
        return host_of(device, server, log)


def host_of(device: Device, server: ServerSettings, log: ServerLog | None = None) -> ServingHost:
    folders = tuple(Path(folder) for folder in server.profiles)
    if not folders and not device.modelled:
        folders = (Path(_KEPT),)
    return ServingHost(
        topology=device.topology,
        calibration=find_calibration(None, device.topology),
        computes=not device.modelled,
        folders=folders,
        title=device.title,
        gpu=device.index,
        uuid=device.uuid,
        log=log,
    )
