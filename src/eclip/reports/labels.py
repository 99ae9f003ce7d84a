"""Words, numbers and colours of the report: how a lane, a time or a worker is shown to a person.

A worker has one colour everywhere. Text from files goes into charts through ``plain`` only, because
Plotly reads a subset of HTML in its labels; into the page it goes through the template's escaping.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from eclip.artefacts.plan import ALL_WORKERS, Plan
from eclip.artefacts.runlog import RunLog
from eclip.artefacts.trace import Trace

ABSENT = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
INK = "#1f2933"
GRID = "#e4e7eb"
NEUTRAL = "#52606d"  # bars that belong to no worker

# Okabe and Ito's colours, which stay apart for colour-blind readers, with grey for their yellow and
# black: one is too faint on white, the other is the text's. From the eighth worker on the same
# colours return darker or lighter.
_HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7a7a7a")
_TONES = (0.0, -0.4, 0.45, -0.65, 0.68)  # towards black below 0, towards white above
_MAX_KERNEL_NAME = 90  # a hover box as wide as the page hides what it explains


def worker_colour(worker: int, alpha: float = 1.0) -> str:
    hue = _HUES[worker % len(_HUES)]
    tone = _TONES[worker // len(_HUES) % len(_TONES)]
    goal = 255 if tone > 0 else 0
    channels = [int(hue[at : at + 2], 16) for at in (1, 3, 5)]
    red, green, blue = (round(value + (goal - value) * abs(tone)) for value in channels)
    return f"rgba({red},{green},{blue},{alpha:g})"


def plain(text: str) -> str:
    """Text that Plotly shows as it is written."""
    return html.escape(text, quote=False)


def number(value: float | None) -> str:
    """About three significant digits, never an exponent for what fits in a table."""
    if value is None:
        return ABSENT
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.1 else f"{value:#.2g}"


def duration(time_ns: float) -> str:
    for scale, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(time_ns) >= scale:
            return f"{number(time_ns / scale)} {unit}"
    return f"{time_ns:g} ns"


def units_title(plan: Plan, units: int) -> str:
    return f"{units} {plan.topology.unit_name}{'' if units == 1 else 's'}"


def count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def lane_title(plan: Plan, lane: int) -> str:
    part = plan.lanes[lane]
    whose = " of all workers" if part.owner == ALL_WORKERS else ""
    slices = "slice" if len(part.mask) == 1 else "slices"
    return f"lane {lane}{whose}: {units_title(plan, plan.units(lane))}, {slices} {part.mask}"


def kernel_names(trace: Trace) -> list[str]:
    """Short names for charts, ready for Plotly."""
    return [
        plain(name if len(name) <= _MAX_KERNEL_NAME else name[: _MAX_KERNEL_NAME - 1] + "…")
        for name in (kernel.name for kernel in trace.kernels)
    ]


def run_labels(logs: Sequence[RunLog]) -> list[str]:
    """One label per run: the policy, and what tells two runs of one policy apart."""
    labels = [log.plan.policy for log in logs]
    if len(set(labels)) < len(labels):
        labels = [
            f"{label} on {log.device}" if labels.count(label) > 1 else label
            for label, log in zip(labels, logs, strict=True)
        ]
    return [
        label if labels.count(label) == 1 else f"{label} ({labels[: index + 1].count(label)})"
        for index, label in enumerate(labels)
    ]


def modelled_words(labels: Sequence[str], modelled: Sequence[bool]) -> str:
    """What a caption says about runs of which some, all or none are modelled."""
    if all(modelled):
        return "modelled"
    some = [label for label, is_modelled in zip(labels, modelled, strict=True) if is_modelled]
    return f"partly modelled: {', '.join(some)}" if some else ""
