"""Prints what runs gave: policies, services and workers side by side."""

from __future__ import annotations

from collections.abc import Sequence

from eclip.cli import screen
from eclip.core.display import digits_apart
from eclip.core.measures import Measures

_BEST = {  # by aim
    "throughput": "highest STP",
    "energy": "highest STP·s/kJ",
    "slo": "most background with every bound and floor kept",
    "tails": "shortest p99, geometric mean over the workers",
}
_CLOSEST = "comes closest: no policy keeps every bound and floor"


def kernels_note(measures: Sequence[Measures]) -> list[str]:
    """A sentence for every policy whose workers use kernels chosen for fewer units."""
    notes = []
    for one in measures:
        chosen = [
            f"{worker.name} for {worker.model.kernels_for}"
            for worker in one.workers
            if worker.model.kernels_for
        ]
        if chosen:
            notes.append(f"{one.policy} uses kernels chosen for fewer units: {', '.join(chosen)}.")
    return notes


def print_measures(measures: Sequence[Measures], best: str = "", aim: str = "") -> None:
    """Policies side by side, the best by the aim marked; then every worker under each.

    Switches are per request. Overload is said below, in words.
    """
    print_policies(measures, best, aim)
    _print_workers(measures, screen.modelled_note(any(one.modelled for one in measures)))
    for line in kernels_note(measures):
        screen.out.print(line)
    for line in _overload(measures):
        screen.out.print(line, style="yellow")


def print_policies(measures: Sequence[Measures], best: str, aim: str) -> None:
    """Policies side by side, the best by the aim marked; bounds and background, if there are
    services."""
    note = screen.modelled_note(any(one.modelled for one in measures))
    _print_throughput(measures, best, aim, note)
    # A plan may have been made for services of a mix that has none.
    services = [
        index
        for index in range(len(measures[0].workers))
        if all(one.workers[index].bound_ms is not None for one in measures)
    ]
    if services:
        _print_services(measures, services, note)


def _print_throughput(measures: Sequence[Measures], best: str, aim: str, note: str) -> None:
    plain = next((one for one in measures if one.policy == "shared" and one.stp > 0), None)
    if len(measures) == 1:
        plain, best = None, ""
    against = ["vs shared"] if plain is not None else []
    screen.print_table(
        f"Policies{note}",
        ["policy", "STP", *against, "fairness", "power W", "J/request", "STP·s/kJ", "switches"],
        (
            [
                one.policy + (" *" if one.policy == best else ""),
                f"{one.stp:.3f}",
                *([f"{one.stp / plain.stp - 1:+.1%}"] if plain is not None else []),
                f"{one.fairness:.2f}",
                f"{one.power_w:.0f}",
                screen.number(one.joules_per_request, 4),
                f"{one.efficiency_per_kj:.2f}",
                str(one.switches_per_request),
            ]
            for one in measures
        ),
        optional=("switches", "J/request", "power W"),
    )
    if best:
        taken = next(one for one in measures if one.policy == best)
        kept = all(worker.kept and not worker.starved for worker in taken.workers)
        words = _BEST[aim] if kept or aim != "slo" else _CLOSEST
        screen.out.print(f"* {words}\n")


def _print_workers(measures: Sequence[Measures], note: str) -> None:
    offers = any(worker.offered_rps is not None for one in measures for worker in one.workers)
    rows = []
    for index in range(len(measures[0].workers)):
        before = None
        for one in measures:
            worker = one.workers[index]
            rows.append(
                [
                    worker.name if worker.name != before else "",
                    one.policy,
                    *([screen.number(worker.offered_rps, 1)] if offers else []),
                    f"{worker.rate_rps:.1f}",
                    f"{worker.ratio:.0%}",
                    screen.number(worker.p50_ms, 2),
                    screen.number(worker.p95_ms, 2),
                    screen.number(worker.p99_ms, 2),
                    str(worker.switches_per_request),
                ]
            )
            before = worker.name
    screen.print_table(
        f"Workers{note}",
        [
            *("worker", "policy", *(["offered/s"] if offers else []), "rate/s", "of alone"),
            *("p50 ms", "p95 ms", "p99 ms", "switches"),
        ],
        rows,
        names=2,
        optional=("switches", "p95 ms", "p50 ms"),
    )


def _print_services(measures: Sequence[Measures], services: Sequence[int], note: str) -> None:
    """A table by policy: services' p99 and bounds, background's share, yields and moves."""
    bounds = {index: measures[0].workers[index].bound_ms or 0.0 for index in services}
    digits = {
        index: digits_apart(bound, [one.workers[index].p99_ms for one in measures])
        for index, bound in bounds.items()
    }
    rows = []
    for one in measures:
        others = [worker for worker in one.workers if worker.bound_ms is None]
        row = [one.policy]
        for index in services:
            worker = one.workers[index]
            mark = "kept" if worker.kept else "missed"
            row += [
                screen.number(worker.p50_ms, 2),
                f"{screen.number(worker.p99_ms, digits[index])} {mark}",
            ]
        row += [
            "none" if one.background is None else f"{one.background:.1%}",
            str(sum(worker.yields for worker in others)),
            str(sum(worker.moves for worker in others)),
            f"{max((worker.longest_pause_ms for worker in others), default=0.0):.1f}",
        ]
        rows.append(row)
    tails = [
        (f"{name} p50 ms", f"{name} p99 ms, at most {screen.number(bounds[index], digits[index])}")
        for index, name in ((index, measures[0].workers[index].name) for index in services)
    ]
    screen.print_table(
        f"Services and background{note}",
        [
            *("policy", *(name for pair in tails for name in pair)),
            *("background of alone", "yields", "moves", "longest pause ms"),
        ],
        rows,
        optional=("moves", "yields", *(p50 for p50, _ in tails)),
    )


def _overload(measures: Sequence[Measures]) -> list[str]:
    """Warn about every overloaded worker."""
    lines = []
    for index, first in enumerate(measures[0].workers):
        served: dict[str, list[str]] = {}  # by what was offered
        for one in measures:
            worker = one.workers[index]
            if worker.overloaded:
                under = f" under {one.policy}" if len(measures) > 1 else ""
                offered = f"{worker.offered_rps:.0f}"
                served.setdefault(offered, []).append(f"{worker.rate_rps:.0f}/s{under}")
        lines += [
            f"{first.name}: offered {offered}/s, served {', '.join(rates)}: overloaded, its queue "
            f"grew"
            for offered, rates in served.items()
        ]
    return lines
