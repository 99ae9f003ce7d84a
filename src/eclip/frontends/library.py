"""The profile library: where the profile of a model and batch comes from.

The first that exists wins: a file in the user's folders, in their order; a measured profile that
ships with the package; a modelled one. What comes from a file is for this device and this model, or
refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from eclip.artefacts import store
from eclip.artefacts.calibration import Calibration
from eclip.artefacts.mix import split_model, with_kernels_for
from eclip.artefacts.profile import Profile
from eclip.artefacts.topology import Topology
from eclip.errors import MismatchError, UsageError, unknown_name
from eclip.frontends.modelled import model_names, model_profile

_SUFFIXES = (".json.gz", ".json")


def find_profile(
    model: str,
    batch: int,
    topology: Topology,
    calibration: Calibration,
    folders: Sequence[Path],
) -> Profile:
    searched = _searched(topology, folders)
    if path := _file_in(searched, model, batch):
        return _load(path, f"{model}:{batch}", topology)
    served, units = split_model(model)
    if units and served in model_names():
        if units >= topology.units:
            raise UsageError(
                f"{model}: kernels are chosen for fewer units than all, and {topology.title} has "
                f"{topology.units} {topology.unit_name}s; give a smaller number after ~, or none"
            )
        raise UsageError(
            f"there is no profile of {model}:{batch}; measure it: eclip profile {model}:{batch} "
            f"-o profiles, then add --profiles profiles"
        )
    if model not in model_names():
        names = [
            name
            for folder in searched
            for name in _names_in(folder)
            if name.rpartition(":")[0].partition("~")[0] not in model_names()
        ]
        raise unknown_name("model", model, [*model_names(), *dict.fromkeys(names)])
    return model_profile(model, batch, topology, calibration)


def find_others(
    model: str, batch: int, topology: Topology, folders: Sequence[Path]
) -> list[Profile]:
    """The profiles of a model with its kernels chosen for fewer units, from the same folder as its
    own; for one that names its kernels there are none."""
    own = _file_in(_searched(topology, folders), model, batch)
    if own is None or split_model(model)[1]:
        return []
    found: dict[int, Path] = {}
    for suffix in _SUFFIXES[::-1]:
        name = re.compile(rf"{re.escape(model)}~([1-9]\d{{0,5}})-{batch}{re.escape(suffix)}")
        for path in own.parent.iterdir():
            if match := name.fullmatch(path.name):
                found[int(match[1])] = path
    return [
        _load(path, f"{with_kernels_for(model, units)}:{batch}", topology)
        for units, path in sorted(found.items())
    ]


def split_key(key: str) -> tuple[str, int]:
    """``albert:8`` or ``package.module:factory:8`` to name and batch."""
    name, _, batch = key.rpartition(":")
    if not name or not batch.isascii() or not batch.isdigit() or int(batch) < 1:
        raise UsageError(f"{key!r} is not model:batch, like albert:8 or package.module:factory:8")
    split_model(name)
    return name, int(batch)


def file_of(folder: Path, key: str) -> Path:
    """Where the profile of ``model:batch`` is kept in a folder."""
    model, batch = split_key(key)
    return folder / f"{model}-{batch}{_SUFFIXES[0]}"


def _searched(topology: Topology, folders: Sequence[Path]) -> list[Path]:
    """The user's folders and the package's own, if it has one for this device."""
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder} to take profiles from")
    pack = Path(str(resources.files("eclip") / "data" / "profiles" / topology.name))
    return [*folders, pack] if pack.is_dir() else list(folders)


def _file_in(folders: Sequence[Path], model: str, batch: int) -> Path | None:
    for folder in folders:
        for suffix in _SUFFIXES:
            path = folder / f"{model}-{batch}{suffix}"
            if path.is_file():
                return path
    return None


def _load(path: Path, key: str, topology: Topology) -> Profile:
    profile = store.load(path, Profile)
    if profile.key != key:
        raise MismatchError(f"{path} holds the profile of {profile.key}, not of {key}; rename it")
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
