"""The options that several commands share, so that each means the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eclip.errors import UsageError

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
    typer.Option("--profiles", help="A folder of profiles, before the built-in ones; repeatable."),
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="Where to run: sim (the simulator) or cuda (a GPU).")
]
GpuOption = Annotated[int, typer.Option("--gpu", min=0, help="cuda: which GPU, counted from 0.")]
SecondsOption = Annotated[float, typer.Option("--seconds", help="How long to run and measure.")]
WarmupOption = Annotated[float, typer.Option("--warmup", help="Seconds to run before measuring.")]
TraceOption = Annotated[
    float, typer.Option("--trace-ms", help="Record every kernel for the first so many ms.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of arrivals and phases.")]
ArrivalsOption = Annotated[
    Path | None,
    typer.Option("--arrivals", help="A CSV time_s,worker of arrivals, instead of the mix's rates."),
]
SwitchMaxOption = Annotated[
    int, typer.Option("--switch-max", help="eclip: lane switches per request and worker.")
]
ToleranceOption = Annotated[
    float,
    typer.Option("--tolerance", help="model, kernel: slowdown that still counts as right-sized."),
]
ObjectiveOption = Annotated[
    str, typer.Option("--objective", help="search: throughput, energy or latency.")
]
WeightsOption = Annotated[
    str | None, typer.Option("--weights", help="search: one weight per worker, as 2,1,1.")
]
P99Option = Annotated[
    str | None,
    typer.Option("--p99", help="search for latency: a bound per worker in ms, as 5,2.5,8."),
]
FairnessOption = Annotated[
    float, typer.Option("--fairness", help="search: smallest over largest share, at least.")
]
SearchSecondsOption = Annotated[
    float, typer.Option("--seconds", help="search: how long, before anything is tried.")
]
BatchesOption = Annotated[
    int | None,
    typer.Option("--batches", help="search: so many batches instead, to repeat one exactly."),
]
RefineOption = Annotated[
    float,
    typer.Option("--refine", help="search, with --verify: go on for so long on the device first."),
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
    typer.Option("--own-kernels", help="search: no kernels that were chosen for fewer units."),
]
SearchSeedOption = Annotated[int, typer.Option("--seed", min=0, help="search: seed.")]
TailOption = Annotated[
    bool,
    typer.Option("--tail", help="Take variable-output kernels at their p99 times, not expected."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
WorkersOption = Annotated[
    str,
    typer.Option("--workers", help="How workers are told apart: by stream or by thread."),
]


def numbers(text: str | None, option: str) -> tuple[float, ...]:
    """``2,1,0.5`` as numbers; nothing given is none."""
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} {text}: numbers with commas between them are wanted") from None
