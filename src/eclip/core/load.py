"""Load: when requests arrive. The same load on two devices or policies has identical arrivals.

A worker either runs back to back (closed loop, one request outstanding) or takes requests from a
list of arrival times: drawn at its rate in some shape, or read from a CSV.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eclip.core.mix import Mix
from eclip.core.runlog import OTHERS_IDLE
from eclip.core.shapes import Poisson, Shape, recorded_names
from eclip.errors import ArtefactError, UsageError, unknown_name

MAX_ARRIVALS = 50_000_000
MAX_SECONDS = 24 * 3600.0  # of a run
CLOSED_LOOP = None

Arrivals = npt.NDArray[np.int64]  # rising, nanoseconds; 0 is where the measured part begins
NO_ARRIVALS: Arrivals = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Load:
    label: str
    seed: int
    arrivals: tuple[Arrivals | None, ...]  # per worker; CLOSED_LOOP or its arrivals
    # Simulated stalls of the host: when it can begin each request. Empty: when each arrives.
    begins: tuple[Arrivals | None, ...] = ()

    def offered(self, duration_ns: int) -> tuple[int | None, ...]:
        """Per worker: requests that arrive in the measured part; None: closed loop."""
        return tuple(
            None
            if times is CLOSED_LOOP
            else int(np.count_nonzero((times >= 0) & (times < duration_ns)))
            for times in self.arrivals
        )

    def only(self, worker: int) -> Load:
        """The same arrivals of one worker, while all others are idle: the worker alone."""
        return replace(
            self,
            label=f"{self.label.removesuffix(OTHERS_IDLE)}{OTHERS_IDLE}",
            arrivals=_only(worker, self.arrivals),
            begins=_only(worker, self.begins),
        )


def _only(worker: int, every: tuple[Arrivals | None, ...]) -> tuple[Arrivals | None, ...]:
    return tuple(times if index == worker else NO_ARRIVALS for index, times in enumerate(every))


def closed_loop(workers: int, only: int | None = None) -> Load:
    """Closed-loop load for all workers, or for worker ``only`` while the others are idle."""
    return Load(
        label="closed loop",
        seed=0,
        arrivals=tuple(
            CLOSED_LOOP if only in (None, worker) else NO_ARRIVALS for worker in range(workers)
        ),
    )


def load_of_mix(
    mix: Mix, seconds: float, warmup_seconds: float, seed: int, shape: Shape | None = None
) -> Load:
    """Arrivals of this shape (default Poisson) for workers with a rate, closed loop for the
    others."""
    check_shape(mix, shape)
    shape = shape or Poisson()
    span = seconds + warmup_seconds
    arrivals: list[Arrivals | None] = []
    for index, worker in enumerate(mix.workers):
        if worker.rate_rps is None:
            arrivals.append(CLOSED_LOOP)
            continue
        if worker.rate_rps * span > MAX_ARRIVALS:
            raise UsageError(
                f"{worker.name} at {worker.rate_rps:g} requests/s for {seconds:g} s is more than "
                f"{MAX_ARRIVALS} requests; lower the rate or the time"
            )
        random = np.random.default_rng([seed, index])
        times = shape.draw(worker.rate_rps, span, random) - warmup_seconds
        arrivals.append((times * 1e9).astype(np.int64))
    rates = [worker.rate_rps for worker in mix.workers]
    kinds = [
        f"{rates.count(rate)} closed loop"
        if rate is None
        else f"{rates.count(rate)} {shape.label} at {rate:g}/s"
        for rate in dict.fromkeys(rates)
    ]
    label = kinds[0].partition(" ")[2] if len(kinds) == 1 else "workers: " + ", ".join(kinds)
    return Load(label=label, seed=seed, arrivals=tuple(arrivals))


def check_shape(mix: Mix, shape: Shape | None) -> None:
    """Refuse a shape of arrivals for a mix without rates."""
    if shape is not None and not mix.has_rates:
        raise UsageError(
            f"{shape.label} arrivals need a rate, and no worker of the mix has one; give it one, "
            f"as in {mix.models[0]}@100rps"
        )


def load_of_csv(path: Path, mix: Mix, seconds: float, seed: int) -> Load:
    """Arrivals from a CSV with the columns ``time_s,worker``, for a run of ``seconds``.

    Workers without arrivals stay idle, except background, which runs back to back. A service
    without arrivals is refused: its bound could not be judged."""
    times: dict[str, list[float]] = {worker.name: [] for worker in mix.workers}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file)
            if [column.strip() for column in next(rows, [])] != ["time_s", "worker"]:
                raise ArtefactError(f"{path}: the first line must be the header time_s,worker")
            for row in filter(None, rows):
                _read_row(row, f"{path} line {rows.line_num}", times)
    except OSError as error:
        raise ArtefactError(
            f"cannot read {path}: {error.strerror or error}; arrivals are a CSV, or come as "
            f"poisson, bursts, {', '.join(recorded_names())}"
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ArtefactError(f"{path} is not a CSV text file: {error}") from None
    if not any(times.values()):
        raise ArtefactError(f"{path} has no arrivals in it")
    load = Load(
        label=f"arrivals from {path.name}",
        seed=seed,
        arrivals=tuple(
            CLOSED_LOOP
            if not found and mix.is_background(worker)
            else np.sort((np.array(found) * 1e9).astype(np.int64))
            for worker, found in enumerate(times.values())
        ),
    )
    offered = load.offered(round(seconds * 1e9))
    for worker, count in zip(mix.workers, offered, strict=True):
        if worker.bound is not None and count == 0:
            raise UsageError(
                f"{path} has no arrival of the service {worker.name} within a run of {seconds:g} s;"
                f" run for longer, or leave {worker.name} out of the mix"
            )
    within, all_of_them = sum(filter(None, offered)), sum(map(len, times.values()))
    if within == 0:
        first = min(min(found) for found in times.values() if found)
        raise UsageError(
            f"{path} has no arrival within a run of {seconds:g} s: the first comes after "
            f"{first:g} s; run for longer"
        )
    if within == all_of_them:
        return load
    return replace(load, label=f"{load.label}: the first {within} of {all_of_them}")


def _read_row(row: list[str], where: str, times: dict[str, list[float]]) -> None:
    if len(row) != 2:
        raise ArtefactError(f"{where}: expected time_s,worker but found {len(row)} columns")
    try:
        time_s = float(row[0])
    except ValueError:
        raise ArtefactError(f"{where}: {row[0]!r} is not a time in seconds") from None
    if not 0 <= time_s <= MAX_SECONDS:
        raise ArtefactError(
            f"{where}: an arrival time must be finite, at least 0 and at most {MAX_SECONDS:.0f} s"
        )
    name = row[1].strip()
    if name not in times:
        raise ArtefactError(f"{where}: {unknown_name('worker', name, times)}")
    times[name].append(time_s)
