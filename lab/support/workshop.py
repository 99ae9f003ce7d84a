"""A device with what all measurements on it share: profiles, captures, and a folder of results.

Whatever is measured is a line of FOLDER/services.jsonl at once. Torch is imported when something
has to be captured.
"""

from __future__ import annotations

import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.support.kept import Row, add_rows
from lab.support.pairs import STAND_INS

from eclip.capture.sources import make_source
from eclip.core.calibration import Calibration
from eclip.core.device import Device, SourceKind
from eclip.core.model_key import ModelKey, parse_model
from eclip.core.plan import Lanes
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.devices import open_device
from eclip.errors import MismatchError, UsageError
from eclip.files import store
from eclip.models.library import file_of, find_profile
from eclip.planner.case import Case, find_calibration, find_topology
from eclip.rig.rig import Rig

RESULTS = "services.jsonl"


class KeptRig(Rig):
    """Shares its captures with the rigs of other pairs, and leaves the device open."""

    def __init__(self, case: Case, device: Device, made: dict[Any, Any]) -> None:
        super().__init__(case, device)
        self._made = made


@dataclass(frozen=True)
class Shelf:
    """Profiles, from the folder of results, from others that were named, and from the package."""

    folder: Path
    others: tuple[Path, ...]
    topology: Topology
    calibration: Calibration
    rehearsal: bool  # zoo models stand for the workloads that only a GPU has
    found: dict[str, Profile] = field(default_factory=dict)

    @classmethod
    def at(cls, folder: Path, others: Sequence[Path] = (), *, rehearsal: bool) -> Shelf:
        topology = find_topology("h200")
        return cls(folder, tuple(others), topology, find_calibration(None, topology), rehearsal)

    @property
    def own(self) -> Path:
        return self.folder / "profiles"

    def model(self, name: str) -> ModelKey:
        stand_in = STAND_INS.get(name) if self.rehearsal else None
        return parse_model(stand_in[0] if stand_in else name)

    def find(self, name: str) -> Profile | None:
        """None: nobody has measured it."""
        if name not in self.found and (profile := self._find(name)) is not None:
            self.found[name] = profile
        return self.found.get(name)

    def _find(self, name: str) -> Profile | None:
        folders = [folder for folder in (self.own, *self.others) if folder.is_dir()]
        try:
            found = find_profile(self.model(name), self.topology, self.calibration, folders)
        except UsageError:
            return None
        return found if self.rehearsal or not found.modelled else None

    def request_ms(self, name: str) -> float:
        """What a request takes, or a guess."""
        found = self.find(name)
        return STAND_INS[name][1] if found is None else found.request_ns[-1] / 1e6


@dataclass
class Bench:
    """Profiles and captures are made once for all pairs."""

    device: Device
    shelf: Shelf
    made: dict[Any, Any] = field(default_factory=dict)
    profiles: dict[ModelKey, Profile] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def at(cls, folder: Path, device: str, others: Sequence[Path] = ()) -> Bench:
        shelf = Shelf.at(folder, others, rehearsal=device == "sim")
        shelf.own.mkdir(parents=True, exist_ok=True)
        return cls(open_device(device, shelf.topology, shelf.calibration), shelf)

    @property
    def folder(self) -> Path:
        return self.shelf.folder

    def profile(self, name: str, worker: int) -> Profile:
        model = self.shelf.model(name)
        if model not in self.profiles:
            found = self.shelf.find(name)
            if found is None or not self._captured(found, worker):
                found = self._measure(model, worker)
            self.profiles[model] = self.shelf.found[name] = found
        return self.profiles[model]

    def _captured(self, profile: Profile, worker: int) -> bool:
        """Whether the model launches here what its profile says; if so, its source is kept."""
        kind = self.device.source_kind(Lanes())
        try:
            source = make_source(kind, profile, self.device)
        except MismatchError as error:
            self.say(str(error))
            return False
        self.made[kind, worker, profile.model] = source
        return True

    def _measure(self, model: ModelKey, worker: int) -> Profile:
        """At half of the device and all of it; the capture is the worker's source, too."""
        import torch

        from eclip.capture.named import build
        from eclip.capture.profiler import measure_profile
        from eclip.capture.torch import capture
        from eclip.cuda.device import CudaDevice

        assert isinstance(self.device, CudaDevice)
        torch.cuda.set_device(self.device.index)
        begin = time.monotonic()
        captured = capture(*build(model), model)
        sizes = self.device.topology.lane_sizes
        half = min(sizes, key=lambda units: abs(2 * units - sizes[-1]))
        profile = measure_profile(
            self.device, captured, sizes=(half, sizes[-1]), energy_seconds=0.0, stress=False
        )
        self.made[SourceKind.CAPTURE, worker, model] = captured.capture
        store.save(profile, file_of(self.shelf.own, model))
        with tarfile.open(self.folder / "profiles.tar", "w") as packed:
            packed.add(self.shelf.own, "profiles")  # under a name without colons
        what = f"{profile.request_ns[-1] / 1e6:.3f} ms, {len(profile.trace.kernels)} kernels"
        self.say(f"profiled {model}: {what}, {time.monotonic() - begin:.1f} s")
        return profile

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def keep(self, row: Row) -> None:
        self.rows.append(row)
        add_rows(self.folder / RESULTS, [row])
