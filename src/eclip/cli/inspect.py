"""``eclip inspect``: shows any file that eclip wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from eclip.cli import explain, results, screen
from eclip.cli.fleet import print_placement
from eclip.cli.options import JsonOption
from eclip.cli.screen import measured
from eclip.core.calibration import Calibration
from eclip.core.fingerprint import Fingerprint
from eclip.core.footprint import Footprint
from eclip.core.lengths import Lengths
from eclip.core.measures import measure
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.core.runlog import RunLog
from eclip.core.topology import Topology
from eclip.core.trace import Trace
from eclip.files import store
from eclip.files.comparison import Comparison
from eclip.files.machine import Machine
from eclip.files.observations import Observations
from eclip.files.store import Artefact
from eclip.reports.exports import Export, read_export

_ROWS = 12  # of the longest kernels


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Any file that eclip wrote.")],
    as_json: JsonOption = False,
) -> None:
    """Show the contents of any file that eclip wrote."""
    if store.holds_results(file):
        results.results(file, as_json=as_json)
    elif store.kind_at(file) is None and (export := read_export(file)) is not None:
        _show_export(export, as_json)
    else:
        show(store.load(file), as_json)


def show(artefact: Artefact, as_json: bool) -> None:
    if as_json:
        screen.print_json(store.to_data(artefact))
    else:
        _SHOWN_BY[type(artefact)](artefact)


def _show_export(export: Export, as_json: bool) -> None:
    if export.placement is not None and as_json:
        screen.print_json(export.placement)
    elif export.placement is not None:
        print_placement(export.placement)
    elif as_json:
        screen.print_json({"kind": export.kind, **export.facts})
    else:
        screen.print_facts([("file", export.kind), *export.facts.items()])


def _show_plan(plan: Plan) -> None:
    explain.print_plan(plan)
    _show_fingerprint(plan.fingerprint)


def _show_topology(topology: Topology) -> None:
    unit = topology.unit_name
    screen.print_facts(
        [
            ("device", topology.title),
            ("units", f"{topology.units} {unit}s, compute {topology.compute}"),
            ("slices", " ".join(map(str, topology.slice_units))),
            ("lane sizes", " ".join(map(str, topology.lane_sizes))),
            ("hardware queues", str(topology.hardware_queues)),
            (
                "memory",
                f"{topology.memory_bytes / 2**30:.1f} GiB; a context takes "
                f"{topology.context_bytes >> 20} MiB, a lane {topology.lane_bytes >> 20} MiB",
            ),
            ("source", topology.source),
        ]
    )


def _show_trace(trace: Trace) -> None:
    screen.print_facts(
        [
            ("trace", str(trace.model)),
            ("kernels", str(len(trace.kernels))),
            ("inputs", ", ".join(trace.inputs) or "not recorded"),
            ("digest", trace.digest[:16]),
        ]
    )
    screen.print_table(
        "First kernels",
        ["kernel", "grid", "block", "shared bytes", "cluster"],
        (
            [
                kernel.name,
                "x".join(map(str, kernel.grid)),
                "x".join(map(str, kernel.block)),
                str(kernel.shared_bytes),
                str(kernel.cluster),
            ]
            for kernel in trace.kernels[:_ROWS]
        ),
    )


def _show_profile(profile: Profile) -> None:
    kernels = profile.trace.kernels
    screen.print_facts(
        [
            ("profile", str(profile.model)),
            ("data", "modelled" if profile.modelled else "measured"),
            ("source", profile.source),
            ("kernels", f"{len(kernels)}, trace {profile.trace.digest[:16]}"),
            ("inputs", ", ".join(profile.trace.inputs) or "not recorded"),
            ("memory", _footprint(profile.footprint)),
            ("traffic", f"{sum(profile.dram_bytes) / 1e6:.1f} MB of DRAM traffic per request"),
        ]
    )
    screen.print_table(
        "Request by size",
        ["units", "request ms", "busy ms", "gaps ms", "slower than all units"],
        (
            [
                str(size),
                f"{profile.request_ns[index] / 1e6:.3f}",
                f"{sum(row[index] for row in profile.busy_ns) / 1e6:.3f}",
                f"{sum(row[index] for row in profile.gap_ns) / 1e6:.3f}",
                f"{profile.request_ns[index] / profile.request_ns[-1]:.2f}",
            ]
            for index, size in enumerate(profile.sizes)
        ),
    )
    longest = sorted(range(len(kernels)), key=lambda k: -profile.busy_ns[k][-1])[:_ROWS]
    screen.print_table(
        "Longest kernels",
        ["kernel", "position", "blocks", f"µs at {profile.sizes[0]}", f"µs at {profile.sizes[-1]}"],
        (
            [
                kernels[k].name,
                str(k),
                str(kernels[k].blocks),
                f"{profile.busy_ns[k][0] / 1e3:.1f}",
                f"{profile.busy_ns[k][-1] / 1e3:.1f}",
            ]
            for k in longest
        ),
    )
    _show_fingerprint(profile.fingerprint)


def _footprint(footprint: Footprint | None) -> str:
    if footprint is None:
        return "not known: a recording does not see a program's memory"
    return (
        f"{footprint.total_bytes / 2**20:.0f} MiB: weights {footprint.weights_bytes / 2**20:.0f}, "
        f"activations {footprint.activations_bytes / 2**20:.0f}, "
        f"workspaces {footprint.workspaces_bytes / 2**20:.0f}, "
        f"executables {footprint.executables_bytes / 2**20:.0f}; "
        f"{'modelled' if footprint.modelled else 'measured'}"
    )


def _show_calibration(calibration: Calibration) -> None:
    screen.print_facts(
        [
            ("calibration", "modelled" if calibration.modelled else "measured"),
            ("source", calibration.source),
        ]
    )
    for part in (
        calibration.costs,
        calibration.compute,
        calibration.interference,
        calibration.memory,
        calibration.power,
    ):
        screen.print_table(
            type(part).__name__,
            ["constant", "value"],
            ([name, f"{value:g}"] for name, value in msgspec.structs.asdict(part).items()),
        )
    _show_fingerprint(calibration.fingerprint)


def _show_lengths(lengths: Lengths) -> None:
    screen.print_facts(
        [
            ("lengths", f"{lengths.samples} requests, {len(lengths.values)} distinct"),
            ("source", lengths.source or "not recorded"),
            ("mean", f"{lengths.mean:.1f}"),
            *(
                (f"p{share * 100:g}", str(lengths.quantile(share)))
                for share in (0.5, 0.9, 0.99, 0.999)
            ),
            ("longest", str(lengths.longest)),
        ]
    )


def _show_machine(machine: Machine) -> None:
    screen.print_facts(
        [
            ("machine", machine.title),
            ("data", "modelled" if machine.modelled else "measured"),
            ("source", machine.source),
        ]
    )
    screen.print_table(
        f"Constants ({machine.unit})",
        ["constant", "value"],
        (
            [name, "unbounded" if value is None else f"{value:g}"]
            for name, value in msgspec.structs.asdict(machine.parameters).items()
        ),
    )
    if machine.fingerprint is not None:
        _show_fingerprint(machine.fingerprint)


def _show_observations(observations: Observations) -> None:
    screen.print_facts(
        [
            ("observations", f"{len(observations.runs)} runs, from {observations.date}"),
            ("source", observations.source),
        ]
    )
    screen.print_table(
        f"Runs{screen.modelled_note(observations.modelled)}",
        ["mix", "kind", "STP", "power W", "seconds"],
        (
            [
                run.mix,
                run.kind,
                f"{sum(run.ratios):.3f}",
                f"{run.power_w:.0f}",
                f"{run.seconds:g}",
            ]
            for run in observations.runs
        ),
        names=2,
    )
    _show_fingerprint(observations.fingerprint)


def _show_run(log: RunLog) -> None:
    screen.print_facts(
        [
            ("run of", f"{log.plan.policy} on {log.plan.mix.name}"),
            ("device", log.device),
            ("load", f"{log.load}, seed {log.seed}, {log.duration_ns / 1e9:g} s"),
            ("energy", f"{log.energy_uj / 1e6:.2f} J"),
            (
                "records",
                f"{len(log.requests.worker)} requests; {len(log.kernels.worker)} kernels in the "
                f"first {log.kernels.window_ns / 1e6:g} ms"
                + (" of a separate run" if log.kernels.own_run else ""),
            ),
            ("unfinished", str(sum(log.unfinished))),
            *(("warning", warning) for warning in log.warnings),
        ]
    )
    measured.print_measures([measure(log)])
    screen.print_table(
        "Counters",
        ["worker", "kernels", "barriers", "lane waits", "false waits", "false wait ms"],
        (
            [
                screen.worker_label(worker.name, worker.model),
                str(counters.kernels),
                str(counters.barriers),
                _known(counters.lane_waits),
                _known(counters.false_waits),
                _known(counters.false_wait_ns, 1e6, ".2f"),
            ]
            for worker, counters in zip(log.plan.workers, log.counters, strict=True)
        ),
    )


def _known(value: int | None, scale: float = 1, form: str = ".0f") -> str:
    return "not known" if value is None else f"{value / scale:{form}}"


def _show_fingerprint(fingerprint: Fingerprint) -> None:
    soft = [fingerprint.device, fingerprint.driver and f"driver {fingerprint.driver}"]
    soft += [f"{name} {version}" for name, version in fingerprint.libraries.items()]
    screen.print_facts(
        [
            ("must match", f"{fingerprint.units} units, compute {fingerprint.compute}"),
            ("made with", ", ".join(filter(None, soft)) or "not recorded"),
        ]
    )


_SHOWN_BY: dict[type[Artefact], Callable[[Any], None]] = {
    Topology: _show_topology,
    Trace: _show_trace,
    Profile: _show_profile,
    Calibration: _show_calibration,
    Observations: _show_observations,
    Plan: _show_plan,
    RunLog: _show_run,
    Comparison: lambda comparison: results.print_results([comparison]),
    Lengths: _show_lengths,
    Machine: _show_machine,
}
