"""The options that several commands share."""

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
    """A typer callback that refuses numbers outside of the range, and ``nan``."""

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
        help="The workers, each [COUNTx]MODEL:BATCH[@RATErps[/BOUND]] or MODEL:BATCH@background, "
        "separated by commas: 2xalbert:8,densenet201:8@120rps; "
        "bert:1@300rps/5ms,vgg19:32@background; or a mix of the paper: paper/1.",
    ),
]
TopologyOption = Annotated[
    str,
    typer.Option(
        "--topology", help="The device to plan for: a name from `eclip topology`, or a file."
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option("--calibration", help="A calibration file instead of the built-in one."),
]
ProfilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--profiles", help="A folder of profiles, used before built-in profiles; repeatable."
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        help="The device: sim (the simulator), cuda or hip (a GPU), or cuda:1 (the second GPU).",
    ),
]
GpuOption = Annotated[int, typer.Option("--gpu", min=0, help="The GPU to use, counted from 0.")]
SecondsOption = Annotated[
    float,
    typer.Option(
        "--seconds",
        callback=between("--seconds", MIN_SECONDS, MAX_SECONDS),
        help="Measure for N seconds, at least 0.001.",
    ),
]
WarmupOption = Annotated[
    float,
    typer.Option(
        "--warmup",
        callback=between("--warmup", 0, MAX_SECONDS),
        help="Run for N seconds before measuring begins.",
    ),
]
TraceOption = Annotated[
    float | None,
    typer.Option(
        "--trace-ms",
        callback=between("--trace-ms", 0, 1000 * MAX_SECONDS),
        help="Record every kernel of the first N milliseconds (default 20).",
    ),
]
SeedOption = Annotated[
    int,
    typer.Option("--seed", min=0, help="Seed of the arrivals and of the workers' start times."),
]
ArrivalsOption = Annotated[
    str | None,
    typer.Option(
        "--arrivals",
        metavar="SHAPE|CSV",
        help="The shape of arrivals at the mix's rates: poisson, bursts, "
        "bursts:on=100ms,off=200ms, azure-code, azure-conv. Or a CSV of arrivals, time_s,worker, "
        "which replaces them.",
    ),
]
SwitchMaxOption = Annotated[
    int, typer.Option("--switch-max", help="eclip: at most N lane switches per request and worker.")
]
ToleranceOption = Annotated[
    float,
    typer.Option(
        "--tolerance",
        callback=between("--tolerance", 0),
        help="model, kernel, mps-model: accept this slowdown for fewer units; 0.05 is 5%.",
    ),
]
ObjectiveOption = Annotated[
    str | None,
    typer.Option(
        "--objective",
        help="search: throughput, energy or slo. Default: slo for a mix with services, otherwise "
        "throughput.",
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option("--weights", help="search for throughput: a weight per worker, like 2,1,1."),
]
FairnessOption = Annotated[
    float | None,
    typer.Option(
        "--fairness",
        callback=between("--fairness", 0, 1),
        help="search: the least fairness of a plan, 0 to 1. Fairness is the smallest ratio of a "
        "worker's rate to its rate alone, over the largest ratio. Default: 0.05 below plain "
        "streams, within 0.7 to 0.9.",
    ),
]
SearchTimeOption = Annotated[
    float,
    typer.Option(
        "--seconds",
        callback=between("--seconds", 0),
        help="search: simulate for N seconds, before plans are tried on a device.",
    ),
]
SearchSecondsOption = Annotated[
    float,
    typer.Option(
        "--search-seconds",
        callback=between("--search-seconds", 0),
        help="search: simulate for N seconds, before plans are tried on a device.",
    ),
]
SharesOption = Annotated[
    str | None,
    typer.Option(
        "--shares",
        help="mps: percent of the units, one number for all or one per worker, like 60,30,30.",
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
        help="search, with --verify: continue the search on the device for N seconds.",
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
        help="search: use only the models' usual kernels, no kernels for fewer units.",
    ),
]
SearchSeedOption = Annotated[
    int, typer.Option("--seed", min=0, help="search: seed of the random candidates.")
]
TailOption = Annotated[
    bool,
    typer.Option(
        "--tail", help="Use p99 times of variable-output kernels instead of expected times."
    ),
]
FrontierOption = Annotated[
    bool,
    typer.Option("--frontier", help="Print all plans of a search's frontier, not five of them."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
WorkersOption = Annotated[
    str,
    typer.Option(
        "--workers", help="Count every stream or every thread of the command as a worker."
    ),
]


def numbers(
    text: str | None, option: str, low: float = 0, high: float = math.inf
) -> tuple[float, ...]:
    """``2,1,0.5`` as numbers of a range; empty for None."""
    if text is None:
        return ()
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is no list of numbers; separate them by commas, like 2,1,0.5"
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
    """Plans by name, from ``FILE`` or ``NAME=FILE``; the default name is the file's."""
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
    """``NAME=VALUE`` texts as keyword arguments. Names are the fields of ``options`` except
    ``besides``, and the names in ``more``."""
    kinds = {**typing.get_type_hints(options), **more}
    known = {name.replace("_", "-"): name for name in kinds if name not in besides}
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in known:
            raise unknown_name("setting", name, sorted(known))
        if not equals:
            raise UsageError(f"--set {text}: a value is missing; write {text}=VALUE")
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
        raise UsageError(f"--set {text}: give a finite number, or yes or no for a switch") from None
    return value


def given_options(context: typer.Context) -> list[str]:
    """The options given on the command line, in the form ``--search-seconds``."""
    sources = {option: context.get_parameter_source(option.name or "") for option in _all(context)}
    return [
        max(option.opts, key=len)
        for option, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


def _all(context: typer.Context) -> list[Any]:
    return [option for option in context.command.params if option.param_type_name == "option"]


def finite_numbers(command: Callable[..., None]) -> Callable[..., None]:
    """The command, made to refuse ``nan`` and ``inf`` for every option that takes a number."""

    @functools.wraps(command)
    def checked(**arguments: Any) -> None:
        for name, value in arguments.items():
            if isinstance(value, float) and not math.isfinite(value):
                option = name.replace("_", "-")
                raise UsageError(f"--{option} must be a finite number, not {value:g}")
        command(**arguments)

    return checked
