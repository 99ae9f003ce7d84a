"""Windows: some GPUs of a fleet for a while, simulated request by request.

Requests of a service with several instances are drawn together and routed by the router's own
choice; requests to other GPUs are not followed. The coarse simulation runs the requests of a GPU.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eclip.fleet.place import routing
from eclip.fleet.place.coarse import Floats, run_coarsely
from eclip.fleet.place.problem import Bin, Packing, PackingProblem
from eclip.jit import compiled, compiled_with

_REQUESTS = 4000  # of one GPU's window, about
_STALE_NS = 20e6  # how old the router's view may be

_choose = compiled(routing.choose)  # the router's own code


@compiled_with(routing.__file__)
def _route(
    arrivals: Floats,
    shares: Floats,
    request_ns: float,
    bound_ns: float,
    draws: Floats,
    stale_ns: float,
) -> npt.NDArray[np.int64]:
    picked = np.zeros(len(arrivals), dtype=np.int64)
    backlog = np.zeros(len(shares))  # work sent and not done, at full speed
    slack = np.zeros(len(shares))
    before, report = 0.0, 0.0
    for number in range(len(arrivals)):
        now = arrivals[number]
        for instance in range(len(shares)):
            backlog[instance] = max(0.0, backlog[instance] - (now - before))
        before = now
        if now >= report:
            report = now + stale_ns
            for instance in range(len(shares)):
                slack[instance] = bound_ns - backlog[instance] - request_ns
        chosen = _choose(slack, shares, draws[number, 0], draws[number, 1])
        picked[number] = chosen
        backlog[chosen] += request_ns
        slack[chosen] -= request_ns  # the router counts requests since the last report
    return picked


def window(
    problem: PackingProblem, packing: Packing, requests: float, random: np.random.Generator
) -> tuple[int, int]:
    """Some GPUs, request by request: how many requests were sent there, and how many answered in
    time. Services with several instances are routed; the router's view is 20 ms old."""
    offered = within = 0
    homes: dict[int, list[Bin]] = {}
    for one in packing.bins:
        for service in one.held:
            homes.setdefault(service, []).append(one)
    order = random.permutation(len(packing.bins))
    for index in order:
        if offered >= requests:
            break
        one = packing.bins[int(index)]
        sent, answered = _window_of(problem, one, homes, random)
        offered += sent
        within += answered
    return offered, within


def _window_of(
    problem: PackingProblem, one: Bin, homes: dict[int, list[Bin]], random: np.random.Generator
) -> tuple[int, int]:
    device = problem.scorer.kinds[one.kind]
    services = sorted(one.held)
    members = [problem.offered_member(service, one.held[service]) for service in services]
    seconds = _REQUESTS / sum(member.rate_rps for member in members)
    arrivals = []
    for service, member in zip(services, members, strict=True):
        count = len(homes[service])
        number = random.poisson(member.rate_rps * count * seconds)
        times = np.sort(random.uniform(0, seconds * 1e9, number))
        if count > 1:
            alone_ns = device.request_ns(member.model)
            picked = route(times, np.ones(count), alone_ns, member.bound_ms * 1e6, random)
            times = times[picked == 0]
        arrivals.append(times)
    first = np.cumsum([0, *map(len, arrivals)])
    request_ns = np.array([device.request_ns(member.model) for member in members])
    bound_ns = np.array([member.bound_ms * 1e6 for member in members])
    if first[-1] == 0:
        return 0, 0
    policy = problem.scorer.policy_of(one.kind, problem.members(one.held))
    took = run_coarsely(
        np.concatenate(arrivals),
        first,
        request_ns,
        bound_ns,
        *problem.scorer.beside(one.kind, tuple(members)),
        policy == "yield",
        np.full(len(members), np.inf),
    )
    late = np.repeat(bound_ns, np.diff(first))
    return int(first[-1]), int(np.count_nonzero(took <= late))


def route(
    arrivals: Floats,
    shares: Floats,
    request_ns: float,
    bound_ns: float,
    random: np.random.Generator,
    stale_ns: float = _STALE_NS,
) -> npt.NDArray[np.int64]:
    """Which instance every request goes to: by slack as it was at the last report."""
    draws = random.random((len(arrivals), 2))
    return _route(arrivals, shares, request_ns, bound_ns, draws, stale_ns)
