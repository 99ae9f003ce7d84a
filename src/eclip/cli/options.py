"""The options that several commands share, so that each means the same everywhere."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eclip.core.device import MIN_SECONDS
from eclip.core.load import MAX_SECONDS
from eclip.errors import UsageError, unknown_name


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
        help="The workers, as [COUNTx]MODEL:BATCH[@RATErps[/BOUND]] or MODEL:BATCH@background with "
        "commas: 2xalbert:8,densenet201:8@120rps; bert:1@300rps/5ms,vgg19:32@background; or a mix "
        "of the paper: paper/1.",
    ),
]
TopologyOption = Annotated[
    str,
    typer.Option(
        "--topology", help="The device to plan for: a name (see `eclip topology`) or a file."
    ),
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
    str,
    typer.Option(
        "--device",
        help="Where to run: sim (the simulator), cuda or hip (a GPU), or cuda:1 (the second).",
    ),
]
GpuOption = Annotated[int, typer.Option("--gpu", min=0, help="The GPU to use, counted from 0.")]
SecondsOption = Annotated[
    float,
    typer.Option(
        "--seconds",
        callback=between("--seconds", MIN_SECONDS, MAX_SECONDS),
        help="Seconds to measure for, at least 0.001.",
    ),
]
WarmupOption = Annotated[
    float,
    typer.Option(
        "--warmup",
        callback=between("--warmup", 0, MAX_SECONDS),
        help="Seconds to run before measuring begins.",
    ),
]
TraceOption = Annotated[
    float | None,
    typer.Option(
        "--trace-ms",
        callback=between("--trace-ms", 0, 1000 * MAX_SECONDS),
        help="Record every kernel of the first N milliseconds; 20 unless given.",
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(
        "--seed", min=0, help="Seed of arrivals and of the moments at which workers start."
    ),
]
ArrivalsOption = Annotated[
    str | None,
    typer.Option(
        "--arrivals",
        metavar="SHAPE|CSV",
        help="How requests come at the mix's rates: poisson, bursts, bursts:on=100ms,off=200ms, "
        "azure-code, azure-conv. Or a CSV of arrivals, time_s,worker, that replaces them.",
    ),
]
SwitchMaxOption = Annotated[
    int, typer.Option("--switch-max", help="eclip: lane switches per request and worker, at most.")
]
ToleranceOption = Annotated[
    float,
    typer.Option(
        "--tolerance",
        callback=between("--tolerance", 0),
        help="model, kernel, mps-model: slowdown accepted for fewer units; 0.05 is 5%.",
    ),
]
ObjectiveOption = Annotated[
    str | None,
    typer.Option(
        "--objective",
        help="search: throughput, energy or slo. Throughput unless given; slo where the mix has "
        "services.",
    ),
]
WeightsOption = Annotated[
    str | None, typer.Option("--weights", help="search, throughput: a weight per worker, as 2,1,1.")
]
FairnessOption = Annotated[
    float | None,
    typer.Option(
        "--fairness",
        callback=between("--fairness", 0, 1),
        help="search: least fairness of a plan, 0 to 1: the smallest ratio of a worker's rate to "
        "its rate alone, over the largest. Default: 0.05 below plain streams, within 0.7 to 0.9.",
    ),
]
SearchTimeOption = Annotated[
    float,
    typer.Option(
        "--seconds",
        callback=between("--seconds", 0),
        help="search: seconds of simulation, before plans are tried on a device.",
    ),
]
SearchSecondsOption = Annotated[
    float,
    typer.Option(
        "--search-seconds",
        callback=between("--search-seconds", 0),
        help="search: seconds of simulation, before plans are tried on a device.",
    ),
]
SharesOption = Annotated[
    str | None,
    typer.Option(
        "--shares", help="mps: percent of the units, one for all or one per worker, as 60,30,30."
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Exit with 3 if a worker is overloaded, misses its bound or is below its floor.",
    ),
]
BatchesOption = Annotated[
    int | None,
    typer.Option("--batches", help="search: run exactly N search batches (reproducible)."),
]
VerifyOption = Annotated[
    int, typer.Option("--verify", min=0, help="search: try the best N plans on the device.")
]
RefineOption = Annotated[
    float,
    typer.Option(
        "--refine",
        callback=between("--refine", 0),
        help="search, with --verify: seconds to continue the search on the device.",
    ),
]
EarlierOption = Annotated[
    Path | None,
    typer.Option(
        "--earlier",
        help="search, with --refine: start from an earlier search's observations.json.gz.",
    ),
]
UsualKernelsOption = Annotated[
    bool,
    typer.Option(
        "--usual-kernels",
        help="search: use only the models' usual kernels, none for fewer units.",
    ),
]
SearchSeedOption = Annotated[
    int, typer.Option("--seed", min=0, help="search: seed of the random candidates.")
]
TailOption = Annotated[
    bool,
    typer.Option(
        "--tail", help="Take variable-output kernels at their p99 times, not the expected ones."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
WorkersOption = Annotated[
    str,
    typer.Option("--workers", help="What tells workers apart in the command: stream or thread."),
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


def shares_of(text: str | None) -> tuple[int, ...]:
    """``60,30`` as percentages."""
    shares = numbers(text, "--shares", 1, 100)
    if any(share != int(share) for share in shares):
        raise UsageError(f"--shares {text}: a share is a whole number of percent, 1 to 100")
    return tuple(int(share) for share in shares)


def load_of(text: str | None) -> float | str | None:
    """A part such as 0.6, or the shape or file of arrivals."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return text


def named_plans(texts: Sequence[str]) -> dict[str, Path]:
    """From ``FILE`` or ``NAME=FILE``; without a name a plan is called after its file."""
    plans: dict[str, Path] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        path = Path(file if equals else text)
        name = name if equals else path.name.partition(".")[0]
        if name in plans:
            raise UsageError(f"--plan {text}: {name!r} is taken; write NAME={path}")
        plans[name] = path
    return plans


def settings_of(
    texts: Sequence[str], options: type[Any], more: Mapping[str, type], besides: Sequence[str]
) -> dict[str, Any]:
    """``NAME=VALUE`` of the fields of an options class, and of more names, as keyword arguments;
    ``besides`` are fields that have an option of their own, or none."""
    kinds = {**typing.get_type_hints(options), **more}
    known = {name.replace("_", "-"): name for name in kinds if name not in besides}
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise unknown_name("setting", text, [f"{setting}=…" for setting in sorted(known)])
        settings[known[name]] = _setting(text, value, str(kinds[known[name]]))
    return settings


def _setting(text: str, value: str, kind: str) -> Any:
    try:
        if "bool" in kind:
            return {"yes": True, "no": False}[value]
        if "int" in kind:
            return int(value)
        if "float" in kind:
            number = float(value)
            if not math.isfinite(number):
                raise ValueError
            return number
    except (ValueError, KeyError):
        raise UsageError(
            f"--set {text}: a finite number is wanted, or yes or no for what is on or off"
        ) from None
    return value


def given_options(context: typer.Context) -> list[str]:
    """The options that stand on the command line, as a person writes them: ``--search-seconds``."""
    sources = {option: context.get_parameter_source(option.name or "") for option in _all(context)}
    return [
        max(option.opts, key=len)
        for option, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


def _all(context: typer.Context) -> list[Any]:
    return [option for option in context.command.params if option.param_type_name == "option"]


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
