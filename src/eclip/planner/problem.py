"""Problem: a mix and its profiles as the arrays that solvers work on, and back to a plan.

``times(w, sizes)[k, c]`` is what kernel k of worker w takes on a lane of ``sizes[c]`` units, its
gap included, so that a worker's times add up to its request; infinite where it cannot run.

A worker may have several profiles to choose from: libraries that are told of fewer units choose
other kernels, which often run better beside others though they are slower alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from eclip.core.fingerprint import Fingerprint
from eclip.core.memory import WorkerMemory, check_memory, memory_of
from eclip.core.mix import Mix
from eclip.core.plan import (
    Assignment,
    Group,
    Lane,
    Plan,
    PlannedWorker,
    Variant,
    fingerprint_of,
)
from eclip.core.profile import Profile, Times
from eclip.core.topology import Topology
from eclip.errors import MismatchError

Choice = npt.NDArray[np.int64]  # per kernel: an index, of a size or of a lane


@dataclass(frozen=True)
class Problem:
    mix: Mix
    topology: Topology
    profiles: tuple[Profile, ...]
    others: tuple[Profile, ...] = ()  # of the same models, with other kernels
    fingerprint: Fingerprint = field(init=False)  # of every plan for it
    _columns: dict[tuple[int, int], Times] = field(init=False, repr=False, compare=False)
    _chosen: dict[tuple[int, ...], Problem] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for worker, profile in zip(self.mix.workers, self.profiles, strict=True):
            if profile.model != worker.model:
                raise MismatchError(
                    f"{worker.name} needs a profile of {worker.model}, not {profile.model}"
                )
        object.__setattr__(self, "_columns", {})
        object.__setattr__(self, "_chosen", {})
        # Refuses profiles of another device.
        object.__setattr__(self, "fingerprint", fingerprint_of(self.topology, self.profiles))
        self._check_memory()

    def _check_memory(self) -> None:
        """Refuse a mix that does not fit, before it is planned for. Once for the problem, not
        for every candidate: with the largest of the kernels that a worker can choose, one
        executable each, and as many lanes as have a hardware queue."""
        workers = []
        for worker, own in zip(self.mix.workers, self.profiles, strict=True):
            choices = [own, *(one for one in self.others if one.model.usual == worker.model.usual)]
            known = [profile.footprint for profile in choices if profile.footprint is not None]
            largest = max(known, key=lambda footprint: footprint.total_bytes, default=None)
            workers.append(WorkerMemory(name=worker.name, footprint=largest))
        need = memory_of(self.topology, workers, lanes=self.topology.hardware_queues)
        check_memory(need, self.mix.name)

    def kernels_for(self, worker: int) -> list[int]:
        """The numbers of units that a worker can have its kernels chosen for; 0: all, its own.
        One whose model names its kernels has no others."""
        model = self.mix.workers[worker].model
        if model.kernels_for:
            return [0]
        return [0, *(one.model.kernels_for for one in self.others if one.model.usual == model)]

    def choosing(self, units: Sequence[int]) -> Problem:
        """The same with every worker's kernels chosen for so many units; 0: its own ones."""
        wanted = tuple(units)
        if not any(wanted):
            return self
        if wanted not in self._chosen:
            self._chosen[wanted] = self._choose(wanted)
        return self._chosen[wanted]

    def of(self, plan: Plan) -> Problem:
        """The same with the kernels that a plan for it has chosen."""
        workers = zip(self.mix.workers, plan.mix.workers, strict=True)
        return self.choosing(
            [0 if own.model == other.model else other.model.kernels_for for own, other in workers]
        )

    def _choose(self, units: tuple[int, ...]) -> Problem:
        known = {profile.model: profile for profile in self.others}
        workers, profiles = [], []
        for worker, own, count in zip(self.mix.workers, self.profiles, units, strict=True):
            if count:
                worker = replace(worker, model=worker.model.with_kernels_for(count))
                if worker.model not in known:
                    raise MismatchError(f"{worker.name} needs a profile of {worker.model}")
                own = known[worker.model]
            workers.append(worker)
            profiles.append(own)
        return Problem(replace(self.mix, workers=tuple(workers)), self.topology, tuple(profiles))

    def times(self, worker: int, sizes: Sequence[int]) -> Times:
        for size in sizes:
            if (worker, size) not in self._columns:
                self._columns[worker, size] = self._column(self.profiles[worker], size)
        return np.stack([self._columns[worker, size] for size in sizes], axis=1)

    @staticmethod
    def _column(profile: Profile, size: int) -> Times:
        times: Times = profile.busy_at(size) + profile.gap_at(size)
        for kernel, index in profile.illegal:
            # What does not fit a lane of some size does not fit a smaller one either.
            if size <= profile.sizes[index]:
                times[kernel] = np.inf
        return times

    def on_own_lanes(self) -> list[Choice]:
        """Choices: all kernels of a worker on the lane of its number."""
        return [
            np.full(len(profile.trace.kernels), worker, dtype=np.int64)
            for worker, profile in enumerate(self.profiles)
        ]

    def plan(
        self,
        *,
        policy: str,
        lanes: Sequence[Lane],
        choices: Sequence[Choice],  # per worker and kernel: a lane
        whys: Sequence[str],
        why: str,
    ) -> Plan:
        """The plan that sends every kernel to its chosen lane; unused lanes are left out."""
        used = sorted({int(lane) for choice in choices for lane in np.unique(choice)})
        number = {lane: index for index, lane in enumerate(used)}
        return Plan(
            mix=self.mix,
            policy=policy,
            topology=self.topology,
            fingerprint=self.fingerprint,
            modelled=any(profile.modelled for profile in self.profiles),
            workers=tuple(
                PlannedWorker(
                    name=worker.name,
                    model=worker.model,
                    kernels=len(profile.trace.kernels),
                    why=reason,
                    footprint=profile.footprint,
                )
                for worker, profile, reason in zip(
                    self.mix.workers, self.profiles, whys, strict=True
                )
            ),
            lanes=tuple(lanes[lane] for lane in used),
            variants=(
                Variant(
                    active=tuple(range(len(choices))),
                    assignments=tuple(
                        self._assignment(worker, choice, lanes, number)
                        for worker, choice in enumerate(choices)
                    ),
                ),
            ),
            why=why,
        )

    def _assignment(
        self, worker: int, choice: Choice, lanes: Sequence[Lane], number: dict[int, int]
    ) -> Assignment:
        borders = np.flatnonzero(np.diff(choice)) + 1
        starts = [0, *borders.tolist()]
        ends = [*borders.tolist(), len(choice)]
        time_on = {
            lane: self.times(worker, [self.topology.units_of(lanes[lane].mask)])[:, 0]
            for lane in np.unique(choice).tolist()
        }
        return Assignment(
            worker,
            tuple(
                Group(
                    lane=number[int(choice[start])],
                    kernels=end - start,
                    predicted_ns=round(time_on[int(choice[start])][start:end].sum()),
                )
                for start, end in zip(starts, ends, strict=True)
            ),
        )
