"""What does the plan do? Plans as slices × time, recorded kernels, and what a smaller lane costs.

The picture of a plan is drawn here. Recorded kernels and profiles are many numbers, so they go into
the page compressed, and the page's script draws them on demand.
"""

from __future__ import annotations

import base64
import gzip
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.core.model_key import ModelKey
from eclip.core.plan import Assignment, Plan, Processes, Turns
from eclip.core.profile import Profile
from eclip.core.runlog import KernelRecords, RunLog
from eclip.core.topology import Mask
from eclip.errors import MismatchError
from eclip.planner.tiers import joints_in_words, rules_in_words
from eclip.reports.chapters import Chapter, SharingWay
from eclip.reports.labels import count, duration, listed, percent, units_title
from eclip.reports.names import kernel_names

_WIDTH = 10_000  # of a picture's own coordinates, so that a group's place is a whole number
_FEW_LANES = 2  # that are named one by one
_TICK_NS = 100  # of recorded times in the page: no GPU's clock is finer than some of these

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PlannedRequest:
    """A worker's request in a plan: its slices over its time."""

    worker: int
    name: str
    model: str
    head: str  # kernels, groups, time
    why: str
    facts: tuple[str, ...]
    shades: tuple[str, str]  # paths of every other group
    joints: str  # a path
    slices: int
    words: str  # the picture's description, for screen readers


@dataclass(frozen=True)
class Inside:
    """The inside of a way, shown when the way is selected."""

    label: str
    take: bool
    gist: str  # the plan in a sentence or two
    notes: tuple[str, ...]
    data: str  # made from measured or modelled profiles
    requests: tuple[PlannedRequest, ...]
    unequal: str  # of slices that differ in size; empty: none does
    kernels: str  # recorded ones, packed; empty: none
    caption: str
    gives_way: bool


@dataclass(frozen=True)
class LaneCost:
    """A model whose kernels were profiled on lanes of several sizes."""

    model: str
    caption: str
    modelled: bool
    data: str  # packed; empty: there is no profile, and the caption says why


def insides(chapter: Chapter, take: SharingWay | None) -> list[Inside]:
    return [
        _inside(way, way.plan, chosen=way is take) for way in chapter.ways if way.plan is not None
    ]


def _inside(way: SharingWay, plan: Plan, *, chosen: bool) -> Inside:
    kernels, caption = "", "This plan has not run, so no kernel was recorded."
    if way.log is not None:
        kernels, caption = _recorded(way.log)
    return Inside(
        label=way.label,
        take=chosen,
        gist=_gist(plan),
        notes=tuple(_notes(plan)),
        data=f"planned from profiles that were {'modelled' if plan.modelled else 'measured'}",
        requests=tuple(_request(plan, part, way.log) for part in plan.main.assignments),
        unequal=_unequal(plan),
        kernels=kernels,
        caption=caption,
        gives_way=plan.gives_way,
    )


def _gist(plan: Plan) -> str:
    if isinstance(plan.sharing, Turns):
        return "The models take turns of the whole device."
    if isinstance(plan.sharing, Processes):
        return f"Every model has a process of its own, under MPS with {plan.sharing.label}."
    sentences = [_places(plan)]
    for index, worker in enumerate(plan.workers):
        if worker.joints is not None and worker.joints.rules:
            sentences.append(f"{worker.name} {rules_in_words(plan, index)}.")
    return " ".join(sentences)


def _places(plan: Plan) -> str:
    """Which part of the device each model may use, and where these parts overlap."""
    parts, held = [], []
    for part in plan.main.assignments:
        lanes = {group.lane for group in part.groups}
        sizes = sorted({plan.units(lane) for lane in lanes})
        name = plan.workers[part.worker].name
        parts.append(f"{name} has {' to '.join(map(str, sizes[:: len(sizes) - 1 or 1]))}")
        held.append({index for lane in lanes for index in plan.lanes[lane].mask})
    slices = range(len(plan.topology.slice_units))
    if all(len(mine) == len(slices) for mine in held):
        return "Every model may use the whole device."
    shared = Mask(index for index in slices if sum(index in mine for mine in held) > 1)
    overlap = f"slices {shared} are for several of them" if len(shared) else "no slice is shared"
    return f"Of {units_title(plan, plan.topology.units)} {listed(parts)}; {overlap}."


def _notes(plan: Plan) -> list[str]:
    notes = (
        [f"The planner's note, from trials before the runs compared above: {plan.why.rstrip('.')}."]
        if plan.why
        else []
    )
    if plan.aliased:
        notes.append(
            f"The plan has {count(len(plan.lanes), 'lane')} for "
            f"{count(plan.topology.hardware_queues, 'hardware queue')}: some lanes wait on "
            f"each other for no reason."
        )
    if len(plan.variants) > 1:
        others = count(len(plan.variants) - 1, "further variant")
        notes.append(f"Drawn is the variant for all workers active; the plan has {others}.")
    return notes


def _unequal(plan: Plan) -> str:
    sizes = Counter(plan.topology.slice_units).most_common()
    if len(sizes) == 1:
        return ""
    parts = [f"{slices} of {units_title(plan, units)}" for units, slices in sizes]
    return f"Slices differ in size but are drawn at one height: {listed(parts)}."


def _request(plan: Plan, part: Assignment, log: RunLog | None) -> PlannedRequest:
    worker = plan.workers[part.worker]
    predicted_ns = sum(group.predicted_ns for group in part.groups)
    head = (
        f"{count(worker.kernels, 'kernel')} in {count(len(part.groups), 'group')} on "
        f"{_held(plan, part)}, {duration(predicted_ns)} undisturbed"
    )
    return PlannedRequest(
        worker=part.worker,
        name=worker.name,
        model=str(worker.model),
        head=head,
        why=worker.why,
        facts=tuple(_facts(plan, part, log)),
        shades=_shades(plan, part),
        joints=_joint_marks(plan, part.worker),
        slices=len(plan.topology.slice_units),
        words=f"{worker.name}: {head}; {_share_words(plan, part)}",
    )


def _held(plan: Plan, part: Assignment) -> str:
    """``52 SMs (slices 10-15)``; of many lanes only the sizes"""
    lanes = list(dict.fromkeys(group.lane for group in part.groups))
    if len(lanes) <= _FEW_LANES:
        return " and ".join(
            f"{units_title(plan, plan.units(lane))} (slices {plan.lanes[lane].mask})"
            for lane in lanes
        )
    sizes = sorted({plan.units(lane) for lane in lanes})
    return f"{sizes[0]} to {units_title(plan, sizes[-1])}"


def _share_words(plan: Plan, part: Assignment) -> str:
    return ", ".join(
        f"{percent(share, 0)} of the time on {units_title(plan, units)}"
        for units, share in sorted(plan.time_by_units(part).items())
    )


def _facts(plan: Plan, part: Assignment, log: RunLog | None) -> list[str]:
    worker = plan.workers[part.worker]
    facts = []
    if len(part.groups) > 1:
        facts.append(_share_words(plan, part))
    if worker.joints is not None:
        joints = count(len(worker.joints.at), "joint")
        facts.append(f"{joints}; {joints_in_words(plan, part.worker)}")
    if log is not None and plan.gives_way and worker.joints is not None:
        counters = log.counters[part.worker]
        pause = f" (longest pause {duration(counters.longest_pause_ns)})" if counters.yields else ""
        facts.append(
            f"in its last run it yielded {count(counters.yields, 'time')}{pause} and ran "
            f"{counters.moves:,} {'stretch' if counters.moves == 1 else 'stretches'} aside"
        )
    return facts


def _shades(plan: Plan, part: Assignment) -> tuple[str, str]:
    """A path for groups 1, 3, 5, … and one for the others: a rectangle for each run of slices."""
    total = sum(group.predicted_ns for group in part.groups) or len(part.groups)
    paths: tuple[list[str], list[str]] = ([], [])
    passed = 0
    for index, group in enumerate(part.groups):
        begin = passed * _WIDTH // total
        passed += group.predicted_ns or total // len(part.groups)
        width = max(1, passed * _WIDTH // total - begin)
        paths[index % 2].extend(
            f"M{begin} {first}h{width}v{length}h-{width}z"
            for first, length in _runs(plan.lanes[group.lane].mask)
        )
    return "".join(paths[0]), "".join(paths[1])


def _runs(mask: Mask) -> list[tuple[int, int]]:
    """Neighbouring slices together: the first and how many."""
    runs = []
    for _, members in groupby(enumerate(sorted(mask)), lambda pair: pair[1] - pair[0]):
        slices = [part for _, part in members]
        runs.append((slices[0], len(slices)))
    return runs


def _joint_marks(plan: Plan, worker: int) -> str:
    joints = plan.workers[worker].joints
    if joints is None:
        return ""
    ends = np.cumsum(joints.stretch_ns)
    total = int(ends[-1]) or 1
    return "".join(f"M{int(end) * _WIDTH // total} 0v1" for end in ends[:-1])


def _recorded(log: RunLog) -> tuple[str, str]:
    """The recorded kernels, packed, and what to say of them."""
    records = log.kernels
    window = duration(records.window_ns)
    if not records.worker or records.window_ns < 1:
        return "", f"No kernel was recorded in this run's trace window of {window}."
    whose = "a run of their own after the measured one" if records.own_run else "the run"
    caption = (
        f"The {count(len(records.worker), 'kernel')} of the first {window} of {whose}. A kernel "
        f"fills the slices of its lane; those still running at the end were not recorded."
    )
    plan = log.plan
    columns = _columns(records)
    return packed(
        {
            "window": records.window_ns / _TICK_NS,
            "tick_ns": _TICK_NS,
            "slices": len(plan.topology.slice_units),
            "lanes": [
                {"title": f"{units_title(plan, plan.units(index))}, slices {lane.mask}",
                 "runs": _runs(lane.mask)}
                for index, lane in enumerate(plan.lanes)
            ],
            "workers": [
                _worker_records(plan, index, columns) for index in range(len(plan.workers))
            ],
        }
    ), caption  # fmt: skip


def _columns(records: KernelRecords) -> dict[str, Integers]:
    order = np.argsort(np.asarray(records.start_ns, dtype=np.int64), kind="stable")
    return {
        name: np.asarray(getattr(records, name), dtype=np.int64)[order]
        for name in ("worker", "position", "lane", "start_ns", "end_ns")
    }


def _worker_records(plan: Plan, index: int, columns: Mapping[str, Integers]) -> dict[str, Any]:
    """In the order of their starts; starts and positions as differences, which pack best."""
    own = columns["worker"] == index
    start = columns["start_ns"][own] // _TICK_NS
    end = columns["end_ns"][own] // _TICK_NS
    worker = plan.workers[index]
    rules = worker.joints.rules if worker.joints else ()
    return {
        "name": worker.name,
        "model": str(worker.model),
        "start": np.diff(start, prepend=0).tolist(),
        "long": (end - start).tolist(),
        "at": np.diff(columns["position"][own], prepend=0).tolist(),
        "lane": columns["lane"][own].tolist(),
        "joints": list(worker.joints.at) if worker.joints else [],
        "aside": sorted({one.lane for one in rules if one.lane is not None}),
    }


def lane_costs(chapter: Chapter, profiles: Mapping[ModelKey, Profile]) -> list[LaneCost]:
    """Of every model of the chapter's plans."""
    usable, refused = _usable(chapter.plans, profiles)
    models = sorted({model for plan in chapter.plans for model in plan.models})
    return [_lane_cost(model, usable.get(model), refused.get(model)) for model in models]


def _usable(
    plans: Sequence[Plan], profiles: Mapping[ModelKey, Profile]
) -> tuple[dict[ModelKey, Profile], dict[ModelKey, str]]:
    """The profiles that belong to these plans, and why others do not."""
    usable: dict[ModelKey, Profile] = {}
    refused: dict[ModelKey, str] = {}
    for plan in plans:
        for model in set(plan.models) & profiles.keys() - refused.keys():
            try:
                plan.fingerprint.check(profiles[model].fingerprint, "the plan", f"profile {model}")
            except MismatchError as error:
                refused[model] = str(error)
                usable.pop(model, None)
            else:
                usable[model] = profiles[model]
    return usable, refused


def _lane_cost(model: ModelKey, profile: Profile | None, refused: str | None) -> LaneCost:
    if profile is None:
        reason = refused or f"the profile of {model} was not given to this report"
        return LaneCost(str(model), f"Nothing to draw: {reason}.", modelled=False, data="")
    busy = np.asarray(profile.busy_ns, dtype=np.int64)
    whole = np.maximum(busy[:, -1], 1)
    return LaneCost(
        model=str(model),
        caption=f"Each kernel's busy time on a lane of each size, over that on the whole device. "
        f"Source: {profile.source}",
        modelled=profile.modelled,
        data=packed(
            {
                "model": str(model),
                "names": kernel_names(profile.trace),
                "sizes": list(profile.sizes),
                "whole": whole.tolist(),
                "times": np.round(100 * busy / whole[:, None]).astype(np.int64).tolist(),
            }
        ),
    )


def packed(value: Any) -> str:
    """Compressed JSON as text for a script element, with none of HTML's signs in it."""
    return base64.b64encode(gzip.compress(msgspec.json.encode(value), 9, mtime=0)).decode()
