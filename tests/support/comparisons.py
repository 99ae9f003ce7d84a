"""Comparisons made by hand: few numbers, so that tables drawn from them can be checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eclip.core.model_key import ModelKey
from eclip.files.comparison import Comparison, Entry, Summary

WORKERS = ("a", "b")


def score(stp: float, power: float = 100.0, fairness: float = 0.8, **given: Any) -> Summary:
    values: dict[str, Any] = {
        "seconds": 1.0,
        "stp": stp,
        "fairness": fairness,
        "power_w": power,
        "efficiency_per_kj": 1000 * stp / power,
        "joules_per_request": power / (200 * stp),
        "requests": (100, 200),
        "rate_rps": (100 * stp, 200 * stp),
        "p50_ms": (1.0, 2.0),
        "p99_ms": (3.0, 4.0),
        "offered_rps": (None, None),
    }
    return Summary(**(values | given))


def entry(policy: str, *scores: Summary, **given: Any) -> Entry:
    values: dict[str, Any] = {
        "policy": policy,
        "setting": "",
        "plan": f"plan of {policy}",
        "switches": (0, 0),
        "runs": scores,
        "together": scores[0],
    }
    return Entry(**(values | given))


def comparison(entries: Mapping[str, float] | Sequence[Entry], **given: Any) -> Comparison:
    """From an STP per policy, or from whole entries."""
    if isinstance(entries, Mapping):
        entries = [entry(policy, score(stp)) for policy, stp in entries.items()]
    values: dict[str, Any] = {
        "mix": "m/1",
        "workers": WORKERS,
        "models": (ModelKey("a", 8), ModelKey("b", 8)),
        "topology": "h200",
        "device": "a GPU, driver 1.2",
        "driver": "1.2",
        "modelled": False,
        "date": "2026-11-15T10:00:00+00:00",
        "command": "eclip compare m/1 --repeats 3",
        "eclip": "0.1.0",
        "load": "closed loop",
        "load_part": None,
        "seed": 0,
        "repeats": 3,
        "objective": "throughput",
        "alone_rps": (100.0, 200.0),
        "entries": tuple(entries),
    }
    return Comparison(**(values | given))
