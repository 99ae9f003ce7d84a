"""The profile library: finds the profile of a model and batch.

The first that exists wins: a file in the user's folders, in their order; a measured profile in the
package; a modelled profile, aligned with measured profiles of other batches. A file for another
device or model is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from eclip.core.calibration import Calibration
from eclip.core.model_key import MAX_BATCH, ModelKey
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.core.trace import Trace
from eclip.errors import MismatchError, UsageError, unknown_name
from eclip.files import store
from eclip.models.between import align
from eclip.models.modelled import model_names, model_profile

_SUFFIXES = (".json.gz", ".json")


def find_profile(
    model: ModelKey,
    topology: Topology,
    calibration: Calibration,
    folders: Sequence[Path],
) -> Profile:
    searched = _searched(topology, folders)
    if path := _file_in(searched, model):
        return _load(path, model, topology)
    if model.kernels_for and model.name in model_names():
        if model.kernels_for >= topology.units:
            raise UsageError(
                f"{model}: kernels are chosen for fewer units than all, and {topology.title} has "
                f"{topology.units} {topology.unit_name}s; give a smaller number after ~, or none"
            )
        raise UsageError(
            f"there is no profile of {model}; measure it: eclip profile {model} -o profiles, then "
            f"give that folder as profiles"
        )
    if model.name not in model_names() or model.kernels_for:
        names = [
            name
            for folder in searched
            for name in _names_in(folder)
            if name.rpartition(":")[0].partition("~")[0] not in model_names()
        ]
        raise unknown_name("model", model.title, [*model_names(), *dict.fromkeys(names)])
    measured = _other_batches(model, topology, searched)
    return align(model_profile(model, topology, calibration), measured)


def has_file(model: ModelKey, topology: Topology, folders: Sequence[Path]) -> bool:
    """Whether its profile is in a folder, and need not be modelled."""
    return _file_in(_searched(topology, folders), model) is not None


def find_others(model: ModelKey, topology: Topology, folders: Sequence[Path]) -> list[Profile]:
    """The profiles of a model with its kernels chosen for fewer units, from the same folder as its
    usual one; for a key that names its kernels there are none."""
    usual = _file_in(_searched(topology, folders), model)
    if usual is None or model.kernels_for:
        return []
    found: dict[int, Path] = {}
    for suffix in _SUFFIXES[::-1]:
        name = re.compile(
            rf"{re.escape(model.name)}~([1-9]\d{{0,5}})-{model.batch}{re.escape(suffix)}"
        )
        for path in usual.parent.iterdir():
            if match := name.fullmatch(path.name):
                found[int(match[1])] = path
    return [
        _load(path, model.with_kernels_for(units), topology)
        for units, path in sorted(found.items())
    ]


def find_measured(trace: Trace, topology: Topology, folders: Sequence[Path]) -> Profile | None:
    """The profile of exactly these kernels in the user's folders, if one of them has it."""
    path = _file_in(_searched(topology, folders)[: len(folders)], trace.model)
    if path is None:
        return None
    profile = _load(path, trace.model, topology)
    if profile.trace.digest != trace.digest:
        raise MismatchError(
            f"{path} is of other kernels than {trace.model} launches here; measure it again"
        )
    return profile


def file_of(folder: Path, model: ModelKey) -> Path:
    """Where a model's profile is kept in a folder."""
    return folder / f"{model.title}-{model.batch}{_SUFFIXES[0]}"


def _searched(topology: Topology, folders: Sequence[Path]) -> list[Path]:
    """The user's folders and the package's own, if it has one for this device."""
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder} to take profiles from")
    pack = Path(str(resources.files("eclip") / "data" / "profiles" / topology.name))
    return [*folders, pack] if pack.is_dir() else list(folders)


def _file_in(folders: Sequence[Path], model: ModelKey) -> Path | None:
    for folder in folders:
        for suffix in _SUFFIXES:
            path = folder / f"{model.title}-{model.batch}{suffix}"
            if path.is_file():
                return path
    return None


def _other_batches(model: ModelKey, topology: Topology, folders: Sequence[Path]) -> list[Profile]:
    """The model's measured profiles that have all sizes of lanes; of a batch, the first found."""
    suffix = "|".join(map(re.escape, _SUFFIXES))
    name = re.compile(rf"{re.escape(model.title)}-([1-9]\d{{0,4}})(?:{suffix})")
    matches = (name.fullmatch(path.name) for folder in folders for path in folder.iterdir())
    batches = sorted({int(match[1]) for match in matches if match})
    keys = [ModelKey(model.name, batch) for batch in batches if batch <= MAX_BATCH]
    found = [_load(path, key, topology) for key in keys if (path := _file_in(folders, key))]
    return [one for one in found if not one.modelled and one.sizes == topology.lane_sizes]


def _load(path: Path, model: ModelKey, topology: Topology) -> Profile:
    profile = store.load(path, Profile)
    if profile.model != model:
        raise MismatchError(
            f"{path} holds the profile of {profile.model}, not of {model}; rename it"
        )
    profile.fingerprint.check(topology.fingerprint, str(path), topology.title)
    return profile


def _names_in(folder: Path) -> list[str]:
    """Models that have files here, each with its batch: a file serves no other."""
    stems = (
        path.name.removesuffix(suffix)
        for path in sorted(folder.iterdir())
        for suffix in _SUFFIXES
        if path.name.endswith(suffix)
    )
    return [":".join(stem.rsplit("-", 1)) for stem in stems if "-" in stem]
