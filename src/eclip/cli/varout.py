"""``eclip varout``: compares variable-output mechanisms, and chooses capacities.

Only ``measure`` imports packages that need a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eclip.cli import screen
from eclip.cli.options import GpuOption, JsonOption, between, finite_numbers, numbers
from eclip.core.lengths import Lengths, lengths_of
from eclip.core.profile import Profile
from eclip.errors import DeviceError, PlanningError, UsageError, unknown_name
from eclip.files import outputs, store
from eclip.files.machine import Machine
from eclip.reports import growth as page
from eclip.varout import growth, profiles
from eclip.varout.estimate import CHOICES, choose
from eclip.varout.mechanisms import Mechanism

app = typer.Typer(
    help="Kernels with data-dependent output lengths: mechanisms compared, capacities chosen.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
MachineOption = Annotated[
    str, typer.Option("--machine", help="A built-in machine (imagine, h200) or a file.")
]
_ROWS = 11
_MOST = 1 << 40  # elements, lengths, capacities: more than any memory holds
_LARGEST_RATIO = 1e6
_HIGHEST_PRICE = 1e9
_PAGE = b"eclip report"


@app.command()
@finite_numbers
def compare(
    machines: Annotated[
        list[str] | None,
        typer.Option("--machine", help="A built-in machine or a file; repeatable. Default: all."),
    ] = None,
    allocated: Annotated[
        float | None,
        typer.Option(
            "--allocated",
            help="Allocate buffers for this many outputs per input (A), above 0.",
        ),
    ] = None,
    ratios: Annotated[
        str | None,
        typer.Option("--ratios", help="Actual outputs per input (A), like 0.5,1,2."),
    ] = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", help="Also draw the comparison to this HTML file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare mechanisms: the extra time of each over exact allocation."""
    wanted = None if ratios is None else numbers(ratios, "--ratios", 0, _LARGEST_RATIO)
    if report_file is not None:
        outputs.check_output(report_file, _PAGE)
    chosen = [find_machine(name) for name in machines or store.builtin_names(Machine)]
    if not machines:
        chosen.sort(key=lambda one: one.gpu is not None)  # the document's first
    found = [growth.compare(one, allocated, wanted) for one in chosen]
    if report_file is not None:
        store.save_export(report_file, page.render(found), _PAGE)
    if as_json:
        screen.print_json(found)
        return
    for one in found:
        _print_growth(one)
    if report_file is not None:
        screen.out.print(f"Report: {report_file}")


@app.command()
@finite_numbers
def estimate(
    file: Annotated[
        Path,
        typer.Argument(metavar="LENGTHS", help="A lengths file, or text with one length a line."),
    ],
    machine: MachineOption = "h200",
    inputs: Annotated[
        int | None,
        typer.Option(
            "--inputs", min=1, max=_MOST, help="Elements the stage reads; default: the machine's."
        ),
    ] = None,
    price: Annotated[
        float,
        typer.Option(
            "--price",
            callback=between("--price", 0, _HIGHEST_PRICE),
            help="The price of a byte of buffer, in ns of a request's time.",
        ),
    ] = 1e-6,
    most_bytes: Annotated[
        int | None, typer.Option("--most-bytes", min=1, help="Use at most N bytes of buffer.")
    ] = None,
    mechanisms: Annotated[
        str,
        typer.Option("--mechanisms", help="Mechanisms to consider, separated by commas; or all."),
    ] = "all",
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Also write the distribution of lengths to this file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Choose the mechanism and capacity that cost least for a sample of lengths."""
    if out is not None:
        outputs.check_output(out, Lengths)
    names = [one.value for one in CHOICES]
    wanted = names if mechanisms == "all" else [name.strip() for name in mechanisms.split(",")]
    for name in wanted:
        if name not in names:
            raise unknown_name("mechanism", name, ["all", *names])
    lengths = _read_lengths(file)
    where = find_machine(machine)
    best = choose(where, lengths, map(Mechanism, wanted), price, most_bytes, inputs)
    each = []
    for name in wanted:
        try:
            each.append(choose(where, lengths, [Mechanism(name)], price, most_bytes, inputs))
        except PlanningError:
            continue  # this mechanism cannot serve these lengths
    if out is not None:
        store.save(lengths, out)
    if as_json:
        screen.print_json({"lengths": store.to_data(lengths), "best": best, "each": each})
        return
    unit = where.unit if where.gpu is not None else f"{where.unit} per input"
    screen.print_facts(
        [
            ("lengths", f"{lengths.samples} requests, mean {lengths.mean:.1f}, "
             f"p99 {lengths.quantile(0.99)}, longest {lengths.longest}"),
            ("machine", where.title + (" (modelled)" if where.modelled else "")),
            ("choice", f"{best.mechanism}, capacity {best.capacity}"),
        ]
    )  # fmt: skip
    screen.print_table(
        "Best capacity of each mechanism",
        ["mechanism", "capacity", f"expected {unit}", f"p99 {unit}", "overflow", "buffer bytes"],
        (
            [
                one.mechanism,
                str(one.capacity),
                f"{one.expected:.1f}",
                f"{one.tail:.1f}",
                f"{one.overflow:.1%}",
                str(one.memory_bytes),
            ]
            for one in sorted(each, key=lambda one: one.cost)
        ),
    )


@app.command()
@finite_numbers
def measure(
    out: Annotated[Path, typer.Option("-o", "--out", help="Where to write the machine file.")],
    inputs: Annotated[
        int,
        typer.Option(
            "--inputs",
            min=1024,
            max=_MOST,
            help="Measure with N input elements, and with other sizes.",
        ),
    ] = 1 << 20,
    gpu: GpuOption = 0,
) -> None:
    """Measure every mechanism on a GPU and write the machine file that `estimate` reads."""
    outputs.check_output(out, Machine)
    try:
        from eclip.varout.cuda.measure import measure_machine
    except ModuleNotFoundError as error:
        raise DeviceError(f"the package {error.name} is missing; see `eclip doctor`") from None
    with screen.progress_bar("measuring mechanisms") as progress:
        machine = measure_machine(gpu, inputs, progress=progress.part_or_end)
    if trouble := outputs.save_or_rescue(machine, out):
        raise trouble
    screen.out.print(f"Machine: {out}")


@app.command()
@finite_numbers
def annotate(
    file: Annotated[Path, typer.Argument(metavar="PROFILE", help="A measured profile.")],
    lengths: Annotated[
        Path, typer.Option("--lengths", help="A lengths file, or text with one length a line.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where to write the profile.")],
    mechanism: Annotated[str, typer.Option("--mechanism", help="The stage's mechanism.")] = "swap",
    capacity: Annotated[
        int, typer.Option("--capacity", min=1, max=_MOST, help="Words that the stage has room for.")
    ] = 1,
    profiled_length: Annotated[
        int | None,
        typer.Option(
            "--profiled-length",
            min=0,
            max=_MOST,
            help="The stage's length while it was profiled; default: the mean.",
        ),
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            "--kernels",
            help="Positions of the stage's kernels, like 4,5,9; default: found by eclip.",
        ),
    ] = None,
    machine: MachineOption = "h200",
) -> None:
    """Add the lengths of a stage to a profile, with expected and p99 times."""
    if mechanism not in [one.value for one in CHOICES]:
        raise unknown_name("mechanism", mechanism, [one.value for one in CHOICES])
    places = None if kernels is None else _positions(kernels)
    outputs.check_output(out, Profile)
    seen = _read_lengths(lengths)
    profile = profiles.annotate(
        store.load(file, Profile),
        seen,
        find_machine(machine),
        Mechanism(mechanism),
        capacity,
        round(seen.mean) if profiled_length is None else profiled_length,
        places,
    )
    store.save(profile, out)
    at_tail = profile.at_tail()
    screen.print_table(
        f"{profile.model} with its lengths",
        ["units", "expected ms", "p99 ms"],
        (
            [str(size), f"{expected / 1e6:.3f}", f"{tail / 1e6:.3f}"]
            for size, expected, tail in zip(
                profile.sizes, profile.request_ns, at_tail.request_ns, strict=True
            )
        ),
    )


def find_machine(name: str) -> Machine:
    """A built-in machine by name, or one from a file."""
    if name in store.builtin_names(Machine) or not ("/" in name or name.endswith(".json")):
        return store.load_builtin(name, Machine)
    return store.load(Path(name), Machine)


def _read_lengths(file: Path) -> Lengths:
    if store.kind_at(file) is not None:
        return store.load(file, Lengths)
    try:
        lines = file.read_text().split()
        sample = [int(line) for line in lines]
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from None
    except ValueError:
        raise UsageError(
            f"{file} is no lengths file; as text, write one whole number a line"
        ) from None
    if not sample or min(sample) < 0 or max(sample) > _MOST:
        raise UsageError(f"{file} needs at least one length, none below 0 or above {_MOST}")
    return lengths_of(sample, str(file.name))


def _positions(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--kernels {text!r} is no list of positions; write whole numbers, like 4,5,9"
        ) from None


def _print_growth(curve: growth.Growth) -> None:
    mechanisms = list(curve.points[0].interval)
    columns = [curve.percent(name) for name in mechanisms]
    step = max(1, (len(curve.points) - 1) // (_ROWS - 1))
    note = " (modelled)" if curve.modelled else ""
    best = {point.best for point in curve.points}
    never_best = [name for name in mechanisms if name not in best]
    screen.print_table(
        f"{curve.title}{note}, allocated for A = {curve.allocated_ratio:g}: longer than exact",
        ["A", f"exact {curve.unit}", *mechanisms],
        (
            [
                f"{curve.points[index].ratio:.4g}",
                f"{curve.points[index].exact:.0f}",
                *(
                    page.percent(column[index]) + ("*" if name == curve.points[index].best else " ")
                    for name, column in zip(mechanisms, columns, strict=True)
                ),
            ]
            for index in range(0, len(curve.points), step)
        ),
        optional=[f"exact {curve.unit}", *reversed(never_best)],
    )
    screen.out.print("* shortest of those that can serve the length\n")
