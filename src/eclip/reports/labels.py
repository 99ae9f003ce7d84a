"""Words, numbers and colours of the report: how a lane, a time or a worker is shown to a person.

A worker has one colour in a chapter, everywhere: the CSS variable ``--w0`` is the first one's.
"""

from __future__ import annotations

from eclip.core.plan import ALL_WORKERS, Plan

ABSENT = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"

# Okabe and Ito's colours, which stay apart for colour-blind readers, with grey for their yellow and
# black: one is too faint on white, the other is the text's. From the eighth worker on the same
# colours return darker or lighter.
_HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7a7a7a")
_TONES = (0.0, -0.4, 0.45, -0.65, 0.68)  # towards black below 0, towards white above
_DARK_TONES = (0.25, -0.15, 0.6, -0.4, 0.8)  # on a dark page

# What a stranger is told of every policy.
_POLICIES = {
    "shared": "the hardware shares as kernels come",
    "priority": "plain streams with priorities",
    "priority-segments": "stream priorities, launched in parts",
    "timeslice": "one model at a time, in turns",
    "mps": "processes under MPS with equal shares",
    "mps-model": "processes under MPS, shares by model",
    "model": "each model on the units that it needs",
    "masks": "fixed parts of the device, the best of those tried",
    "kernel": "each kernel on the units that it needs",
    "eclip": "kernel groups on lanes, as in the paper",
    "search": "a plan found by search",
    "yield": "background stops between kernels for services",
    "move": "background moves aside for services",
    "launches-16-8": "at most 16 background launches in flight",
    "launches-4-2": "at most 4 background launches in flight",
    "launches-1-1": "one background launch in flight",
}
_BASELINES = ("shared", "priority", "timeslice", "mps", "model", "masks", "kernel", "launches")


def policy_words(policy: str) -> str:
    """The policy in words; empty for a plan with a user's own name."""
    return _POLICIES.get(policy.removesuffix("-energy"), "")


def is_baseline(policy: str) -> bool:
    """True for ways of sharing without eclip; a user's own plan is no baseline."""
    return policy in _POLICIES and policy.partition("-")[0] in _BASELINES


def worker_colour(worker: int, *, dark: bool = False) -> str:
    hue = _HUES[worker % len(_HUES)]
    tones = _DARK_TONES if dark else _TONES
    tone = tones[worker // len(_HUES) % len(tones)]
    goal = 255 if tone > 0 else 0
    channels = [int(hue[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(value + (goal - value) * abs(tone)):02x}" for value in channels)


def palette(workers: int, *, dark: bool = False) -> str:
    """The colours as CSS variables."""
    return " ".join(f"--w{index}: {worker_colour(index, dark=dark)};" for index in range(workers))


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


def percent(part: float, digits: int = 1) -> str:
    """``12.5%``, with a real minus sign where it is below 0"""
    return f"{100 * part:.{digits}f}%".replace("-", MINUS)


def gain(ratio: float) -> str:
    """``+12.5%`` of 1.125"""
    return f"{100 * (ratio - 1):+.1f}%".replace("-", MINUS)


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


def listed(names: list[str]) -> str:
    """``a, b and c``"""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
