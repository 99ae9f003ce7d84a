"""``eclip explain``: shows a plan in words and a small picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from eclip.cli import screen
from eclip.cli.options import FrontierOption, JsonOption
from eclip.core.display import digits_apart
from eclip.core.plan import Assignment, Evidence, Plan, PlannedWorker, Trial, account_warnings
from eclip.files import store
from eclip.planner.search.objective import Score
from eclip.planner.tiers import expected_excess_ns, joints_in_words

_BARS = "▁▂▃▄▅▆▇█"
FRONTIER_ROWS = 5
_WIDTH = 54  # with the words beside it: 80 columns


def explain(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    frontier: FrontierOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show the lanes of every worker of a plan, and the reasons."""
    plan = store.load(file, Plan)
    if as_json:
        screen.print_json(describe(plan))
    else:
        print_plan(plan, frontier)


def describe(plan: Plan) -> dict[str, Any]:
    """The plan as plain data: per worker its groups, times and slices."""
    return {
        "mix": plan.mix.name,
        "policy": plan.policy,
        "topology": plan.topology.name,
        "profiles_modelled": plan.modelled,
        "why": plan.why,
        "expected_excess_ns": expected_excess_ns(plan) if plan.gives_way else None,
        "sharing": plan.sharing,
        "evidence": None if plan.evidence is None else _describe_evidence(plan.evidence),
        "variants": [list(variant.active) for variant in plan.variants],
        "lanes": [
            {
                "owner": lane.owner,
                "units": plan.units(index),
                "slices": str(lane.mask),
                "priority": lane.priority,
            }
            for index, lane in enumerate(plan.lanes)
        ],
        "workers": [
            {
                "name": plan.workers[part.worker].name,
                "model": plan.workers[part.worker].model,
                "why": plan.workers[part.worker].why,
                "promise": plan.workers[part.worker].promise,
                "joints": _describe_joints(plan, part.worker),
                "floor": plan.workers[part.worker].floor,
                "switches": part.switches,
                "predicted_ns": sum(group.predicted_ns for group in part.groups),
                "time_share_by_units": {
                    str(units): share for units, share in sorted(plan.time_by_units(part).items())
                },
                "groups": [
                    {
                        "lane": group.lane,
                        "units": plan.units(group.lane),
                        "kernels": group.kernels,
                        "predicted_ns": group.predicted_ns,
                    }
                    for group in part.groups
                ],
            }
            for part in plan.main.assignments
        ],
    }


def _describe_joints(plan: Plan, index: int) -> dict[str, Any] | None:
    joints = plan.workers[index].joints
    if joints is None:
        return None
    return {**msgspec.to_builtins(joints), "words": joints_in_words(plan, index)}


def _describe_evidence(evidence: Evidence) -> dict[str, Any]:
    """The frontier is always simulated; the trials may have been measured."""
    data: dict[str, Any] = msgspec.to_builtins(evidence)
    modelled = data.pop("modelled")
    return {**data, "frontier_modelled": True, "trials_modelled": modelled}


def print_plan(plan: Plan, frontier: bool = False) -> None:
    """``frontier``: all plans of the frontier, not FRONTIER_ROWS of them."""
    unit = plan.topology.unit_name
    screen.print_facts(
        [
            ("mix", plan.mix.name),
            ("policy", plan.policy),
            ("device", f"{plan.topology.title}, {plan.topology.units} {unit}s"),
            ("why", plan.why),
            *([("data", "made from modelled profiles")] if plan.modelled else []),
        ]
    )
    for part in plan.main.assignments:
        worker = plan.workers[part.worker]
        total_ns = sum(group.predicted_ns for group in part.groups)
        screen.out.print(f"\n{_label(worker)}{_tier(plan, part.worker)}", style="bold")
        screen.out.print(
            f"  {_count(worker.kernels, 'kernel')} in {_count(len(part.groups), 'group')}, "
            f"{total_ns / 1e6:.3f} ms undisturbed; {worker.why}",
        )
        shares = plan.time_by_units(part)
        screen.out.print(
            "  time on "
            + ", ".join(
                f"{units} {unit}s {f'{share:.0%}' if share >= 0.01 else '<1%'}"
                for units, share in sorted(shares.items())
            ),
        )
        screen.out.print(f"  {_sizes_picture(plan, part)}  size over the kernels")
    screen.out.print(f"\n{_slices_picture(plan)}")
    for warning in account_warnings(plan):
        screen.out.print(f"{warning[0].upper()}{warning[1:]}.")
    if len(plan.variants) > 1:
        screen.out.print(
            f"\n{len(plan.variants) - 1} more variants for when some workers are idle; alone, a "
            f"worker has all {plan.topology.units} {unit}s."
        )
    if plan.evidence is not None:
        _print_evidence(plan, plan.evidence, frontier)


def _print_evidence(plan: Plan, evidence: Evidence, frontier: bool) -> None:
    """What was tried, what was refused and why, and the frontier that the plan was chosen from."""
    rows = [_tried(plan, evidence, trial) for trial in evidence.trials]
    screen.out.print()
    screen.print_table(
        f"Tried on {evidence.device}{screen.modelled_note(evidence.modelled)}",
        [*rows[0]],
        ([*row.values()] for row in rows),
        optional=("power W", "fairness"),
    )
    for trial in evidence.trials:
        if trial.refused and not trial.chosen:
            screen.out.print(f"Refused: {trial.label}: {'; '.join(trial.refused)}.")
    for words in evidence.missed:
        screen.out.print(f"Not kept: {words}.")
    chosen = next(trial for trial in evidence.trials if trial.chosen)
    if evidence.objective != "slo":
        screen.out.print(_frontier_picture(evidence, chosen))
    else:
        if chosen.services:
            _print_excess(chosen)
        _print_tradeoffs(evidence, len(evidence.tradeoffs) if frontier else FRONTIER_ROWS)
    screen.out.print(
        f"To repeat the search: --objective {evidence.objective} --seed {evidence.seed} "
        f"--batches {evidence.batches}"
    )


def _tried(plan: Plan, evidence: Evidence, trial: Trial) -> dict[str, str]:
    """A trial by column: tails and background for services, throughput and energy otherwise."""
    names = [worker.name for worker in plan.workers]
    row = {"plan": ("→ " if trial.chosen else "  ") + trial.label}
    if evidence.objective != "slo":
        score = _score(trial)
        row |= {"STP": f"{score.stp:.3f}", "fairness": f"{score.fairness:.2f}"}
        row |= {"power W": f"{trial.power_w:.0f}", "STP·s/kJ": f"{score.efficiency:.2f}"}
        ratios = zip(names, trial.ratios, strict=True)
        return row | {f"{name} of alone": f"{ratio:.0%}" for name, ratio in ratios}
    parts = list(zip(names, evidence.bounds_ms, trial.p99_ms, trial.ratios, strict=True))
    for index, (name, bound, p99, _) in enumerate(parts):
        if bound is not None:
            digits = digits_apart(bound, [one.p99_ms[index] for one in evidence.trials])
            row[f"{name} p99 ms (at most {bound:.{digits}f})"] = screen.number(p99, digits)
    return row | {
        f"{name} of alone": f"{ratio:.1%}" for name, bound, _, ratio in parts if bound is None
    }


def _print_excess(trial: Trial) -> None:
    """The services of the chosen plan against the same requests alone."""
    screen.print_table(
        "Services beside the others, against the same requests alone",
        [
            *("service", "requests", "p50 ms", "p99 ms", "longest ms", "excess p50 ms"),
            *("excess p99 ms", "longest excess ms", "p99 over alone", "95% interval"),
        ],
        (
            [
                one.name,
                str(one.requests),
                *(f"{value:.2f}" for value in (one.p50_ms, one.p99_ms, one.longest_ms)),
                *(
                    f"{value:.3f}"
                    for value in (one.excess_p50_ms, one.excess_p99_ms, one.excess_longest_ms)
                ),
                f"{one.p99_ratio:.2f}x",
                f"{one.p99_ratio_low:.2f}-{one.p99_ratio_high:.2f}",
            ]
            for one in trial.services
        ),
        optional=("longest ms", "excess p50 ms", "requests"),
    )


def _print_tradeoffs(evidence: Evidence, rows: int) -> None:
    """The frontier, simulated: the most background first, and plain streams beside it. Of a long
    one ``rows`` are shown, from end to end."""
    shown = evidence.tradeoffs
    if len(shown) > rows:
        last = len(shown) - 1
        shown = tuple(shown[round(row * last / (rows - 1))] for row in range(rows))
    screen.print_table(
        f"Background against tails: the frontier of {evidence.evaluated} simulated plans",
        ["what background does", "background of alone", "worst p99 over its bound"],
        ([one.label, f"{one.background:.1%}", screen.number(one.worst_tail, 2)] for one in shown),
    )
    if len(shown) < len(evidence.tradeoffs):
        screen.out.print(
            f"{len(shown)} of {len(evidence.tradeoffs)} plans; all: eclip explain PLAN --frontier"
        )


def _tier(plan: Plan, index: int) -> str:
    """``, a service: p99 at most 3.36 ms`` or ``, background, at least 20% of its rate alone``"""
    worker, asked = plan.workers[index], plan.mix.workers[index]
    if worker.promise is not None:
        relative = asked.bound is not None and asked.bound.times_alone is not None
        wanted = f", {asked.bound} of its p99 alone" if relative else ""
        bound = f", a service: p99 at most {worker.promise.bound_ns / 1e6:.2f} ms{wanted}"
        gain = worker.promise.gain
        return bound + (f", late requests paid by {gain:.2%} of those in time" if gain else "")
    if not plan.mix.services and not worker.floor:
        return ""
    floor = f", at least {worker.floor:.0%} of its rate alone" if worker.floor else ""
    weight = asked.background.weight if asked.background else 1.0
    return f", background{floor}" + (f", weight {weight:g}" if weight != 1 else "")


def _score(trial: Trial) -> Score:
    return Score(trial.ratios, trial.power_w, ())


def _frontier_picture(evidence: Evidence, chosen: Trial) -> str:
    """A chart of the simulated frontier: throughput (across) against efficiency (up)."""
    points = sorted(evidence.frontier)
    deployed = (_score(chosen).stp, _score(chosen).efficiency)
    across = [point[0] for point in (*points, deployed)]
    up = [point[1] for point in (*points, deployed)]
    width, height = 48, 8
    rows = [[" "] * width for _ in range(height)]

    def mark(point: tuple[float, float], sign: str) -> None:
        column = round((point[0] - min(across)) / (max(across) - min(across) or 1) * (width - 1))
        row = round((point[1] - min(up)) / (max(up) - min(up) or 1) * (height - 1))
        rows[height - 1 - row][column] = sign

    for point in points:
        mark(point, "·")
    mark(deployed, "◆")
    lines = [f"{max(up):7.2f} ┤{''.join(rows[0])}"]
    lines += [f"{'':7} │{''.join(row)}" for row in rows[1:-1]]
    lines += [f"{min(up):7.2f} ┤{''.join(rows[-1])}", f"{'':7} └{'─' * width}"]
    lines.append(f"{'':8}{min(across):<{width // 2}.3f}{max(across):>{width // 2}.3f}  STP")
    lines.append(
        f"STP·s/kJ of {evidence.evaluated} simulated plans: · frontier, ◆ the chosen plan as tried"
    )
    return "\n".join(lines)


def _label(worker: PlannedWorker) -> str:
    return screen.worker_label(worker.name, worker.model)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _sizes_picture(plan: Plan, part: Assignment) -> str:
    """One bar per column of the kernel sequence, as high as its lane is large."""
    sizes = [plan.units(group.lane) for group in part.groups for _ in range(group.kernels)]
    width = min(_WIDTH, len(sizes))
    columns = [sizes[column * len(sizes) // width] for column in range(width)]
    return "".join(_BARS[round(size / plan.topology.units * (len(_BARS) - 1))] for size in columns)


def _slices_picture(plan: Plan) -> str:
    """Per worker and slice, for how much of its request the worker's lane includes the slice."""
    name_width = max(len("slice"), *(len(_label(worker)) for worker in plan.workers))
    slices = len(plan.topology.slice_units)
    lines = [f"{'slice':{name_width}}  {''.join(str(index % 10) for index in range(slices))}"]
    for part in plan.main.assignments:
        total = sum(group.predicted_ns for group in part.groups) or 1
        row = ""
        for index in range(slices):
            inside = sum(
                group.predicted_ns for group in part.groups if index in plan.lanes[group.lane].mask
            )
            row += "·" if inside == 0 else _BARS[round(inside / total * (len(_BARS) - 1))]
        lines.append(f"{_label(plan.workers[part.worker]):{name_width}}  {row}")
    lines.append("(from ▁ to █: the more of its request the worker may use the slice; · never)")
    return "\n".join(lines)
