"""The options that several commands share, so that each means the same everywhere."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from eclip.devices.base import MIN_SECONDS
from eclip.devices.load import MAX_SECONDS
from eclip.errors import UsageError


def between(option: str, low: float, high: float = math.inf) -> Callable[[Any], Any]:
    """A typer callback that refuses a number outside of the range, and what is no number."""

    def check(value: float | None) -> float | None:
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise UsageError(f"{option} must be {_range(low, high)}, not {value:g}")
        return value

    return check


def _range(low: float, high: float) -> str:
    return f"{low:g} or more" if math.isinf(high) else f"{low:g} to {high:g}"


MixArgument = Annotated[
    str,
    typer.Argument(
        metavar="MIX",
        help="Workers: 2xalbert:8,densenet201:8@120rps (repeat, model, batch, rate) or paper/1.",
    ),
]
TopologyOption = Annotated[
    str, typer.Option("--topology", help="A built-in device (see `eclip topology`) or a file.")
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option("--calibration", help="A calibration file instead of the built-in one."),
]
ProfilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--profiles", help="A folder of profiles, used before the built-in ones; repeatable."
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="Where to run: sim (the simulator) or cuda (a GPU).")
]
GpuOption = Annotated[int, typer.Option("--gpu", min=0, help="cuda: which GPU, counted from 0.")]
SecondsOption = Annotated[
    float,
    typer.Option(
        "--seconds",
        callback=between("--seconds", MIN_SECONDS, MAX_SECONDS),
        help="Seconds to run and measure, from 0.001.",
    ),
]
WarmupOption = Annotated[
    float,
    typer.Option(
        "--warmup",
        callback=between("--warmup", 0, MAX_SECONDS),
        help="Seconds to run before measuring.",
    ),
]
TraceOption = Annotated[
    float,
    typer.Option(
        "--trace-ms",
        callback=between("--trace-ms", 0, 1000 * MAX_SECONDS),
        help="Record every kernel of the first so many milliseconds.",
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, help="Seed of arrivals and of when workers start.")
]
ArrivalsOption = Annotated[
    Path | None,
    typer.Option("--arrivals", help="A CSV time_s,worker of arrivals, instead of the mix's rates."),
]
SwitchMaxOption = Annotated[
    int, typer.Option("--switch-max", help="eclip: most lane switches per request and worker.")
]
ToleranceOption = Annotated[
    float,
    typer.Option(
        "--tolerance",
        callback=between("--tolerance", 0),
        help="model, kernel: slowdown that is accepted for fewer units; 0.05 is 5%.",
    ),
]
ObjectiveOption = Annotated[
    str, typer.Option("--objective", help="search: throughput, energy or latency.")
]
WeightsOption = Annotated[
    str | None, typer.Option("--weights", help="search: one weight per worker, as 2,1,1.")
]
P99Option = Annotated[
    str | None,
    typer.Option(
        "--p99", help="search, latency: the longest p99 of every worker in ms, as 5,2.5,8."
    ),
]
FairnessOption = Annotated[
    float,
    typer.Option(
        "--fairness",
        callback=between("--fairness", 0, 1),
        help="search: least share of a worker's rate alone over the largest share, 0 to 1.",
    ),
]
SearchSecondsOption = Annotated[
    float,
    typer.Option(
        "--seconds",
        callback=between("--seconds", 0),
        help="search: seconds of simulation, before plans are tried on a device.",
    ),
]
BatchesOption = Annotated[
    int | None,
    typer.Option("--batches", help="search: run exactly so many search batches (reproducible)."),
]
RefineOption = Annotated[
    float,
    typer.Option(
        "--refine",
        callback=between("--refine", 0),
        help="search, with --verify: seconds to go on searching on the device.",
    ),
]
EarlierOption = Annotated[
    Path | None,
    typer.Option(
        "--earlier",
        help="search, with --refine: go on from an earlier search, its observations.json.gz.",
    ),
]
OwnKernelsOption = Annotated[
    bool,
    typer.Option(
        "--own-kernels",
        help="search: keep to the models' usual kernels, none chosen for fewer units.",
    ),
]
SearchSeedOption = Annotated[int, typer.Option("--seed", min=0, help="search: seed.")]
TailOption = Annotated[
    bool,
    typer.Option("--tail", help="Plan variable-output kernels by their p99 times, not expected."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
WorkersOption = Annotated[
    str,
    typer.Option("--workers", help="How workers are told apart: by stream or by thread."),
]


def numbers(
    text: str | None, option: str, low: float = 0, high: float = math.inf
) -> tuple[float, ...]:
    """``2,1,0.5`` as numbers of a range; nothing given is none."""
    if text is None:
        return ()
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is no list of numbers; write them with commas, like 2,1,0.5"
        ) from None
    for value in values:
        between(option, low, high)(value)
    return values


def finite_numbers(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which refuses ``nan`` and ``inf`` for every option that takes a number."""

    @functools.wraps(command)
    def checked(**arguments: Any) -> None:
        for name, value in arguments.items():
            if isinstance(value, float) and not math.isfinite(value):
                option = name.replace("_", "-")
                raise UsageError(f"--{option} must be a finite number, not {value:g}")
        command(**arguments)

    return checked
