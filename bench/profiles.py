"""Claim of profile.py: a kernel's time is a straight line in its waves, most of the last counted.

    PYTHONPATH=src python bench/profiles.py [FOLDER]

Every profiled size is predicted from its two neighbours, for all profiles of the H200 or those in a
folder: mean absolute error of kernels, by their time, and of requests; by how far a last wave
counts as a full one (0: time is linear in 1/units). Then the smallest size is predicted from each
larger one, by waves, as a profile does below its smallest size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.tables import print_table

from eclip.artefacts import profile as profiles
from eclip.artefacts import store
from eclip.artefacts.profile import Profile

PACK = Path(str(resources.files("eclip") / "data" / "profiles" / "h200"))
PARTS = (0.0, 0.25, 0.5, 0.75, 0.9)


def without(profile: Profile, left: int) -> Profile:
    def cut(row: tuple[int, ...]) -> tuple[int, ...]:
        return (*row[:left], *row[left + 1 :])

    return msgspec.structs.replace(
        profile,
        sizes=cut(profile.sizes),
        request_ns=cut(profile.request_ns),
        energy_uj=(),
        illegal=(),
        **{
            name: tuple(map(cut, getattr(profile, name)))
            for name in ("busy_ns", "gap_ns", "spread_ns", "tail_ns")
        },
    )


def error(profile: Profile, cut: Profile, size: int) -> tuple[float, float, float]:
    """Of kernels, of requests, and of requests with its sign, at a size that was cut."""
    true, said = profile.busy_at(size), cut.busy_at(size)
    off = said.sum() / true.sum() - 1
    return np.abs(said - true).sum() / true.sum(), abs(off), off


def between_sizes(found: Sequence[Profile]) -> None:
    rows = []
    for part in PARTS:
        profiles._WHOLE = part
        errors = [
            error(profile, without(profile, left), size)[:2]
            for profile in found
            for left, size in enumerate(profile.sizes[1:-1], 1)
        ]
        rows.append([f"{part:g}", *(f"{mean:.1%}" for mean in np.mean(errors, axis=0))])
    print_table(
        f"{len(found)} profiles, sizes predicted from their neighbours",
        ["last wave counts", "kernels", "requests"],
        rows,
    )


def below_sizes(found: Sequence[Profile]) -> None:
    errors: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for profile in found:
        cut, smallest = profile, profile.sizes[0]
        while len(cut.sizes) > 2:
            cut = without(cut, 0)
            errors.setdefault((smallest, cut.sizes[0]), []).append(error(profile, cut, smallest))
    print_table(
        f"{len(found)} profiles, the smallest size predicted from a larger one",
        ["units", "from", "kernels", "requests", "mean"],
        [
            [f"{size}", f"{larger}", f"{kernels:.1%}", f"{requests:.1%}", f"{mean:+.1%}"]
            for (size, larger), every in errors.items()
            for kernels, requests, mean in [np.mean(every, axis=0)]
        ],
    )


def main(folder: Path) -> None:
    found = [store.load(file, Profile) for file in sorted(folder.glob("*.json.gz"))]
    below_sizes(found)
    between_sizes(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PACK)
