"""``eclip exec``: runs an unmodified command under a plan, or as a service or background."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from eclip.cli import screen
from eclip.cli.options import (
    CalibrationOption,
    JsonOption,
    ProfilesOption,
    WorkersOption,
    given_options,
)
from eclip.core.plan import Plan
from eclip.core.program import lower
from eclip.errors import UsageError
from eclip.files import store
from eclip.planner.case import case_of
from eclip.programs.capped import change_cap, sharing_here
from eclip.programs.replicas import Patience, Replication
from eclip.programs.table import plan_table, workers_by
from eclip.programs.transparent import (
    AMD,
    Cap,
    Tier,
    Vendor,
    background_tier,
    run_under,
    service_tier,
    vendor_here,
    vendor_of,
)

_FOR_PLANS = ("--workers", "--calibration", "--profiles")


def exec(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help="The command and its arguments."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--plan", help="Send kernels to the lanes of this plan.")
    ] = None,
    service: Annotated[
        bool, typer.Option("--service", help="Background of other processes yields to the command.")
    ] = False,
    background: Annotated[
        bool,
        typer.Option("--background", help="The command yields to services of other processes."),
    ] = False,
    bound: Annotated[
        str | None,
        typer.Option(
            metavar="1.1x|5ms",
            help="With --service: the largest allowed p99, in ms or as times the p99 alone.",
        ),
    ] = None,
    floor: Annotated[
        float | None,
        typer.Option(
            help="With --background: the command yields only while it gets more than this part of "
            "its rate alone (0.2 is a fifth)."
        ),
    ] = None,
    sms: Annotated[
        int | None,
        typer.Option(
            "--sms",
            metavar="N",
            help="Keep each process of the command on N SMs, apart from other capped processes.",
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(metavar="0.4", help="Like --sms, as a part of the GPU's SMs."),
    ] = None,
    pid: Annotated[
        int | None,
        typer.Option(
            metavar="P",
            help="With --sms, and without a command: change the cap of process P while it runs.",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="Run N processes of the command. {index} in its words is the process's number.",
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="With --replicas: start a replica that fails again, at most N times in a row "
            "[default: 5].",
        ),
    ] = None,
    mps: Annotated[
        bool,
        typer.Option("--mps", help="With --replicas: let them share an MPS server of their own."),
    ] = False,
    workers: WorkersOption = "stream",
    stats: Annotated[
        bool,
        typer.Option("--stats", help="At the end, print counts of planned and other launches."),
    ] = False,
    gpu: Annotated[
        int | None,
        typer.Option(
            "--gpu",
            min=0,
            help="The GPU, counted from 0 [default: with a plan 0, else the first that is used].",
        ),
    ] = None,
    calibration: CalibrationOption = None,
    profiles: ProfilesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run an unmodified command with its kernels on the lanes of a plan, or without a plan as a
    service or background that shares its GPU with other processes, or on some of its SMs."""
    cap = Cap(sms, share) if sms is not None or share is not None else None
    tier = _tier(service, background, bound, floor)
    if pid is not None:
        if command or file or tier or share is not None or replicas is not None:
            raise UsageError("--pid changes the cap of a running process: give --sms and no more")
        return _change(pid, cap, as_json)
    replication = _replication(replicas, restarts, mps, gpu, file)
    if file is None and tier is None and cap is None and replication is None:
        raise UsageError(
            "say what the command is: --service, --background, --sms N, --replicas N, or "
            "--plan FILE"
        )
    if file is not None and cap is not None:
        raise UsageError("a plan has lanes of its own: leave out --plan, or --sms and --share")
    if file is None and stats:
        raise UsageError("--stats needs --plan; without a plan, `eclip top` shows the command")
    for option in given_options(context):
        if file is None and option in _FOR_PLANS:
            raise UsageError(f"{option} needs --plan")
    table, vendor = None, vendor_here()
    if file is not None:
        table, vendor = _table(file, workers, calibration, profiles or [])
    chosen = 0 if gpu is None and table else gpu
    if cap is not None and not mps:
        screen.tell(sharing_here())
    outcome = run_under(
        command or [], table, chosen, tier=tier, vendor=vendor, run=replication, cap=cap
    )
    if as_json:
        screen.print_json({"code": outcome.code, "processes": outcome.counters})
        sys.exit(outcome.code)
    if stats and outcome.counters:
        _print_counters(outcome.counters)
    if table and not outcome.placed and os.environ.get("ECLIP_DISABLE") is None:
        screen.warn(_nothing_placed(outcome.launches))
    sys.exit(outcome.code)


def _change(pid: int, cap: Cap | None, as_json: bool) -> None:
    if cap is None or cap.sms is None:
        raise UsageError(f"say how many SMs process {pid} is to have: --sms N")
    changes = change_cap(pid, cap.sms)
    if as_json:
        screen.print_json(changes)
        return
    for change in changes:
        screen.out.print(change.line)


def _replication(
    replicas: int | None, restarts: int | None, mps: bool, gpu: int | None, plan: Path | None
) -> Replication | None:
    if replicas is None:
        if mps or restarts is not None:
            raise UsageError(f"{'--mps' if mps else '--restarts'} needs --replicas N")
        return None
    if plan is not None:
        raise UsageError(
            "a plan's lanes belong to a single process; leave out --plan, or --replicas"
        )
    if mps and vendor_here() is AMD:
        raise UsageError("MPS is NVIDIA's, and this host has AMD GPUs; leave out --mps")
    patience = Patience() if restarts is None else Patience(restarts=restarts)
    return Replication(replicas, screen.tell, patience, (gpu or 0) if mps else None)


def _tier(service: bool, background: bool, bound: str | None, floor: float | None) -> Tier | None:
    if service and background:
        raise UsageError("a command is a service or background, not both")
    if bound is not None and not service:
        raise UsageError("--bound needs --service")
    if floor is not None and not background:
        raise UsageError("--floor needs --background")
    if service:
        return service_tier(bound)
    return background_tier(floor) if background else None


def _table(
    file: Path, workers: str, calibration: Path | None, profiles: list[Path]
) -> tuple[bytes, Vendor]:
    by = workers_by(workers)
    plan = store.load(file, Plan)
    if plan.modelled:
        raise UsageError(
            f"{file} was made from modelled profiles, which have no real kernels; measure the "
            f"command with `eclip record` and plan again"
        )
    if plan.models != plan.mix.as_asked().models:
        raise UsageError(
            f"{file} is for kernels chosen for fewer {plan.topology.unit_name}s, and a command "
            f"launches its usual kernels; plan again with --usual-kernels"
        )
    case = case_of(plan, calibration, profiles)
    traces = [profile.trace for profile in case.profiles]
    return plan_table(lower(plan, traces), traces, by), vendor_of(plan.topology)


def _nothing_placed(launches: int) -> str:
    if not launches:
        return (
            "nothing was placed: libeclip saw no kernel launch in the command; does it use a "
            "GPU of the plan's kind?"
        )
    return (
        f"nothing was placed: libeclip saw {launches} launches, and none is of the plan's kernels; "
        f"record the command again (`eclip record`) and plan with the new profiles"
    )


def _print_counters(processes: dict[int, dict[str, int]]) -> None:
    screen.print_table(
        "Launches",
        ["process", "launches", "planned", "redirected", "switches", "barriers", "skipped"],
        (
            [
                str(process),
                str(counts["launches"]),
                _share(counts["planned"], counts["launches"]),
                _share(counts["redirected"], counts["launches"]),
                str(counts["switches"]),
                str(counts["barriers"]),
                str(counts["skipped"]),
            ]
            for process, counts in processes.items()
        ),
    )
    if any(counts["graphs"] or counts["foreign_graphs"] for counts in processes.values()):
        screen.print_table(
            "Graphs",
            [
                "process",
                "planned",
                "foreign",
                "kernels",
                "of them planned",
                "launches",
                "updates",
                "anew",
            ],
            (
                [
                    str(process),
                    str(counts["graphs"]),
                    str(counts["foreign_graphs"]),
                    str(counts["graph_kernels"]),
                    _share(counts["graph_planned"], counts["graph_kernels"]),
                    str(counts["graph_launches"]),
                    str(counts["updates"]),
                    str(counts["reinstantiations"]),
                ]
                for process, counts in processes.items()
            ),
        )
    for process, counts in processes.items():
        if counts["contended"]:
            screen.warn(
                f"process {process}: {counts['contended']} planned launches ran on the whole "
                f"device, because another stream used the worker's lane or it was too small"
            )


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.0%})" if whole else "0"
