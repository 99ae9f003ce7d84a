"""Comparison: one mix under several policies, run in turns, as kept in a results file.

A results file holds a comparison a line (see store.py). Tables are drawn from comparisons alone, so
that a table can be drawn again years later: from the scores of every run, their summaries, the
settings that were tried, and the command and versions. Columns of a score are per worker, in the
mix's order.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from eclip.core.display import html_table, number
from eclip.core.measures import LEVELS, Measures, floor_over_served, latencies_ms, quantiles
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan, Tradeoff
from eclip.core.runlog import RunLog
from eclip.files.excess import Excess

_DIGITS = 5  # significant ones; no run is that exact, and files are to be read and compared

Number = TypeVar("Number", float, "float | None")


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measures of one run, or of several runs of one policy together."""

    seconds: float
    stp: float
    fairness: float
    power_w: float
    efficiency_per_kj: float
    joules_per_request: float | None  # None: no request completed
    requests: tuple[int, ...]
    rate_rps: tuple[float, ...]
    p50_ms: tuple[float | None, ...]
    p99_ms: tuple[float | None, ...]
    offered_rps: tuple[float | None, ...]  # None: closed loop
    yields: tuple[int, ...] = ()  # at joints; empty: not known
    moves: tuple[int, ...] = ()


class SettingTrial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting of a swept policy and the scores of its short run."""

    setting: str
    stp: float
    fairness: float
    efficiency_per_kj: float
    background: float | None = None  # beside services: weighted mean ratio of the others
    worst_tail: float | None = None  # ... and the largest p99 of a service over its bound


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str
    setting: str  # the best in its trials; empty for policies without settings
    plan: str  # the plan's digest: equal for equal plans
    switches: tuple[int, ...]  # per worker and request
    runs: tuple[Summary, ...]  # in the order of the repeats
    together: Summary
    trials: tuple[SettingTrial, ...] = ()
    services: tuple[Excess, ...] = ()  # against the same requests alone, over all runs
    # Per worker: latencies over all runs at measures.LEVELS; () where no request completed.
    latencies_ms: tuple[tuple[float, ...], ...] = ()


class Comparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mix under several policies, as kept in a results file. A notebook shows it as a table."""

    mix: str  # as the user wrote it
    workers: tuple[str, ...]
    models: tuple[ModelKey, ...]
    topology: str
    device: str
    driver: str | None  # None: a simulator
    modelled: bool
    date: str  # ISO 8601, UTC
    command: str
    eclip: str  # its version
    load: str
    load_part: float | None  # Poisson at this part of the rates under shared; None: the mix's load
    seed: int
    repeats: int  # asked for; an entry that was interrupted has fewer runs
    objective: str  # of the choice between settings of swept policies
    alone_rps: tuple[float, ...]
    entries: tuple[Entry, ...]
    left_out: tuple[str, ...] = ()  # policies and why
    bounds_ms: tuple[float | None, ...] = ()  # per worker: on its p99; empty: no bounds
    weights: tuple[float, ...] = ()  # per worker, of background; 0: a service
    floors: tuple[float, ...] = ()  # per worker: least part of its rate alone; empty: no floors
    missed: tuple[str, ...] = ()  # by policy: sentences about overload and missed bounds or floors
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        workers = len(self.workers)
        if not workers or {len(self.models), len(self.alone_rps)} != {workers}:
            raise ValueError("workers, models and alone_rps need one entry each for every worker")
        if not all(0 < rate < math.inf for rate in self.alone_rps):
            raise ValueError("every alone_rps must be a finite number above 0")
        for name in ("bounds_ms", "weights", "floors"):
            if len(getattr(self, name)) not in (0, workers):
                raise ValueError(f"{name} needs {workers} entries, or none")
        if not all(bound is None or 0 < bound < math.inf for bound in self.bounds_ms):
            raise ValueError("every bound must be a finite number above 0")
        if not all(0 <= value < math.inf for value in (*self.weights, *self.floors)):
            raise ValueError("weights and floors must be finite numbers of at least 0")
        names = [entry.policy for entry in self.entries]
        if not names or len(set(names)) != len(names):
            raise ValueError("a comparison needs entries, one for each policy")
        for entry in self.entries:
            if not 1 <= len(entry.runs) <= self.repeats:
                raise ValueError(
                    f"{entry.policy} has {len(entry.runs)} runs of {self.repeats} repeats"
                )
            for score in (*entry.runs, entry.together):
                columns = (
                    score.requests,
                    score.rate_rps,
                    score.p50_ms,
                    score.p99_ms,
                    score.offered_rps,
                )
                if {len(column) for column in columns} != {workers}:
                    raise ValueError(f"a score of {entry.policy} is not for {workers} workers")
                if min(score.requests) < 0 or not 0 < score.seconds < math.inf:
                    raise ValueError(f"a score of {entry.policy} needs requests and a time")
            if len(entry.switches) != workers:
                raise ValueError(f"{entry.policy} needs the switches of {workers} workers")
            curves = [len(curve) for curve in entry.latencies_ms]
            if len(curves) not in (0, workers) or not {*curves} <= {0, len(LEVELS)}:
                raise ValueError(
                    f"{entry.policy} needs {len(LEVELS)} latencies, or none, of {workers} workers"
                )

    def __repr__(self) -> str:
        stps = shortly([f"{entry.policy} {entry.together.stp:.3f}" for entry in self.entries])
        return f"Comparison({self.mix} on {self.device}: STP {stps})"

    def _repr_html_(self) -> str:
        note = " (modelled)" if self.modelled else ""
        return html_table(
            f"{self.mix} on {self.device}, {self.load}{note}",
            ["policy", "STP", "vs shared", "fairness", "power W", "STP·s/kJ", "worst p99 ms"],
            (
                [
                    entry.policy,
                    number(entry.together.stp, 3),
                    "" if gain is None else f"{gain:+.1%}",
                    number(entry.together.fairness),
                    number(entry.together.power_w, 0),
                    number(entry.together.efficiency_per_kj),
                    number(max((p99 for p99 in entry.together.p99_ms if p99), default=None)),
                ]
                for entry in self.entries
                for gain in (self.gain(entry),)
            ),
        )

    def gain(self, entry: Entry) -> float | None:
        """The entry's STP over that of shared, less 1; None where shared did not run or serve."""
        plain = self.entry("shared")
        if plain is None or plain.together.stp == 0:
            return None
        return entry.together.stp / plain.together.stp - 1

    @property
    def aim(self) -> str:
        """By which the best is told: the first objective, or tails."""
        first = self.objective.split(",")[0]
        return "tails" if self.load_part is not None or first == "latency" else first

    def entry(self, policy: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.policy == policy), None)


def shortly(parts: Sequence[str], most: int = 7) -> str:
    """The first of them, on one line."""
    more = f", and {len(parts) - most} more" if len(parts) > most else ""
    return ", ".join(parts[:most]) + more


class Terms(Protocol):
    """By which the best is told. Columns are per worker."""

    @property
    def aim(self) -> str: ...  # throughput, energy, tails or slo
    @property
    def alone_rps(self) -> Sequence[float]: ...
    @property
    def bounds_ms(self) -> Sequence[float | None]: ...
    @property
    def weights(self) -> Sequence[float]: ...
    @property
    def floors(self) -> Sequence[float]: ...  # empty: no floors


def background_of(score: Summary, terms: Terms) -> float:
    """The weighted mean ratio of workers without a bound: an axis of the frontier of policies."""
    parts = zip(score.rate_rps, terms.alone_rps, terms.weights, strict=True)
    total = sum(terms.weights)
    return sum(weight * rate / alone for rate, alone, weight in parts) / total if total else 0.0


def worst_tail_of(score: Summary, terms: Terms) -> float:
    """The largest p99 of a service over its bound: the other axis of the frontier."""
    pairs = zip(score.p99_ms, terms.bounds_ms, strict=True)
    over = [math.inf if p99 is None else p99 / bound for p99, bound in pairs if bound is not None]
    return max(over, default=0.0)


def floors_over_served(score: Summary, terms: Terms) -> list[float]:
    """The promised over the served rate of every worker; empty without floors."""
    columns = zip(terms.floors, score.requests, terms.alone_rps, score.offered_rps, strict=False)
    return [
        floor_over_served(floor, requests, alone, score.seconds, offered)
        for floor, requests, alone, offered in columns
    ]


def shortfall_of(score: Summary, terms: Terms) -> float:
    """The largest p99 over its bound, or floor over served rate; up to 1 all are kept."""
    return max(worst_tail_of(score, terms), *floors_over_served(score, terms), 0.0)


def value_of(score: Summary, terms: Terms) -> float:
    """A score by the aim, the larger the better: throughput, efficiency, background if every bound
    and floor is kept, or the inverse of the geometric mean of the workers' p99."""
    if terms.aim == "slo":
        short = shortfall_of(score, terms)
        return background_of(score, terms) if short <= 1 else -short
    if terms.aim == "energy":
        return score.efficiency_per_kj
    if terms.aim == "throughput":
        return score.stp
    tails = [math.inf if p99 is None else p99 for p99 in score.p99_ms]
    return 1 / statistics.geometric_mean(tails)


def best_policy(comparison: Comparison) -> str:
    return max(comparison.entries, key=lambda one: value_of(one.together, comparison)).policy


def summary_of(measures: Measures) -> Summary:
    return Summary(
        seconds=measures.seconds,
        stp=_rounded(measures.stp),
        fairness=_rounded(measures.fairness),
        power_w=_rounded(measures.power_w),
        efficiency_per_kj=_rounded(measures.efficiency_per_kj),
        joules_per_request=_rounded(measures.joules_per_request),
        requests=tuple(worker.requests for worker in measures.workers),
        rate_rps=tuple(_rounded(worker.rate_rps) for worker in measures.workers),
        p50_ms=tuple(_rounded(worker.p50_ms) for worker in measures.workers),
        p99_ms=tuple(_rounded(worker.p99_ms) for worker in measures.workers),
        offered_rps=tuple(_rounded(worker.offered_rps) for worker in measures.workers),
        yields=tuple(worker.yields for worker in measures.workers),
        moves=tuple(worker.moves for worker in measures.workers),
    )


def trial_of(
    setting: str,
    stp: float,
    fairness: float,
    efficiency_per_kj: float,
    tradeoff: Tradeoff | None = None,
) -> SettingTrial:
    """``tradeoff``: of a mix with services."""
    return SettingTrial(
        setting=setting,
        stp=_rounded(stp),
        fairness=_rounded(fairness),
        efficiency_per_kj=_rounded(efficiency_per_kj),
        background=tradeoff.background if tradeoff else None,
        worst_tail=tradeoff.worst_tail if tradeoff else None,
    )


def latency_curves(logs: Sequence[RunLog]) -> tuple[tuple[float, ...], ...]:
    """Latencies at LEVELS of every worker, over all runs."""
    return tuple(
        tuple(_rounded(value) for value in quantiles(latencies_ms(logs, worker)))
        for worker in logs[0].plan.everyone
    )


def plan_digest(plan: Plan) -> str:
    """A digest of a plan's effect on the device; its policy and evidence do not count."""
    parts = (
        [(lane.owner, str(lane.mask), lane.priority) for lane in plan.lanes],
        [
            (variant.active, [[(g.lane, g.kernels) for g in p.groups] for p in variant.assignments])
            for variant in plan.variants
        ],
        plan.sharing,
        plan.fingerprint.traces,
        *((one.joints, one.promise, one.floor) for one in plan.workers if plan.gives_way),
    )
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:12]


def _rounded(value: Number) -> Number:
    return None if value is None else float(f"{value:.{_DIGITS}g}")
