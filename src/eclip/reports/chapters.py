"""Chapters: the inputs of a report, sorted by mix, load and kind of device; measured and modelled
results are in different chapters.

Run logs, plans, stored comparisons and outcomes may be given, in any number. A chapter holds the
ways of sharing that can be compared with each other, the best first. A run log of an entry of a
comparison is merged into the entry.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eclip.contest.outcome import Outcome
from eclip.core.made import Made
from eclip.core.measures import bound_of, measure
from eclip.core.mix import Background, parse_mix
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.runlog import RunLog
from eclip.errors import UsageError
from eclip.files.comparison import (
    Comparison,
    Entry,
    SettingTrial,
    Summary,
    background_of,
    latency_curves,
    plan_digest,
    shortfall_of,
    summary_of,
    value_of,
    worst_tail_of,
)
from eclip.files.excess import Excess

Given = RunLog | Plan | Comparison | Outcome
NOT_RUN = "only planned, not run"


class Named(NamedTuple):
    what: Given
    file: str = ""  # that it was read from; empty: not from a file


@dataclass(frozen=True)
class SharingWay:
    """A way of sharing: a policy or a plan, with its results."""

    label: str
    policy: str
    device: str
    modelled: bool
    digest: str  # of its plan: equal for equal plans
    file: str = ""
    contest: str = ""  # the date of its comparison; empty: a run by itself
    plan: Plan | None = None
    log: RunLog | None = None  # of its last run
    together: Summary | None = None  # None: not run
    runs: tuple[Summary, ...] = ()
    setting: str = ""
    trials: tuple[SettingTrial, ...] = ()
    services: tuple[Excess, ...] = ()
    latencies_ms: tuple[tuple[float, ...], ...] = ()
    seed: int | None = None
    warnings: tuple[str, ...] = ()

    def excess(self, worker: str) -> Excess | None:
        return next((one for one in self.services if one.name == worker), None)


@dataclass(frozen=True)
class Chapter:
    """Ways of sharing that compare like with like. Columns are per worker."""

    mix: str
    workers: tuple[str, ...]
    models: tuple[ModelKey, ...]  # as asked for
    topology: str
    load: str
    aim: str  # throughput, energy, tails or slo: by which the best is told
    alone_rps: tuple[float, ...]
    bounds_ms: tuple[float | None, ...]
    weights: tuple[float, ...]  # of background
    floors: tuple[float, ...]
    ways: tuple[SharingWay, ...]  # the best first
    made: tuple[Made, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def ran(self) -> list[SharingWay]:
        return [way for way in self.ways if way.together is not None]

    @property
    def services(self) -> list[int]:
        return [index for index, bound in enumerate(self.bounds_ms) if bound is not None]

    @property
    def plans(self) -> list[Plan]:
        return [way.plan for way in self.ways if way.plan is not None]

    def way(self, policy: str) -> SharingWay | None:
        """The best of that policy."""
        return next((way for way in self.ran if way.policy == policy), None)

    def background(self, score: Summary) -> float:
        return background_of(score, self)

    def worst_tail(self, score: Summary) -> float:
        return worst_tail_of(score, self)

    def keeps_all(self, score: Summary) -> bool:
        """Every bound and floor."""
        return shortfall_of(score, self) <= 1

    def kept(self, score: Summary) -> int:
        """How many services keep their bounds."""
        return sum(
            (p99 := score.p99_ms[index]) is not None and p99 <= (self.bounds_ms[index] or 0.0)
            for index in self.services
        )

    def value(self, score: Summary) -> float:
        return value_of(score, self)


def worst_p99(score: Summary) -> float | None:
    """The slowest worker's p99; none while a worker waits for its first completion."""
    known = [tail for tail in score.p99_ms if tail is not None]
    return max(known) if len(known) == len(score.p99_ms) else None


def chapters_of(given: Iterable[Named]) -> list[Chapter]:
    """In the order in which they were given. Plans come to the first chapter of their mix."""
    groups: dict[tuple[object, ...], list[Chapter]] = {}
    plans: list[Named] = []
    for named in given:
        if isinstance(named.what, Plan):
            plans.append(named)
        else:
            part = _part_of(named)
            key = (_asked(part), part.load, part.ways[0].modelled)
            groups.setdefault(key, []).append(part)
    for named in plans:
        part = _of_plan(named)
        home = next((key for key in groups if key[0] == _asked(part)), (_asked(part),))
        groups.setdefault(home, []).append(part)
    if not groups:
        raise UsageError("a report needs at least one run log, plan or comparison")
    return [_joined(parts) for parts in groups.values()]


def _asked(part: Chapter) -> tuple[object, ...]:
    models = tuple(model.usual for model in part.models)
    return part.workers, models, part.topology, _promised(part.mix)


def _promised(mix: str) -> tuple[object, ...]:
    """The promises to the workers as written in the mix: a relative bound has other ms in every
    run."""
    try:
        workers = parse_mix(mix).workers
    except UsageError:  # it was not made from a text
        return ()
    promises = [worker.bound or worker.background or Background() for worker in workers]
    return tuple(one for one in enumerate(promises) if one[1] != Background())


def _part_of(named: Named) -> Chapter:
    what = named.what
    if isinstance(what, Outcome):
        return _of_comparison(what.comparison, named.file, what)
    if isinstance(what, Comparison):
        return _of_comparison(what, named.file)
    if isinstance(what, RunLog):
        return _of_log(what, named.file)
    raise UsageError(f"a report is drawn of run logs, plans and comparisons, not of {what!r}")


def _of_comparison(one: Comparison, file: str, outcome: Outcome | None = None) -> Chapter:
    workers = len(one.workers)
    plans, logs = (outcome.plans, outcome.logs) if outcome else ({}, {})
    return Chapter(
        mix=one.mix,
        workers=one.workers,
        models=one.models,
        topology=one.topology,
        load=one.load,
        aim=one.aim,
        alone_rps=one.alone_rps,
        bounds_ms=one.bounds_ms or (None,) * workers,
        weights=one.weights or (1.0,) * workers,
        floors=one.floors or (0.0,) * workers,
        ways=tuple(
            _of_entry(one, entry, file, plans.get(entry.policy), logs.get(entry.policy))
            for entry in one.entries
        ),
        made=(Made(date=one.date, eclip=one.eclip, command=one.command),),
        left_out=one.left_out,
        warnings=one.warnings,
    )


def _of_entry(
    one: Comparison, entry: Entry, file: str, plan: Plan | None, log: RunLog | None
) -> SharingWay:
    return SharingWay(
        label=entry.policy,
        policy=entry.policy,
        device=one.device,
        modelled=one.modelled,
        digest=entry.plan,
        file=file,
        contest=one.date,
        plan=plan,
        log=log,
        together=entry.together,
        runs=entry.runs,
        setting=entry.setting,
        trials=entry.trials,
        services=entry.services,
        latencies_ms=entry.latencies_ms,
        seed=one.seed,
    )


def _of_log(log: RunLog, file: str) -> Chapter:
    planned = _of_plan(Named(log.plan, file))
    score = summary_of(measure(log))
    closed = all(offered is None for offered in log.offered)
    way = dataclasses.replace(
        planned.ways[0],
        device=log.device,
        modelled=log.modelled,
        log=log,
        together=score,
        runs=(score,),
        latencies_ms=latency_curves([log]),
        seed=log.seed,
        warnings=log.warnings,
    )
    return dataclasses.replace(
        planned,
        load=log.load,
        aim="slo" if planned.services else "throughput" if closed else "tails",
        alone_rps=log.alone_rps,
        ways=(way,),
        made=(log.made,) if log.made else (),
    )


def _of_plan(named: Named) -> Chapter:
    plan = named.what
    if not isinstance(plan, Plan):
        raise UsageError(f"{named.file} is no plan")
    asked = plan.mix.as_asked()
    bounds = tuple(bound_of(worker) for worker in plan.workers)
    return Chapter(
        mix=asked.name,
        workers=tuple(worker.name for worker in asked.workers),
        models=asked.models,
        topology=plan.topology.name,
        load=NOT_RUN,
        aim="slo" if any(bounds) else "throughput",
        alone_rps=(),
        bounds_ms=bounds,
        weights=tuple(
            0.0 if bound is not None else (worker.background or Background()).weight
            for worker, bound in zip(asked.workers, bounds, strict=True)
        ),
        floors=asked.floors,
        ways=(
            SharingWay(
                label=plan.policy,
                policy=plan.policy,
                device=plan.topology.title,
                modelled=plan.modelled,
                digest=plan_digest(plan),
                file=named.file,
                plan=plan,
            ),
        ),
    )


def _joined(parts: Sequence[Chapter]) -> Chapter:
    """The parts as one chapter. Common facts are taken from the part with the most ways."""
    parts = sorted(parts, key=lambda part: part.load == NOT_RUN)
    first = max(parts, key=lambda part: len(part.ways))
    ways = _labelled(_completed([way for part in parts for way in part.ways]))
    chapter = dataclasses.replace(
        first,
        ways=tuple(ways),
        made=tuple(dict.fromkeys(made for part in parts for made in part.made)),
        left_out=tuple(dict.fromkeys(words for part in parts for words in part.left_out)),
        warnings=tuple(dict.fromkeys([*_differing(ways), *_warned(parts)])),
    )

    def rank(way: SharingWay) -> float:
        return math.inf if way.together is None else -chapter.value(way.together)

    return dataclasses.replace(chapter, ways=tuple(sorted(ways, key=rank)))


def _completed(ways: Sequence[SharingWay]) -> list[SharingWay]:
    """Logs and plans that belong to an entry of a comparison are put into it."""
    full = [way for way in ways if way.log is None and way.plan is None]
    kept = list(full)
    for way in ways:
        if way.log is None and way.plan is None:
            continue
        home = next((index for index, one in enumerate(full) if _is_of(way, one)), None)
        if home is None:
            kept.append(way)
            continue
        known = full[home]
        more = dataclasses.replace(
            known,
            plan=way.plan,
            log=way.log or known.log,
            file=", ".join(dict.fromkeys(file for file in (known.file, way.file) if file)),
            warnings=known.warnings + way.warnings,
        )
        kept[kept.index(known)] = full[home] = more
    return kept


def _is_of(way: SharingWay, entry: SharingWay) -> bool:
    same = (way.policy, way.digest) == (entry.policy, entry.digest)
    return same and (way.log is None or way.device == entry.device)


def _labelled(ways: Sequence[SharingWay]) -> list[SharingWay]:
    """The ways with distinct labels: the policy, and if needed its file, device, or date."""
    named = list(ways)
    tellers: tuple[Callable[[SharingWay], str], ...] = (
        lambda way: f" ({way.file})" if way.file else "",
        lambda way: f" on {way.device}",
        lambda way: f" of {way.contest[:16].replace('T', ' ')}" if way.contest else "",
    )
    for tell in tellers:
        labels = [way.label for way in named]
        told: dict[str, set[str]] = {}
        for way in named:
            told.setdefault(way.label, set()).add(tell(way))
        named = [
            dataclasses.replace(way, label=way.label + tell(way))
            if labels.count(way.label) > 1 and len(told[way.label]) > 1
            else way
            for way in named
        ]
    labels = [way.label for way in named]
    return [
        dataclasses.replace(way, label=f"{way.label}, {labels[: index + 1].count(way.label)}")
        if labels.count(way.label) > 1
        else way
        for index, way in enumerate(named)
    ]


def _differing(ways: Sequence[SharingWay]) -> list[str]:
    """A warning about device, seed or duration, if they differ between the compared runs."""
    ran = [way for way in ways if way.together is not None]
    parts: dict[str, set[object]] = {
        "device": {way.device for way in ran},
        "seed": {way.seed for way in ran},
        "duration": {way.together.seconds for way in ran if way.together is not None},
    }
    differing = [what for what, values in parts.items() if len(values) > 1]
    return [f"the runs differ in {', '.join(differing)}"] if differing else []


def _warned(parts: Sequence[Chapter]) -> list[str]:
    whose: dict[str, list[str]] = {}
    for part in parts:
        for way in part.ways:
            for warning in way.warnings:
                whose.setdefault(warning, []).append(way.policy)
    about = [f"{', '.join(dict.fromkeys(who))}: {warning}" for warning, who in whose.items()]
    return [*(warning for part in parts for warning in part.warnings), *about]
