"""Claims of profile.py and between.py: sizes and batches that were not measured.

    PYTHONPATH=src python lab/profiles.py [FOLDER]

For all profiles of the H200, or those in a folder:

Batches. Request times of the zoo's models as modelled, and as they are where measured batches are
around, and how often a larger batch takes less time. Then every measured batch is predicted from
the other ones: by the model; by the model times measured over modelled time at the other batches;
by the straight line of between.py. Then mixes are simulated with measured profiles of batch 8, and
with predicted ones.

Sizes. A kernel's time is a straight line in its waves, most of the last counted. Every profiled
size is predicted from its two neighbours: mean absolute error of kernels, by their time, and of
requests; by how far a last wave counts as a full one (0: time is linear in 1/units). Then the
smallest size is predicted from each larger one, by waves, as a profile does below its smallest
size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.support.tables import print_table

from eclip.core import profile as profiles
from eclip.core.mix import PAPER_MIXES, parse_mix
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile, Times
from eclip.files import store
from eclip.models.between import align
from eclip.models.modelled import model_names, model_profile
from eclip.planner.case import Case, find_calibration, find_topology
from eclip.planner.evaluate import SimEvaluator
from eclip.planner.policies import make_plan

PACK = Path(str(resources.files("eclip") / "data" / "profiles" / "h200"))
PARTS = (0.0, 0.25, 0.5, 0.75, 0.9)
TOPOLOGY = find_topology("h200")
CALIBRATION = find_calibration(None, TOPOLOGY)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MIXES = (
    *PAPER_MIXES,
    "resnet50:8,bert:8,densenet121:8,shufflenet:8",
    "gpt2:8,vit_b_16:8",
    "mobilenet_v3:8,efficientnet:8,squeezenet:8,alexnet:8,resnet50:8,bert:8",
    "convnext:8,resnext101:8",
    "gpt2:8,resnet50:8",
)

Batches = Mapping[int, Profile]  # of one model, measured


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


def modelled(model: str, batch: int) -> Profile:
    return model_profile(ModelKey(model, batch), TOPOLOGY, CALIBRATION)


def on_line(model: str, batch: int, others: Batches) -> Profile:
    return align(modelled(model, batch), list(others.values()))


def without_batch(batches: Batches, left: int) -> Batches:
    return {batch: profile for batch, profile in batches.items() if batch != left}


def request_times(measured: Mapping[str, Batches]) -> None:
    falling = {"as modelled": 0, "on the line": 0}
    whole: list[list[str]] = []
    smallest: list[list[str]] = []
    for model, known in measured.items():
        ways = {
            "as modelled": {batch: modelled(model, batch) for batch in BATCHES} | dict(known),
            "on the line": {batch: on_line(model, batch, known) for batch in BATCHES} | dict(known),
        }
        times = {
            way: np.array([found[batch].request_ns for batch in BATCHES])
            for way, found in ways.items()
        }
        for way, table in times.items():
            falling[way] += int((np.diff(table, axis=0) < 0).any(axis=0).sum())
        for size, rows in ((-1, whole), (0, smallest)):
            pairs = zip(BATCHES, *(table[:, size] / 1e3 for table in times.values()), strict=True)
            cells = [
                f"{old:.0f}" if batch in known else f"{old:.0f} → {new:.0f}"
                for batch, old, new in pairs
            ]
            rows.append([model, *cells])
    for units, rows in ((TOPOLOGY.units, whole), (TOPOLOGY.lane_sizes[0], smallest)):
        print_table(
            f"Request times in µs on {units} units: measured, or as modelled → on the line",
            ["model", *(f"batch {batch}" for batch in BATCHES)],
            rows,
        )
    print_table(
        f"Models and sizes, of {len(measured) * len(TOPOLOGY.lane_sizes)}, with a batch of these "
        "that takes less time than a smaller one",
        ["request times", "falling"],
        [[way, f"{count}"] for way, count in falling.items()],
    )


def predictions(model: str, batch: int, others: Batches) -> dict[str, Times]:
    """Request times at every size, by ways to predict them."""
    plain = modelled(model, batch)
    logs = np.array(
        [
            np.log(np.divide(profile.request_ns, modelled(model, other).request_ns))
            for other, profile in sorted(others.items())
        ]
    )
    known = np.log(sorted(others))
    factors = np.exp([np.interp(np.log(batch), known, column) for column in logs.T])
    return {
        "model": np.array(plain.request_ns, dtype=np.float64),
        "model, scaled": np.multiply(plain.request_ns, factors),
        "line": np.array(on_line(model, batch, others).request_ns, dtype=np.float64),
    }


def left_out_batches(measured: Mapping[str, Batches]) -> None:
    errors: dict[tuple[int, str, str], list[Times]] = {}
    for model, batches in measured.items():
        for batch, profile in batches.items():
            others = without_batch(batches, batch)
            source = " and ".join(map(str, sorted(others)))
            for way, said in predictions(model, batch, others).items():
                off = np.abs(said / np.array(profile.request_ns) - 1)
                errors.setdefault((batch, source, way), []).append(off)
    for what, over in (("mean", np.mean), ("worst", np.max)):
        print_table(
            f"{len(measured)} models, request times of a measured batch that was left out: {what} "
            "error by units",
            ["batch", "from", "by", *map(str, TOPOLOGY.lane_sizes), "all"],
            [
                [
                    *(f"{batch}", source, way),
                    *(f"{over(column):.1%}" for column in np.transpose(every)),
                    f"{over(every):.1%}",
                ]
                for (batch, source, way), every in sorted(errors.items(), key=lambda one: one[0][0])
            ],
        )


def mixes_of_predicted(measured: Mapping[str, Batches]) -> None:
    ways: dict[str, Callable[[str], Profile]] = {
        "model": lambda model: modelled(model, 8),
        "line": lambda model: on_line(model, 8, without_batch(measured[model], 8)),
        "measured": lambda model: measured[model][8],
    }
    errors: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    mixes = [
        mix
        for mix in map(parse_mix, MIXES)
        if all(8 in measured.get(model.name, {}) for model in mix.models)
    ]
    for mix in mixes:
        for policy in ("shared", "model"):
            found = {}
            for way, profile_of in ways.items():
                profiles = {model: profile_of(model.name) for model in mix.models}
                case = Case(
                    mix, TOPOLOGY, CALIBRATION, tuple(profiles[model] for model in mix.models)
                )
                evaluate = SimEvaluator.of(case)
                (score,) = evaluate([make_plan(policy, case.problem())])
                found[way] = np.multiply(score.ratios, evaluate.alone_rps), score
            rates, truth = found.pop("measured")
            for way, (said, score) in found.items():
                off = float(np.abs(said / rates - 1).mean())
                stp, power = score.stp / truth.stp, score.power_w / truth.power_w
                errors.setdefault((policy, way), []).append((off, abs(stp - 1), abs(power - 1)))
    print_table(
        f"{len(mixes)} mixes of batch 8, simulated with predicted instead of measured profiles: "
        "mean error",
        ["policy", "by", "rates", "STP", "power"],
        [
            [policy, way, *(f"{mean:.1%}" for mean in np.mean(every, axis=0))]
            for (policy, way), every in errors.items()
        ],
    )


def main(folder: Path) -> None:
    found = [store.load(file, Profile) for file in sorted(folder.glob("*.json.gz"))]
    measured: dict[str, dict[int, Profile]] = {}
    for profile in found:
        model = profile.model
        if model.name in model_names() and not model.kernels_for:
            measured.setdefault(model.name, {})[model.batch] = profile
    measured = {model: batches for model, batches in measured.items() if len(batches) > 2}
    request_times(measured)
    left_out_batches(measured)
    mixes_of_predicted(measured)
    below_sizes(found)
    between_sizes(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PACK)
