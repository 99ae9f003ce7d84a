"""The functions that ``import eclip`` gives.

Mixes, policies and files may be given as strings or paths. Heavy packages (numba, torch) are
imported when a function needs them, so that ``import eclip`` takes no time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from eclip.core.made import made_now
from eclip.core.mix import Mix
from eclip.core.plan import Plan
from eclip.core.runlog import RunLog
from eclip.errors import DeviceError, check_number, check_whole
from eclip.files import store
from eclip.progress import Progress, shown

if TYPE_CHECKING:
    from eclip.contest.colocate import Colocation
    from eclip.contest.contest import CompareOptions
    from eclip.contest.outcome import Outcome
    from eclip.core.calibration import Calibration
    from eclip.core.model_key import ModelKey
    from eclip.core.topology import Topology
    from eclip.planner.case import Case
    from eclip.planner.policies import PolicyOptions
    from eclip.planner.search.objective import Objective
    from eclip.reports.write import Reportable
    from eclip.server.config import ServingConfig
    from eclip.server.supervisor.running import RunningServer

    AnyMix = str | Mix | Sequence[str | ModelKey] | Case

DEFAULT_SEARCH_SECONDS = 20.0
DEFAULT_RUN_SECONDS = 2.0
_TRACE_MS = 20.0


def case(
    mix: str | Mix | Sequence[str | ModelKey],
    topology: str | Topology = "h200",
    *,
    calibration: str | Path | Calibration | None = None,
    profiles: str | Path | Iterable[str | Path] = (),
    tail: bool = False,
    usual_kernels: bool = False,
) -> Case:
    """A mix with its device and profiles, for functions that need more than the mix.

    ``profiles`` are folders of profiles of your own models. ``calibration`` is a file with the
    simulator's constants. ``tail`` plans variable-output kernels with the times of long outputs.
    ``usual_kernels`` keeps a search from choosing kernels for fewer units::

        served = eclip.case("bert:8,my.package:factory:4", profiles="mine")
        plan = eclip.plan(served, policy="search")
    """
    from eclip.planner.case import make_case

    folders = [profiles] if isinstance(profiles, str | Path) else profiles
    return make_case(mix, topology, calibration, folders, tail=tail, usual_kernels=usual_kernels)


def plan(
    mix: AnyMix,
    policy: str = "eclip",
    *,
    objective: str | Objective | None = None,
    seconds: float | None = None,
    batches: int | None = None,
    seed: int | None = None,
    options: PolicyOptions | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide which lane every kernel of a mix takes.

    ``policy`` is one of shared, priority, timeslice, mps, mps-model, model, kernel, eclip, search;
    for mixes with services also yield (also for mixes that have floors only), move,
    priority-segments, launches-16-8, launches-4-2 and launches-1-1. ``objective``, ``seconds``
    (default 20), ``batches`` and ``seed`` are for search. The default objective is throughput, or
    slo for a mix with services. ``options`` are used for all options that are not given here. A
    plan that cannot keep a bound or floor raises PlanningError::

        plan = eclip.plan("albert:8,vgg19:8", policy="search", objective="energy", seconds=10)
    """
    from eclip.contest.confirm.plans import make_kept_plan, policy_options

    asked = _case(mix)
    chosen = policy_options(
        objective,
        mix=asked.mix,
        seconds=seconds,
        batches=batches,
        seed=seed,
        base=options,
    )
    with shown(progress, f"planning {asked.mix.name}") as progress:
        options = dataclasses.replace(chosen, progress=progress)
        return make_kept_plan(asked, policy, options)


def search(
    mix: AnyMix,
    objective: str | Objective | None = None,
    *,
    seconds: float = DEFAULT_SEARCH_SECONDS,
    batches: int | None = None,
    seed: int = 0,
    device: str = "sim",
    verify: int = 3,
    refine: float = 0.0,
    earlier: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Search for a plan by simulation and try the best ``verify`` plans on a device.

    With ``refine`` above 0 the search continues on the device for ``refine`` seconds. ``earlier``
    is a file of observations from an earlier search. The plan's ``evidence`` has all trials::

        plan = eclip.search("paper/3", "energy", seconds=10, device="cuda", verify=3, refine=12)
    """
    from eclip.contest.confirm.bounds import search_services
    from eclip.contest.confirm.explore import check_refinement
    from eclip.contest.confirm.finals import search_and_confirm
    from eclip.contest.confirm.plans import check_kept, make_verification, policy_options
    from eclip.devices import open_device
    from eclip.rig.rig import Rig

    asked = _case(mix)
    check_whole("verify", verify, 1)
    check_number("refine", refine)
    options = policy_options(objective, mix=asked.mix, seconds=seconds, batches=batches, seed=seed)
    with (
        shown(progress, f"planning {asked.mix.name}") as progress,
        Rig(
            asked, open_device(device, asked.topology, asked.calibration, Progress(progress))
        ) as rig,
    ):
        how = make_verification(rig, verify, refine, earlier)
        if options.objective.kind == "slo":
            check_refinement(refine, options.objective, rates=True)
            return check_kept(search_services(rig, options, verify, progress), progress)
        return search_and_confirm(rig, options, how, progress)


def run(
    plan: Plan | str | Path,
    device: str = "sim",
    *,
    seconds: float = DEFAULT_RUN_SECONDS,
    warmup: float = 0.1,
    trace_ms: float | None = None,
    seed: int = 0,
    arrivals: str | Path | None = None,
    case: Case | None = None,
    command: str = "eclip.run(…)",
    progress: Progress | None = None,
) -> RunLog:
    """Run a plan, or a plan's file, and return the run log.

    ``device`` is sim, cuda, hip, or cuda:1 for the second GPU. ``arrivals`` is the shape of
    arrivals at the mix's rates (poisson, bursts, azure-code, azure-conv), or a CSV
    ``time_s,worker`` that replaces them; workers that the CSV does not name are idle, except
    background. Kernels of the first ``trace_ms`` (default 20) are recorded. ``command`` is kept in
    the log as the command that made it::

        log = eclip.run(plan, device="cuda", seconds=3)
        print(eclip.measure(log).stp)
    """
    from eclip.core.device import Window
    from eclip.core.load import load_of_csv, load_of_mix
    from eclip.core.shapes import shape_of
    from eclip.devices import open_device
    from eclip.planner.case import case_of
    from eclip.rig.rig import Rig

    plan = plan if isinstance(plan, Plan) else store.load(plan, Plan)
    asked = case or case_of(plan)
    check_whole("seed", seed)
    window = Window(
        seconds=seconds,
        warmup_seconds=warmup,
        trace_ms=min(_TRACE_MS, 1000 * seconds) if trace_ms is None else trace_ms,
    )
    shape = None if arrivals is None else shape_of(arrivals)
    if arrivals is None or shape is not None:
        load = load_of_mix(plan.mix, window.seconds, window.warmup_seconds, seed, shape)
    else:
        load = load_of_csv(Path(arrivals), plan.mix, seconds, seed)
    profiles = asked.profiles_of(plan.mix)  # before a device is opened, which would stay open
    with (
        shown(progress, f"running {plan.policy} on {plan.mix.name}") as progress,
        Rig(
            asked,
            open_device(device, plan.topology, asked.calibration, progress),
            extra=profiles,
        ) as rig,
    ):
        progress.phase("measuring each worker alone")
        rig.measure_alone()
        progress.phase(f"running {plan.policy}")
        log = rig.run_once(plan, load, window)
        return msgspec.structs.replace(log, made=made_now(command))


def compare(
    mix: AnyMix,
    policies: Sequence[str] | str | None = None,
    *,
    device: str = "sim",
    objective: str | Sequence[str] | None = None,
    seconds: float = DEFAULT_RUN_SECONDS,
    repeats: int = 1,
    load: float | str | Path | None = None,
    plans: Mapping[str, Plan | str | Path] | None = None,
    options: CompareOptions | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Run a mix under several policies in turns, with identical arrivals, and compare them.

    Without ``policies`` all policies that the device can run take part. ``objective`` is the goal
    of swept and searched policies: throughput, energy, slo, or several of them; the default is
    throughput, or slo for a mix with services. ``load`` is a part of the closed-loop rates under
    plain streams (0.6), the shape of arrivals at the mix's rates (bursts, azure-code, azure-conv),
    or a CSV of arrivals. ``plans`` take part, too, under their names. If the device fails midway,
    the outcome holds the results so far, and ``failure`` has the reason::

        outcome = eclip.compare("paper/3", ["shared", "masks", "search"], repeats=3)
        eclip.report(outcome, "report.html")
    """
    from eclip.contest.compare import compare_policies

    asked = _case(mix)
    with shown(progress, f"comparing {asked.mix.name}") as progress:
        return compare_policies(
            asked,
            policies,
            device=device,
            objective=objective,
            seconds=seconds,
            repeats=repeats,
            load=load,
            plans=plans or {},
            options=options,
            progress=progress,
        )


def colocate(
    models: Mapping[str, Any],
    policy: str = "eclip",
    *,
    tiers: Mapping[str, str] | None = None,
    plan: Plan | str | Path | None = None,
    profiles: str | Path | Iterable[str | Path] = (),
    objective: str | Objective | None = None,
    seconds: float = DEFAULT_SEARCH_SECONDS,
    device: str = "cuda",
    progress: Progress | None = None,
) -> Colocation:
    """Run several PyTorch models, each ``name: (module, inputs)``, on one GPU.

    The models follow ``plan`` if given, otherwise a plan by the policy. ``tiers`` names services
    with a bound and background, written as after the @ of a mix. Profiles come from the folders;
    missing profiles are measured now. Set ``CUDA_DEVICE_MAX_CONNECTIONS=32`` in the environment
    first::

        models = {"bert": (bert, [tokens]), "vgg": (vgg, [images])}
        tiers = {"bert": "300rps/5ms", "vgg": "background"}
        with eclip.colocate(models, policy="yield", tiers=tiers) as gpu:
            hidden = gpu["bert"](tokens)  # from other threads at once, too
    """
    from eclip.contest.confirm.plans import policy_options
    from eclip.devices import open_device

    try:
        from eclip.contest.colocate import Colocation
    except ModuleNotFoundError as error:
        raise DeviceError(f"the package {error.name} is missing; see `eclip doctor`") from None
    options = policy_options(objective, seconds=seconds, progress=progress)
    given = store.load(plan, Plan) if isinstance(plan, str | Path) else plan
    return Colocation(
        models,
        open_device(device),  # last: the colocation closes the device, also if it fails
        policy=policy,
        options=options,
        plan=given,
        tiers=tiers,
        profiles=[profiles] if isinstance(profiles, str | Path) else profiles,
    )


def serve(
    source: str | Path | Mapping[str, Any] | ServingConfig,
    *,
    device: str | None = None,
    http_port: int | None = None,
    grpc_port: int | None = None,
) -> RunningServer:
    """Serve models over HTTP and gRPC until the server is closed.

    ``source`` is a TOML file, a dictionary with the same keys, or a mix, which is simulated. The
    other parameters replace settings of ``source``. Port 0 takes a free port::

        with eclip.serve("paper/3", http_port=0, grpc_port=0) as server:
            print(server.url)
    """
    from eclip.server.config import ServingConfig, make_config, read_config, with_settings
    from eclip.server.supervisor.running import RunningServer

    if isinstance(source, ServingConfig):
        config = source
    elif isinstance(source, Mapping):
        config = make_config(source, "the configuration")
    else:
        config = read_config(source)
    given = {"device": device, "http_port": http_port, "grpc_port": grpc_port}
    return RunningServer(with_settings(config, given))


def report(
    given: Reportable | Sequence[Reportable],
    path: str | Path = "report.html",
    *,
    trace: str | Path | None = None,
    case: Case | None = None,
) -> Path:
    """Draw outcomes, run logs, plans and comparisons, or their files, as one HTML file that works
    offline.

    Results with the same mix, device and load are compared in one chapter. ``trace`` is a file for
    a Chrome trace of the last run log, which opens in Perfetto. Names of kernels come from the
    case's profiles::

        eclip.report([log, "plan.json"], "report.html")
    """
    from eclip.reports.write import write_report

    return write_report(given, Path(path), None if trace is None else Path(trace), case)


def request(worker: int = -1) -> None:
    """Mark, for ``eclip exec``, that this thread's next launch begins a request.

    ``worker`` is the worker's number in the plan, or -1 to let libeclip find out. Outside of
    ``eclip exec`` this function does nothing::

        eclip.request()
        outputs = model(inputs)
    """
    from eclip.programs.transparent import mark_request

    mark_request(worker)


def _case(mix: AnyMix) -> Case:
    from eclip.planner.case import Case, make_case

    return mix if isinstance(mix, Case) else make_case(mix)
