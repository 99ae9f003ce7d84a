"""Claim of profile.py: a kernel's time is a straight line in its waves, most of the last counted.

    PYTHONPATH=src python bench/profiles.py [FOLDER]

Every profiled size is predicted from its two neighbours, the smallest from the next two, for all
profiles of the H200 or those in a folder: mean absolute error of kernels, by their time, and of
requests; by how far a last wave counts as a full one (0: time is linear in 1/units).
"""

from __future__ import annotations

import sys
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


def main(folder: Path) -> None:
    found = [store.load(file, Profile) for file in sorted(folder.glob("*.json.gz"))]
    rows = []
    for part in PARTS:
        profiles._WHOLE = part
        smallest: list[tuple[float, float]] = []
        between: list[tuple[float, float]] = []
        for profile in found:
            for left, size in enumerate(profile.sizes[:-1]):
                true = profile.busy_at(size)
                said = without(profile, left).busy_at(size)
                errors = np.abs(said - true).sum() / true.sum(), abs(said.sum() / true.sum() - 1)
                (between if left else smallest).append(errors)
        means = [*np.mean(between, axis=0), *np.mean(smallest, axis=0)]
        rows.append([f"{part:g}", *(f"{mean:.1%}" for mean in means)])
    columns = ["kernels", "requests"]
    print_table(
        f"{len(found)} profiles, sizes predicted from others: between two; the smallest",
        ["last wave counts", *columns, *columns],
        rows,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PACK)
