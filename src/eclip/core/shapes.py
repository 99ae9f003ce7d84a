"""Shapes of arrivals at a rate: Poisson, bursts, or the pattern of a recording.

Every shape keeps the mean rate of a run, so that shapes can be compared. ``bursts`` and
``bursts:on=50ms,off=0.2s`` name bursts, ``azure-code`` and ``azure-conv`` recorded arrivals.
"""

from __future__ import annotations

import functools
import gzip
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eclip.errors import UsageError

LONGEST_PHASE_S = 3600.0
SHORTEST_PHASE_S = 0.001

Seconds = npt.NDArray[np.float64]  # rising, from 0 to the length of a run

_PHASE = re.compile(r"(?P<name>on|off)=(?P<number>\d{1,9}(?:\.\d{1,9})?)(?P<unit>ms|s)", re.ASCII)


class Shape(Protocol):
    @property
    def label(self) -> str:
        """The shape's name in reports; equal labels mean equal shapes."""
        ...

    def draw(self, rate_rps: float, seconds: float, random: np.random.Generator) -> Seconds:
        """Arrivals of one worker, at ``rate_rps`` on average."""
        ...


@dataclass(frozen=True)
class Poisson:
    @property
    def label(self) -> str:
        return "Poisson"

    def draw(self, rate_rps: float, seconds: float, random: np.random.Generator) -> Seconds:
        count = random.poisson(rate_rps * seconds)
        # Given their number, Poisson arrivals are uniform over the interval.
        return np.sort(random.uniform(0.0, seconds, count))


@dataclass(frozen=True)
class Bursts:
    """Poisson arrivals while a worker is on, none while it is off. Both phases have exponential
    lengths."""

    on_s: float = 0.1  # on the mean
    off_s: float = 0.2

    def __post_init__(self) -> None:
        for name, phase_s in (("on", self.on_s), ("off", self.off_s)):
            if not SHORTEST_PHASE_S <= phase_s <= LONGEST_PHASE_S:
                raise UsageError(
                    f"bursts: {name} lasts {SHORTEST_PHASE_S:g} to {LONGEST_PHASE_S:.0f} s, "
                    f"not {phase_s:g}"
                )

    @property
    def label(self) -> str:
        return f"bursts (on {1000 * self.on_s:g} ms, off {1000 * self.off_s:g} ms)"

    def draw(self, rate_rps: float, seconds: float, random: np.random.Generator) -> Seconds:
        cycle_s = self.on_s + self.off_s
        cycles = max(1, round(seconds / cycle_s))
        # Phases are stretched, so that the share of time on is exact: otherwise the rate of a run
        # of forty bursts would be off by a seventh.
        on, off = (
            _filling(random.exponential(size=cycles), seconds * phase_s / cycle_s)
            for phase_s in (self.on_s, self.off_s)
        )
        count = random.poisson(rate_rps * seconds)
        while_on = random.uniform(0.0, on.sum(), count)
        cycle = np.minimum(np.searchsorted(np.cumsum(on), while_on), cycles - 1)
        times = while_on + (np.cumsum(off) - off)[cycle]
        # A run begins anywhere in a cycle, for each worker at another place.
        return np.sort((times + random.uniform(0.0, seconds)) % seconds)


@dataclass(frozen=True)
class RecordedArrivals:
    """The recorded arrivals of a real service, from a random place on, stretched to the rate. After
    its end the record begins again."""

    name: str

    @property
    def label(self) -> str:
        return self.name

    def draw(self, rate_rps: float, seconds: float, random: np.random.Generator) -> Seconds:
        record = _recorded_gaps(self.name)
        count = round(rate_rps * seconds)
        first = random.integers(len(record))
        gaps = _filling(record[(first + np.arange(count)) % len(record)], seconds)
        # A run begins somewhere in the first gap.
        return np.cumsum(gaps) - random.uniform(0.0, float(gaps[:1].sum()))


def shape_of(text: str | Path) -> Shape | None:
    """The shape that ``text`` names; None if ``text`` is a file."""
    name, _, terms = str(text).partition(":")
    if name == "bursts":
        return _read_bursts(str(text), terms)
    if str(text) == "poisson":
        return Poisson()
    return RecordedArrivals(str(text)) if str(text) in recorded_names() else None


def recorded_names() -> tuple[str, ...]:
    return tuple(sorted(_recorded_files()))


def _read_bursts(text: str, terms: str) -> Bursts:
    phases: dict[str, float] = {}
    for term in terms.split(",") if terms else []:
        match = _PHASE.fullmatch(term.strip())
        if match is None or f"{match['name']}_s" in phases:
            raise UsageError(
                f"cannot read {term!r} in {text!r}; write it like bursts:on=100ms,off=0.2s"
            )
        number = float(match["number"])
        phases[f"{match['name']}_s"] = number / 1000 if match["unit"] == "ms" else number
    return Bursts(**phases)


def _filling(lengths: Seconds, total: float) -> Seconds:
    """The lengths, stretched so that they sum up to the total."""
    return lengths * (total / lengths.sum()) if len(lengths) else lengths


def _recorded_files() -> dict[str, Path]:
    folder = Path(str(resources.files("eclip") / "data" / "arrivals"))
    return {path.name.partition(".")[0]: path for path in folder.glob("*.txt.gz")}


@functools.cache
def _recorded_gaps(name: str) -> Seconds:
    """Times between successive arrivals, in arbitrary units."""
    text = gzip.decompress(_recorded_files()[name].read_bytes()).decode()
    gaps = [float(line) for line in text.splitlines() if not line.startswith("#")]
    return np.maximum(gaps, 0.5)  # 0 was rounded down; a run of two requests could not be stretched
