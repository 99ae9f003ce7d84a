"""Case: what every question is about: a mix, a device's shape and constants, and profiles.

Names become artefacts here: a topology or calibration by name or file, profiles from the user's
folders, the package's own, or modelled.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eclip.core.calibration import Calibration
from eclip.core.mix import Mix, parse_mix
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan, fingerprint_of
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.errors import UsageError
from eclip.files import store
from eclip.files.observations import Observations, ObservedRun
from eclip.models.library import find_others, find_profile
from eclip.planner.problem import Problem


@dataclass(frozen=True)
class Case:
    """A mix on a device, with the profiles and constants that belong to them."""

    mix: Mix
    topology: Topology
    calibration: Calibration
    profiles: tuple[Profile, ...]  # one per worker; workers of one model share it
    folders: tuple[Path, ...] = ()  # of the user's profiles
    tail: bool = False  # variable-output kernels at the times of long outputs, not expected ones
    usual_kernels: bool = False  # a search may not choose kernels for fewer units

    @functools.cached_property
    def others(self) -> tuple[Profile, ...]:
        """Profiles of the same models with kernels for fewer units, which a search may choose."""
        if self.usual_kernels:
            return ()
        found = [
            profile
            for model in dict.fromkeys(self.mix.models)
            for profile in find_others(model, self.topology, self.folders)
        ]
        return tuple(profile.at_tail() if self.tail else profile for profile in found)

    def problem(self, *, choosing: bool = False) -> Problem:
        """For a planner; ``choosing``: with the kernels for fewer units to choose from."""
        others = self.others if choosing else ()
        return Problem(self.mix, self.topology, self.profiles, others)

    def profiles_of(self, mix: Mix) -> tuple[Profile, ...]:
        """Of another mix of this case's models, such as a plan's, which may have other kernels."""
        return find_profiles(mix, self.topology, self.calibration, self.folders, self.tail)


def make_case(
    mix: str | Mix | Sequence[str | ModelKey],
    topology: str | Topology = "h200",
    calibration: str | Path | Calibration | None = None,
    profiles: Iterable[str | Path] = (),
    *,
    tail: bool = False,
    usual_kernels: bool = False,
) -> Case:
    """A case from what a person writes.

    ``profiles`` are folders, searched before the package's own. ``tail`` takes variable-output
    kernels at the times of long outputs. ``usual_kernels`` keeps a search from choosing kernels
    for fewer units.
    """
    wanted = mix_from(mix)
    shape = find_topology(topology)
    constants = find_calibration(calibration, shape)
    folders = tuple(Path(folder) for folder in profiles)
    found = find_profiles(wanted, shape, constants, folders, tail)
    return Case(wanted, shape, constants, found, folders, tail, usual_kernels)


def mix_from(given: str | Mix | Sequence[str | ModelKey]) -> Mix:
    """The mix that a text, or a list of its parts such as ``["albert:8", "vgg19:8"]``, names."""
    if isinstance(given, Mix):
        return given
    if isinstance(given, str):
        return parse_mix(given)
    listed = isinstance(given, list | tuple) and bool(given)
    if listed and all(isinstance(part, str | ModelKey) for part in given):
        return parse_mix(",".join(map(str, given)))
    raise UsageError(
        f"a mix is a text such as 'albert:8,vgg19:8', a list of such parts, or a Mix, "
        f"not {given!r:.60}"
    )


def case_of(
    plan: Plan,
    calibration: str | Path | Calibration | None = None,
    profiles: Iterable[str | Path] = (),
    *,
    tail: bool = False,
) -> Case:
    """The case of a plan, of its mix as it was asked for: rates alone are of the usual kernels."""
    return make_case(plan.mix.as_asked(), plan.topology, calibration, profiles, tail=tail)


def find_topology(name: str | Topology) -> Topology:
    """A built-in topology by name, or one from a file."""
    if isinstance(name, Topology):
        return name
    if name in store.builtin_names(Topology) or not _is_file_name(name):
        return store.load_builtin(name, Topology)
    return store.load(name, Topology)


def find_calibration(wanted: str | Path | Calibration | None, topology: Topology) -> Calibration:
    """The one given, from its file, or the built-in one of the topology."""
    if isinstance(wanted, Calibration):
        return wanted
    if wanted is not None:
        return store.load(wanted, Calibration)
    if topology.name not in store.builtin_names(Calibration):
        raise UsageError(
            f"there is no built-in calibration for {topology.name}; give a calibration file"
        )
    return store.load_builtin(topology.name, Calibration)


def find_profiles(
    mix: Mix,
    topology: Topology,
    calibration: Calibration,
    folders: Sequence[Path],
    tail: bool = False,
) -> tuple[Profile, ...]:
    found: dict[ModelKey, Profile] = {}
    for model in dict.fromkeys(mix.models):
        profile = find_profile(model, topology, calibration, folders)
        found[model] = profile.at_tail() if tail else profile
    return tuple(found[model] for model in mix.models)


def find_observations(name: str | Path) -> Observations:
    """A built-in one by name, or one from a file."""
    if isinstance(name, str) and name in store.builtin_names(Observations):
        return store.load_builtin(name, Observations)
    return store.load(name, Observations)


def find_observed(
    observations: Observations,
    topology: Topology,
    calibration: Calibration,
    folders: Sequence[Path],
) -> dict[ModelKey, Profile]:
    """All profiles that observed runs are replayed with."""
    mixes = [parse_mix(mix) for mix in observations.mixes]
    mixes += dict.fromkeys(run.ran for run in observations.runs)
    return {
        profile.model: profile
        for mix in mixes
        for profile in find_profiles(mix, topology, calibration, folders)
    }


def find_earlier(path: str | Path, case: Case, *, modelled: bool) -> tuple[ObservedRun, ...]:
    """Placements of the case's mix that an earlier search has tried, with profiles it has.

    ``modelled``: the search that goes on from them is simulated, and may use simulated ones.
    """
    kept = store.load(path, Observations)
    profiles = (*case.others, *case.profiles)
    kept.fingerprint.check(fingerprint_of(case.topology, profiles), str(path), "the profiles")
    if kept.modelled and not modelled:
        raise UsageError(f"{path} was simulated; a search on a GPU goes on from one on a GPU")
    mine = [run for run in kept.runs if run.homes and run.models == case.mix.models]
    if not mine:
        raise UsageError(
            f"{path} has no placements of {case.mix.name} to go on from, only of "
            f"{', '.join(kept.mixes) or 'nothing'}"
        )
    known = {profile.model for profile in profiles}
    usable = tuple(run for run in mine if known.issuperset(run.ran.models))
    if not usable:
        raise UsageError(
            f"{path} has placements of {case.mix.name} only with kernels for fewer units, which "
            f"have no profile here or may not be chosen (usual kernels only)"
        )
    return usable


def _is_file_name(name: str) -> bool:
    return "/" in name or name.endswith((".json", ".json.gz"))
