"""The report: one HTML file that needs nothing else, from run logs that compare like with like.

Everything is in the file: styles, script, Plotly, data. What is modelled says so next to itself.
Text from the logs is untrusted: the template escapes it, and the data block has no ``<`` in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import markupsafe
import msgspec

from eclip.artefacts import measures
from eclip.artefacts.model_key import ModelKey
from eclip.artefacts.plan import Plan, Processes, Turns
from eclip.artefacts.profile import Profile
from eclip.artefacts.runlog import RunLog
from eclip.errors import ArtefactError, MismatchError, UsageError
from eclip.reports import compare, lanes, tables
from eclip.reports.labels import (
    count,
    duration,
    kernel_names,
    modelled_words,
    run_labels,
    units_title,
    worker_colour,
)


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A figure with its words; without a figure the caption says why there is none."""

    title: str
    caption: str
    modelled: str  # what to say about modelled data, empty when all of it is measured
    figure: compare.Figure | None
    scrolls: bool = False


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """What the page shows of one run when its tab is chosen."""

    label: str
    plan: Plan
    notes: tuple[str, ...]
    charts: tuple[Chart, ...]


def render(logs: Sequence[RunLog], profiles: Mapping[ModelKey, Profile]) -> str:
    """The HTML text. ``profiles`` are looked up by ``model:batch``; one may be missing."""
    _check_alike(logs)
    plan = logs[0].plan
    labels = run_labels(logs)
    all_measures = [measures.measure(log) for log in logs]
    modelled = modelled_words(labels, [log.modelled for log in logs])
    usable, refused = _usable_profiles([log.plan for log in logs], profiles)
    return template().render(
        plan=plan,
        labels=labels,
        facts=_facts(logs),
        modelled=modelled,
        warnings=_warnings(labels, logs),
        workers=[
            (worker.name, ", ".join(_models(logs, index)), worker_colour(index))
            for index, worker in enumerate(plan.workers)
        ],
        summary=tables.summary(labels, all_measures),
        per_worker=tables.per_worker(labels, logs, all_measures),
        comparison=_comparison(labels, all_measures, modelled),
        panels=[_panel(label, log) for label, log in zip(labels, logs, strict=True)],
        heat_maps=[
            _heat_map(model, plan, usable, refused)
            for model in sorted({model for log in logs for model in log.plan.models})
        ],
        names={str(model): kernel_names(profile.trace) for model, profile in usable.items()},
        plotly_script=plotly_script(),
    )


def _check_alike(logs: Sequence[RunLog]) -> None:
    if not logs:
        raise UsageError("a report needs at least one run log")
    first = logs[0].plan
    for log in logs[1:]:
        if _asked(log.plan) != _asked(first):
            raise UsageError(
                f"the run logs are of different mixes, {first.mix.name!r} and "
                f"{log.plan.mix.name!r}; make one report for each"
            )
        if log.plan.topology.fingerprint != first.topology.fingerprint:
            raise UsageError(
                f"the run logs are of different topologies, {first.topology.title} and "
                f"{log.plan.topology.title}; make one report for each"
            )


def _asked(plan: Plan) -> list[tuple[str, ModelKey, float | None]]:
    """What was asked of it; a search may have chosen other kernels for that."""
    return [(worker.name, worker.model.usual, worker.rate_rps) for worker in plan.mix.workers]


def _models(logs: Sequence[RunLog], worker: int) -> list[str]:
    """A worker's models in the runs: the same, with other kernels where a search chose them."""
    return list(dict.fromkeys(str(log.plan.models[worker]) for log in logs))


def _usable_profiles(
    plans: Sequence[Plan], profiles: Mapping[ModelKey, Profile]
) -> tuple[dict[ModelKey, Profile], dict[ModelKey, str]]:
    """The profiles of the mix's models that belong to these plans, and why others do not."""
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


def _facts(logs: Sequence[RunLog]) -> list[tuple[str, str]]:
    topology = logs[0].plan.topology

    def distinct(values: Sequence[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    slices = count(len(topology.slice_units), "slice")
    return [
        ("workers", str(len(logs[0].plan.workers))),
        ("topology", topology.title),
        ("units", f"{units_title(logs[0].plan, topology.units)} in {slices}"),
        ("device", distinct([log.device for log in logs])),
        ("duration", distinct([duration(log.duration_ns) for log in logs])),
        ("load", distinct([log.load for log in logs])),
        ("seed", distinct([str(log.seed) for log in logs])),
    ]


def _warnings(labels: Sequence[str], logs: Sequence[RunLog]) -> list[tuple[str, str]]:
    """Each warning once, with the runs it is about; first those about the comparison itself."""
    found: dict[str, list[str]] = {}
    for label, log in zip(labels, logs, strict=True):
        for warning in dict.fromkeys(log.warnings):
            found.setdefault(warning, []).append(label)
    first = logs[0]
    differing = [
        what
        for what, differs in (
            ("device", any(log.device != first.device for log in logs)),
            ("duration", any(log.duration_ns != first.duration_ns for log in logs)),
            ("load", any(log.load != first.load for log in logs)),
            ("seed", any(log.seed != first.seed for log in logs)),
        )
        if differs
    ]
    about = [("all runs", f"they differ in {', '.join(differing)}")] if differing else []
    return about + [(", ".join(whose), warning) for warning, whose in found.items()]


def _comparison(
    labels: Sequence[str], all_measures: Sequence[measures.Measures], modelled: str
) -> dict[str, Chart]:
    latency = compare.latency(labels, all_measures)
    return {
        "throughput": Chart(
            title="Throughput",
            caption="Each worker's rate in the mix over its rate alone, stacked to the STP.",
            modelled=modelled,
            figure=compare.throughput(labels, all_measures),
        ),
        "fairness": Chart(
            title="Fairness",
            caption="1 means that sharing slows every worker by the same factor.",
            modelled=modelled,
            figure=compare.fairness(labels, all_measures),
        ),
        "energy": Chart(
            title="Energy per request",
            caption="The run's energy over all completed requests; less is better.",
            modelled=modelled,
            figure=compare.energy(labels, all_measures),
        ),
        "latency": Chart(
            title="Latency of each worker",
            caption="Circle p50, diamond p95, dash p99, from arrival to completion."
            if latency
            else "No request completed, so there is no latency to show.",
            modelled=modelled,
            figure=latency,
        ),
    }


def _panel(label: str, log: RunLog) -> Panel:
    plan = log.plan
    notes = [plan.why] if plan.why else []
    if isinstance(plan.sharing, Turns):
        notes.append("The workers take turns of the whole device.")
    if isinstance(plan.sharing, Processes):
        notes.append(f"A process for every worker, under MPS with {plan.sharing.label}.")
    if plan.aliased:
        notes.append(
            f"The plan has {count(len(plan.lanes), 'lane')} for "
            f"{count(plan.topology.hardware_queues, 'hardware queue')}: some lanes wait on "
            f"each other for no reason."
        )
    if len(plan.variants) > 1:
        others = count(len(plan.variants) - 1, "further variant")
        notes.append(f"Drawn is the variant for all workers active; the plan has {others}.")
    return Panel(
        label=label, plan=plan, notes=tuple(notes), charts=(_plan_chart(plan), *_run_charts(log))
    )


def _plan_chart(plan: Plan) -> Chart:
    return Chart(
        title="Plan",
        caption="Units of the lane each kernel takes, over the request's kernels. Shading changes "
        "where a group ends; point at a group for its lane and predicted time.",
        modelled="modelled: the plan was made from modelled profiles" if plan.modelled else "",
        figure=lanes.plan_drawing(plan),
        scrolls=len(plan.workers) > 8,
    )


def _run_charts(log: RunLog) -> tuple[Chart, Chart]:
    modelled = "modelled" if log.modelled else ""
    window = duration(log.kernels.window_ns)
    whose = "a run of their own after the measured one" if log.kernels.own_run else "the run"
    records = len(log.kernels.worker)
    line, map_ = "Timeline of the lanes", "Occupancy of the slices"
    if not records or log.kernels.window_ns < 1:
        why = f"No kernel was recorded in this run's trace window of {window}."
        return (
            Chart(title=line, caption=why, modelled=modelled, figure=None),
            Chart(title=map_, caption=why, modelled=modelled, figure=None),
        )
    figure, drawn = lanes.timeline(log)
    caption = f"The {count(records, 'kernel')} of the first {window} of {whose}, on their lanes."
    if drawn < records:
        caption = (
            f"The first {drawn:,} of {count(records, 'kernel')} recorded in the first {window} "
            f"of {whose}, on their lanes; the later ones are left out."
        )
    return (
        Chart(
            title=line,
            caption=f"{caption} Drag to zoom, double-click to go back.",
            modelled=modelled,
            figure=figure,
            scrolls=True,
        ),
        Chart(
            title=map_,
            caption=f"Kernels at once on each slice over the first {window}, averaged over each "
            f"column's time. A kernel counts on every slice of its lane's mask. Kernels still "
            f"running when the window closed were not recorded, so its end may look idle.",
            modelled=modelled,
            figure=lanes.occupancy(log),
        ),
    )


def _heat_map(
    model: ModelKey,
    plan: Plan,
    usable: Mapping[ModelKey, Profile],
    refused: Mapping[ModelKey, str],
) -> Chart:
    if model not in usable:
        reason = refused.get(model, f"The profile of {model} was not given to this report.")
        return Chart(title=str(model), caption=f"No heat map: {reason}", modelled="", figure=None)
    profile = usable[model]
    return Chart(
        title=str(model),
        caption=f"Busy time of each kernel on a lane of each size, relative to the whole device. "
        f"Source: {profile.source}",
        modelled="modelled" if profile.modelled else "",
        figure=compare.heat_map(profile, plan.topology.unit_name),
    )


def template(name: str = "template.html") -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("eclip.reports", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_json"] = _script_json
    return environment.get_template(name)


def _script_json(value: Any) -> markupsafe.Markup:
    """JSON for a script element. No ``<`` at all: neither ``</script`` nor ``<!--`` can end it."""
    return markupsafe.Markup(msgspec.json.encode(value).decode().replace("<", "\\u003c"))


def plotly_script() -> markupsafe.Markup:
    # Importing Plotly is heavy: only a render pays for it.
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ArtefactError(
            f"the report cannot be drawn: the package {error.name} is missing; pip install plotly"
        ) from None
    return markupsafe.Markup(get_plotlyjs())
